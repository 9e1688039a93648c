//! Log messages and samples from the programs.
//!
//! * [`tap`]: sampled queries.
//! * [`ring`]: the ring buffer of the samples.
//! * [`messages`]: log messages, by aya-log.

pub(super) mod messages;
pub(super) mod ring;
pub(super) mod tap;
