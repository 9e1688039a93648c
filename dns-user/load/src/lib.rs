//! The program `bosh-dns-xdp-load`: sends DNS queries from inside the kernel or through sockets, counts and times the
//! replies, and writes query files for other load generators. Benches use its generator.
//!
//! * [`orders`], [`mod@frames`], [`generator`]: the programs in the kernel, and what they send; [`sockets`] does the same
//!   through sockets
//! * [`queries`]: names to query, from a query file, a capture or records.json, and their order
//! * [`consent`]: whether the server may be loaded, and answers as expected
//! * [`target`]: options of all measurements; from them, a generator that is ready
//! * [`measure`]: one load, from its start to its last reply, as a [`report`]
//! * [`interface`]: losses that the interface counts; [`mod@pauses`]: times in which the server answered nothing
//! * [`run`], [`search`], [`compare`]: the measurements, each a sequence of loads; [`ratio`] has their statistics,
//!   [`output`] shows them, [`plot`] draws them, [`hlog`] writes their latencies
//! * [`respond`]: the other end of a link without a server

pub mod frames;
pub mod generator;
pub mod orders;
pub mod pauses;

mod cli;
mod compare;
mod consent;
mod hlog;
mod interface;
mod measure;
mod output;
mod plot;
mod queries;
mod ratio;
mod report;
mod respond;
mod run;
mod search;
mod sockets;
mod target;

pub use cli::main;
