//! What an operator touches, with the real things: curl with client
//! certificates, Prometheus and promtool, a pseudo-terminal, the command line.

mod api;
mod cli;
mod metrics;
mod running;
mod terminal;
