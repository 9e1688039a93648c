//! CPU cost of a query at a fixed rate, by arrival pattern.

use std::{array, collections::BTreeMap, fmt, ops::Sub, time::Duration};

use anyhow::Result;
use bosh_dns_xdp_benches::{
    foundation::Foundation,
    generator::Load,
    is_wanted,
    lab::Lab,
    peers::Peer,
    report::{self, Bar, Data, Figure, Rounds, number},
    yardstick::Hook,
};
use whole_system_tests::metrics::{Metrics, wait_for_metrics};

use crate::{
    Plan,
    cell::Cell,
    queries::{self, Queries},
    subject::Subject,
};

/// Queries per second at which costs are compared.
const RATE: u32 = 100_000;

/// Duration of the warm-up.
const WARM_UP: Duration = Duration::from_millis(250);

/// Size of the foundation.
const INSTANCES: usize = 1_000;

/// The subject that is also measured with misses, and the label of that row.
const WITH_MISSES: (Subject, &str) = (Subject::Ours("tc"), "ours, tc, 1 % to userspace");

fn subjects(plan: &Plan) -> Vec<Subject> {
    let mut subjects = vec![
        Subject::Reflector(Hook::Tc),
        Subject::Reflector(Hook::Native),
        Subject::Ours("tc"),
        Subject::Ours("native"),
        Subject::Userspace,
        Subject::Peer(Peer::KnotXdp),
        Subject::Peer(Peer::Knot),
        Subject::Peer(Peer::Nsd),
        Subject::Peer(Peer::Unbound),
    ];
    subjects.extend(plan.pick(&[], &[Subject::Peer(Peer::Dnsmasq)]));
    subjects.extend(plan.reference.clone().map(Subject::Reference));
    subjects.retain(|subject| is_wanted(&plan.wanted, &subject.label()));
    subjects
}

/// Arrival patterns: the label, and how many queries are sent together; `None` sends as many as
/// possible all the time.
const REGIMES: [(&str, Option<u32>); 3] =
    [("one by one", Some(1)), ("32 at a time", Some(32)), ("saturated core", None)];

/// Returns the CPU time per query at one rate for all subjects, by arrival pattern.
pub(super) fn measure(plan: &Plan) -> Result<Vec<Figure>> {
    let foundation = Foundation::generate(INSTANCES)?;
    let lines = queries::for_names(&foundation, queries::is_shared);
    let [queries, mixed] = [Queries::write(&lines)?, Queries::write(&queries::with_hits(&lines, 99))?];
    let subjects = subjects(plan);
    let places = || REGIMES.map(|(name, _)| name.to_owned()).to_vec();
    let axis = format!("how {} queries/s come", number(RATE.into()));
    let [mut costs, mut packets, mut wake_ups] =
        array::from_fn(|_| report::Sweep::new(&axis, places(), false));
    let mut shares: BTreeMap<usize, Rounds> = BTreeMap::new();
    for _ in 0..plan.rounds {
        for (position, subject) in subjects.iter().enumerate() {
            let cell = Cell::start(Lab::split()?, subject, &foundation)?;
            let label = subject.label();
            let mut of = |queries: &Queries, label: &str| -> Result<()> {
                let mut loaded = cell.loaded(queries)?;
                // The server learns names that are not in its map yet.
                loaded.offer(Load::Rate { rate: RATE, burst: 1 }, WARM_UP)?;
                for (place, (regime, burst)) in REGIMES.into_iter().enumerate() {
                    let seen = match burst {
                        Some(burst) => loaded.offer(Load::Rate { rate: RATE, burst }, plan.duration)?,
                        None => loaded.saturate(plan.duration)?,
                    };
                    println!(
                        "{label:<28} {regime:<14} {:>8.3} µs/query, {:>5.1} packets per wake-up, {:>6} \
                         wake-ups/s",
                        seen.cpu.median(),
                        seen.packets_a_wake_up,
                        number(seen.wake_ups)
                    );
                    for &value in &seen.cpu.0 {
                        costs.push(label, subject.is_ours(), place, value);
                    }
                    packets.push(label, subject.is_ours(), place, seen.packets_a_wake_up);
                    wake_ups.push(label, subject.is_ours(), place, seen.wake_ups);
                }
                Ok(())
            };
            if subject.is_ours() {
                wait_for_metrics(&cell.lab.server)?;
            }
            let before = Counted::read(&cell.lab, subject)?;
            of(&queries, &label)?;
            let counted = Counted::read(&cell.lab, subject)? - before;
            if let Some(share) = counted.share() {
                println!("{label:<28} {counted}");
                shares.entry(position).or_default().0.push(share);
            }
            if *subject == WITH_MISSES.0 {
                of(&mixed, WITH_MISSES.1)?;
            }
        }
    }
    let bar = |(position, value)| {
        let subject: &Subject = subjects.get(position)?;
        Some(Bar { label: subject.label(), value, ours: subject.is_ours() })
    };
    Ok(vec![
        Figure::new(
            format!("CPU per query at {} queries/s", number(RATE.into())),
            format!(
                "{INSTANCES} instances, group names, aliases and long forms, A, no EDNS; in the last row one \
                 query in a hundred is of type ANY, which our program leaves to userspace. CPU time of the \
                 server's side (its processes and the receive path of its interface, threaded NAPI on its \
                 own core) per reply. A server that cannot keep up is measured at the rate it answers. Sent \
                 one by one, each query wakes the NAPI thread, which dominates its cost for every server, so \
                 costs are comparable only within one regime. The saturated core, at its own rate, never \
                 sleeps."
            ),
            "µs",
            Data::Sweep(costs),
        ),
        Figure::new(
            format!("Packets per wake-up at {} queries/s", number(RATE.into())),
            "The regimes of the figure above: the mean number of queries that the NAPI thread finds per \
             wake-up.",
            "packets",
            Data::Sweep(packets),
        ),
        Figure::new(
            format!("Wake-ups per second at {} queries/s", number(RATE.into())),
            "The same thread's wake-ups.",
            "wake-ups/s",
            Data::Sweep(wake_ups),
        ),
        Figure::new(
            "Replies from the interface",
            "Share of the replies in these figures that did not pass a socket. In XDP's modes the tc program \
             sends some of them, because the packet buffer has no room.",
            "%",
            Data::Bars(shares.into_iter().filter_map(bar).collect()),
        ),
    ])
}

/// Counters of this server; zeros for all others.
#[derive(Clone, Copy, Default)]
struct Counted {
    /// Replies from the program.
    fast: u64,
    userspace: u64,
}

impl Counted {
    fn read(lab: &Lab, subject: &Subject) -> Result<Self> {
        if !subject.is_ours() {
            return Ok(Self::default());
        }
        let metrics = Metrics::read(&lab.server)?;
        Ok(Self { fast: metrics.fast_path_replies(), userspace: metrics.userspace_replies() })
    }

    /// Returns the percentage of replies from the program; `None` without replies.
    fn share(self) -> Option<f64> {
        let all = self.fast + self.userspace;
        (all > 0).then(|| self.fast as f64 * 100.0 / all as f64)
    }
}

impl Sub for Counted {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        let Self { fast, userspace } = self;
        Self { fast: fast - earlier.fast, userspace: userspace - earlier.userspace }
    }
}

impl fmt::Display for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(share) = self.share() else { return Ok(()) };
        write!(f, "{share:.1} % by the interface")
    }
}
