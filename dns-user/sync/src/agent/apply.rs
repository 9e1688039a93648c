//! Applies one version: patch or blob, checked, written.

use std::{sync::Arc, time::Duration};

use anyhow::{anyhow, bail};
use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use dns_kit::backoff;
use prometheus::{
    IntCounter, IntCounterVec, IntGauge, Registry, register_int_counter_vec_with_registry,
    register_int_counter_with_registry, register_int_gauge_with_registry,
};
use tokio::sync::watch;

use super::disk::{Disk, DiskError};
use crate::{
    digest::{self, MultiDigest},
    message::{Announcement, BlobLocation, Extra, Patch, Report},
    store::Store,
};

/// Attempts to download a blob.
const ATTEMPTS: u32 = 3;

/// Pause after the first attempt; doubled after each.
const FIRST_PAUSE: Duration = Duration::from_millis(200);

/// Upper limit of the period over which downloads are spread, regardless of the publisher's request.
const MAX_SPREAD: Duration = Duration::from_secs(600);

/// Version jump that is logged as an error, because the agent accepts no lower version afterwards.
const FAR: u64 = 1_000_000;

#[derive(Debug)]
pub(super) struct Applier {
    mute: bool,
    disk: Disk,
    store: Store,
    metrics: Arc<AgentMetrics>,
    /// State of the file as last read.
    pub(super) held: watch::Sender<Report>,
    /// Highest announced version that is not applied yet; 0 if there is none.
    pub(super) announced: watch::Sender<u64>,
}

impl Applier {
    /// Reads the current file; a folder that hangs counts as no file.
    pub(super) async fn new(
        mute: bool,
        disk: Disk,
        store: Store,
        metrics: Arc<AgentMetrics>,
    ) -> Self {
        let applier = Self {
            mute,
            disk,
            store,
            metrics,
            held: watch::Sender::new(Report {
                patches: true,
                ..Report::default()
            }),
            announced: watch::Sender::new(0),
        };
        if let Err(error) = applier.report().await {
            tracing::error!("cannot read the records; trying again: {error}");
        }
        applier
    }

    /// Checks the file, which another program may have changed.
    pub(super) async fn report(&self) -> Result<Report, DiskError> {
        let report = self.disk.call(|records| Ok(records.report())).await?;
        self.metrics.version.set(report.version.cast_signed());
        self.held.send_if_modified(|held| {
            // Only a change wakes the waiting tasks: the file is looked at every second.
            let changed = *held != report;
            held.clone_from(&report);
            changed
        });
        Ok(report)
    }

    /// Applies a version if it is higher than ours. Returns the file's state afterwards.
    pub(super) async fn apply(&mut self, announcement: &Announcement) -> anyhow::Result<Report> {
        let done = self.try_apply(announcement).await;
        // A version that cannot be applied must not block a lower one.
        self.announced.send_modify(|newest| {
            if *newest == announcement.version {
                *newest = 0;
            }
        });
        done
    }

    async fn try_apply(&mut self, announcement: &Announcement) -> anyhow::Result<Report> {
        // Read again, because another program may have replaced the file since.
        let held = self.report().await?;
        let ours = held.version;
        let announced = announcement.version;
        // As a BOSH agent: it confirms, and changes nothing.
        if announced <= ours {
            if announced > 0 && announced < ours {
                // Mostly a late repetition, but perhaps a second publisher.
                self.metrics.lower.inc();
                tracing::info!(
                    announced,
                    ours,
                    "announcement ignored: its version is lower than the installed one"
                );
            }
            return Ok(held);
        }
        if ours > 0 && announced - ours > FAR {
            tracing::error!(
                announced,
                ours,
                "the announced version is far above the installed one, and lower versions will be refused \
                 from now on; if this is a mistake, stop the publisher, remove records.json and restart the \
                 publisher"
            );
        }
        let taken = self.take(announcement, ours).await;
        let by = taken.inspect_err(|_| self.metrics.failed.inc())?;
        self.metrics.taken.with_label_values(&[by]).inc();
        tracing::info!(
            version = announced,
            by,
            mute = self.mute,
            "new version of the records installed"
        );
        Ok(self.report().await?)
    }

