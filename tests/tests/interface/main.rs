//! The whole server at its interfaces, in private network namespaces: which interfaces it serves and for
//! whom, with and without an attacher of its own, under load and beside containers that come and go.

mod attacher_service;
mod cell;
mod far_clients;
mod flood;
mod gate;
mod gate_rules;
mod gated;
mod overload;
mod real_server;
mod refused;
