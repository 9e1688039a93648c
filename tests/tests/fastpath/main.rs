//! The fast path as a whole, in network namespaces of its own: real packets,
//! real hooks, no userspace server behind it, so that every reply seen here
//! was given by the program.

mod answers;
mod coming_and_going;
mod lab;
mod neighbours;
