//! Process metrics: the usual `process_*` families and build information.

use prometheus::{Registry, process_collector::ProcessCollector};

use crate::ops::version;
use dns_kit::metrics::families;

pub(super) fn register(registry: &Registry) -> prometheus::Result<()> {
    registry.register(Box::new(ProcessCollector::for_self()))?;
    let build = families::BUILD_INFO.gauges()?;
    build.with_label_values(&[version::VERSION, version::COMMIT]).set(1);
    registry.register(Box::new(build))
}
