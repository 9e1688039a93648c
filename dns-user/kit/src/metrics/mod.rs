//! Metrics: declarations of all families, and their common labels.
//!
//! Each crate owns its counters and exposes them under the families declared in [`names`].

mod family;
pub mod labels;
pub mod names;
mod process;

pub use self::{
    family::{Counter, Family, Gauge, Histogram, Kind, histogram},
    names::families,
    process::register_process,
};
