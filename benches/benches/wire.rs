//! Cost of parsing a query and writing its reply, and of hashing a name like the program and the publisher.

use std::{hint::black_box, net::Ipv4Addr};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use dns_common::name::hash_name;
use dns_core::{
    resolve::{Checks, Existence, Resolution},
    wire::{Parsed, Query, Shuffle, local_reply, parse, truncate_to_client},
};

/// Header and question of `q-s0.q-g1.bosh`, type A, class IN, RD set.
const PLAIN: &[u8] = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x04q-s0\x04q-g1\x04bosh\0\0\x01\0\x01";
/// An OPT for 1232 bytes.
const OPT: &[u8] = b"\0\0\x29\x04\xd0\0\0\0\0\0\0";

fn with_opt() -> Vec<u8> {
    let mut message = [PLAIN, OPT].concat();
    message[11] = 1;
    message
}

/// Parses `message`, which must be a query.
fn query(message: &[u8]) -> Query<'_> {
    match parse(message) {
        Parsed::Query(query) => query,
        other => unreachable!("the messages of this bench are queries: {other:?}"),
    }
}

fn reading(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("wire/parse");
    for (label, message) in [("plain", PLAIN.to_vec()), ("edns", with_opt())] {
        group.bench_with_input(
            BenchmarkId::new("ours", label),
            &message,
            |bencher, message| {
                bencher.iter(|| parse(black_box(message)));
            },
        );
    }
    group.finish();
}

/// Writing replies with 1, 10 and 30 answers.
fn writing(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("wire/reply");
    let message = with_opt();
    let query = query(&message);
    for count in [1u32, 10, 30] {
        let v4: Vec<Ipv4Addr> = (0..count)
            .map(|number| Ipv4Addr::from_bits(0x0a00_0000 + number))
            .collect();
        let resolution = Resolution {
            existence: Existence::Found,
            v4,
            v6: vec![],
            checks: Checks::default(),
        };
        let mut shuffle = Shuffle::with_seed(1);
        let mut out = Vec::new();
        group.bench_with_input(
            BenchmarkId::new("ours", count),
            &resolution,
            |bencher, resolution| {
                bencher.iter(|| {
                    local_reply(
                        black_box(&query),
                        resolution.answer(),
                        &mut shuffle,
                        &mut out,
                    );
                    out.len()
                });
            },
        );
    }
    group.finish();
}

/// Truncating another server's reply of 100 uncompressed answers to 1232 bytes.
fn fitting(criterion: &mut Criterion) {
    let message = with_opt();
    let query = query(&message);
    let mut reply = PLAIN.to_vec();
    reply[7] = 100;
    for number in 0..100 {
        reply.extend_from_slice(b"\x04q-s0\x04q-g1\x04bosh\0\0\x01\0\x01\0\0\0\x3c\0\x04\x0a\0\0");
        reply.push(number);
    }
    criterion.bench_function("wire/fit/100", |bencher| {
        bencher.iter_batched(
            || reply.clone(),
            |reply| truncate_to_client(&query, reply),
            criterion::BatchSize::SmallInput,
        );
    });
}

/// Hashing names of 14, 40 and 90 bytes.
fn hashing(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("name/hash");
    for len in [14, 40, 90] {
        let name = vec![b'a'; len];
        group.bench_with_input(BenchmarkId::from_parameter(len), &name, |bencher, name| {
            bencher.iter(|| hash_name(black_box(1), black_box(name)));
        });
    }
    group.finish();
}

criterion_group!(benches, hashing, reading, writing, fitting);
criterion_main!(benches);
