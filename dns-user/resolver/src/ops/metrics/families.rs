//! Families that are made when somebody scrapes, of what others have counted.

use prometheus::proto::{Counter, Gauge, Metric, MetricFamily, MetricType};

use super::labels::labelled;

/// Labels and a value.
pub(crate) type Labelled<T> = (Vec<(&'static str, String)>, T);

/// A family of counters.
pub(crate) fn counts(
    name: &str,
    help: &str,
    values: impl IntoIterator<Item = Labelled<u64>>,
) -> MetricFamily {
    family(name, help, MetricType::COUNTER, values, |metric, value| {
        let mut counter = Counter::default();
        counter.set_value(value as f64);
        metric.set_counter(counter);
    })
}

/// A family of gauges.
pub(crate) fn gauges(
    name: &str,
    help: &str,
    values: impl IntoIterator<Item = Labelled<f64>>,
) -> MetricFamily {
    family(name, help, MetricType::GAUGE, values, |metric, value| {
        let mut gauge = Gauge::default();
        gauge.set_value(value);
        metric.set_gauge(gauge);
    })
}

/// A family.
fn family<T>(
    name: &str,
    help: &str,
    kind: MetricType,
    values: impl IntoIterator<Item = Labelled<T>>,
    set: impl Fn(&mut Metric, T),
) -> MetricFamily {
    let metrics = values.into_iter().map(|(labels, value)| {
        let labels: Vec<(&str, &str)> = labels.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let mut metric = labelled(&labels);
        set(&mut metric, value);
        metric
    });
    let mut family = MetricFamily::default();
    family.set_name(name.to_owned());
    family.set_help(help.to_owned());
    family.set_field_type(kind);
    family.set_metric(metrics.collect());
    family
}
