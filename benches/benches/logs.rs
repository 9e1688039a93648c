//! Cost of logging requests: without a consumer, with the rate-limited log, and with the tap.

use std::{hint::black_box, time::Duration};

use criterion::{Criterion, criterion_group, criterion_main};
use dns_core::{
    config::{LogLevel, LoggingConfig},
    name::Name,
};
use dns_kit::logs::{LogFormat, Logs, Request, requests};
use dns_resolver::ops::tap::Tap;

/// One request, logged repeatedly.
fn telling(criterion: &mut Criterion) {
    let config = LoggingConfig {
        level: LogLevel::Info,
        tags: Vec::new(),
    };
    let logs = Logs::init(&config, LogFormat::Text).expect("the bench sets up logging once");
    let name = Name::from_text("q-s0.q-g1.bosh").expect("the name is well-formed");
    let request = Request {
        name: &name,
        query_type: 1,
        rcode: 0,
        answers: 8,
        bytes: 160,
        client: ([10, 0, 0, 1], 5353).into(),
        transport: "udp",
        answered_by: "local",
        took: Duration::from_micros(3),
    };
    let tap = Tap::default();
    let tell = || {
        if requests::wanted() || tap.is_wanted() {
            requests::log(black_box(&request));
            tap.observe(black_box(&request));
        }
    };
    criterion.bench_function("request logged: no consumer", |bencher| bencher.iter(tell));
    // The tag of bosh-dns's request log, which is off at the usual levels.
    logs.set(Some("RequestLoggerHandler"), LogLevel::Debug);
    criterion.bench_function("request logged: rate-limited log", |bencher| {
        bencher.iter(tell)
    });
    logs.unset(Some("RequestLoggerHandler"));
    let view = tap.subscribe(100);
    criterion.bench_function("request logged: tap, one in 100", |bencher| {
        bencher.iter(tell)
    });
    // Open until here: without a view no request is observed.
    drop(view);
}

criterion_group!(benches, telling);
criterion_main!(benches);
