//! The rotator on a simulated clock. With [`tests`](crate::tests)'s settings, a pair starts 300 s before it is
//! issued and ends 24 h after, so that it is renewed between 82,800 and 85,200 s after it was issued.

use std::os::unix::fs::MetadataExt;

use serde_json::json;

use super::*;
use crate::{
    authority::{certificates, parse_chain, validity},
    folder::read_pair,
    keys::KeyType,
    tests::{HOUR, START, TestCa, World, at, container, guid, pool, replace, settings},
};

/// Offset at which the pair of `g1` is renewed: its share of the window is 0.4417.
const G1: u64 = 83_860;

fn status_of(world: &World) -> serde_json::Value {
    serde_json::to_value(world.rotator.status(at(world.now))).unwrap()
}

fn failures(world: &World) -> Vec<(String, u64)> {
    let status = world.rotator.status(at(world.now));
    status.failures.into_iter().collect()
}

/// Returns the current generation of an identity.
fn generation(world: &World, guid: &str) -> PathBuf {
    fs::read_link(world.path(guid).join("..data")).unwrap()
}

#[test]
fn status_is_complete() {
    let mut world = World::new();
    world.create(json!({"guid": "g1", "internal_ip": "10.0.0.1"}));
    world.step(START);
    let ca = Fingerprint::of(&certificates(world.ca.chain.as_bytes()).unwrap()[0]);
    assert_eq!(
        status_of(&world),
        json!({
            "authority": {
                "file": world.files.certificate,
                "fingerprint": ca,
                // 4096-01-01.
                "not_after": 67_090_118_400_u64,
                "problem": null,
            },
            "pool_ready": 2,
            "pool_size": 2,
            "renewals": 0,
            "failures": {},
            "identities": [{
                "guid": "g1",
                "folder": world.path("g1"),
                "not_before": START - 300,
                "not_after": START + 86_400,
                "renews_at": START + G1,
                "renew_by": START + 85_200,
                "issuer": ca,
                "failure": null,
            }],
            "problems": [],
        })
    );
    let (_, parsed) = parse_chain(world.read("g1", "instance.crt").as_bytes()).unwrap();
    let stated = validity(&parsed[0]);
    assert_eq!(
        stated,
        Validity {
            not_before: at(START - 300),
            not_after: at(START + 86_400)
        }
    );
}

#[test]
fn files_have_contents_and_mode() {
    let mut world = World::with(|settings| settings.envoy = true);
    world.create(json!({"guid": "g1", "internal_routes": ["r.apps.internal"]}));
    let mut found = Vec::new();
    for entry in fs::read_dir(world.path("g1").join("..data")).unwrap() {
        let entry = entry.unwrap();
        let mode = entry.metadata().unwrap().mode() & 0o777;
        found.push((entry.file_name().into_string().unwrap(), mode));
    }
    found.sort();
    let found: Vec<(&str, u32)> = found
        .iter()
        .map(|(name, mode)| (name.as_str(), *mode))
        .collect();
    assert_eq!(
        found,
        [
            ("c2c.crt", 0o644),
            ("c2c.key", 0o600),
            ("c2c.pem", 0o600),
            ("ca.crt", 0o644),
            ("container.json", 0o644),
            ("instance.crt", 0o644),
            ("instance.key", 0o600),
            ("instance.pem", 0o600),
            ("sds-c2c-cert-and-key.json", 0o600),
            ("sds-id-cert-and-key.json", 0o600),
            ("sds-id-validation-context.json", 0o600),
        ]
    );
    for name in ["instance", "c2c"] {
        let read = |ending: &str| world.read("g1", &format!("{name}.{ending}"));
        assert_eq!(read("pem"), read("crt") + &read("key"));
        assert!(read_pair(&world.path("g1"), name).unwrap().is_matching());
        assert!(read("crt").ends_with(&world.ca.chain));
    }
    assert_ne!(
        world.read("g1", "instance.key"),
        world.read("g1", "c2c.key")
    );
    assert_eq!(world.read("g1", "ca.crt"), world.ca.chain);
    assert_eq!(
        world.read("g1", "container.json"),
        r#"{"guid":"g1","internal_routes":["r.apps.internal"]}"#
    );
    for (file, name) in [
        ("sds-c2c-cert-and-key.json", "c2c-cert-and-key"),
        ("sds-id-cert-and-key.json", "id-cert-and-key"),
        ("sds-id-validation-context.json", "id-validation-context"),
    ] {
        let text = world.read("g1", file);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["resources"][0]["name"], name);
    }
    let validation: serde_json::Value =
        serde_json::from_str(&world.read("g1", "sds-id-validation-context.json")).unwrap();
    assert_eq!(
        validation["resources"][0],
        json!({
            "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret",
            "name": "id-validation-context",
            "validation_context": {"trusted_ca": {"inline_string": world.ca.chain}},
        })
    );
}

