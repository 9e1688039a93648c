//! Issuer and agent killed at random moments: what they acknowledged is there afterwards, and nothing half done is.
//! `IDENTITY_KILLS=200` sets the number of rounds.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::{Duration, UNIX_EPOCH},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use dns_identity::{
    authority::{Fingerprint, certificates, parse_all, validity},
    certificate::signing_request,
    fleet::{Member, state::StateFolder},
    folder::read_pair,
    keys::{KeyType, PrivateKey},
};
use serde_json::{Value, json};
use test_support::free_address;

use crate::{
    authorities::TestAuthority,
    fleet::{Fleet, converged},
    leftovers::{generations, unfinished},
    program::until,
    sessions::{Caller, Proof},
    tools::text,
};

/// Number of instances that ask at a time.
const CLIENTS: usize = 4;

/// Longest time between a start and the kill.
const MAX_RUNNING: Duration = Duration::from_millis(250);

/// Maximum number of instances of a client in a round.
const MAX_NUMBER: usize = 40;

const ROLE: &str = "health.bosh-dns";

fn rounds() -> usize {
    std::env::var("IDENTITY_KILLS").map_or(20, |text| text.parse().unwrap())
}

/// The issuer's reply to an instance.
#[derive(Debug)]
struct Acknowledged {
    instance: String,
    token: String,
    /// Latest end of validity of a pair.
    not_after: u64,
    issuers: BTreeSet<Fingerprint>,
    /// Generation that was reported.
    generation: u64,
}

/// Gets pairs for new instances until the issuer is gone.
fn ask_until_killed(
    fleet: &Fleet,
    client: usize,
    round: usize,
    replies: &AtomicUsize,
) -> Vec<Acknowledged> {
    let state = StateFolder::open(fleet.path("state")).unwrap();
    let key = PrivateKey::generate(KeyType::P256).unwrap();
    let caller = Caller::new(fleet.address, &fleet.authority);
    let mut acknowledged = Vec::new();
    for number in 0..MAX_NUMBER {
        let instance = format!("i{round}-{client}-{number}");
        let now = std::time::SystemTime::now();
        let hour = Duration::from_secs(3600);
        let token = state
            .create_token(&instance, now, hour)
            .unwrap()
            .to_string();
        let request = STANDARD.encode(signing_request(&key, &instance).unwrap());
        let body = |role: Option<&str>| json!({"instance": instance, "role": role, "names": [], "addresses": null, "request": request});
        let Ok(first) = caller.call("/v1/pair", &body(None), &Proof::Token(&token)) else {
            return acknowledged;
        };
        replies.fetch_add(1, Ordering::Relaxed);
        let certificate = first["certificate"].as_str().unwrap().to_owned();
        let mut got = Acknowledged {
            instance: instance.clone(),
            token,
            not_after: end(&certificate),
            issuers: BTreeSet::from([issuer(&certificate)]),
            generation: 0,
        };
        let pem = key.to_pem().unwrap();
        let own = Proof::Pair(&certificate, &pem);
        if let Ok(second) = caller.call("/v1/pair", &body(Some(ROLE)), &own) {
            got.not_after = got
                .not_after
                .max(end(second["certificate"].as_str().unwrap()));
        }
        let report = json!({"generation": 1, "issuers": got.issuers, "not_after": got.not_after});
        if caller.call("/v1/report", &report, &own).is_ok() {
            got.generation = 1;
        }
        acknowledged.push(got);
    }
    acknowledged
}

fn end(certificate: &str) -> u64 {
    let ders = certificates(certificate.as_bytes()).unwrap();
    let end = validity(&parse_all(&ders).unwrap()[0]).not_after;
    end.duration_since(UNIX_EPOCH).unwrap().as_secs()
}

fn issuer(certificate: &str) -> Fingerprint {
    Fingerprint::of(&certificates(certificate.as_bytes()).unwrap()[1])
}

