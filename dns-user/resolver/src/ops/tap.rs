//! The tap: a live stream of sampled queries from both paths.
//!
//! Without viewers it costs one relaxed load per request. Each viewer chooses its sampling rate
//! (one line per N queries); the densest one determines the actual rate, and the other viewers thin
//! it out.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    net::{Ipv6Addr, SocketAddr},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use hickory_proto::rr::RecordType;
use parking_lot::Mutex;
use prometheus::Registry;
use serde::{Deserialize, Serialize};
use tokio::sync::{broadcast, watch};

use dns_common::{counters::Outcome, tap::TapEvent};
use dns_core::{
    name::Name,
    wire::{FLAG_RD, query_message},
};
use dns_dnstap::{Dnstap, Exchange, Protocol};
use dns_kit::{
    logs::Request,
    metrics::{
        families,
        labels::{rcode_label, type_text},
    },
};

/// Number of lines a viewer may lag behind; older ones are dropped and counted.
const BACKLOG: usize = 4096;

/// The number of dnstap among the viewers. It only views interfaces: userspace has the whole messages.
const DNSTAP: u64 = u64::MAX;

/// The number of [`TopNames`] among the viewers, which only views interfaces as well.
const TOP_NAMES: u64 = u64::MAX - 1;

/// One query in this many is counted for [`TopNames`]: up to a million queries a second, events are not lost.
const TOP_NAMES_SAMPLE: u32 = 200;

//----------- TapLine --------------------------------------------------------

/// A line of the tap: one sampled query.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TapLine {
    /// Time of the query, in seconds since 1970.
    pub time: f64,
    /// Path that handled the query: `fast` or `userspace`.
    pub path: TapPath,
    /// Receiving interface; known only for the fast path.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub interface: Option<String>,
    /// Address and port of the client.
    pub client: SocketAddr,
    /// Transport protocol: `udp` or `tcp`.
    pub transport: String,
    /// Queried name, with a trailing dot.
    pub name: String,
    /// Query type, as mnemonic if it has one.
    #[serde(rename = "type")]
    pub query_type: String,
    /// Fast path: `hit` or the reason for passing the query to userspace. Userspace: the source of
    /// the answer.
    pub outcome: String,
    /// RCODE; `None` if the fast path passed the query to userspace.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub rcode: Option<String>,
    /// Number of answer records.
    pub answers: u16,
    /// Processing time in userspace, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub micros: Option<u64>,
    /// Number of queries that this line represents.
    pub weight: u32,
}

/// Path that handled a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TapPath {
    /// BPF program on the interface.
    Fast,
    /// Server sockets in userspace.
    Userspace,
}

impl TapLine {
    /// Builds the line of a query seen by an interface `age` ago.
    pub fn from_event(event: &TapEvent, age: Duration, weight: u32) -> Self {
        let name = Name::from_wire(name_of(event));
        let outcome = outcome_of(event);
        let answered = outcome.is_some_and(Outcome::is_hit);
        let outcome = outcome.map_or("unknown", Outcome::label);
        Self {
            // The event has the kernel's monotonic time, which means nothing to a viewer.
            time: seconds_since_1970() - age.as_secs_f64(),
            path: TapPath::Fast,
            interface: interface_name(event.ifindex),
            client: client_of(event),
            transport: "udp".to_owned(),
            name: name.map_or_else(|_| String::new(), |(name, _)| name.to_string()),
            query_type: type_text(event.query_type),
            outcome: outcome.to_owned(),
            rcode: answered.then(|| rcode_label(event.rcode).into_owned()),
            answers: event.answers,
            micros: None,
            weight: weight.max(1),
        }
    }

    fn from_request(request: &Request<'_>, weight: u32) -> Self {
        Self {
            time: seconds_since_1970(),
            path: TapPath::Userspace,
            interface: None,
            client: request.client,
            transport: request.transport.to_owned(),
            name: request.name.to_string(),
            query_type: type_text(request.query_type),
            outcome: request.answered_by.to_owned(),
            rcode: Some(rcode_label(request.rcode).into_owned()),
            answers: request.answers,
            micros: u64::try_from(request.took.as_micros()).ok(),
            weight,
        }
    }
}

