//! A metric family: name, type, labels and help. It is exposed either as a stored counter, gauge or
//! histogram of [`prometheus`], or built at scrape time from values counted elsewhere.

use std::marker::PhantomData;

use prometheus::{
    HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    core::{Collector, Desc},
    proto::{self, Bucket, LabelPair, Metric, MetricFamily, MetricType},
};

/// A metric family with `LABELS` labels.
pub struct Family<K, const LABELS: usize> {
    name: &'static str,
    help: &'static str,
    labels: [&'static str; LABELS],
    kind: PhantomData<K>,
}

/// Marker for families of monotonic counters.
pub struct Counter;

/// Marker for families of current values.
pub struct Gauge;

/// Marker for families of distributions of sizes or durations.
pub struct Histogram;

/// Type of a family's metrics.
pub trait Kind {
    /// Value of one metric in a scrape.
    type Value;
    /// Type for the registry.
    const TYPE: MetricType;
    /// Stores a value in a metric.
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
    pub(crate) const fn new(name: &'static str, help: &'static str, labels: [&'static str; LABELS]) -> Self {
        Self { name, help, labels, kind: PhantomData }
    }

    /// Builds the family for a scrape from (label values, metric value) pairs; label values are in
    /// the order of the labels.
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
            // The registry requires sorted labels.
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

    /// Registers `collect`, which builds this family and related ones on each scrape.
    pub fn scrape(
        &self,
        registry: &Registry,
        collect: impl Fn() -> Vec<MetricFamily> + Send + Sync + 'static,
    ) -> prometheus::Result<()> {
        let labels = self.labels.map(str::to_owned).to_vec();
        let description = Desc::new(self.name.to_owned(), self.help.to_owned(), labels, Default::default())?;
        registry.register(Box::new(Scraped { description, collect }))
    }

    /// Returns the options of a stored metric.
    fn opts(&self) -> Opts {
        Opts::new(self.name, self.help)
    }
}

/// Collects families that are built on each scrape.
struct Scraped<F> {
    /// Describes one of the families. The registry refuses two collectors with equal descriptions.
    description: Desc,
    collect: F,
}

impl<F: Fn() -> Vec<MetricFamily> + Send + Sync> Collector for Scraped<F> {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.description]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        (self.collect)()
    }
}

/// Builds a histogram for a scrape from the observations in each bucket, not cumulative; the last
/// bucket has no bound.
pub fn histogram(bounds: &[f64], observations: impl IntoIterator<Item = u64>, sum: f64) -> proto::Histogram {
    let mut observations = observations.into_iter();
    let mut count = 0;
    let buckets = bounds.iter().zip(observations.by_ref()).map(|(bound, in_bucket)| {
        count += in_bucket;
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(*bound);
        bucket.set_cumulative_count(count);
        bucket
    });
    let mut histogram = proto::Histogram::default();
    histogram.set_bucket(buckets.collect());
    histogram.set_sample_count(count + observations.sum::<u64>());
    histogram.set_sample_sum(sum);
    histogram
}

impl<K: Kind> Family<K, 0> {
    /// Builds the family of a single metric for a scrape.
    #[must_use]
    pub fn is(&self, value: K::Value) -> MetricFamily {
        self.of([([] as [&str; 0], value)])
    }
}

impl Family<Counter, 0> {
    /// Creates a stored counter.
    pub fn counter(&self) -> prometheus::Result<IntCounter> {
        IntCounter::with_opts(self.opts())
    }
}

impl<const LABELS: usize> Family<Counter, LABELS> {
    /// Creates stored counters with labels.
    pub fn counters(&self) -> prometheus::Result<IntCounterVec> {
        IntCounterVec::new(self.opts(), &self.labels)
    }
}

impl Family<Gauge, 0> {
    /// Creates a stored integer gauge.
    pub fn gauge(&self) -> prometheus::Result<IntGauge> {
        IntGauge::with_opts(self.opts())
    }
}

impl<const LABELS: usize> Family<Gauge, LABELS> {
    /// Creates stored integer gauges with labels.
    pub fn gauges(&self) -> prometheus::Result<IntGaugeVec> {
        IntGaugeVec::new(self.opts(), &self.labels)
    }
}

impl Family<Histogram, 0> {
    /// Creates a stored histogram with these bucket bounds.
    pub fn histogram(&self, bounds: &[f64]) -> prometheus::Result<prometheus::Histogram> {
        prometheus::Histogram::with_opts(HistogramOpts::from(self.opts()).buckets(bounds.to_vec()))
    }
}
