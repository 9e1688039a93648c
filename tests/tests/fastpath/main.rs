//! The fast path as a whole, in network namespaces of its own: real packets,
//! real hooks. No userspace server is behind it, so that every reply seen here
//! was given by the program; [`real_server`] alone has the whole server.

mod answers;
mod coming_and_going;
mod lab;
mod neighbours;
mod real_server;
mod second_stage;
