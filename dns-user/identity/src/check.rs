//! `check`: finds defects of a CA, of an identity folder, or in the names of a certificate.

use std::{
    collections::BTreeSet,
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    time::SystemTime,
};

use anyhow::Context as _;
use dns_core::{
    catalog::{AliasFiles, Records, Snapshot},
    name::Name,
    resolve::{AllRunning, Existence, resolve},
};
use dns_kit::{
    files::bounded,
    tls::{Certificate, first_common_name},
};
use rustls_pki_types::CertificateDer;
use x509_cert::ext::pkix::{SubjectAltName, name::GeneralName};

use crate::{
    authority::{CaFiles, certificates, certifies, date, inspect, parse_chain, validity},
    certificate::{Validity, ValidityState},
    folder::read_pair,
    keys::PrivateKey,
    schedule::RenewalWindow,
};

/// Findings of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// Defects, each with file, cause and remedy.
    pub errors: Vec<String>,
    /// Conditions that deserve attention.
    pub warnings: Vec<String>,
}

impl Findings {
    fn error(&mut self, path: &Path, problem: impl ToString) {
        self.errors
            .push(format!("{}: {}", path.display(), problem.to_string()));
    }

    fn warning(&mut self, path: &Path, problem: impl ToString) {
        self.warnings
            .push(format!("{}: {}", path.display(), problem.to_string()));
    }
}

/// Checks a CA as `run` does when loading it.
pub fn authority(files: &CaFiles, now: SystemTime) -> Findings {
    let mut found = Findings::default();
    match files.load(now) {
        Ok(authority) => {
            // The rotator's default, because its options are not known here.
            if let Some(caution) = authority.caution(now, std::time::Duration::from_secs(24 * 3600))
            {
                found.warning(&files.certificate, caution);
            }
        }
        Err(error) => found
            .errors
            .extend(error.to_string().lines().map(str::to_owned)),
    }
    found
}

/// Checks a CA certificate without its key.
pub fn authority_certificate(path: &Path, now: SystemTime) -> Findings {
    let mut found = Findings::default();
    match read_chain(path) {
        Ok(parsed) => {
            for fault in inspect(&parsed, now) {
                found.error(path, fault);
            }
        }
        Err(problem) => found.error(path, problem),
    }
    found
}

fn read_chain(path: &Path) -> anyhow::Result<Vec<Certificate>> {
    let (_, parsed) = parse_chain(&bounded::read(path)?)?;
    Ok(parsed)
}

/// Checks every pair of an identity folder.
pub fn folder(path: &Path, now: SystemTime) -> Findings {
    let mut found = Findings::default();
    let data = path.join("..data");
    if !data.is_dir() {
        found.error(
            &data,
            "no certificate and key found; create the identity, or wait for its first renewal",
        );
        return found;
    }
    pair(path, "instance", now, &mut found);
    if data.join("c2c.crt").exists() {
        pair(path, "c2c", now, &mut found);
    }
    for name in ["instance.crt", "instance.key", "instance.pem"] {
        let link = path.join(name);
        if fs::read_link(&link).ok().as_deref() != Some(&Path::new("..data").join(name)) {
            found.error(
                &link,
                format!("not a link to ..data/{name}; remove it, and the next renewal restores it"),
            );
        }
    }
    let bundle = path.join("ca.crt");
    let text = bounded::read(&bundle).map_err(anyhow::Error::from);
    match text.and_then(|text| Ok(certificates(&text)?)) {
        Ok(roots) => {
            // Instances of the same cell verify each other with this bundle.
            if issuer(path).is_some_and(|issuer| !roots.contains(&issuer)) {
                found.error(
                    &bundle,
                    "the CA of the certificate is not in the trust bundle; restart the rotator",
                );
            }
        }
        Err(problem) => found.error(&bundle, problem),
    }
    found
}

/// Returns the certificate that follows the leaf.
fn issuer(folder: &Path) -> Option<CertificateDer<'static>> {
    let pair = read_pair(folder, "instance").ok()?;
    let chain = certificates(pair.certificate.as_bytes()).ok()?;
    chain.into_iter().nth(1)
}

