//! Clients that ask for hot names all the time and judge every reply.

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
    model::{ALIAS, GROUPS, Judgement, Model},
    recursor::{self, Recursor},
};

/// Where the server listens.
pub(crate) const SERVER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 53);

/// How many clients ask; the last one asks by TCP.
pub(crate) const CLIENTS: usize = 4;

/// How long a client waits for a reply: as long as most resolvers.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long a client pauses between queries.
const PAUSE: Duration = Duration::from_micros(500);

/// How long after a change of the alias either answer is right: file watching, publishing,
/// and a server that is down or stopped meanwhile.
const ALIAS_SETTLES: Duration = Duration::from_secs(15);

/// Least rest of the lease at which a query must be answered: more than a tick of the clock.
const LEAST_LEASE: Duration = Duration::from_millis(50);

/// So often the first client asks for a name of the recursor's.
const RECURSED_EVERY: usize = 16;

/// How many failures are told.
const TOLD: usize = 20;

/// The clients, and what came of their queries.
pub(crate) struct Load {
    model: Arc<Model>,
    /// Answers other names, while it lives.
    recursor: Arc<Recursor>,
    ended: AtomicBool,
    /// Replies by UDP that were right.
    by_udp: AtomicU64,
    /// Replies by TCP that were right.
    by_tcp: AtomicU64,
    found: Mutex<Found>,
}

/// What came of queries, but for those that were answered right and in time.
struct Found {
    /// When the clients began.
    begin: Instant,
    /// What is thrown right now, and since when.
    fault: Option<(&'static str, Instant)>,
    /// Until when replies may be missing after a fault that takes userspace away.
    excused_until: Option<Instant>,
    /// From when to when userspace was away and interfaces answered, of late.
    covered: VecDeque<(Instant, Instant)>,
    wrong: Vec<String>,
    /// How many there were.
    wrong_count: u64,
    /// Queries by UDP without a reply while the server was up.
    unanswered: Vec<String>,
    /// How many there were.
    unanswered_count: u64,
    /// Queries by UDP without a reply while userspace was away and the lease had run out, or
    /// for a name that interfaces need not know.
    excused_udp: BTreeMap<&'static str, u64>,
    /// Queries by TCP without a reply while userspace was away.
    excused_tcp: u64,
    /// The oldest answer: for how long it had been outdated, and what was going on.
    oldest: (Duration, String),
    /// The slowest reply, likewise.
    slowest: (Duration, String),
}

impl Load {
    /// Clients that have not begun.
    pub(crate) fn new(model: Arc<Model>, recursor: Arc<Recursor>) -> Self {
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
            ended: AtomicBool::new(false),
            by_udp: AtomicU64::new(0),
            by_tcp: AtomicU64::new(0),
            found: Mutex::new(found),
        }
    }

