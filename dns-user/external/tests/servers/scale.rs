//! Ten thousand names, beside nsupdate on the same server.

use std::time::{Duration, Instant};

use dns_external::record::RecordType;

use crate::name_server::{NameServer, Options, Program, names, quiet, record};

const NAMES: usize = 10_000;

/// Names in one message of nsupdate.
const NAMES_PER_MESSAGE: usize = 400;

#[tokio::test]
async fn bind_publishes_ten_thousand_names() {
    publish(Program::Bind).await;
}

#[tokio::test]
async fn knot_publishes_ten_thousand_names() {
    publish(Program::Knot).await;
}

async fn publish(program: Program) {
    let options = Options { zones: vec!["example.org", "peer.example"], ..Options::default() };
    let server = NameServer::with(program, options);
    let mut parameters = server.parameters();
    parameters.0.insert("rfc2136-zone".to_owned(), "example.org".to_owned());
    let settings = dns_external::provider::rfc2136::Settings::from_parameters(&parameters).unwrap();
    let mut engine = crate::name_server::engine(settings);
    let mut desired = names(NAMES);

    let (first, report) = timed(engine.reconcile(&desired, None, &quiet)).await;
    let report = report.unwrap();
    assert!(report.is_complete(), "{report:?}");
    assert_eq!((report.applied(), report.rounds), (NAMES, 1));

    let (nothing, report) = timed(engine.reconcile(&desired, None, &quiet)).await;
    assert_eq!(report.unwrap().applied(), 0);
    // The first run after the writes transfers the zone; the next one compares serial numbers.
    let (unchanged, report) = timed(engine.reconcile(&desired, None, &quiet)).await;
    assert_eq!(report.unwrap().applied(), 0);

    desired.records[17] = record("n17.example.org", RecordType::A, "203.0.113.17");
    let (one, report) = timed(engine.reconcile(&desired, None, &quiet)).await;
    assert_eq!(report.unwrap().applied(), 1);

    let mut lines = String::new();
    for number in 0..NAMES {
        let (high, low) = (number / 250 % 250, number % 250);
        lines.push_str(&format!("update add n{number}.peer.example. 60 A 198.51.{high}.{low}\n"));
        lines.push_str(&format!(
            "update add a-n{number}.peer.example. 60 TXT \"heritage=external-dns,external-dns/owner=me\"\n"
        ));
        if number % NAMES_PER_MESSAGE == NAMES_PER_MESSAGE - 1 {
            lines.push_str("send\n");
        }
    }
    let begin = Instant::now();
    server.nsupdate(&lines);
    let peer = begin.elapsed();

    println!(
        "{program:?}: {NAMES} names {first:.2?} (nsupdate {peer:.2?}), nothing to do {nothing:.2?}, \
         unchanged serial {unchanged:.2?}, one change {one:.2?}"
    );
    let owner_records = server.transfer("example.org").matches("external-dns/owner=me").count();
    assert_eq!(owner_records, NAMES);
    assert!(nothing.max(unchanged) < Duration::from_secs(5), "nothing to do took {nothing:?}, {unchanged:?}");
}

async fn timed<T>(work: impl Future<Output = T>) -> (Duration, T) {
    let begin = Instant::now();
    let result = work.await;
    (begin.elapsed(), result)
}
