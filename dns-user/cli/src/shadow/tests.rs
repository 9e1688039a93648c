//! The server compared with itself, in one process: as many replies as a machine sends in an hour.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    answers::{OurServer, States},
    health::{Asked, FollowedHealth},
    progress_line,
};
use dns_core::{
    name::Name,
    resolve::{Health, HealthState},
    wire::{
        FLAG_RD, TYPE_A, TYPE_AAAA, TYPE_ANY, TYPE_PTR, TYPE_TXT, Transport, opt_record,
        query_message,
    },
};
use dns_resolver::{
    daemon::shadow::FollowedFleet,
    server::{Cookies, Identity, socketless::SocketlessServer},
};
use dns_shadow::{
    judge::{GroupCause, Judge, TRANSITION, Verdicts},
    pairs::Exchange,
    report::Seen,
    rows::Row,
};

/// Versions of the records, and replies while both servers have the same one, and while one is behind.
const VERSIONS: u32 = 100;
const SAME: usize = 900;
const BEHIND: usize = 100;

/// Questions of every kind that has an answer at once.
const QUESTIONS: [(&str, u16); 14] = [
    ("q-s0.q-g1.bosh.", TYPE_A),
    ("q-s0.q-g1.bosh.", TYPE_ANY),
    ("q-s0.q-g1.bosh.", TYPE_AAAA),
    ("q-s0.q-g2.bosh.", TYPE_A),
    ("q-i1s4.q-g2.bosh.", TYPE_A),
    // The API tells the states of their instances.
    ("q-s0.web1.net.dep.bosh.", TYPE_A),
    ("q-s3.web1.net.dep.bosh.", TYPE_A),
    ("id-1-0.web1.net.dep.bosh.", TYPE_A),
    ("id-1-0.web1.net.dep.bosh.", TYPE_TXT),
    ("alias.internal.", TYPE_A),
    ("none.q-g1.bosh.", TYPE_A),
    ("www.bosh.", TYPE_A),
    ("1.1.0.10.in-addr.arpa.", TYPE_PTR),
    ("outside.example.", TYPE_A),
];

/// An instance of all versions, whose health flips.
const FLIPPING: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 1, 1));

/// The health of instances as the observed server knows it.
#[derive(Clone, Copy)]
struct Flips {
    is_failing: bool,
}

impl Health for Flips {
    fn state(&self, ip: IpAddr, _group: Option<&str>) -> HealthState {
        if self.is_failing && ip == FLIPPING {
            HealthState::Failing
        } else {
            HealthState::Running
        }
    }
}

impl Flips {
    /// Tells our side, as known since a moment.
    fn tell(self, asked: &Asked, fleet: &FollowedFleet, since: Instant) {
        let snapshot = fleet.snapshot();
        let mut states = Vec::new();
        for address in snapshot.instances().filter_map(|instance| instance.ip) {
            states.push((address, self.state(address, None)));
        }
        // A row that was forgotten and is reported again is new.
        asked.record(Ok(Vec::new()), since);
        asked.record(Ok(states), since);
    }
}

/// Writes records whose groups have other members in each version.
fn write_records(folder: &Path, version: u32) {
    let mut rows = Vec::new();
    for (group, count) in [(1, 3), (2, 60)] {
        for number in 0..count {
            let last = if number == 0 { 1 } else { number + version % 7 };
            rows.push(serde_json::json!([
                format!("id-{group}-{number}"),
                format!("web{group}"),
                "net",
                "dep",
                format!("10.0.{group}.{last}"),
                "bosh",
                [group.to_string()],
                number,
            ]));
        }
    }
    let records = serde_json::json!({
        "record_keys": [
            "id", "instance_group", "network", "deployment", "ip", "domain", "group_ids", "instance_index",
        ],
        "record_infos": rows, "version": version,
        "records": [["10.0.1.1", "id-1-0.web1.net.dep.bosh"]],
        "aliases": {"alias.internal": [{"group_id": "1", "root_domain": "bosh"}]},
    });
    fs::write(folder.join("new"), records.to_string()).unwrap();
    fs::rename(folder.join("new"), folder.join("records.json")).unwrap();
}

