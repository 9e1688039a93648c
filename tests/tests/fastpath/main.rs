//! The fast path as a whole, in network namespaces of its own: real packets,
//! real hooks. No userspace server is behind it, so that every reply seen here
//! was given by the program; [`real_server`], [`refused`], [`apart`], [`flood`] and
//! [`overload`] alone have the whole server.

mod answers;
mod apart;
mod coming_and_going;
mod far_clients;
mod flood;
mod gate;
mod gate_rules;
mod lab;
mod neighbours;
mod outside;
mod overload;
mod races;
mod real_server;
mod refused;
