//! What the benches and the demo share.

pub mod cpu;
pub mod dnsperf;
pub mod forwarders;
pub mod foundation;
pub mod generator;
pub mod lab;
pub mod load;
pub mod peers;
pub mod reference;
pub mod report;

pub use whole_system_tests::{fleet, yardstick};

/// Whether one of the texts is in the label, or there are none.
pub fn is_wanted(texts: &[String], label: &str) -> bool {
    texts.is_empty() || texts.iter().any(|text| label.contains(text))
}
