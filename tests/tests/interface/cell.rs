//! A dense Diego cell with the real server: containers are created as fast as without it, no creation fails,
//! unused interfaces stay untouched, and removed containers leave nothing behind.

use std::{
    collections::BTreeMap,
    fs,
    ops::Range,
    os::unix::process::CommandExt as _,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use dns_kit::metrics::names;
use hickory_proto::rr::RecordType;
use nix::sys::{
    resource::{Resource, setrlimit},
    signal::Signal,
};
use serde_json::json;
use socket2::Socket;
use whole_system_tests::{
    cell::{Asked, Attaches, Cell, OTHER_INTERFACES, feed, time_of_day, wait_for_grace},
    client,
    metrics::Metrics,
    namespace::Namespace,
    old_kernel::refuse_tcx,
    pair::v4,
    process::{capture, wait_until},
    requires,
};

use crate::gated::{Gated, NAME, State};

/// Timeout of a single query, longer than a busy machine pauses.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Time limit for many interfaces to be attached, each of which pauses up to a second for others.
const ALL_ATTACHED: Duration = Duration::from_secs(400);

/// Time between the starts of two creations.
const BETWEEN: Duration = Duration::from_millis(100);

/// Containers of a block, created one after the other with or without the server.
const BLOCK: usize = 2;

/// Blocks with the server, and as many without, whose containers stay.
const BLOCKS: usize = 25;

/// Containers of the blocks that stay.
const CONTAINERS: usize = 2 * BLOCK * BLOCKS;

/// Namespaces of a host and of its containers.
struct Ground {
    host: Namespace,
    containers: Namespace,
}

impl Ground {
    fn new(label: &str) -> Result<Self> {
        Ok(Self {
            host: Namespace::new(label)?,
            containers: Namespace::new(&format!("{label}-c"))?,
        })
    }

    fn cell(&self) -> Result<Cell<'_>> {
        Cell::new(&self.host, &self.containers)
    }

    /// Returns the state of each container's interface by its number. `lo` is left out: the test's first
    /// queries arrive through it, so it is reported for a while.
    fn states(&self, gated: &Gated) -> Result<BTreeMap<usize, State>> {
        let states = gated.states(&self.host)?.into_iter();
        Ok(states
            .filter_map(|(name, state)| Some((name.strip_prefix("s-")?.parse().ok()?, state)))
            .collect())
    }

    /// Returns the numbers of containers whose interface is served.
    fn served(&self, gated: &Gated) -> Result<Vec<usize>> {
        let states = self.states(gated)?.into_iter();
        Ok(states
            .filter_map(|(number, state)| (state.state == "served").then_some(number))
            .collect())
    }

    /// Returns the replies from a container's interface so far.
    fn replies(metrics: &Metrics, number: usize) -> u64 {
        let label = format!("interface=\"{}\"", Cell::interface(number));
        metrics.sum(names::FAST_PATH_INTERFACE_REPLIES_TOTAL, &label)
    }
}

fn query() -> Result<Vec<u8>> {
    Ok(client::query(NAME, RecordType::A, None)?.to_vec()?)
}

/// Returns the number of the server's open descriptors, and how many of them hold a link.
fn descriptors(gated: &Gated) -> Result<(usize, usize)> {
    let (mut all, mut links) = (0, 0);
    for process in gated.server.processes() {
        for descriptor in fs::read_dir(format!("/proc/{process}/fd"))? {
            all += 1;
            // It may be closed meanwhile.
            let target = fs::read_link(descriptor?.path()).unwrap_or_default();
            links += usize::from(target.to_string_lossy().contains("bpf_link"));
        }
    }
    Ok((all, links))
}

/// Descriptors that other activities of the server may have opened meanwhile.
const OTHERS: usize = 4;

/// Makes the server load its programs, which it does when the first interface needs them.
fn serve_first(ground: &Ground, cell: &Cell<'_>, gated: &Gated) -> Result<()> {
    let (first, query) = (2 * CONTAINERS, query()?);
    cell.create(first)?;
    wait_until("the first container to be served", ALL_ATTACHED, || {
        cell.ask(first, &query, 6, TIMEOUT).is_ok()
            && ground
                .served(gated)
                .is_ok_and(|served| served.contains(&first))
    })?;
    cell.remove(first..first + 1)?;
    wait_until("its pin to go", Duration::from_secs(120), || {
        gated.bpffs.links().is_empty()
    })
}

