//! What a query costs in CPU, and how many go.

use std::{collections::HashMap, fmt, ops::Sub};

use anyhow::Result;
use bosh_dns_xdp_benches::{
    foundation::Foundation,
    is_wanted,
    lab::Lab,
    peers::Peer,
    report::{Bar, Data, Figure, Rounds},
    yardstick::Hook,
};
use dns_common::counters::Outcome;
use dns_resolver::ops::metrics::names;
use whole_system_tests::metrics::Metrics;

use crate::{
    Plan,
    cell::Cell,
    queries::{self, Queries},
    subject::Subject,
};

/// Queries per second at which costs are compared.
const RATE: u32 = 100_000;

/// Size of the foundation.
const INSTANCES: usize = 1_000;

/// The subject that is measured with misses, too, and the label of that.
const WITH_MISSES: (Subject, &str) = (Subject::Ours("tc"), "ours, tc, 1 % to userspace");

/// All subjects.
fn subjects(plan: &Plan) -> Vec<Subject> {
    let mut subjects = vec![
        Subject::Reflector(Hook::Generic),
        Subject::Reflector(Hook::Native),
        Subject::Ours("tc"),
        Subject::Ours("generic"),
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

/// CPU per query at one rate for all, and the highest rate.
pub(super) fn measure(plan: &Plan) -> Result<Vec<Figure>> {
    let foundation = Foundation::generate(INSTANCES)?;
    let lines = queries::for_names(&foundation, queries::is_shared);
    let [queries, mixed] = [Queries::write(&lines)?, Queries::write(&queries::with_hits(&lines, 99))?];
    let subjects = subjects(plan);
    // What most of the claims rest on is measured longest.
    let duration = plan.duration * 2;
    let mut costs: HashMap<String, Rounds> = HashMap::new();
    let mut rates: HashMap<String, Rounds> = HashMap::new();
    let mut regimes: HashMap<String, Rounds> = HashMap::new();
    let mut shares: HashMap<String, Rounds> = HashMap::new();
    for _ in 0..plan.rounds {
        for subject in &subjects {
            let cell = Cell::start(Lab::split()?, subject, &foundation)?;
            let label = subject.label();
            let rate = {
                let asker = cell.asker()?;
                asker.warm_up(&queries)?;
                asker.highest_rate(&queries, plan.duration)?
            };
            let before = Counted::read(&cell.lab, subject)?;
            let cost = cell.cost(&queries, RATE, duration)?;
            let counted = Counted::read(&cell.lab, subject)? - before;
            if *subject == WITH_MISSES.0 {
                let cost = cell.cost(&mixed, RATE, duration)?;
                println!("{:<28} {:>8.2} µs/query at {RATE}/s", WITH_MISSES.1, cost.cpu.median());
                costs.entry(WITH_MISSES.1.to_owned()).or_default().0.extend(cost.cpu.0);
                regimes.entry(WITH_MISSES.1.to_owned()).or_default().0.push(cost.packets_a_wake_up);
            }
            println!(
                "{label:<28} {:>8.2} µs/query at {RATE}/s, {:.1} packets a wake-up   {:>9.0}/s at most   {counted}",
                cost.cpu.median(),
                cost.packets_a_wake_up,
                rate.median()
            );
            if let Some(share) = counted.share() {
                shares.entry(label.clone()).or_default().0.push(share);
            }
            costs.entry(label.clone()).or_default().0.extend(cost.cpu.0);
            regimes.entry(label.clone()).or_default().0.push(cost.packets_a_wake_up);
            rates.entry(label).or_default().0.extend(rate.0);
        }
    }
    let bars = |values: &mut HashMap<String, Rounds>| {
        let labels = subjects.iter().map(|subject| (subject.label(), subject.is_ours()));
        let with_misses = (WITH_MISSES.1.to_owned(), true);
        let bar = |(label, ours)| values.remove(&label).map(|value| Bar { label, value, ours });
        Data::Bars(labels.chain([with_misses]).filter_map(bar).collect())
    };
    Ok(vec![
        Figure {
            title: format!("CPU per query at {RATE} queries/s"),
            about: format!(
                "{INSTANCES} instances, group names, aliases and long forms, A, no EDNS; in the last row one query \
                 in a hundred is of type ANY, which our program leaves to userspace. CPU of everything on the server's side: its processes and the receive path of its interface (threaded NAPI on its own core), \
                 per reply. Who cannot keep the rate is measured at what it answers."
            ),
            unit: "µs".to_owned(),
            data: bars(&mut costs),
        },
        Figure {
            title: format!("Packets a wake-up at {RATE} queries/s"),
            about: "The regime of the figure above: how many queries the NAPI thread finds whenever it is woken up. Where \
                    it is about one, most of what a query costs is waking up, whoever answers it. Costs compare only \
                    within one regime; what a query costs without it the saturated core shows."
                .to_owned(),
            unit: "packets".to_owned(),
            data: bars(&mut regimes),
        },
        Figure {
            title: "Replies given by the interface".to_owned(),
            about: "Of the replies behind the figure above, those that never saw a socket. In XDP's modes some are \
                    given by the program at tc behind it, because there was no room around the packet."
                .to_owned(),
            unit: "%".to_owned(),
            data: bars(&mut shares),
        },
        Figure {
            title: "Highest rate".to_owned(),
            about: "As many queries as dnsperf, on one core, sends and gets answered. Its own limit is that of the \
                    bare reflector: bars of that length are not the server's limit."
                .to_owned(),
            unit: "queries/s".to_owned(),
            data: bars(&mut rates),
        },
    ])
}

/// What our server has counted; zeros for all others.
#[derive(Clone, Copy, Default)]
struct Counted {
    /// Replies of the program.
    fast: u64,
    /// Replies of userspace.
    userspace: u64,
    /// Those of them that a second program gave, because there was no room at XDP.
    second: u64,
}

impl Counted {
    /// So far.
    fn read(lab: &Lab, subject: &Subject) -> Result<Self> {
        if !subject.is_ours() {
            return Ok(Self::default());
        }
        let metrics = Metrics::read(&lab.server)?;
        let handed_on = format!("outcome=\"{}\"", Outcome::HandedOn.label());
        Ok(Self {
            fast: metrics.fast_path_replies(),
            userspace: metrics.userspace_replies(),
            second: metrics.sum(names::FAST_PATH_PACKETS_TOTAL, &handed_on),
        })
    }

    /// Percentage of the replies that the program gave; none without replies.
    fn share(self) -> Option<f64> {
        let all = self.fast + self.userspace;
        (all > 0).then(|| self.fast as f64 * 100.0 / all as f64)
    }
}

impl Sub for Counted {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        let Self { fast, userspace, second } = self;
        Self {
            fast: fast - earlier.fast,
            userspace: userspace - earlier.userspace,
            second: second - earlier.second,
        }
    }
}

impl fmt::Display for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(share) = self.share() else { return Ok(()) };
        write!(f, "{share:.1} % by the interface, {} of them at tc behind XDP", self.second)
    }
}
