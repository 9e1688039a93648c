//! Maintains the pairs of a set of identities. Time is an argument of every step, so that tests can
//! simulate a day in seconds.

mod identity;
mod trusted;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::anyhow;
use serde::{Deserialize, Serialize};

pub use self::identity::IdentityStatus;
use self::{
    identity::{Contents, Identities, Identity, IssuedBy, REISSUE_SPREAD},
    trusted::Trusted,
};
use crate::{
    authority::{Authority, CaFiles, Fingerprint, Stamps},
    certificate::{Validity, unix},
    folder::{FolderError, IdentityFolder, Pair, make_folders, sweep_interrupted},
    keys::{KeyError, KeyPool},
    profile::{Container, Guid, Profile},
};

/// Maximum number of pairs issued per step, so that commands do not wait long.
const MAX_PAIRS: usize = 16;

/// Maximum number of trust bundles rewritten per step.
const MAX_BUNDLES: usize = 256;

/// Maximum interval between checks of the clock and of the CA's files.
const MAX_SLEEP: Duration = Duration::from_secs(1);

/// Number of seconds in which a few identities are checked for lost files.
const CHECK_PERIOD: usize = 10;

/// Maximum number of identities checked for lost files per second.
const MAX_CHECKS: usize = 64;

/// Settings of a rotator.
#[derive(Clone, Debug)]
pub struct RotatorSettings {
    /// Folder with a folder per identity.
    pub folder: PathBuf,
    /// Validity of new certificates.
    pub validity: Duration,
    /// Time by which certificates start before they are issued, for peers with slow clocks.
    pub backdate: Duration,
    /// Whether to write Envoy's SDS files.
    pub envoy: bool,
    /// PEM files with the CAs of other cells, which all identities trust.
    pub also_trust: Vec<PathBuf>,
    /// Time for which a replaced CA stays trusted.
    pub keep_old_ca: Duration,
}

/// A set of identities and the CA that issues them.
pub struct Rotator {
    settings: RotatorSettings,
    ca: CaFiles,
    stamps: Stamps,
    authority: Authority,
    /// Reason why the CA's current files cannot be used.
    ca_problem: Option<String>,
    trusted: Trusted,
    /// Trust bundle of new and rewritten folders.
    bundle: Arc<str>,
    /// Whether an identity may have another bundle.
    stale_bundles: bool,
    /// Keys that are generated ahead.
    pub pool: KeyPool,
    identities: Identities,
    /// Overdue identities, the most urgent last.
    backlog: Vec<Guid>,
    /// Time at which the backlog was listed: more urgent ones may have become due since.
    listed: SystemTime,
    /// The last identity checked for lost files, and the time of the next check.
    checked: (Option<Guid>, SystemTime),
    /// Folders whose identity could not be taken over.
    problems: Vec<Problem>,
    renewals: u64,
    failures: BTreeMap<&'static str, u64>,
}

/// Time of the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// At this time, at most a second away.
    At(SystemTime),
    /// As soon as the pool has a key, or within a second.
    Key,
}

/// Error when creating, changing or renewing an identity.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum RotatorError {
    #[error(transparent)]
    Profile(#[from] anyhow::Error),
    #[error("cannot issue: {0}")]
    Key(KeyError),
    #[error("{path}: the CA expired; replace the CA")]
    Authority { path: String },
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error("no identity {0}; `status` lists them")]
    Unknown(Guid),
}

impl RotatorError {
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

impl Rotator {
    /// Loads the CA and takes over the identities found in the folder.
    pub fn open(
        settings: RotatorSettings,
        ca: CaFiles,
        pool: KeyPool,
        now: SystemTime,
    ) -> anyhow::Result<Self> {
        let stamps = ca.stamps();
        let authority = ca.load(now)?;
        if let Some(caution) = authority.caution(now, settings.validity) {
            tracing::warn!("{}: {caution}", ca.certificate.display());
        }
        let failed = unusable_folder(&settings.folder);
        make_folders(&settings.folder).map_err(&failed)?;
        // An identity whose creation was interrupted may have a key in its folder, which nothing
        // else would remove.
        sweep_interrupted(&settings.folder).map_err(&failed)?;
        let mut trusted = Trusted::open(&settings.folder, settings.also_trust.clone(), now)?;
        let mut identities = Identities::new(now);
        let problems =
            take_over_all(&settings.folder, &mut identities, &mut trusted, now).map_err(failed)?;
        // The CA was replaced while no rotator ran.
        for chain in trusted.others_in_use(&authority.chain_pem()) {
            if !settings.keep_old_ca.is_zero() {
                trusted.retire(&chain, now + settings.keep_old_ca);
            }
        }
        let bundle = trusted.bundle(&authority.chain_pem());
        let mut rotator = Self {
            settings,
            ca,
            stamps,
            authority,
            ca_problem: None,
            trusted,
            bundle,
            // The first step compares the bundle of each identity that was taken over with the
            // current one.
            stale_bundles: true,
            pool,
            identities,
            backlog: Vec::new(),
            listed: now,
            checked: (None, now),
            problems,
            renewals: 0,
            failures: BTreeMap::new(),
        };
        // Pairs may be from a CA that was replaced while no rotator ran.
        rotator.request_reissue(now);
        Ok(rotator)
    }

