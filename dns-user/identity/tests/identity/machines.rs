//! Machines of a fleet in trouble: wrong clocks, lost files, a CA that changed meanwhile; and what the
//! issuer keeps and refuses.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
    process::Command,
    thread,
    time::Duration,
};

use dns_identity::{
    fleet::{
        Member,
        state::{MembersFile, StateFolder},
    },
    folder::read_pair,
};
use serde_json::{Value, json};
use test_support::free_address;

use crate::{
    authorities::TestAuthority,
    fleet::{Fleet, converged, said},
    program::{Running, get, program, until},
    rotator::{matches, memory},
    tools::{clock, fires, has_faketime, text},
};

/// Returns a metric of an agent or issuer.
pub(crate) fn metric(address: std::net::SocketAddr, name: &str) -> Option<f64> {
    let text = get(address, "/metrics")?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().parse().ok()
}

fn member(fleet: &Fleet, id: &str) -> Member {
    StateFolder::open(fleet.path("state"))
        .unwrap()
        .members()
        .unwrap()[id]
        .clone()
}

#[test]
fn wrong_clocks_renew_once_and_follow() {
    if !has_faketime() {
        return;
    }
    let mut fleet = Fleet::start();
    let metrics = [free_address(), free_address()];
    for (instance, skew, address) in [("i1", -600, metrics[0]), ("i2", 600, metrics[1])] {
        fleet.environment = clock(skew);
        let token = fleet.token(instance);
        fleet.agent(instance, &token, &["--metrics", &address.to_string()]);
    }
    for (instance, skew, address) in [("i1", 600.0, metrics[0]), ("i2", -600.0, metrics[1])] {
        until("pairs", || fleet.has_pairs(instance));
        until("the measured skew", || {
            metric(address, "bosh_dns_identity_clock_skew_seconds")
                .is_some_and(|measured| (measured - skew).abs() <= 30.0)
        });
    }
    for address in metrics {
        until("a report", || {
            metric(address, "bosh_dns_identity_issuer_reached") == Some(1.0)
        });
        let scraped = get(address, "/metrics").unwrap();
        assert!(fires(&scraped, "BoshDnsIdentityClockSkew"), "{scraped}");
        assert!(
            !fires(&scraped, "BoshDnsIdentityIssuerNotReached"),
            "{scraped}"
        );
    }
    // Each agent reports that it follows, so a rotation ends.
    let new = TestAuthority::new("new");
    let (ca, key) = (new.certificate_path(), new.key_path());
    let output = fleet
        .rotate(&["--ca", text(&ca), "--ca-key", text(&key)])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    for (instance, address) in [("i1", metrics[0]), ("i2", metrics[1])] {
        assert!(fleet.follows(instance, &new, &[&new]));
        // Three pairs, each issued once by each CA.
        until("the last report", || {
            metric(address, "bosh_dns_identity_issuer_reached") == Some(1.0)
        });
        assert_eq!(
            metric(address, "bosh_dns_identity_renewals_total"),
            Some(6.0),
            "{instance}"
        );
    }
}

#[test]
fn token_leads_back_after_changed_ca() {
    let mut before = Fleet::start();
    let token = before.token("i1");
    before.agent("i1", &token, &[]);
    until("pairs of the first CA", || before.has_pairs("i1"));
    before.agents.clear();

    // The same machine, in a fleet whose CA changed while it was off.
    let mut after = Fleet::start();
    let copied = Command::new("cp")
        .arg("-a")
        .arg(before.path("i1"))
        .arg(after.path("i1"))
        .status()
        .unwrap();
    assert!(copied.success());
    let token = after.token("i1");
    after.agent("i1", &token, &[]);
    let authority = after.authority.certificate();
    let is_new = |folder: &Path| {
        read_pair(folder, "instance").is_ok_and(|pair| pair.certificate.ends_with(&authority))
    };
    until("pairs of the new CA", || {
        ["instance", "health.bosh-dns", "api.bosh-dns"]
            .iter()
            .all(|role| is_new(&after.pair("i1", role)))
    });
    until("the use of the token", || !after.path("i1.token").exists());
}

