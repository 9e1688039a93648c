//! What the parts of the server stand on: the system's side of files, sockets, certificates,
//! clocks and threads, and the names of metrics and the form of log lines.
//!
//! * [`files`] reads and compares the files that the configuration names.
//! * [`tls`]: certificates that change while they are in use.
//! * [`mmsg`]: many datagrams with one system call.
//! * [`logs`]: one line per event, levels by tag, changeable at run time.
//! * [`metrics`]: every family, declared in one place.
//! * [`sandbox`], [`unix_socket`]: system calls that are given up; sockets for local clients.
//! * [`stall`]: streams whose peer has to read.
//! * [`threads`], [`priority`]: threads, with what a panic in one means; threads in the background.
//! * [`clock`], [`limits`]: the kernel's clock, open files.

pub mod clock;
pub mod files;
pub mod limits;
pub mod logs;
pub mod metrics;
pub mod mmsg;
pub mod priority;
pub mod sandbox;
pub mod stall;
pub mod threads;
pub mod tls;
pub mod unix_socket;
