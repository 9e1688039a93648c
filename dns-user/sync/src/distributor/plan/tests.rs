//! Scenarios with simulated time, without files, blobstore and bus.

use super::*;

/// A plan with its clock.
struct World {
    plan: Plan,
    now: u64,
    nonce: u64,
    connected: bool,
    max_payload: usize,
}

fn made(version: u64) -> CommittedVersion {
    CommittedVersion {
        version,
        blob: format!("blob-{version}"),
        digest: digest(version),
        at: 0,
    }
}

fn digest(version: u64) -> String {
    crate::digest::sha256(&version.to_le_bytes())
}

fn report(version: u64) -> Report {
    let digest = (version > 0).then(|| digest(version));
    Report {
        version,
        digest,
        patches: true,
    }
}

impl World {
    fn new(agents: &[&str], newest: Option<u64>) -> Self {
        let settings = PlanSettings {
            bandwidth: 1_000_000,
            patches: true,
            links_good_for: Duration::from_secs(1000),
        };
        let newest = newest.map(made);
        let mut plan = Plan::new(settings, AgentRegistry::default(), newest.as_ref(), 0);
        plan.write_at = u64::MAX;
        let agents: Vec<String> = agents.iter().map(|id| (*id).to_owned()).collect();
        plan.inventory(&agents, 0);
        Self {
            plan,
            now: 0,
            nonce: 0,
            connected: true,
            max_payload: 1 << 20,
        }
    }

    fn step(&mut self) -> Vec<Action> {
        let nonce = &mut self.nonce;
        let mut random = || {
            *nonce += 1;
            *nonce
        };
        let mut now = StepInput {
            ms: self.now,
            unix: Duration::from_millis(self.now),
            max_payload: self.connected.then_some(self.max_payload),
            random: &mut random,
            sign: &|_, _, _| None,
        };
        self.plan.step(&mut now)
    }

    /// Answers the initial reports with these versions.
    fn start(&mut self, held: &[(&str, u64)]) {
        let Some(Action::Ask(questions)) = self.step().pop() else {
            panic!("no question")
        };
        for (agent, call) in questions {
            if let Some((_, version)) = held.iter().find(|(id, _)| *id == agent) {
                self.reply(&agent, call, Reply::Synced(Some(report(*version))));
            }
        }
    }

    fn reply(&mut self, agent: &str, call: AgentCall, reply: Reply) {
        let subject = message::reply_subject("p", agent, &call.token());
        self.plan
            .on_message(&subject, &reply.write(), self.now, 0.5);
    }

    /// Completes a commit and its upload.
    fn upload(&mut self, version: u64, bytes: &Bytes) {
        let committed = Committed {
            made: made(version),
            bytes: bytes.clone(),
            new: true,
            gone: Vec::new(),
        };
        self.plan.committed(committed, self.now);
        assert!(matches!(&self.step()[..], [Action::Put(..)]));
        self.plan.put(version, true, self.now);
    }

    /// Completes a commit and its upload. Returns the batch of announcements.
    fn publish(&mut self, version: u64, bytes: &Bytes) -> Vec<Outgoing> {
        self.upload(version, bytes);
        self.batch()
    }

    /// Steps until a batch is sent, without patches.
    fn batch(&mut self) -> Vec<Outgoing> {
        for _ in 0..3 {
            for action in self.step() {
                match action {
                    Action::Send(batch) => return batch,
                    Action::Write(Job::Patch { from, to, .. }) => self.plan.patch(from, to, None),
                    other => panic!("{other:?}"),
                }
            }
        }
        Vec::new()
    }
}

#[test]
fn first_version_is_above_reports() {
    let mut world = World::new(&["a", "b"], Some(3));
    world.start(&[("a", 57), ("b", 57)]);
    assert!(matches!(
        world.step()[..],
        [Action::Write(Job::Commit { floor: 57 })]
    ));
    let batch = world.publish(58, &Bytes::from_static(b"x"));
    for Outgoing { agent, call, .. } in batch {
        world.reply(&agent, call, Reply::Synced(Some(report(58))));
    }
    assert!(world.plan.announced() && world.plan.registry.count().complete());
}

