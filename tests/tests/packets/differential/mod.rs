//! Random set-ups and random packets: a server with the fast path answers exactly the packets that
//! one without it answers, with equal replies.
//!
//! Two hosts are set up alike, one of them in mode `off`, and receive the same frames. The kernel
//! of the second one decides which packets are delivered, so an interface of the first one must
//! answer no other.

mod set_up;
mod traffic;

use std::{
    collections::BTreeMap,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use dns_kit::metrics::names::FAST_PATH_PACKETS_TOTAL;
use fastrand::Rng;
use serde_json::{Value, json};
use whole_system_tests::{
    bpffs::Bpffs,
    metrics::{Metrics, wait_for_metrics},
    namespace::Namespace,
    process::wait_until,
    requires,
    server::{self, Server},
};

use self::{
    set_up::{Effect, SetUp},
    traffic::{Frame, Key, Reply, Wire, every_valid_frame, random_frame, refused_frames},
};

/// Default number of set-ups; the variable SETUPS overrides it.
const SET_UPS: usize = 8;

/// Default number of compared packets in all set-ups; the variable PACKETS overrides it.
const PACKETS: usize = 800;

/// Packets sent one after the other before replies are read.
const BATCH: usize = 50;

/// Pairs of hosts that work at the same time.
const LANES: usize = 4;

/// How long both hosts must answer alike before packets count: longer than the interval at which
/// the rules are read.
const SETTLED: Duration = Duration::from_secs(3);

/// Time limit for a decision about a new set-up.
const DECIDED: Duration = Duration::from_secs(120);

/// Tries of a batch that shows a difference: a reply may be late on a busy machine.
const TRIES: usize = 4;

#[test]
fn interfaces_answer_as_userspace() -> Result<()> {
    requires!(namespaces, bpf);
    let number = |name: &str, default: usize| {
        std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
    };
    let (set_ups, packets) = (number("SETUPS", SET_UPS), number("PACKETS", PACKETS));
    let seed = std::env::var("SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(fastrand::get_seed);
    println!(
        "seed {seed}: {packets} packets in {set_ups} set-ups (set SEED, PACKETS and SETUPS to repeat)"
    );
    let (paths, lacking) = set_up::paths(&Namespace::new("diff")?)?;
    let mut rng = Rng::with_seed(seed);
    let set_ups: Vec<Numbered> = (0..set_ups)
        .map(|number| {
            let mut rng = rng.fork();
            Numbered {
                number,
                set_up: SetUp::random(number, &paths, &mut rng),
                rng,
            }
        })
        .collect();
    let compared = set_ups
        .iter()
        .filter(|numbered| numbered.set_up.is_comparable())
        .count();
    let each = packets.div_ceil(compared.max(1));
    let lanes = LANES.min(set_ups.len().div_ceil(4));
    let results: Vec<Result<Summary>> = thread::scope(|scope| {
        let set_ups = &set_ups;
        let run = |lane| {
            scope
                .spawn(move || run_lane(lane, seed, set_ups.iter().skip(lane).step_by(lanes), each))
        };
        let running: Vec<_> = (0..lanes).map(run).collect();
        running
            .into_iter()
            .map(|lane| lane.join().expect("no panic"))
            .collect()
    });
    let mut all = Summary::default();
    for result in results {
        let Summary {
            packets,
            answered,
            hits,
        } = result?;
        (all.packets, all.answered, all.hits) = (
            all.packets + packets,
            all.answered + answered,
            all.hits + hits,
        );
    }
    println!(
        "{} packets compared in {compared} set-ups, {} more without a reply from the interface past a limit; \
         {} packets answered, {} replies from interfaces; missing kernel features: {lacking:?}",
        all.packets,
        set_ups.len() - compared,
        all.answered,
        all.hits
    );
    ensure!(
        all.packets >= packets,
        "{} packets of {packets}",
        all.packets
    );
    ensure!(
        all.hits as usize > all.answered / 10,
        "interfaces answered too little: {all:?}"
    );
    Ok(())
}

#[test]
fn refused_senders_get_no_reply() -> Result<()> {
    requires!(namespaces, bpf);
    let hosts = [
        Host::start("refusedf", "auto")?,
        Host::start("refusedp", "off")?,
    ];
    let set_up = SetUp::plain();
    for host in &hosts {
        set_up.make(&host.server, &host.client)?;
    }
    let wires = [
        Wire::open(&hosts[0].client, &set_up)?,
        Wire::open(&hosts[1].client, &set_up)?,
    ];
    hosts[0].wait_until_decided(&set_up)?;
    settle(&wires)?;
    let refused = |outcome: &str| -> Result<u64> {
        let label = format!("outcome=\"{outcome}\"");
        Ok(Metrics::read(&hosts[0].server)?.sum(FAST_PATH_PACKETS_TOTAL, &label))
    };
    for (outcome, dropped, frames) in refused_frames() {
        let before = refused(outcome)?;
        for _ in 0..3 {
            let [mut fast, mut plain] = exchange(&wires, &frames)?;
            // Userspace may take longer than `exchange` waits.
            for _ in 1..TRIES {
                if dropped || (fast.len(), plain.len()) == (frames.len(), frames.len()) {
                    break;
                }
                thread::sleep(Duration::from_millis(200));
                let [again_fast, again_plain] = exchange(&wires, &frames)?;
                fast.extend(again_fast);
                plain.extend(again_plain);
            }
            ensure!(
                fast.keys().eq(plain.keys())
                    && plain.len() == if dropped { 0 } else { frames.len() },
                "{outcome}: {fast:02x?}, {plain:02x?}"
            );
        }
        let counted = refused(outcome)? - before;
        ensure!(
            counted >= 3 * frames.len() as u64,
            "{counted} of {} counted as {outcome}",
            frames.len()
        );
    }
    Ok(())
}

/// A set-up with its number and the source of its packets.
struct Numbered {
    number: usize,
    set_up: SetUp,
    rng: Rng,
}

/// Totals of a lane.
#[derive(Debug, Default)]
struct Summary {
    /// Packets sent to both hosts, whose replies were compared.
    packets: usize,
    /// Packets that both hosts answered.
    answered: usize,
    /// Replies given by interfaces.
    hits: u64,
}

/// Tries set-ups one after the other on one pair of hosts.
fn run_lane<'a>(
    lane: usize,
    seed: u64,
    set_ups: impl Iterator<Item = &'a Numbered>,
    packets: usize,
) -> Result<Summary> {
    let hosts = [
        Host::start(&format!("diff{lane}f"), "auto")?,
        Host::start(&format!("diff{lane}p"), "off")?,
    ];
    let mut summary = Summary::default();
    for Numbered {
        number,
        set_up,
        rng,
    } in set_ups
    {
        let tried = try_set_up(&hosts, set_up, &mut rng.clone(), packets, &mut summary);
        tried.with_context(|| format!("seed {seed}, set-up {number}: {set_up:?}"))?;
        for host in &hosts {
            set_up.remove(&host.server)?;
        }
    }
    summary.hits = hosts[0].hits()?;
    Ok(summary)
}

fn try_set_up(
    hosts: &[Host; 2],
    set_up: &SetUp,
    rng: &mut Rng,
    packets: usize,
    summary: &mut Summary,
) -> Result<()> {
    for host in hosts {
        set_up.make(&host.server, &host.client)?;
    }
    let wires = [
        Wire::open(&hosts[0].client, set_up)?,
        Wire::open(&hosts[1].client, set_up)?,
    ];
    hosts[0].wait_until_decided(set_up)?;
    if !set_up.is_comparable() {
        return stay_silent(&hosts[0], &wires);
    }
    settle(&wires)?;
    let mut left = packets;
    let next_id = &mut rng.u16(..);
    while left > 0 {
        let count = left.min(BATCH);
        left -= count;
        // Distinct ids tell late replies to an earlier batch apart.
        let frame = |_| {
            *next_id = next_id.wrapping_add(1);
            random_frame(*next_id, rng)
        };
        let frames: Vec<Frame> = (0..count).map(frame).collect();
        summary.answered += compare(&wires, &frames, set_up)?;
        summary.packets += count;
    }
    Ok(())
}

/// Sends valid queries until both hosts have answered alike for [`SETTLED`].
fn settle(wires: &[Wire; 2]) -> Result<()> {
    let (begun, mut alike_since) = (Instant::now(), Instant::now());
    let frames = every_valid_frame();
    loop {
        let [fast, plain] = exchange(wires, &frames)?;
        if fast.keys().ne(plain.keys()) {
            alike_since = Instant::now();
            ensure!(
                begun.elapsed() < DECIDED,
                "the hosts never give equal answers: {:?} and {:?}",
                fast.keys(),
                plain.keys()
            );
        } else if alike_since.elapsed() >= SETTLED {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// Sends valid queries until the interface has answered none for [`SETTLED`]. The packets that pass
/// a limit differ between hosts, so their replies cannot be compared.
fn stay_silent(host: &Host, wires: &[Wire; 2]) -> Result<()> {
    let (begun, mut silent_since) = (Instant::now(), Instant::now());
    // Rules of iptables concern IPv4 alone.
    let frames: Vec<Frame> = every_valid_frame()
        .into_iter()
        .filter(Frame::is_v4)
        .collect();
    while silent_since.elapsed() < SETTLED {
        let before = host.hits()?;
        exchange(wires, &frames)?;
        let given = host.hits()? - before;
        if given > 0 {
            silent_since = Instant::now();
            ensure!(
                begun.elapsed() < DECIDED,
                "{given} replies from the interface, past a limit"
            );
        }
        thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// Sends frames to both hosts and compares the replies; returns the number of packets that both
/// answered.
fn compare(wires: &[Wire; 2], frames: &[Frame], set_up: &SetUp) -> Result<usize> {
    let [mut fast, mut plain] = exchange(wires, frames)?;
    let first = fast.clone();
    for _ in 1..TRIES {
        if fast.keys().eq(plain.keys()) {
            break;
        }
        // Userspace may take longer than `exchange` waits, and a rule takes effect within seconds.
        let has_rule = set_up.rule.effect != Effect::None;
        thread::sleep(Duration::from_millis(if has_rule { 1000 } else { 200 }));
        let [again_fast, again_plain] = exchange(wires, frames)?;
        // Without a rule, a single wrong reply is a failure.
        if has_rule {
            fast.retain(|key, _| again_fast.contains_key(key) || plain.contains_key(key));
        }
        fast.extend(again_fast);
        plain.extend(again_plain);
    }
    for (key, reply) in &fast {
        match plain.get(key) {
            Some(other) => ensure!(
                reply == other,
                "different replies to {key:?}: {reply:02x?} and, from userspace, {other:02x?}"
            ),
            None => bail!(
                "the interface answers a query that userspace never received: {key:?}\n{:02x?}",
                culprit(wires, frames, *key)?
            ),
        }
    }
    if let Some(key) = plain.keys().find(|key| !fast.contains_key(key)) {
        bail!(
            "only userspace answers {key:?} (first: {} replies)\n{:02x?}",
            first.len(),
            culprit(wires, frames, *key)?
        );
    }
    Ok(plain.len())
}

/// Finds the frame to which a reply with this key belongs.
fn culprit<'a>(wires: &[Wire; 2], frames: &'a [Frame], key: Key) -> Result<Option<&'a Frame>> {
    for frame in frames {
        let replies = exchange(wires, std::slice::from_ref(frame))?;
        if replies.iter().any(|replies| replies.contains_key(&key)) {
            return Ok(Some(frame));
        }
    }
    Ok(None)
}

/// Sends frames to both hosts and returns the replies of each.
fn exchange(wires: &[Wire; 2], frames: &[Frame]) -> Result<[BTreeMap<Key, Reply>; 2]> {
    for wire in wires {
        wire.send(frames)?;
    }
    let mut replies = [wires[0].receive()?, wires[1].receive()?];
    for replies in &mut replies {
        replies.retain(|(_, _, id), _| frames.iter().any(|frame| frame.id == *id));
    }
    Ok(replies)
}

/// A server and its client's namespace. The link between them belongs to the set-up.
struct Host {
    process: Server,
    /// Dropped before the namespaces.
    _bpffs: Bpffs,
    server: Namespace,
    client: Namespace,
}

impl Host {
    fn start(label: &str, mode: &str) -> Result<Self> {
        let (server, client) = (
            Namespace::new(label)?,
            Namespace::new(&format!("{label}c"))?,
        );
        set_up::prepare(&server)?;
        let bpffs = Bpffs::new()?;
        let folder = server::folder(&server::records_of_groups(&traffic::GROUPS), None)?;
        let settings = json!({
            "metrics": {"enabled": true},
            "control": {"socket": folder.path().join("control.sock")},
            "xdp": {"mode": mode, "bpffs": bpffs.path(), "interfaces": set_up::INTERFACES},
        });
        // A wildcard: the addresses of every set-up are endpoints.
        let process = Server::start(
            Some(&server),
            folder,
            "[::]:53".parse().context("an address")?,
            &settings,
        )?;
        wait_for_metrics(&server)?;
        Ok(Self {
            process,
            _bpffs: bpffs,
            server,
            client,
        })
    }

    fn hits(&self) -> Result<u64> {
        Ok(Metrics::read(&self.server)?.fast_path_replies())
    }

    /// Waits until the server has decided about the interface of a set-up.
    fn wait_until_decided(&self, set_up: &SetUp) -> Result<()> {
        let config = self.process.folder.path().join("config.json");
        let mut last = Value::Null;
        wait_until("a decision about the interface", DECIDED, || {
            thread::sleep(Duration::from_millis(100));
            let status = || -> Result<Value> {
                let mut command = self.server.command(server::program()?)?;
                // Its exit status says that up-checks fail, where a rule drops them.
                let said = command
                    .args(["status", "--json", "--config"])
                    .arg(&config)
                    .output()?;
                Ok(serde_json::from_slice(&said.stdout)?)
            };
            let Ok(status) = status() else { return false };
            last = status["fast_path"]["interfaces"].clone();
            let mut interfaces = last.as_array().into_iter().flatten();
            interfaces.any(|one| one["name"] == set_up.interface() && one["state"] != "waiting")
        })
        .with_context(|| format!("{last}\n{}", self.process.log()))
    }
}
