//! What an operator touches, with the real things: curl with client
//! certificates, Prometheus and promtool, a pseudo-terminal, the command line.

mod addresses;
mod api;
mod check;
mod cli;
mod degraded;
mod files;
mod hogs;
mod metrics;
mod running;
mod terminal;
mod try_out;
