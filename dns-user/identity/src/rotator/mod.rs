//! Maintains the pairs of a set of identities. Time is an argument of every step, so that tests can
//! simulate a day in seconds.

mod contents;
mod status;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::PathBuf,
    time::{Duration, SystemTime},
};

use self::contents::{CONTAINER, Contents};
pub use self::status::{AuthorityStatus, IdentityStatus, Status};
use crate::{
    authority::{Authority, Fingerprint, bundle, certificates, parse_all, validity},
    ca_files::{CaError, CaFiles, Stamps},
    certificate::{Validity, seconds},
    folder::{FolderError, IdentityFolder, Pair, read_pair, sweep_removed},
    keys::{KeyError, pem},
    pool::KeyPool,
    profile::{Container, Guid, Profile, ProfileError},
    schedule::Schedule,
    window::Share,
};

/// Maximum number of pairs issued per step, so that commands do not wait long.
const PAIRS_A_STEP: usize = 16;

/// Period over which identities are reissued after a change of the CA.
const REISSUE_SPREAD: Duration = Duration::from_secs(300);

/// Maximum interval between checks of the clock and of the CA's files.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// Settings of a rotator.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Folder with a folder per identity.
    pub folder: PathBuf,
    /// Validity of new certificates.
    pub validity: Duration,
    /// Whether to write Envoy's SDS files.
    pub envoy: bool,
}

/// A set of identities and the CA that issues them.
pub struct Rotator {
    settings: Settings,
    ca: CaFiles,
    stamps: Stamps,
    authority: Authority,
    /// Reason why the CA's current files cannot be used.
    ca_problem: Option<String>,
    pool: KeyPool,
    identities: BTreeMap<Guid, Identity>,
    renewals: u64,
    failures: BTreeMap<&'static str, u64>,
}

struct Identity {
    container: Container,
    folder: IdentityFolder,
    schedule: Schedule,
    /// CA certificates of the pair in use, its issuer first, PEM; empty without a pair.
    issuer_chain: String,
    issuer: Option<Fingerprint>,
    /// Trust bundle in the folder.
    bundle: String,
}

