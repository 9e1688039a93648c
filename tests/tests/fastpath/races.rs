//! Records, health and learned names change at full speed while all CPUs send queries.

use std::{
    net::{IpAddr, Ipv4Addr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use dns_common::counters::Outcome;
use dns_core::{
    config::HookMode,
    name::Name,
    resolve::{Checks, Existence, Health, HealthState, Resolution},
};
use dns_fastpath::{AdmitAll, Counters, FastPathHandle, NameSource};
use fastrand::Rng;
use hickory_proto::{op::Message, rr::RecordType};
use whole_system_tests::{
    bpffs::{Bpffs, config},
    client,
    namespace::Namespace,
    pair::{Pair, v4},
    requires,
};

use crate::lab::{self, handle_of, name_of, wait};

/// Number of snapshots installed in sequence.
const VERSIONS: u32 = 75;
/// Listed names per snapshot.
const LISTED: u32 = 300;
/// Known but unlisted names: most of them do not fit beside the others, so they are learned and
/// evicted constantly.
const LEARNED: u32 = 2_000;
const INSTANCES: u8 = 8;
/// Reply timeout, longer than any answer takes on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// All names in one version, which their addresses encode.
struct Versioned(u32);

/// State of every name's last instance, in all versions.
#[derive(Default)]
struct LastInstance {
    fails: AtomicBool,
}

/// Known bounds on the state that interfaces answer from.
#[derive(Default)]
struct Known {
    /// The newest version handed to the publisher.
    handed: AtomicU32,
    /// The newest version reported as published.
    published: AtomicU32,
    /// Number of health changes started and finished: odd while one is in progress.
    health: AtomicU32,
}

impl Versioned {
    /// Returns the address of an instance.
    fn address(&self, instance: u8) -> Ipv4Addr {
        let [_, _, high, low] = self.0.to_be_bytes();
        Ipv4Addr::new(10, high, low, instance)
    }
}

impl NameSource for Versioned {
    fn published_names(&self) -> Box<dyn Iterator<Item = Name> + '_> {
        Box::new((0..LISTED).map(|number| name_of(&listed(number))))
    }

    fn resolve(&self, health: &dyn Health, _name: &Name) -> Option<Resolution> {
        let all: Vec<Ipv4Addr> = (1..=INSTANCES)
            .map(|instance| self.address(instance))
            .collect();
        let runs = |ip: &Ipv4Addr| health.state((*ip).into(), None) == HealthState::Running;
        let instances = all.iter().map(|&ip| ip.into()).collect();
        Some(Resolution {
            existence: Existence::Found,
            v4: all.into_iter().filter(runs).collect(),
            v6: Vec::new(),
            checks: Checks {
                instances,
                tracked: false,
                synchronous: false,
            },
        })
    }
}

impl Health for LastInstance {
    fn state(&self, ip: IpAddr, _group: Option<&str>) -> HealthState {
        let is_last = matches!(ip, IpAddr::V4(ip) if ip.octets()[3] == INSTANCES);
        if is_last && self.fails.load(SeqCst) {
            HealthState::Failing
        } else {
            HealthState::Running
        }
    }
}

#[test]
fn races_keep_tc_answers_right() -> Result<()> {
    race(HookMode::Tc)
}

#[test]
fn races_keep_native_answers_right() -> Result<()> {
    race(HookMode::Native)
}

/// Makes all changes at full speed while every CPU sends queries.
fn race(mode: HookMode) -> Result<()> {
    requires!(namespaces, bpf);
    let (pair, bpffs) = (Pair::new("race")?, Bpffs::new()?);
    // XDP_TX on a veth needs a program on the other end.
    let is_native = mode == HookMode::Native;
    let _pass = is_native
        .then(|| lab::pass_program(&pair.client, "cli"))
        .transpose()?;
    let last = Arc::new(LastInstance::default());
    let config = config(mode, &bpffs);
    let start = || lab::start_in_process(&config, &[v4()], last.clone(), Arc::new(AdmitAll));
    let fast_path = Arc::new(
        pair.server
            .run(start)?
            .context("the fast path does not start")?,
    );
    let handle = &handle_of(&fast_path);
    let known = Known::default();
    install(handle, &known, 1);
    wait(fast_path.ready());

    let (done, asked) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| -> Result<()> {
        let (client, known, last, done, asked) = (&pair.client, &known, &*last, &done, &asked);
        let cpus = thread::available_parallelism()?.get() as u64;
        let askers: Vec<_> = (0..cpus)
            .map(|seed| scope.spawn(move || ask_on(client, known, last, done, asked, seed)))
            .collect();
        scope.spawn(move || {
            let mut random = Rng::with_seed(cpus);
            while !done.load(SeqCst) {
                handle.learn(&name_of(&learned(random.u32(..LEARNED))));
                thread::yield_now();
            }
        });
        scope.spawn(|| {
            while !done.load(SeqCst) {
                flip(handle, known, last);
            }
        });
        for version in 2..=VERSIONS {
            install(handle, known, version);
        }
        done.store(true, SeqCst);
        for asker in askers {
            let asked = asker
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            asked.with_context(|| format!("packets: {}", outcomes(&fast_path.counters())))?;
        }
        Ok(())
    })?;
    let asked = asked.load(SeqCst);
    ensure!(asked > 1_000, "{asked} queries: too few for a result");
    Ok(())
}

