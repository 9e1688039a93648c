//! Process metrics: the usual `process_*` families and build information.

use prometheus::Registry;

use crate::ops::version;
use dns_kit::metrics::{families, register_process};

pub(super) fn register(registry: &Registry) -> prometheus::Result<()> {
    register_process(registry)?;
    let build = families::BUILD_INFO.gauges()?;
    build.with_label_values(&[version::VERSION, version::COMMIT]).set(1);
    registry.register(Box::new(build))
}