#[test]
fn keys_belong_to_the_owner() {
    if !test_support::requirements::root() {
        return;
    }
    let mut world = World::new();
    world.create(json!({"guid": "g1", "owner": {"uid": 1234, "gid": 4321}}));
    for (name, owner) in [
        ("instance.key", (1234, 4321)),
        ("instance.pem", (1234, 4321)),
        ("instance.crt", (0, 0)),
        ("ca.crt", (0, 0)),
        ("container.json", (0, 0)),
    ] {
        let facts = fs::metadata(world.path("g1").join(name)).unwrap();
        assert_eq!((facts.uid(), facts.gid()), owner, "{name}");
    }
    // A new pair's copies keep owner and mode, and so does the former pair.
    let former = world.path("g1").join(generation(&world, "g1"));
    world.step(START + G1 + 1);
    assert_ne!(world.path("g1").join(generation(&world, "g1")), former);
    let facts = fs::metadata(former.join("instance.key")).unwrap();
    assert_eq!(
        (facts.uid(), facts.gid(), facts.mode() & 0o777),
        (1234, 4321, 0o600)
    );
}

#[test]
fn pair_is_renewed_at_its_time() {
    let mut world = World::new();
    world.create_all(&["g1", "g2"]);
    let first = world.read("g1", "instance.crt");
    // Steps are at most a second apart, and end with the next renewal.
    assert_eq!(world.step(START), Next::At(at(START + 1)));
    assert_eq!(world.step(START + 83_522), Next::At(at(START + 83_523)));
    let due = world.rotator.next_renewal().unwrap();
    assert_eq!(
        due.duration_since(at(START + 83_523)).unwrap().as_millis(),
        606
    );
    assert_eq!(world.step(START + 83_523), Next::At(due));
    world.step(START + 83_524);
    assert_eq!(world.rotator.status(at(world.now)).renewals, 1);
    assert_eq!(world.read("g1", "instance.crt"), first);
    world.step(START + G1 + 1);
    assert_eq!(world.rotator.status(at(world.now)).renewals, 2);
    let (_, parsed) = parse_chain(world.read("g1", "instance.crt").as_bytes()).unwrap();
    assert_eq!(validity(&parsed[0]).not_after, at(START + G1 + 1 + 86_400));
    assert_eq!(failures(&world), []);
    assert_eq!(
        world.rotator.guids(),
        BTreeSet::from([guid("g1"), guid("g2")])
    );
}