    /// Creates an identity, or changes an existing one to this description. If the first pair
    /// cannot be issued, nothing is left behind.
    pub fn create(&mut self, container: Container, now: SystemTime) -> Result<(), RotatorError> {
        // A folder of descriptions does not tell a new description from a changed one: after a
        // restart the identity exists already.
        if self.identities.all.contains_key(&container.guid) {
            return self.update(container, now);
        }
        let guid = container.guid.clone();
        let mut identity = Identity::new(
            container,
            IdentityFolder::new(self.settings.folder.join(guid.as_str())),
        );
        let has_pair = identity.folder.current().is_some();
        match self.issue(&mut identity, now, Renew::All) {
            Ok(()) => {
                // The folder was reported at the start as one without an identity; now all its
                // files are new.
                self.problems
                    .retain(|problem| problem.path != identity.folder.path);
                self.identities.insert(identity, now);
                Ok(())
            }
            Err(error) => {
                // The caller learns that there is no identity, so no folder may remain that looks like one. A folder
                // that could not be taken over stays: its pair may be in use.
                if !has_pair && let Err(rest) = identity.folder.destroy() {
                    tracing::warn!("files of the refused identity {guid} remain: {rest}");
                }
                Err(error)
            }
        }
    }

    /// Changes the description of an identity. New internal routes renew only the second pair and
    /// do not affect the time of the next renewal.
    pub fn update(&mut self, container: Container, now: SystemTime) -> Result<(), RotatorError> {
        // Taken out for the change: `insert` puts it at its new place in the queue.
        let Some(mut identity) = self.identities.remove(&container.guid) else {
            return Err(RotatorError::Unknown(container.guid));
        };
        let before = identity.container.clone();
        let renew = match before {
            _ if before == container => None,
            _ if before
                == Container {
                    internal_routes: before.internal_routes.clone(),
                    ..container.clone()
                } =>
            {
                // The first pair contains no routes, and a new one would move the time of its
                // renewal.
                Some(Renew::ContainerToContainer)
            }
            _ => Some(Renew::All),
        };
        let mut result = Ok(());
        if let Some(renew) = renew {
            identity.container = container;
            result = self.issue(&mut identity, now, renew);
            if result.is_err() {
                // The pair in use is still that of the earlier description, so the same update must
                // not count as done.
                identity.container = before;
            }
        }
        self.identities.insert(identity, now);
        result
    }

    /// Removes an identity and its folder.
    pub fn destroy(&mut self, guid: &Guid) -> Result<(), RotatorError> {
        let identity = self
            .identities
            .all
            .get(guid)
            .ok_or_else(|| RotatorError::Unknown(guid.clone()))?;
        // The files come first: if they cannot be removed, the identity stays known and the command
        // can be repeated.
        identity.folder.clone().destroy()?;
        let removed = self.identities.remove(guid);
        // The last pair of a replaced CA is gone: peers no longer need to trust that CA.
        if let Some(IssuedBy { chain, .. }) = removed.and_then(|identity| identity.issuer)
            && self.trusted.remove(&chain)
        {
            self.renew_bundle();
        }
        Ok(())
    }

    /// Counts a failure that is reported for the first time.
    pub fn count_failure(&mut self, error: &RotatorError) {
        *self.failures.entry(error.reason()).or_default() += 1;
    }

    /// Returns the ids of all identities.
    pub fn guids(&self) -> BTreeSet<Guid> {
        self.identities.all.keys().cloned().collect()
    }