/// Logs a query that an interface has answered to dnstap. The event holds the question, so query and
/// reply are a header and this question.
pub fn log_to_dnstap(dnstap: &Dnstap, event: &TapEvent, age: Duration, weight: u32) {
    // Userspace logs the others.
    if !is_answered(event) {
        return;
    }
    let query = query_message(0, FLAG_RD, name_of(event), event.query_type);
    let mut reply = query.clone();
    // QR and RD, and the RCODE (RFC 1035, section 4.1.1): dnstap's readers take the query's outcome
    // from the reply's header.
    (reply[2], reply[3]) = (0x81, event.rcode & 15);
    let interface = interface_name(event.ifindex).unwrap_or_default();
    let details = format!(
        "interface={interface} answers={} messages=question_only",
        event.answers
    );
    let exchange = Exchange {
        protocol: Protocol::Udp,
        from: Some(client_of(event)),
        to: None,
        query: &query,
        reply: Some(&reply),
        age,
        took: Duration::ZERO,
    };
    dnstap.interface(&exchange, weight, &details);
}

/// Returns the outcome of a query; `None` for one that this version does not know.
fn outcome_of(event: &TapEvent) -> Option<Outcome> {
    let mut all = Outcome::ALL.iter().copied();
    all.find(|outcome| *outcome as u8 == event.outcome)
}

fn is_answered(event: &TapEvent) -> bool {
    outcome_of(event).is_some_and(Outcome::is_hit)
}

fn client_of(event: &TapEvent) -> SocketAddr {
    // The program writes IPv4 addresses in their mapped form.
    let address = Ipv6Addr::from(event.client).to_canonical();
    SocketAddr::new(address, event.client_port)
}

fn name_of(event: &TapEvent) -> &[u8] {
    // The event comes from shared memory: an index out of range must not end the feeder.
    &event.name[..usize::from(event.name_len).min(event.name.len())]
}

fn interface_name(ifindex: u32) -> Option<String> {
    nix::net::if_::if_indextoname(ifindex)
        .ok()?
        .into_string()
        .ok()
}

/// Parses the mnemonic of a query type, or `TYPE123` (RFC 3597, section 5), in any letter case.
pub fn parse_type(text: &str) -> Option<u16> {
    let upper = text.to_ascii_uppercase();
    match upper.strip_prefix("TYPE").map(str::parse::<u16>) {
        // `TYPE` alone, or a number above 65,535, is left to the mnemonics, which refuse it.
        Some(Ok(number)) => Some(number),
        _ => upper.parse::<RecordType>().ok().map(u16::from),
    }
}

/// Returns the current time in seconds since 1970.
pub fn seconds_since_1970() -> f64 {
    SystemTime::UNIX_EPOCH
        .elapsed()
        .unwrap_or(Duration::ZERO)
        .as_secs_f64()
}

//----------- Tap ------------------------------------------------------------

/// Distributes lines from both paths to viewers. Clones share it.
#[derive(Clone)]
pub struct Tap {
    shared: Arc<TapShared>,
}

struct TapShared {
    /// One request in this many becomes a line; 0 without viewers.
    every: AtomicU32,
    /// The same value for the fast path's feeder, which waits for changes.
    wanted: watch::Sender<u32>,
    /// Channel to all viewers: each line with the time of its query.
    lines: broadcast::Sender<Arc<(Instant, TapLine)>>,
    /// Sampling rates of the viewers, by viewer number.
    sampling: Mutex<BTreeMap<u64, u32>>,
    /// The names that interfaces answer most; empty unless they are counted.
    top_names: OnceLock<Mutex<TopNames>>,
}