#[test]
fn issuer_keeps_what_it_acknowledged() {
    let mut fleet = Fleet::start();
    // More instances than a round has time for.
    let mut rows = Vec::new();
    for round in 0..rounds() {
        for client in 0..CLIENTS {
            for number in 0..MAX_NUMBER {
                let id = format!("i{round}-{client}-{number}");
                rows.push(json!([id, "web", "default", "app", "10.0.0.1", "bosh"]));
            }
        }
    }
    let keys = json!([
        "id",
        "instance_group",
        "network",
        "deployment",
        "ip",
        "domain"
    ]);
    let records = json!({"record_keys": keys, "record_infos": rows}).to_string();
    fs::write(fleet.path("records.json"), records).unwrap();
    fleet.issuer.stop();
    fleet.start_issuer(free_address());
    let mut all = Vec::new();
    for round in 0..rounds() {
        let replies = &AtomicUsize::new(0);
        thread::scope(|scope| {
            let clients: Vec<_> = (0..CLIENTS)
                .map(|client| {
                    let fleet = &fleet;
                    scope.spawn(move || ask_until_killed(fleet, client, round, replies))
                })
                .collect();
            // Every other kill comes after a reply, however busy the machine is.
            if round % 2 == 1 {
                until("a reply", || replies.load(Ordering::Relaxed) > 0);
            }
            thread::sleep(MAX_RUNNING.mul_f64(fastrand::f64()));
            let id = nix::unistd::Pid::from_raw(fleet.issuer.0.id().cast_signed());
            nix::sys::signal::kill(id, nix::sys::signal::Signal::SIGKILL).unwrap();
            for client in clients {
                all.extend(client.join().unwrap());
            }
        });
        fleet.issuer.0.wait().unwrap();
        fleet.start_issuer(free_address());
        check_issuer(&fleet, &all, round);
    }
    assert!(
        all.len() >= rounds() / 2,
        "only {} instances got pairs",
        all.len()
    );
    println!("{} instances, {} kills", all.len(), rounds());
}

fn check_issuer(fleet: &Fleet, all: &[Acknowledged], round: usize) {
    let state = fleet.path("state");
    assert_eq!(unfinished(&state), [] as [PathBuf; 0], "round {round}");
    let members = StateFolder::open(state).unwrap().members().unwrap();
    for got in all {
        let Member {
            generation,
            issuers,
            not_after,
        } = &members[&got.instance];
        assert!(got.generation <= *generation, "round {round}: {got:?}");
        assert!(got.issuers.is_subset(issuers), "round {round}: {got:?}");
        assert!(
            got.not_after <= *not_after,
            "round {round}: {got:?}, {not_after}"
        );
    }
    // A token works once, whatever happens in between.
    if let Some(got) = all.last() {
        let caller = Caller::new(fleet.address, &fleet.authority);
        let body = json!({"instance": got.instance, "role": null, "names": [], "addresses": null, "request": ""});
        let refused = caller.call("/v1/pair", &body, &Proof::Token(&got.token));
        let refused = refused.unwrap_err();
        assert!(refused.contains("unknown or already used"), "{refused}");
    }
}

/// Returns the fleet's generation and bundle, PEM.
fn trust(fleet: &Fleet) -> (u64, String) {
    let state = fleet.path("state");
    let trust: Value =
        serde_json::from_slice(&fs::read(state.join("trust.json")).unwrap()).unwrap();
    let mut bundle = String::new();
    for ca in trust["trusted"].as_array().unwrap() {
        let folder = state.join("authorities").join(ca.as_str().unwrap());
        bundle += &fs::read_to_string(folder.join("ca.crt")).unwrap();
    }
    (trust["generation"].as_u64().unwrap(), bundle)
}

