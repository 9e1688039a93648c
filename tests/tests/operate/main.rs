//! The operator's interfaces with real tools: curl with client certificates, Prometheus and
//! promtool, a pseudo-terminal, the command line.

mod addresses;
mod api;
mod check;
mod cli;
mod degraded;
mod files;
mod hardship;
mod hogs;
mod metrics;
mod running;
mod terminal;
mod try_out;