/// Formats the packet counters by outcome.
fn outcomes(counters: &Counters) -> String {
    let counts = Outcome::ALL
        .iter()
        .map(|&outcome| (outcome.label(), counters.outcome(outcome)));
    counts
        .filter(|&(_, count)| count > 0)
        .map(|(label, count)| format!("{label} {count}, "))
        .collect()
}

/// Hands a version to the publisher and waits until it is published.
fn install(handle: &FastPathHandle, known: &Known, version: u32) {
    known.handed.store(version, SeqCst);
    let versioned: Arc<dyn NameSource> = Arc::new(Versioned(version));
    handle.install(&versioned);
    wait(handle.flushed());
    known.published.store(version, SeqCst);
}

/// Toggles the health of the last instances.
fn flip(handle: &FastPathHandle, known: &Known, last: &LastInstance) {
    known.health.fetch_add(1, SeqCst);
    last.fails.fetch_xor(true, SeqCst);
    // Versions handed over from now on use the new state; earlier ones are resolved again now.
    let handed = known.handed.load(SeqCst);
    let instances = (handed.saturating_sub(1)..=handed)
        .map(|version| IpAddr::from(Versioned(version).address(INSTANCES)))
        .collect::<Vec<_>>();
    handle.health_changed(&instances);
    wait(handle.flushed());
    known.health.fetch_add(1, SeqCst);
}

/// Sends consecutive queries until all changes are done: for listed names, which must be answered,
/// and occasionally for a name that may just be published.
fn ask_on(
    client: &Namespace,
    known: &Known,
    last: &LastInstance,
    done: &AtomicBool,
    asked: &AtomicU64,
    seed: u64,
) -> Result<()> {
    let (socket, other) = client.run(|| -> Result<_> {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.connect(v4())?;
        socket.set_read_timeout(Some(LIMIT))?;
        let other = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        other.set_nonblocking(true)?;
        Ok((socket, other))
    })??;
    let mut random = Rng::with_seed(seed);
    let mut buffer = [0; 4096];
    while !done.load(SeqCst) {
        let name = listed(random.u32(..LISTED));
        let query = client::query(&name, RecordType::A, None)?;
        let health = known.health.load(SeqCst);
        let (published, fails) = (known.published.load(SeqCst), last.fails.load(SeqCst));
        socket.send(&query.to_vec()?)?;
        let len = socket
            .recv(&mut buffer)
            .with_context(|| format!("no reply for {name}"))?;
        let reply = Message::from_vec(&buffer[..len])?;
        ensure!(
            reply.metadata.id == query.metadata.id,
            "a reply to another query"
        );
        let is_settled = health.is_multiple_of(2) && known.health.load(SeqCst) == health;
        judge(&reply, known, published, is_settled.then_some(fails))
            .with_context(|| name.clone())?;
        asked.fetch_add(1, SeqCst);

        let name = learned(random.u32(..LEARNED));
        let query = client::query(&name, RecordType::A, None)?;
        let published = known.published.load(SeqCst);
        other.send_to(&query.to_vec()?, v4())?;
        while let Ok((len, _)) = other.recv_from(&mut buffer) {
            let reply = Message::from_vec(&buffer[..len])?;
            // A late reply belongs to a query sent before the newest versions were published.
            let oldest = if reply.metadata.id == query.metadata.id {
                published
            } else {
                0
            };
            judge(&reply, known, oldest, None).context("a learned name")?;
        }
    }
    Ok(())
}

/// Checks that a reply is from a single version, `oldest` or newer, and includes the last instance
/// according to its known state.
fn judge(reply: &Message, known: &Known, oldest: u32, fails: Option<bool>) -> Result<()> {
    let addresses: Vec<[u8; 4]> = client::addresses(reply)
        .into_iter()
        .filter_map(|ip| {
            if let IpAddr::V4(ip) = ip {
                Some(ip.octets())
            } else {
                None
            }
        })
        .collect();
    let version = |[_, high, low, _]: [u8; 4]| u32::from_be_bytes([0, 0, high, low]);
    let first = version(*addresses.first().context("an empty reply")?);
    ensure!(
        addresses.iter().all(|&address| version(address) == first),
        "of two versions: {addresses:?}"
    );
    ensure!(
        (oldest..=known.handed.load(SeqCst)).contains(&first),
        "of version {first}, when {oldest} was published"
    );
    let has_last = addresses.iter().any(|address| address[3] == INSTANCES);
    ensure!(
        addresses.len() == usize::from(INSTANCES) - usize::from(!has_last),
        "parts: {addresses:?}"
    );
    ensure!(
        fails.is_none_or(|fails| has_last != fails),
        "health {fails:?}: {addresses:?}"
    );
    Ok(())
}

/// Returns a name listed in every version.
fn listed(number: u32) -> String {
    format!("listed-{number}.bosh.")
}

/// Returns a name that must be learned.
fn learned(number: u32) -> String {
    format!("learned-{number}.bosh.")
}