fn pair(folder: &Path, name: &str, now: SystemTime, found: &mut Findings) {
    let crt = folder.join(format!("{name}.crt"));
    let key = folder.join(format!("{name}.key"));
    let pair = match read_pair(folder, name) {
        Ok(pair) => pair,
        Err(error) => {
            return found.error(&crt, format!("{error}; the next renewal replaces the pair"));
        }
    };
    let parsed = match parse_chain(pair.certificate.as_bytes()) {
        Ok((_, parsed)) => parsed,
        Err(fault) => return found.error(&crt, fault),
    };
    match PrivateKey::from_pem(pair.key.as_bytes()) {
        Err(error) => found.error(&key, error),
        Ok(held) if !certifies(&parsed[0], &held) => {
            found.error(
                &key,
                format!(
                    "does not match the key of {}; destroy and recreate the identity",
                    crt.display()
                ),
            );
        }
        Ok(_) => {}
    }
    check_validity(&crt, validity(&parsed[0]), now, found);
    if parsed.len() < 2 {
        found.error(
            &crt,
            "the CA's certificate does not follow the leaf; the next renewal replaces the pair",
        );
    }
    if let Ok(facts) = fs::metadata(&key) {
        use std::os::unix::fs::PermissionsExt;
        let mode = facts.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            found.error(
                &key,
                format!(
                    "mode {mode:03o} lets others read the key; destroy and recreate the identity"
                ),
            );
        }
    }
}

fn check_validity(crt: &Path, valid: Validity, now: SystemTime, found: &mut Findings) {
    let window = RenewalWindow::of(valid.length());
    let ends = date(valid.not_after);
    match valid.standing(now) {
        ValidityState::Expired => {
            let problem = format!("expired at {ends}; see `status` for the failed renewal");
            found.error(crt, problem);
        }
        ValidityState::NotYet => {
            let begins = date(valid.not_before);
            found.error(crt, format!("valid only from {begins}; check the clock"));
        }
        // No defect: peers still accept the pair, but its renewal is overdue.
        ValidityState::Valid if valid.not_before + window.end < now => {
            let problem = format!("past its renewal window, expires at {ends}; see `status`");
            found.warning(crt, problem);
        }
        ValidityState::Valid => {}
    }
}

/// Returns the names of a certificate that do not resolve in the fleet of a `records.json`.
pub(crate) fn names(
    certificate: &Path,
    records: &Path,
    aliases: &[PathBuf],
) -> anyhow::Result<Vec<String>> {
    let parsed = read_chain(certificate).with_context(|| certificate.display().to_string())?;
    let (names, addresses) = subject_names(&parsed[0]);
    let snapshot = snapshot(records, aliases)?;
    Ok(unresolved(&snapshot, &names, &addresses))
}

/// Reads a fleet's records and aliases.
pub fn snapshot(records: &Path, aliases: &[PathBuf]) -> anyhow::Result<Snapshot> {
    let (parsed, _) =
        Records::parse(&read(records)?).with_context(|| records.display().to_string())?;
    let mut texts = Vec::with_capacity(aliases.len());
    for path in aliases {
        texts.push((path.display().to_string(), read(path)?));
    }
    let texts = texts.iter().map(|(path, text)| (&**path, &**text));
    let (aliases, _) = AliasFiles::parse(texts)?;
    Ok(Snapshot::build(parsed, &aliases).0)
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    bounded::read(path).with_context(|| path.display().to_string())
}

/// Returns whether a common name looks like a host name. It may be any text, such as `My Application Server`.
pub(crate) fn is_host_name(name: &str) -> bool {
    name.contains('.') && !name.contains(' ')
}

/// Returns the DNS names and addresses among the SANs, and the common name if it looks like a host name.
fn subject_names(certificate: &Certificate) -> (Vec<String>, Vec<IpAddr>) {
    let certificate = certificate.tbs_certificate();
    let mut names = Vec::new();
    let mut addresses = Vec::new();
    names.extend(first_common_name(certificate.subject()).filter(|name| is_host_name(name)));
    if let Ok(Some((_, alternative))) = certificate.get_extension::<SubjectAltName>() {
        for name in alternative.0 {
            match name {
                // That of a stopped container.
                GeneralName::DnsName(name) if name.as_str().is_empty() => {}
                // The common name is usually the first of these names.
                GeneralName::DnsName(name) if !names.iter().any(|held| held == name.as_str()) => {
                    names.push(name.to_string());
                }
                GeneralName::IpAddress(octets) => {
                    if let Ok(v4) = <[u8; 4]>::try_from(octets.as_bytes()) {
                        addresses.push(v4.into());
                    } else if let Ok(v6) = <[u8; 16]>::try_from(octets.as_bytes()) {
                        addresses.push(v6.into());
                    }
                }
                _ => {}
            }
        }
    }
    (names, addresses)
}

//----------- Unresolved -----------------------------------------------------