impl Default for Tap {
    /// Creates a tap without viewers.
    fn default() -> Self {
        Self {
            shared: Arc::new(TapShared {
                every: AtomicU32::new(0),
                wanted: watch::Sender::new(0),
                lines: broadcast::Sender::new(BACKLOG),
                sampling: Mutex::new(BTreeMap::new()),
                top_names: OnceLock::new(),
            }),
        }
    }
}

impl Tap {
    /// Returns whether there are any viewers.
    #[inline]
    pub fn is_wanted(&self) -> bool {
        self.shared.every.load(Ordering::Relaxed) != 0
    }

    /// Publishes a request answered in userspace, subject to sampling.
    #[inline]
    pub fn observe(&self, request: &Request<'_>) {
        let every = self.shared.every.load(Ordering::Relaxed);
        if every != 0 {
            self.offer(request, every);
        }
    }

    /// Samples one request in `every` at random: a counter would be biased by periodic clients.
    #[cold]
    fn offer(&self, request: &Request<'_>, every: u32) {
        if fastrand::u32(..every) == 0 {
            self.publish(TapLine::from_request(request, every), Duration::ZERO);
        }
    }

    /// Sends the line of a query seen `age` ago to all viewers that had subscribed by then.
    pub fn publish(&self, line: TapLine, age: Duration) {
        let now = Instant::now();
        // Fails only if the last viewer has just disconnected.
        let _ = self
            .shared
            .lines
            .send(Arc::new((now.checked_sub(age).unwrap_or(now), line)));
    }

    /// Returns the sampling rate, followed by the fast path's feeder: one query in this many; 0
    /// without viewers.
    pub fn wanted(&self) -> watch::Receiver<u32> {
        self.shared.wanted.subscribe()
    }

    /// Makes interfaces sample one query in `every` for dnstap, as long as the process runs; 0: none.
    pub fn sample_interfaces(&self, every: u32) {
        if every != 0 {
            self.change_sampling(|sampling| {
                sampling.insert(DNSTAP, every);
            });
        }
    }

    /// Exposes the names that interfaces answer most, as long as the process runs; `most` is their number, 0: none.
    pub fn expose_top_names(&self, most: usize, registry: &Registry) -> prometheus::Result<()> {
        if most == 0
            || self
                .shared
                .top_names
                .set(Mutex::new(TopNames::new(most)))
                .is_err()
        {
            return Ok(());
        }
        self.change_sampling(|sampling| {
            sampling.insert(TOP_NAMES, TOP_NAMES_SAMPLE);
        });
        let shared = Arc::clone(&self.shared);
        families::TOP_NAME_QUERIES_TOTAL.scrape(registry, move || {
            let names = shared
                .top_names
                .get()
                .map(|names| names.lock().most())
                .unwrap_or_default();
            vec![
                families::TOP_NAME_QUERIES_TOTAL
                    .of(names.into_iter().map(|(name, count)| ([name], count))),
            ]
        })
    }

    /// Counts a sampled query that represents `weight` ones, if an interface has answered it.
    pub fn count_name(&self, event: &TapEvent, weight: u32) {
        let Some(names) = self.shared.top_names.get().filter(|_| is_answered(event)) else {
            return;
        };
        if let Ok((name, _)) = Name::from_wire(name_of(event)) {
            names.lock().add(name, u64::from(weight));
        }
    }

    /// Adds a viewer for one query in `every` (0 counts as 1).
    pub fn subscribe(&self, every: u32) -> TapView {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let every = every.max(1);
        // Before the sampling begins, so that no line is missed.
        let lines = self.shared.lines.subscribe();
        let since = Instant::now();
        self.change_sampling(|sampling| {
            sampling.insert(number, every);
        });
        TapView {
            tap: self.clone(),
            number,
            every,
            since,
            lines,
        }
    }