/// Error when creating, changing or renewing an identity.
#[derive(Debug, thiserror::Error)]
pub enum RotatorError {
    /// The description is invalid.
    #[error("{0}")]
    Profile(#[from] ProfileError),
    /// Generating a key or signing failed.
    #[error("cannot issue: {0}")]
    Key(#[from] KeyError),
    /// The CA has expired.
    #[error("{path}: the CA expired; replace the CA")]
    Authority {
        /// The CA's file.
        path: String,
    },
    /// The files could not be written or read.
    #[error("{0}")]
    Folder(#[from] FolderError),
    /// No identity has this guid.
    #[error("no identity {0}; `status` lists them")]
    Unknown(Guid),
}

impl RotatorError {
    /// Returns the label for the failure metric.
    fn reason(&self) -> &'static str {
        match self {
            Self::Profile(_) => "profile",
            Self::Key(_) => "key",
            Self::Authority { .. } => "authority",
            Self::Folder(_) => "storage",
            Self::Unknown(_) => "unknown",
        }
    }
}

/// Reason why a rotator cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The CA cannot be used.
    #[error("{0}")]
    Authority(#[from] CaError),
    /// The folder cannot be used.
    #[error("{}: {source}; create it writable for the rotator's user", path.display())]
    Folder {
        /// Path of the folder of identities.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl Rotator {
    /// Loads the CA and takes over the identities found in the folder.
    pub fn open(settings: Settings, ca: CaFiles, pool: KeyPool, now: SystemTime) -> Result<Self, StartError> {
        let stamps = ca.stamps();
        let authority = ca.load(now)?;
        for caution in authority.cautions(now, settings.validity) {
            tracing::warn!("{}: {caution}", ca.certificate.display());
        }
        let failed = |source| StartError::Folder { path: settings.folder.clone(), source };
        fs::create_dir_all(&settings.folder).map_err(failed)?;
        sweep_removed(&settings.folder).map_err(failed)?;
        let mut identities = BTreeMap::new();
        for entry in fs::read_dir(&settings.folder).map_err(failed)? {
            let folder = IdentityFolder::new(entry.map_err(failed)?.path());
            if let Some(identity) = Identity::take_over(folder) {
                identities.insert(identity.container.guid.clone(), identity);
            }
        }
        let (renewals, failures, ca_problem) = (0, BTreeMap::new(), None);
        let mut rotator =
            Self { settings, ca, stamps, authority, ca_problem, pool, identities, renewals, failures };
        rotator.request_reissue(now);
        Ok(rotator)
    }

    /// Creates an identity, or changes an existing one to this description. If the first pair
    /// cannot be issued, nothing is left behind.
    pub fn create(&mut self, container: Container, now: SystemTime) -> Result<(), RotatorError> {
        if self.identities.contains_key(&container.guid) {
            return self.update(container, now);
        }
        let guid = container.guid.clone();
        let mut identity =
            Identity::new(container, IdentityFolder::new(self.settings.folder.join(guid.as_str())));
        let bundle = self.bundle();
        match self.issue(&mut identity, &bundle, now, Renew::All) {
            Ok(()) => {
                self.identities.insert(guid, identity);
                Ok(())
            }
            Err(error) => {
                self.count_failure(&error);
                if let Err(rest) = identity.folder.destroy() {
                    tracing::warn!("files of the refused identity {guid} remain: {rest}");
                }
                Err(error)
            }
        }
    }

    /// Changes the description of an identity. New internal routes renew only the second pair and
    /// do not affect the time of the next renewal.
    pub fn update(&mut self, container: Container, now: SystemTime) -> Result<(), RotatorError> {
        let Some(mut identity) = self.identities.remove(&container.guid) else {
            return Err(RotatorError::Unknown(container.guid));
        };
        let before = identity.container.clone();
        let renew = match before {
            _ if before == container => None,
            _ if before
                == Container { internal_routes: before.internal_routes.clone(), ..container.clone() } =>
            {
                Some(Renew::ContainerToContainer)
            }
            _ => Some(Renew::All),
        };
        let mut result = Ok(());
        if let Some(renew) = renew {
            identity.container = container;
            let bundle = self.bundle_with(&identity);
            result = self.issue(&mut identity, &bundle, now, renew);
            if let Err(error) = &result {
                identity.container = before;
                self.count_failure(error);
            }
        }
        self.identities.insert(identity.container.guid.clone(), identity);
        result
    }

    /// Removes an identity and its folder.
    pub fn destroy(&mut self, guid: &Guid) -> Result<(), RotatorError> {
        let identity = self.identities.get(guid).ok_or_else(|| RotatorError::Unknown(guid.clone()))?;
        identity.folder.clone().destroy()?;
        self.identities.remove(guid);
        Ok(())
    }

    /// Returns the ids of all identities.
    pub fn guids(&self) -> BTreeSet<Guid> {
        self.identities.keys().cloned().collect()
    }

    /// Reloads changed CA files, updates trust bundles, and renews pairs that are due. Returns the
    /// time of the next step, at most a second away.
    pub fn step(&mut self, now: SystemTime) -> SystemTime {
        self.reload_authority(now);
        self.publish_bundle(now);
        let mut due: Vec<(SystemTime, Guid)> = self
            .identities
            .values()
            .map(|identity| (identity.due(now), identity.container.guid.clone()))
            .filter(|(due, _)| *due <= now)
            .collect();
        due.sort_unstable();
        let more = due.len() > PAIRS_A_STEP;
        for (_, guid) in due.into_iter().take(PAIRS_A_STEP) {
            self.renew(&guid, now);
        }
        let next = self.next_renewal(now);
        match more {
            true => now,
            false => next.map_or(now + LONGEST_SLEEP, |next| next.clamp(now, now + LONGEST_SLEEP)),
        }
    }

    /// Returns the earliest time at which an identity is due; `None` without identities.
    pub fn next_renewal(&self, now: SystemTime) -> Option<SystemTime> {
        self.identities.values().map(|identity| identity.due(now)).min()
    }

    fn renew(&mut self, guid: &Guid, now: SystemTime) {
        let Some(mut identity) = self.identities.remove(guid) else { return };
        // Early in the window, a renewal waits for the pool, so that no key is generated at normal
        // priority.
        let can_wait = identity.schedule.can_wait(now, REISSUE_SPREAD);
        let keys = if identity.container.internal_routes.is_some() { 2 } else { 1 };
        if can_wait && self.pool.ready() < keys.min(self.pool.size()) {
            self.identities.insert(guid.clone(), identity);
            return;
        }
        let bundle = self.bundle_with(&identity);
        let failed_before = identity.schedule.failure().is_some();
        match self.issue(&mut identity, &bundle, now, Renew::All) {
            Ok(()) => {
                self.renewals += 1;
                if failed_before {
                    tracing::info!(%guid, "certificate renewed after earlier failures");
                }
            }
            Err(error) => {
                if identity.schedule.failed(now, error.to_string()) {
                    self.count_failure(&error);
                    let expires = identity.schedule.validity().map(|validity| validity.not_after);
                    let expires = expires.map_or_else(|| "-".to_owned(), crate::authority::date);
                    tracing::error!(
                        %guid, expires,
                        "certificate not renewed; the current one stays in use and the renewal is retried: \
                         {error}"
                    );
                }
            }
        }
        self.identities.insert(guid.clone(), identity);
    }

    fn issue(
        &self,
        identity: &mut Identity,
        bundle: &str,
        now: SystemTime,
        renew: Renew,
    ) -> Result<(), RotatorError> {
        if !self.authority.is_valid_at(now) {
            return Err(RotatorError::Authority { path: self.ca.certificate.display().to_string() });
        }
        let (pair, validity) = match renew {
            Renew::All => {
                let (pair, validity) = self.pair(&identity.container.identity()?, now)?;
                (pair, Some(validity))
            }
            Renew::ContainerToContainer => (identity.read("instance")?, None),
        };
        let second = match identity.container.container_to_container() {
            Some(profile) => Some(self.pair(&profile?, now)?.0),
            None => None,
        };
        let contents = Contents {
            pair: &pair,
            second: second.as_ref(),
            bundle,
            container: &identity.container,
            envoy: self.settings.envoy,
        };
        contents.write(&identity.folder)?;
        identity.bundle = bundle.to_owned();
        if let Some(validity) = validity {
            identity.schedule.succeeded(validity);
            identity.issuer_chain = self.authority.chain_pem();
            identity.issuer = Some(self.authority.fingerprint().clone());
        }
        Ok(())
    }

    fn pair(&self, profile: &Profile, now: SystemTime) -> Result<(Pair, Validity), KeyError> {
        let key = self.pool.take()?;
        let issued = self.authority.issue(profile, key.public_key_info(), now, self.settings.validity)?;
        Ok((Pair { certificate: issued.pem, key: key.to_pem()? }, issued.validity))
    }

    /// Reloads the CA if a file changed. If it cannot be used, the last good one stays.
    fn reload_authority(&mut self, now: SystemTime) {
        let stamps = self.ca.stamps();
        if stamps == self.stamps && self.ca_problem.is_none() {
            return;
        }
        match self.ca.load(now) {
            Ok(authority) => {
                if authority.fingerprint() != self.authority.fingerprint() {
                    tracing::info!(
                        ca = %authority.fingerprint(),
                        "CA replaced; identities are reissued over 5 minutes, and both CAs are trusted \
                         meanwhile"
                    );
                }
                for caution in authority.cautions(now, self.settings.validity) {
                    tracing::warn!("{}: {caution}", self.ca.certificate.display());
                }
                self.authority = authority;
                self.ca_problem = None;
                self.request_reissue(now);
            }
            Err(error) => {
                let problem = error.to_string();
                if self.ca_problem.as_ref() != Some(&problem) {
                    *self.failures.entry("authority").or_default() += 1;
                    tracing::error!("new CA refused; the last good one stays in use: {problem}");
                }
                self.ca_problem = Some(problem);
            }
        }
        self.stamps = stamps;
    }

    /// Requests a renewal of every identity whose certificate is from another CA.
    fn request_reissue(&mut self, now: SystemTime) {
        for identity in self.identities.values_mut() {
            if identity.issuer.as_ref() != Some(self.authority.fingerprint()) {
                identity.schedule.request(now, REISSUE_SPREAD);
            }
        }
    }

    /// Writes the trust bundle to all identities that have a different one.
    fn publish_bundle(&mut self, now: SystemTime) {
        let bundle = self.bundle();
        let (envoy, failures) = (self.settings.envoy, &mut self.failures);
        for (guid, identity) in &mut self.identities {
            let waits = identity.schedule.failure().is_some_and(|failure| now < failure.retry_at);
            if identity.bundle == bundle || identity.issuer.is_none() || waits {
                continue;
            }
            if let Err(error) = identity.rewrite(&bundle, envoy) {
                if identity.schedule.failed(now, error.to_string()) {
                    *failures.entry(error.reason()).or_default() += 1;
                    tracing::error!(%guid, "trust bundle not written; retrying: {error}");
                }
            } else {
                identity.bundle.clone_from(&bundle);
            }
        }
    }

    /// Returns the current CA, then every CA that issued a pair still in use.
    fn bundle(&self) -> String {
        self.bundle_of(self.identities.values())
    }

    /// Returns the same as [`Self::bundle`] while one identity is taken out of the set.
    fn bundle_with(&self, identity: &Identity) -> String {
        self.bundle_of(self.identities.values().chain([identity]))
    }

    fn bundle_of<'a>(&self, identities: impl Iterator<Item = &'a Identity>) -> String {
        let own = self.authority.chain_pem();
        let others: BTreeSet<&str> = identities
            .map(|identity| identity.issuer_chain.as_str())
            .filter(|chain| !chain.is_empty() && *chain != own)
            .collect();
        // The chains were validated when they were taken over.
        let chains = std::iter::once(own.as_str()).chain(others);
        bundle(chains.flat_map(|chain| certificates(chain.as_bytes()).unwrap_or_default()))
    }

    fn count_failure(&mut self, error: &RotatorError) {
        *self.failures.entry(error.reason()).or_default() += 1;
    }

    /// Returns the state of the CA, the pool and every identity.
    pub fn status(&self, now: SystemTime) -> Status {
        Status {
            authority: AuthorityStatus {
                file: self.ca.certificate.clone(),
                fingerprint: self.authority.fingerprint().clone(),
                not_after: self.authority.validity().not_after,
                problem: self.ca_problem.clone(),
            },
            pool_ready: self.pool.ready(),
            pool_size: self.pool.size(),
            renewals: self.renewals,
            failures: self.failures.iter().map(|(reason, count)| ((*reason).to_owned(), *count)).collect(),
            identities: self.identities.values().map(|identity| identity.status(now)).collect(),
        }
    }
}

/// The pairs that a change reissues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Renew {
    All,
    ContainerToContainer,
}

impl Identity {
    fn new(container: Container, folder: IdentityFolder) -> Self {
        let (issuer_chain, bundle) = (String::new(), String::new());
        let schedule = Schedule::new(Share::of(container.guid.as_str()), None);
        Self { container, folder, schedule, issuer_chain, issuer: None, bundle }
    }