    /// Fetches and writes a version. Returns the metric label of the way it was obtained.
    async fn take(
        &mut self,
        announcement: &Announcement,
        ours: u64,
    ) -> anyhow::Result<&'static str> {
        // Refuse unknown digest algorithms before the download.
        let digest = MultiDigest::parse(&announcement.digest)
            .map_err(|error| anyhow!("checking the blob: {error}"))?;
        let Extra {
            patch,
            spread_ms,
            size,
        } = announcement.extra.clone().unwrap_or_default();
        // The size is announced, and the digest is checked afterwards: until then it bounds what a
        // wrong blob can take.
        let longest = match usize::try_from(size) {
            Ok(size @ 1..) => size.min(self.store.longest),
            _ => self.store.longest,
        };
        // A patch for another version would fail its digest after the work.
        if let Some(patch) = patch.filter(|patch| patch.from == ours && ours > 0) {
            match self
                .by_patch(patch, digest.clone(), announcement.version, longest)
                .await
            {
                Ok(()) => return Ok(BY_PATCH),
                Err(error)
                    if matches!(
                        error.downcast_ref(),
                        Some(DiskError::Write(_) | DiskError::Hangs(_))
                    ) =>
                {
                    // The whole blob could not be written either.
                    return Err(error);
                }
                Err(error) => {
                    self.metrics.patch_failed.inc();
                    tracing::warn!("the patch cannot be applied; fetching the whole blob: {error}");
                }
            }
        }
        let spread = Duration::from_millis(spread_ms).min(MAX_SPREAD);
        let mut newest = self.announced.subscribe();
        let bytes = tokio::select! {
            // A newer version makes the download useless, even one that has just ended.
            biased;
            Ok(_) = newest.wait_for(|newest| *newest > announcement.version) => {
                bail!("a newer version was announced meanwhile");
            }
            downloaded = async {
                // Ten thousand whole blobs are 25 GB, too much for a link at once.
                tokio::time::sleep(spread.mul_f64(fastrand::f64())).await;
                self.download(&announcement.source, longest).await
            } => downloaded?,
        };
        let version = announcement.version;
        self.disk
            .call(move |records| records.write(bytes, &digest, version))
            .await?;
        Ok(BY_BLOB)
    }

    /// Builds the version from ours and a patch.
    async fn by_patch(
        &mut self,
        patch: Patch,
        digest: MultiDigest,
        version: u64,
        longest: usize,
    ) -> anyhow::Result<()> {
        let frame = STANDARD.decode(&patch.zstd).map_err(unusable)?;
        let old = self.disk.call(|records| records.bytes()).await?;
        // Megabytes are decompressed, which would delay the messages of the bus.
        let patched =
            tokio::task::spawn_blocking(move || digest::apply_patch(&old, &frame, longest)).await;
        let patched = patched.map_err(unusable)?.map_err(unusable)?;
        self.disk
            .call(move |records| records.write(patched.into(), &digest, version))
            .await?;
        Ok(())
    }

    /// Downloads the blob, with a limited number of attempts.
    async fn download(&self, source: &BlobLocation, longest: usize) -> anyhow::Result<Bytes> {
        let mut attempt = 1;
        loop {
            let got = match source {
                BlobLocation::Blob(id) => self.store.get(id, longest).await,
                BlobLocation::Signed { url, headers } => {
                    self.store.get_signed(url, headers, longest).await
                }
            };
            match got {
                Ok(bytes) => return Ok(bytes),
                Err(error) if !error.is_worth_retrying() => bail!("downloading the blob: {error}"),
                Err(error) if attempt == ATTEMPTS => {
                    bail!("download of the blob failed {ATTEMPTS} times: {error}")
                }
                Err(error) => {
                    tracing::warn!(attempt, "cannot download the blob; trying again: {error}")
                }
            }
            let pause = backoff::pause(FIRST_PAUSE, Duration::MAX, attempt);
            tokio::time::sleep(backoff::spread(pause)).await;
            attempt += 1;
        }
    }
}

fn unusable(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("patch: {error}")
}

//----------- Metrics ---------------------------------------------------------

/// Label of a version built from the previous one.
const BY_PATCH: &str = "patch";

