//! The `process_*` families that every client library of Prometheus exposes, read from `/proc/self`.

use std::fs;

use nix::{
    sys::resource::{Resource, getrlimit},
    unistd::{SysconfVar, sysconf},
};
use prometheus::{
    Counter, Gauge, Registry,
    core::{Collector, Desc},
    proto::MetricFamily,
};

/// Registers the families of this process.
pub fn register_process(registry: &Registry) -> prometheus::Result<()> {
    registry.register(Box::new(Process::new()?))
}

/// CPU time, memory, descriptors and threads of this process at the time of a scrape.
struct Process {
    cpu: Counter,
    open_files: Gauge,
    most_files: Gauge,
    virtual_memory: Gauge,
    resident_memory: Gauge,
    started: Gauge,
    threads: Gauge,
}

impl Process {
    fn new() -> prometheus::Result<Self> {
        let process = Self {
            cpu: Counter::new(
                "process_cpu_seconds_total",
                "Total user and system CPU time spent in seconds.",
            )?,
            open_files: Gauge::new("process_open_fds", "Number of open file descriptors.")?,
            most_files: Gauge::new("process_max_fds", "Maximum number of open file descriptors.")?,
            virtual_memory: Gauge::new("process_virtual_memory_bytes", "Virtual memory size in bytes.")?,
            resident_memory: Gauge::new("process_resident_memory_bytes", "Resident memory size in bytes.")?,
            started: Gauge::new(
                "process_start_time_seconds",
                "Start time of the process since unix epoch in seconds.",
            )?,
            threads: Gauge::new("process_threads", "Number of OS threads in the process.")?,
        };
        if let (Some(stat), Some(boot)) = (Stat::read(), boot_time()) {
            process.started.set((boot + stat.start / ticks_per_second()).floor());
        }
        Ok(process)
    }

    fn all(&self) -> [&dyn Collector; 7] {
        let Self { cpu, open_files, most_files, virtual_memory, resident_memory, started, threads } = self;
        [cpu, open_files, most_files, virtual_memory, resident_memory, started, threads]
    }
}

impl Collector for Process {
    fn desc(&self) -> Vec<&Desc> {
        self.all().into_iter().flat_map(Collector::desc).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        if let Ok(files) = fs::read_dir("/proc/self/fd") {
            // Without the descriptor that lists them.
            self.open_files.set(files.count().saturating_sub(1) as f64);
        }
        if let Ok((soft, _)) = getrlimit(Resource::RLIMIT_NOFILE) {
            self.most_files.set(soft as f64);
        }
        if let Some(stat) = Stat::read() {
            // Two scrapes at a time must not count twice, nor backwards.
            self.cpu.inc_by((stat.cpu / ticks_per_second() - self.cpu.get()).max(0.0));
            self.virtual_memory.set(stat.virtual_memory);
            self.resident_memory.set(stat.resident_pages * page_size());
            self.threads.set(stat.threads);
        }
        self.all().into_iter().flat_map(Collector::collect).collect()
    }
}

/// Fields of `/proc/self/stat` (proc_pid_stat(5)); times are in clock ticks.
#[derive(Debug, PartialEq)]
struct Stat {
    cpu: f64,
    threads: f64,
    start: f64,
    virtual_memory: f64,
    resident_pages: f64,
}

impl Stat {
    fn read() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/self/stat").ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        // The name, the second field, is in parentheses and may contain any character.
        let (_, rest) = text.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        // The manual counts from 1, and the first field here is the third.
        let field = |number: usize| fields.get(number - 3)?.parse::<f64>().ok();
        Some(Self {
            cpu: field(14)? + field(15)?,
            threads: field(20)?,
            start: field(22)?,
            virtual_memory: field(23)?,
            resident_pages: field(24)?,
        })
    }
}

/// Returns the time of the machine's start in seconds since 1970.
fn boot_time() -> Option<f64> {
    let text = fs::read_to_string("/proc/stat").ok()?;
    text.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

fn ticks_per_second() -> f64 {
    setting(SysconfVar::CLK_TCK, 100.0)
}

fn page_size() -> f64 {
    setting(SysconfVar::PAGE_SIZE, 4096.0)
}

fn setting(name: SysconfVar, usual: f64) -> f64 {
    sysconf(name).ok().flatten().map_or(usual, |value| value as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_spaces_are_skipped() {
        let text =
            "7 (a b) c) S 1 7 7 0 -1 4 9 0 0 0 150 50 0 0 20 0 12 0 900 4096000 250 18446744073709551615";
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
            let family = families.iter().find(|family| family.name() == name).unwrap();
            let metric = &family.get_metric()[0];
            metric.get_gauge().get_value() + metric.get_counter().get_value()
        };
        assert!(value("process_resident_memory_bytes") > 1e6);
        assert!(value("process_virtual_memory_bytes") >= value("process_resident_memory_bytes"));
        assert!(value("process_open_fds") >= 3.0 && value("process_max_fds") >= value("process_open_fds"));
        assert!(value("process_threads") >= 1.0);
        let uptime: f64 =
            fs::read_to_string("/proc/uptime").unwrap().split(' ').next().unwrap().parse().unwrap();
        let now = boot_time().unwrap() + uptime;
        assert!((now - 86_400.0..=now + 2.0).contains(&value("process_start_time_seconds")));
        let before = value("process_cpu_seconds_total");
        while value("process_cpu_seconds_total") <= before {}
    }
}