#[test]
fn damaged_and_lost_pairs_are_mended() {
    let fleet = converged(&["i1", "i2"]);
    // A lost role while the agent runs: a rotation is not blocked.
    fs::remove_dir_all(fleet.pair("i1", "api.bosh-dns")).unwrap();
    let new = TestAuthority::new("new");
    let (ca, key) = (new.certificate_path(), new.key_path());
    let output = fleet
        .rotate(&[
            "--ca",
            text(&ca),
            "--ca-key",
            text(&key),
            "--patience",
            "100",
        ])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    until("the lost role", || {
        read_pair(&fleet.pair("i1", "api.bosh-dns"), "instance").is_ok()
    });

    // A damaged own key needs a token and the fleet's present CA.
    fs::write(fleet.path("trust.crt"), new.certificate()).unwrap();
    let key = fleet.pair("i1", "instance").join("..data/instance.key");
    fs::write(
        &key,
        "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
    )
    .unwrap();
    let token = fleet.token("i1");
    fs::write(fleet.path("i1.token"), token).unwrap();
    until("a whole own pair", || {
        let pair = read_pair(&fleet.pair("i1", "instance"), "instance");
        pair.is_ok_and(|pair| pair.is_matching())
    });
    assert!(fleet.has_pairs("i2"));
}

#[test]
fn quiet_fleet_writes_nothing() {
    let fleet = converged(&["i1"]);
    let file = fleet.path("state/members.jsonl");
    let identity = || {
        let facts = fs::metadata(&file).unwrap();
        (facts.ino(), facts.mtime(), facts.mtime_nsec())
    };
    let before = identity();
    // Several reports of the agent, and several ticks of the issuer.
    thread::sleep(Duration::from_secs(4));
    assert_eq!(identity(), before, "nothing changed, so nothing is written");
}

#[test]
fn keys_of_retired_authorities_are_removed() {
    let fleet = Fleet::start();
    let (second, third) = (TestAuthority::new("second"), TestAuthority::new("third"));
    for next in [&second, &third] {
        let (ca, key) = (next.certificate_path(), next.key_path());
        let output = fleet
            .rotate(&["--ca", text(&ca), "--ca-key", text(&key)])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", said(&output));
    }
    let folders = fs::read_dir(fleet.path("state/authorities"))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut kept: Vec<String> = folders
        .filter(|folder| folder.join("ca.key").exists())
        .map(|folder| fs::read_to_string(folder.join("ca.crt")).unwrap())
        .collect();
    let mut expected = [second.certificate(), third.certificate()];
    kept.sort();
    expected.sort();
    // The issuing CA, and the one to go back to.
    assert_eq!(kept, expected);
}

#[test]
fn folders_have_one_owner() {
    let fleet = Fleet::start();
    let (state, records) = (fleet.path("state"), fleet.path("records.json"));
    let second = program()
        .args([
            "issuer",
            "--state",
            text(&state),
            "--records",
            text(&records),
            "--listen",
            "127.0.0.1:0",
        ])
        .output()
        .unwrap();
    assert!(
        !second.status.success() && said(&second).contains("another issuer uses"),
        "{}",
        said(&second)
    );

    let (authority, folder) = (TestAuthority::new("program"), memory());
    let (ca, key) = (authority.certificate_path(), authority.key_path());
    let (identities, control) = (
        folder.path().join("identities"),
        folder.path().join("control"),
    );
    let arguments = |control: &Path| {
        let words = [
            "run",
            "--ca",
            text(&ca),
            "--ca-key",
            text(&key),
            "--key-type",
            "p-256",
            "--folder",
        ];
        let paths = [text(&identities), "--control", text(control)];
        words
            .iter()
            .chain(&paths)
            .map(|word| (*word).to_owned())
            .collect::<Vec<_>>()
    };
    // Folders and socket are private whatever the umask.
    let line = format!(
        "umask 000; exec {} {}",
        env!("CARGO_BIN_EXE_bosh-dns-identity"),
        arguments(&control).join(" ")
    );
    let _first = Running(Command::new("sh").args(["-c", &line]).spawn().unwrap());
    until("the control socket", || control.exists());
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&control), mode(&identities)), (0o600, 0o755));
    let second = program()
        .args(arguments(&folder.path().join("other")))
        .output()
        .unwrap();
    assert!(
        !second.status.success() && said(&second).contains("another rotator uses"),
        "{}",
        said(&second)
    );
}

