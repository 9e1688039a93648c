//! What the programs tell of themselves.
//!
//! * [`tap`]: sampled queries, by a ring buffer.
//! * [`ring`]: that buffer.
//! * [`messages`]: what the programs log, by aya-log.

pub(super) mod messages;
pub(super) mod ring;
pub(super) mod tap;
