//! Promises of the workspace's sources, in one program: separate programs would link the same libraries.

mod dependencies;
mod documents;
mod help;
mod metrics;
mod object;
mod options;
mod rooms;
mod sockets;
mod sources;
mod tls;
mod weight;
