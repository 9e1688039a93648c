//! The fast path as a whole, in private network namespaces: real packets, real hooks. No userspace
//! server runs, so that every reply comes from the program; only [`real_server`], [`refused`],
//! [`attacher_service`], [`cell`], [`flood`], [`gate`] and [`overload`] start the whole server.

mod answers;
mod attacher_service;
mod cell;
mod coming_and_going;
mod far_clients;
mod flood;
mod gate;
mod gate_rules;
mod gated;
mod lab;
mod neighbours;
mod outside;
mod overload;
mod races;
mod real_server;
mod refused;
