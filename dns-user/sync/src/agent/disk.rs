//! All access to `records.json` and the hosts file, on one thread: if a folder hangs, only the
//! calls that need it fail; the bus and process shutdown are not delayed.
//!
//! A single thread also preserves order: a write that hangs and completes late cannot replace a newer file.

use std::{
    fmt::Write,
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::mpsc::{SyncSender, sync_channel},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use dns_kit::files::{
    atomic::{self, Attributes},
    bounded,
};
use tokio::sync::oneshot;

use super::{AgentOptions, HostsMode};
use crate::{
    dataset,
    digest::{DigestError, MultiDigest, sha256},
    message::Report,
};

/// Longest wait for one call.
const LIMIT: Duration = Duration::from_secs(10);

/// Maximum number of queued calls.
const QUEUE: usize = 4;

/// Errors when reading or writing the files.
#[derive(Debug, thiserror::Error)]
pub(super) enum DiskError {
    #[error(
        "{}: not finished within {LIMIT:?}, its folder does not respond; if it is mounted, check its server, or \
         unmount it with `umount --lazy`", .0.display()
    )]
    Hangs(PathBuf),
    #[error("checking the blob: {0}")]
    Digest(#[from] DigestError),
    #[error("reading the blob: {0}")]
    Content(serde_json::Error),
    #[error("the blob has version {found}, but {announced} was announced")]
    Version { found: u64, announced: u64 },
    #[error("{}: {problem}", path.display())]
    Unusable { path: PathBuf, problem: String },
    #[error("writing: {0}")]
    Write(#[from] atomic::ReplaceError),
}

/// Identity of the file's content.
type Stamp = (SystemTime, u64, u64);

type Job = Box<dyn FnOnce(&mut Records) + Send>;

/// A handle to the thread.
#[derive(Clone, Debug)]
pub(super) struct Disk {
    jobs: SyncSender<Job>,
    path: PathBuf,
}

impl Disk {
    pub(super) fn start(options: &AgentOptions, longest: usize) -> io::Result<Self> {
        let (jobs, queue) = sync_channel::<Job>(QUEUE);
        let options = options.clone();
        let path = options.records.clone();
        std::thread::Builder::new()
            .name("records".to_owned())
            // A thread, not a task: a call to a file system that hangs cannot be cancelled.
            .spawn(move || {
                // Beside a BOSH agent, the unfinished files are that agent's.
                if !options.mute {
                    atomic::sweep(&options.records);
                    atomic::sweep(&options.hosts_file);
                }
                let mut records = Records {
                    options,
                    longest,
                    stamp: None,
                    read: false,
                    held: Report::default(),
                    written: Report::default(),
                    checked: None,
                };
                while let Ok(job) = queue.recv() {
                    job(&mut records);
                }
            })?;
        Ok(Self { jobs, path })
    }

    /// Runs a call on the thread. A call abandoned before it starts is skipped.
    pub(super) async fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&mut Records) -> Result<T, DiskError> + Send + 'static,
    ) -> Result<T, DiskError> {
        let (answer, answered) = oneshot::channel();
        let job: Job = Box::new(move |records| {
            if !answer.is_closed() {
                // The caller may have given up in the meantime.
                let _ = answer.send(call(records));
            }
        });
        // A full queue means that the thread hangs in an earlier call.
        let is_queued = self.jobs.try_send(job).is_ok();
        match tokio::time::timeout(LIMIT, answered).await {
            Ok(Ok(result)) if is_queued => result,
            _ => Err(DiskError::Hangs(self.path.clone())),
        }
    }
}

/// Report of an agent without a usable file.
const NOTHING: Report = Report {
    version: 0,
    digest: None,
    patches: true,
};

fn differs(found: &Report, known: &Report) -> bool {
    found.version == known.version && found.digest != known.digest
}
/// The files, owned by the thread.
#[derive(Debug)]
pub(super) struct Records {
    options: AgentOptions,
    longest: usize,
    /// Stamp of the content described by `held`; `None` if there is no file.
    stamp: Option<Stamp>,
    /// Whether the file has been read at all.
    read: bool,
    held: Report,
    /// The file as written last, or as found at the start.
    written: Report,
    /// With `--mute`: the bytes checked last, which were not written to the file.
    checked: Option<Bytes>,
}

impl Records {
    /// Returns the file's current state; reads the file only if it changed.
    pub(super) fn report(&mut self) -> Report {
        // With `--mute` the file is the BOSH agent's, and says nothing about what was checked.
        if self.checked.is_some() {
            return self.held.clone();
        }
        let stamp = fs::metadata(&self.options.records)
            .ok()
            .as_ref()
            .and_then(stamp_of);
        if self.read && stamp == self.stamp {
            return self.held.clone();
        }
        let found = self.read();
        let path = &self.options.records;
        // The same version with other bytes did not come from the publisher. A file that is being
        // written may have been read as no dataset in between.
        let edited = self.read && (differs(&found, &self.held) || differs(&found, &self.written));
        if self.read && found != self.held {
            tracing::warn!(
                version = found.version,
                ours = self.held.version,
                "{}: another program changed or removed the file; asking for the newest version",
                path.display()
            );
        }
        if !self.read {
            self.written = found.clone();
        }
        // Version 0 makes the publisher send the version again.
        self.held = if edited { NOTHING } else { found };
        self.stamp = stamp;
        self.read = true;
        self.held.clone()
    }

