//! Operating-system services of the server: files, sockets, certificates, clocks and threads, and
//! common code for metrics and logging.
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

pub mod clock;
pub mod files;
pub mod limits;
pub mod logs;
pub mod metrics;
pub mod mmsg;
pub mod priority;
pub mod sandbox;
pub mod stall;
pub mod standstill;
pub mod threads;
pub mod tls;
pub mod unix_socket;
