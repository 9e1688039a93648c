//! The whole server at its interfaces, in private network namespaces: the choice of interfaces and clients,
//! both ways to run the attacher, load, and containers that come and go.

mod attacher_service;
mod cell;
mod conditions;
mod far_clients;
mod far_replies;
mod flood;
mod gate;
mod gate_rules;
mod gated;
mod later_addresses;
mod overload;
mod real_server;
mod refused;
mod soak;