/// Creates a block of containers; containers created so far that have not sent queries yet send them
/// meanwhile if the server runs.
fn create_block(
    cell: &Cell<'_>,
    gated: &Gated,
    numbers: Range<usize>,
    asked: &mut usize,
    with_server: bool,
) -> Result<Vec<Duration>> {
    let query = query()?;
    gated.server.signal_all(if with_server {
        Signal::SIGCONT
    } else {
        Signal::SIGSTOP
    })?;
    let (over, created) = (AtomicBool::new(false), AtomicUsize::new(numbers.start));
    let first = *asked;
    let took = thread::scope(|scope| -> Result<Vec<Duration>> {
        let asking = scope.spawn(|| -> Result<()> {
            while with_server && !over.load(Ordering::Relaxed) {
                for number in first..created.load(Ordering::Relaxed) {
                    cell.ask(number, &query, 1, TIMEOUT)?;
                }
                thread::sleep(Duration::from_millis(20));
            }
            Ok(())
        });
        let mut took = Vec::new();
        let done = numbers.clone().try_for_each(|number| {
            let begun = Instant::now();
            cell.create(number)?;
            took.push(begun.elapsed());
            created.store(number + 1, Ordering::Relaxed);
            thread::sleep(BETWEEN.saturating_sub(begun.elapsed()));
            Ok(())
        });
        over.store(true, Ordering::Relaxed);
        asking.join().expect("no panic")?;
        done.map(|()| took)
    });
    if with_server {
        *asked = numbers.end;
    }
    gated.server.signal_all(Signal::SIGCONT)?;
    took
}

/// Creates a block with the server and one without, each first every other time, because the rules grow. Adds the times
/// without it, and with it.
fn create_pair(
    cell: &Cell<'_>,
    gated: &Gated,
    pair: usize,
    first: usize,
    asked: &mut usize,
    took: &mut [Vec<Duration>; 2],
) -> Result<()> {
    for turn in 0..2 {
        let with_server = (pair + turn).is_multiple_of(2);
        let start = first + turn * BLOCK;
        let block = create_block(cell, gated, start..start + BLOCK, asked, with_server)?;
        took[usize::from(with_server)].extend(block);
    }
    Ok(())
}

/// Returns the value below which a share of the sorted values lies, in percent.
fn at(sorted: &[Duration], share: usize) -> Duration {
    sorted[(sorted.len() - 1) * share / 100]
}

#[test]
fn containers_are_created_undisturbed() -> Result<()> {
    requires!(namespaces, bpf);
    let ground = Ground::new("cell")?;
    let cell = ground.cell()?;
    let gated = Gated::start(&ground.host)?;
    serve_first(&ground, &cell, &gated)?;
    let (descriptors_before, _) = descriptors(&gated)?;

    wait_until("the attacher's work to be known", TIMEOUT * 10, || {
        operations(&ground.host).is_ok_and(|done| done["attach"].0 > 0)
    })?;
    thread::sleep(REPORTED * 2);
    let begun_at = (operations(&ground.host)?, Instant::now());
    let mut took = [Vec::new(), Vec::new()];
    let mut asked = 0;
    for pair in 0..BLOCKS {
        create_pair(&cell, &gated, pair, pair * 2 * BLOCK, &mut asked, &mut took)?;
    }
    // The time is the machine's. What could disturb others is counted below.
    for (took, label) in took.iter_mut().zip(["without", "with"]) {
        took.sort_unstable();
        println!(
            "creation of a container {label} the server: {:?} (median), {:?} (99 %)",
            at(took, 50),
            at(took, 99)
        );
    }

    // Every container is served once it queries, in spite of its bandwidth limit.
    let query = query()?;
    let begun = Instant::now();
    for number in 0..CONTAINERS {
        ensure!(
            cell.ask(number, &query, 6, TIMEOUT)? == 6,
            "{number}: {}",
            gated.server.log()
        );
    }
    wait_until("every container to be served", ALL_ATTACHED, || {
        thread::sleep(Duration::from_millis(500));
        ground
            .served(&gated)
            .is_ok_and(|served| served.len() == CONTAINERS)
    })
    .with_context(|| format!("{:?}", gated.states(&ground.host)))?;
    println!("all served after {:?}", begun.elapsed());
    wait_until(
        "a link for each container, and no other",
        Duration::from_secs(120),
        || {
            descriptors(&gated).is_ok_and(|(_, links)| links == CONTAINERS)
                && gated.bpffs.links().len() == CONTAINERS
        },
    )
    .with_context(|| format!("{:?}, {:?}", descriptors(&gated), gated.bpffs.links()))?;
    attaches_pause(&gated.server.log())?;
    creations_are_followed(&ground, &gated, begun_at)?;

    // Only interfaces that queries arrive through are attached to: neither the uplink, the overlay
    // nor the ifb of the bandwidth plugin.
    let states = gated.states(&ground.host)?;
    let needless =
        |name: &String| name.starts_with("ifb") || OTHER_INTERFACES.contains(&name.as_str());
    ensure!(!states.keys().any(needless), "{states:?}");

    // Every container is counted separately.
    let before = Metrics::read(&ground.host)?;
    let times = |number: usize| 4 + 3 * (number % 7);
    for number in 0..CONTAINERS {
        ensure!(cell.ask(number, &query, times(number), TIMEOUT)? == times(number));
    }
    let after = Metrics::read(&ground.host)?;
    let mut probes = after.probes() - before.probes();
    for number in 0..CONTAINERS {
        let given = Ground::replies(&after, number) - Ground::replies(&before, number);
        let times = times(number) as u64;
        let missing = times
            .checked_sub(given)
            .context("more replies than queries")?;
        let excused = missing <= probes;
        probes = probes.saturating_sub(missing);
        ensure!(
            excused,
            "{number}: {given} of {times}: {:?}\n{:?}\n{}",
            after.outcomes_since(&before),
            ground.states(&gated)?.get(&number),
            gated.server.log()
        );
    }

    // Containers are removed while others are created; nothing remains of them.
    cell.remove(0..CONTAINERS / 2)?;
    for number in CONTAINERS..CONTAINERS + BLOCK {
        cell.create(number)?;
        cell.wait_for_link(number)?;
        ensure!(cell.ask(number, &query, 6, TIMEOUT)? == 6);
        cell.remove(number..number + 1)?;
    }
    cell.remove(CONTAINERS / 2..CONTAINERS)?;
    wait_until(
        "pins and descriptors to go with their interfaces",
        Duration::from_secs(120),
        || {
            gated.bpffs.links().is_empty()
                && descriptors(&gated)
                    .is_ok_and(|(all, links)| links == 0 && all <= descriptors_before + OTHERS)
        },
    )
    .with_context(|| {
        format!(
            "{:?}, {:?} after {descriptors_before}",
            gated.bpffs.links(),
            descriptors(&gated)
        )
    })?;
    Ok(())
}