    fn found(&self) -> MutexGuard<'_, Found> {
        self.found.lock()
    }

    /// Tells what is thrown from now on.
    pub(crate) fn fault_begins(&self, name: &'static str) {
        self.found().fault = Some((name, Instant::now()));
    }

    /// From now on replies may be missing: userspace is away.
    pub(crate) fn userspace_goes(&self) {
        // A year: until it is said to be back.
        self.found().excused_until = Some(Instant::now() + Duration::from_secs(31_536_000));
    }

    /// Userspace was taken away, and so long interfaces answer; `None`: none are there yet.
    pub(crate) fn interfaces_answer_until(&self, until: Option<Instant>) {
        let mut found = self.found();
        found.covered.extend(until.map(|until| (Instant::now(), until)));
        // A query is judged within its client's patience.
        if found.covered.len() > 16 {
            found.covered.pop_front();
        }
    }

    /// Userspace is back; who asked before may still wait in vain.
    pub(crate) fn userspace_is_back(&self) {
        let mut found = self.found();
        found.excused_until = Some(Instant::now() + Duration::from_millis(500));
        if let Some((_, until)) = found.covered.back_mut() {
            *until = (*until).min(Instant::now());
        }
    }

    /// The clients end after their current query.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    /// Whether clients are to end.
    pub(crate) fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    /// Asks until told to end, on a thread inside the namespace.
    pub(crate) fn ask_until_ended(&self, number: usize) {
        let by_tcp = number + 1 == CLIENTS;
        for turn in number.. {
            if self.is_ended() {
                return;
            }
            if number == 0 && turn % RECURSED_EVERY == 0 {
                self.ask_recursed((turn / RECURSED_EVERY % usize::from(recursor::NAMES)) as u8);
            }
            let group = (turn % usize::from(GROUPS + 1)) as u8;
            let asked = Instant::now();
            let name = if group == GROUPS { ALIAS.to_owned() } else { format!("q-s0.q-g{group}.bosh.") };
            let reply = ask(&name, by_tcp);
            self.note(&name, group, by_tcp, asked, reply);
            thread::sleep(PAUSE);
        }
    }

    /// Asks by UDP for a name that the recursor knows. While that is dead, or the server was
    /// stopped while it waited for a reply, there may be no answer or SERVFAIL; a wrong one never.
    fn ask_recursed(&self, number: u8) {
        let (name, asked) = (recursor::name(number), Instant::now());
        let was_reliable = self.recursor.is_reliable();
        let recursor_was_away = || !was_reliable || !self.recursor.is_reliable();
        match ask(&name, false) {
            Ok(reply) if addresses(&reply) == [recursor::address(number)] => {
                self.by_udp.fetch_add(1, Ordering::Relaxed);
            }
            Ok(reply)
                if reply.metadata.response_code == ResponseCode::ServFail
                    && (recursor_was_away() || self.found().is_excused(asked)) => {}
            Ok(reply) => {
                let what = format!("{} {:?}", reply.metadata.response_code, addresses(&reply));
                self.note_wrong(&name, "UDP", asked, &what);
            }
            Err(_) if recursor_was_away() => {}
            Err(error) => self.note_unanswered(&name, "UDP", asked, &error),
        }
    }

    /// Notes a wrong reply.
    fn note_wrong(&self, name: &str, proto: &str, asked: Instant, what: &str) {
        let mut found = self.found();
        found.wrong_count += 1;
        if found.wrong.len() < TOLD {
            let moment = found.moment(asked);
            found.wrong.push(format!("{name} by {proto} {moment}: {what}"));
        }
    }

    /// Notes what came of a query.
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

    /// The alias is there or not; shortly after a change both are right.
    fn judge_alias(&self, reply: &Message, asked: Instant) -> Judgement {
        let there = reply.metadata.response_code == ResponseCode::NoError;
        match self.model.settled_alias(ALIAS_SETTLES) {
            Some(wanted) if wanted != there => {
                Judgement::Wrong(format!("{} where the file says {wanted}", reply.metadata.response_code))
            }
            _ if there => self.model.judge_alias(&addresses(reply), asked),
            _ => Judgement::Right(Duration::ZERO),
        }
    }

    /// Notes a query without a reply.
    fn note_unanswered(&self, name: &str, proto: &str, asked: Instant, error: &anyhow::Error) {
        // The alias comes and goes, and while it is not there nobody knows its name.
        let is_published = match name {
            ALIAS => self.model.settled_alias(ALIAS_SETTLES) == Some(true),
            // Names of the recursor's are never published.
            other => other.ends_with(".bosh."),
        };
        let mut found = self.found();
        let mut covered = found.covered.iter();
        let covered = covered.any(|&(since, until)| asked > since && asked + LEAST_LEASE < until);
        let must_answer = proto == "UDP" && is_published && covered;
        if found.is_excused(asked) && !must_answer {
            if proto == "TCP" {
                found.excused_tcp += 1;
            } else {
                // The lease had run out, or why no interface needed to know the name.
                let what = match name {
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
            found.unanswered.push(format!("{name} by {proto} {moment}: {error:#}"));
        }
    }

    /// Prints what was found; whether all of it is as it has to be.
    pub(crate) fn report(&self, lease: Duration) -> bool {
        let found = self.found();
        let (udp, tcp) = (self.by_udp.load(Ordering::Relaxed), self.by_tcp.load(Ordering::Relaxed));
        println!("answered right: {udp} by UDP, {tcp} by TCP");
        println!("wrong: {}", found.wrong_count);
        println!("unanswered while userspace was there or the lease ran: {}", found.unanswered_count);
        println!(
            "unanswered while userspace was away (killed or stopped), past the lease or because they were \
             not published: by UDP {:?}, {} by TCP",
            found.excused_udp, found.excused_tcp
        );
        let (age, moment) = &found.oldest;
        println!("oldest answer: outdated for {:.3} s of {} s, {moment}", age.as_secs_f64(), lease.as_secs());
        let (took, moment) = &found.slowest;
        println!("slowest reply: {:.3} s, {moment}", took.as_secs_f64());
        for line in found.wrong.iter().chain(&found.unanswered) {
            println!("  {line}");
        }
        udp > 0 && tcp > 0 && found.wrong_count == 0 && found.unanswered_count == 0 && *age <= lease
    }
}

impl Found {
    /// Whether userspace was away when a query was asked, or had just come back.
    fn is_excused(&self, asked: Instant) -> bool {
        self.excused_until.is_some_and(|until| asked < until)
    }

    /// When a query was asked, and what was going on.
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
    // A refused port means that nobody listens: asked again, as resolvers do, until patience ends.
    let deadline = Instant::now() + PATIENCE;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            bail!("no reply within {PATIENCE:?}");
        }
        match client::ask_raw(SERVER, &bytes, left) {
            // A port may be given again while a late reply to its last holder is under way.
            Ok(reply) if reply.get(..2) != bytes.get(..2) => {}
            Ok(reply) => return Ok(Message::from_vec(&reply)?),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                thread::sleep(Duration::from_millis(20));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// The IPv4 addresses of a reply, sorted.
fn addresses(reply: &Message) -> Vec<Ipv4Addr> {
    let v4 = client::addresses(reply).into_iter().filter_map(|address| match address {
        IpAddr::V4(address) => Some(address),
        IpAddr::V6(_) => None,
    });
    v4.collect()
}
