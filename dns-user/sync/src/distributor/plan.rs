//! The publisher's decisions. Pure: takes events and the time, returns [`Action`]s; the caller does
//! the I/O on files, blobstore and bus.
//!
//! A publisher first requests every agent's version, so that the next version is above all of
//! them even if the state folder was lost or restored. Each version then takes three steps: commit,
//! upload the blob, announce. A crash between them is harmless, because a restart repeats them.

use std::{collections::HashMap, sync::Arc, time::Duration};

use bytes::Bytes;
use dns_kit::logs::LineLimit;

use super::{
    registry::{AgentCall, AgentRegistry, AgentVersion, Verdict},
    state::CommittedVersion,
    state_writer::{Committed, Job},
};
use crate::message::{self, Announcement, BlobLocation, Extra, Patch, Reply, Report};

/// Maximum wait for agents' reports before the first version, in milliseconds.
const INQUIRY_MS: u64 = 2000;

/// Pause before a failed upload or commit is retried, in milliseconds.
const PAUSE_MS: u64 = 2000;

/// Minimum time between two writes of `agents.json`, in milliseconds.
const REGISTRY_INTERVAL_MS: u64 = 1000;

/// Maximum wait for a patch before the whole blob is announced instead, in milliseconds.
const PATCH_TIMEOUT_MS: u64 = 2000;

/// Number of consecutive versions that need no pause.
const BURST: f64 = 4.0;

/// Minimum average interval of versions, in milliseconds.
const MIN_INTERVAL_MS: f64 = 250.0;

/// Write rate of datasets in bytes per second, beyond a burst. Faster changes share versions.
const WRITTEN_PER_SECOND: f64 = 500_000.0;

/// Bytes reserved in a message for everything except the patch.
const ENVELOPE: usize = 4096;

/// Maximum number of versions that a version has patches from. Agents choose them by their reports.
const MAX_PATCHES: usize = 64;

/// Maximum length of a reply in bytes; our agents' are below 1 KiB.
const MAX_REPLY: usize = 16 << 10;

#[derive(Clone, Debug)]
pub(super) struct PlanSettings {
    /// Limit for all blobs and messages together, in bytes per second.
    pub(super) bandwidth: u64,
    pub(super) patches: bool,
    /// Validity of a signed link.
    pub(super) links_good_for: Duration,
}

pub(super) struct StepInput<'a> {
    /// Milliseconds since 1970, monotonic.
    pub(super) ms: u64,
    /// Wall clock, for signatures.
    pub(super) unix: Duration,
    /// Maximum payload of the bus; `None` without a connection.
    pub(super) max_payload: Option<usize>,
    /// Source of random numbers that another party cannot predict.
    pub(super) random: &'a mut dyn FnMut() -> u64,
    /// Signs a link to a blob, if the store can.
    pub(super) sign: &'a dyn Fn(&str, Duration, Duration) -> Option<String>,
}

/// Work for the caller.
#[derive(Debug)]
pub(super) enum Action {
    Ask(Vec<(String, AgentCall)>),
    /// Give the writer of the state folder a job.
    Write(Job),
    /// Upload the blob of a version.
    Put(CommittedVersion, Bytes),
    /// Send announcements at the configured bandwidth. A previous batch is abandoned.
    Send(Vec<Outgoing>),
}

/// One announcement to one agent.
#[derive(Clone, Debug)]
pub(super) struct Outgoing {
    pub(super) agent: String,
    pub(super) call: AgentCall,
    pub(super) announcement: Arc<Announcement>,
}

/// An agent that is due.
#[derive(Debug)]
struct DueAgent {
    id: String,
    patch: Option<Arc<Patch>>,
    /// Whether it is one of ours, whose reports name the version.
    is_ours: bool,
}

/// Returns the time that bytes take.
fn milliseconds(bytes: u64, bandwidth: u64) -> u64 {
    let milliseconds = u128::from(bytes) * 1000 / u128::from(bandwidth);
    u64::try_from(milliseconds).unwrap_or(u64::MAX)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No inventory has been read.
    Starting,
    /// Agents report their versions; the phase ends at `until`, which is set once they were contacted.
    Asking { until: Option<u64> },
    /// Versions are created and announced.
    Open,
}

/// State of the next commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Commit {
    Idle,
    /// Due from this time on.
    Due(u64),
    Running,
}

/// State of the current version's blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blob {
    /// Due from this time on.
    Due(u64),
    Running,
    Stored,
}

