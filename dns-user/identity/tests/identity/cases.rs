//! The public cases. `BOSH_DNS_IDENTITY_CASES` names another folder in the same format.

use std::{
    env, fs,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use dns_core::catalog::{AliasFiles, Records, Snapshot};
use dns_identity::{
    authority::{Authority, Fault, certificates, parse_all},
    keys::{KeyType, PrivateKey},
    names::{Unresolved, unresolved},
    profile::Container,
    san::{Consumed, Ids, Link, Names, Options, Purpose, SanError},
    window::{RenewalWindow, Share},
};
use serde_json::Value;
use x509_parser::prelude::{GeneralName, X509Certificate};

use crate::{
    authorities::{CaKey, SOUND, TestAuthority},
    faults, rotator,
    tools::openssl,
};

fn folder() -> PathBuf {
    env::var_os("BOSH_DNS_IDENTITY_CASES")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases"), PathBuf::from)
}

fn cases(file: &str) -> Vec<Value> {
    let path = folder().join(file);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let cases: Vec<Value> = serde_json::from_str(&text).unwrap();
    assert!(!cases.is_empty(), "{} has no case", path.display());
    cases
}

#[test]
fn identity_cases_pass() {
    for case in cases("identity_cases.json") {
        let id = case["id"].as_str().unwrap();
        println!("{id}");
        if case.get("validity_s").is_some() {
            rotation(&case);
        } else if case.get("certificate").is_some() {
            certificate(&case);
        } else if id.starts_with("ca-") {
            ca(id);
        } else {
            scenario(id);
        }
    }
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
    assert!(window.start <= reference && reference <= window.end, "{case}");
    for guid in ["g1", "g2", ""] {
        let moment = window.moment(Share::of(guid));
        assert!(window.start <= moment && moment < window.end, "{case}: {moment:?}");
    }
}

fn authority() -> (TestAuthority, Authority) {
    let made = TestAuthority::with("authority", SOUND, CaKey::P256, 10);
    let loaded = Authority::parse(made.certificate().as_bytes(), &made.key(), SystemTime::now()).unwrap();
    (made, loaded)
}

fn strings(value: &Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
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
    let issued = authority.issue(&profile, key.public_key_info(), now, day).unwrap();
    let ders = certificates(issued.pem.as_bytes()).unwrap();
    let parsed = parse_all(&ders).unwrap();
    let leaf = &parsed[0];
    for (member, expected) in case["certificate"].as_object().unwrap() {
        match member.as_str() {
            "subject" => assert_eq!(subject(leaf), expected.as_str().unwrap()),
            "dns" => assert_eq!(alternative_names(leaf).0, strings(expected), "{case}"),
            "ips" => assert_eq!(alternative_names(leaf).1, strings(expected), "{case}"),
            "key_usage" => {
                let usage = leaf.key_usage().unwrap().unwrap();
                assert!(usage.critical);
                let spelled = [
                    (usage.value.digital_signature(), "digitalSignature"),
                    (usage.value.non_repudiation(), "nonRepudiation"),
                    (usage.value.key_encipherment(), "keyEncipherment"),
                    (usage.value.data_encipherment(), "dataEncipherment"),
                    (usage.value.key_agreement(), "keyAgreement"),
                    (usage.value.key_cert_sign(), "keyCertSign"),
                ];
                let held: Vec<_> = spelled.iter().filter(|(held, _)| *held).map(|(_, name)| *name).collect();
                assert_eq!(held, strings(expected));
            }
            "eku" => {
                let purposes = leaf.extended_key_usage().unwrap().unwrap().value;
                let held = [(purposes.client_auth, "clientAuth"), (purposes.server_auth, "serverAuth")];
                let held: Vec<_> = held.iter().filter(|(held, _)| *held).map(|(_, name)| *name).collect();
                assert_eq!(held, strings(expected));
                assert!(!purposes.any && purposes.other.is_empty());
            }
            "basic_constraints" => {
                assert!(expected.is_null());
                assert!(leaf.basic_constraints().unwrap().is_none());
            }
            "serial" => {
                assert!(expected.as_str().unwrap().starts_with("random UUID v4"), "{expected}");
                assert!((12..=17).contains(&leaf.raw_serial().len()));
            }
            "not_before" => {
                assert_eq!(expected, "now, not earlier");
                let seconds = now.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
                assert_eq!(leaf.validity().not_before.timestamp() as u64, seconds);
            }
            "pem" => {
                assert_eq!(strings(expected), ["leaf", "CA"]);
                assert_eq!(parsed.len(), 2);
                assert_eq!(parsed[1].subject(), leaf.issuer());
            }
            other => panic!("{case}: no check for {other}"),
        }
    }
}

/// The subject as the cases spell it: SETs of `type=value`.
fn subject(leaf: &X509Certificate<'_>) -> String {
    let sets = leaf.subject().iter_rdn().map(|set| {
        let attributes = set.iter().map(|attribute| {
            let kind = match attribute.attr_type().to_id_string().as_str() {
                "2.5.4.3" => "CN",
                "2.5.4.11" => "OU",
                other => panic!("unexpected attribute {other}"),
            };
            format!("{kind}={}", attribute.as_str().unwrap())
        });
        format!("SET{{{}}}", attributes.collect::<Vec<_>>().join(", "))
    });
    sets.collect::<Vec<_>>().join(", ")
}

fn alternative_names(leaf: &X509Certificate<'_>) -> (Vec<String>, Vec<String>) {
    let (mut names, mut addresses) = (Vec::new(), Vec::new());
    for name in &leaf.subject_alternative_name().unwrap().unwrap().value.general_names {
        match name {
            GeneralName::DNSName(name) => names.push((*name).to_owned()),
            GeneralName::IPAddress(octets) => addresses.push(match <[u8; 4]>::try_from(*octets) {
                Ok(v4) => std::net::Ipv4Addr::from(v4).to_string(),
                Err(_) => std::net::Ipv6Addr::from(<[u8; 16]>::try_from(*octets).unwrap()).to_string(),
            }),
            other => panic!("unexpected name {other:?}"),
        }
    }
    (names, addresses)
}

/// Creates the CA fault named by the case.
fn ca(id: &str) {
    // Read after the CA was created, because its validity starts then.
    let now = SystemTime::now;
    let load = |made: &TestAuthority| Authority::parse(made.certificate().as_bytes(), &made.key(), now());
    let altered = |from: &str, to: &str| {
        load(&TestAuthority::with("altered", &SOUND.replace(from, to), CaKey::P256, 10)).unwrap_err()
    };
    match id {
        "ca-pkcs8" | "ca-pkcs1" => {
            let made = TestAuthority::with("rsa", SOUND, CaKey::Rsa, 10);
            let pkcs8 = openssl(&["pkcs8", "-topk8", "-nocrypt"], &made.key()).unwrap();
            Authority::parse(made.certificate().as_bytes(), pkcs8.as_bytes(), now()).unwrap();
            load(&made).unwrap();
        }
        "ca-chain" => {
            let below = TestAuthority::new("root").intermediate("below", SOUND);
            let loaded = load(&below).unwrap();
            assert_eq!(loaded.chain_pem(), below.certificate());
            assert_eq!(loaded.chain().len(), 2);
        }
        "ca-no-ski" => {
            let faults = altered("subjectKeyIdentifier=hash", "subjectKeyIdentifier=none");
            assert_eq!(faults, [Fault::NoKeyIdentifier(1)]);
        }
        "ca-eku" => {
            let root = TestAuthority::new("root");
            let below = root.intermediate("below", &format!("{SOUND}extendedKeyUsage=serverAuth\n"));
            assert_eq!(load(&below).unwrap_err(), [Fault::ExtendedKeyUsage(1)]);
        }
        "ca-key-usage" | "ca-no-keycertsign" | "ca-no-cert-sign" => {
            let faults = altered("keyUsage=critical,keyCertSign,cRLSign", "keyUsage=digitalSignature");
            assert_eq!(faults, [Fault::NoCertSign(1)]);
        }
        "ca-key-mismatch" => {
            let (one, other) = (TestAuthority::new("one"), TestAuthority::new("other"));
            let faults = Authority::parse(one.certificate().as_bytes(), &other.key(), now()).unwrap_err();
            assert!(matches!(faults[..], [Fault::KeyMismatch(_)]), "{faults:?}");
        }
        "ca-expired" => {
            let made = TestAuthority::new("old");
            let later = now() + Duration::from_secs(4000 * 24 * 3600);
            let faults = Authority::parse(made.certificate().as_bytes(), &made.key(), later).unwrap_err();
            assert!(matches!(faults[..], [Fault::Expired(1, _)]), "{faults:?}");
        }
        "ca-path-length" | "ca-pathlen" | "ca-path-len" => {
            let root =
                TestAuthority::with("root", &SOUND.replace("CA:TRUE", "CA:TRUE,pathlen:0"), CaKey::P256, 10);
            let faults = load(&root.intermediate("below", SOUND)).unwrap_err();
            assert_eq!(faults, [Fault::PathLength(2, 0, 1)]);
        }
        "ca-ends-first" => {
            let made = TestAuthority::with("short", SOUND, CaKey::P256, 1);
            let loaded = load(&made).unwrap();
            let key = PrivateKey::generate(KeyType::P256).unwrap();
            let container: Container = serde_json::from_str(r#"{"guid":"g1"}"#).unwrap();
            let week = Duration::from_secs(7 * 24 * 3600);
            let issued =
                loaded.issue(&container.identity().unwrap(), key.public_key_info(), now(), week).unwrap();
            assert_eq!(issued.validity.not_after, loaded.validity().not_after);
            assert_eq!(loaded.cautions(now(), week).len(), 1);
        }
        other => panic!("no CA is known for case {other}"),
    }
}

/// Behaviour in several steps.
fn scenario(id: &str) {
    match id {
        "routes-changed" => rotator::routes_renew_second_pair_only(),
        "destroy" => rotator::destroy_removes_files(),
        "files" => rotator::files_match_the_reference(),
        "fail-first" => faults::failed_create_leaves_no_identity(),
        other => panic!("no scenario is known for case {other}"),
    }
}

#[test]
fn name_cases_pass() {
    for case in cases("san_cases.json") {
        println!("{}", case["id"]);
        match names(&case) {
            Err(error) => {
                let text = error.to_string();
                match (case["error"].as_str(), &error) {
                    (Some(expected), _) => assert!(text.contains(expected), "{case}: {text}"),
                    (None, SanError::LongCommonName(_)) => {
                        assert!(text.ends_with("use alternative_name"), "{text}");
                        assert!(case["ours"].as_str().unwrap().starts_with("refused"), "{case}");
                    }
                    (None, other) => panic!("{case}: {other}"),
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
                        [Unresolved::Name(name.clone())]
                    );
                    checked += 1;
                }
                assert!(checked > 0, "nothing is checked in {case}");
            }
        }
    }
}

fn names(case: &Value) -> Result<(Option<String>, Names), SanError> {
    let kind = case["type"].as_str().or(case["variable_type"].as_str()).unwrap_or("certificate");
    let wildcard = case["wildcard"].as_bool().unwrap_or(false);
    let options: Options = match &case["options"] {
        Value::Null => Options::default(),
        options => serde_json::from_value(options.clone()).unwrap(),
    };
    let mut consumed = Vec::new();
    for consumer in case["consumes"].as_array().into_iter().flatten() {
        if kind != "certificate" {
            return Err(SanError::VariableType(kind.to_owned()));
        }
        let purpose = Purpose::parse(consumer.as_str().unwrap())?;
        consumed.push(Consumed { purpose, link: link(&case["link"]), wildcard });
    }
    let names = Names::of(&options, &consumed)?;
    let name = (!case["link"].is_null()).then(|| link(&case["link"]).name(wildcard)).transpose()?;
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
        ids: short.then(|| Ids { network: number("network_id"), group: number("group_id") }),
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
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let known = names(&[
        "q-s0.server-ig.default.app-service.bosh",
        "*.server-ig.default.app-service.bosh",
        "i1.server-ig.default.app-service.bosh",
        "q-n3s0.q-g7.bosh",
        "*.q-g7.bosh",
        "www.example.org",
    ]);
    assert_eq!(unresolved(&fleet, &known, &["10.0.0.1".parse().unwrap()]), []);
    let unknown = names(&["*.nobody.default.app-service.bosh", "i2.server-ig.default.app-service.bosh"]);
    let address = "10.0.0.2".parse().unwrap();
    let missing = unresolved(&fleet, &unknown, &[address]);
    let expected: Vec<_> = unknown.iter().cloned().map(Unresolved::Name).collect();
    assert_eq!(missing[..2], expected);
    assert_eq!(missing[2], Unresolved::Address(address));
}
