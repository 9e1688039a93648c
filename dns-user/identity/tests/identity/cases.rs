//! The public cases. `BOSH_DNS_IDENTITY_CASES` names another folder in the same format.

use std::{
    env, fs,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use dns_core::catalog::{AliasFiles, Records, Snapshot};
use dns_identity::{
    authority::{Authority, certificates, parse_all},
    certificate::Validity,
    check::{self, unresolved},
    folder::read_pair,
    keys::{KeyType, PrivateKey},
    profile::Container,
    san::{Ids, Link, Names, Options},
    schedule::{RenewalWindow, Share},
};
use dns_kit::tls::Certificate;
use serde_json::Value;
use x509_cert::{
    der::{asn1::ObjectIdentifier, oid::db::rfc5280},
    ext::pkix::{BasicConstraints, ExtendedKeyUsage, KeyUsage, SubjectAltName, name::GeneralName},
};

use crate::{
    authorities::{CaKey, SOUND, TestAuthority},
    rotator::{World, container, matches},
    tools::openssl,
};

fn folder() -> PathBuf {
    env::var_os("BOSH_DNS_IDENTITY_CASES").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases"),
        PathBuf::from,
    )
}

fn cases(file: &str) -> Vec<Value> {
    let path = folder().join(file);
    let text =
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let cases: Vec<Value> = serde_json::from_str(&text).unwrap();
    assert!(!cases.is_empty(), "{} has no case", path.display());
    cases
}

/// Checks one case; panics if it fails.
type Runner = fn(&Value);

/// Kinds of cases, by the member that only they have.
const KINDS: [(&str, Runner); 4] = [
    ("validity_s", rotation),
    ("certificate", certificate),
    ("authority", ca),
    ("steps", scenario),
];

/// Files of the folder and the runners of their cases; `None` for a case that no runner knows.
fn runner(file: &str, case: &Value) -> Option<Runner> {
    match file {
        "san_cases.json" => Some(san),
        "identity_cases.json" => {
            let known = ours(case);
            KINDS
                .iter()
                .find(|(member, _)| known.get(*member).is_some())
                .map(|(_, run)| *run)
        }
        _ => None,
    }
}

/// Adds the data of our case with the same id to a case that only has words, such as the folder of
/// facts about the reference.
fn ours(case: &Value) -> Value {
    let all: Vec<Value> =
        serde_json::from_str(include_str!("../cases/identity_cases.json")).unwrap();
    let mut merged = all
        .into_iter()
        .find(|known| known["id"] == case["id"])
        .unwrap_or_default();
    for (member, value) in case.as_object().unwrap() {
        merged[member] = value.clone();
    }
    merged
}

/// Runs every case of the folder. A failure does not hide others, and a case without a runner is
/// named.
#[test]
fn every_case_passes_or_is_named() {
    let (mut passed, mut skipped, mut failed) = (0, Vec::new(), Vec::new());
    let mut files: Vec<PathBuf> = fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    for path in files {
        let file = path.file_name().unwrap().to_str().unwrap().to_owned();
        if !file.ends_with(".json") {
            skipped.push(file);
            continue;
        }
        for case in cases(&file) {
            let name = format!(
                "{file}: {}",
                case["id"].as_str().unwrap_or("a case without id")
            );
            let Some(run) = runner(&file, &case) else {
                skipped.push(name);
                continue;
            };
            let case = if file == "identity_cases.json" {
                ours(&case)
            } else {
                case
            };
            match std::panic::catch_unwind(|| run(&case)) {
                Ok(()) => passed += 1,
                Err(_) => failed.push(name),
            }
        }
    }
    println!(
        "{passed} cases passed, {} skipped: {}",
        skipped.len(),
        skipped.join(", ")
    );
    assert!(
        failed.is_empty(),
        "{} cases failed: {}",
        failed.len(),
        failed.join(", ")
    );
    assert!(passed > 0, "no case was run");
    // Of our own folder, none is skipped.
    assert!(
        env::var_os("BOSH_DNS_IDENTITY_CASES").is_some() || skipped.is_empty(),
        "{skipped:?}"
    );
}