#[derive(Clone, Debug)]
enum PatchState {
    Requested(u64),
    /// The patch, or `None` if there is none.
    Made(Option<Arc<Patch>>),
}

#[derive(Debug)]
struct Current {
    made: CommittedVersion,
    bytes: Bytes,
    blob: Blob,
    /// Location for agents, and the time of its signature.
    source: Option<(BlobLocation, Duration)>,
    /// Patches by the version that they apply to.
    patches: HashMap<u64, PatchState>,
}

/// The decisions of one publisher process.
#[derive(Debug)]
pub(super) struct Plan {
    settings: PlanSettings,
    /// Reported version of each agent.
    pub(super) registry: AgentRegistry,
    phase: Phase,
    commit: Commit,
    /// The next version is above this one.
    floor: u64,
    current: Option<Current>,
    /// Version of the batch being sent, if any.
    sending: Option<u64>,
    /// Number of versions that may be created without a pause, and the time of that number.
    allowance: (f64, u64),
    /// Whether `agents.json` is out of date; the next field is the time of the next write.
    unwritten: bool,
    write_at: u64,
    /// A disagreement not yet returned by `take_disagreement`.
    disagreement: Option<(String, AgentVersion)>,
    complaints: LineLimit,
    /// Number of messages that answered no open call.
    pub(super) ignored: u64,
    pub(super) exceptions: u64,
}

impl Plan {
    /// Creates a plan from the newest version of the state folder and the registry of the previous process.
    pub(super) fn new(
        settings: PlanSettings,
        mut registry: AgentRegistry,
        newest: Option<&CommittedVersion>,
        above: u64,
    ) -> Self {
        // An agent may have been reinstalled since, so only what it reports to this process counts.
        registry.forget_reports();
        match newest {
            Some(CommittedVersion {
                version, digest, ..
            }) => {
                let made = registry.made;
                registry.set_version(*version, digest, made);
            }
            None => registry.set_version(0, "", 0),
        }
        Self {
            settings,
            registry,
            phase: Phase::Starting,
            commit: Commit::Idle,
            floor: above,
            current: None,
            sending: None,
            allowance: (BURST, 0),
            // Also without a change: `status` shows at once that all agents are asked again.
            unwritten: true,
            write_at: 0,
            disagreement: None,
            complaints: LineLimit::new(),
            ignored: 0,
            exceptions: 0,
        }
    }

    /// Sets the agents of a newly read inventory.
    pub(super) fn inventory(&mut self, agents: &[String], now: u64) {
        self.registry.set_agents(agents.iter().map(String::as_str));
        self.unwritten = true;
        if self.phase == Phase::Starting {
            self.phase = Phase::Asking { until: None };
        }
        // A commit that was not reported yet takes this inventory: the writer reports in order.
        if self.commit != Commit::Running {
            self.commit = Commit::Due(now);
        }
    }

    /// Records a commit.
    pub(super) fn committed(&mut self, committed: Committed, now: u64) {
        let Committed {
            made, bytes, new, ..
        } = committed;
        // A report may have raised the floor in the meantime.
        self.commit = if made.version > self.floor {
            Commit::Idle
        } else {
            Commit::Due(now)
        };
        if new {
            self.allowance.0 -= 1.0;
        }
        let known = self.current.as_ref().map(|current| &current.made);
        // The same version again, after a change that alters no dataset: its blob keeps its state.
        if known != Some(&made) {
            self.current = Some(Current {
                made,
                bytes,
                blob: Blob::Due(now),
                source: None,
                patches: HashMap::new(),
            });
        }
        self.unwritten = true;
    }

    pub(super) fn commit_failed(&mut self, now: u64) {
        if self.commit == Commit::Running {
            self.commit = Commit::Due(now + PAUSE_MS);
        }
    }

    pub(super) fn has_version(&self) -> bool {
        self.current.is_some() || self.registry.version > 0
    }

    /// Records the result of a blob upload.
    pub(super) fn put(&mut self, version: u64, stored: bool, now: u64) {
        let Some(current) = &mut self.current else {
            return;
        };
        // An upload that was overtaken by a newer version.
        if current.made.version != version {
            return;
        }
        current.blob = if stored {
            Blob::Stored
        } else {
            Blob::Due(now + PAUSE_MS)
        };
        if stored {
            self.registry
                .set_version(version, &current.made.digest, now);
            self.unwritten = true;
        }
    }

    pub(super) fn patch(&mut self, from: u64, to: u64, patch: Option<Patch>) {
        if let Some(current) = &mut self.current
            && current.made.version == to
        {
            let made = PatchState::Made(patch.map(Arc::new));
            current.patches.insert(from, made);
        }
    }

