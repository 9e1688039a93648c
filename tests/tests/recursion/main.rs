//! Recursion as a whole: the server as a process between clients and recursors, both real (`named`,
//! `unbound`) and scripted, each test in a private network namespace.

mod bounds;
mod cache;
mod cache_commands;
mod cookies;
mod dnstap;
mod encrypted;
mod extended_errors;
mod forgery;
mod handlers;
mod hanging;
mod host_names;
mod interface_cache;
mod interface_shown;
mod kubernetes;
mod lab;
mod lies;
mod lossy;
mod memory;
mod outage;
mod own_messages;
mod real_servers;
mod recursor_list;
mod reverse;
mod scenarios;
mod scripted;
mod servers;
mod soak;
mod tarpits;
mod truth;
mod upchecks;
