//! One version: patch or blob, checked, written.

use std::{fs, io, path::PathBuf, sync::Arc, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use tokio::sync::watch;

use super::{
    AgentOptions, HostsMode,
    metrics::{BY_BLOB, BY_PATCH, Metrics},
};
use crate::{
    dataset,
    digest::{DigestError, MultiDigest},
    files::{self, Permissions},
    hosts,
    message::{Announcement, Patch, Source},
    patch,
    store::{LONGEST_BLOB, Store, StoreError},
};

/// Attempts to get a blob.
const ATTEMPTS: u32 = 3;

/// Pause after the first attempt; doubled after each.
const FIRST_PAUSE: Duration = Duration::from_millis(200);

/// Longest time over which downloads are spread, whatever a publisher asks for.
const LONGEST_SPREAD: Duration = Duration::from_secs(600);

/// A version that is so much above ours is said loudly: after it nothing lower is taken.
const FAR: u64 = 1_000_000;

/// Takes versions.
#[derive(Debug)]
pub(super) struct Applier {
    /// Where things are.
    options: AgentOptions,
    /// Where blobs come from.
    store: Store,
    /// Counters.
    metrics: Arc<Metrics>,
    /// Version of the file; 0 without one.
    version: watch::Sender<u64>,
    /// Highest version that was announced and not dealt with yet; 0: none.
    announced: watch::Sender<u64>,
    /// With `--mute`: the bytes that were checked last, as they may not be in the file yet.
    checked: Option<Bytes>,
}

/// Why a version is not taken.
#[derive(Debug, thiserror::Error)]
pub(super) enum ApplyError {
    /// The blob cannot be had.
    #[error("downloading the blob failed {ATTEMPTS} times: {0}")]
    Download(StoreError),
    /// The blob cannot be had, and another attempt would not help.
    #[error("downloading the blob: {0}")]
    NotTried(StoreError),
    /// While its turn to download had not come yet a newer one was announced.
    #[error("a newer version was announced meanwhile")]
    Overtaken,
    /// Its digest is another one.
    #[error("checking the blob: {0}")]
    Digest(#[from] DigestError),
    /// It is no dataset.
    #[error("reading the blob: {0}")]
    Content(serde_json::Error),
    /// It is another version.
    #[error("the blob has version {found}, announced is {announced}")]
    Version {
        /// Of the blob.
        found: u64,
        /// As announced.
        announced: u64,
    },
    /// A file cannot be used: the old records for a patch, or the hosts file.
    #[error("{}: {problem}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A file cannot be written.
    #[error("writing: {0}")]
    Write(#[from] files::ReplaceError),
    /// The task that reads and writes files failed.
    #[error("internal: {0}")]
    Task(#[from] tokio::task::JoinError),
}

impl Applier {
    /// Looks what is there.
    pub(super) fn new(options: &AgentOptions, store: Store, metrics: Arc<Metrics>) -> Self {
        if !options.mute {
            files::sweep(&options.records);
            files::sweep(&options.hosts_file);
        }
        let version = match fs::read(&options.records) {
            Ok(bytes) => dataset::Read::parse(&bytes).map(|read| read.version).unwrap_or_else(|error| {
                tracing::warn!(
                    "{}: not a dataset ({error}); the next version that is announced replaces it",
                    options.records.display()
                );
                0
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
            Err(error) => {
                tracing::warn!(
                    "{}: {error}; the next version that is announced replaces it",
                    options.records.display()
                );
                0
            }
        };
        metrics.version.set(version.cast_signed());
        let (version, _) = watch::channel(version);
        let (announced, _) = watch::channel(0);
        Self { options: options.clone(), store, metrics, version, announced, checked: None }
    }

    /// Version of the file.
    pub(super) fn version(&self) -> u64 {
        *self.version.borrow()
    }

    /// Follows the version of the file.
    pub(super) fn watch_version(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// To be told of versions as soon as they are announced.
    pub(super) fn announced(&self) -> watch::Sender<u64> {
        self.announced.clone()
    }

    /// Takes a version; one that is not above ours is taken already.
    pub(super) async fn apply(&mut self, announcement: &Announcement) -> Result<(), ApplyError> {
        let done = self.try_apply(announcement).await;
        // Dealt with, be it well or not: what cannot be taken keeps nobody from a lower one.
        self.announced.send_if_modified(|newest| {
            let this = *newest == announcement.version;
            if this {
                *newest = 0;
            }
            this
        });
        done
    }

    /// As [`Self::apply`].
    async fn try_apply(&mut self, announcement: &Announcement) -> Result<(), ApplyError> {
        let (ours, announced) = (self.version(), announcement.version);
        if announced <= ours {
            if announced < ours {
                self.metrics.lower.inc();
                tracing::info!(announced, ours, "ignored an announcement of a lower version than ours");
            }
            return Ok(());
        }
        if ours > 0 && announced - ours > FAR {
            tracing::error!(
                announced,
                ours,
                "the announced version is far above ours: after it no lower one is taken; \
                 if nobody meant that, stop the publisher, remove records.json here and start again"
            );
        }
        let result = self.take(announcement).await;
        match &result {
            Ok(by) => {
                self.metrics.taken.with_label_values(&[by]).inc();
                self.metrics.version.set(announced.cast_signed());
                self.version.send_replace(announced);
                let mute = self.options.mute;
                tracing::info!(version = announced, by, mute, "took a version of the records");
            }
            Err(_) => self.metrics.failed.inc(),
        }
        result.map(drop)
    }

    /// Gets and writes a version; says how it was got.
    async fn take(&mut self, announcement: &Announcement) -> Result<&'static str, ApplyError> {
        // A digest of no known kind is known before anything is downloaded.
        let digest = MultiDigest::parse(&announcement.digest)?;
        let extra = announcement.extra.clone().unwrap_or_default();
        if let Some(patch) = extra.patch.filter(|patch| patch.from == self.version()) {
            match self.by_patch(patch, digest.clone(), announcement.version).await {
                Ok(()) => return Ok(BY_PATCH),
                Err(error @ ApplyError::Write(_)) => return Err(error),
                Err(error) => {
                    self.metrics.patch_failed.inc();
                    tracing::warn!("the patch cannot be applied; fetching the whole blob: {error}");
                }
            }
        }
        let spread = Duration::from_millis(extra.spread_ms).min(LONGEST_SPREAD);
        let mut newest = self.announced.subscribe();
        tokio::select! {
            biased;
            Ok(_) = newest.wait_for(|newest| *newest > announcement.version) => {
                return Err(ApplyError::Overtaken);
            }
            () = tokio::time::sleep(spread.mul_f64(fastrand::f64())) => {}
        }
        let bytes = self.download(&announcement.source).await?;
        self.write(bytes, digest, announcement.version).await?;
        Ok(BY_BLOB)
    }

    /// Makes the version out of ours.
    async fn by_patch(&mut self, patch: Patch, digest: MultiDigest, version: u64) -> Result<(), ApplyError> {
        let (path, checked) = (self.options.records.clone(), self.checked.clone());
        let patched = tokio::task::spawn_blocking(move || {
            let wrong = |problem: String| ApplyError::Unusable { path: path.clone(), problem };
            let old = match checked {
                Some(bytes) => bytes,
                None => fs::read(&path).map_err(|error| wrong(error.to_string()))?.into(),
            };
            let bytes = STANDARD.decode(&patch.zstd).map_err(|error| wrong(format!("patch: {error}")))?;
            patch::apply(&old, &bytes, LONGEST_BLOB).map_err(|error| wrong(format!("patch: {error}")))
        });
        let bytes = patched.await??;
        self.write(bytes.into(), digest, version).await
    }

    /// Gets the blob, a bounded number of times.
    async fn download(&self, source: &Source) -> Result<Bytes, ApplyError> {
        let mut pause = FIRST_PAUSE;
        let mut attempt = 1;
        loop {
            let got = match source {
                Source::Blob(id) => self.store.get(id).await,
                Source::Signed { url, headers } => self.store.get_signed(url, headers).await,
            };
            match got {
                Ok(bytes) => return Ok(bytes),
                Err(error) if !error.is_worth_retrying() => return Err(ApplyError::NotTried(error)),
                Err(error) if attempt == ATTEMPTS => return Err(ApplyError::Download(error)),
                Err(error) => tracing::warn!(attempt, "cannot download the blob; trying again: {error}"),
            }
            tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64())).await;
            pause *= 2;
            attempt += 1;
        }
    }

    /// Checks bytes and, unless mute, writes the hosts file and then the records.
    async fn write(&mut self, bytes: Bytes, digest: MultiDigest, announced: u64) -> Result<(), ApplyError> {
        let options = self.options.clone();
        let kept = bytes.clone();
        let written = tokio::task::spawn_blocking(move || {
            digest.verify(&bytes)?;
            let read = dataset::Read::parse(&bytes).map_err(ApplyError::Content)?;
            if read.version != announced {
                return Err(ApplyError::Version { found: read.version, announced });
            }
            if options.mute {
                return Ok(());
            }
            write_hosts(&options, &read)?;
            Ok(files::replace(&options.records, &bytes, options.permissions())?)
        });
        written.await??;
        if self.options.mute {
            self.checked = Some(kept);
        }
        Ok(())
    }
}

/// Writes the hosts file as configured.
fn write_hosts(options: &AgentOptions, read: &dataset::Read<'_>) -> Result<(), ApplyError> {
    let path = &options.hosts_file;
    let wrong = |problem: String| ApplyError::Unusable { path: path.clone(), problem };
    let records = read.records.iter().map(|(address, name)| (address.as_ref(), name.as_ref()));
    let text = match options.hosts {
        HostsMode::Off => return Ok(()),
        HostsMode::Replaced => {
            let name = nix::unistd::gethostname().map_err(|error| wrong(error.to_string()))?;
            hosts::replaced(&name.to_string_lossy(), records)
        }
        HostsMode::Block => {
            let old = match fs::read_to_string(path) {
                Ok(text) => text,
                Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
                Err(error) => return Err(wrong(error.to_string())),
            };
            hosts::with_block(&old, records).map_err(|problem| wrong(problem.to_string()))?
        }
    };
    let permissions = Permissions { mode: 0o644, ..Permissions::PRIVATE };
    Ok(files::replace(path, text.as_bytes(), permissions)?)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::{digest, message::Extra, store::StoreOptions};

    /// A command line of `agent` alone.
    #[derive(Parser)]
    struct Line {
        /// Its options.
        #[command(flatten)]
        agent: AgentOptions,
    }

    /// An agent with a folder of blobs, both in `folder`.
    fn applier(folder: &std::path::Path) -> Applier {
        let words = "agent --id a --nats tls://n --tls-ca c --tls-certificate c --tls-key k --records";
        let records = folder.join("records.json").display().to_string();
        let words = words.split(' ').map(str::to_owned).chain([records]);
        let options = Line::try_parse_from(words).unwrap_or_else(|error| panic!("{error}")).agent;
        let store = StoreOptions {
            blobstore: Some(format!("file://{}", folder.display())),
            blobstore_credentials: None,
            blobstore_ca: None,
            blobstore_timeout: 5,
        };
        Applier::new(&options, Store::open(&store, None).unwrap(), Arc::new(Metrics::new().unwrap()))
    }

    /// The bytes of a version.
    fn dataset(version: u64) -> Vec<u8> {
        format!(
            r#"{{"records":[],"version":{version},"record_keys":["id"],"record_infos":[],"aliases":{{}}}}"#
        )
        .into_bytes()
    }

    /// An announcement of `version` with the digest of these bytes, whose blob is `blob`.
    fn announcement(version: u64, bytes: &[u8], extra: Option<Extra>) -> Announcement {
        let source = Source::Blob("blob".to_owned());
        Announcement { source, digest: digest::sha256(bytes), version, extra }
    }

    #[tokio::test]
    async fn only_a_higher_version_that_fits_is_taken() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path();
        let blob = |bytes: &[u8]| fs::write(folder.join("blob"), bytes).unwrap();
        let file = || fs::read(folder.join("records.json")).unwrap();
        let mut agent = applier(folder);
        blob(&dataset(5));
        agent.apply(&announcement(5, &dataset(5), None)).await.unwrap();
        assert_eq!((file(), agent.version()), (dataset(5), 5));
        // Lower and the same: taken already, nothing is fetched.
        blob(b"no dataset");
        for version in [4, 5] {
            agent.apply(&announcement(version, b"", None)).await.unwrap();
        }
        assert_eq!((file(), agent.metrics.lower.get()), (dataset(5), 1));
        // Another digest, another version inside, no dataset, no digest.
        assert!(matches!(agent.apply(&announcement(6, &dataset(6), None)).await, Err(ApplyError::Digest(_))));
        assert!(matches!(
            agent.apply(&announcement(6, b"no dataset", None)).await,
            Err(ApplyError::Content(_))
        ));
        blob(&dataset(7));
        let wrong = agent.apply(&announcement(6, &dataset(7), None)).await;
        assert!(matches!(wrong, Err(ApplyError::Version { found: 7, announced: 6 })));
        assert_eq!((file(), agent.version()), (dataset(5), 5));
        // The next start finds what there is.
        assert_eq!(applier(folder).version(), 5);
    }

    #[tokio::test]
    async fn who_waits_for_its_turn_is_overtaken_by_a_newer_version() {
        let place = tempfile::tempdir().unwrap();
        let mut agent = applier(place.path());
        let announced = agent.announced();
        let spread = Some(Extra { patch: None, spread_ms: u64::MAX });
        let waiting = announcement(5, &dataset(5), spread);
        let (done, ()) = tokio::join!(agent.apply(&waiting), async {
            tokio::task::yield_now().await;
            announced.send_replace(6);
        });
        assert!(matches!(done, Err(ApplyError::Overtaken)));
        fs::write(place.path().join("blob"), dataset(6)).unwrap();
        agent.apply(&announcement(6, &dataset(6), None)).await.unwrap();
        assert_eq!(agent.version(), 6);
        // What was announced and could not be taken keeps nobody from a lower one.
        announced.send_replace(9);
        assert!(agent.apply(&announcement(9, b"another blob", None)).await.is_err());
        fs::write(place.path().join("blob"), dataset(8)).unwrap();
        agent.apply(&announcement(8, &dataset(8), None)).await.unwrap();
    }

    #[tokio::test]
    async fn a_patch_is_taken_where_it_fits_and_the_blob_where_it_does_not() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path();
        let mut agent = applier(folder);
        fs::write(folder.join("blob"), dataset(1)).unwrap();
        agent.apply(&announcement(1, &dataset(1), None)).await.unwrap();
        fs::remove_file(folder.join("blob")).unwrap();
        let patch = |from: u64, old: &[u8], new: &[u8]| {
            let zstd = STANDARD.encode(patch::make(old, new).unwrap());
            Some(Extra { patch: Some(Patch { from, zstd }), spread_ms: 0 })
        };
        let fits = patch(1, &dataset(1), &dataset(2));
        agent.apply(&announcement(2, &dataset(2), fits)).await.unwrap();
        fs::write(folder.join("blob"), dataset(3)).unwrap();
        let foreign = patch(2, &dataset(1), &dataset(4));
        agent.apply(&announcement(3, &dataset(3), foreign)).await.unwrap();
        assert_eq!(fs::read(folder.join("records.json")).unwrap(), dataset(3));
        let taken = |by: &str| agent.metrics.taken.with_label_values(&[by]).get();
        assert_eq!((taken("patch"), taken("blob"), agent.metrics.patch_failed.get()), (1, 2, 1));
    }
}