fn rotation(case: &Value) {
    let validity = Duration::from_secs(case["validity_s"].as_u64().unwrap());
    let window = RenewalWindow::of(validity);
    let documented = case["documented_window_s"].as_array().unwrap();
    assert_eq!(documented.len(), 2, "{case}");
    for (ours, documented) in [window.start, window.end].into_iter().zip(documented) {
        // The cases round fractions of a second.
        let difference = ours.as_secs_f64() - documented.as_f64().unwrap();
        assert!(difference.abs() < 0.01, "{case}: {window:?}");
    }
    let reference = Duration::from_secs_f64(case["diego_rotates_after_s"].as_f64().unwrap());
    assert!(
        window.start <= reference && reference <= window.end,
        "{case}"
    );
    for guid in ["g1", "g2", ""] {
        let moment = window.moment(Share::of(guid));
        assert!(
            window.start <= moment && moment < window.end,
            "{case}: {moment:?}"
        );
    }
}

fn authority() -> (TestAuthority, Authority) {
    let made = TestAuthority::with("authority", SOUND, CaKey::P256, 10);
    let loaded = Authority::parse(
        made.certificate().as_bytes(),
        &made.key(),
        SystemTime::now(),
    )
    .unwrap();
    (made, loaded)
}

fn strings(value: &Value) -> Vec<String> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|text| text.as_str().unwrap().to_owned())
        .collect()
}

fn certificate(case: &Value) {
    let container: Container = serde_json::from_value(case["container"].clone()).unwrap();
    let profile = match container.container_to_container() {
        Some(profile) => profile.unwrap(),
        None => container.identity().unwrap(),
    };
    let (_, authority) = authority();
    let key = PrivateKey::generate(KeyType::P256).unwrap();
    let now = SystemTime::now();
    let day = Duration::from_secs(24 * 3600);
    let issued = authority
        .issue(
            &profile,
            key.public_key_info(),
            Validity::starting(now, day),
        )
        .unwrap();
    let ders = certificates(issued.pem.as_bytes()).unwrap();
    let parsed = parse_all(&ders).unwrap();
    let leaf = parsed[0].tbs_certificate();
    for (member, expected) in case["certificate"].as_object().unwrap() {
        match member.as_str() {
            "subject" => assert_eq!(subject(&parsed[0]), expected.as_str().unwrap()),
            "dns" => assert_eq!(alternative_names(&parsed[0]).0, strings(expected), "{case}"),
            "ips" => assert_eq!(alternative_names(&parsed[0]).1, strings(expected), "{case}"),
            "key_usage" => {
                let (is_critical, usage) = leaf.get_extension::<KeyUsage>().unwrap().unwrap();
                assert!(is_critical);
                let spelled = [
                    (usage.digital_signature(), "digitalSignature"),
                    (usage.non_repudiation(), "nonRepudiation"),
                    (usage.key_encipherment(), "keyEncipherment"),
                    (usage.data_encipherment(), "dataEncipherment"),
                    (usage.key_agreement(), "keyAgreement"),
                    (usage.key_cert_sign(), "keyCertSign"),
                ];
                let held: Vec<_> = spelled
                    .iter()
                    .filter(|(held, _)| *held)
                    .map(|(_, name)| *name)
                    .collect();
                assert_eq!(held, strings(expected));
            }
            "eku" => {
                let (_, purposes) = leaf.get_extension::<ExtendedKeyUsage>().unwrap().unwrap();
                let spell = |purpose: &ObjectIdentifier| match *purpose {
                    rfc5280::ID_KP_CLIENT_AUTH => "clientAuth",
                    rfc5280::ID_KP_SERVER_AUTH => "serverAuth",
                    other => panic!("unexpected purpose {other}"),
                };
                assert_eq!(
                    purposes.0.iter().map(spell).collect::<Vec<_>>(),
                    strings(expected)
                );
            }
            "basic_constraints" => {
                assert!(expected.is_null());
                assert!(leaf.get_extension::<BasicConstraints>().unwrap().is_none());
            }
            "serial" => {
                assert!(
                    expected.as_str().unwrap().starts_with("random UUID v4"),
                    "{expected}"
                );
                assert!((12..=17).contains(&leaf.serial_number().as_bytes().len()));
            }
            "not_before" => {
                // The reference's choice is `--backdate 0s` here.
                assert_eq!(expected, "now, not earlier");
                let seconds = now
                    .duration_since(SystemTime::UNIX_EPOCH)
                    .unwrap()
                    .as_secs();
                assert_eq!(
                    leaf.validity().not_before.to_unix_duration().as_secs(),
                    seconds
                );
            }
            "pem" => {
                assert_eq!(strings(expected), ["leaf", "CA"]);
                assert_eq!(parsed.len(), 2);
                assert_eq!(parsed[1].tbs_certificate().subject(), leaf.issuer());
            }
            other => panic!("{case}: no check for {other}"),
        }
    }
}