    /// Reads the file; an unusable one counts as none.
    fn read(&self) -> Report {
        let path = &self.options.records;
        let bytes = match bounded::read_at_most(path, self.longest as u64) {
            Ok(bytes) => bytes,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::warn!(
                        "{}: {error}; the newest version replaces it",
                        path.display()
                    );
                }
                return NOTHING;
            }
        };
        match dataset::Read::parse(&bytes) {
            Ok(read) => Report {
                version: read.version,
                digest: Some(sha256(&bytes)),
                patches: true,
            },
            Err(error) => {
                tracing::warn!(
                    "{}: not a dataset ({error}); the newest version replaces it",
                    path.display()
                );
                NOTHING
            }
        }
    }

    /// Returns the bytes that a patch applies to.
    pub(super) fn bytes(&self) -> Result<Bytes, DiskError> {
        if let Some(checked) = &self.checked {
            return Ok(checked.clone());
        }
        let path = &self.options.records;
        match bounded::read_at_most(path, self.longest as u64) {
            Ok(bytes) => Ok(bytes.into()),
            Err(error) => Err(unusable(path, error)),
        }
    }

    /// Checks bytes and, unless mute, writes the hosts file and then the records.
    pub(super) fn write(
        &mut self,
        bytes: Bytes,
        digest: &MultiDigest,
        announced: u64,
    ) -> Result<(), DiskError> {
        // Before anything is parsed: bytes of another origin must not reach the parser.
        digest.verify(&bytes)?;
        let read = dataset::Read::parse(&bytes).map_err(DiskError::Content)?;
        // As a BOSH agent does: an old blob under a new number would be refused by no later check.
        if read.version != announced {
            return Err(DiskError::Version {
                found: read.version,
                announced,
            });
        }
        let report = Report {
            version: announced,
            digest: Some(sha256(&bytes)),
            patches: true,
        };
        if self.options.mute {
            self.held = report;
            self.checked = Some(bytes);
            return Ok(());
        }
        // First, as a BOSH agent does: with the records there, the version counts as installed.
        write_hosts(&self.options, &read)?;
        let attributes = self.options.attributes.of(&self.options.records);
        let written = atomic::replace(&self.options.records, &bytes, attributes)?;
        self.held.clone_from(&report);
        self.written = report;
        // The file itself may be gone again.
        (self.stamp, self.read) = (stamp_of(&written), true);
        Ok(())
    }
}

fn stamp_of(facts: &fs::Metadata) -> Option<Stamp> {
    // The inode as well, because a replacement may fall into the same tick of the clock.
    Some((facts.modified().ok()?, facts.ino(), facts.len()))
}

fn write_hosts(options: &AgentOptions, read: &dataset::Read<'_>) -> Result<(), DiskError> {
    /// Maximum size of a hosts file that a block is added to, in bytes.
    const MAX_REPORT_SIZE: u64 = 64 << 20;
    let records = read
        .records
        .iter()
        .map(|(address, name)| (address.as_ref(), name.as_ref()));
    let path = &options.hosts_file;
    let text = match options.hosts {
        HostsMode::Off => return Ok(()),
        HostsMode::Replaced => {
            let name = nix::unistd::gethostname().map_err(|error| unusable(path, error))?;
            whole_hosts_file(&name.to_string_lossy(), records)
        }
        HostsMode::Block => {
            let old = match bounded::read_at_most(path, MAX_REPORT_SIZE) {
                Ok(bytes) => String::from_utf8(bytes).map_err(|error| unusable(path, error))?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
                Err(error) => return Err(unusable(path, error)),
            };
            with_hosts_block(&old, records).map_err(|problem| unusable(path, problem))?
        }
    };
    let permissions = Attributes {
        mode: 0o644,
        ..Attributes::PRIVATE
    };
    atomic::replace(path, text.as_bytes(), permissions)?;
    Ok(())
}

fn unusable(path: &Path, problem: impl ToString) -> DiskError {
    DiskError::Unusable {
        path: path.to_owned(),
        problem: problem.to_string(),
    }
}

/// First line of our block.
const BLOCK_BEGIN: &str = "# BEGIN bosh-dns-sync";

/// Last line of our block.
const BLOCK_END: &str = "# END bosh-dns-sync";

/// Returns the whole file as a BOSH agent writes it (observed): fixed lines, then one line per record.
fn whole_hosts_file<'a>(
    hostname: &str,
    records: impl Iterator<Item = (&'a str, &'a str)>,
) -> String {
    let mut text = format!(
        "127.0.0.1 localhost {hostname}\n\n\
         # The following lines are desirable for IPv6 capable hosts\n\
         ::1 localhost ip6-localhost ip6-loopback {hostname}\n\
         fe00::0 ip6-localnet\n\
         ff00::0 ip6-mcastprefix\n\
         ff02::1 ip6-allnodes\n\
         ff02::2 ip6-allrouters\n\
         ff02::3 ip6-allhosts\n"
    );
    add_hosts_lines(&mut text, records);
    text
}