/// Label of a version downloaded as a whole.
const BY_BLOB: &str = "blob";

#[derive(Debug)]
pub(super) struct AgentMetrics {
    pub(super) registry: Registry,
    version: IntGauge,
    /// Applied versions by source: [`BY_PATCH`], [`BY_BLOB`].
    taken: IntCounterVec,
    /// Versions that could not be applied.
    failed: IntCounter,
    patch_failed: IntCounter,
    /// Announcements of a version lower than the file's.
    lower: IntCounter,
}

impl AgentMetrics {
    pub(super) fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        let version = register_int_gauge_with_registry!(
            "bosh_dns_sync_agent_version",
            "Version of records.json",
            registry
        )?;
        let taken = register_int_counter_vec_with_registry!(
            "bosh_dns_sync_agent_versions_total",
            "Versions installed, by patch or blob",
            &["by"],
            registry
        )?;
        // Expose zero from the start, so that `rate()` sees the first increment.
        for by in [BY_PATCH, BY_BLOB] {
            taken.with_label_values(&[by]);
        }
        Ok(Self {
            version,
            taken,
            failed: register_int_counter_with_registry!(
                "bosh_dns_sync_agent_failures_total",
                "Versions that could not be installed",
                registry
            )?,
            patch_failed: register_int_counter_with_registry!(
                "bosh_dns_sync_agent_patch_failures_total",
                "Patches that could not be applied",
                registry
            )?,
            lower: register_int_counter_with_registry!(
                "bosh_dns_sync_agent_lower_versions_total",
                "Announcements of lower versions, ignored",
                registry
            )?,
            registry,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use clap::Parser;

    use super::{super::AgentOptions, *};
    use crate::{
        digest,
        store::{MAX_BLOB, StoreOptions},
    };

    /// Command line with only the `agent` options.
    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        agent: AgentOptions,
    }

    /// Returns an applier whose file and blobstore are in `folder`.
    async fn applier(folder: &std::path::Path) -> Applier {
        let words =
            "agent --id a --nats tls://n --tls-ca c --tls-certificate c --tls-key k --records";
        let records = folder.join("records.json").display().to_string();
        let words = words.split(' ').map(str::to_owned).chain([records]);
        let options = Line::try_parse_from(words)
            .unwrap_or_else(|error| panic!("{error}"))
            .agent;
        let store = StoreOptions {
            blobstore: Some(format!("file://{}", folder.display())),
            blobstore_credentials: None,
            blobstore_ca: None,
            blobstore_timeout: 5,
            longest_blob: MAX_BLOB,
        };
        let disk = Disk::start(&options, MAX_BLOB).unwrap();
        Applier::new(
            false,
            disk,
            Store::open(&store, None).unwrap(),
            Arc::new(AgentMetrics::new().unwrap()),
        )
        .await
    }

    /// Returns the bytes of a dataset with this version.
    fn dataset(version: u64) -> Vec<u8> {
        format!(
            r#"{{"records":[],"version":{version},"record_keys":["id"],"record_infos":[],"aliases":{{}}}}"#
        )
        .into_bytes()
    }

    /// Returns an announcement of `version` for blob `blob` with the digest of `bytes`.
    fn announcement(version: u64, bytes: &[u8], extra: Option<Extra>) -> Announcement {
        let source = BlobLocation::Blob("blob".to_owned());
        Announcement {
            source,
            digest: digest::sha256(bytes),
            version,
            extra,
        }
    }

    #[tokio::test]
    async fn only_valid_higher_versions_apply() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path();
        let blob = |bytes: &[u8]| fs::write(folder.join("blob"), bytes).unwrap();
        let file = || fs::read(folder.join("records.json")).unwrap();
        let mut agent = applier(folder).await;
        blob(&dataset(5));
        agent
            .apply(&announcement(5, &dataset(5), None))
            .await
            .unwrap();
        assert_eq!((file(), agent.held.borrow().version), (dataset(5), 5));
        // Lower and equal versions are already applied, so nothing is fetched.
        blob(b"no dataset");
        for version in [4, 5] {
            agent
                .apply(&announcement(version, b"", None))
                .await
                .unwrap();
        }
        assert_eq!((file(), agent.metrics.lower.get()), (dataset(5), 1));
        // Another digest, another version inside, no dataset, no digest.
        let disk = async |agent: &mut Applier, blob: &[u8]| {
            let error = agent.apply(&announcement(6, blob, None)).await.unwrap_err();
            error.downcast::<DiskError>().unwrap()
        };
        assert!(matches!(
            disk(&mut agent, &dataset(6)).await,
            DiskError::Digest(_)
        ));
        assert!(matches!(
            disk(&mut agent, b"no dataset").await,
            DiskError::Content(_)
        ));
        blob(&dataset(7));
        let wrong = disk(&mut agent, &dataset(7)).await;
        assert!(matches!(
            wrong,
            DiskError::Version {
                found: 7,
                announced: 6
            }
        ));
        assert_eq!((file(), agent.held.borrow().version), (dataset(5), 5));
        // The next start finds the file.
        assert_eq!(applier(folder).await.held.borrow().version, 5);
    }

