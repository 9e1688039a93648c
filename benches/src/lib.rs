//! Code shared by the benches and the demo.

pub mod cpu;
pub mod dnsperf;
pub mod forwarders;
pub mod foundation;
pub mod generator;
pub mod lab;
pub mod load;
pub mod noise;
pub mod peers;
pub mod reference;
pub mod report;
pub mod slow_recursor;

pub use whole_system_tests::{fleet, yardstick};

/// Returns whether the label contains one of the texts, or the list is empty.
pub fn is_wanted(texts: &[String], label: &str) -> bool {
    texts.is_empty() || texts.iter().any(|text| label.contains(text))
}