/// Checks what the attacher has done since `begun` about containers that were created: one attach each, and no list of all
/// interfaces for any of them. The kernel's reports are followed instead.
fn creations_are_followed(
    ground: &Ground,
    gated: &Gated,
    (before, begun): (BTreeMap<&'static str, (u64, u64)>, Instant),
) -> Result<()> {
    thread::sleep(REPORTED * 2);
    let after = operations(&ground.host)?;
    let rounds = begun.elapsed().as_secs() / 10 + 1;
    println!("since the first container: {before:?}, {after:?}");
    for (operation, most) in [
        ("links", rounds),
        ("addresses", rounds),
        ("routes", rounds),
        ("attach", CONTAINERS as u64),
    ] {
        let done = after[operation].0 - before[operation].0;
        ensure!(
            done <= most,
            "{operation}: {done}, at most {most}\n{}",
            gated.server.log()
        );
    }
    Ok(())
}

/// Checks that the RTNL lock is left to others between attaches, a fifth of the time at least.
fn attaches_pause(log: &str) -> Result<()> {
    let mut attached = Vec::new();
    for line in log.lines().filter(|line| line.contains("program attached")) {
        let took = line
            .split("took_us=")
            .nth(1)
            .context("the time that it took")?;
        let took = Duration::from_micros(took.split(' ').next().unwrap_or_default().parse()?);
        attached.push((time_of_day(line)?, took));
    }
    ensure!(attached.len() >= CONTAINERS, "{} lines", attached.len());
    // A line is written some time after its attach on a busy machine, so the sums are compared.
    let (mut paused, mut least) = (Duration::ZERO, Duration::ZERO);
    for pair in attached.windows(2) {
        let [(before, took), (after, took_next)] = pair else {
            continue;
        };
        // At midnight the time of day restarts.
        if after >= before {
            paused += after.saturating_sub(*before).saturating_sub(*took_next);
            least += (*took / 4).min(Duration::from_secs(1));
        }
    }
    let held: Duration = attached.iter().map(|(_, took)| *took).sum();
    println!(
        "{} attaches took {held:?} in all, with pauses of {paused:?}",
        attached.len()
    );
    ensure!(
        paused * 100 >= least * 99,
        "pauses of {paused:?} instead of {least:?}"
    );
    Ok(())
}

/// Number of containers for the tests without tcx.
const FEW: usize = 10;

#[test]
fn bandwidth_plugin_succeeds_without_tcx() -> Result<()> {
    requires!(namespaces, bpf);
    let ground = Ground::new("plugin")?;
    let cell = ground.cell()?;
    let gated = Gated::start_prepared(&ground.host, &json!({}), refuse_tcx)?;
    let query = query()?;
    let state = |number: usize| -> Result<State> {
        Ok(ground.states(&gated)?.remove(&number).unwrap_or_default())
    };

    // Queries count once the attacher follows them.
    let asks_and_waits = |number: usize| {
        let is_answered = cell
            .ask(number, &query, 8, TIMEOUT)
            .is_ok_and(|replies| replies == 8);
        is_answered
            && state(number)
                .is_ok_and(|state| state.state == "waiting" && state.why.contains("ingress"))
    };

    // The worst case: containers query, and are found worth serving, before the plugin is run. One
    // after the other: an interface that nothing changes for 20 s gets the attacher's own qdisc.
    for number in 0..FEW / 2 {
        cell.connect(number..number + 1)?;
        wait_until("the interface to wait", Duration::from_secs(120), || {
            asks_and_waits(number)
        })
        .with_context(|| format!("{:?}", gated.states(&ground.host)))?;
        // A limit, which must not fail.
        cell.limit(number)?;
    }
    cell.connect(FEW / 2..FEW)?;
    // A foreign clsact, as a network plugin adds it.
    let mut tc = ground.host.command("tc")?;
    capture(tc.args(["qdisc", "add", "dev", &Cell::interface(FEW - 1), "clsact"]))?;
    wait_until(
        "the other interfaces to wait",
        Duration::from_secs(120),
        || {
            // On a slow machine the first ones may be served already.
            (FEW / 2..FEW).all(|number| {
                asks_and_waits(number) || state(number).is_ok_and(|state| state.state == "served")
            })
        },
    )
    .with_context(|| format!("{:?}", gated.states(&ground.host)))?;
    wait_until(
        "the clsact that exists to be used",
        Duration::from_secs(120),
        || state(FEW - 1).is_ok_and(|state| state.hook == "clsact"),
    )
    .with_context(|| format!("{:?}", gated.states(&ground.host)))?;

    // Interfaces with a limit stay untouched; the others are served once they have been quiet.
    wait_until(
        "the interfaces to be decided",
        Duration::from_secs(120),
        || {
            thread::sleep(Duration::from_millis(200));
            (0..FEW).all(|number| {
                let wanted = if number < FEW / 2 {
                    ("refused", "none")
                } else {
                    ("served", "clsact")
                };
                state(number)
                    .is_ok_and(|state| (state.state.as_str(), state.hook.as_str()) == wanted)
            })
        },
    )
    .with_context(|| format!("{:?}\n{}", gated.states(&ground.host), gated.server.log()))?;
    ensure!(state(0)?.why.contains("ingress"), "{:?}", state(0)?);
    let before = Metrics::read(&ground.host)?;
    for number in 0..FEW {
        ensure!(cell.ask(number, &query, 8, TIMEOUT)? == 8, "{number}");
    }
    let after = Metrics::read(&ground.host)?;
    let mut total = after.probes() - before.probes();
    for number in 0..FEW {
        let given = Ground::replies(&after, number) - Ground::replies(&before, number);
        ensure!(
            given == 0 || number >= FEW / 2,
            "{number}: {given} replies from the interface"
        );
        total += given;
    }
    ensure!(
        total == 8 * (FEW as u64).div_ceil(2),
        "{total}: {:?}",
        after.outcomes_since(&before)
    );

    // The stop removes only what the server added.
    let mut gated = gated;
    gated.server.process().stop(Duration::from_secs(120))?;
    let mut tc = ground.host.command("tc")?;
    let left = capture(tc.args(["qdisc", "show"]))?;
    let of = |kind: &str| {
        left.lines()
            .filter(|line| line.starts_with(&format!("qdisc {kind} ")))
            .count()
    };
    ensure!((of("clsact"), of("ingress")) == (1, FEW / 2), "{left}");
    Ok(())
}

/// Containers of a large cell.
const LARGE: usize = 250;

/// Containers that come and go meanwhile.
const CHURN: usize = 40;

/// Time limit for the attaches to all containers, many times what they take on a quiet machine.
const SERVED_AT_ONCE: Duration = Duration::from_secs(180);

/// Lets containers query, each six times, and waits until all are served.
fn serve_all(ground: &Ground, cell: &Cell<'_>, gated: &Gated, containers: usize) -> Result<Asked> {
    let asked = cell
        .ask_enough(0..containers, &query()?, TIMEOUT)
        .with_context(|| gated.server.log())?;
    wait_until("every container to be served", SERVED_AT_ONCE, || {
        thread::sleep(Duration::from_millis(200));
        ground
            .served(gated)
            .is_ok_and(|served| (0..containers).all(|number| served.contains(&number)))
    })
    .with_context(|| format!("{:?}", ground.states(gated)))?;
    Ok(asked)
}

/// Prints how long after its last query each container got its program, and how long the attaches took; returns
/// the number of filters.
fn report_attaches(gated: &Gated, start: usize, asked: &Asked) -> Result<usize> {
    let Attaches {
        delays,
        took,
        filters,
    } = Attaches::read(&gated.server.log(), start, asked)?;
    println!(
        "{} containers, {filters} by clsact: served after {:?} (median), {:?} (90 %), {:?} (all); \
         an attach took {:?} (median), {:?} (99 %), {:?} in all",
        asked.len(),
        at(&delays, 50),
        at(&delays, 90),
        at(&delays, 100),
        at(&took, 50),
        at(&took, 99),
        took.iter().sum::<Duration>(),
    );
    Ok(filters)
}

/// Busy interfaces of a very large machine.
const HUGE: usize = 500;

#[test]
fn five_hundred_interfaces_are_served_at_once() -> Result<()> {
    requires!(namespaces, bpf);
    let ground = Ground::new("huge")?;
    let cell = ground.cell()?;
    let gated = Gated::start(&ground.host)?;
    serve_first(&ground, &cell, &gated)?;
    cell.connect(0..HUGE)?;
    let lines: Vec<String> = (0..HUGE / 2)
        .map(|number| format!("qdisc add dev {} ingress", Cell::interface(number)))
        .collect();
    feed(&ground.host, &["tc", "-batch", "-"], &lines.join("\n"))?;
    wait_for_grace();
    let start = gated.server.log().lines().count();
    let asked = serve_all(&ground, &cell, &gated, HUGE)?;
    let filters = report_attaches(&gated, start, &asked)?;
    ensure!(filters == 0, "{filters} of {HUGE} have a filter");
    // Adding one would make the interface lose what it sends meanwhile.
    let qdiscs = capture(ground.host.command("tc")?.args(["qdisc", "show"]))?;
    ensure!(!qdiscs.contains("clsact"), "{qdiscs}");
    Ok(())
}

#[test]
fn busy_cell_is_served_at_once() -> Result<()> {
    requires!(namespaces, bpf);
    let ground = Ground::new("large")?;
    let cell = ground.cell()?;
    let gated = Gated::start(&ground.host)?;
    serve_first(&ground, &cell, &gated)?;
    cell.connect(0..LARGE)?;
    cell.permit(0..LARGE)?;
    wait_for_grace();
    let (start, done) = (gated.server.log().lines().count(), AtomicBool::new(false));
    let asked = thread::scope(|scope| -> Result<Asked> {
        let (cell, done) = (&cell, &done);
        let churn = scope.spawn(move || -> Result<()> {
            for number in (LARGE..LARGE + CHURN)
                .cycle()
                .take_while(|_| !done.load(Ordering::Relaxed))
            {
                let begun = Instant::now();
                cell.connect(number..number + 1)?;
                cell.remove(number..number + 1)?;
                thread::sleep(Duration::from_millis(100).saturating_sub(begun.elapsed()));
            }
            Ok(())
        });
        let asked = serve_all(&ground, cell, &gated, LARGE);
        done.store(true, Ordering::Relaxed);
        churn.join().expect("no panic")?;
        asked
    })?;
    let filters = report_attaches(&gated, start, &asked)?;
    ensure!(filters == 0, "{filters} of {LARGE} have a filter");
    let qdiscs = capture(ground.host.command("tc")?.args(["qdisc", "show"]))?;
    ensure!(!qdiscs.contains("clsact"), "{qdiscs}");
    Ok(())
}

/// Containers of each rate at which they are created.
const HURRIED: usize = 60;

/// How long each of them lives.
const LIFE: Duration = Duration::from_secs(5);

/// Creates containers at a rate, lets each ask ten times a second while it lives, and removes it. Returns how many were
/// served meanwhile.
fn hurry(cell: &Cell<'_>, gated: &Gated, first: usize, interval: Duration) -> Result<usize> {
    let query = query()?;
    let begun = Instant::now();
    let created = AtomicUsize::new(0);
    let removed = AtomicUsize::new(0);
    thread::scope(|scope| -> Result<()> {
        let asking = scope.spawn(|| -> Result<()> {
            let mut sockets = Vec::new();
            while removed.load(Ordering::Relaxed) < HURRIED {
                for number in sockets.len()..created.load(Ordering::Relaxed) {
                    match cell.socket(first + number, TIMEOUT) {
                        Ok(socket) => sockets.push(Some(socket)),
                        // A busy machine came too late.
                        Err(_) if removed.load(Ordering::Relaxed) > number => sockets.push(None),
                        Err(error) => return Err(error),
                    }
                }
                for socket in sockets
                    .iter()
                    .skip(removed.load(Ordering::Relaxed))
                    .flatten()
                {
                    // Its interface may just be removed. Nobody reads the replies.
                    let _ = socket.send(&query);
                }
                thread::sleep(Duration::from_millis(100));
            }
            Ok(())
        });
        let removing = scope.spawn(|| -> Result<()> {
            for number in 0..HURRIED {
                thread::sleep((interval * number as u32 + LIFE).saturating_sub(begun.elapsed()));
                while created.load(Ordering::Relaxed) <= number {
                    thread::sleep(interval);
                }
                removed.store(number + 1, Ordering::Relaxed);
                cell.remove(first + number..first + number + 1)?;
            }
            Ok(())
        });
        for number in 0..HURRIED {
            thread::sleep((interval * number as u32).saturating_sub(begun.elapsed()));
            cell.create(first + number)?;
            created.store(number + 1, Ordering::Relaxed);
        }
        removing.join().expect("no panic")?;
        asking.join().expect("no panic")
    })?;
    let log = gated.server.log();
    let is_served = |number: &usize| {
        let name = format!("interface={} ", Cell::interface(first + number));
        log.lines()
            .any(|line| line.contains("program attached") && line.contains(&name))
    };
    Ok((0..HURRIED).filter(is_served).count())
}

#[test]
fn short_lived_containers_take_one_attach_each() -> Result<()> {
    requires!(namespaces, bpf);
    let ground = Ground::new("hurry")?;
    let cell = ground.cell()?;
    let gated = Gated::start(&ground.host)?;
    serve_first(&ground, &cell, &gated)?;
    wait_until("the attacher's work to be known", TIMEOUT * 10, || {
        operations(&ground.host).is_ok_and(|done| done["attach"].0 > 0)
    })?;
    for (turn, rate) in [10, 25, 50].into_iter().enumerate() {
        thread::sleep(REPORTED * 2);
        let (before, begun) = (operations(&ground.host)?, Instant::now());
        let first = 1000 + turn * HURRIED;
        let served = hurry(&cell, &gated, first, Duration::from_secs(1) / rate)?;
        thread::sleep(REPORTED * 2);
        let after = operations(&ground.host)?;
        let rounds = begun.elapsed().as_secs() / 10 + 1;
        println!(
            "{rate} containers per second: {served} of {HURRIED} served while they live: {before:?}, {after:?}"
        );
        for (operation, most) in [("attach", HURRIED as u64), ("links", rounds)] {
            let done = after[operation].0 - before[operation].0;
            ensure!(
                done <= most,
                "{rate}/s: {operation}: {done}, at most {most}\n{}",
                gated.server.log()
            );
        }
    }
    Ok(())
}

/// Interval of the queries of a container that asks rarely.
const RARELY: Duration = Duration::from_millis(500);

/// Queries of such a container that open its interface.
const OPENING_QUERIES: usize = 5;

/// Maximum number of queries of such a container: those of five minutes.
const RARE_QUERIES: usize = 600;

/// Lets containers ask every [`RARELY`], evenly spread, until `done` is set; returns when each had sent its fifth query.
fn ask_rarely(cell: &Cell<'_>, query: &[u8], done: &AtomicBool) -> Result<Vec<Instant>> {
    let sockets: Vec<Socket> = (0..LARGE)
        .map(|number| cell.socket(number, TIMEOUT))
        .collect::<Result<_>>()?;
    let begun = Instant::now();
    let mut fifth = vec![begun; LARGE];
    for round in 0..RARE_QUERIES {
        if round >= OPENING_QUERIES && done.load(Ordering::Relaxed) {
            break;
        }
        for (number, socket) in sockets.iter().enumerate() {
            let due = RARELY * round as u32 + RARELY * number as u32 / LARGE as u32;
            thread::sleep(due.saturating_sub(begun.elapsed()));
            socket.send(query)?;
            if round == OPENING_QUERIES - 1 {
                fifth[number] = Instant::now();
            }
        }
    }
    Ok(fifth)
}

#[test]
fn rarely_asking_containers_are_served() -> Result<()> {
    requires!(namespaces, bpf);
    let ground = Ground::new("rare")?;
    let cell = ground.cell()?;
    let gated = Gated::start(&ground.host)?;
    serve_first(&ground, &cell, &gated)?;
    cell.connect(0..LARGE)?;
    cell.permit(0..LARGE)?;
    wait_for_grace();
    let before = operations(&ground.host)?;
    let query = query()?;
    let mut first: Vec<Option<Instant>> = vec![None; LARGE];
    let done = AtomicBool::new(false);
    let fifth = thread::scope(|scope| -> Result<Vec<Instant>> {
        let asking = scope.spawn(|| ask_rarely(&cell, &query, &done));
        while !asking.is_finished() {
            let (metrics, now) = (Metrics::read(&ground.host)?, Instant::now());
            for (number, first) in first.iter_mut().enumerate() {
                if first.is_none() && Ground::replies(&metrics, number) > 0 {
                    *first = Some(now);
                }
            }
            done.store(first.iter().all(Option::is_some), Ordering::Relaxed);
            thread::sleep(Duration::from_millis(100));
        }
        asking.join().expect("no panic")
    })?;
    let mut delays = Vec::new();
    for (number, (first, fifth)) in first.iter().zip(&fifth).enumerate() {
        let first = first.with_context(|| {
            format!(
                "{number} is not served: {:?}\n{}",
                ground.states(&gated),
                gated.server.log()
            )
        })?;
        delays.push(first.saturating_duration_since(*fifth));
    }
    delays.sort_unstable();
    println!(
        "answered by the interface after the fifth query: {:?} (median), {:?} (90 %), {:?} (all): {before:?}, {:?}",
        at(&delays, 50),
        at(&delays, 90),
        at(&delays, 100),
        operations(&ground.host)?
    );
    Ok(())
}

/// More interfaces than any table by interface index used to hold.
const MANY: usize = 300;

#[test]
fn many_interfaces_are_served_and_counted() -> Result<()> {
    requires!(namespaces, bpf);
    let ground = Ground::new("many")?;
    let cell = ground.cell()?;
    cell.connect(0..MANY)?;
    cell.permit(0..MANY)?;
    let query = query()?;
    let all: Vec<String> = (0..MANY).map(Cell::interface).collect();
    let xdp = json!({"mode": "tc", "interfaces": all});
    let gated = Gated::start_prepared(&ground.host, &xdp, |_| {})?;
    wait_until("all to be served", ALL_ATTACHED, || {
        thread::sleep(Duration::from_millis(300));
        ground.states(&gated).is_ok_and(|states| {
            states.len() == MANY && states.values().all(|state| state.state == "served")
        })
    })?;
    whole_system_tests::metrics::wait_for_fast_path(&ground.host)?;
    let before = Metrics::read(&ground.host)?;
    let asking = [0, 1, 127, 128, 255, 256, 257, MANY - 1];
    for number in asking {
        ensure!(cell.ask(number, &query, 20, TIMEOUT)? == 20);
    }
    let after = Metrics::read(&ground.host)?;
    let mut total = after.probes() - before.probes();
    for number in 0..MANY {
        let given = Ground::replies(&after, number) - Ground::replies(&before, number);
        let most = if asking.contains(&number) { 20 } else { 0 };
        ensure!(given <= most, "{given} replies from {number}, not {most}");
        total += given;
    }
    ensure!(
        total == 20 * asking.len() as u64,
        "{:?}",
        after.outcomes_since(&before)
    );
    gate_is_cheap(&ground, &cell, &gated, &query)?;
    Ok(())
}

/// How often the attacher reports its work.
const REPORTED: Duration = Duration::from_secs(2);

/// Operations of the attacher and their microseconds, by the metrics' labels.
fn operations(host: &Namespace) -> Result<BTreeMap<&'static str, (u64, u64)>> {
    const LABELS: [&str; 10] = [
        "round",
        "links",
        "addresses",
        "routes",
        "route",
        "filters",
        "attach",
        "detach",
        "rules",
        "walk",
    ];
    let metrics = Metrics::read(host)?;
    let mut operations = BTreeMap::new();
    for operation in LABELS {
        let label = format!("operation=\"{operation}\"");
        let times = metrics.sum(names::FAST_PATH_ATTACHER_OPERATIONS_TOTAL, &label);
        let us = metrics.sum(names::FAST_PATH_ATTACHER_MICROSECONDS_TOTAL, &label);
        operations.insert(operation, (times, us));
    }
    Ok(operations)
}