    /// Reads an identity written by an earlier process; `None` if the folder contains none.
    fn take_over(folder: IdentityFolder) -> Option<Self> {
        let data = folder.current()?;
        let container = fs::read(data.join(CONTAINER)).ok()?;
        let container: Container = match serde_json::from_slice(&container) {
            Ok(container) => container,
            Err(error) => {
                tracing::warn!("{}: {error}; the folder stays unchanged", data.join(CONTAINER).display());
                return None;
            }
        };
        let mut identity = Self::new(container, folder);
        // Without a readable pair, the identity is due immediately.
        if let Ok(pair) = identity.folder_pair()
            && let Ok(ders) = certificates(pair.certificate.as_bytes())
            && let Ok(parsed) = parse_all(&ders)
        {
            identity.schedule.succeeded(validity(&parsed[0]));
            identity.issuer = ders.get(1).map(|issuer| Fingerprint::of(issuer));
            identity.issuer_chain = ders[1..].iter().map(|der| pem("CERTIFICATE", der).to_string()).collect();
            identity.bundle = fs::read_to_string(data.join(contents::BUNDLE)).unwrap_or_default();
        }
        Some(identity)
    }

    fn due(&self, now: SystemTime) -> SystemTime {
        self.schedule.due(now)
    }

    fn folder_pair(&self) -> io::Result<Pair> {
        read_pair(self.folder.path(), "instance")
    }

    fn read(&self, name: &str) -> Result<Pair, FolderError> {
        read_pair(self.folder.path(), name)
            .map_err(|source| FolderError { path: self.folder.path().join(name), source })
    }

    /// Writes the same pairs with another trust bundle.
    fn rewrite(&self, bundle: &str, envoy: bool) -> Result<(), RotatorError> {
        let pair = self.read("instance")?;
        let second = match self.container.internal_routes {
            Some(_) => Some(self.read("c2c")?),
            None => None,
        };
        let (second, container) = (second.as_ref(), &self.container);
        Ok(Contents { pair: &pair, second, bundle, container, envoy }.write(&self.folder)?)
    }

    fn status(&self, now: SystemTime) -> IdentityStatus {
        let validity = self.schedule.validity();
        IdentityStatus {
            guid: self.container.guid.clone(),
            folder: self.folder.path().to_owned(),
            not_before: validity.map(|validity| seconds(validity.not_before)),
            not_after: validity.map(|validity| seconds(validity.not_after)),
            renews_at: self.due(now),
            issuer: self.issuer.clone(),
            failure: self.schedule.failure().cloned(),
        }
    }
}
