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
use x509_cert::ext::pkix::{SubjectAltName, name::GeneralName};

use crate::{
    authority::{CaFiles, certificates, certifies, date, inspect, parse_chain, validity},
    certificate::ValidityState,
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
    let parse = || anyhow::Ok(parse_chain(&fs::read(path)?)?);
    match parse() {
        Ok((_, parsed)) => inspect(&parsed, now)
            .iter()
            .for_each(|fault| found.error(path, fault)),
        Err(error) => found.error(path, error),
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
    let roots = fs::read(&bundle).map_err(|error| error.to_string());
    match roots.and_then(|text| certificates(&text).map_err(|fault| fault.to_string())) {
        Ok(roots) => {
            let issuer = read_pair(path, "instance")
                .ok()
                .and_then(|pair| certificates(pair.certificate.as_bytes()).ok());
            let issuer = issuer.and_then(|mut chain| (chain.len() > 1).then(|| chain.remove(1)));
            if issuer.is_some_and(|issuer| !roots.contains(&issuer)) {
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
    let valid = validity(&parsed[0]);
    let window = RenewalWindow::of(valid.length());
    match valid.standing(now) {
        ValidityState::Expired => {
            let ended = date(valid.not_after);
            found.error(
                &crt,
                format!("expired at {ended}; see `status` for the failed renewal"),
            );
        }
        ValidityState::NotYet => {
            found.error(
                &crt,
                format!(
                    "valid only from {}; check the clock",
                    date(valid.not_before)
                ),
            );
        }
        ValidityState::Valid if valid.not_before + window.end < now => {
            let ends = date(valid.not_after);
            found.warning(
                &crt,
                format!("past its renewal window, expires at {ends}; see `status`"),
            );
        }
        ValidityState::Valid => {}
    }
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

/// Returns the names of a certificate that do not resolve in the fleet of a `records.json`.
pub(crate) fn names(
    certificate: &Path,
    records: &Path,
    aliases: &[PathBuf],
) -> anyhow::Result<Vec<String>> {
    let path = || certificate.display().to_string();
    let (_, parsed) = parse_chain(&fs::read(certificate).with_context(path)?).with_context(path)?;
    let (names, addresses) = subject_names(&parsed[0]);
    let snapshot = snapshot(records, aliases)?;
    Ok(unresolved(&snapshot, &names, &addresses))
}

/// Reads a fleet's records and aliases.
pub fn snapshot(records: &Path, aliases: &[PathBuf]) -> anyhow::Result<Snapshot> {
    let read = |path: &Path| bounded::read(path).with_context(|| path.display().to_string());
    let (parsed, _) =
        Records::parse(&read(records)?).with_context(|| records.display().to_string())?;
    let files = aliases
        .iter()
        .map(|path| Ok((path.display().to_string(), read(path)?)));
    let files = files.collect::<anyhow::Result<Vec<(String, Vec<u8>)>>>()?;
    let files = files
        .iter()
        .map(|(path, text)| (path.as_str(), text.as_slice()));
    let (aliases, _) = AliasFiles::parse(files)?;
    Ok(Snapshot::build(parsed, &aliases).0)
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
    let mut missing: Vec<String> = names
        .iter()
        .filter_map(|name| resolve_name(snapshot, name))
        .collect();
    if !addresses.is_empty() {
        let known: BTreeSet<IpAddr> = snapshot
            .instances()
            .filter_map(|instance| instance.ip)
            .collect();
        let unknown = addresses
            .iter()
            .filter(|address| !address.is_loopback() && !known.contains(address));
        missing.extend(unknown.map(|address| {
            format!("{address}: no instance has this address; reissue with the current one")
        }));
    }
    missing
}

/// Returns why a name does not resolve; `None` if it does, or is outside the fleet's domains.
fn resolve_name(snapshot: &Snapshot, text: &str) -> Option<String> {
    let malformed = || {
        Some(format!(
            "{text}: not a valid query of a fleet's domain; correct it"
        ))
    };
    let asked = match text.strip_prefix("*.") {
        Some(rest) => format!("q-s0.{rest}"),
        None => text.to_owned(),
    };
    let Ok(name) = Name::from_text(&asked) else {
        return malformed();
    };
    match resolve(snapshot, &AllRunning, &name)?.existence {
        Existence::Found => None,
        Existence::NoSuchName => Some(format!(
            "{text}: no instance has this name; deploy the group or correct the name"
        )),
        Existence::Malformed => malformed(),
    }
}
