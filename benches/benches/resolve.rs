//! Cost of look-ups in fleets of 1,000, 10,000 and 100,000 instances, and of reading and indexing
//! such a fleet.
//!
//! Look-ups by group, instance, alias and place return the same number of addresses in each fleet,
//! and so should take the same time; look-ups of a whole domain grow with the answer. `--test` runs
//! each once.

use std::hint::black_box;

use bosh_dns_xdp_benches::fleet::{Fleet, Row};
use criterion::{
    BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main,
};
use dns_core::catalog::{AliasFiles, Records, Snapshot};
use dns_core::name::Name;
use dns_core::resolve::{AllRunning, Existence, resolve};

/// Sizes of the fleets in instances.
const SIZES: [usize; 3] = [1_000, 10_000, 100_000];

/// Members of the queried group: `doppler-*` of the generated fleets.
const MEMBERS: usize = 12;

criterion_group!(benches, lookups, loading);
criterion_main!(benches);

/// A fleet and the names to look up.
struct Bench {
    snapshot: Snapshot,
    /// An instance of a group in the middle of the file.
    row: Row,
}

impl Bench {
    /// Generates a fleet with `instances` instances, and aliases for one of its groups.
    fn new(instances: usize) -> Self {
        let fleet = Fleet::generate(instances, 1);
        let rows = fleet.rows();
        let row = rows[rows.len() / 2..]
            .iter()
            .find(|row| row.instance_group.starts_with("doppler-") && row.index == MEMBERS - 1)
            .expect("each hundred instances hold a full doppler group");
        let Row {
            instance_group,
            deployment,
            ..
        } = row;
        let place = format!("{instance_group}.default.{deployment}.bosh");
        let aliases = format!(
            r#"{{"doppler.service.cf.internal": ["*.{place}"], "_.doppler.service.cf.internal": ["_.{place}"]}}"#
        );
        let (aliases, _) =
            AliasFiles::parse([("a.json", aliases.as_bytes())]).expect("the file is good");
        let (records, _) = Records::parse(&fleet.records_json()).expect("the fleet is good");
        Self {
            snapshot: Snapshot::build(records, &aliases).0,
            row: row.clone(),
        }
    }

    /// Returns names by their form, each with its number of addresses, the same in every fleet.
    fn names(&self) -> Vec<(&'static str, String, Option<usize>)> {
        let Row {
            id,
            number,
            instance_group,
            groups,
            deployment,
            ..
        } = &self.row;
        let group = groups[0];
        vec![
            ("group", format!("q-s0.q-g{group}.bosh"), Some(MEMBERS)),
            (
                "group_and_zone",
                format!("q-a1s0.q-g{group}.bosh"),
                Some(MEMBERS / 3),
            ),
            (
                "instance_by_number",
                format!("q-m{number}s0.q-g{group}.bosh"),
                Some(1),
            ),
            ("instance_short", format!("{id}.q-g{group}.bosh"), Some(1)),
            (
                "instance_long",
                format!("{id}.{instance_group}.default.{deployment}.bosh"),
                Some(1),
            ),
            ("agent", format!("agent-{id}.bosh-agent-id"), Some(1)),
            (
                "long_form",
                format!("q-s0.{instance_group}.default.{deployment}.bosh"),
                Some(MEMBERS),
            ),
            (
                "any_network",
                format!("q-s0.{instance_group}.*.{deployment}.bosh"),
                Some(MEMBERS),
            ),
            (
                "alias",
                String::from("doppler.service.cf.internal"),
                Some(MEMBERS),
            ),
            (
                "alias_below",
                format!("{id}.doppler.service.cf.internal"),
                Some(1),
            ),
            ("missing_group", String::from("q-s0.q-g4000000.bosh"), None),
            ("missing_instance", String::from("nobody.q-g1.bosh"), None),
            (
                "glob_in_a_deployment",
                format!("q-s0.*{}.default.{deployment}.bosh", &instance_group[1..]),
                Some(MEMBERS),
            ),
            (
                "glob_of_groups",
                format!("q-s0.{instance_group}*.default.{}*.bosh", &deployment[..3]),
                None,
            ),
            ("index_in_the_domain", String::from("q-i39.x.bosh"), None),
            ("whole_domain", String::from("q-s0.x.bosh"), None),
        ]
    }
}

/// Look-ups by every form. The same look-up runs in all fleets consecutively, so that a machine
/// that slows down meanwhile does not favour the small ones.
fn lookups(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("resolve");
    let fleets = SIZES.map(Bench::new);
    for kind in 0..fleets[0].names().len() {
        for (size, bench) in SIZES.iter().zip(&fleets) {
            let (label, text, addresses) = bench.names().swap_remove(kind);
            let name = Name::from_text(&text).expect("the name is good");
            let resolution =
                resolve(&bench.snapshot, &AllRunning, &name).expect("the name is ours");
            assert_eq!(
                resolution.existence == Existence::Found,
                !label.starts_with("missing"),
                "{text}"
            );
            assert!(
                addresses.is_none_or(|count| resolution.v4.len() == count),
                "{text}: {resolution:?}"
            );
            group.bench_function(BenchmarkId::new(label, size), |bencher| {
                bencher.iter(|| resolve(black_box(&bench.snapshot), &AllRunning, black_box(&name)));
            });
        }
    }
    group.finish();
}

/// From the bytes of the file to a usable snapshot.
fn loading(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("load");
    group.sampling_mode(SamplingMode::Flat).sample_size(20);
    for size in SIZES {
        let json = Fleet::generate(size, 1).records_json();
        group.throughput(Throughput::Bytes(json.len() as u64));
        group.bench_function(BenchmarkId::new("parse", size), |bencher| {
            bencher.iter(|| Records::parse(black_box(&json)));
        });
        let files = AliasFiles::default();
        group.bench_function(BenchmarkId::new("parse_and_index", size), |bencher| {
            bencher.iter(|| {
                let (records, _) = Records::parse(black_box(&json)).expect("the fleet is good");
                Snapshot::build(records, &files)
            });
        });
    }
    group.finish();
}
