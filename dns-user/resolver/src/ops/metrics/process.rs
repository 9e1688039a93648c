//! Figures of the process: the usual `process_*` families, and what was built.

use prometheus::{IntGaugeVec, Opts, Registry, process_collector::ProcessCollector};

use super::names;
use crate::ops::version;

/// Registers them.
pub(super) fn register(registry: &Registry) -> prometheus::Result<()> {
    registry.register(Box::new(ProcessCollector::for_self()))?;
    let build = IntGaugeVec::new(
        Opts::new(names::BUILD_INFO, "What this server was built from; always 1."),
        &["version", "commit"],
    )?;
    build.with_label_values(&[version::VERSION, version::COMMIT]).set(1);
    registry.register(Box::new(build))
}