/// The subject as the cases spell it: SETs of `type=value`.
fn subject(leaf: &Certificate) -> String {
    let sets = leaf.tbs_certificate().subject().iter_rdn().map(|set| {
        let attributes = set.iter().map(|attribute| {
            let kind = match attribute.oid.to_string().as_str() {
                "2.5.4.3" => "CN",
                "2.5.4.11" => "OU",
                other => panic!("unexpected attribute {other}"),
            };
            format!(
                "{kind}={}",
                str::from_utf8(attribute.value.value()).unwrap()
            )
        });
        format!("SET{{{}}}", attributes.collect::<Vec<_>>().join(", "))
    });
    sets.collect::<Vec<_>>().join(", ")
}

fn alternative_names(leaf: &Certificate) -> (Vec<String>, Vec<String>) {
    let (mut names, mut addresses) = (Vec::new(), Vec::new());
    let alternative = leaf
        .tbs_certificate()
        .get_extension::<SubjectAltName>()
        .unwrap();
    let Some((_, alternative)) = alternative else {
        return (names, addresses);
    };
    for name in alternative.0 {
        match name {
            GeneralName::DnsName(name) => names.push(name.to_string()),
            GeneralName::IpAddress(octets) => {
                addresses.push(match <[u8; 4]>::try_from(octets.as_bytes()) {
                    Ok(v4) => std::net::Ipv4Addr::from(v4).to_string(),
                    Err(_) => {
                        std::net::Ipv6Addr::from(<[u8; 16]>::try_from(octets.as_bytes()).unwrap())
                            .to_string()
                    }
                })
            }
            other => panic!("unexpected name {other:?}"),
        }
    }
    (names, addresses)
}