#[test]
fn update_renews_changed_pairs() {
    let mut world = World::new();
    world.create(json!({"guid": "g1", "internal_routes": ["a.x"]}));
    world.now = START + 1000;
    let now = at(world.now);
    let read = |world: &World| ["instance.crt", "c2c.crt"].map(|file| world.read("g1", file));
    let before = read(&world);
    let at_first = generation(&world, "g1");
    let same = container(json!({"guid": "g1", "internal_routes": ["a.x"]}));
    world.rotator.update(same.clone(), now).unwrap();
    assert_eq!(generation(&world, "g1"), at_first);
    let routes = container(json!({"guid": "g1", "internal_routes": ["b.x"]}));
    world.rotator.create(routes, now).unwrap();
    let after = read(&world);
    assert_eq!(after[0], before[0]);
    assert_ne!(after[1], before[1]);
    let renewal = |world: &World| status_of(world)["identities"][0]["renews_at"].clone();
    assert_eq!(renewal(&world), START + G1);
    // A refused description changes nothing, also if it is repeated.
    let wrong = container(json!({"guid": "g1", "internal_routes": ["b x"]}));
    for _ in 0..2 {
        let error = world.rotator.update(wrong.clone(), now).unwrap_err();
        assert_eq!(error.reason(), "profile");
        assert_eq!(
            error.to_string(),
            "\"b x\" is not a DNS name; use letters, digits, `-`, `_` and `.`, at most 253 characters"
        );
    }
    assert_eq!(read(&world), after);
    let units = container(json!({"guid": "g1", "ous": ["app:a"], "internal_routes": ["b.x"]}));
    world.rotator.update(units, now).unwrap();
    let renewed = read(&world);
    assert!(renewed[0] != after[0] && renewed[1] != after[1]);
    assert_eq!(renewal(&world), START + 1000 + G1);
    // Without routes, there is no second pair.
    world
        .rotator
        .update(container(json!({"guid": "g1", "ous": ["app:a"]})), now)
        .unwrap();
    assert!(!world.path("g1").join("c2c.crt").exists());
    assert_eq!(world.read("g1", "instance.crt"), renewed[0]);
    let unknown = world
        .rotator
        .update(container(json!({"guid": "g9"})), now)
        .unwrap_err();
    assert_eq!(unknown.to_string(), "no identity g9; `status` lists them");
}

#[test]
fn refused_identity_leaves_no_files() {
    let mut world = World::new();
    let wrong = container(json!({"guid": "g1", "ous": [""]}));
    let error = world.rotator.create(wrong, at(START)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "an organizational unit is empty; remove it from `ous`"
    );
    assert!(!world.path("g1").exists());
    assert_eq!(world.rotator.guids(), BTreeSet::new());
    assert_eq!(world.rotator.next_renewal(), None);
    let error = world.rotator.destroy(&guid("g1")).unwrap_err();
    assert_eq!(error.to_string(), "no identity g1; `status` lists them");
    world.create_all(&["g1"]);
    world.rotator.destroy(&guid("g1")).unwrap();
    assert!(!world.path("g1").exists());
    assert_eq!(world.rotator.guids(), BTreeSet::new());
    assert_eq!(world.rotator.next_renewal(), None);
}

#[test]
fn failures_are_counted_by_reason() {
    let mut world = World::new();
    for (error, reason) in [
        (RotatorError::Profile(anyhow!("x")), "profile"),
        (RotatorError::Key(KeyError::Library), "key"),
        (
            RotatorError::Authority {
                path: "/ca.crt".to_owned(),
            },
            "authority",
        ),
        (RotatorError::Unknown(guid("g")), "unknown"),
    ] {
        assert_eq!(error.reason(), reason);
        world.rotator.count_failure(&error);
        world.rotator.count_failure(&error);
        assert!(failures(&world).contains(&(reason.to_owned(), 2)));
    }
    assert_eq!(
        RotatorError::Authority {
            path: "/ca.crt".to_owned()
        }
        .to_string(),
        "/ca.crt: the CA expired; replace the CA"
    );
    assert_eq!(
        RotatorError::Key(KeyError::Library).to_string(),
        "cannot issue: the cryptographic library failed"
    );
}

/// Moves an identity's folder away, and puts a file in its place.
fn block(world: &World, guid: &str) {
    let path = world.path(guid);
    fs::rename(&path, path.with_extension("away")).unwrap();
    fs::write(path, "").unwrap();
}

fn unblock(world: &World, guid: &str) {
    let path = world.path(guid);
    fs::remove_file(&path).unwrap();
    fs::rename(path.with_extension("away"), path).unwrap();
}