    pub(super) fn sent(&mut self, version: u64, bytes: u64) {
        // The end of a batch may still be reported after the next one was begun.
        if self.sending == Some(version) {
            self.sending = None;
        }
        self.registry.bytes_sent += bytes;
        self.unwritten = true;
    }

    /// Records that `agents.json` could not be written.
    pub(super) fn registry_failed(&mut self, now: u64) {
        self.unwritten = true;
        self.write_at = now + PAUSE_MS;
    }

    /// Records that the writer did not take a job.
    pub(super) fn job_failed(&mut self, job: Job, now: u64) {
        match job {
            Job::Commit { .. } => self.commit_failed(now),
            // The agents download the whole blob.
            Job::Patch { from, to, .. } => self.patch(from, to, None),
            Job::WriteRegistry(_) => self.registry_failed(now),
        }
    }

    pub(super) fn announced(&self) -> bool {
        let current = self.current.as_ref();
        self.commit == Commit::Idle && current.is_some_and(|current| current.blob == Blob::Stored)
    }

    pub(super) fn take_disagreement(&mut self) -> Option<(String, AgentVersion)> {
        self.disagreement.take()
    }

    /// Processes a message from the bus.
    pub(super) fn on_message(&mut self, subject: &str, body: &[u8], now: u64, random: f64) {
        // The subscriptions have wildcards, which match subjects of other lengths.
        let Some((agent, request)) = message::read_reply_subject(subject) else {
            return;
        };
        if self.phase == Phase::Starting {
            // All agents are contacted once the inventory is read.
            return;
        }
        // Any agent may send whatever nats-server lets through, and it would be parsed here.
        if body.len() > MAX_REPLY {
            self.ignored += 1;
            return;
        }
        let verdict = match subject.split('.').nth(1) {
            Some(message::ASK) => match Report::read(body) {
                Some(report) => self.registry.report(agent, report, now),
                None => Verdict::Ignored,
            },
            _ => match AgentCall::parse(request) {
                Some(call) => {
                    let reply = Reply::read(body);
                    self.exceptions +=
                        u64::from(matches!(reply, Reply::Exception(_)) && call.version > 0);
                    self.registry.record_reply(agent, call, reply, now, random)
                }
                None => Verdict::Ignored,
            },
        };
        self.apply_verdict(agent, verdict, now);
    }

    fn apply_verdict(&mut self, agent: &str, verdict: Verdict, now: u64) {
        match verdict {
            Verdict::Ignored => self.ignored += 1,
            Verdict::Noted => self.unwritten = true,
            Verdict::Complains(problem) => {
                self.unwritten = true;
                let version = self.registry.version;
                if let Some(omitted) = self.complaints.admit_any() {
                    tracing::warn!(
                        agent,
                        version,
                        omitted,
                        "the agent could not install the version: {problem}"
                    );
                }
            }
            Verdict::Raise(version) => {
                self.unwritten = true;
                if version >= self.floor {
                    tracing::warn!(
                        agent,
                        version,
                        ours = self.registry.version,
                        "an agent holds an unknown version: the state folder was lost or restored; the next version will be higher"
                    );
                    self.floor = version;
                    if self.phase == Phase::Open && self.commit == Commit::Idle {
                        self.commit = Commit::Due(now);
                    }
                }
            }
            Verdict::Disagrees(held) => {
                self.unwritten = true;
                if let Some(omitted) = self.complaints.admit_any() {
                    let AgentVersion { version, digest } = &held;
                    tracing::error!(
                        agent,
                        version,
                        digest,
                        ours = self.registry.version,
                        omitted,
                        "an agent has a version or digest that this publisher did not make; stop any other publisher, then restart this one"
                    );
                }
                // The first one names the other publisher; a single publication fails with it.
                self.disagreement.get_or_insert((agent.to_owned(), held));
            }
        }
    }

    pub(super) fn step(&mut self, now: &mut StepInput<'_>) -> Vec<Action> {
        let mut actions = Vec::new();
        self.ask(now, &mut actions);
        if self.phase == Phase::Open {
            self.commit(now, &mut actions);
            self.put_blob(now, &mut actions);
            self.announce(now, &mut actions);
        }
        // A registry without agents would read as a fleet in which every agent has the version.
        let names_agents = self.phase != Phase::Starting || !self.registry.agents.is_empty();
        if self.unwritten && names_agents && now.ms >= self.write_at {
            // Strings and numbers always serialise.
            let registry = serde_json::to_vec(&self.registry).unwrap_or_default();
            actions.push(Action::Write(Job::WriteRegistry(registry)));
            (self.unwritten, self.write_at) = (false, now.ms + REGISTRY_INTERVAL_MS);
        }
        actions
    }