/// Counts what the attacher does while containers query and nothing else happens. CPU time would depend on the machine;
/// these numbers do not, and grow with time at most as fast as stated here.
fn gate_is_cheap(ground: &Ground, cell: &Cell<'_>, gated: &Gated, query: &[u8]) -> Result<()> {
    // Everybody has asked once, so that no client is new.
    for number in 0..MANY {
        cell.ask(number, query, 1, TIMEOUT)?;
    }
    thread::sleep(REPORTED * 2);
    let (before, begun) = (operations(&ground.host)?, Instant::now());
    // Longer than its round over all interfaces (10 s).
    for round in 0..150 {
        for number in (0..MANY).skip(round % 6).step_by(6) {
            cell.ask(number, query, 1, TIMEOUT)?;
        }
        thread::sleep(Duration::from_millis(80));
    }
    let after = operations(&ground.host)?;
    let seconds = (begun.elapsed() + REPORTED).as_secs() + 1;
    let done = |operation: &str| after[operation].0 - before[operation].0;
    let took: u64 = after
        .iter()
        .map(|(operation, (_, us))| us - before[operation].1)
        .sum();
    println!(
        "{MANY} interfaces for {seconds} s: {} rounds, {took} µs in operations: {before:?}, {after:?}",
        done("round")
    );
    let listings = seconds / 10 + 1;
    let most = [
        // The report of the server, the tick, each four times a second, and the reply to a change of status.
        ("round", 12 * seconds),
        ("links", listings),
        ("addresses", listings),
        ("routes", listings),
        // Each client's, once.
        ("route", MANY as u64),
        // Each filter is looked for once in ten seconds; a tcx link needs no such request.
        ("filters", listings * MANY as u64),
        ("attach", 0),
        ("detach", 0),
        ("rules", seconds / 2 + 1),
        // The rules have not changed, so a client takes one walk at most.
        ("walk", MANY as u64),
    ];
    for (operation, most) in most {
        ensure!(
            done(operation) <= most,
            "{operation}: {} in {seconds} s, at most {most}\n{}",
            done(operation),
            gated.server.log()
        );
    }
    Ok(())
}

