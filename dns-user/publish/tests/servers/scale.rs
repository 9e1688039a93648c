//! Ten thousand names, by the engine and by the whole command, compared with nsupdate on the same server. `cargo
//! bench` repeats it optimised.

use std::{
    fs,
    process::Command,
    time::{Duration, Instant},
};

use dns_publish::record::RecordType;
use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike as _,
};
use serde_json::{Value, json};

use crate::name_server::{NameServer, Options, Program, names, quiet, record};

const NAMES: usize = 10_000;

/// Names in one message of nsupdate.
const NAMES_PER_MESSAGE: usize = 400;

/// Times of one server.
#[derive(Debug)]
pub(crate) struct Figures {
    /// The engine's first publication.
    pub(crate) first: Duration,
    /// A first publication by `bosh-dns-publish apply`, from its start to its end.
    pub(crate) command: Duration,
    /// The same records by nsupdate, without prerequisites.
    pub(crate) nsupdate: Duration,
    /// A run that transfers the zone and finds nothing to do.
    pub(crate) nothing: Duration,
    pub(crate) processor: Duration,
    /// A run that changes one name.
    pub(crate) one: Duration,
    /// A run that changes a tenth of the names, each of which is read back by a query.
    pub(crate) tenth: Duration,
    /// The same changes by nsupdate, which reads nothing back.
    pub(crate) nsupdate_tenth: Duration,
}

#[tokio::test]
async fn bind_publishes_ten_thousand_names() {
    publish(Program::Bind).await;
}

#[tokio::test]
async fn knot_publishes_ten_thousand_names() {
    publish(Program::Knot).await;
}

async fn publish(program: Program) {
    let Figures {
        first,
        command,
        nsupdate,
        nothing,
        processor,
        one,
        tenth,
        nsupdate_tenth,
    } = measure(program, false).await;
    println!(
        "{program:?}: {NAMES} names {first:.2?} (whole command {command:.2?}, nsupdate {nsupdate:.2?}), nothing to do {nothing:.2?} \
         ({processor:.2?} of processor time), one change {one:.2?}, a thousand {tenth:.2?} (nsupdate {nsupdate_tenth:.2?})"
    );
}

/// Publishes to two zones of a new server, and with nsupdate to another; either may be first.
pub(crate) async fn measure(program: Program, nsupdate_first: bool) -> Figures {
    let options = Options {
        zones: vec!["example.org", "command.example", "peer.example"],
        ..Options::default()
    };
    let server = NameServer::with(program, options);
    let lines = lines();
    let peer = || {
        let begin = Instant::now();
        server.nsupdate(&lines);
        begin.elapsed()
    };
    let before = nsupdate_first.then(peer);
    let command = run_command(&server);

    let mut parameters = server.parameters();
    parameters
        .0
        .insert("rfc2136-zone".to_owned(), "example.org".to_owned());
    let mut settings =
        dns_publish::provider::rfc2136::Rfc2136Settings::from_parameters(&parameters).unwrap();
    // A busy machine must not end the measurement.
    settings.timeout = Duration::from_mins(5);
    let mut engine = crate::name_server::engine(settings);
    let mut desired = names(NAMES);

    let (first, report) = timed(engine.reconcile(&desired, None, &quiet)).await;
    let report = report.unwrap();
    assert!(report.is_complete(), "{report:?}");
    assert_eq!((report.applied(), report.rounds), (NAMES, 1));

    let used = processor_time();
    let (nothing, report) = timed(engine.reconcile(&desired, None, &quiet)).await;
    let processor = processor_time() - used;
    assert_eq!(report.unwrap().applied(), 0);

    desired.records[17] = record("n17.example.org", RecordType::A, "203.0.113.17");
    let (one, report) = timed(engine.reconcile(&desired, None, &quiet)).await;
    let report = report.unwrap();
    assert_eq!(report.applied(), 1, "{report:?}");

    for record in desired.records.iter_mut().take(NAMES / 10) {
        record.ttl = Some(61);
    }
    let (tenth, report) = timed(engine.reconcile(&desired, None, &quiet)).await;
    let report = report.unwrap();
    assert_eq!((report.applied(), report.rounds), (NAMES / 10, 1));

    let nsupdate = before.unwrap_or_else(peer);
    let lines = changed_lines();
    let begin = Instant::now();
    server.nsupdate(&lines);
    let nsupdate_tenth = begin.elapsed();
    for zone in ["example.org", "command.example", "peer.example"] {
        assert_eq!(
            server
                .transfer(zone)
                .matches("external-dns/owner=me")
                .count(),
            NAMES,
            "{zone}"
        );
    }
    Figures {
        first,
        command,
        nsupdate,
        nothing,
        processor,
        one,
        tenth,
        nsupdate_tenth,
    }
}

