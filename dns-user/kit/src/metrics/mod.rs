//! Metrics: declarations of all families, and their common labels.
//!
//! Each crate owns its counters and exposes them under the families declared in [`names`].

pub mod labels;
pub mod names;

use std::{fs, marker::PhantomData, time::Duration};

use nix::{
    sys::resource::{Resource, getrlimit},
    unistd::{SysconfVar, sysconf},
};
use prometheus::{
    HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    core::{Collector, Desc},
    proto::{self, Bucket, LabelPair, Metric, MetricFamily, MetricType},
};

pub use self::names::families;

use crate::process::page_size;

//----------- Families -------------------------------------------------------

/// A metric family with `LABELS` labels.
pub struct Family<K, const LABELS: usize> {
    name: &'static str,
    help: &'static str,
    labels: [&'static str; LABELS],
    kind: PhantomData<K>,
}

/// Marker for families of monotonic counters.
pub struct Counter;

/// Marker for families of monotonic times in seconds.
struct SecondsCounter;

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
        SecondsCounter::set(metric, value as f64);
    }
}

impl Kind for SecondsCounter {
    type Value = f64;
    const TYPE: MetricType = MetricType::COUNTER;

    fn set(metric: &mut Metric, value: f64) {
        let mut counter = proto::Counter::default();
        counter.set_value(value);
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
    /// Declares a family with its labels.
    pub const fn new(
        name: &'static str,
        help: &'static str,
        labels: [&'static str; LABELS],
    ) -> Self {
        Self {
            name,
            help,
            labels,
            kind: PhantomData,
        }
    }

    /// Builds the family for a scrape from (label values, metric value) pairs; label values are in
    /// the order of the labels.
    #[must_use]
    pub fn of<L: Into<String>>(
        &self,
        metrics: impl IntoIterator<Item = ([L; LABELS], K::Value)>,
    ) -> MetricFamily {
        let mut built = Vec::new();
        for (values, value) in metrics {
            let mut pairs = Vec::with_capacity(LABELS);
            for (name, value) in self.labels.into_iter().zip(values) {
                let mut pair = LabelPair::default();
                pair.set_name(name.to_owned());
                pair.set_value(value.into());
                pairs.push(pair);
            }
            // The registry requires sorted labels.
            pairs.sort_unstable_by(|one, other| one.name().cmp(other.name()));
            let mut metric = Metric::from_label(pairs);
            K::set(&mut metric, value);
            built.push(metric);
        }
        let mut family = MetricFamily::default();
        family.set_name(self.name.to_owned());
        family.set_help(self.help.to_owned());
        family.set_field_type(K::TYPE);
        family.set_metric(built);
        family
    }

    /// Registers `collect`, which builds this family and related ones on each scrape.
    pub fn scrape(
        &self,
        registry: &Registry,
        collect: impl Fn() -> Vec<MetricFamily> + Send + Sync + 'static,
    ) -> prometheus::Result<()> {
        let labels = self.labels.map(str::to_owned).to_vec();
        let description = Desc::new(
            self.name.to_owned(),
            self.help.to_owned(),
            labels,
            Default::default(),
        )?;
        registry.register(Box::new(Scraped {
            description,
            collect,
        }))
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
pub fn histogram(
    bounds: &[f64],
    observations: impl IntoIterator<Item = u64>,
    sum: f64,
) -> proto::Histogram {
    let mut observations = observations.into_iter();
    let mut count = 0;
    let mut buckets = Vec::with_capacity(bounds.len());
    // `zip` asks for a bound first: after the last bound it has not consumed the last bucket.
    for (bound, in_bucket) in bounds.iter().zip(observations.by_ref()) {
        count += in_bucket;
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(*bound);
        bucket.set_cumulative_count(count);
        buckets.push(bucket);
    }
    let mut histogram = proto::Histogram::default();
    histogram.set_bucket(buckets);
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

//----------- Process --------------------------------------------------------

const CPU_SECONDS: Family<SecondsCounter, 0> = Family::new(
    "process_cpu_seconds_total",
    "Total user and system CPU time spent in seconds.",
    [],
);
const OPEN_FILES: Family<Gauge, 0> =
    Family::new("process_open_fds", "Number of open file descriptors.", []);
const MAX_FILES: Family<Gauge, 0> = Family::new(
    "process_max_fds",
    "Maximum number of open file descriptors.",
    [],
);
const VIRTUAL_MEMORY: Family<Gauge, 0> = Family::new(
    "process_virtual_memory_bytes",
    "Virtual memory size in bytes.",
    [],
);
const RESIDENT_MEMORY: Family<Gauge, 0> = Family::new(
    "process_resident_memory_bytes",
    "Resident memory size in bytes.",
    [],
);
const STARTED: Family<Gauge, 0> = Family::new(
    "process_start_time_seconds",
    "Start time of the process since unix epoch in seconds.",
    [],
);
const THREADS: Family<Gauge, 0> = Family::new(
    "process_threads",
    "Number of OS threads in the process.",
    [],
);

/// Registers the families of this process: CPU time, memory, descriptors and threads.
pub fn register_process(registry: &Registry) -> prometheus::Result<()> {
    // Read once: the kernel derives it from the wall clock, so a corrected clock would look like a
    // restart.
    let boot = boot_time();
    CPU_SECONDS.scrape(registry, move || {
        let mut families = Vec::new();
        if let Ok(files) = fs::read_dir("/proc/self/fd") {
            // Without the descriptor that lists them.
            families.push(OPEN_FILES.is(files.count().saturating_sub(1) as f64));
        }
        if let Ok((soft, _)) = getrlimit(Resource::RLIMIT_NOFILE) {
            families.push(MAX_FILES.is(soft as f64));
        }
        if let Some(stat) = Stat::read("self") {
            families.push(CPU_SECONDS.is(stat.cpu / ticks_per_second()));
            families.push(VIRTUAL_MEMORY.is(stat.virtual_memory));
            families.push(RESIDENT_MEMORY.is(stat.resident_pages * page_size() as f64));
            families.push(THREADS.is(stat.threads));
            if let Some(boot) = boot {
                families.push(STARTED.is((boot + stat.start / ticks_per_second()).floor()));
            }
        }
        families
    })
}

/// Returns the CPU time that a process has used; `None` if there is none with this number.
pub fn cpu_time(process: i32) -> Option<Duration> {
    let stat = Stat::read(&process.to_string())?;
    Duration::try_from_secs_f64(stat.cpu / ticks_per_second()).ok()
}

/// Fields of `/proc/PID/stat` (proc_pid_stat(5)); times are in clock ticks.
#[derive(Debug, PartialEq)]
struct Stat {
    cpu: f64,
    threads: f64,
    start: f64,
    virtual_memory: f64,
    resident_pages: f64,
}

impl Stat {
    fn read(process: &str) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{process}/stat")).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        // The name, the second field, is in parentheses and may contain any character.
        let (_, rest) = text.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        Some(Self {
            cpu: field(&fields, 14)? + field(&fields, 15)?,
            threads: field(&fields, 20)?,
            start: field(&fields, 22)?,
            virtual_memory: field(&fields, 23)?,
            resident_pages: field(&fields, 24)?,
        })
    }
}

/// Returns a field by its number in proc_pid_stat(5), without the first two.
fn field(fields: &[&str], number: usize) -> Option<f64> {
    // The manual counts from 1.
    fields.get(number - 3)?.parse().ok()
}

/// Returns the time of the machine's start in seconds since 1970.
fn boot_time() -> Option<f64> {
    let text = fs::read_to_string("/proc/stat").ok()?;
    text.lines()
        .find_map(|line| line.strip_prefix("btime "))?
        .trim()
        .parse()
        .ok()
}

fn ticks_per_second() -> f64 {
    let ticks = sysconf(SysconfVar::CLK_TCK).ok().flatten();
    ticks.map_or(100.0, |ticks| ticks as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_spaces_are_skipped() {
        let other = "7 (a) b) S 1 7 7 0 -1 4 1 0 0 0 250 50 0 0 20 0 1 0 900 4096000 250";
        assert_eq!(Stat::parse(other).map(|stat| stat.cpu), Some(300.0));
        assert_eq!(Stat::parse("7 (a) S"), None);
        let text = "7 (a b) c) S 1 7 7 0 -1 4 9 0 0 0 150 50 0 0 20 0 12 0 900 4096000 250 18446744073709551615";
        let expected = Stat {
            cpu: 200.0,
            threads: 12.0,
            start: 900.0,
            virtual_memory: 4_096_000.0,
            resident_pages: 250.0,
        };
        assert_eq!(Stat::parse(text), Some(expected));
        assert_eq!(Stat::parse("7 (a) S 1"), None);
    }

    #[test]
    fn own_process_is_measured() {
        let registry = Registry::new();
        register_process(&registry).unwrap();
        let value = |name: &str| {
            let families = registry.gather();
            let family = families
                .iter()
                .find(|family| family.name() == name)
                .unwrap();
            let metric = &family.get_metric()[0];
            metric.get_gauge().get_value() + metric.get_counter().get_value()
        };
        assert!(value("process_resident_memory_bytes") > 1e6);
        assert!(value("process_virtual_memory_bytes") >= value("process_resident_memory_bytes"));
        assert!(
            value("process_open_fds") >= 3.0
                && value("process_max_fds") >= value("process_open_fds")
        );
        assert!(value("process_threads") >= 1.0);
        let uptime: f64 = fs::read_to_string("/proc/uptime")
            .unwrap()
            .split(' ')
            .next()
            .unwrap()
            .parse()
            .unwrap();
        let now = boot_time().unwrap() + uptime;
        assert!((now - 86_400.0..=now + 2.0).contains(&value("process_start_time_seconds")));
        let before = value("process_cpu_seconds_total");
        while value("process_cpu_seconds_total") <= before {}
    }

    #[test]
    fn families_have_labels_and_values() {
        const CALLS: Family<Counter, 2> = Family::new("calls_total", "Calls.", ["to", "by"]);
        const SPEED: Family<Gauge, 0> = Family::new("speed", "Speed.", []);
        const TIMES: Family<Histogram, 0> = Family::new("times", "Times.", []);
        let families = [
            CALLS.of([(["x", "y"], 3)]),
            SPEED.is(2.5),
            TIMES.is(histogram(&[1.0, 2.0], [4, 5, 6], 9.5)),
        ];
        let text = prometheus::TextEncoder::new()
            .encode_to_string(&families)
            .unwrap();
        assert_eq!(
            text,
            "# HELP calls_total Calls.\n# TYPE calls_total counter\ncalls_total{by=\"y\",to=\"x\"} 3\n\
             # HELP speed Speed.\n# TYPE speed gauge\nspeed 2.5\n# HELP times Times.\n# TYPE times histogram\n\
             times_bucket{le=\"1\"} 4\ntimes_bucket{le=\"2\"} 9\ntimes_bucket{le=\"+Inf\"} 15\ntimes_sum 9.5\n\
             times_count 15\n"
        );
        let registry = Registry::new();
        registry
            .register(Box::new(CALLS.counters().unwrap()))
            .unwrap();
        SPEED.scrape(&registry, || vec![SPEED.is(7.0)]).unwrap();
        assert!(
            registry.register(Box::new(SPEED.gauge().unwrap())).is_err(),
            "twice"
        );
        let gathered = registry.gather();
        assert_eq!(gathered[0].get_metric()[0].get_gauge().get_value(), 7.0);
        let times = TIMES.histogram(&[1.0]).unwrap();
        times.observe(0.5);
        assert_eq!((times.get_sample_count(), times.get_sample_sum()), (1, 0.5));
    }

    #[test]
    fn processes_have_their_cpu_time() {
        let own = i32::try_from(std::process::id()).unwrap();
        let before = cpu_time(own).unwrap();
        while cpu_time(own).unwrap() <= before {}
        assert_eq!(cpu_time(-1), None);
    }

    #[test]
    fn machine_was_started_in_this_century() {
        let year_2001 = 978_307_200.0;
        assert!(boot_time().unwrap() > year_2001);
        assert_eq!(field(&["S", "1", "x"], 4), Some(1.0));
        assert_eq!(field(&["S", "1", "x"], 5), None);
        assert_eq!(field(&["S"], 9), None);
    }

    #[test]
    fn cpu_time_covers_the_process() {
        use nix::sys::resource::{UsageWho, getrusage};

        let own = i32::try_from(std::process::id()).unwrap();
        let used = || {
            let usage = getrusage(UsageWho::RUSAGE_SELF).unwrap();
            let micros =
                |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
            micros(usage.user_time()) + micros(usage.system_time())
        };
        // More than a tick.
        while used() < 0.05 {}
        let registry = Registry::new();
        register_process(&registry).unwrap();
        let before = used();
        let cpu = cpu_time(own).unwrap().as_secs_f64();
        let families = registry.gather();
        let after = used();
        // User and system time are whole ticks each.
        assert!(
            before - 0.03 <= cpu && cpu <= after,
            "{before} {cpu} {after}"
        );
        let family = families
            .iter()
            .find(|family| family.name() == CPU_SECONDS.name);
        let exposed = family.unwrap().get_metric()[0].get_counter().get_value();
        assert!(before - 0.03 <= exposed && exposed <= after);
        let family = families.iter().find(|family| family.name() == STARTED.name);
        let started = family.unwrap().get_metric()[0].get_gauge().get_value();
        let machine = fs::read_to_string("/proc/stat").unwrap();
        let (_, boot) = machine.split_once("\nbtime ").unwrap();
        let boot: u64 = boot.lines().next().unwrap().parse().unwrap();
        // Field 22 counts hundredths of a second; the program's name has no space.
        let process = fs::read_to_string("/proc/self/stat").unwrap();
        let ticks: u64 = process.split(' ').nth(21).unwrap().parse().unwrap();
        assert_eq!(started, (boot + ticks / 100) as f64);
        assert_eq!(ticks_per_second(), 100.0);
        assert!([4096, 16_384, 65_536].contains(&page_size()));
    }
}
