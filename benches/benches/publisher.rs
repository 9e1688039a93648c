//! Time to publish a snapshot to the real map: the first fill, a new records.json that moves one
//! instance, and a change of one instance's health. Measured until the publisher reports that the
//! last element is written.
//!
//! The programs are loaded into the running kernel and attached to `lo` in a separate network
//! namespace.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use bosh_dns_xdp_benches::foundation::Foundation;
use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput};
use dns_core::{
    catalog::Snapshot,
    config::{HookMode, XdpConfig},
    resolve::AllRunning,
};
use dns_fastpath::{Everything, FastPath, Publisher};
use tokio::runtime::{Builder, Runtime};
use whole_system_tests::{
    bpffs::{Bpffs, config},
    namespace::Namespace,
    requires,
};

/// Sizes of the foundation: one that fits the default map with ease, and one that fills it.
const SIZES: [usize; 2] = [1_000, 10_000];

fn main() -> Result<()> {
    requires!(bpf);
    let mut criterion = Criterion::default().configure_from_args();
    for size in SIZES {
        measure(&mut criterion, size)?;
    }
    criterion.final_summary();
    Ok(())
}

/// Runs all benches on a foundation of this size.
fn measure(criterion: &mut Criterion, size: usize) -> Result<()> {
    let mut foundation = Foundation::generate(size)?;
    let before =
        Arc::new(Foundation::parse(foundation.records.clone(), foundation.aliases.clone())?.snapshot);
    let change = foundation.recreate_one(Ipv4Addr::new(10, 255, 255, 1))?;
    let after = Arc::new(foundation.snapshot);
    let recreated = IpAddr::V4(change.to);
    let namespace = Namespace::new("publish")?;
    let runtime = Builder::new_current_thread().build()?;

    let mut group = criterion.benchmark_group("publisher");
    group.sampling_mode(SamplingMode::Flat).sample_size(10);
    group.throughput(Throughput::Elements(dns_core::listing::published_names(&before).count() as u64));
    group.bench_function(BenchmarkId::new("first_fill", size), |bencher| {
        bencher.iter_custom(|rounds| {
            let fill = || -> Result<Duration> {
                let running = Running::start(&namespace)?;
                Ok(running.install(&runtime, &before))
            };
            (0..rounds).map(|_| fill().expect("the first start went well")).sum()
        });
    });

    let running = Running::start(&namespace)?;
    running.install(&runtime, &before);
    let mut changed = false;
    group.bench_function(BenchmarkId::new("one_instance_recreated", size), |bencher| {
        bencher.iter_custom(|rounds| {
            let reload = |_| {
                changed = !changed;
                running.install(&runtime, if changed { &after } else { &before })
            };
            (0..rounds).map(reload).sum()
        });
    });
    running.install(&runtime, &after);
    group.throughput(Throughput::Elements(1));
    group.bench_function(BenchmarkId::new("health_of_one_instance", size), |bencher| {
        bencher.iter(|| {
            running.publisher.health_changed(&[recreated]);
            runtime.block_on(running.publisher.flushed());
        });
    });
    group.finish();
    Ok(())
}

/// A running fast path. The order of the fields is the order of dropping.
struct Running {
    publisher: Publisher,
    _fast_path: FastPath,
    _bpffs: Bpffs,
}

impl Running {
    /// Loads the programs without publishing anything.
    fn start(namespace: &Namespace) -> Result<Self> {
        let bpffs = Bpffs::new()?;
        let config = XdpConfig { max_names: 65_536, ..config(HookMode::Tc, &bpffs) };
        let endpoints = [SocketAddr::from((Ipv4Addr::LOCALHOST, 53))];
        let start =
            || FastPath::start_in_process(&config, &endpoints, Arc::new(AllRunning), Arc::new(Everything));
        let fast_path = namespace.run(start)?.context("starting the fast path")?;
        Ok(Self { publisher: fast_path.publisher(), _fast_path: fast_path, _bpffs: bpffs })
    }

    /// Installs a snapshot; returns the time until it is completely in the map.
    fn install(&self, runtime: &Runtime, snapshot: &Arc<Snapshot>) -> Duration {
        let started = Instant::now();
        self.publisher.install(snapshot.clone());
        runtime.block_on(self.publisher.flushed());
        started.elapsed()
    }
}
