//! The CAs that peers of a rotator's identities may have: its own, the issuers of pairs still in use,
//! CAs of other cells (`--also-trust`), and former ones for a while.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use dns_kit::files::{
    FileStamp,
    atomic::{self, Attributes},
    bounded,
};
use rustls_pki_types::CertificateDer;
use serde::{Deserialize, Serialize};
use x509_cert::ext::pkix::BasicConstraints;

use crate::{
    authority::{CaError, bundle, certificates, parse_chain, read_pem},
    certificate::unix,
};

/// Name of the file with former CAs, in the folder of the identities.
const FORMER: &str = ".former-cas.json";

/// Everything that the trust bundle consists of, except the current CA.
pub(super) struct Trusted {
    /// `--also-trust`.
    files: Vec<PathBuf>,
    stamps: Vec<Option<FileStamp>>,
    others: Vec<CertificateDer<'static>>,
    /// Reason why a changed file cannot be used.
    problem: Option<String>,
    /// Number of pairs by their CA's chain, PEM.
    in_use: BTreeMap<Arc<str>, usize>,
    former: Vec<Former>,
    path: PathBuf,
    /// Time of the last look at the former CAs.
    now: SystemTime,
}

/// Maximum number of former CAs that are kept.
const MAX_FORMER: usize = 32;

/// Time for which a former CA is kept after it left the bundles: a clock that was wrong may be corrected.
const KEEP_FORMER: Duration = Duration::from_secs(90 * 24 * 3600);

/// A CA that was in use until the files of the CA changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Former {
    chain: String,
    /// Time at which it leaves the bundles.
    #[serde(with = "unix")]
    until: SystemTime,
}

impl Trusted {
    /// Reads the files. A file that cannot be used is an error: without it, the first bundle would
    /// exclude the other cells.
    pub(super) fn open(
        folder: &Path,
        files: Vec<PathBuf>,
        now: SystemTime,
    ) -> Result<Self, CaError> {
        let path = folder.join(FORMER);
        atomic::sweep(&path);
        // Without the list, at worst a peer refuses a pair of a former CA; no identity may lose its
        // renewals for that.
        let mut former = Vec::new();
        let saved = bounded::read(&path).and_then(|text| Ok(serde_json::from_slice(&text)?));
        match saved {
            Ok(saved) => former = saved,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(
                "{}: {error}; former CAs are no longer trusted",
                path.display()
            ),
        }
        // Taken before the files are read, so that no change in between is missed.
        let stamps = files.iter().map(FileStamp::of).collect();
        let others = read(&files)?;
        Ok(Self {
            files,
            stamps,
            others,
            problem: None,
            in_use: BTreeMap::new(),
            former,
            path,
            now,
        })
    }

    /// Reads changed files and drops former CAs whose time is over; returns whether the bundle changes.
    pub(super) fn reload(&mut self, now: SystemTime) -> bool {
        // The number suffices: as time passes former CAs only leave, and if the clock is set back
        // they only return.
        let before = self.in_force().count();
        self.now = now;
        let mut changed = self.in_force().count() != before;
        let known = self.former.len();
        self.former
            .retain(|former| now < former.until + KEEP_FORMER);
        if self.former.len() != known {
            self.save();
        }
        let stamps: Vec<_> = self.files.iter().map(FileStamp::of).collect();
        // An unusable file may become readable without a change of its stamp.
        if stamps != self.stamps || self.problem.is_some() {
            self.stamps = stamps;
            match read(&self.files) {
                Ok(others) => {
                    changed |= others != self.others;
                    (self.others, self.problem) = (others, None);
                }
                Err(error) => {
                    let before = self.problem.replace(error.to_string());
                    if self.problem != before {
                        tracing::error!(
                            "CAs of --also-trust refused; the last good ones stay trusted: {error}"
                        );
                    }
                }
            }
        }
        changed
    }

    /// Returns the former CAs that are still trusted.
    fn in_force(&self) -> impl Iterator<Item = &Former> {
        self.former.iter().filter(|former| self.now < former.until)
    }

    pub(super) fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    /// Keeps a CA in the bundles until a time.
    pub(super) fn retire(&mut self, chain: &str, until: SystemTime) {
        // A CA that was in use twice counts by its last replacement.
        self.former.retain(|former| former.chain != chain);
        self.former.push(Former {
            chain: chain.to_owned(),
            until,
        });
        // The one replaced first leaves, so that endless changes of the CA make no bundle longer.
        if self.former.len() > MAX_FORMER {
            self.former.remove(0);
        }
        self.save();
    }

    fn save(&self) {
        let text = serde_json::to_vec(&self.former).unwrap_or_default();
        if let Err(error) = atomic::replace_own(&self.path, &text, Attributes::PRIVATE) {
            tracing::warn!("former CAs are not saved; a restart forgets them: {error}");
        }
    }

    /// Counts a pair of a CA.
    pub(super) fn add(&mut self, chain: &Arc<str>) {
        *self.in_use.entry(chain.clone()).or_default() += 1;
    }

    /// Discounts a pair of a CA; returns whether it was the last one.
    pub(super) fn remove(&mut self, chain: &Arc<str>) -> bool {
        let Some(count) = self.in_use.get_mut(chain) else {
            return false;
        };
        *count -= 1;
        let is_last = *count == 0;
        if is_last {
            self.in_use.remove(chain);
        }
        is_last
    }

    /// Returns the chains of CAs other than `own` that have pairs in use.
    pub(super) fn others_in_use(&self, own: &str) -> Vec<Arc<str>> {
        self.in_use
            .keys()
            .filter(|chain| ***chain != *own)
            .cloned()
            .collect()
    }