/// Creates the CA that the case describes, and compares the faults.
fn ca(case: &Value) {
    let described = &case["authority"];
    let text = |member: &str| described[member].as_str();
    let mut extensions = SOUND.to_owned();
    for (from, to) in described["replace"].as_object().into_iter().flatten() {
        extensions = extensions.replace(from, to.as_str().unwrap());
    }
    let kind = match text("key").unwrap_or("p-256") {
        "rsa" => CaKey::Rsa,
        "p-256" => CaKey::P256,
        other => panic!("{case}: key {other}"),
    };
    let days = described["days"].as_i64().unwrap_or(3650);
    let made = match described["below"].as_bool() {
        Some(true) => TestAuthority::new("root").intermediate("below", &extensions),
        _ => TestAuthority::with("case", &extensions, kind, i32::try_from(days).unwrap()),
    };
    let mut key = made.key();
    match text("key_form") {
        Some("pkcs8") => {
            key = openssl(&["pkcs8", "-topk8", "-nocrypt"], &key)
                .unwrap()
                .into_bytes()
        }
        Some("of another CA") => key = TestAuthority::new("other").key(),
        Some(other) => panic!("{case}: key form {other}"),
        None => {}
    }
    // Read after the CA was created, because its validity starts then.
    let now = SystemTime::now();
    let loaded = Authority::parse(made.certificate().as_bytes(), &key, now);
    if let Some(fault) = text("fault") {
        let faults = loaded.unwrap_err();
        assert!(
            format!("{:?}", faults[..1].first()).contains(fault),
            "{case}: {faults:?}"
        );
        return;
    }
    let loaded = loaded.unwrap();
    if let Some(count) = described["chain"].as_u64() {
        assert_eq!(loaded.chain.len() as u64, count, "{case}");
        assert_eq!(loaded.chain_pem(), made.certificate());
    }
    if described["leaf_ends_with_ca"].as_bool() == Some(true) {
        let key = PrivateKey::generate(KeyType::P256).unwrap();
        let container: Container = serde_json::from_str(r#"{"guid":"g1"}"#).unwrap();
        let week = Duration::from_secs(7 * 24 * 3600);
        let wanted = Validity::starting(now, week);
        let issued = loaded
            .issue(
                &container.identity().unwrap(),
                key.public_key_info(),
                wanted,
            )
            .unwrap();
        assert_eq!(issued.validity.not_after, loaded.validity.not_after);
        assert!(loaded.caution(now, week).is_some());
    }
}

/// Runs steps of a rotator; each has a command and what it changes.
fn scenario(case: &Value) {
    let mut world = World::new();
    for step in case["steps"].as_array().unwrap() {
        let (guid, read) = (
            step["guid"].as_str().unwrap_or("g1"),
            |path: &Path, name: &str| read_pair(path, name).map(|pair| pair.certificate).ok(),
        );
        let path = world.path(guid);
        let before = ["instance", "c2c"].map(|name| read(&path, name));
        let renews_at = |world: &World| {
            let status = world.rotator.status(world.now);
            status
                .identities
                .iter()
                .find(|one| one.guid.as_str() == guid)
                .map(|one| one.renews_at)
        };
        let due = renews_at(&world);
        world.now += Duration::from_secs(step["after_s"].as_u64().unwrap_or(0));
        let now = world.now;
        let done = match step["command"].as_str().unwrap() {
            "create" => world
                .rotator
                .create(container(step["container"].clone()), now),
            "update" => world
                .rotator
                .update(container(step["container"].clone()), now),
            "destroy" => world.rotator.destroy(&crate::rotator::guid(guid)),
            "block the folder" => {
                fs::write(&path, "a file in place of the folder").unwrap();
                Ok(())
            }
            "lose the folder" => {
                fs::remove_dir_all(&path).unwrap();
                Ok(())
            }
            other => panic!("{case}: command {other}"),
        };
        assert_eq!(
            done.is_ok(),
            step["fails"].as_bool() != Some(true),
            "{step}: {done:?}"
        );
        let after = ["instance", "c2c"].map(|name| read(&path, name));
        for (expected, of) in step["expect"].as_object().into_iter().flatten() {
            match expected.as_str() {
                "renewed" => {
                    for (name, (before, after)) in
                        ["instance", "c2c"].iter().zip(before.iter().zip(&after))
                    {
                        let wanted = of.as_array().unwrap().contains(&Value::from(*name));
                        assert_eq!(before != after, wanted, "{step}: {name}");
                    }
                }
                "same_renewal_time" => assert_eq!(renews_at(&world), due, "{step}"),
                "exists" => assert_eq!(path.is_dir(), of.as_bool().unwrap(), "{step}"),
                "identities" => {
                    assert_eq!(
                        world.rotator.guids().len() as u64,
                        of.as_u64().unwrap(),
                        "{step}"
                    )
                }
                "modes" => {
                    for (name, mode) in of.as_object().unwrap() {
                        use std::os::unix::fs::PermissionsExt;
                        let held =
                            fs::metadata(path.join(name)).unwrap().permissions().mode() & 0o777;
                        assert_eq!(
                            format!("{held:04o}"),
                            mode.as_str().unwrap(),
                            "{step}: {name}"
                        );
                    }
                }
                "links" => {
                    for name in strings(of) {
                        let target = fs::read_link(path.join(&name)).unwrap();
                        assert_eq!(target, Path::new("..data").join(&name), "{step}");
                    }
                }
                "sound" => assert_eq!(
                    check::folder(&path, now),
                    check::Findings::default(),
                    "{step}"
                ),
                other => panic!("{step}: no check for {other}"),
            }
        }
        if after[0].is_some() {
            assert!(matches(&read_pair(&path, "instance").unwrap()), "{step}");
        }
    }
}

fn san(case: &Value) {
    match names(case) {
        Err(error) => {
            let text = error.to_string();
            match case["error"].as_str() {
                Some(expected) => assert!(text.contains(expected), "{case}: {text}"),
                None => {
                    assert!(
                        text.ends_with("longer than 64 characters (X.520); use alternative_name"),
                        "{text}"
                    );
                    assert!(
                        case["ours"].as_str().unwrap().starts_with("refused"),
                        "{case}"
                    );
                }
            }
        }
        Ok((name, names)) => {
            assert!(case["error"].is_null(), "{case}: {names:?}");
            let mut checked = 0;
            if let Some(expected) = case["name"].as_str() {
                assert_eq!(name.unwrap(), expected, "{case}");
                checked += 1;
            }
            if let Some(expected) = case["cn"].as_str() {
                assert_eq!(names.common_name.as_deref(), Some(expected), "{case}");
                checked += 1;
            }
            if case.get("dns").is_some() {
                assert_eq!(names.dns, strings(&case["dns"]), "{case}");
                checked += 1;
            }
            if case.get("ips").is_some() {
                let addresses: Vec<_> = names.addresses.iter().map(ToString::to_string).collect();
                assert_eq!(addresses, strings(&case["ips"]), "{case}");
                checked += 1;
            }
            if case["id"] == "unresolved" {
                let name = link(&case["link"]).name(false).unwrap();
                assert_eq!(
                    unresolved(&fleet(), std::slice::from_ref(&name), &[]),
                    [unknown_name(&name)]
                );
                checked += 1;
            }
            assert!(checked > 0, "nothing is checked in {case}");
        }
    }
}

fn names(case: &Value) -> anyhow::Result<(Option<String>, Names)> {
    let kind = case["type"]
        .as_str()
        .or(case["variable_type"].as_str())
        .unwrap_or("certificate");
    let wildcard = case["wildcard"].as_bool().unwrap_or(false);
    let options: Options = match &case["options"] {
        Value::Null => Options::default(),
        options => serde_json::from_value(options.clone()).unwrap(),
    };
    let link = if case["link"].is_null() {
        Link::Manual(String::new())
    } else {
        link(&case["link"])
    };
    let mut names = Names::of(&options)?;
    for consumer in case["consumes"].as_array().into_iter().flatten() {
        if kind != "certificate" {
            anyhow::bail!(
                "variable of type {kind:?} cannot consume links; only type certificate can"
            );
        }
        names.consume(consumer.as_str().unwrap(), &link, wildcard)?;
    }
    let name = (!case["link"].is_null())
        .then(|| link.name(wildcard))
        .transpose()?;
    Ok((name, names))
}

fn link(link: &Value) -> Link {
    if let Some(address) = link["manual_address"].as_str() {
        return Link::Manual(address.to_owned());
    }
    let text = |member: &str| link[member].as_str().unwrap().to_owned();
    let flag = |member: &str| link[member].as_bool().unwrap_or(false);
    let number = |member: &str| link[member].as_u64().unwrap();
    let short = flag("short") || flag("link_names");
    Link::Group {
        instance_group: text("instance_group"),
        network: text("network"),
        deployment: text("deployment"),
        domain: link["domain"].as_str().unwrap_or("bosh").to_owned(),
        ids: short.then(|| Ids {
            network: number("network_id"),
            group: number("group_id"),
        }),
    }
}

/// A fleet of one instance group.
fn fleet() -> Snapshot {
    let text = r#"{"record_keys":["id","instance_group","group_ids","az","az_id","network","network_id",
        "deployment","ip","domain"],"record_infos":[["i1","server-ig",["7"],"z1","1","default","3",
        "app-service","10.0.0.1","bosh"]]}"#;
    let (records, warnings) = Records::parse(text.as_bytes()).unwrap();
    assert!(warnings.is_empty());
    Snapshot::build(records, &AliasFiles::default()).0
}