#[test]
fn failed_renewal_is_repeated_with_delays() {
    let mut world = World::new();
    world.create_all(&["g1"]);
    let begun = START + G1 + 1;
    block(&world, "g1");
    world.step(begun);
    let message = format!(
        "{}: File exists (os error 17); the current certificate and key stay in use; check the folder",
        world.path("g1").display()
    );
    let failure = |world: &World| status_of(world)["identities"][0]["failure"].clone();
    assert_eq!(
        failure(&world),
        json!({"attempts": 1, "message": message, "retry_at": begun + 1})
    );
    assert_eq!(status_of(&world)["identities"][0]["renews_at"], begun + 1);
    world.step(begun + 1);
    assert_eq!(
        failure(&world),
        json!({"attempts": 2, "message": message, "retry_at": begun + 3})
    );
    world.step(begun + 2);
    assert_eq!(failure(&world)["attempts"], 2);
    // Counted and reported once.
    assert_eq!(failures(&world), [("storage".to_owned(), 1)]);
    unblock(&world, "g1");
    world.step(begun + 3);
    assert_eq!(failure(&world), json!(null));
    let status = world.rotator.status(at(world.now));
    assert_eq!(status.renewals, 1);
    assert_eq!(status.identities[0].not_after, Some(begun + 3 + 86_400));
}

#[test]
fn lost_files_are_replaced() {
    let mut world = World::new();
    world.create_all(&["g1", "g2"]);
    world.step(START);
    for file in ["instance.key", "instance.crt"] {
        let before = world.read("g1", "instance.crt");
        let other = world.read("g2", "instance.crt");
        fs::remove_file(world.path("g1").join(file)).unwrap();
        // Each second one of two identities is checked; the third second starts over.
        let begun = world.now;
        for second in 1..=4 {
            world.step(begun + second);
        }
        assert_ne!(world.read("g1", "instance.crt"), before, "{file}");
        assert_eq!(world.read("g2", "instance.crt"), other);
    }
    assert_eq!(world.rotator.status(at(world.now)).renewals, 2);
}

#[test]
fn replaced_ca_spreads_before_issuing() {
    let mut world = World::new();
    world.create_all(&["g1", "g2"]);
    world.step(START);
    let first = world.ca.chain.clone();
    let second = TestCa::new("second");
    second.write(world.folder.path());
    world.step(START + 10);
    let both = second.chain.clone() + &first;
    for guid in ["g1", "g2"] {
        assert_eq!(world.read(guid, "ca.crt"), both);
        assert!(world.read(guid, "instance.crt").ends_with(&first));
    }
    // Reissued at 0.3015 and 0.4417 of 300 s.
    world.step(START + 10 + 90);
    assert_eq!(world.rotator.status(at(world.now)).renewals, 0);
    world.step(START + 10 + 91);
    assert!(world.read("g2", "instance.crt").ends_with(&second.chain));
    assert!(world.read("g1", "instance.crt").ends_with(&first));
    assert_eq!(world.read("g1", "ca.crt"), both);
    world.step(START + 10 + 132);
    assert!(world.read("g1", "instance.crt").ends_with(&first));
    world.step(START + 10 + 133);
    assert!(world.read("g1", "instance.crt").ends_with(&second.chain));
    // With the last pair of the first CA, its trust ends.
    world.step(START + 10 + 134);
    for guid in ["g1", "g2"] {
        assert_eq!(world.read(guid, "ca.crt"), second.chain);
    }
    assert_eq!(world.rotator.status(at(world.now)).renewals, 2);
}

#[test]
fn former_ca_is_kept_temporarily() {
    let mut world = World::with(|settings| settings.keep_old_ca = HOUR);
    world.create_all(&["g1"]);
    world.step(START);
    let first = world.ca.chain.clone();
    let second = TestCa::new("second");
    second.write(world.folder.path());
    let both = second.chain.clone() + &first;
    for (now, bundle) in [
        (START + 10, &both),
        (START + 500, &both),
        (START + 10 + 3599, &both),
        (START + 10 + 3600, &second.chain),
    ] {
        world.step(now);
        assert_eq!(&world.read("g1", "ca.crt"), bundle, "{}", now - START);
    }
    assert!(world.read("g1", "instance.crt").ends_with(&second.chain));
}