/// The issuer's view of an agent, which a rotation relies on, is never ahead of the agent's files.
fn check_agent(fleet: &Fleet, round: usize) {
    let before = trust(fleet);
    let members = StateFolder::open(fleet.path("state"))
        .unwrap()
        .members()
        .unwrap();
    let member = &members["i1"];
    for role in ["instance", ROLE, "api.bosh-dns"] {
        let folder = fleet.pair("i1", role);
        let pair = read_pair(&folder, "instance").unwrap();
        assert!(pair.is_matching(), "round {round}: {role}");
        assert!(
            member.issuers.contains(&issuer(&pair.certificate)),
            "round {round}: {role} is of a CA that the issuer does not know of"
        );
        let bundle = fs::read_to_string(folder.join("ca.crt")).unwrap();
        // The trust may change while it is compared.
        if member.generation == before.0 && trust(fleet) == before {
            assert_eq!(bundle, before.1, "round {round}: {role}");
        }
    }
}

/// Rotates between two CAs without an end.
fn rotate_until(fleet: &Fleet, other: &TestAuthority, ended: &AtomicBool) -> usize {
    let mut rotations = 0;
    while !ended.load(Ordering::Relaxed) {
        let authority = if rotations % 2 == 0 {
            other
        } else {
            &fleet.authority
        };
        let (ca, key) = (authority.certificate_path(), authority.key_path());
        let arguments = [
            "--ca",
            text(&ca),
            "--ca-key",
            text(&key),
            "--patience",
            "100",
            "--settle",
            "0",
        ];
        let output = fleet.rotate(&arguments).output().unwrap();
        assert!(output.status.success(), "{}", crate::fleet::said(&output));
        rotations += 1;
    }
    rotations
}

#[test]
fn agent_is_never_behind_its_reports() {
    let mut fleet = converged(&["i1"]);
    let other = TestAuthority::new("other");
    let ended = AtomicBool::new(false);
    let mut agents = std::mem::take(&mut fleet.agents);
    let fleet = &fleet;
    let rotations = thread::scope(|scope| {
        let rotation = scope.spawn(|| rotate_until(fleet, &other, &ended));
        for round in 0..rounds() {
            thread::sleep(Duration::from_millis(fastrand::u64(0..1500)));
            let mut agent = agents.remove(0);
            agent.0.kill().unwrap();
            agent.0.wait().unwrap();
            check_agent(fleet, round);
            // Without a token: its pairs suffice.
            agents.push(fleet.start_agent("i1", &["--spread", "1"]));
            until("the agent's start", || {
                let folders = ["instance", ROLE, "api.bosh-dns"].map(|role| fleet.pair("i1", role));
                unfinished(&fleet.path("i1")).is_empty()
                    && folders
                        .iter()
                        .all(|folder: &PathBuf| generations(folder) <= 2)
            });
        }
        ended.store(true, Ordering::Relaxed);
        rotation.join().unwrap()
    });
    assert!(rotations > 0, "no rotation ended beside the kills");
    println!("{rotations} rotations, {} kills", rounds());
}

/// The token's file is there until the pair is: an agent that is killed in between can say what it lacks.
#[test]
fn killed_bootstrap_leaves_token_or_pair() {
    let mut fleet = Fleet::start();
    for round in 0..rounds() {
        let folder = fleet.path("i2");
        // Of the round before.
        let _ = fs::remove_dir_all(&folder);
        let token = fleet.token("i2");
        fleet.agent("i2", &token, &[]);
        thread::sleep(Duration::from_millis(fastrand::u64(0..400)));
        let mut agent = fleet.agents.remove(0);
        agent.0.kill().unwrap();
        agent.0.wait().unwrap();
        let has_pair =
            read_pair(&folder.join("instance"), "instance").is_ok_and(|pair| pair.is_matching());
        let has_token = fleet.path("i2.token").exists();
        assert!(has_pair || has_token, "round {round}");
        assert_links(&folder, round);
    }
}

/// Every name of a pair leads to a file.
fn assert_links(folder: &Path, round: usize) {
    for role in ["instance", ROLE] {
        let place = folder.join(role);
        if place.join("..data").exists() {
            read_pair(&place, "instance").unwrap_or_else(|error| panic!("round {round}: {error}"));
        }
    }
}
