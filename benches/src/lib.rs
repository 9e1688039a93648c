//! Code shared by the benches.

pub mod echo;
pub mod page_cache;
pub mod report;
pub mod servers;
pub mod skeleton;

pub use test_lab::{cpu, dnsperf, figures, fleet, foundation, generator, lab, load, noise};
pub use whole_system_tests::yardstick;

/// Returns whether the label contains one of the texts, or the list is empty.
pub fn is_wanted(texts: &[String], label: &str) -> bool {
    texts.is_empty() || texts.iter().any(|text| label.contains(text))
}
