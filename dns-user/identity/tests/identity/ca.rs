//! Defects of a CA are found when it is loaded.

use std::time::{Duration, SystemTime};

use dns_identity::authority::{Authority, Fault};

use crate::{
    authorities::{CaKey, SOUND, TestAuthority},
    tools::openssl,
};

fn load(authority: &TestAuthority) -> Result<Authority, Vec<Fault>> {
    Authority::parse(
        authority.certificate().as_bytes(),
        &authority.key(),
        SystemTime::now(),
    )
}

fn faults(extensions: &str) -> Vec<Fault> {
    load(&TestAuthority::with("faulty", extensions, CaKey::P256, 10)).unwrap_err()
}

#[test]
fn sound_authorities_are_loaded() {
    for key in [CaKey::Rsa, CaKey::P256, CaKey::P384] {
        let loaded = load(&TestAuthority::with("sound", SOUND, key, 10));
        assert!(loaded.is_ok(), "{key:?}: {loaded:?}");
    }
}

#[test]
fn every_key_encoding_is_read() {
    let authority = TestAuthority::with("rsa", SOUND, CaKey::Rsa, 10);
    let pkcs8 = openssl(&["pkcs8", "-topk8", "-nocrypt"], &authority.key()).unwrap();
    assert!(pkcs8.starts_with("-----BEGIN PRIVATE KEY-----"), "{pkcs8}");
    let certificate = authority.certificate();
    Authority::parse(certificate.as_bytes(), pkcs8.as_bytes(), SystemTime::now()).unwrap();

    let authority = TestAuthority::new("ec");
    let sec1 = openssl(&["ec"], &authority.key()).unwrap();
    assert!(sec1.starts_with("-----BEGIN EC PRIVATE KEY-----"), "{sec1}");
    let certificate = authority.certificate();
    Authority::parse(certificate.as_bytes(), sec1.as_bytes(), SystemTime::now()).unwrap();
}

#[test]
fn missing_extensions_are_faults() {
    let without = |name: &str| -> String {
        SOUND
            .lines()
            .filter(|line| !line.starts_with(name))
            .map(|line| format!("{line}\n"))
            .collect()
    };
    let no_identifier = without("subjectKeyIdentifier") + "subjectKeyIdentifier=none\n";
    assert_eq!(faults(&no_identifier), [Fault::NoKeyIdentifier(1)]);
    assert_eq!(faults(&without("keyUsage")), [Fault::NoCertSign(1)]);
    let other_usage = without("keyUsage") + "keyUsage=digitalSignature\n";
    assert_eq!(faults(&other_usage), [Fault::NoCertSign(1)]);
    assert_eq!(faults(&without("basicConstraints")), [Fault::NotCa(1)]);
    assert_eq!(
        faults(&format!("{SOUND}extendedKeyUsage=serverAuth\n")),
        [Fault::ExtendedKeyUsage(1)]
    );
}

#[test]
fn any_purpose_is_accepted() {
    let authority = TestAuthority::with(
        "any",
        &format!("{SOUND}extendedKeyUsage=anyExtendedKeyUsage\n"),
        CaKey::P256,
        10,
    );
    let parsed = load(&authority);
    // The verifiers of rustls know no anyExtendedKeyUsage, so a trial may still refuse it.
    assert!(
        !matches!(&parsed, Err(faults) if faults.contains(&Fault::ExtendedKeyUsage(1))),
        "{parsed:?}"
    );
}

#[test]
fn foreign_key_is_refused() {
    let (one, other) = (TestAuthority::new("one"), TestAuthority::new("other"));
    let faults = Authority::parse(
        one.certificate().as_bytes(),
        &other.key(),
        SystemTime::now(),
    )
    .unwrap_err();
    assert_eq!(faults, [Fault::KeyMismatch("CN=one".to_owned())]);
}

#[test]
fn validity_depends_on_clock() {
    let authority = TestAuthority::new("ten years");
    let at = |now| Authority::parse(authority.certificate().as_bytes(), &authority.key(), now);
    let day = Duration::from_secs(24 * 3600);
    let late = at(SystemTime::now() + day * 4000).unwrap_err();
    assert!(matches!(late[..], [Fault::Expired(1, _)]), "{late:?}");
    let early = at(SystemTime::now() - day).unwrap_err();
    assert!(matches!(early[..], [Fault::NotYetValid(1, _)]), "{early:?}");
}

#[test]
fn path_length_is_counted() {
    let root = TestAuthority::with(
        "root",
        &SOUND.replace("CA:TRUE", "CA:TRUE,pathlen:0"),
        CaKey::P256,
        10,
    );
    assert!(load(&root).is_ok());
    let faults = load(&root.intermediate("below", SOUND)).unwrap_err();
    assert_eq!(faults, [Fault::PathLength(2, 0, 1)]);
}

#[test]
fn chain_order_is_checked() {
    let root = TestAuthority::new("root");
    let below = root.intermediate("below", SOUND);
    assert!(load(&below).is_ok());
    let swapped = below.certificate().replace(&root.certificate(), "");
    let stranger = TestAuthority::new("stranger").certificate();
    let faults = Authority::parse(
        (swapped + &stranger).as_bytes(),
        &below.key(),
        SystemTime::now(),
    )
    .unwrap_err();
    assert_eq!(faults, [Fault::Order(1, 2)]);
    // The same subject, but another key: only verification finds it.
    let swapped = below.certificate().replace(&root.certificate(), "");
    let impostor = TestAuthority::new("root").certificate();
    let faults = Authority::parse(
        (swapped + &impostor).as_bytes(),
        &below.key(),
        SystemTime::now(),
    )
    .unwrap_err();
    assert!(matches!(faults[..], [Fault::Refused(_)]), "{faults:?}");
}

#[test]
fn damaged_files_are_explained() {
    let authority = TestAuthority::new("sound");
    let now = SystemTime::now();
    let faults = Authority::parse(b"no PEM", &authority.key(), now).unwrap_err();
    assert_eq!(faults, [Fault::NoCertificate]);
    let half = authority.certificate();
    let faults =
        Authority::parse(&half.as_bytes()[..half.len() / 2], &authority.key(), now).unwrap_err();
    assert!(
        matches!(faults[..], [Fault::Damaged(1, _) | Fault::NoCertificate]),
        "{faults:?}"
    );
    let faults = Authority::parse(half.as_bytes(), b"", now).unwrap_err();
    assert!(matches!(faults[..], [Fault::Key(_)]), "{faults:?}");
    // The library's own text would list the bytes of the line.
    let malformed = authority
        .certificate()
        .replacen("CERTIFICATE-----", "CERTIFICATE", 1);
    let faults = Authority::parse(malformed.as_bytes(), &authority.key(), now).unwrap_err();
    assert!(
        faults[0]
            .to_string()
            .contains("the BEGIN line is malformed"),
        "{}",
        faults[0]
    );
}
