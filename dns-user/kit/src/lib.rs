//! Parts that the programs share: files, sockets, certificates, clocks and threads, metrics, logs, HTTP,
//! command lines.
//!
//! * [`files`]: reads and stamps the files named in the configuration.
//! * [`tls`]: certificates that are reloaded while in use.
//! * [`mmsg`]: many datagrams per system call.
//! * [`logs`]: one line per event, levels by tag, changeable at run time.
//! * [`metrics`]: declarations of all families.
//! * [`sandbox`], [`unix_socket`]: system call filter; sockets for local clients.
//! * [`stall`]: streams with a write timeout.
//! * [`threads`], [`priority`]: threads with their consequence of a panic; background threads.
//! * [`clock`], [`limits`]: the kernel's clock; the limit on open files.
//! * [`standstill`]: detects that the process did not run.
//! * [`command_line`]: the commands `man` and `completions`, output, parsing and errors.
//! * [`admission`], [`connections`]: fair limits on the work and the connections of clients.
//! * [`http_server`]: an HTTP server that idle clients cannot block.
//! * [`signals`]: the signals that end a program.

pub mod admission;
pub mod clock;
pub mod command_line;
pub mod connections;
pub mod files;
pub mod http_server;
pub mod limits;
pub mod logs;
pub mod metrics;
pub mod mmsg;
pub mod priority;
pub mod sandbox;
pub mod signals;
pub mod stall;
pub mod standstill;
pub mod threads;
pub mod tls;
pub mod unix_socket;
