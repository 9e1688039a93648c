//! Parts that the programs share: files, sockets, certificates, clocks and threads, metrics, logs, HTTP. Their command
//! lines share `dns-command-line`.
//!
//! * [`files`]: reads, stamps, watches and replaces files.
//! * [`foreign`]: texts of other parties, made safe to show.
//! * [`tls`]: certificates that are reloaded while in use.
//! * [`mmsg`]: many datagrams per system call.
//! * [`logs`]: one line per event, levels by tag, changeable at run time.
//! * [`metrics`]: declarations of all families.
//! * [`sandbox`], [`privileges`], [`unix_socket`]: system call filter; capabilities; sockets for local clients.
//! * [`accounts`], [`service_manager`]: users and groups; messages to systemd.
//! * [`http_server`], [`http_client`]: HTTP, bounded in time, size and connections per client.
//! * [`aws_signature`], [`hex()`], [`percent_encoded`]: requests and URLs signed for AWS; bytes as text.
//! * [`backoff`]: pauses after failures.
//! * [`rate`]: limits on how often something may happen.
//! * [`threads`], [`priority`]: threads with their consequence of a panic; background threads.
//! * [`eager`]: futures that are polled where they are created and woken.
//! * [`clock`]: the kernel's clock, and periods in which the process did not run.
//! * [`limits`], [`memory`]: the limit on open files; the allocator's memory.
//! * [`until_ended`]: the signals that end a program.
//! * [`admission`], [`connections`]: fair limits on the work and the connections of clients.

pub mod accounts;
pub mod admission;
pub mod aws_signature;
pub mod backoff;
pub mod clock;
pub mod connections;
pub mod eager;
pub mod files;
pub mod foreign;
mod hex;
pub mod http_client;
pub mod http_server;
pub mod logs;
pub mod metrics;
pub mod mmsg;
pub mod privileges;
mod process;
pub mod rate;
pub mod sandbox;
pub mod service_manager;
pub mod threads;
pub mod tls;
pub mod unix_socket;

pub use hex::{hex, percent_encoded};
pub use process::{limits, memory, priority, until_ended};