    #[tokio::test]
    async fn newer_announcement_overtakes() {
        let place = tempfile::tempdir().unwrap();
        let mut agent = applier(place.path()).await;
        let announced = agent.announced.clone();
        let spread = Some(Extra {
            patch: None,
            spread_ms: u64::MAX,
            size: 0,
        });
        let waiting = announcement(5, &dataset(5), spread);
        let (done, ()) = tokio::join!(agent.apply(&waiting), async {
            tokio::task::yield_now().await;
            announced.send_replace(6);
        });
        assert_eq!(
            done.unwrap_err().to_string(),
            "a newer version was announced meanwhile"
        );
        fs::write(place.path().join("blob"), dataset(6)).unwrap();
        agent
            .apply(&announcement(6, &dataset(6), None))
            .await
            .unwrap();
        assert_eq!(agent.held.borrow().version, 6);
        // A version that cannot be applied does not block a lower one.
        announced.send_replace(9);
        assert!(
            agent
                .apply(&announcement(9, b"another blob", None))
                .await
                .is_err()
        );
        fs::write(place.path().join("blob"), dataset(8)).unwrap();
        agent
            .apply(&announcement(8, &dataset(8), None))
            .await
            .unwrap();
    }

    #[tokio::test]
    async fn blob_of_another_size_is_fetched_once() {
        let place = tempfile::tempdir().unwrap();
        let mut agent = applier(place.path()).await;
        fs::write(place.path().join("blob"), dataset(5)).unwrap();
        let short = Some(Extra {
            patch: None,
            spread_ms: 0,
            size: 3,
        });
        let done = agent.apply(&announcement(5, &dataset(5), short)).await;
        let error = done.unwrap_err().to_string();
        assert!(error.starts_with("downloading the blob: "), "{error}");
    }