/// Returns the names and addresses that are not in the fleet, each with the remedy. Names outside the fleet's
/// domains are ignored. A wildcard resolves if `q-s0` in its place does.
pub fn unresolved(snapshot: &Snapshot, names: &[String], addresses: &[IpAddr]) -> Vec<String> {
    let mut missing = Vec::new();
    for name in names {
        missing.extend(resolve_name(snapshot, name));
    }
    if !addresses.is_empty() {
        let mut known = BTreeSet::new();
        for instance in snapshot.instances() {
            known.extend(instance.ip);
        }
        for address in addresses {
            // Clients on the same machine connect by loopback addresses, which are in no record.
            if !address.is_loopback() && !known.contains(address) {
                missing.push(format!(
                    "{address}: no instance has this address; reissue with the current one"
                ));
            }
        }
    }
    missing
}

/// Returns why a name does not resolve; `None` if it does, or is outside the fleet's domains.
fn resolve_name(snapshot: &Snapshot, text: &str) -> Option<String> {
    let asked = match text.strip_prefix("*.") {
        Some(rest) => format!("q-s0.{rest}"),
        None => text.to_owned(),
    };
    let existence = match Name::from_text(&asked) {
        // Every instance counts as running: a certificate is valid whether or not its instance is
        // healthy.
        Ok(name) => resolve(snapshot, &AllRunning, &name)?.existence,
        Err(_) => Existence::Malformed,
    };
    match existence {
        Existence::Found => None,
        Existence::NoSuchName => Some(format!(
            "{text}: no instance has this name; deploy the group or correct the name"
        )),
        Existence::Malformed => Some(format!(
            "{text}: not a valid query of a fleet's domain; correct it"
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::{PermissionsExt, symlink},
        time::Duration,
    };

    use serde_json::json;

    use super::*;
    use crate::tests::{START, TestCa, World, at, replace};

    #[test]
    fn validity_has_four_states() {
        let begin = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let hours = |number: u64| Duration::from_secs(3600 * number);
        let valid = Validity {
            not_before: begin,
            not_after: begin + hours(24),
        };
        let late = begin + RenewalWindow::of(valid.length()).end;
        let second = Duration::from_secs(1);
        for (now, errors, warnings) in [
            (
                begin - second,
                ["valid only from"].as_slice(),
                [].as_slice(),
            ),
            (begin, &[], &[]),
            (late, &[], &[]),
            (late + second, &[], &["past its renewal window"]),
            (valid.not_after, &[], &["past its renewal window"]),
            (valid.not_after + second, &["expired at"], &[]),
        ] {
            let mut found = Findings::default();
            check_validity(Path::new("x.crt"), valid, now, &mut found);
            for (found, expected) in [(found.errors, errors), (found.warnings, warnings)] {
                assert_eq!(found.len(), expected.len(), "{found:?}");
                for (line, start) in found.iter().zip(expected) {
                    assert!(line.starts_with(&format!("x.crt: {start}")), "{line}");
                }
            }
        }
    }

    #[test]
    fn names_are_listed_once() {
        use rcgen::{DnType, SanType};

        let found = |common: &str, names: &[&str], addresses: &[&str]| {
            let mut params = rcgen::CertificateParams::default();
            params.distinguished_name.push(DnType::CommonName, common);
            let names = names
                .iter()
                .map(|name| SanType::DnsName((*name).try_into().unwrap()));
            let addresses = addresses
                .iter()
                .map(|address| SanType::IpAddress(address.parse().unwrap()));
            params.subject_alt_names = names.chain(addresses).collect();
            let key = rcgen::KeyPair::generate().unwrap();
            let pem = params.self_signed(&key).unwrap().pem();
            let (names, addresses) = subject_names(&parse_chain(pem.as_bytes()).unwrap().1[0]);
            let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
            (names.join(" "), addresses.join(" "))
        };
        for (common, names, expected) in [
            ("a.bosh", ["a.bosh", "b.bosh"].as_slice(), "a.bosh b.bosh"),
            (
                "a.bosh",
                &["b.bosh", "c.bosh", "b.bosh"],
                "a.bosh b.bosh c.bosh",
            ),
            ("an instance v1.2", &["", "b"], "b"),
            ("instance", &["*.b", "c"], "*.b c"),
        ] {
            assert_eq!(found(common, names, &[]).0, expected);
        }
        assert_eq!(
            found("x", &["a"], &["10.0.0.1", "fd00::1"]),
            ("a".to_owned(), "10.0.0.1 fd00::1".to_owned())
        );
    }

    fn texts(path: &Path, problems: &[&str]) -> Vec<String> {
        let mut texts = Vec::new();
        for problem in problems {
            texts.push(format!("{}: {problem}", path.display()));
        }
        texts
    }

    #[test]
    fn keys_are_optional_for_authorities() {
        let place = tempfile::tempdir().unwrap();
        let brief = TestCa::with("brief", |params| {
            params.not_after = at(START + 86_399).into();
        });
        let files = brief.write(place.path());
        let CaFiles { certificate, key } = &files;
        let end = "2033-05-19 03:33:19 UTC";
        let found = authority(&files, at(START));
        assert_eq!(found.errors, [""; 0]);
        let caution = format!(
            "the CA expires at {end}, before a new leaf would; leaves expire with the CA: replace it soon"
        );
        assert_eq!(found.warnings, texts(certificate, &[&caution]));
        assert_eq!(authority(&files, at(START - 1)), Findings::default());
        let alone = |now| authority_certificate(certificate, at(now));
        assert_eq!(alone(START), Findings::default());
        let expired = format!("certificate 1 expired at {end}; replace the CA");
        let errors = texts(certificate, &[&expired]);
        for found in [alone(START + 86_400), authority(&files, at(START + 86_400))] {
            assert_eq!(found.errors, errors);
            assert_eq!(found.warnings, [""; 0]);
        }
        replace(key, "x");
        assert_eq!(authority(&files, at(START + 86_400)).errors.len(), 2);
        replace(certificate, "x");
        let none = "no certificate in PEM format; put the CA's certificate first, then its issuers";
        assert_eq!(alone(START).errors, texts(certificate, &[none]));
        fs::remove_file(certificate).unwrap();
        let missing = "No such file or directory (os error 2)";
        assert_eq!(alone(START).errors, texts(certificate, &[missing]));
    }

    #[test]
    fn folder_defects_are_found() {
        let mut world = World::new();
        let path = world.path("g1");
        let none =
            "no certificate and key found; create the identity, or wait for its first renewal";
        assert_eq!(
            folder(&path, at(START)).errors,
            texts(&path.join("..data"), &[none])
        );
        world.create(json!({"guid": "g1", "internal_routes": ["r.x"]}));
        world.create(json!({"guid": "g2", "internal_routes": ["r.x"]}));
        assert_eq!(folder(&path, at(START)), Findings::default());
        let file = |name: &str| path.join(name);
        let data = |name: &str| path.join("..data").join(name);
        let found = || folder(&path, at(START)).errors;
        // The key of another pair, readable by others.
        for name in ["instance", "c2c"] {
            let key = data(&format!("{name}.key"));
            let own = fs::read_to_string(&key).unwrap();
            fs::write(&key, world.read("g2", &format!("{name}.key"))).unwrap();
            let certificate = file(&format!("{name}.crt"));
            let mismatch = format!(
                "does not match the key of {}; destroy and recreate the identity",
                certificate.display()
            );
            let named = file(&format!("{name}.key"));
            assert_eq!(found(), texts(&named, &[&mismatch]));
            fs::write(&key, "x").unwrap();
            let unusable = "no private key in PEM format; expected `-----BEGIN PRIVATE KEY-----` or an RSA or EC form";
            assert_eq!(found(), texts(&named, &[unusable]));
            fs::write(&key, own).unwrap();
            for (mode, readable) in [(0o640, true), (0o601, true), (0o700, false), (0o600, false)] {
                fs::set_permissions(&key, fs::Permissions::from_mode(mode)).unwrap();
                let problem = format!(
                    "mode {mode:03o} lets others read the key; destroy and recreate the identity"
                );
                let expected = if readable {
                    texts(&named, &[&problem])
                } else {
                    Vec::new()
                };
                assert_eq!(found(), expected, "{mode:o}");
            }
        }
        // A leaf without its CA: the bundle cannot be compared.
        let own = world.read("g1", "instance.crt");
        let leaf = own.strip_suffix(&world.ca.chain).unwrap();
        fs::write(data("instance.crt"), leaf).unwrap();
        let alone =
            "the CA's certificate does not follow the leaf; the next renewal replaces the pair";
        assert_eq!(found(), texts(&file("instance.crt"), &[alone]));
        fs::write(data("instance.crt"), "x").unwrap();
        let no_certificate =
            "no certificate in PEM format; put the CA's certificate first, then its issuers";
        assert_eq!(found(), texts(&file("instance.crt"), &[no_certificate]));
        fs::write(data("instance.crt"), &own).unwrap();
        let other = TestCa::new("other").chain;
        for (bundle, problem) in [
            (
                other.as_str(),
                "the CA of the certificate is not in the trust bundle; restart the rotator",
            ),
            ("x", no_certificate),
        ] {
            fs::write(data("ca.crt"), bundle).unwrap();
            assert_eq!(found(), texts(&file("ca.crt"), &[problem]));
        }
        fs::write(data("ca.crt"), other + &world.ca.chain).unwrap();
        assert_eq!(found(), [""; 0]);
        let missing = "No such file or directory (os error 2)";
        fs::remove_file(data("ca.crt")).unwrap();
        assert_eq!(found(), texts(&file("ca.crt"), &[missing]));
        fs::write(data("ca.crt"), &world.ca.chain).unwrap();
        for name in ["instance.crt", "instance.key", "instance.pem"] {
            fs::remove_file(file(name)).unwrap();
            let problem =
                format!("not a link to ..data/{name}; remove it, and the next renewal restores it");
            assert_eq!(found(), texts(&file(name), &[&problem]));
            symlink(Path::new("..data").join(name), file(name)).unwrap();
        }
        assert_eq!(found(), [""; 0]);
        let late = folder(&path, at(START + 86_401));
        let expired = "expired at 2033-05-19 03:33:20 UTC; see `status` for the failed renewal";
        let mut errors = texts(&file("instance.crt"), &[expired]);
        errors.extend(texts(&file("c2c.crt"), &[expired]));
        assert_eq!(late.errors, errors);
        fs::remove_file(data("instance.key")).unwrap();
        let gone = format!("{missing}; the next renewal replaces the pair");
        assert_eq!(found()[0], texts(&file("instance.crt"), &[&gone])[0]);
    }

    #[test]
    fn names_outside_the_fleet_are_reported() {
        let place = tempfile::tempdir().unwrap();
        let records = place.path().join("records.json");
        let text = r#"{"record_keys": ["id", "instance_group", "network", "deployment", "ip", "domain"],
            "record_infos": [["a", "web", "net", "dep", "10.0.0.1", "bosh"]]}"#;
        fs::write(&records, text).unwrap();
        let aliases = place.path().join("aliases.json");
        fs::write(&aliases, r#"{"alias.bosh": ["a.web.net.dep.bosh"]}"#).unwrap();
        let with_alias = snapshot(&records, std::slice::from_ref(&aliases)).unwrap();
        let none = "no instance has this name; deploy the group or correct the name";
        let malformed = "not a valid query of a fleet's domain; correct it";
        let label = format!("{}.web.net.dep.bosh", "a".repeat(64));
        for (name, problem) in [
            ("a.web.net.dep.bosh", None),
            ("*.web.net.dep.bosh", None),
            ("q-s0.web.net.dep.bosh", None),
            ("alias.bosh", None),
            ("b.web.net.dep.bosh", Some(none)),
            ("*.db.net.dep.bosh", Some(none)),
            ("www.example.org", None),
            (&label, Some(malformed)),
        ] {
            let expected: Vec<String> = problem
                .iter()
                .map(|problem| format!("{name}: {problem}"))
                .collect();
            assert_eq!(
                unresolved(&with_alias, &[name.to_owned()], &[]),
                expected,
                "{name}"
            );
        }
        let addresses = ["10.0.0.1", "10.0.0.2", "127.0.0.1", "::1", "fd00::2"]
            .map(|address| address.parse().unwrap());
        assert_eq!(
            unresolved(&with_alias, &[], &addresses),
            [
                "10.0.0.2: no instance has this address; reissue with the current one",
                "fd00::2: no instance has this address; reissue with the current one"
            ]
        );
        // The names of a certificate's file.
        let mut params =
            rcgen::CertificateParams::new(vec!["b.web.net.dep.bosh".to_owned()]).unwrap();
        params
            .distinguished_name
            .push(rcgen::DnType::CommonName, "c.web.net.dep.bosh");
        let key = rcgen::KeyPair::generate().unwrap();
        let path = place.path().join("x.crt");
        fs::write(&path, params.self_signed(&key).unwrap().pem()).unwrap();
        assert_eq!(
            names(&path, &records, &[]).unwrap(),
            [
                format!("c.web.net.dep.bosh: {none}"),
                format!("b.web.net.dep.bosh: {none}")
            ]
        );
        let missing = place.path().join("missing");
        for error in [
            names(&missing, &records, &[]).unwrap_err(),
            names(&path, &missing, &[]).unwrap_err(),
            names(&path, &records, std::slice::from_ref(&missing)).unwrap_err(),
        ] {
            assert_eq!(
                format!("{error:#}"),
                format!(
                    "{}: No such file or directory (os error 2)",
                    missing.display()
                )
            );
        }
        fs::write(&path, "x").unwrap();
        let error = names(&path, &records, &[]).unwrap_err();
        assert_eq!(error.to_string(), path.display().to_string());
    }
}