/// Limit of open files of a service without `LimitNOFILE`.
const USUAL_LIMIT: u64 = 1024;

/// More interfaces than such a service may have descriptors.
const TOO_MANY: usize = 800;

#[test]
fn descriptors_remain_for_sockets() -> Result<()> {
    requires!(namespaces, bpf);
    let ground = Ground::new("fds")?;
    let cell = ground.cell()?;
    cell.connect(0..TOO_MANY)?;
    let all: Vec<String> = (0..TOO_MANY).map(Cell::interface).collect();
    let gated = Gated::start_prepared(&ground.host, &json!({"interfaces": all}), |command| {
        // SAFETY: a plain system call, allowed between fork and exec.
        unsafe {
            command.pre_exec(|| {
                Ok(setrlimit(
                    Resource::RLIMIT_NOFILE,
                    USUAL_LIMIT,
                    USUAL_LIMIT,
                )?)
            });
        }
    })?;
    wait_until("all to be decided", ALL_ATTACHED, || {
        thread::sleep(Duration::from_millis(500));
        ground.states(&gated).is_ok_and(|states| {
            states.len() == TOO_MANY && states.values().all(|state| state.state != "waiting")
        })
    })
    .with_context(|| gated.server.log())?;
    let states = ground.states(&gated)?;
    let served = states
        .values()
        .filter(|state| state.state == "served")
        .count();
    ensure!(served == 768, "{served} served");
    let refused = states
        .values()
        .find(|state| state.state == "refused")
        .context("one is refused")?;
    ensure!(refused.why.contains("LimitNOFILE"), "{}", refused.why);
    // Clients of TCP, metrics and containers without a program are answered as ever.
    let message = client::query(NAME, RecordType::A, None)?;
    for _ in 0..3 {
        let connections = ground.host.run(|| {
            let open: std::io::Result<Vec<_>> = (0..100)
                .map(|_| std::net::TcpStream::connect(v4()))
                .collect();
            open.map(|open| (open, client::ask_tcp(v4(), &message)))
        })??;
        ensure!(client::addresses(&connections.1?).len() == 3);
        Metrics::read(&ground.host)?;
    }
    let query = query()?;
    for number in [0, TOO_MANY - 1] {
        ensure!(cell.ask(number, &query, 10, TIMEOUT)? == 10, "{number}");
    }
    Ok(())
}