    /// Updates the viewers and the resulting sampling rate.
    fn change_sampling(&self, change: impl FnOnce(&mut BTreeMap<u64, u32>)) {
        let mut sampling = self.shared.sampling.lock();
        change(&mut sampling);
        let every = sampling.values().copied().min().unwrap_or(0);
        let viewers = sampling
            .iter()
            // Userspace tells dnstap itself, and counts no names: without viewers its queries stay
            // free of the tap.
            .filter(|(number, _)| **number < TOP_NAMES)
            .map(|(_, every)| *every);
        self.shared
            .every
            .store(viewers.min().unwrap_or(0), Ordering::Relaxed);
        self.shared
            .wanted
            // Each notification makes the feeder write to the programs' map.
            .send_if_modified(|wanted| std::mem::replace(wanted, every) != every);
    }
}

//----------- TapView --------------------------------------------------------

/// A viewer, removed when dropped.
pub struct TapView {
    tap: Tap,
    number: u64,
    /// Number of queries that a line represents.
    every: u32,
    /// Queries seen earlier, which interfaces sampled for another viewer, are not shown.
    since: Instant,
    lines: broadcast::Receiver<Arc<(Instant, TapLine)>>,
}

/// An item received by a viewer.
#[derive(Clone, Debug, PartialEq)]
pub enum TapItem {
    /// A query, with the weight of its sampling.
    Line(TapLine),
    /// Number of lines dropped because the viewer lagged behind.
    Lost(u64),
}

impl TapView {
    /// Returns the next item; `None` once the tap is gone.
    pub async fn next(&mut self) -> Option<TapItem> {
        loop {
            match self.lines.recv().await {
                Ok(seen) if seen.0 < self.since => {}
                Ok(seen) => {
                    let line = &seen.1;
                    // Another viewer may sample more densely: thin its lines at random.
                    let weight = line.weight.max(self.every);
                    if fastrand::u32(..weight) < line.weight {
                        return Some(TapItem::Line(TapLine {
                            weight,
                            ..line.clone()
                        }));
                    }
                }
                Err(broadcast::error::RecvError::Lagged(lost)) => return Some(TapItem::Lost(lost)),
                Err(broadcast::error::RecvError::Closed) => return None,
            }
        }
    }
}

impl Drop for TapView {
    fn drop(&mut self) {
        let number = self.number;
        self.tap.change_sampling(|sampling| {
            sampling.remove(&number);
        });
    }
}

//----------- Top names ---------------------------------------------------------

/// Number of counters for each name that is exposed.
///
/// A name whose share of the queries exceeds one in all counters has a counter for certain, and an exposed count
/// exceeds the true one by at most that share of all queries.
const COUNTERS_PER_NAME: usize = 20;

/// Counters of the names that are asked most (space-saving by Metwally, Agrawal and El Abbadi, 2005). A count never falls, so that it can be exposed as a counter: a new
/// name takes over the counter of the rarest one.
#[derive(Debug)]
struct TopNames {
    /// Number of names to expose.
    most: usize,
    counts: HashMap<Name, u64>,
}

impl TopNames {
    fn new(most: usize) -> Self {
        Self {
            most,
            counts: HashMap::new(),
        }
    }

    fn add(&mut self, name: Name, queries: u64) {
        if let Some(count) = self.counts.get_mut(&name) {
            *count += queries;
            return;
        }
        let mut inherited = 0;
        if self.counts.len() >= self.most * COUNTERS_PER_NAME {
            let rarest = self.counts.iter().min_by_key(|(_, count)| **count);
            if let Some((name, count)) = rarest.map(|(name, count)| (name.clone(), *count)) {
                // The estimate of a name may be too high, never too low: this is what the algorithm
                // guarantees.
                inherited = count;
                self.counts.remove(&name);
            }
        }
        self.counts.insert(name, inherited + queries);
    }

    fn most(&self) -> Vec<(String, u64)> {
        let mut all: Vec<_> = self
            .counts
            .iter()
            .map(|(name, count)| (Reverse(*count), name))
            .collect();
        all.sort_unstable();
        all.truncate(self.most);
        all.into_iter()
            .map(|(Reverse(count), name)| (name.to_string(), count))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(name: &Name) -> Request<'_> {
        Request {
            name,
            query_type: 28,
            rcode: 3,
            answers: 0,
            bytes: 40,
            client: "127.0.0.1:5353".parse().unwrap(),
            transport: "udp",
            answered_by: "local",
            took: Duration::from_micros(12),
        }
    }

