//! Health: the watcher, the tracker, the health server, certificates that rotate.