/// Publishes the same names of another zone by the command, from a document in a file.
fn run_command(server: &NameServer) -> Duration {
    const ZONE: &str = "command.example";
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, document: &Value| {
        fs::write(folder.path().join(name), document.to_string()).unwrap()
    };
    write(
        "publish.yml",
        &json!({"documents": ["bind.json", "web.json"], "store": "store"}),
    );
    let mut parameters = server.parameters();
    parameters
        .0
        .insert("rfc2136-zone".to_owned(), ZONE.to_owned());
    parameters
        .0
        .insert("txt-owner-id".to_owned(), "me".to_owned());
    write(
        "bind.json",
        &json!({
            "apiVersion": "bosh-dns-publish/v1", "kind": "DNSUpdateRecord", "metadata": {"name": "bind"},
            "spec": {"provider": "rfc2136", "external-dns-parameters": parameters.0},
        }),
    );
    let endpoint = |number: usize| {
        let target = format!("198.51.{}.{}", number / 250 % 250, number % 250);
        json!({"dnsName": format!("n{number}.{ZONE}"), "recordTTL": 60, "recordType": "A", "targets": [target]})
    };
    let endpoints: Vec<Value> = (0..NAMES).map(endpoint).collect();
    write(
        "web.json",
        &json!({
            "apiVersion": "externaldns.k8s.io/v1alpha1", "kind": "DNSEndpoint",
            "metadata": {"name": "web", "labels": {"dnsprovider": "bind"}}, "spec": {"endpoints": endpoints},
        }),
    );
    let mut command = Command::new(env!("CARGO_BIN_EXE_bosh-dns-publish"));
    command
        .args(["--config", "publish.yml", "apply"])
        .current_dir(folder.path());
    let begin = Instant::now();
    let output = command.output().unwrap();
    let elapsed = begin.elapsed();
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(
        said,
        format!("default/bind: {NAMES} names changed\n"),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    elapsed
}

/// Returns the same names for nsupdate, in another zone.
fn lines() -> String {
    let mut lines = String::new();
    for number in 0..NAMES {
        let (high, low) = (number / 250 % 250, number % 250);
        lines.push_str(&format!(
            "update add n{number}.peer.example. 60 A 198.51.{high}.{low}\n"
        ));
        lines.push_str(&format!(
            "update add a-n{number}.peer.example. 60 TXT \"heritage=external-dns,external-dns/owner=me,\
             external-dns/resource=crd/default/web\"\n"
        ));
        if number % NAMES_PER_MESSAGE == NAMES_PER_MESSAGE - 1 {
            lines.push_str("send\n");
        }
    }
    lines
}

/// Returns another TTL for a tenth of the names, for nsupdate.
fn changed_lines() -> String {
    let mut lines = String::new();
    for number in 0..NAMES / 10 {
        let (high, low) = (number / 250 % 250, number % 250);
        lines.push_str(&format!("update delete n{number}.peer.example. A\n"));
        lines.push_str(&format!(
            "update add n{number}.peer.example. 61 A 198.51.{high}.{low}\n"
        ));
        if number % NAMES_PER_MESSAGE == NAMES_PER_MESSAGE - 1 {
            lines.push_str("send\n");
        }
    }
    lines
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