#[test]
fn fleet_names_are_checked() {
    let fleet = fleet();
    let names = |names: &[&str]| {
        names
            .iter()
            .map(|name| (*name).to_owned())
            .collect::<Vec<_>>()
    };
    let known = names(&[
        "q-s0.server-ig.default.app-service.bosh",
        "*.server-ig.default.app-service.bosh",
        "i1.server-ig.default.app-service.bosh",
        "q-n3s0.q-g7.bosh",
        "*.q-g7.bosh",
        "www.example.org",
    ]);
    assert_eq!(
        unresolved(&fleet, &known, &["10.0.0.1".parse().unwrap()]),
        [""; 0]
    );
    let unknown = names(&[
        "*.nobody.default.app-service.bosh",
        "i2.server-ig.default.app-service.bosh",
    ]);
    let address = "10.0.0.2".parse().unwrap();
    let missing = unresolved(&fleet, &unknown, &[address]);
    let expected: Vec<_> = unknown.iter().map(|name| unknown_name(name)).collect();
    assert_eq!(missing[..2], expected);
    assert_eq!(
        missing[2],
        "10.0.0.2: no instance has this address; reissue with the current one"
    );
}

fn unknown_name(name: &str) -> String {
    format!("{name}: no instance has this name; deploy the group or correct the name")
}