/// The error of a file in which our block has no end.
const NO_END: &str =
    "the line `# END bosh-dns-sync` is missing; add it after the block of bosh-dns-sync";

/// Returns the file with our block added or replaced.
///
/// A block without an end is an error: the following lines may not be ours.
fn with_hosts_block<'a>(
    file: &str,
    records: impl Iterator<Item = (&'a str, &'a str)>,
) -> Result<String, &'static str> {
    let (before, after) = match line_at(file, BLOCK_BEGIN) {
        None => (file, ""),
        Some(start) => {
            let rest = &file[start..];
            let end = line_at(rest, BLOCK_END).ok_or(NO_END)?;
            let after = &rest[end + BLOCK_END.len()..];
            (&file[..start], after.strip_prefix('\n').unwrap_or(after))
        }
    };
    let mut text = before.to_owned();
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text.push_str(BLOCK_BEGIN);
    text.push('\n');
    add_hosts_lines(&mut text, records);
    text.push_str(BLOCK_END);
    text.push('\n');
    text.push_str(after);
    Ok(text)
}

fn add_hosts_lines<'a>(text: &mut String, records: impl Iterator<Item = (&'a str, &'a str)>) {
    for (address, name) in records {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{address} {name}");
    }
}

fn line_at(text: &str, line: &str) -> Option<usize> {
    let mut at = 0;
    for found in text.split_inclusive('\n') {
        if found.trim_end() == line {
            return Some(at);
        }
        at += found.len();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records() -> impl Iterator<Item = (&'static str, &'static str)> {
        [("10.0.0.1", "a.g.n.d.bosh"), ("fd00::1", "b.g.n.d.bosh")].into_iter()
    }

    #[test]
    fn replaced_file_is_golden() {
        assert_eq!(
            whole_hosts_file("vm-1", records()),
            "127.0.0.1 localhost vm-1\n\n# The following lines are desirable for IPv6 capable hosts\n\
             ::1 localhost ip6-localhost ip6-loopback vm-1\nfe00::0 ip6-localnet\nff00::0 ip6-mcastprefix\n\
             ff02::1 ip6-allnodes\nff02::2 ip6-allrouters\nff02::3 ip6-allhosts\n\
             10.0.0.1 a.g.n.d.bosh\nfd00::1 b.g.n.d.bosh\n"
        );
    }

    #[test]
    fn block_keeps_other_lines() {
        let block = "# BEGIN bosh-dns-sync\n10.0.0.1 a.g.n.d.bosh\nfd00::1 b.g.n.d.bosh\n# END bosh-dns-sync\n";
        let first = with_hosts_block("127.0.0.1 localhost", records()).unwrap();
        assert_eq!(first, format!("127.0.0.1 localhost\n{block}"));
        let grown = format!("{first}192.0.2.1 mine\n");
        assert_eq!(with_hosts_block(&grown, records()).unwrap(), grown);
        let emptied = with_hosts_block(&grown, std::iter::empty()).unwrap();
        assert_eq!(
            emptied,
            "127.0.0.1 localhost\n# BEGIN bosh-dns-sync\n# END bosh-dns-sync\n192.0.2.1 mine\n"
        );
        assert_eq!(with_hosts_block("", records()).unwrap(), block);
        assert!(with_hosts_block("# BEGIN bosh-dns-sync\n192.0.2.1 mine\n", records()).is_err());
    }

    #[test]
    fn other_bytes_of_a_version_are_an_edit() {
        let report = |version, digest: &str| Report {
            version,
            digest: Some(digest.to_owned()),
            patches: true,
        };
        for (found, known, is_edited) in [
            (report(5, "five"), report(5, "five"), false),
            (report(5, "other"), report(5, "five"), true),
            (report(6, "six"), report(5, "five"), false),
            (NOTHING, NOTHING, false),
        ] {
            assert_eq!(differs(&found, &known), is_edited, "{found:?}");
        }
    }

    #[test]
    fn lines_are_found_whole() {
        let text = "a\n b\r\nbc\nb \nb";
        for (line, at) in [
            ("a", Some(0)),
            (" b", Some(2)),
            ("bc", Some(6)),
            ("b", Some(9)),
            ("c", None),
        ] {
            assert_eq!(line_at(text, line), at, "{line}");
        }
        let error = with_hosts_block("# BEGIN bosh-dns-sync\n", records()).unwrap_err();
        assert_eq!(error, NO_END);
        // The last line may lack its end.
        let file = "# BEGIN bosh-dns-sync\nold\n# END bosh-dns-sync";
        assert_eq!(
            with_hosts_block(file, std::iter::empty()).unwrap(),
            "# BEGIN bosh-dns-sync\n# END bosh-dns-sync\n"
        );
    }
}