fn message(random: &mut fastrand::Rng) -> Vec<u8> {
    let (name, qtype) = QUESTIONS[random.usize(..QUESTIONS.len())];
    let mut wire = Name::from_text(name).unwrap().as_wire().to_vec();
    for byte in &mut wire {
        if byte.is_ascii_lowercase() && random.bool() {
            byte.make_ascii_uppercase();
        }
    }
    let mut message = query_message(random.u16(..), FLAG_RD, &wire, qtype);
    if let Some(size) = [None, Some(512), Some(1232)][random.usize(..3)] {
        message.extend_from_slice(&opt_record(size, 0, random.bool()));
        message[11] = 1;
    }
    message
}

/// The server in use, and the comparison with it.
struct Comparison {
    observed: SocketlessServer,
    judge: Judge<OurServer>,
    random: fastrand::Rng,
}

impl Comparison {
    fn ask(&mut self, count: usize) {
        let client: SocketAddr = "10.9.9.9:4000".parse().unwrap();
        for _ in 0..count {
            let query = message(&mut self.random);
            let transport = if self.random.u8(..5) == 0 {
                Transport::Tcp
            } else {
                Transport::Udp
            };
            let asked = Instant::now();
            let considered = self.observed.consider(&query, client, transport);
            self.judge.judge(Exchange {
                client,
                transport,
                query,
                reply: considered.unwrap().reply.unwrap(),
                asked,
                replied: Instant::now(),
                latency: None,
            });
        }
    }
}

fn server(fleet: &FollowedFleet, health: Flips) -> SocketlessServer {
    let config = &fleet.config;
    let identity = Arc::new(Identity::of_this_host(config.identity));
    let state = fleet.state(Arc::new(health));
    SocketlessServer::new(
        state,
        identity,
        config.compat,
        Cookies::new(&config.cookies),
    )
}

#[test]
fn progress_fits_usual_terminal() {
    let mut seen = Seen::default();
    let mut verdicts = Verdicts::default();
    let line = progress_line(&seen, &verdicts);
    assert!(line.starts_with("0 unexplained, ") && line.ends_with(" equal of 0 queries"));
    // A day of 50,000 queries per second.
    seen.estimated_queries = 4_320_000_000;
    verdicts.equal = seen.estimated_queries;
    verdicts.documented = seen.estimated_queries;
    assert!(progress_line(&seen, &verdicts).len() < 80);
}