    fn ask(&mut self, now: &mut StepInput<'_>, actions: &mut Vec<Action>) {
        let Phase::Asking { until } = self.phase else {
            return;
        };
        match until {
            // No agent could report a higher version.
            None if self.registry.agents.is_empty() => self.phase = Phase::Open,
            None if now.max_payload.is_some() => {
                let ids: Vec<String> = self.registry.agents.keys().cloned().collect();
                let questions = ids.into_iter().map(|id| {
                    let call = AgentCall {
                        version: 0,
                        nonce: (now.random)(),
                    };
                    // A question sets no pause, so its time and its spread do not matter.
                    self.registry.record_call(&id, call, now.ms, 0, 0.0);
                    (id, call)
                });
                actions.push(Action::Ask(questions.collect()));
                self.phase = Phase::Asking {
                    until: Some(now.ms + INQUIRY_MS),
                };
            }
            None => {}
            Some(until) if now.ms >= until || self.registry.all_reported() => {
                let silent = self.registry.count().silent;
                tracing::info!(
                    silent,
                    version = self.registry.version,
                    "agents have reported; publishing starts"
                );
                self.phase = Phase::Open;
            }
            Some(_) => {}
        }
    }

    fn commit(&mut self, now: &StepInput<'_>, actions: &mut Vec<Action>) {
        let length = self
            .current
            .as_ref()
            .map_or(0, |current| current.bytes.len());
        // Each version is written to the disk as a whole, so a large fleet gets fewer of them.
        let interval = MIN_INTERVAL_MS.max(length as f64 / WRITTEN_PER_SECOND * 1000.0);
        let (allowed, at) = self.allowance;
        let allowed = (allowed + now.ms.saturating_sub(at) as f64 / interval).min(BURST);
        self.allowance = (allowed, now.ms);
        let Commit::Due(at) = self.commit else { return };
        if now.ms >= at && allowed >= 1.0 {
            self.commit = Commit::Running;
            let floor = self.floor;
            actions.push(Action::Write(Job::Commit { floor }));
        }
    }

    fn put_blob(&mut self, now: &StepInput<'_>, actions: &mut Vec<Action>) {
        let Some(current) = &mut self.current else {
            return;
        };
        if let Blob::Due(at) = current.blob
            && now.ms >= at
        {
            current.blob = Blob::Running;
            actions.push(Action::Put(current.made.clone(), current.bytes.clone()));
        }
    }

    /// Announces the current version to all agents that are due.
    fn announce(&mut self, now: &mut StepInput<'_>, actions: &mut Vec<Action>) {
        let Some(max_payload) = now.max_payload else {
            return;
        };
        let Some(current) = &mut self.current else {
            return;
        };
        // An agent that is told of a blob before it is stored would fail, and back off.
        if current.blob != Blob::Stored || self.sending == Some(current.made.version) {
            return;
        }
        let mut ready = Vec::new();
        for (agent, held) in self.registry.due(now.ms) {
            let patch = match held {
                // Version 0 is no file, to which nothing can be applied.
                Some(from) if from > 0 && self.settings.patches => {
                    match current.find_patch(from, now.ms, actions) {
                        // The patch is still being created; the agent stays due.
                        None => continue,
                        Some(patch) => {
                            patch.filter(|patch| patch.zstd.len() + ENVELOPE <= max_payload)
                        }
                    }
                }
                _ => None,
            };
            ready.push(DueAgent {
                id: agent,
                patch,
                is_ours: held.is_some(),
            });
        }
        if ready.is_empty() {
            return;
        }
        let batch = self.call(ready, now);
        self.unwritten = true;
        actions.push(Action::Send(batch));
    }