    #[tokio::test]
    async fn unfit_patch_falls_back_to_blob() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path();
        let mut agent = applier(folder).await;
        fs::write(folder.join("blob"), dataset(1)).unwrap();
        agent
            .apply(&announcement(1, &dataset(1), None))
            .await
            .unwrap();
        fs::remove_file(folder.join("blob")).unwrap();
        let patch = |from: u64, old: &[u8], new: &[u8]| {
            let zstd = STANDARD.encode(digest::make_patch(old, new).unwrap());
            Some(Extra {
                patch: Some(Patch { from, zstd }),
                spread_ms: 0,
                size: 0,
            })
        };
        let fits = patch(1, &dataset(1), &dataset(2));
        agent
            .apply(&announcement(2, &dataset(2), fits))
            .await
            .unwrap();
        fs::write(folder.join("blob"), dataset(3)).unwrap();
        let foreign = patch(2, &dataset(1), &dataset(4));
        agent
            .apply(&announcement(3, &dataset(3), foreign))
            .await
            .unwrap();
        assert_eq!(fs::read(folder.join("records.json")).unwrap(), dataset(3));
        let taken = |by: &str| agent.metrics.taken.with_label_values(&[by]).get();
        assert_eq!(
            (
                taken("patch"),
                taken("blob"),
                agent.metrics.patch_failed.get()
            ),
            (1, 2, 1)
        );
    }

    #[tokio::test]
    async fn altered_file_counts_as_missing() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path();
        let records = folder.join("records.json");
        let mut agent = applier(folder).await;
        fs::write(folder.join("blob"), dataset(5)).unwrap();
        agent
            .apply(&announcement(5, &dataset(5), None))
            .await
            .unwrap();
        for alter in [
            &|| fs::remove_file(&records).unwrap() as (),
            &|| fs::write(&records, "half").unwrap(),
            &|| fs::write(&records, [dataset(5), vec![b' ']].concat()).unwrap(),
        ] as [&dyn Fn(); 3]
        {
            alter();
            assert_eq!(agent.report().await.unwrap().version, 0);
            let report = agent
                .apply(&announcement(5, &dataset(5), None))
                .await
                .unwrap();
            assert_eq!(report.digest, Some(digest::sha256(&dataset(5))));
            assert_eq!(fs::read(&records).unwrap(), dataset(5));
        }
        // A file that is seen while it is being written.
        fs::write(&records, "").unwrap();
        assert_eq!(agent.report().await.unwrap().version, 0);
        fs::write(&records, [dataset(5), vec![b' ']].concat()).unwrap();
        assert_eq!(agent.report().await.unwrap().version, 0);
        agent
            .apply(&announcement(5, &dataset(5), None))
            .await
            .unwrap();
        assert_eq!(fs::read(&records).unwrap(), dataset(5));
        // An older file is reported as such.
        fs::write(&records, dataset(4)).unwrap();
        assert_eq!(agent.report().await.unwrap().version, 4);
    }

    #[tokio::test]
    async fn only_lower_versions_are_counted_as_such() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path();
        let mut agent = applier(folder).await;
        fs::write(folder.join("blob"), dataset(5)).unwrap();
        let taken = agent.apply(&announcement(5, &dataset(5), None)).await;
        assert_eq!(taken.unwrap().version, 5);
        for (version, lower) in [(5, 0), (0, 0), (4, 1), (1, 2)] {
            let held = agent.apply(&announcement(version, b"", None)).await;
            assert_eq!(held.unwrap().version, 5);
            assert_eq!(agent.metrics.lower.get(), lower, "{version}");
        }
        assert_eq!(agent.metrics.version.get(), 5);
        assert_eq!(agent.metrics.taken.with_label_values(&[BY_BLOB]).get(), 1);
        assert_eq!(agent.metrics.failed.get(), 0);
        let wrong = agent.apply(&announcement(6, b"other", None)).await;
        assert!(wrong.is_err());
        assert_eq!(agent.metrics.failed.get(), 1);
        assert_eq!(*agent.announced.borrow(), 0);
        assert_eq!(agent.held.borrow().version, 5);
    }

    #[tokio::test]
    async fn missing_blob_is_tried_three_times() {
        let place = tempfile::tempdir().unwrap();
        let mut agent = applier(place.path()).await;
        let missing = agent.apply(&announcement(5, b"", None)).await.unwrap_err();
        assert_eq!(
            missing.to_string(),
            format!(
                "download of the blob failed 3 times: {}: No such file or directory (os error 2)",
                place.path().join("blob").display()
            )
        );
        let unknown = Announcement {
            digest: "md5:x".to_owned(),
            ..announcement(5, b"", None)
        };
        assert_eq!(
            agent.apply(&unknown).await.unwrap_err().to_string(),
            "checking the blob: \"md5:x\" has no sha1, sha256 or sha512 digest"
        );
        assert_eq!(agent.metrics.failed.get(), 2);
    }

    #[tokio::test]
    async fn unchanged_report_wakes_no_watcher() {
        let place = tempfile::tempdir().unwrap();
        let mut agent = applier(place.path()).await;
        let mut held = agent.held.subscribe();
        assert_eq!(held.borrow_and_update().version, 0);
        agent.report().await.unwrap();
        assert!(!held.has_changed().unwrap());
        fs::write(place.path().join("blob"), dataset(5)).unwrap();
        agent
            .apply(&announcement(5, &dataset(5), None))
            .await
            .unwrap();
        assert!(held.has_changed().unwrap());
        held.borrow_and_update();
        agent.report().await.unwrap();
        assert!(!held.has_changed().unwrap());
    }
}
