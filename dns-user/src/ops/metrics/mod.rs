//! Metrics: every name in one place, one registry, one exposition.
//!
//! Each room owns its counters (`metrics.rs`, `register`), with names from
//! [`names`]. Replies of the fast path never pass userspace; their counts are
//! read from the BPF maps when somebody scrapes and added to the families that
//! speak of all replies.

pub mod labels;
pub mod names;
