//! The fast path as a library, in private network namespaces: real packets and real hooks. No userspace
//! server runs, so that every reply comes from the program.

mod answers;
mod coming_and_going;
mod hung;
mod lab;
mod neighbours;
mod outside;
mod races;
