//! One core of the server: the rate at which it is saturated, the CPU time of a query, and latency.
//!
//! The generator offers more than the server's core can serve, so the core never sleeps and always
//! finds the next packet. All subjects are in the same regime, and the cost of wake-ups does not
//! distort the cost of a query.

use std::{
    fs,
    net::Ipv4Addr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use bosh_dns_xdp_benches::{
    figures::quoted,
    foundation::Foundation,
    generator::Load,
    lab::{CLIENT_CPU, Lab},
    report::{Rounds, number},
};
use whole_system_tests::{cpu::on_cpu, interrupt, metrics::Metrics};

use crate::{
    Plan,
    part::{Order, Selection, Setting, Table},
    subject::{Cell, Running, Subject},
};

/// Size of the foundation for the comparison of subjects.
const INSTANCES: usize = 1_000;
/// Measured duration of one turn.
///
/// A shared machine may be slower for seconds at a time (observed: by up to four fifths). Turns
/// shorter than that spread such disturbances over all subjects, and leave each of them some undisturbed
/// turns. An idle server costs nothing meanwhile. The memory addresses of a subject depend on its
/// start (observed: up to 15 % between two starts of a reflector), so all restart in each round.
const TURN: Duration = Duration::from_millis(250);
/// Pause after the first load of few among many names. The publisher examines the use of names 1, 3
/// and 7 seconds after new records.
const SETTLED: Duration = Duration::from_secs(8);

/// Rates of all subjects.
pub(crate) fn saturated(plan: &Plan, subjects: &[Subject], table: &mut Table) -> Result<()> {
    extras(plan, subjects, table)?;
    if plan.reference.is_none() && plan.wanted.is_empty() {
        let label = format!("bosh-dns (quoted: measured {})", quoted::SATURATED_ON);
        table.put(
            &label,
            0,
            &[Rounds(vec![quoted::SATURATED]), Rounds::default()],
        );
    }
    Ok(())
}

/// Rates with features that are off by default.
pub(crate) fn extras(plan: &Plan, subjects: &[Subject], table: &mut Table) -> Result<()> {
    let setting = Setting::new(INSTANCES, Selection::Shared, &[Order::Random])?;
    measure_alternately(plan, subjects, &setting, 0, table)
}

/// Forms of a load: the label, and what differs from the load of the comparison of subjects.
const FORMS: [(&str, Form); 5] = [
    ("IPv4", Form::Usual),
    ("IPv6", Form::Ipv6),
    ("EDNS", Form::Edns),
    ("frames like sockets'", Form::SmallTailroom),
    ("five changes of records/s", Form::Changes),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Usual,
    Ipv6,
    /// An OPT of the size that resolvers have used since 2020.
    Edns,
    /// As little room behind each frame as behind a socket's.
    SmallTailroom,
    /// One of all instances changes its address each time.
    Changes,
}

pub(crate) fn points_of_forms(_: &Plan) -> Vec<String> {
    FORMS.map(|(label, _)| label.to_owned()).to_vec()
}

/// Rates by form of the load.
pub(crate) fn forms(plan: &Plan, subjects: &[Subject], table: &mut Table) -> Result<()> {
    for (point, (_, form)) in FORMS.into_iter().enumerate() {
        let mut setting = Setting::new(INSTANCES, Selection::Shared, &[Order::Random])?;
        let mut subjects = subjects.to_vec();
        match form {
            Form::Usual => {}
            Form::Ipv6 => setting.lab = || Lab::split()?.over_ipv6(),
            Form::Edns => setting
                .queries
                .iter_mut()
                .for_each(|queries| queries.edns = Some(1232)),
            Form::SmallTailroom => setting.lab = || Ok(Lab::split()?.with_small_tailroom()),
            Form::Changes => {
                let mut changed = Foundation::generate(INSTANCES)?;
                changed.recreate_one(Ipv4Addr::new(10, 255, 255, 1))?;
                setting.changes = vec![changed.records, setting.foundation.records.clone()];
                subjects.retain(|subject| subject.mode().is_some());
            }
        }
        measure_alternately(plan, &subjects, &setting, point, table)?;
    }
    Ok(())
}

/// Replaces the server's records.json while `work` runs; also returns how many were read per second.
fn while_changing<T>(
    cell: &Cell<'_>,
    changes: &[Vec<u8>],
    work: impl FnOnce() -> Result<T>,
) -> Result<(T, Rounds)> {
    /// Pause between two changes.
    const BETWEEN: Duration = Duration::from_millis(200);
    if changes.is_empty() {
        return Ok((work()?, Rounds::default()));
    }
    let Running::Server(server) = &cell.running else {
        bail!("peers have no records.json")
    };
    let file = server.folder.path().join("records.json");
    let next = file.with_extension("next");
    // Written once: a rename of new data waits for the disk, whose driver takes time from the load's CPU.
    let versions: Vec<_> = (0..changes.len())
        .map(|number| file.with_extension(number.to_string()))
        .collect();
    for (version, records) in versions.iter().zip(changes) {
        if !version.exists() {
            fs::write(version, records)?;
        }
    }
    let read = || -> Result<u64> {
        Ok(Metrics::read(&cell.lab.server)?.sum("bosh_dns_xdp_reloads_total", "kind=\"records\""))
    };
    let before = read()?;
    let started = Instant::now();
    let is_over = AtomicBool::new(false);
    let change = || -> Result<()> {
        for version in versions
            .iter()
            .cycle()
            .take_while(|_| !is_over.load(Ordering::Relaxed))
        {
            fs::hard_link(version, &next)?;
            fs::rename(&next, &file)?;
            // A link to the file that is in place already stays beside it.
            if next.exists() {
                fs::remove_file(&next)?;
            }
            thread::sleep(BETWEEN);
        }
        Ok(())
    };
    let seen = thread::scope(|scope| {
        // Beside the generator: the server's core must have no other work than the server's.
        let changing = scope.spawn(|| on_cpu(CLIENT_CPU, change));
        let seen = work();
        // Also after an error, or the scope would wait for the thread forever.
        is_over.store(true, Ordering::Relaxed);
        changing
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        seen
    });
    let rate = (read()? - before) as f64 / started.elapsed().as_secs_f64();
    Ok((seen?, Rounds(vec![rate])))
}

/// Sizes of the foundation, all of whose names are queried.
pub(crate) fn sizes(plan: &Plan) -> Vec<(usize, usize)> {
    let shape = |size: usize| (size, size);
    plan.pick(
        &[1_000, 100_000].map(shape),
        &[1_000, 10_000, 100_000].map(shape),
    )
}

/// Sizes of the foundation, and how many of its names are queried: all, or few of many.
pub(crate) fn shapes(plan: &Plan) -> Vec<(usize, usize)> {
    let shapes = [(1_000, 1_000), (100_000, 100_000), (100_000, 1_000)];
    plan.pick(&shapes[..2], &shapes)
}

fn orders(plan: &Plan) -> Vec<Order> {
    plan.pick(
        &[Order::Random],
        &[Order::AsListed, Order::Random, Order::Zipf],
    )
}

/// Returns a point for each shape and order.
pub(crate) fn points(plan: &Plan, shapes: &[(usize, usize)]) -> Vec<String> {
    let orders = orders(plan);
    let mut points = Vec::new();
    for &(size, names) in shapes {
        let mut of = number(names as f64);
        if names < size {
            of = format!("{of} of {}", number(size as f64));
        }
        for order in &orders {
            points.push(format!("{of}, {}", order.label()));
        }
    }
    points
}

/// Rates by number and order of names.
pub(crate) fn by_shape(
    plan: &Plan,
    of: &[Subject],
    shapes: &[(usize, usize)],
    to: &mut Table,
) -> Result<()> {
    let orders = orders(plan);
    for (shape, &(size, names)) in shapes.iter().enumerate() {
        let setting = Setting::new(size, Selection::Evenly(names), &orders)?;
        measure_alternately(plan, of, &setting, shape * orders.len(), to)?;
    }
    Ok(())
}

/// Starts all subjects, each in its lab, and saturates their cores alternately, with the queries of
/// each order; the first one has the point `first`.
fn measure_alternately(
    plan: &Plan,
    subjects: &[Subject],
    setting: &Setting,
    first: usize,
    table: &mut Table,
) -> Result<()> {
    let mut cells = Vec::with_capacity(subjects.len());
    for subject in subjects {
        cells.push(Cell::start((setting.lab)()?, subject, setting)?);
    }
    // The publisher must have seen which of the many names are in use.
    if setting.is_few {
        for cell in &cells {
            let load = Load::Rate {
                rate: 100_000,
                burst: 1,
            };
            cell.loaded(setting.queries()?)?.offer(load, TURN)?;
        }
        thread::sleep(SETTLED);
    }
    for (order, queries) in setting.queries.iter().enumerate() {
        let mut loaded = Vec::with_capacity(cells.len());
        for cell in &cells {
            let values = [const { Rounds(Vec::new()) }; 3];
            loaded.push((cell, cell.loaded(queries)?, values));
        }
        for _ in 0..plan.turns {
            for (cell, loaded, [rates, busy, reloads]) in &mut loaded {
                // No child ends with the signal here, and the clean-up waits for ten seconds only.
                ensure!(!interrupt::requested(), "interrupted");
                let (seen, read) =
                    while_changing(cell, &setting.changes, || cell.fill(loaded, TURN))
                        .with_context(|| cell.subject.label())?;
                reloads.0.extend(read.0);
                // A core that slept between packets is in another regime.
                if seen.is_saturated() {
                    rates.0.extend(seen.per_core().0);
                }
                busy.0.push(seen.busy * 100.0);
            }
        }
        for (cell, _, values) in &loaded {
            table.put(&cell.subject.label(), first + order, values);
        }
    }
    Ok(())
}

/// Arrival patterns: the label, and how many queries are sent together; `None` sends as many as
/// possible all the time.
const REGIMES: [(&str, Option<u32>); 3] = [
    ("one by one", Some(1)),
    ("32 at a time", Some(32)),
    ("saturated core", None),
];

pub(crate) fn points_of_cost(_: &Plan) -> Vec<String> {
    REGIMES.map(|(label, _)| label.to_owned()).to_vec()
}

/// CPU time per query at one rate, by arrival pattern.
pub(crate) fn cost(plan: &Plan, subject: &Subject, table: &mut Table) -> Result<()> {
    /// Queries per second at which costs are compared.
    const RATE: u32 = 100_000;
    let setting = Setting::new(INSTANCES, Selection::Shared, &[Order::AsListed])?;
    let cell = Cell::start(Lab::split()?, subject, &setting)?;
    let mut loaded = cell.loaded(setting.queries()?)?;
    // The server learns names that are not in its map yet.
    loaded.offer(
        Load::Rate {
            rate: RATE,
            burst: 1,
        },
        TURN,
    )?;
    for (point, (_, burst)) in REGIMES.into_iter().enumerate() {
        let seen = match burst {
            Some(burst) => loaded.offer(Load::Rate { rate: RATE, burst }, plan.duration)?,
            None => loaded.saturate(plan.duration)?,
        };
        table.put(
            &subject.label(),
            point,
            &[seen.cpu, Rounds(vec![seen.packets_a_wake_up])],
        );
    }
    Ok(())
}

pub(crate) fn latency(plan: &Plan, subject: &Subject, table: &mut Table) -> Result<()> {
    let setting = Setting::new(INSTANCES, Selection::Shared, &[Order::AsListed])?;
    let cell = Cell::start(Lab::plain()?, subject, &setting)?;
    let _program = cell.client()?;
    cell.warm_up(setting.queries()?)?;
    table.put(
        &subject.label(),
        0,
        &cell.latencies(setting.queries()?, plan.duration)?,
    );
    Ok(())
}