    /// Reloads changed CA files, updates trust bundles, and renews pairs that are due.
    pub fn step(&mut self, now: SystemTime) -> Next {
        self.identities.begin_step(now);
        self.reload_authority(now);
        if self.trusted.reload(now) {
            self.renew_bundle();
        }
        // Bundles precede renewals: peers must trust a new CA before they meet its first pair.
        let distributed = self.distribute_bundle(now);
        self.check_files(now);
        // Listing visits each overdue identity, which is too much for every step. After a second,
        // or if the clock was set back, other identities may be more urgent.
        if self.backlog.is_empty() || now < self.listed || self.listed + MAX_SLEEP <= now {
            (self.backlog, self.listed) = (self.identities.overdue(now), now);
        }
        for _ in 0..MAX_PAIRS {
            let Some(guid) = self.backlog.pop() else {
                break;
            };
            if self.renew(&guid, now, distributed) == Renewal::NeedsKey {
                // All that follow can wait, too, since those that cannot are renewed first. If they
                // took keys one by one, an identity that needs two would never get them.
                self.backlog.push(guid);
                return Next::Key;
            }
        }
        // The caller handles the commands that have arrived, then continues.
        if !self.backlog.is_empty() || distributed == Distributed::InPart {
            return Next::At(now);
        }
        let next = self.next_renewal();
        Next::At(next.map_or(now + MAX_SLEEP, |next| next.clamp(now, now + MAX_SLEEP)))
    }

    /// Returns a time before which no identity is due; `None` without identities.
    pub fn next_renewal(&self) -> Option<SystemTime> {
        self.identities.next_due()
    }

    fn renew(&mut self, guid: &Guid, now: SystemTime, distributed: Distributed) -> Renewal {
        // A command may have destroyed or renewed the identity since the backlog was listed.
        if self
            .identities
            .all
            .get(guid)
            .is_none_or(|identity| now < identity.schedule.due(now))
        {
            return Renewal::Done;
        }
        let Some(mut identity) = self.identities.remove(guid) else {
            return Renewal::Done;
        };
        // Early in the window, a renewal waits for the pool, so that no key is generated at normal
        // priority, and for trust bundles, so that peers accept the new pair.
        let can_wait = identity.schedule.can_wait(now, REISSUE_SPREAD);
        let keys = 1 + usize::from(identity.container.internal_routes.is_some());
        // A pool of a single key never has two at once.
        let has_key = !can_wait || self.pool.call_when(keys.min(self.pool.size()));
        if !has_key || can_wait && distributed == Distributed::InPart {
            self.identities.insert(identity, now);
            return if has_key {
                Renewal::Done
            } else {
                Renewal::NeedsKey
            };
        }
        let failed_before = identity.schedule.failure.is_some();
        match self.issue(&mut identity, now, Renew::All) {
            Ok(()) => {
                self.renewals += 1;
                if failed_before {
                    tracing::info!(%guid, "certificate renewed after earlier failures");
                }
            }
            Err(error) => {
                // The reference ends the container when a rotation fails. Here the pair stays in use, and the attempt is
                // repeated.
                if identity.schedule.failed(now, error.to_string()) {
                    self.count_failure(&error);
                    let expires = identity.schedule.ends();
                    tracing::error!(
                        %guid, expires,
                        "certificate not renewed; the current one stays in use and the renewal is retried: \
                         {error}"
                    );
                }
            }
        }
        self.identities.insert(identity, now);
        Renewal::Done
    }

    fn issue(
        &mut self,
        identity: &mut Identity,
        now: SystemTime,
        renew: Renew,
    ) -> Result<(), RotatorError> {
        // The CA was valid when it was loaded. A leaf ends with its CA, so it would be expired
        // already.
        if !self.authority.is_valid_at(now) {
            return Err(RotatorError::Authority {
                path: self.ca.certificate.display().to_string(),
            });
        }
        let (pair, validity) = match renew {
            Renew::All => {
                let (pair, validity) = self.pair(&identity.container.identity()?, now)?;
                (pair, Some(validity))
            }
            // A generation holds all files of an identity, so the first pair is written again as it
            // is.
            Renew::ContainerToContainer => (identity.read("instance")?, None),
        };
        let second = match identity.container.container_to_container() {
            Some(profile) => Some(self.pair(&profile?, now)?.0),
            None => None,
        };
        let contents = Contents {
            pair: &pair,
            second: second.as_ref(),
            bundle: &self.bundle,
            container: &identity.container,
            envoy: self.settings.envoy,
        };
        // Nothing is recorded before: after a failed attempt, schedule and counts describe the pair
        // in use.
        contents.write(&identity.folder)?;
        identity.bundle = self.bundle.clone();
        if let Some(validity) = validity {
            identity.schedule.succeeded(now, validity);
            let issuer = IssuedBy {
                fingerprint: self.authority.fingerprint.clone(),
                chain: Arc::from(self.authority.chain_pem()),
            };
            // The bundle holds the current CA in any case.
            self.trusted.add(&issuer.chain);
            if let Some(before) = identity.issuer.replace(issuer)
                && self.trusted.remove(&before.chain)
            {
                self.renew_bundle();
            }
        }
        Ok(())
    }