/// 100,000 replies of an unchanged server, whose records and health change 100 times before or after ours.
#[tokio::test]
async fn unchanged_server_is_never_different() {
    let folder = tempfile::tempdir().unwrap();
    write_records(folder.path(), 0);
    let config = serde_json::json!({
        "address": "127.0.0.1", "port": 53, "disable_recursors": true,
        "records_file": folder.path().join("records.json"), "upcheck_domains": ["upcheck.bosh-dns."],
    });
    let path = folder.path().join("config.json");
    fs::write(&path, config.to_string()).unwrap();
    let mut fleet = FollowedFleet::of(&path).unwrap();
    let states = States::default();
    let asked = Arc::new(Asked::default());
    let health = FollowedHealth::Asked(asked.clone());
    let mut flips = Flips { is_failing: false };
    let long_ago = Instant::now().checked_sub(2 * TRANSITION).unwrap();
    flips.tell(&asked, &fleet, long_ago);
    states.install(&fleet, &health);
    let ours = OurServer::new(states.clone(), health.clone(), true);
    let mut comparison = Comparison {
        observed: server(&fleet, flips),
        judge: Judge::new(ours),
        random: fastrand::Rng::with_seed(69),
    };
    for version in 1..=VERSIONS {
        write_records(folder.path(), version);
        while fleet.snapshot().version() != Some(version.into()) {
            fleet.follow().await;
        }
        flips.is_failing = !flips.is_failing;
        if version % 2 == 0 {
            flips.tell(&asked, &fleet, Instant::now());
            states.install(&fleet, &health);
            comparison.ask(BEHIND);
            comparison.observed = server(&fleet, flips);
        } else {
            comparison.observed = server(&fleet, flips);
            comparison.ask(BEHIND);
            flips.tell(&asked, &fleet, Instant::now());
            states.install(&fleet, &health);
        }
        comparison.judge.settle(Instant::now() + 2 * TRANSITION);
        // Both know the same, and have for a while.
        flips.tell(&asked, &fleet, long_ago);
        comparison.ask(SAME);
    }
    comparison.judge.settle(Instant::now() + 2 * TRANSITION);
    comparison.judge.finish();
    let tally = &comparison.judge.tally;
    assert_eq!(tally.verdicts.compared, 100_000);
    assert_eq!(tally.verdicts.unexplained, 0, "{:#?}", tally.groups);
    assert_eq!(
        (tally.verdicts.unjudged, tally.verdicts.documented),
        (0, 0),
        "{tally:?}"
    );
    // Replies from other versions were among them.
    assert!(
        tally.verdicts.in_transition > 1_000,
        "{}",
        tally.verdicts.in_transition
    );
    assert!(comparison.judge.is_settled());
}

/// A handler whose domain was in the records: forwarded for a while, as by the observed server, then used again, which
/// is a documented difference.
#[tokio::test]
async fn handler_returns_after_its_domain() {
    let folder = tempfile::tempdir().unwrap();
    write_records(folder.path(), 0);
    let handlers = serde_json::json!([
        {"domain": "bosh.", "source": {"type": "deny", "response": "REFUSED"}},
    ]);
    fs::write(folder.path().join("handlers.json"), handlers.to_string()).unwrap();
    let config = serde_json::json!({
        "address": "127.0.0.1", "port": 53, "recursors": ["192.0.2.53"],
        "records_file": folder.path().join("records.json"),
        "handlers_files_glob": folder.path().join("handlers.json"),
    });
    let path = folder.path().join("config.json");
    fs::write(&path, config.to_string()).unwrap();
    let mut fleet = FollowedFleet::of(&path).unwrap();
    let (states, health) = (States::default(), FollowedHealth::Off);
    states.install(&fleet, &health);
    let mut judge = Judge::new(OurServer::new(states.clone(), health.clone(), true));

    fs::write(folder.path().join("records.json"), "{}").unwrap();
    while fleet.snapshot().instances().len() > 0 {
        fleet.follow().await;
    }
    states.install(&fleet, &health);
    judge.judge(forwarded("www.bosh."));
    assert_eq!(judge.tally.verdicts.same_route, 1, "{:#?}", judge.tally);

    let later = Instant::now() + Duration::from_secs(31);
    assert!(fleet.reload(later).await);
    states.install(&fleet, &health);
    judge.judge(forwarded("www.bosh."));
    let cause = GroupCause::Documented(Row::RetiredHandlers);
    assert!(
        judge.tally.groups.contains_key(&cause),
        "{:#?}",
        judge.tally
    );
    assert_eq!(judge.tally.verdicts.documented, 1);
}

/// An answer of a recursor that the observed server passed on.
fn forwarded(name: &str) -> Exchange {
    let wire = Name::from_text(name).unwrap().as_wire().to_vec();
    let query = query_message(7, FLAG_RD, &wire, TYPE_A);
    let mut reply = query.clone();
    // QR, RD, RA, and an A record with a TTL.
    reply[2..4].copy_from_slice(&[0x81, 0x80]);
    reply[7] = 1;
    reply.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 1]);
    let now = Instant::now();
    Exchange {
        client: "10.9.9.9:4000".parse().unwrap(),
        transport: Transport::Udp,
        query,
        reply,
        asked: now,
        replied: now,
        latency: None,
    }
}