    /// Calls agents. Downloads of the blob are spread over the time that the bandwidth needs for all of them.
    fn call(&mut self, ready: Vec<DueAgent>, now: &mut StepInput<'_>) -> Vec<Outgoing> {
        let Some(current) = &mut self.current else {
            return Vec::new();
        };
        let source = current.signed_source(now, self.settings.links_good_for);
        self.sending = Some(current.made.version);
        let bandwidth = self.settings.bandwidth.max(1);
        let length = current.bytes.len() as u64;
        let blobs = ready.iter().filter(|due| due.patch.is_none()).count() as u64;
        let spread = milliseconds(blobs.saturating_mul(length), bandwidth);
        // Agents whose patch does not fit the message download the whole blob like the others.
        let patched_spread = milliseconds((ready.len() as u64).saturating_mul(length), bandwidth);
        let mut batch = Vec::with_capacity(ready.len());
        let mut shared: HashMap<(u64, bool, bool), Arc<Announcement>> = HashMap::new();
        let mut queued = 0_u64;
        for DueAgent { id, patch, is_ours } in ready {
            let from = patch.as_ref().map_or(0, |patch| patch.from);
            // 512 bytes stand for the rest of the message: the link, the digest, the subjects.
            queued += patch.as_ref().map_or(0, |patch| patch.zstd.len() as u64) + 512;
            let agent = self.registry.agents.get(&id);
            let unsigned = agent.is_some_and(|agent| agent.unsigned);
            let takes_patches = is_ours && self.settings.patches;
            // Agents with the same version share one, which may hold a patch of 500 KB.
            let announcement = shared.entry((from, is_ours, unsigned)).or_insert_with(|| {
                let extra = Extra {
                    patch: patch.as_deref().cloned(),
                    spread_ms: if patch.is_some() {
                        patched_spread
                    } else {
                        spread
                    },
                    size: length,
                };
                // A BOSH agent logs surplus arguments as errors.
                let extra = takes_patches.then_some(extra);
                Arc::new(current.announcement(&source, unsigned, extra))
            });
            let call = AgentCall {
                version: current.made.version,
                nonce: (now.random)(),
            };
            let random = (now.random)() as f64 / u64::MAX as f64;
            // A BOSH agent downloads at once, because it is told of no period.
            let wait = if patch.is_none() && takes_patches {
                spread
            } else {
                0
            };
            // The time limit of a call begins when its message leaves, not when the batch is made.
            let at = now.ms.saturating_add(milliseconds(queued, bandwidth));
            self.registry.record_call(&id, call, at, wait, random);
            batch.push(Outgoing {
                agent: id,
                call,
                announcement: announcement.clone(),
            });
        }
        batch
    }
}

impl Current {
    /// Returns the blob's location; a link is signed again after half of its validity.
    fn signed_source(&mut self, now: &StepInput<'_>, good_for: Duration) -> BlobLocation {
        match &self.source {
            // A link must outlive the spread of the downloads and their repetitions; one signature
            // serves all agents meanwhile.
            Some((source, signed)) if !is_over(*signed, good_for / 2, now.unix) => source.clone(),
            _ => {
                let source = match (now.sign)(&self.made.blob, now.unix, good_for) {
                    Some(url) => BlobLocation::Signed {
                        url,
                        headers: serde_json::Map::new(),
                    },
                    None => BlobLocation::Blob(self.made.blob.clone()),
                };
                self.source = Some((source.clone(), now.unix));
                source
            }
        }
    }

    fn announcement(
        &self,
        source: &BlobLocation,
        unsigned: bool,
        extra: Option<Extra>,
    ) -> Announcement {
        let source = if unsigned {
            BlobLocation::Blob(self.made.blob.clone())
        } else {
            source.clone()
        };
        Announcement {
            source,
            digest: self.made.digest.clone(),
            version: self.made.version,
            extra,
        }
    }

    /// Returns the patch from a version; `None` while it is being created.
    #[expect(
        clippy::option_option,
        reason = "not known yet, known to be missing, known"
    )]
    fn find_patch(
        &mut self,
        from: u64,
        now: u64,
        actions: &mut Vec<Action>,
    ) -> Option<Option<Arc<Patch>>> {
        match self.patches.get(&from) {
            Some(PatchState::Made(patch)) => Some(patch.clone()),
            Some(PatchState::Requested(at)) if now < at + PATCH_TIMEOUT_MS => None,
            // The disk hangs, and the whole blob is in the store.
            Some(PatchState::Requested(_)) => Some(None),
            None if self.patches.len() == MAX_PATCHES => Some(None),
            None => {
                self.patches.insert(from, PatchState::Requested(now));
                actions.push(Action::Write(Job::Patch {
                    from,
                    to: self.made.version,
                    bytes: self.bytes.clone(),
                }));
                None
            }
        }
    }
}

/// Returns whether `after` has passed since `signed`; a clock that was set back counts as passed.
fn is_over(signed: Duration, after: Duration, now: Duration) -> bool {
    now.checked_sub(signed).is_none_or(|age| age >= after)
}

#[cfg(test)]
mod tests;
