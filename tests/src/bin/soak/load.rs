//! Clients that query hot names continuously and verify every reply.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::RecordType,
};
use parking_lot::{Mutex, MutexGuard};
use whole_system_tests::client;

use crate::{
    forwarded::Forwarded,
    model::{ALIAS, GROUPS, Judgement, Model},
    recursor::{self, Recursor},
};

/// Listen address of the server.
pub(crate) const SERVER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 53);

/// Number of clients; the last one uses TCP.
pub(crate) const CLIENTS: usize = 4;

/// Reply timeout of a client, similar to common stub resolvers.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Pause between two queries of a client.
const PAUSE: Duration = Duration::from_micros(500);

/// Period after an alias change in which both answers are accepted: file watching, publishing, and
/// a server that is down or stopped meanwhile.
const ALIAS_SETTLES: Duration = Duration::from_secs(15);

/// Least remaining lease at which a query must be answered: more than a tick of the clock.
const LEAST_LEASE: Duration = Duration::from_millis(50);

/// The recursor's names that get most queries.
const HOT_NAMES: u8 = 20;

/// How long the programs still let probes through once the server is silent (600 ms), with a margin.
const PROBED: Duration = Duration::from_millis(700);

/// Maximum number of failures printed.
const TOLD: usize = 20;

/// The clients and their results.
pub(crate) struct Load {
    model: Arc<Model>,
    /// Answers names outside the records while it is alive.
    recursor: Arc<Recursor>,
    forwarded: Arc<Forwarded>,
    ended: AtomicBool,
    /// Correct replies by UDP.
    by_udp: AtomicU64,
    /// Correct replies by TCP.
    by_tcp: AtomicU64,
    found: Mutex<Found>,
}

/// Results other than correct replies within the time limit.
struct Found {
    /// Start of the load.
    begin: Instant,
    /// The running fault and its start.
    fault: Option<(&'static str, Instant)>,
    /// End of the period in which replies may be missing because userspace is away.
    excused_until: Option<Instant>,
    /// Recent periods in which userspace was away and interfaces answered.
    covered: VecDeque<Covered>,
    wrong: Vec<String>,
    /// Total, including unprinted ones.
    wrong_count: u64,
    /// UDP queries without a reply while the server was up.
    unanswered: Vec<String>,
    /// Total, including unprinted ones.
    unanswered_count: u64,
    /// UDP queries without a reply while userspace was away and the lease had expired, or for a
    /// name that need not be published.
    excused_udp: BTreeMap<&'static str, u64>,
    /// TCP queries without a reply while userspace was away.
    excused_tcp: u64,
    /// The most outdated answer: its age and the fault running then.
    oldest: (Duration, String),
    /// The slowest reply, in the same form.
    slowest: (Duration, String),
}

/// A period in which userspace was away and interfaces answered.
struct Covered {
    since: Instant,
    until: Instant,
    /// Whether a query was lost as a probe: at most one, because all clients use one interface.
    lost_probe: bool,
}

impl Load {
    /// Creates the clients without starting them.
    pub(crate) fn new(
        model: Arc<Model>,
        recursor: Arc<Recursor>,
        forwarded: Arc<Forwarded>,
    ) -> Self {
        let found = Found {
            begin: Instant::now(),
            fault: None,
            excused_until: None,
            covered: VecDeque::new(),
            wrong: Vec::new(),
            wrong_count: 0,
            unanswered: Vec::new(),
            unanswered_count: 0,
            excused_udp: BTreeMap::new(),
            excused_tcp: 0,
            oldest: (Duration::ZERO, "never".to_owned()),
            slowest: (Duration::ZERO, "never".to_owned()),
        };
        Self {
            model,
            recursor,
            forwarded,
            ended: AtomicBool::new(false),
            by_udp: AtomicU64::new(0),
            by_tcp: AtomicU64::new(0),
            found: Mutex::new(found),
        }
    }

    fn found(&self) -> MutexGuard<'_, Found> {
        self.found.lock()
    }

    /// Records the start of a fault.
    pub(crate) fn fault_begins(&self, name: &'static str) {
        self.found().fault = Some((name, Instant::now()));
    }

    /// Userspace is away: replies may be missing from now on.
    pub(crate) fn userspace_goes(&self) {
        // A year, until `userspace_is_back` is called.
        self.found().excused_until = Some(Instant::now() + Duration::from_secs(31_536_000));
    }

    /// Userspace is away and interfaces answer until `until`; `None` if none is attached yet.
    pub(crate) fn interfaces_answer_until(&self, until: Option<Instant>) {
        let mut found = self.found();
        let since = Instant::now();
        found.covered.extend(until.map(|until| Covered {
            since,
            until,
            lost_probe: false,
        }));
        // Queries are judged within the client's timeout, so older periods are irrelevant.
        if found.covered.len() > 16 {
            found.covered.pop_front();
        }
    }