#[test]
fn destroyed_identity_removes_the_ca() {
    let mut world = World::new();
    world.create_all(&["g1", "g2"]);
    let first = world.ca.chain.clone();
    let second = TestCa::new("second");
    second.write(world.folder.path());
    world.step(START + 10);
    world.step(START + 10 + 91);
    assert_eq!(world.read("g2", "ca.crt"), second.chain.clone() + &first);
    world.rotator.destroy(&guid("g1")).unwrap();
    world.step(START + 10 + 92);
    assert_eq!(world.read("g2", "ca.crt"), second.chain);
}

#[test]
fn refused_ca_is_reported_once() {
    let mut world = World::new();
    world.create_all(&["g1"]);
    world.step(START);
    let other = TestCa::new("other");
    replace(&world.files.key, &other.key);
    world.step(START + 1);
    world.step(START + 2);
    let problem = format!(
        "{}: the private key does not match the CA certificate; use the key of \"CN=first\"",
        world.files.key.display()
    );
    assert_eq!(status_of(&world)["authority"]["problem"], problem);
    assert_eq!(failures(&world), [("authority".to_owned(), 1)]);
    // The last good one issues.
    world.create_all(&["g2"]);
    assert!(world.read("g2", "instance.crt").ends_with(&world.ca.chain));
    other.write(world.folder.path());
    world.step(START + 3);
    assert_eq!(status_of(&world)["authority"]["problem"], json!(null));
    assert_eq!(failures(&world), [("authority".to_owned(), 1)]);
}

#[test]
fn ca_is_accepted_once_valid() {
    let mut world = World::new();
    world.step(START);
    let later = TestCa::with("later", |params| {
        params.not_before = at(START + 100).into();
    });
    later.write(world.folder.path());
    world.step(START + 99);
    let problem = format!(
        "{}: certificate 1 is valid only from 2033-05-18 03:35:00 UTC; check this machine's clock",
        world.files.certificate.display()
    );
    assert_eq!(status_of(&world)["authority"]["problem"], problem);
    world.step(START + 100);
    assert_eq!(status_of(&world)["authority"]["problem"], json!(null));
    world.create_all(&["g1"]);
    assert!(world.read("g1", "instance.crt").ends_with(&later.chain));
}

#[test]
fn expired_ca_stops_issuing() {
    let mut world = World::new();
    world.create_all(&["g1"]);
    let brief = TestCa::with("brief", |params| {
        params.not_after = at(START + 1000).into();
    });
    brief.write(world.folder.path());
    world.step(START + 10);
    world.step(START + 400);
    // Leaves end with their CA.
    let status = world.rotator.status(at(world.now));
    assert_eq!(status.identities[0].not_after, Some(START + 1000));
    let error = world
        .rotator
        .create(container(json!({"guid": "g2"})), at(START + 1001))
        .unwrap_err();
    assert_eq!(error.reason(), "authority");
    assert_eq!(
        error.to_string(),
        format!(
            "{}: the CA expired; replace the CA",
            world.files.certificate.display()
        )
    );
    world
        .rotator
        .create(container(json!({"guid": "g2"})), at(START + 1000))
        .unwrap();
}

#[test]
fn identities_survive_a_restart() {
    let mut world = World::new();
    world.create(json!({"guid": "g1", "ous": ["app:a"], "internal_routes": ["r.x"]}));
    world.create_all(&["g2"]);
    world.step(START + 5);
    let before = status_of(&world)["identities"].clone();
    let generations = ["g1", "g2"].map(|guid| generation(&world, guid));
    fs::write(world.path("g2").join("container.json"), "x").unwrap();
    fs::write(world.path("file"), "x").unwrap();
    fs::create_dir(world.path("empty")).unwrap();
    fs::create_dir_all(world.path("unfinished").join("..pair-1")).unwrap();
    let World {
        folder,
        files,
        rotator,
        ca,
        ..
    } = world;
    drop(rotator);
    let rotator = Rotator::open(
        settings(folder.path()),
        files.clone(),
        pool(2),
        at(START + 6),
    );
    let mut world = World {
        folder,
        ca,
        files,
        rotator: rotator.unwrap(),
        now: START + 6,
    };
    let message = "container.json: expected value at line 1 column 1; the folder stays unchanged: remove it, or \
                   restore its files";
    assert_eq!(
        status_of(&world)["problems"],
        json!([{"path": world.path("g2"), "message": message}])
    );
    assert_eq!(status_of(&world)["identities"], json!([before[0]]));
    assert!(!world.path("unfinished").exists() && world.path("empty").exists());
    world.step(START + 7);
    // Nothing is written, neither a pair nor a bundle.
    assert_eq!(
        ["g1", "g2"].map(|guid| generation(&world, guid)),
        generations
    );
    // The same description is no change.
    world.create(json!({"guid": "g1", "ous": ["app:a"], "internal_routes": ["r.x"]}));
    assert_eq!(generation(&world, "g1"), generations[0]);
    // A new pair ends the problem.
    world.create_all(&["g2"]);
    assert_eq!(status_of(&world)["problems"], json!([]));
    assert_eq!(world.rotator.guids().len(), 2);
}

