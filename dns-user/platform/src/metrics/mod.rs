//! Metrics: every family declared in one place, and the labels that they share.
//!
//! Each crate owns its counters, and exposes by them the families that [`names`] declares.

mod family;
pub mod labels;
pub mod names;

pub use self::{
    family::{Counter, Family, Gauge, Histogram, Kind},
    names::families,
};