#[test]
fn tokens_are_for_known_instances() {
    let fleet = Fleet::start();
    let (state, typo) = (fleet.path("state"), fleet.path("typo"));
    let token = |state: &Path, more: &[&str]| {
        let output = program()
            .args(["token", "--state", text(state)])
            .args(more)
            .output()
            .unwrap();
        (output.status.success(), said(&output))
    };
    let (done, text_of) = token(&typo, &["--instance", "i1"]);
    assert!(
        !done && text_of.contains("not the state folder of an issuer") && !typo.exists(),
        "{text_of}"
    );
    let (done, text_of) = token(&state, &["--instance", "i9"]);
    assert!(!done && text_of.contains("no instance \"i9\""), "{text_of}");
    assert!(token(&state, &["--instance", "i9", "--allow-unknown"]).0);
    assert!(token(&state, &["--instance", "i1"]).0);
}

#[test]
fn excessive_reports_are_limited() {
    let mut fleet = converged(&["i1"]);
    fleet.agents.clear();
    let folder = fleet.pair("i1", "instance");
    let report = |body: &str| {
        let (crt, key, ca) = (
            folder.join("instance.crt"),
            folder.join("instance.key"),
            folder.join("ca.crt"),
        );
        let output = Command::new("curl")
            .args([
                "--silent",
                "--cert",
                text(&crt),
                "--key",
                text(&key),
                "--cacert",
                text(&ca),
            ])
            .args([
                "--connect-to",
                &format!("identity.bosh-dns:443:{}", fleet.address),
                "--data",
                body,
            ])
            .args([
                "--header",
                "content-type: application/json",
                "https://identity.bosh-dns/v1/report",
            ])
            .output()
            .unwrap();
        said(&output)
    };
    let Member {
        not_after: issued,
        issuers,
        ..
    } = member(&fleet, "i1");
    let issuer = issuers.first().unwrap();
    let answer =
        report(&json!({"generation": 7, "issuers": [issuer], "not_after": u64::MAX}).to_string());
    assert!(answer.contains("bundle"), "{answer}");
    until("the report", || member(&fleet, "i1").generation == 7);
    let held = member(&fleet, "i1").not_after;
    // A pair that is issued now ends no later: a dead member must not hold up a rotation for ever.
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    assert!(
        issued <= held && held <= now.as_secs() + 24 * 3600,
        "{held}"
    );
    for issuers in [vec!["0".repeat(64); 9], vec!["x".repeat(50_000)]] {
        let unique: Vec<String> = issuers
            .iter()
            .enumerate()
            .map(|(at, one)| format!("{at}{}", &one[1..]))
            .collect();
        let answer =
            report(&json!({"generation": 8, "issuers": unique, "not_after": 0}).to_string());
        assert!(answer.contains("at most 8 CAs"), "{answer}");
    }
    // Refusals are counted, but logged once a minute.
    let log = fs::read_to_string(fleet.path("log")).unwrap();
    assert_eq!(log.matches("request refused").count(), 1, "{log}");
    assert!(matches(&read_pair(&folder, "instance").unwrap()));
}