#[test]
fn restart_renews_damaged_pair() {
    let mut world = World::new();
    world.create_all(&["g1", "g2"]);
    let key = world.read("g2", "instance.key");
    fs::write(world.path("g1").join("instance.key"), key).unwrap();
    let World {
        folder,
        files,
        rotator,
        ca,
        ..
    } = world;
    drop(rotator);
    let rotator = Rotator::open(settings(folder.path()), files.clone(), pool(2), at(START));
    let mut world = World {
        folder,
        ca,
        files,
        rotator: rotator.unwrap(),
        now: START,
    };
    let status = status_of(&world);
    assert_eq!(status["identities"][0]["not_after"], json!(null));
    assert_eq!(status["identities"][0]["issuer"], json!(null));
    assert_eq!(status["identities"][1]["not_after"], START + 86_400);
    world.step(START + 1);
    assert_eq!(world.rotator.status(at(START)).renewals, 1);
    assert!(
        read_pair(&world.path("g1"), "instance")
            .unwrap()
            .is_matching()
    );
}

#[test]
fn failed_creation_keeps_pair_in_use() {
    let mut world = World::new();
    world.create_all(&["g1"]);
    fs::write(world.path("g1").join("container.json"), "{").unwrap();
    let settings = settings(world.folder.path());
    world.rotator = Rotator::open(settings, world.files.clone(), pool(2), at(START)).unwrap();
    assert_eq!(world.rotator.status(at(START)).problems.len(), 1);
    // 4096, after the end of the CA.
    let late = at(67_090_118_401);
    let failed = world
        .rotator
        .create(container(json!({"guid": "g1"})), late)
        .unwrap_err();
    assert!(matches!(failed, RotatorError::Authority { .. }));
    assert!(
        read_pair(&world.path("g1"), "instance")
            .unwrap()
            .is_matching()
    );
    world.create_all(&["g1"]);
    assert_eq!(world.rotator.status(at(START)).problems, []);
}

#[test]
fn meanwhile_replaced_ca_stays_trusted() {
    for (keep, expected) in [(Duration::ZERO, false), (HOUR, true)] {
        let mut world = World::new();
        world.create_all(&["g1"]);
        let World {
            folder,
            rotator,
            ca,
            ..
        } = world;
        drop(rotator);
        let second = TestCa::new("second");
        let files = second.write(folder.path());
        let settings = RotatorSettings {
            keep_old_ca: keep,
            ..settings(folder.path())
        };
        let rotator = Rotator::open(settings, files.clone(), pool(2), at(START + 10));
        let mut world = World {
            folder,
            ca,
            files,
            rotator: rotator.unwrap(),
            now: START + 10,
        };
        world.step(START + 10);
        let both = second.chain.clone() + &world.ca.chain;
        assert_eq!(world.read("g1", "ca.crt"), both);
        world.step(START + 10 + 133);
        world.step(START + 10 + 134);
        assert!(world.read("g1", "instance.crt").ends_with(&second.chain));
        let bundle = if expected { &both } else { &second.chain };
        assert_eq!(&world.read("g1", "ca.crt"), bundle);
    }
}