    /// Userspace is back; earlier queries may still time out.
    pub(crate) fn userspace_is_back(&self) {
        let mut found = self.found();
        found.excused_until = Some(Instant::now() + Duration::from_millis(500));
        if let Some(covered) = found.covered.back_mut() {
            covered.until = covered.until.min(Instant::now());
        }
    }

    /// Ends the clients after their current query.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    /// Returns whether clients should stop.
    pub(crate) fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    /// Queries until [`Self::end`] is called, on a thread inside the namespace.
    pub(crate) fn ask_until_ended(&self, number: usize) {
        let by_tcp = number + 1 == CLIENTS;
        for turn in number.. {
            if self.is_ended() {
                return;
            }
            let group = (turn % usize::from(GROUPS + 1)) as u8;
            let asked = Instant::now();
            let name = if group == GROUPS {
                ALIAS.to_owned()
            } else {
                format!("q-s0.q-g{group}.bosh.")
            };
            let reply = ask(&name, by_tcp);
            self.note(&name, group, by_tcp, asked, reply);
            thread::sleep(PAUSE);
        }
    }

    /// Queries the recursor's names until [`Self::end`] is called, mostly the hot ones, on a thread
    /// inside the namespace.
    pub(crate) fn ask_recursed_until_ended(&self) {
        let mut turn: u32 = 0;
        while !self.is_ended() {
            let names = if turn.is_multiple_of(8) {
                recursor::NAMES
            } else {
                HOT_NAMES
            };
            // An odd factor reaches every name.
            let number = (turn.wrapping_mul(7) % u32::from(names)) as u8;
            self.ask_recursed(number);
            turn = turn.wrapping_add(1);
            thread::sleep(PAUSE);
        }
    }

    /// Queries a recursor's name by UDP. If the recursor was dead, or the server stopped during the query, a
    /// missing answer or SERVFAIL is accepted; a wrong answer never is.
    fn ask_recursed(&self, number: u8) {
        let (name, not_before) = (recursor::name(number), self.forwarded.not_before(number));
        let asked = Instant::now();
        let was_reliable = self.recursor.is_reliable();
        let recursor_was_away = || !was_reliable || !self.recursor.is_reliable();
        match ask(&name, false) {
            Ok(reply)
                if reply.metadata.response_code == ResponseCode::ServFail
                    && (recursor_was_away() || self.found().is_excused(asked)) => {}
            Ok(reply) => {
                let judged =
                    self.forwarded
                        .judge(&self.recursor, number, &reply, (asked, not_before));
                if let Err(what) = judged {
                    self.note_wrong(&name, "UDP", asked, &what);
                }
            }
            Err(_) if recursor_was_away() => {}
            Err(error) => self.note_unanswered(&name, "UDP", asked, &error),
        }
    }

    /// Records a wrong reply.
    fn note_wrong(&self, name: &str, proto: &str, asked: Instant, what: &str) {
        let mut found = self.found();
        found.wrong_count += 1;
        if found.wrong.len() < TOLD {
            let moment = found.moment(asked);
            found
                .wrong
                .push(format!("{name} by {proto} {moment}: {what}"));
        }
    }

    /// Records the result of a query.
    fn note(&self, name: &str, group: u8, by_tcp: bool, asked: Instant, reply: Result<Message>) {
        let took = asked.elapsed();
        let proto = if by_tcp { "TCP" } else { "UDP" };
        let judgement = match reply {
            Ok(reply) if group == GROUPS => self.judge_alias(&reply, asked),
            Ok(reply) if reply.metadata.response_code != ResponseCode::NoError => {
                Judgement::Wrong(format!("{}", reply.metadata.response_code))
            }
            Ok(reply) => self.model.judge(group, &addresses(&reply), asked),
            Err(error) => return self.note_unanswered(name, proto, asked, &error),
        };
        match judgement {
            Judgement::Right(age) => {
                let mut found = self.found();
                let moment = found.moment(asked);
                if age > found.oldest.0 {
                    found.oldest = (age, format!("{name} by {proto} {moment}"));
                }
                if took > found.slowest.0 {
                    found.slowest = (took, format!("{name} by {proto} {moment}"));
                }
                let counter = if by_tcp { &self.by_tcp } else { &self.by_udp };
                counter.fetch_add(1, Ordering::Relaxed);
            }
            Judgement::Wrong(what) => self.note_wrong(name, proto, asked, &what),
        }
    }

