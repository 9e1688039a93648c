//! `shadow` as a whole: the command beside a real server, a strict double of bosh-dns, or a server that makes mistakes,
//! each test in a private network namespace.

mod bounds;
mod double;
mod faults;
mod health;
mod peers;
mod picture;
mod recorded;
mod watching;