#[test]
fn unwritten_bundle_is_retried() {
    let mut world = World::new();
    world.create_all(&["g1", "g2"]);
    world.step(START);
    block(&world, "g1");
    let second = TestCa::new("second");
    second.write(world.folder.path());
    world.step(START + 10);
    let both = second.chain.clone() + &world.ca.chain;
    assert_eq!(world.read("g2", "ca.crt"), both);
    assert_eq!(failures(&world), [("storage".to_owned(), 1)]);
    unblock(&world, "g1");
    assert_ne!(world.read("g1", "ca.crt"), both);
    for second in 11..15 {
        world.step(START + second);
    }
    assert_eq!(world.read("g1", "ca.crt"), both);
    assert_eq!(failures(&world), [("storage".to_owned(), 1)]);
}

#[test]
fn trusted_foreign_cas_are_followed() {
    let place = tempfile::tempdir_in("/dev/shm").unwrap();
    let [one, other, third] = ["one", "other", "third"].map(TestCa::new);
    let path = place.path().join("others.crt");
    fs::write(&path, other.chain.clone() + &one.chain).unwrap();
    let mut world = World::with(|settings| settings.also_trust = vec![path.clone()]);
    world.create_all(&["g1"]);
    let own = world.ca.chain.clone();
    assert_eq!(
        world.read("g1", "ca.crt"),
        own.clone() + &other.chain + &one.chain
    );
    replace(&path, &third.chain);
    world.step(START + 1);
    assert_eq!(world.read("g1", "ca.crt"), own.clone() + &third.chain);
    assert_eq!(status_of(&world)["authority"]["problem"], json!(null));
    // A leaf is no CA; the last good ones stay.
    replace(
        &path,
        &(third.chain.clone() + &world.read("g1", "instance.crt")),
    );
    world.step(START + 2);
    assert_eq!(world.read("g1", "ca.crt"), own.clone() + &third.chain);
    assert_eq!(
        status_of(&world)["authority"]["problem"],
        format!(
            "{}: certificate 2 is not a CA; list CAs only",
            path.display()
        )
    );
    replace(&path, &one.chain);
    world.step(START + 3);
    assert_eq!(world.read("g1", "ca.crt"), own + &one.chain);
    assert_eq!(status_of(&world)["authority"]["problem"], json!(null));
}

#[test]
fn unusable_places_are_explained() {
    let place = tempfile::tempdir_in("/dev/shm").unwrap();
    let files = TestCa::new("x").write(place.path());
    let folder = place.path().join("identities");
    fs::write(&folder, "").unwrap();
    let open = |settings| {
        let opened = Rotator::open(settings, files.clone(), pool(0), at(START));
        opened.err().unwrap().to_string()
    };
    assert_eq!(
        open(settings(place.path())),
        format!(
            "{}: File exists (os error 17); create it writable for the rotator's user",
            folder.display()
        )
    );
    fs::remove_file(&folder).unwrap();
    let none = place.path().join("none.crt");
    assert_eq!(
        open(RotatorSettings {
            also_trust: vec![none.clone()],
            ..settings(place.path())
        }),
        format!(
            "{}: No such file or directory (os error 2); choose a readable PEM file",
            none.display()
        )
    );
}

/// Early in its window a renewal leaves the generation of keys to the idle thread; late, it is more urgent than that.
#[test]
fn only_early_renewals_wait_for_keys() {
    let mut world = World::new();
    world.create_all(&["g1"]);
    let first = world.read("g1", "instance.crt");
    world.rotator.pool = KeyPool::never_filled(KeyType::P256, 2);
    let schedule = &world.rotator.identities.all[&guid("g1")].schedule;
    let early = schedule.due(at(START));
    let late = schedule.deadline().unwrap();
    assert!(early + REISSUE_SPREAD < late);
    assert!(matches!(world.rotator.step(early), Next::Key));
    assert_eq!(world.read("g1", "instance.crt"), first);
    assert!(matches!(world.rotator.step(late), Next::At(_)));
    assert_ne!(world.read("g1", "instance.crt"), first);
}

//----------- Identities ------------------------------------------------------