#[test]
fn emptied_records_keep_members() {
    let mut fleet = Fleet::start();
    fleet.issuer.stop();
    let rows: Vec<Value> = (1..=12)
        .map(|n| {
            json!([
                format!("i{n}"),
                "web",
                "default",
                "app",
                format!("10.0.0.{n}"),
                "bosh"
            ])
        })
        .collect();
    let (next, path) = (fleet.path("records.next"), fleet.path("records.json"));
    let records = |rows: &[Value]| {
        let keys = json!([
            "id",
            "instance_group",
            "network",
            "deployment",
            "ip",
            "domain"
        ]);
        fs::write(
            &next,
            json!({"record_keys": keys, "record_infos": rows}).to_string(),
        )
        .unwrap();
        fs::rename(&next, &path).unwrap();
    };
    records(&rows);
    let one = Member {
        generation: 1,
        issuers: BTreeSet::new(),
        not_after: 4_000_000_000,
    };
    let all = (1..=12)
        .map(|n| (format!("i{n}"), Some(one.clone())))
        .collect();
    MembersFile::open(&StateFolder::open(fleet.path("state")).unwrap())
        .unwrap()
        .save(&all)
        .unwrap();
    let metrics = free_address();
    let state = fleet.path("state");
    fleet.start_issuer(metrics);
    until("the issuer", || {
        metric(metrics, "bosh_dns_identity_members ") == Some(12.0)
    });
    records(&[]);
    until("the guard", || {
        metric(metrics, "bosh_dns_identity_files_usable") == Some(0.0)
    });
    assert_eq!(metric(metrics, "bosh_dns_identity_members "), Some(12.0));
    let log = fs::read_to_string(fleet.path("log")).unwrap();
    assert!(log.contains("12 of 12 disappeared at once"), "{log}");
    let confirmed = program()
        .args(["confirm-removals", "12", "--state", text(&state)])
        .status()
        .unwrap();
    assert!(confirmed.success());
    until("the confirmed removal", || {
        metric(metrics, "bosh_dns_identity_members ") == Some(0.0)
    });
}

/// Expiry and failure of each pair exist from the first scrape on, whatever the issuer does.
#[test]
fn failing_agent_is_visible_from_start() {
    let mut fleet = converged(&["i1"]);
    fleet.agents.clear();
    fleet.issuer.stop();
    let metrics = free_address();
    fleet.agent(
        "i1",
        "",
        &[
            "--metrics",
            &metrics.to_string(),
            "--role",
            "health.bosh-dns",
            "--role",
            "new.role",
        ],
    );
    until("metrics", || get(metrics, "/metrics").is_some());
    let scraped = get(metrics, "/metrics").unwrap();
    for (name, present) in [
        (
            "bosh_dns_identity_expiry_timestamp_seconds{guid=\"instance\"} 0",
            false,
        ),
        (
            "bosh_dns_identity_expiry_timestamp_seconds{guid=\"instance\"} ",
            true,
        ),
        (
            "bosh_dns_identity_renew_by_timestamp_seconds{guid=\"health.bosh-dns\"} ",
            true,
        ),
        (
            "bosh_dns_identity_expiry_timestamp_seconds{guid=\"new.role\"} 0",
            true,
        ),
        ("bosh_dns_identity_issuer_reached 0", true),
    ] {
        assert_eq!(scraped.contains(name), present, "{name}: {scraped}");
    }
    until("the failure of the new role", || {
        metric(metrics, "bosh_dns_identity_failing") == Some(1.0)
    });
    let failing = "bosh_dns_identity_pair_failing{guid=\"new.role\"}";
    assert_eq!(metric(metrics, failing), Some(1.0));
    let scraped = get(metrics, "/metrics").unwrap();
    for alert in ["Failing", "IssuerNotReached", "NoCertificate"] {
        assert!(
            fires(&scraped, &format!("BoshDnsIdentity{alert}")),
            "{alert}: {scraped}"
        );
    }
    assert!(!fires(&scraped, "BoshDnsIdentityClockSkew"), "{scraped}");
}

#[test]
fn waiting_rotation_fires_alert() {
    let mut fleet = converged(&["i1", "i2"]);
    fleet.issuer.stop();
    let metrics = free_address();
    fleet.start_issuer(metrics);
    fleet.agents.truncate(1);
    let new = TestAuthority::new("new");
    let (ca, key) = (new.certificate_path(), new.key_path());
    let output = fleet
        .rotate(&["--ca", text(&ca), "--ca-key", text(&key), "--patience", "1"])
        .output()
        .unwrap();
    assert!(
        !output.status.success() && said(&output).contains("i2"),
        "{}",
        said(&output)
    );
    until("the waiting rotation", || {
        metric(metrics, "bosh_dns_identity_lagging") == Some(1.0)
    });
    let scraped = get(metrics, "/metrics").unwrap();
    assert!(
        fires(&scraped, "BoshDnsIdentityRotationStalls"),
        "{scraped}"
    );
}
