//! Lost files and wrong clocks: the program refuses what would shut machines out, and recovers by itself.

use std::{
    fs::{self, File},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use dns_identity::{
    certificate::signing_request,
    fleet::state::StateFolder,
    folder::read_pair,
    keys::{KeyType, PrivateKey},
    run::{self, ControlCommand as Order, Reply},
};
use serde_json::json;
use test_support::free_address;

use crate::{
    authorities::{CaKey, SOUND, TestAuthority},
    fleet::{converged, said},
    program::{Running, program, until},
    rotator::{guid, memory},
    sessions::{Caller, Proof},
    tools::{FAKETIME, has_faketime, text},
};

#[test]
fn lost_trust_is_not_replaced() {
    let mut fleet = converged(&["i1", "i2"]);
    fleet.issuer.stop();
    let trust = fleet.path("state/trust.json");
    let backup = fs::read(&trust).unwrap();
    fs::remove_file(&trust).unwrap();
    let other = TestAuthority::new("other");
    let (ca, key) = (other.certificate_path(), other.key_path());
    let (state, records) = (fleet.path("state"), fleet.path("records.json"));
    for more in [&["--ca", text(&ca), "--ca-key", text(&key)][..], &[]] {
        let output = program()
            .args([
                "issuer",
                "--state",
                text(&state),
                "--records",
                text(&records),
            ])
            .args(["--listen", &free_address().to_string()])
            .args(more)
            .output()
            .unwrap();
        let text = said(&output);
        assert!(!output.status.success(), "{text}");
        assert!(
            text.contains("instances have certificates (2); restore it"),
            "{text}"
        );
        assert!(!trust.exists());
    }
    let error = StateFolder::open(state).unwrap_err().to_string();
    assert!(error.contains("restore it from a backup"), "{error}");
    fs::write(&trust, backup).unwrap();
    fleet.start_issuer(free_address());
    assert!(fleet.follows("i1", &fleet.authority, &[&fleet.authority]));
}

/// Starts a rotator with the identity `g1`; returns it and its control socket.
fn start_rotator(
    authority: &TestAuthority,
    folder: &Path,
    environment: &[(&str, String)],
) -> (Running, PathBuf) {
    let (ca, key) = (authority.certificate_path(), authority.key_path());
    let (identities, control) = (folder.join("identities"), folder.join("control"));
    let rotator = Running::start_with(
        &[
            "run",
            "--ca",
            text(&ca),
            "--ca-key",
            text(&key),
            "--key-type",
            "p-256",
            "--folder",
            text(&identities),
            "--control",
            text(&control),
            "--pool",
            "2",
        ],
        &folder.join("log"),
        environment,
    );
    until("the control socket", || {
        run::send_command(&control, &Order::Status).is_ok()
    });
    let container = serde_json::from_value(json!({"guid": "g1"})).unwrap();
    let created = run::send_command(&control, &Order::Create { container }).unwrap();
    assert!(matches!(created, Reply::Done), "{created:?}");
    (rotator, control)
}

/// Replaces a file by one whose readers hang, as on a mount that does not respond.
fn hang(path: &Path) {
    fs::remove_file(path).unwrap();
    nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap();
}

/// Waits until a process reads the file; it hangs until the returned file is closed.
fn reader(path: &Path) -> File {
    let mut opening = File::options();
    opening.write(true).custom_flags(libc::O_NONBLOCK);
    let mut opened = None;
    until("a read", || {
        // Refused without a reader (fifo(7)).
        opened = opening.open(path).ok();
        opened.is_some()
    });
    opened.unwrap()
}

fn ends(process: &mut Running) {
    let id = nix::unistd::Pid::from_raw(process.0.id().cast_signed());
    nix::sys::signal::kill(id, nix::sys::signal::Signal::SIGTERM).unwrap();
    let mut status = None;
    until("the end", || {
        status = process.0.try_wait().unwrap();
        status.is_some()
    });
    assert!(status.unwrap().success());
}

#[test]
fn hanging_folder_delays_no_end() {
    let mut fleet = converged(&["i1"]);
    let pair = fleet.pair("i1", "instance").join("..data/instance.key");
    hang(&pair);
    let _agent_reads = reader(&pair);
    ends(&mut fleet.agents[0]);
    let trust = fleet.path("state/trust.json");
    hang(&trust);
    let _issuer_reads = reader(&trust);
    ends(&mut fleet.issuer);

    let (authority, folder) = (TestAuthority::new("cell"), memory());
    let (mut rotator, control) = start_rotator(&authority, folder.path(), &[]);
    let pair = folder.path().join("identities/g1/..data/instance.key");
    hang(&pair);
    let update = json!({"guid": "g1", "internal_routes": ["a.internal"]});
    std::thread::spawn(move || {
        let container = serde_json::from_value(update).unwrap();
        // Never answered.
        let _ = run::send_command(&control, &Order::Update { container });
    });
    let _rotator_reads = reader(&pair);
    ends(&mut rotator);
}

/// Sets the clock of processes that read this file.
fn set_clock(file: &Path, offset: &str) {
    fs::write(file, offset).unwrap();
}

/// A clock that is forty days ahead for a while, beyond the end of the CA.
#[test]
fn failure_of_a_wrong_clock_ends_with_it() {
    if !has_faketime() {
        return;
    }
    let (authority, folder) = (
        TestAuthority::with("short", SOUND, CaKey::P256, 30),
        memory(),
    );
    let clock = folder.path().join("clock");
    set_clock(&clock, "+0");
    let environment = [
        ("LD_PRELOAD", FAKETIME.to_owned()),
        ("FAKETIME_TIMESTAMP_FILE", text(&clock).to_owned()),
        ("FAKETIME_NO_CACHE", "1".to_owned()),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
        ("NO_FAKE_STAT", "1".to_owned()),
    ];
    let (_rotator, control) = start_rotator(&authority, folder.path(), &environment);
    let failure = || match run::send_command(&control, &Order::Status).unwrap() {
        Reply::Status(mut status) => {
            assert_eq!(status.identities[0].guid, guid("g1"));
            status.identities.remove(0).failure
        }
        other => panic!("{other:?}"),
    };
    assert!(failure().is_none());
    set_clock(&clock, "+40d");
    until("the failure", || {
        failure().is_some_and(|failure| failure.attempts >= 3)
    });
    set_clock(&clock, "+0");
    until("the recovery", || failure().is_none());
}

/// A rotation must know every instance with a certificate; a token is not lost to a full or broken disk.
#[test]
fn unsaved_member_gets_no_certificate() {
    let mut fleet = converged(&["i1"]);
    fleet.agents.clear();
    let file = fleet.path("state/members.jsonl");
    fs::remove_file(&file).unwrap();
    // Neither appended to nor replaced.
    fs::create_dir(&file).unwrap();
    let caller = Caller::new(fleet.address, &fleet.authority);
    let key = PrivateKey::generate(KeyType::P256).unwrap();
    let ask = |instance: &str, proof: &Proof<'_>| {
        let request = STANDARD.encode(signing_request(&key, instance).unwrap());
        let body = json!({"instance": instance, "role": null, "names": [], "addresses": null, "request": request});
        caller.call("/v1/pair", &body, proof)
    };
    let token = fleet.token("i2");
    let refused = ask("i2", &Proof::Token(&token)).unwrap_err();
    assert!(refused.contains("cannot save its members"), "{refused}");
    // A known instance does not lose its certificate.
    let own = read_pair(&fleet.pair("i1", "instance"), "instance").unwrap();
    ask("i1", &Proof::Pair(&own.certificate, &own.key)).unwrap();
    fs::remove_dir(&file).unwrap();
    ask("i2", &Proof::Token(&token)).unwrap();
    let members = StateFolder::open(fleet.path("state")).unwrap().members();
    let ids: Vec<String> = members.unwrap().into_keys().collect();
    assert_eq!(ids, ["i1", "i2"]);
}