    #[tokio::test]
    async fn no_viewer_means_no_lines() {
        let tap = Tap::default();
        let name = Name::from_text("a.bosh").unwrap();
        tap.observe(&request(&name));
        let mut view = tap.subscribe(1);
        assert!(futures_util::FutureExt::now_or_never(view.next()).is_none());
        tap.observe(&request(&name));
        let Some(TapItem::Line(line)) = view.next().await else {
            panic!("no line")
        };
        assert_eq!(
            (line.name.as_str(), line.query_type.as_str()),
            ("a.bosh.", "AAAA")
        );
        assert_eq!(line.rcode.as_deref(), Some("NXDOMAIN"));
        drop(view);
        assert_eq!(*tap.wanted().borrow(), 0);
    }

    #[tokio::test]
    async fn earlier_queries_are_not_shown() {
        let tap = Tap::default();
        let name = Name::from_text("a.bosh").unwrap();
        let mut view = tap.subscribe(1);
        let line = TapLine::from_request(&request(&name), 1);
        // An interface saw it before the viewer came, and its buffer is read late.
        tap.publish(line.clone(), Duration::from_secs(1));
        assert!(futures_util::FutureExt::now_or_never(view.next()).is_none());
        tap.publish(line.clone(), Duration::ZERO);
        assert_eq!(view.next().await, Some(TapItem::Line(line)));
    }

    #[tokio::test]
    async fn line_weight_matches_sampling_rate() {
        let tap = Tap::default();
        let name = Name::from_text("a.bosh").unwrap();
        let mut close = tap.subscribe(2);
        let mut far = tap.subscribe(10);
        assert_eq!(*tap.wanted().borrow(), 2);
        for _ in 0..2000 {
            tap.observe(&request(&name));
        }
        async fn weights(view: &mut TapView) -> u64 {
            let mut sum = 0;
            // All lines are already queued; the timeout only ends the wait for another.
            let patience = Duration::from_millis(200);
            while let Ok(Some(TapItem::Line(line))) =
                tokio::time::timeout(patience, view.next()).await
            {
                sum += u64::from(line.weight);
            }
            sum
        }
        // Sampling is random, so the sums are approximate.
        for sum in [weights(&mut close).await, weights(&mut far).await] {
            assert!((1200..2800).contains(&sum), "{sum}");
        }
        drop(close);
        assert_eq!(*tap.wanted().borrow(), 10);
    }

    #[test]
    fn unknown_types_show_number() {
        assert_eq!(
            (parse_type("aaaa"), parse_type("type4242"), parse_type("x")),
            (Some(28), Some(4242), None)
        );
    }

    #[test]
    fn frequent_names_survive_many_rare_ones() {
        let mut top = TopNames::new(2);
        let name = |text: &str| Name::from_text(text).unwrap();
        for number in 0..20_000 {
            top.add(name(&format!("rare{number}.bosh")), 1);
            top.add(
                name(if number % 3 == 0 {
                    "second.bosh"
                } else {
                    "first.bosh"
                }),
                1,
            );
        }
        assert!(top.counts.len() <= 2 * COUNTERS_PER_NAME);
        let shown = top.most();
        assert_eq!([&shown[0].0, &shown[1].0], ["first.bosh.", "second.bosh."]);
        // 40,000 queries, 40 counters: at most 1,000 too many.
        for ((_, count), exact) in shown.into_iter().zip([13_333, 6_667]) {
            assert!((exact..=exact + 1_000).contains(&count), "{count}");
        }
    }

    #[test]
    fn counts_never_fall() {
        let mut top = TopNames::new(1);
        let mut highest = 0;
        for number in 0..500_u32 {
            top.add(
                Name::from_text(&format!("n{}.bosh", number % 37)).unwrap(),
                u64::from(number % 5),
            );
            let now = top.most()[0].1;
            assert!(now >= highest);
            highest = now;
        }
    }
}
