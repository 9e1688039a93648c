//! Privileges apart: a small process of root's (`bosh-dns-xdp attach`) loads, pins and attaches;
//! the server, which reads the network, never calls bpf(2).
//!
//! * [`attacher`]: that process. It opens no socket but the one by which the server asks it.
//! * [`server`]: the server's side.
//! * [`wire`]: what they say to each other, and the hand-over of the maps' descriptors.
//!
//! A connection is one set of programs and maps: whoever comes back, the server or the
//! attacher, begins with a new one, which takes over from the one before as a new server
//! does. Until then the programs of the one before answer, as long as their lease runs: the server
//! renews it by a plain store, whether the attacher lives or not.

pub(super) mod attacher;
pub(super) mod server;
mod wire;