    fn pair(&self, profile: &Profile, now: SystemTime) -> Result<(Pair, Validity), RotatorError> {
        let RotatorSettings {
            validity, backdate, ..
        } = self.settings;
        let wanted = Validity::backdated(now, validity, backdate);
        let key = self.pool.take().map_err(RotatorError::Key)?;
        let issued = self
            .authority
            .issue(profile, key.public_key_info(), wanted)
            .map_err(RotatorError::Key)?;
        let key = key.to_pem().map_err(RotatorError::Key)?;
        Ok((
            Pair {
                certificate: issued.pem,
                key,
            },
            issued.validity,
        ))
    }

    /// Reloads the CA if a file changed. If it cannot be used, the last good one stays.
    fn reload_authority(&mut self, now: SystemTime) {
        // Taken before the files are read: a change during the load is noticed by the next step.
        let stamps = self.ca.stamps();
        // A refused CA is loaded again in each step, because its fault may end without a change of
        // its files: a CA that is not valid yet becomes valid.
        if stamps == self.stamps && self.ca_problem.is_none() {
            return;
        }
        match self.ca.load(now) {
            Ok(authority) => {
                // The files may have been touched only, or the certificates above the CA replaced.
                if authority.fingerprint != self.authority.fingerprint {
                    tracing::info!(
                        ca = %authority.fingerprint,
                        "CA replaced; identities are reissued over 5 minutes, and both CAs are trusted \
                         meanwhile"
                    );
                    // Pairs in use keep their CA in the bundle anyway. This is for peers that have
                    // not reloaded theirs.
                    if !self.settings.keep_old_ca.is_zero() {
                        self.trusted
                            .retire(&self.authority.chain_pem(), now + self.settings.keep_old_ca);
                    }
                }
                if let Some(caution) = authority.caution(now, self.settings.validity) {
                    tracing::warn!("{}: {caution}", self.ca.certificate.display());
                }
                self.authority = authority;
                self.ca_problem = None;
                self.renew_bundle();
                self.request_reissue(now);
            }
            Err(error) => {
                let before = self.ca_problem.replace(error.to_string());
                if self.ca_problem != before {
                    *self.failures.entry("authority").or_default() += 1;
                    tracing::error!("new CA refused; the last good one stays in use: {error}");
                }
            }
        }
        self.stamps = stamps;
    }

    /// Requests a renewal of every identity whose certificate is from another CA.
    fn request_reissue(&mut self, now: SystemTime) {
        let authority = &self.authority.fingerprint;
        self.identities.change_all(now, |identity| {
            if !identity.is_from(authority) {
                identity.schedule.request(now, REISSUE_SPREAD);
            }
        });
    }

    fn renew_bundle(&mut self) {
        let bundle = self.trusted.bundle(&self.authority.chain_pem());
        if bundle != self.bundle {
            self.bundle = bundle;
            self.stale_bundles = true;
        }
    }

    /// Writes the trust bundle to identities that have a different one. Those that failed are
    /// retried after a delay.
    fn distribute_bundle(&mut self, now: SystemTime) -> Distributed {
        if !self.stale_bundles {
            return Distributed::Everywhere;
        }
        let bundle = &self.bundle;
        let envoy = self.settings.envoy;
        let failures = &mut self.failures;
        let mut written = 0;
        let mut failing = false;
        for (guid, identity) in &mut self.identities.all {
            // An identity without a pair gets the bundle together with its first one.
            if Arc::ptr_eq(&identity.bundle, bundle) || identity.issuer.is_none() {
                continue;
            }
            // Read from the folder of an earlier process: the same text at another address.
            if *identity.bundle == **bundle {
                identity.bundle = bundle.clone();
                continue;
            }
            // Without the delay, a full file system would be tried with every identity in every
            // step.
            if identity.schedule.retry_at(now).is_some_and(|at| now < at) {
                failing = true;
                continue;
            }
            // A bundle costs a whole new generation of files, and commands wait meanwhile.
            if written == MAX_BUNDLES {
                return Distributed::InPart;
            }
            written += 1;
            if let Err(error) = identity.rewrite(bundle, envoy) {
                failing = true;
                let error = RotatorError::from(error);
                if identity.schedule.failed(now, error.to_string()) {
                    *failures.entry(error.reason()).or_default() += 1;
                    tracing::error!(%guid, "trust bundle not written; retrying: {error}");
                }
            } else {
                identity.bundle = bundle.clone();
                identity.schedule.mended();
            }
        }
        // Folders that cannot be written do not hold up the renewals of all others.
        self.stale_bundles = failing;
        Distributed::Everywhere
    }