/// Queries of a new container, one every five milliseconds.
const EARLY: usize = 200;

#[test]
fn new_containers_lose_no_queries() -> Result<()> {
    requires!(namespaces, bpf);
    let query = query()?;
    let grounds = [Ground::new("early")?, Ground::new("early-off")?];
    let cells = [grounds[0].cell()?, grounds[1].cell()?];
    let gated = Gated::start(&grounds[0].host)?;
    let off = Gated::start_prepared(&grounds[1].host, &json!({"mode": "off"}), |_| {})?;
    let mut lost = [0_usize; 2];
    for number in 0..FEW {
        for (cell, lost) in cells.iter().zip(&mut lost) {
            cell.connect(number..number + 1)?;
            cell.wait_for_link(number)?;
            let socket = cell.socket(number, TIMEOUT)?;
            let mut answered = 0;
            let receive = || {
                socket
                    .recv(&mut [std::mem::MaybeUninit::uninit(); 512])
                    .is_ok()
            };
            // Read as they come: the buffer of the socket has no room for all replies.
            socket.set_nonblocking(true)?;
            for _ in 0..EARLY {
                socket.send(&query)?;
                thread::sleep(Duration::from_millis(5));
                while receive() {
                    answered += 1;
                }
            }
            socket.set_nonblocking(false)?;
            while answered < EARLY && receive() {
                answered += 1;
            }
            *lost += EARLY - answered;
        }
    }
    println!(
        "lost with the fast path, and without: {lost:?} of {}",
        FEW * EARLY
    );
    // Both counts vary by chance; their difference exceeds four standard deviations only by a defect.
    let deviation = ((lost[0] + lost[1] + 1) as f64).sqrt();
    ensure!(
        lost[0] as f64 <= lost[1] as f64 + 4.0 * deviation,
        "{lost:?}\n{}",
        gated.server.log()
    );
    let hits = Metrics::read(&grounds[0].host)?.fast_path_replies();
    ensure!(
        hits > 0,
        "the interfaces answered: {:?}",
        gated.states(&grounds[0].host)?
    );
    drop(off);
    Ok(())
}
