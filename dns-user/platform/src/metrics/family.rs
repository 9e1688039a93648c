//! A family of metrics: its name, type, labels and help, and the two ways to expose it: as a
//! counter, gauge or histogram that is kept ([`prometheus`] has them), or made when somebody
//! scrapes, of what others have counted.

use std::marker::PhantomData;

use prometheus::{
    HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    core::Desc,
    proto::{self, LabelPair, Metric, MetricFamily, MetricType},
};

/// A family with `LABELS` labels.
pub struct Family<K, const LABELS: usize> {
    /// Its name.
    name: &'static str,
    /// What it tells.
    help: &'static str,
    /// The names of its labels.
    labels: [&'static str; LABELS],
    /// What its metrics are.
    kind: PhantomData<K>,
}

/// Counts what happens.
pub struct Counter;

/// Tells how things are.
pub struct Gauge;

/// Counts by size or length.
pub struct Histogram;

/// What the metrics of a family are.
pub trait Kind {
    /// The value of one.
    type Value;
    /// The same for the registry.
    const TYPE: MetricType;
    /// Gives a metric its value.
    fn set(metric: &mut Metric, value: Self::Value);
}

impl Kind for Counter {
    type Value = u64;
    const TYPE: MetricType = MetricType::COUNTER;

    fn set(metric: &mut Metric, value: u64) {
        let mut counter = proto::Counter::default();
        counter.set_value(value as f64);
        metric.set_counter(counter);
    }
}

impl Kind for Gauge {
    type Value = f64;
    const TYPE: MetricType = MetricType::GAUGE;

    fn set(metric: &mut Metric, value: f64) {
        let mut gauge = proto::Gauge::default();
        gauge.set_value(value);
        metric.set_gauge(gauge);
    }
}

impl Kind for Histogram {
    type Value = proto::Histogram;
    const TYPE: MetricType = MetricType::HISTOGRAM;

    fn set(metric: &mut Metric, value: proto::Histogram) {
        metric.set_histogram(value);
    }
}

impl<K: Kind, const LABELS: usize> Family<K, LABELS> {
    /// Declares a family.
    pub(crate) const fn new(name: &'static str, help: &'static str, labels: [&'static str; LABELS]) -> Self {
        Self { name, help, labels, kind: PhantomData }
    }

    /// The family as a scrape shows it: values of the labels in their order, and of each metric.
    #[must_use]
    pub fn of<L: Into<String>>(
        &self,
        metrics: impl IntoIterator<Item = ([L; LABELS], K::Value)>,
    ) -> MetricFamily {
        let metrics = metrics.into_iter().map(|(values, value)| {
            let pairs = self.labels.into_iter().zip(values).map(|(name, value)| {
                let mut pair = LabelPair::default();
                pair.set_name(name.to_owned());
                pair.set_value(value.into());
                pair
            });
            let mut pairs: Vec<LabelPair> = pairs.collect();
            // As the registry wants them.
            pairs.sort_unstable_by(|one, other| one.name().cmp(other.name()));
            let mut metric = Metric::from_label(pairs);
            K::set(&mut metric, value);
            metric
        });
        let mut family = MetricFamily::default();
        family.set_name(self.name.to_owned());
        family.set_help(self.help.to_owned());
        family.set_field_type(K::TYPE);
        family.set_metric(metrics.collect());
        family
    }

    /// For the registry, which wants one of each collector.
    pub fn describe(&self) -> prometheus::Result<Desc> {
        let labels = self.labels.map(str::to_owned).to_vec();
        Desc::new(self.name.to_owned(), self.help.to_owned(), labels, Default::default())
    }

    /// For a metric that is kept.
    fn opts(&self) -> Opts {
        Opts::new(self.name, self.help)
    }
}

impl<K: Kind> Family<K, 0> {
    /// The family of one metric as a scrape shows it.
    #[must_use]
    pub fn is(&self, value: K::Value) -> MetricFamily {
        self.of([([] as [&str; 0], value)])
    }
}

impl Family<Counter, 0> {
    /// A counter that is kept.
    pub fn counter(&self) -> prometheus::Result<IntCounter> {
        IntCounter::with_opts(self.opts())
    }
}

impl<const LABELS: usize> Family<Counter, LABELS> {
    /// Counters that are kept.
    pub fn counters(&self) -> prometheus::Result<IntCounterVec> {
        IntCounterVec::new(self.opts(), &self.labels)
    }
}

impl Family<Gauge, 0> {
    /// A gauge of a whole number that is kept.
    pub fn gauge(&self) -> prometheus::Result<IntGauge> {
        IntGauge::with_opts(self.opts())
    }

    /// A gauge that is kept.
    pub fn float_gauge(&self) -> prometheus::Result<prometheus::Gauge> {
        prometheus::Gauge::with_opts(self.opts())
    }
}

impl<const LABELS: usize> Family<Gauge, LABELS> {
    /// Gauges of whole numbers that are kept.
    pub fn gauges(&self) -> prometheus::Result<IntGaugeVec> {
        IntGaugeVec::new(self.opts(), &self.labels)
    }
}

impl Family<Histogram, 0> {
    /// A histogram that is kept, with these bounds.
    pub fn histogram(&self, bounds: &[f64]) -> prometheus::Result<prometheus::Histogram> {
        prometheus::Histogram::with_opts(HistogramOpts::from(self.opts()).buckets(bounds.to_vec()))
    }
}

impl<const LABELS: usize> Family<Histogram, LABELS> {
    /// Histograms that are kept, with these bounds.
    pub fn histograms(&self, bounds: &[f64]) -> prometheus::Result<HistogramVec> {
        HistogramVec::new(HistogramOpts::from(self.opts()).buckets(bounds.to_vec()), &self.labels)
    }
}