    /// Checks a part of the identities once a second; one whose files were lost is due at once.
    fn check_files(&mut self, now: SystemTime) {
        let (after, next) = &mut self.checked;
        // A time later than the interval dates from before the clock was set back.
        if now < *next && *next <= now + MAX_SLEEP {
            return;
        }
        *next = now + MAX_SLEEP;
        let count = self
            .identities
            .all
            .len()
            .div_ceil(CHECK_PERIOD)
            .min(MAX_CHECKS);
        *after = self.identities.change_next(after.as_ref(), count, now, |guid, identity| {
            // Without a pair, the identity is due anyway.
            if identity.schedule.validity.is_some() && !identity.has_files() {
                tracing::warn!(%guid, "files of the identity were removed; a new pair is issued");
                identity.schedule.lost();
            }
        });
    }

    /// Returns the state of the CA, the pool and every identity.
    pub fn status(&self, now: SystemTime) -> RotatorStatus {
        RotatorStatus {
            authority: AuthorityStatus {
                file: self.ca.certificate.clone(),
                fingerprint: self.authority.fingerprint.clone(),
                not_after: self.authority.validity.not_after,
                problem: self
                    .ca_problem
                    .as_deref()
                    .or(self.trusted.problem())
                    .map(str::to_owned),
            },
            pool_ready: self.pool.ready(),
            pool_size: self.pool.size(),
            renewals: self.renewals,
            failures: self
                .failures
                .iter()
                .map(|(reason, count)| ((*reason).to_owned(), *count))
                .collect(),
            identities: self
                .identities
                .all
                .values()
                .map(|identity| identity.status(now))
                .collect(),
            problems: self.problems.clone(),
        }
    }
}

fn unusable_folder(folder: &Path) -> impl Fn(io::Error) -> anyhow::Error {
    let path = folder.display().to_string();
    move |cause| anyhow!("{path}: {cause}; create it writable for the rotator's user")
}

/// Takes over the identities of an earlier process. Returns the folders that cannot be taken over.
fn take_over_all(
    folder: &Path,
    identities: &mut Identities,
    trusted: &mut Trusted,
    now: SystemTime,
) -> io::Result<Vec<Problem>> {
    let mut problems = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        match Identity::take_over(IdentityFolder::new(path.clone())) {
            Ok(Some(identity)) => {
                if let Some(issuer) = &identity.issuer {
                    // The pair is in use, so peers must trust its CA even if it has been replaced.
                    trusted.add(&issuer.chain);
                }
                identities.insert(identity, now);
            }
            Ok(None) => {}
            Err(problem) => {
                // One damaged folder must not keep the others from their renewals.
                tracing::warn!("{}: {problem}", path.display());
                problems.push(Problem {
                    path,
                    message: problem.to_string(),
                });
            }
        }
    }
    Ok(problems)
}

/// The pairs that a change reissues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Renew {
    All,
    ContainerToContainer,
}

/// Result of an attempt to renew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Renewal {
    /// Renewed, failed, or not due any more.
    Done,
    /// The pool has no key, and the renewal can wait for one.
    NeedsKey,
}

/// Progress of a new trust bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Distributed {
    /// Every identity has it, or failed to take it.
    Everywhere,
    /// The next step continues.
    InPart,
}

//----------- Status ----------------------------------------------------------

/// State of a rotator.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RotatorStatus {
    /// The CA in use.
    pub authority: AuthorityStatus,
    /// Number of keys that are ready.
    pub pool_ready: usize,
    /// Number of keys that the pool keeps ready.
    pub pool_size: usize,
    /// Number of renewals since the start.
    pub renewals: u64,
    /// Number of failures since the start, by reason.
    pub failures: BTreeMap<String, u64>,
    /// All identities, by guid.
    pub identities: Vec<IdentityStatus>,
    /// Descriptions and folders without an identity.
    pub problems: Vec<Problem>,
}

/// State of the CA.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AuthorityStatus {
    /// Path of the CA's file.
    pub file: PathBuf,
    /// Fingerprint of the certificate in use.
    pub fingerprint: Fingerprint,
    /// End of its validity.
    #[serde(with = "unix")]
    pub not_after: SystemTime,
    /// Reason why the current files cannot be used; `None` if they can.
    pub problem: Option<String>,
}

/// A file or folder without an identity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// Path of the description or folder.
    pub path: PathBuf,
    /// Cause and remedy.
    pub message: String,
}

#[cfg(test)]
mod tests;
