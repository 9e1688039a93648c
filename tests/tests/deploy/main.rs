//! What is handed out: the BOSH job as a director renders it and as machines run it, and
//! the Debian package.

mod debian;
mod job;
mod machine;
mod rendering;
mod resolver;
mod running;
