//! Providers against real servers: BIND, Knot and etcd, each on a loopback port and in a
//! folder that the test made; Route 53 against moto and a strict double.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot set up its server has failed"
)]

mod bodies;
mod commands;
mod etcd;
mod faults;
mod killed;
mod kills;
mod name_server;
mod owners;
mod power_dns;
mod process;
mod providers;
mod publisher;
mod rfc2136;
mod route53;
mod route53_double;
mod running;
mod scale;
mod tutorial;
mod types;
mod webhook;