    /// Judges a reply for the alias; shortly after a change, both states are correct.
    fn judge_alias(&self, reply: &Message, asked: Instant) -> Judgement {
        let there = reply.metadata.response_code == ResponseCode::NoError;
        match self.model.settled_alias(ALIAS_SETTLES) {
            Some(wanted) if wanted != there => Judgement::Wrong(format!(
                "{} where the file says {wanted}",
                reply.metadata.response_code
            )),
            _ if there => self.model.judge_alias(&addresses(reply), asked),
            _ => Judgement::Right(Duration::ZERO),
        }
    }

    /// Records a query without a reply.
    fn note_unanswered(&self, name: &str, proto: &str, asked: Instant, error: &anyhow::Error) {
        // The alias is published only while its file exists.
        let is_published = match name {
            ALIAS => self.model.settled_alias(ALIAS_SETTLES) == Some(true),
            // Names of the recursor are never published.
            other => other.ends_with(".bosh."),
        };
        let mut found = self.found();
        let mut covered = found.covered.iter_mut();
        let covered =
            covered.find(|covered| asked > covered.since && asked + LEAST_LEASE < covered.until);
        let must_answer = proto == "UDP" && is_published && covered.is_some();
        let is_probe = must_answer
            && covered.is_some_and(|covered| {
                asked < covered.since + PROBED && !std::mem::replace(&mut covered.lost_probe, true)
            });
        if found.is_excused(asked) && (is_probe || !must_answer) {
            if proto == "TCP" {
                found.excused_tcp += 1;
            } else {
                // The lease had expired, or the name need not be published.
                let what = match name {
                    _ if is_probe => "probes",
                    _ if is_published => "published names",
                    ALIAS => "the alias, while it comes or goes",
                    _ => "forwarded names",
                };
                *found.excused_udp.entry(what).or_default() += 1;
            }
            return;
        }
        found.unanswered_count += 1;
        if found.unanswered.len() < TOLD {
            let moment = found.moment(asked);
            found
                .unanswered
                .push(format!("{name} by {proto} {moment}: {error:#}"));
        }
    }

    /// Prints the results; returns whether all requirements are met.
    pub(crate) fn report(&self, lease: Duration) -> bool {
        let found = self.found();
        let (udp, tcp) = (
            self.by_udp.load(Ordering::Relaxed),
            self.by_tcp.load(Ordering::Relaxed),
        );
        println!("answered correctly: {udp} over UDP, {tcp} over TCP");
        println!("wrong: {}", found.wrong_count);
        println!(
            "unanswered while userspace was running or the lease was valid: {}",
            found.unanswered_count
        );
        println!(
            "unanswered while userspace was down (killed or stopped), after the lease or because \
             unpublished: over UDP {:?}, {} over TCP",
            found.excused_udp, found.excused_tcp
        );
        let (age, moment) = &found.oldest;
        println!(
            "oldest answer: outdated for {:.3} s of {} s, {moment}",
            age.as_secs_f64(),
            lease.as_secs()
        );
        let (took, moment) = &found.slowest;
        println!("slowest reply: {:.3} s, {moment}", took.as_secs_f64());
        for line in found.wrong.iter().chain(&found.unanswered) {
            println!("  {line}");
        }
        udp > 0 && tcp > 0 && found.wrong_count == 0 && found.unanswered_count == 0 && *age <= lease
    }
}

impl Found {
    /// Returns whether userspace was away when a query was sent, or had just returned.
    fn is_excused(&self, asked: Instant) -> bool {
        self.excused_until.is_some_and(|until| asked < until)
    }

    /// Describes the time of a query and the fault running then.
    fn moment(&self, asked: Instant) -> String {
        let second = asked.saturating_duration_since(self.begin).as_secs_f64();
        match self.fault {
            Some((fault, since)) => {
                let into = asked.saturating_duration_since(since).as_secs_f64();
                format!("at {second:.1} s, {into:.1} s into {fault:?}")
            }
            None => format!("at {second:.1} s, before the first fault"),
        }
    }
}

fn ask(name: &str, by_tcp: bool) -> Result<Message> {
    let query = client::query(name, RecordType::A, Some(1232))?;
    if by_tcp {
        let reply = client::ask_tcp(SERVER, &query)?;
        return Ok(reply);
    }
    let bytes = query.to_vec()?;
    // A refused port means no listener: retry until the timeout, as stub resolvers do.
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            bail!("no reply within {TIMEOUT:?}");
        }
        match client::ask_raw(SERVER, &bytes, left) {
            // The kernel may reuse a port while a late reply to its previous owner is in flight.
            Ok(reply) if reply.get(..2) != bytes.get(..2) => {}
            Ok(reply) => return Ok(Message::from_vec(&reply)?),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                thread::sleep(Duration::from_millis(20));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns the IPv4 addresses of a reply, sorted.
pub(crate) fn addresses(reply: &Message) -> Vec<Ipv4Addr> {
    let v4 = client::addresses(reply)
        .into_iter()
        .filter_map(|address| match address {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        });
    v4.collect()
}