    /// Returns the bundle, PEM: the current CA, CAs of pairs in use, other cells' and former ones.
    pub(super) fn bundle(&self, own: &str) -> Arc<str> {
        let mut chains = vec![own];
        chains.extend(self.in_use.keys().map(|chain| &**chain));
        chains.extend(self.in_force().map(|former| former.chain.as_str()));
        let mut seen = BTreeSet::new();
        let mut ders = Vec::new();
        for chain in chains {
            // The current CA is usually that of pairs in use as well.
            if seen.insert(chain) {
                // The chains were validated when they were taken over.
                ders.extend(certificates(chain.as_bytes()).unwrap_or_default());
            }
        }
        ders.extend(self.others.iter().cloned());
        Arc::from(bundle(ders))
    }
}

/// Reads the certificates of all files; each must be a CA's.
fn read(files: &[PathBuf]) -> Result<Vec<CertificateDer<'static>>, CaError> {
    let mut all = Vec::new();
    for path in files {
        let text = read_pem(path)?;
        let (ders, parsed) =
            parse_chain(&text).map_err(|fault| CaError::of(path, fault.to_string()))?;
        for (parsed, number) in parsed.iter().zip(1..) {
            let constraints = parsed.tbs_certificate().get_extension::<BasicConstraints>();
            // Dates and key usages are left to the rotators of the other cells, which issue with
            // these CAs.
            if !matches!(constraints, Ok(Some((_, constraints))) if constraints.ca) {
                let problem = format!("certificate {number} is not a CA; list CAs only");
                return Err(CaError::of(path, problem));
            }
        }
        all.extend(ders);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{START, TestCa, at};

    const DAY: Duration = Duration::from_secs(24 * 3600);

    #[test]
    fn former_ca_returns_with_the_right_clock() -> anyhow::Result<()> {
        let folder = tempfile::tempdir()?;
        let now = SystemTime::now();
        let key = rcgen::KeyPair::generate()?;
        let chain = rcgen::CertificateParams::default()
            .self_signed(&key)?
            .pem()
            .replace("\r\n", "\n");
        let mut trusted = Trusted::open(folder.path(), Vec::new(), now)?;
        trusted.retire(&chain, now + DAY);
        let is_trusted = |trusted: &Trusted| !trusted.bundle("").is_empty();
        assert!(is_trusted(&trusted));
        for (at, changes, expected) in [
            (now + 40 * DAY, true, false),
            (now, true, true),
            (now + DAY, true, false),
        ] {
            assert_eq!(trusted.reload(at), changes);
            assert_eq!(is_trusted(&trusted), expected);
        }
        let mut reopened = Trusted::open(folder.path(), Vec::new(), now)?;
        assert!(is_trusted(&reopened));
        reopened.reload(now + DAY + KEEP_FORMER);
        assert!(reopened.former.is_empty());
        Ok(())
    }

    #[test]
    fn last_pair_of_a_ca_is_noticed() -> anyhow::Result<()> {
        let folder = tempfile::tempdir()?;
        let mut trusted = Trusted::open(folder.path(), Vec::new(), SystemTime::now())?;
        let [one, other]: [Arc<str>; 2] = ["one".into(), "other".into()];
        assert!(!trusted.remove(&one), "it has none");
        for chain in [&one, &one, &other] {
            trusted.add(chain);
        }
        assert!(!trusted.remove(&one) && trusted.remove(&other) && trusted.remove(&one));
        assert!(!trusted.remove(&one) && trusted.in_use.is_empty());
        Ok(())
    }

    #[test]
    fn few_former_cas_are_kept() -> anyhow::Result<()> {
        let folder = tempfile::tempdir()?;
        let now = SystemTime::now();
        let mut trusted = Trusted::open(folder.path(), Vec::new(), now)?;
        for number in 0..32 {
            trusted.retire(&number.to_string(), now + DAY);
        }
        let chains = |trusted: &Trusted| -> Vec<String> {
            let former = trusted.former.iter();
            former.map(|former| former.chain.clone()).collect()
        };
        assert_eq!(chains(&trusted).len(), 32);
        // Once more, it counts by its last replacement.
        trusted.retire("0", now + 2 * DAY);
        assert_eq!((chains(&trusted).len(), &*chains(&trusted)[31]), (32, "0"));
        trusted.retire("new", now + DAY);
        let kept = chains(&trusted);
        assert_eq!((kept.len(), &*kept[0], &*kept[31]), (32, "2", "new"));
        let reopened = Trusted::open(folder.path(), Vec::new(), now)?;
        assert_eq!(reopened.former.len(), 32);
        assert_eq!(reopened.former[30].chain, "0");
        let own: Arc<str> = "own".into();
        trusted.add(&own);
        trusted.add(&"a".into());
        assert_eq!(trusted.others_in_use("own"), ["a".into()]);
        Ok(())
    }

    #[test]
    fn unusable_file_is_read_again() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("other.crt");
        std::fs::write(&path, TestCa::new("other").chain).unwrap();
        let mut trusted = Trusted::open(place.path(), vec![path], at(START)).unwrap();
        // As after a read error of the disk, which leaves the file's stamp as it is.
        trusted.problem = Some("Input/output error".to_owned());
        trusted.others.clear();
        assert!(trusted.reload(at(START + 1)), "the bundle changes");
        assert_eq!(trusted.problem(), None);
        assert!(!trusted.reload(at(START + 2)));
    }
}