#[test]
fn silent_agents_delay_the_first_version_briefly() {
    let mut world = World::new(&["a", "b"], Some(3));
    world.start(&[("a", 3)]);
    assert!(world.step().is_empty());
    world.now = INQUIRY_MS;
    assert!(matches!(
        world.step()[..],
        [Action::Write(Job::Commit { floor: 0 })]
    ));
}

#[test]
fn conflicting_records_raise_the_version() {
    let mut world = World::new(&["a"], Some(3));
    let Some(Action::Ask(questions)) = world.step().pop() else {
        panic!("no question")
    };
    let other = Report {
        digest: Some(digest(99)),
        ..report(3)
    };
    world.reply("a", questions[0].1, Reply::Synced(Some(other)));
    assert!(matches!(
        world.step()[..],
        [Action::Write(Job::Commit { floor: 3 })]
    ));
}

#[test]
fn second_publisher_is_a_disagreement() {
    let mut world = World::new(&["a"], None);
    world.start(&[("a", 0)]);
    world.step();
    world.step();
    let batch = world.publish(1, &Bytes::from_static(b"x"));
    world.reply("a", batch[0].call, Reply::Synced(Some(report(1))));
    assert!(world.plan.registry.count().complete());
    let body = report(2).write();
    world
        .plan
        .on_message("director.bosh-dns-sync.a.hello", &body, 10, 0.5);
    assert_eq!(
        world.plan.take_disagreement().map(|(_, held)| held.version),
        Some(2)
    );
    assert_eq!(world.plan.registry.count().disagreeing, 1);
    assert!(!world.plan.registry.count().complete());
}

#[test]
fn forged_and_oversized_replies_are_ignored() {
    let mut world = World::new(&["a"], None);
    world.start(&[("a", 0)]);
    world.step();
    world.step();
    world.publish(1, &Bytes::from_static(b"x"));
    world.reply(
        "a",
        AgentCall {
            version: 1,
            nonce: 77,
        },
        Reply::Synced(Some(report(1))),
    );
    world
        .plan
        .on_message("director.p.a.1-1", &[b'x'; MAX_REPLY + 1], 0, 0.5);
    assert_eq!(
        (world.plan.ignored, world.plan.registry.count().synced),
        (2, 0)
    );
}

#[test]
fn longest_reply_is_read() {
    let mut world = World::new(&["a", "b"], None);
    world.start(&[("a", 0), ("b", 0)]);
    world.step();
    world.step();
    let announced = world.publish(1, &Bytes::from_static(b"x"));
    let call_of = |agent: &str| {
        let mut to_agent = announced.iter().filter(|sent| sent.agent == agent);
        to_agent.next().expect("announced to both").call
    };
    for (agent, len) in [("a", MAX_REPLY), ("b", MAX_REPLY + 1)] {
        let subject = message::reply_subject("p", agent, &call_of(agent).token());
        let mut body = Reply::Synced(Some(report(1))).write();
        body.resize(len, b' ');
        world.plan.on_message(&subject, &body, world.now, 0.5);
    }
    assert_eq!(
        (world.plan.ignored, world.plan.registry.count().synced),
        (1, 1)
    );
}

