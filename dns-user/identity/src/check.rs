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
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) => {
            found.error(path, error);
            return found;
        }
    };
    match parse_chain(&text) {
        Ok((_, parsed)) => {
            for fault in inspect(&parsed, now) {
                found.error(path, fault);
            }
        }
        Err(fault) => found.error(path, fault),
    }
    found
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
    let text = match fs::read(&bundle) {
        Ok(text) => text,
        Err(error) => {
            found.error(&bundle, error);
            return found;
        }
    };
    match certificates(&text) {
        Ok(roots) => {
            // Instances of the same cell verify each other with this bundle.
            if issuer(path).is_some_and(|issuer| !roots.contains(&issuer)) {
                found.error(
                    &bundle,
                    "the CA of the certificate is not in the trust bundle; restart the rotator",
                );
            }
        }
        Err(fault) => found.error(&bundle, fault),
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
    let path = certificate.display().to_string();
    let text = fs::read(certificate).with_context(|| path.clone())?;
    let (_, parsed) = parse_chain(&text).context(path)?;
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

/// Returns the DNS names and addresses among the SANs, and the common name if it looks like a host name.
fn subject_names(certificate: &Certificate) -> (Vec<String>, Vec<IpAddr>) {
    let certificate = certificate.tbs_certificate();
    let mut names = Vec::new();
    let mut addresses = Vec::new();
    names.extend(
        first_common_name(certificate.subject())
            .filter(|name| name.contains('.') && !name.contains(' ')),
    );
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
    use std::time::Duration;

    use super::*;

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
}
