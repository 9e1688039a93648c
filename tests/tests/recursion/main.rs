//! Recursion as a whole: the server as a process between clients and recursors,
//! real ones (`named`, `unbound`) and scripted ones, each test in a network
//! namespace of its own.

mod bounds;
mod cache;
mod forgery;
mod handlers;
mod hanging;
mod lab;
mod lies;
mod outage;
mod real_servers;
mod recursor_list;
mod reverse;
mod scripted;
mod servers;
mod truth;
mod upchecks;