#[test]
fn only_agents_of_ours_get_patches() {
    let mut world = World::new(&["bosh", "ours"], Some(1));
    world.start(&[("ours", 1)]);
    world.now = INQUIRY_MS;
    world.step();
    world.step();
    world.upload(2, &Bytes::from_static(b"x"));
    let mut extras = HashMap::new();
    for _ in 0..2 {
        for action in world.step() {
            match action {
                Action::Write(Job::Patch { from, to, .. }) => {
                    world.plan.patch(
                        from,
                        to,
                        Some(Patch {
                            from,
                            zstd: "AAAA".to_owned(),
                        }),
                    );
                }
                Action::Send(batch) => {
                    for out in batch {
                        extras.insert(out.agent, out.announcement.extra.clone());
                    }
                    world.plan.sent(2, 0);
                }
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(extras["bosh"], None);
    assert!(
        extras["ours"]
            .as_ref()
            .is_some_and(|extra| extra.patch.is_some() && extra.size == 1)
    );
}

#[test]
fn patches_fit_the_payload() {
    let mut world = World::new(&["a"], Some(1));
    world.max_payload = ENVELOPE + 3;
    world.start(&[("a", 1)]);
    world.step();
    world.step();
    world.upload(2, &Bytes::from_static(b"x"));
    assert!(matches!(
        world.step()[..],
        [Action::Write(Job::Patch { from: 1, to: 2, .. })]
    ));
    world.plan.patch(
        1,
        2,
        Some(Patch {
            from: 1,
            zstd: "AAAA".to_owned(),
        }),
    );
    let batch = world.batch();
    assert!(
        batch[0]
            .announcement
            .extra
            .as_ref()
            .is_some_and(|extra| extra.patch.is_none())
    );
}

#[test]
fn queued_messages_are_not_repeated() {
    let agents: Vec<String> = (0..100).map(|number| format!("a{number}")).collect();
    let ids: Vec<&str> = agents.iter().map(String::as_str).collect();
    let mut world = World::new(&ids, Some(1));
    // 100 messages of 400 kB take 40 s.
    let held: Vec<(&str, u64)> = ids.iter().map(|id| (*id, 1)).collect();
    world.start(&held);
    world.step();
    world.step();
    world.upload(2, &vec![0; 500_000].into());
    world.step();
    world.plan.patch(
        1,
        2,
        Some(Patch {
            from: 1,
            zstd: "A".repeat(400_000),
        }),
    );
    assert_eq!(world.batch().len(), 100);
    world.plan.sent(2, 0);
    world.now = 7_000;
    assert!(world.batch().is_empty());
    world.now = 20_000;
    let again = world.batch().len();
    assert!((1..60).contains(&again), "{again}");
}

#[test]
fn fast_changes_share_versions() {
    let mut world = World::new(&["a"], None);
    world.start(&[("a", 0)]);
    let mut version = 0;
    // Four changes per second for a minute, 2.5 MB each.
    let bytes = Bytes::from(vec![0; 2_500_000]);
    for change in 0..240 {
        world.now = change * 250;
        world.plan.inventory(&["a".to_owned()], world.now);
        for action in world.step() {
            if let Action::Write(Job::Commit { .. }) = action {
                version += 1;
                let committed = Committed {
                    made: made(version),
                    bytes: bytes.clone(),
                    new: true,
                    gone: Vec::new(),
                };
                world.plan.committed(committed, world.now);
            }
        }
    }
    assert!((12..=17).contains(&version), "{version} versions");
}

#[test]
fn stuck_blobstore_delays_no_announcement() {
    let mut world = World::new(&["a", "b"], None);
    world.start(&[("a", 0), ("b", 0)]);
    world.step();
    world.step();
    let batch = world.publish(1, &Bytes::from_static(b"x"));
    assert_eq!(batch.len(), 2);
    world.plan.sent(1, 0);
    // The upload of version 2 never finishes; agents with version 1 are still served.
    let committed = Committed {
        made: made(2),
        bytes: Bytes::from_static(b"y"),
        new: true,
        gone: Vec::new(),
    };
    world.plan.committed(committed, 0);
    assert!(matches!(world.step()[..], [Action::Put(..)]));
    world.now = 60_000;
    assert!(world.step().is_empty());
    world.plan.put(2, false, world.now);
    world.now += PAUSE_MS;
    assert!(matches!(world.step()[..], [Action::Put(..)]));
}

#[test]
fn raised_floor_commits_again() {
    let mut world = World::new(&["a", "b"], None);
    world.start(&[("a", 0)]);
    world.now = INQUIRY_MS;
    assert!(matches!(
        world.step()[..],
        [Action::Write(Job::Commit { floor: 0 })]
    ));
    // The other agent reports while the commit runs.
    world.plan.on_message(
        "director.bosh-dns-sync.b.hello",
        &report(9).write(),
        world.now,
        0.5,
    );
    let committed = Committed {
        made: made(1),
        bytes: Bytes::from_static(b"x"),
        new: true,
        gone: Vec::new(),
    };
    world.plan.committed(committed, world.now);
    assert!(matches!(
        world.step()[..],
        [Action::Write(Job::Commit { floor: 9 }), Action::Put(..)]
    ));
}

#[test]
fn book_without_agents_is_not_written() {
    let mut world = World::new(&["a"], Some(5));
    // A lost agents.json, before the inventory is read.
    world.plan = Plan::new(
        world.plan.settings.clone(),
        AgentRegistry::default(),
        Some(&made(5)),
        0,
    );
    let writes = |actions: Vec<Action>| {
        actions
            .iter()
            .any(|action| matches!(action, Action::Write(Job::WriteRegistry(_))))
    };
    assert!(!writes(world.step()));
    world.plan.inventory(&["a".to_owned()], 0);
    assert!(writes(world.step()));
}

#[test]
fn stored_version_is_announced() {
    let mut world = World::new(&["a"], Some(3));
    world.start(&[("a", 57)]);
    assert!(!world.plan.announced());
    assert!(matches!(
        world.step()[..],
        [Action::Write(Job::Commit { floor: 57 })]
    ));
    assert!(!world.plan.announced(), "it is being committed");
    let committed = Committed {
        made: made(58),
        bytes: Bytes::from_static(b"x"),
        new: true,
        gone: Vec::new(),
    };
    world.plan.committed(committed, world.now);
    // As after a restart: the registry knows the version, whose blob is stored again.
    world.plan.registry.set_version(58, &digest(58), world.now);
    assert!(!world.plan.announced(), "it is not stored");
    assert!(matches!(&world.step()[..], [Action::Put(..)]));
    assert!(!world.plan.announced(), "it is being stored");
    world.plan.put(58, true, world.now);
    world.batch();
    assert!(world.plan.announced());
}

#[test]
fn refused_jobs_are_repeated() {
    let mut world = World::new(&["a"], Some(1));
    world.start(&[("a", 1)]);
    world.now += 1;
    let mut jobs = Vec::new();
    for action in world.step() {
        if let Action::Write(job) = action {
            jobs.push(job);
        }
    }
    assert!(!jobs.is_empty());
    let count = jobs.len();
    for job in jobs {
        world.plan.job_failed(job, world.now);
    }
    assert!(world.step().is_empty(), "a pause comes first");
    world.now += PAUSE_MS;
    let repeated = world.step();
    assert_eq!(repeated.len(), count, "{repeated:?}");
}

#[test]
fn refused_patch_becomes_a_whole_blob() {
    let mut world = World::new(&["a"], Some(1));
    world.start(&[("a", 1)]);
    world.step();
    world.step();
    world.upload(2, &Bytes::from_static(b"x"));
    let Some(Action::Write(patch)) = world.step().pop() else {
        panic!("no patch");
    };
    world.plan.job_failed(patch, 0);
    let batch = world.batch();
    assert_eq!(batch.len(), 1);
    let extra = batch[0].announcement.extra.as_ref();
    assert!(
        extra.is_some_and(|extra| extra.patch.is_none()),
        "{batch:?}"
    );
}

#[test]
fn registry_names_agents_before_it_is_written() {
    let asking = Phase::Asking { until: None };
    for (phase, agents, is_written) in [
        (Phase::Starting, &["a"][..], true),
        (Phase::Starting, &[], false),
        (asking, &["a"], true),
        (asking, &[], true),
    ] {
        let mut world = World::new(agents, None);
        (world.plan.phase, world.plan.write_at) = (phase, 0);
        world.step();
        assert_eq!(!world.plan.unwritten, is_written, "{phase:?} {agents:?}");
    }
}

#[test]
fn bytes_take_time() {
    for (bytes, bandwidth, expected) in [
        (0, 1, 0),
        (1, 1, 1000),
        (2_500, 1_000, 2_500),
        (1_999, 1_000_000, 1),
        (u64::MAX, 1, u64::MAX),
        (u64::MAX, 1000, u64::MAX),
    ] {
        assert_eq!(milliseconds(bytes, bandwidth), expected, "{bytes}");
    }
}

#[test]
fn agents_are_asked_once_there_is_a_bus() {
    let mut world = World::new(&["a"], None);
    world.connected = false;
    assert!(world.step().is_empty());
    assert!(!world.plan.has_version());
    world.connected = true;
    world.now = 5_000;
    assert!(matches!(&world.step()[..], [Action::Ask(asked)] if asked.len() == 1));
    // The time for the reports begins with the question.
    world.now += INQUIRY_MS - 1;
    assert!(world.step().is_empty());
    world.now += 1;
    assert_eq!(world.step().len(), 1);
    assert!(!world.plan.has_version(), "it is not committed");
    world.upload(1, &Bytes::from_static(b"x"));
    assert!(world.plan.has_version());
    assert!(World::new(&[], Some(3)).plan.has_version());
}

#[test]
fn failed_commits_and_uploads_are_repeated_after_a_pause() {
    let mut world = World::new(&["a"], Some(3));
    world.start(&[("a", 3)]);
    let is_commit = |actions: &[Action]| matches!(actions, [Action::Write(Job::Commit { .. })]);
    assert!(is_commit(&world.step()));
    world.plan.commit_failed(world.now);
    // Not a second time for the same failure.
    world.plan.commit_failed(world.now + 700);
    world.now = PAUSE_MS - 1;
    assert!(world.step().is_empty());
    world.now += 1;
    assert!(is_commit(&world.step()));
    let committed = Committed {
        made: made(4),
        bytes: Bytes::from_static(b"x"),
        new: true,
        gone: Vec::new(),
    };
    world.plan.committed(committed, world.now);
    assert!(matches!(&world.step()[..], [Action::Put(..)]));
    // The result of another version's upload says nothing.
    world.plan.put(3, true, world.now);
    assert!(!world.plan.announced());
    world.plan.put(4, false, world.now);
    world.now += PAUSE_MS - 1;
    assert!(world.step().is_empty());
    world.now += 1;
    assert!(matches!(&world.step()[..], [Action::Put(..)]));
    assert_eq!(world.plan.registry.version, 3);
    world.plan.put(4, true, world.now);
    assert_eq!(world.plan.registry.version, 4);
    assert!(world.plan.announced());
}

#[test]
fn registry_is_written_once_a_second() {
    let mut world = World::new(&["a"], Some(3));
    world.plan.write_at = 0;
    let is_written = |world: &mut World| {
        let actions = world.step();
        let written = actions
            .iter()
            .filter(|action| matches!(action, Action::Write(Job::WriteRegistry(_))));
        written.count() == 1
    };
    assert!(is_written(&mut world));
    assert!(!is_written(&mut world), "nothing changed");
    world.plan.sent(9, 70);
    assert_eq!(world.plan.registry.bytes_sent, 70);
    world.now = REGISTRY_INTERVAL_MS - 1;
    assert!(!is_written(&mut world));
    world.now += 1;
    assert!(is_written(&mut world));
    world.plan.registry_failed(world.now);
    world.now += PAUSE_MS - 1;
    assert!(!is_written(&mut world));
    world.now += 1;
    assert!(is_written(&mut world));
}

#[test]
fn late_patch_becomes_a_whole_blob() {
    let mut world = World::new(&["a"], Some(3));
    world.start(&[("a", 3)]);
    assert!(matches!(
        &world.step()[..],
        [Action::Write(Job::Commit { .. })]
    ));
    world.upload(4, &Bytes::from_static(b"x"));
    let asked = world.step();
    assert!(matches!(
        &asked[..],
        [Action::Write(Job::Patch { from: 3, to: 4, .. })]
    ));
    world.now += PATCH_TIMEOUT_MS - 1;
    assert!(world.step().is_empty());
    world.now += 1;
    let [Action::Send(batch)] = &world.step()[..] else {
        panic!("no batch")
    };
    let extra = batch[0].announcement.extra.as_ref().unwrap();
    assert!(extra.patch.is_none());
}

#[test]
fn patches_of_a_version_are_limited() {
    let mut world = World::new(&["a"], Some(1000));
    world.start(&[("a", 1000)]);
    world.step();
    world.upload(1001, &Bytes::from_static(b"x"));
    let mut requested = 0;
    // An agent can report any version.
    for version in 1..=MAX_PATCHES as u64 + 10 {
        let subject = message::reply_subject(message::ASK, "a", "hello");
        let body = report(version).write();
        world.plan.on_message(&subject, &body, world.now, 0.5);
        for action in world.step() {
            requested += usize::from(matches!(action, Action::Write(Job::Patch { .. })));
        }
    }
    assert_eq!(requested, MAX_PATCHES);
}

#[test]
fn links_are_resigned_at_half_time() {
    let seconds = Duration::from_secs;
    for (now, expected) in [(100, false), (149, false), (150, true), (99, true)] {
        assert_eq!(is_over(seconds(100), seconds(50), seconds(now)), expected);
    }
    let mut world = World::new(&["a"], None);
    world.start(&[("a", 0)]);
    world.step();
    world.upload(1, &Bytes::from_static(b"x"));
    world.plan.current.as_mut().unwrap().source = None;
    let mut source = |unix| {
        let now = StepInput {
            ms: 0,
            unix: seconds(unix),
            max_payload: None,
            random: &mut || 0,
            sign: &|blob, now, good_for| {
                let (now, good_for) = (now.as_secs(), good_for.as_secs());
                Some(format!("{blob} {now} {good_for}"))
            },
        };
        let current = world.plan.current.as_mut().unwrap();
        match current.signed_source(&now, seconds(1000)) {
            BlobLocation::Signed { url, headers } if headers.is_empty() => url,
            other => panic!("{other:?}"),
        }
    };
    for (unix, url) in [
        (7000, "blob-1 7000 1000"),
        (7499, "blob-1 7000 1000"),
        (7500, "blob-1 7500 1000"),
        (7400, "blob-1 7400 1000"),
    ] {
        assert_eq!(source(unix), url);
    }
}

#[test]
fn exceptions_count_for_versions_only() {
    let mut world = World::new(&["a", "b"], Some(1));
    let Some(Action::Ask(questions)) = world.step().pop() else {
        panic!("no question")
    };
    for (agent, call) in questions {
        world.reply(&agent, call, Reply::Exception("no file".to_owned()));
    }
    assert_eq!(world.plan.exceptions, 0);
    world.now = INQUIRY_MS;
    world.step();
    let batch = world.publish(2, &Bytes::from_static(b"x"));
    assert_eq!(batch.len(), 2);
    for Outgoing { agent, call, .. } in batch {
        world.reply(&agent, call, Reply::Exception("disk full".to_owned()));
    }
    assert_eq!(world.plan.exceptions, 2);
    assert_eq!(world.plan.ignored, 0);
    world
        .plan
        .on_message("director.p.a.x", b"{}", world.now, 0.5);
    world.plan.on_message("director.p.a", b"{}", world.now, 0.5);
    assert_eq!(world.plan.ignored, 1);
}

#[test]
fn patches_follow_versions_and_demand() {
    for (patches, held, expected) in [(true, 1, 1), (false, 1, 0), (true, 0, 0)] {
        let mut world = World::new(&["a"], Some(1));
        world.plan.settings.patches = patches;
        world.start(&[("a", held)]);
        world.step();
        world.upload(2, &Bytes::from_static(b"x"));
        let actions = world.step();
        let made = actions
            .iter()
            .filter(|action| matches!(action, Action::Write(Job::Patch { from: 1, to: 2, .. })));
        assert_eq!(made.count(), expected, "{patches} {held}");
    }
}
