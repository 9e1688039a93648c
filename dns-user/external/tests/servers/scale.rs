//! Ten thousand names, beside nsupdate on the same server.

use std::time::{Duration, Instant};

use dns_external::record::RecordType;
use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike as _,
};

use crate::name_server::{NameServer, Options, Program, names, quiet, record};

const NAMES: usize = 10_000;

/// Names in one message of nsupdate.
const NAMES_PER_MESSAGE: usize = 400;

/// Processor time of a run that changes nothing.
const NOTHING_TO_DO: Duration = Duration::from_secs(1);

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

    let before = processor_time();
    let (nothing, report) = timed(engine.reconcile(&desired, None, &quiet)).await;
    let processor = processor_time() - before;
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
        "{program:?}: {NAMES} names {first:.2?} (nsupdate {peer:.2?}), nothing to do {nothing:.2?} \
         ({processor:.2?} of processor time), unchanged serial {unchanged:.2?}, one change {one:.2?}"
    );
    let owner_records = server.transfer("example.org").matches("external-dns/owner=me").count();
    assert_eq!(owner_records, NAMES);
    // Elapsed time depends on what else the machine does; processor time hardly.
    assert!(processor < NOTHING_TO_DO, "nothing to do took {processor:?} of processor time");
}

async fn timed<T>(work: impl Future<Output = T>) -> (Duration, T) {
    let begin = Instant::now();
    let result = work.await;
    (begin.elapsed(), result)
}

/// Returns the processor time that this process has used.
fn processor_time() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_SELF).unwrap();
    let used = usage.user_time() + usage.system_time();
    Duration::from_micros(u64::try_from(used.num_microseconds()).unwrap())
}