/// Identities that are due at these offsets after [`START`].
fn queue(due: &[(&str, u64)]) -> Identities {
    let mut identities = Identities::new(at(START));
    for (name, offset) in due {
        let folder = IdentityFolder::new(PathBuf::from("/none"));
        let mut identity = Identity::new(container(json!({ "guid": name })), folder);
        identity
            .schedule
            .failed(at(START + offset - 1), "x".to_owned());
        identities.insert(identity, at(START + offset - 1));
    }
    identities
}

fn names(guids: &[Guid]) -> Vec<&str> {
    guids.iter().map(Guid::as_str).collect()
}

#[test]
fn overdue_identities_are_listed_by_urgency() {
    let mut identities = queue(&[("a", 30), ("b", 10), ("c", 20)]);
    assert_eq!(identities.next_due(), Some(at(START + 10)));
    assert_eq!(names(&identities.overdue(at(START + 9))), [""; 0]);
    assert_eq!(names(&identities.overdue(at(START + 10))), ["b"]);
    assert_eq!(names(&identities.overdue(at(START + 29))), ["c", "b"]);
    assert_eq!(names(&identities.overdue(at(START + 30))), ["a", "c", "b"]);
    // A failed attempt moves the identity at its turn.
    let failed = identities.all.get_mut(&guid("b")).unwrap();
    failed.schedule.failed(at(START + 29), "x".to_owned());
    assert_eq!(identities.next_due(), Some(at(START + 10)));
    assert_eq!(names(&identities.overdue(at(START + 30))), ["a", "c"]);
    assert_eq!(identities.next_due(), Some(at(START + 20)));
    identities.remove(&guid("c"));
    assert_eq!(identities.next_due(), Some(at(START + 30)));
    assert!(identities.remove(&guid("c")).is_none());
}

#[test]
fn identities_are_visited_in_turn() {
    let mut identities = queue(&[("a", 30), ("b", 30), ("c", 30)]);
    let mut visit = |after: Option<&Guid>, count, changed: &str| {
        let mut visited = Vec::new();
        let last = identities.change_next(after, count, at(START), |guid, identity| {
            visited.push(guid.to_string());
            if guid.as_str() == changed {
                identity.schedule.mended();
            }
        });
        (
            visited.concat(),
            last.map(|guid| guid.to_string()),
            identities.next_due(),
        )
    };
    let last = |name: &str| Some(name.to_owned());
    let late = Some(at(START + 30));
    assert_eq!(visit(None, 2, ""), ("ab".to_owned(), last("b"), late));
    assert_eq!(visit(Some(&guid("b")), 2, ""), ("c".to_owned(), None, late));
    assert_eq!(
        visit(Some(&guid("b")), 1, ""),
        ("c".to_owned(), last("c"), late)
    );
    assert_eq!(visit(Some(&guid("c")), 1, ""), (String::new(), None, late));
    // Without its failure, the identity has no pair and is due at once.
    assert_eq!(
        visit(None, 3, "b"),
        ("abc".to_owned(), last("c"), Some(at(START)))
    );
}

#[test]
fn clock_set_back_moves_queue() {
    let mut identities = queue(&[("a", 1000)]);
    identities.begin_step(at(START + 900));
    assert_eq!(identities.next_due(), Some(at(START + 1000)));
    identities.begin_step(at(START + 900));
    assert_eq!(identities.next_due(), Some(at(START + 1000)));
    // By this clock, the retry is more than five minutes away and dates from a wrong clock.
    identities.begin_step(at(START + 600));
    assert_eq!(identities.next_due(), Some(at(START + 600)));
}

#[test]
fn overdue_identities_are_listed() {
    let named: Vec<String> = (0..300).map(|number| format!("g{number:03}")).collect();
    let mut due = Vec::new();
    for (number, name) in (1..).zip(&named) {
        due.push((name.as_str(), number));
    }
    let mut identities = queue(&due);
    let listed = identities.overdue(at(START + 400));
    assert_eq!(listed.len(), 256);
    // The most urgent is last.
    assert_eq!(listed[255].as_str(), "g000");
    assert_eq!(listed[0].as_str(), "g255");
    assert_eq!(identities.overdue(at(START + 256)).len(), 256);
}
