//! The tap: live queries of both paths, for whoever looks.
//!
//! While nobody looks it costs one relaxed load a request. Whoever looks says
//! how many queries one line shall stand for; the fastest of them decides what
//! is sampled, the others thin it out.

use std::{
    collections::BTreeMap,
    fmt,
    net::{Ipv6Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use dns_common::{counters::Outcome, tap::TapEvent};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{broadcast, watch};

use dns_core::name::Name;
use dns_platform::{
    logs::Request,
    metrics::labels::{rcode_label, type_label},
};

/// Lines that one who looks may lag behind; older ones are lost to them, and counted.
const BACKLOG: usize = 4096;

//----------- TapLine --------------------------------------------------------

/// One query, as it is shown.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TapLine {
    /// When, in seconds since 1970.
    pub time: f64,
    /// `fast` or `userspace`.
    pub path: TapPath,
    /// Interface that it came in by; known to the fast path only.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub interface: Option<String>,
    /// Who asked.
    pub client: SocketAddr,
    /// `udp` or `tcp`.
    pub transport: String,
    /// What was asked for, with the final dot.
    pub name: String,
    /// Type, by name where it has one.
    #[serde(rename = "type")]
    pub query_type: String,
    /// `hit` or why the fast path passed it on; in userspace who answered.
    pub outcome: String,
    /// RCODE; `None`: the fast path passed it on.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub rcode: Option<String>,
    /// Answers in the reply.
    pub answers: u16,
    /// How long userspace took, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub micros: Option<u64>,
    /// How many queries this line stands for.
    pub weight: u32,
}

/// Which path a line tells of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TapPath {
    /// The interface.
    Fast,
    /// The sockets.
    Userspace,
}

impl TapLine {
    /// The line of a query that an interface saw `age` ago.
    pub fn from_event(event: &TapEvent, age: Duration, weight: u32) -> Self {
        let address = Ipv6Addr::from(event.client).to_canonical();
        let length = usize::from(event.name_len).min(event.name.len());
        let name = Name::from_wire(&event.name[..length]);
        let outcome = Outcome::ALL.iter().find(|outcome| **outcome as u8 == event.outcome);
        let outcome = outcome.map_or("unknown", |outcome| outcome.label());
        let answered = outcome.starts_with("hit");
        Self {
            time: seconds_since_1970() - age.as_secs_f64(),
            path: TapPath::Fast,
            interface: interface_name(event.ifindex),
            client: SocketAddr::new(address, event.client_port),
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

    /// The line of a request that userspace answered.
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

/// Returns the name of an interface of now.
fn interface_name(ifindex: u32) -> Option<String> {
    nix::net::if_::if_indextoname(ifindex).ok()?.into_string().ok()
}

/// Name of a type, `TYPE123` where it has none (RFC 3597, section 5).
pub fn type_text(query_type: u16) -> String {
    match type_label(query_type) {
        "other" => format!("TYPE{query_type}"),
        label => label.to_owned(),
    }
}

/// The time of a line.
pub fn seconds_since_1970() -> f64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or(Duration::ZERO).as_secs_f64()
}

//----------- Tap ------------------------------------------------------------

/// Where the paths put lines and whoever looks takes them; clones share it.
#[derive(Clone)]
pub struct Tap {
    /// What the clones share.
    shared: Arc<Shared>,
}

/// What all handles have in common.
struct Shared {
    /// One request in this many becomes a line; 0: nobody looks.
    every: AtomicU32,
    /// The same for the fast path's feeder, which waits for changes.
    wanted: watch::Sender<u32>,
    /// To everybody who looks.
    lines: broadcast::Sender<Arc<TapLine>>,
    /// Who looks, by number, and how closely.
    lookers: Mutex<BTreeMap<u64, u32>>,
}

impl fmt::Debug for Tap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tap").field("every", &self.shared.every).finish_non_exhaustive()
    }
}

impl Default for Tap {
    fn default() -> Self {
        Self::new()
    }
}

impl Tap {
    /// A tap that nobody looks at.
    pub fn new() -> Self {
        Self {
            shared: Arc::new(Shared {
                every: AtomicU32::new(0),
                wanted: watch::Sender::new(0),
                lines: broadcast::Sender::new(BACKLOG),
                lookers: Mutex::new(BTreeMap::new()),
            }),
        }
    }

    /// Whether anybody looks.
    #[inline]
    pub fn is_wanted(&self) -> bool {
        self.shared.every.load(Ordering::Relaxed) != 0
    }

    /// Shows a request that userspace answered to whoever looks.
    #[inline]
    pub fn observe(&self, request: &Request<'_>) {
        let every = self.shared.every.load(Ordering::Relaxed);
        if every != 0 {
            self.offer(request, every);
        }
    }

    /// Makes one request in `every` a line, by chance: clients that ask in a
    /// rhythm would fool a count.
    #[cold]
    fn offer(&self, request: &Request<'_>, every: u32) {
        if fastrand::u32(..every) == 0 {
            self.publish(TapLine::from_request(request, every));
        }
    }

    /// Shows a line of the fast path.
    pub fn publish(&self, line: TapLine) {
        // No receiver: nobody looks any more.
        let _ = self.shared.lines.send(Arc::new(line));
    }

    /// How closely somebody looks: one query in this many; 0: nobody looks. The
    /// feeder of the fast path follows it.
    pub fn wanted(&self) -> watch::Receiver<u32> {
        self.shared.wanted.subscribe()
    }

    /// Begins to look at one query in `every` (0 counts as 1).
    pub fn look(&self, every: u32) -> TapView {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let every = every.max(1);
        let lines = self.shared.lines.subscribe();
        self.change_lookers(|lookers| {
            lookers.insert(number, every);
        });
        TapView { tap: self.clone(), number, every, lines }
    }

    /// Changes who looks, and with it what is sampled.
    fn change_lookers(&self, change: impl FnOnce(&mut BTreeMap<u64, u32>)) {
        let mut lookers = self.shared.lookers.lock();
        change(&mut lookers);
        let every = lookers.values().copied().min().unwrap_or(0);
        self.shared.every.store(every, Ordering::Relaxed);
        self.shared.wanted.send_if_modified(|wanted| std::mem::replace(wanted, every) != every);
    }
}

//----------- TapView --------------------------------------------------------

/// Somebody who looks; dropping it ends that.
pub struct TapView {
    /// What is looked at.
    tap: Tap,
    /// Which looker this is.
    number: u64,
    /// How many queries a line shall stand for.
    every: u32,
    /// Where the lines come.
    lines: broadcast::Receiver<Arc<TapLine>>,
}

/// What somebody who looks sees next.
#[derive(Clone, Debug, PartialEq)]
pub enum TapItem {
    /// A query.
    Line(TapLine),
    /// So many lines came faster than they were taken.
    Lost(u64),
}

impl TapView {
    /// The next line; `None`: the tap is gone.
    pub async fn next(&mut self) -> Option<TapItem> {
        loop {
            match self.lines.recv().await {
                Ok(line) => {
                    // Another view may sample more densely: thin its lines at random.
                    let weight = line.weight.max(self.every);
                    if fastrand::u32(..weight) < line.weight {
                        return Some(TapItem::Line(TapLine { weight, ..TapLine::clone(&line) }));
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
        self.tap.change_lookers(|lookers| {
            lookers.remove(&number);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request for `name`.
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
    async fn nothing_is_made_while_nobody_looks() {
        let tap = Tap::new();
        let name = Name::from_text("a.bosh").unwrap();
        tap.observe(&request(&name));
        let mut view = tap.look(1);
        assert!(futures::FutureExt::now_or_never(view.next()).is_none());
        tap.observe(&request(&name));
        let Some(TapItem::Line(line)) = view.next().await else { panic!("no line") };
        assert_eq!((line.name.as_str(), line.query_type.as_str()), ("a.bosh.", "AAAA"));
        assert_eq!(line.rcode.as_deref(), Some("NXDOMAIN"));
        drop(view);
        assert_eq!(*tap.wanted().borrow(), 0);
    }

    #[tokio::test]
    async fn lines_stand_for_as_many_queries_as_each_looker_asked_for() {
        let tap = Tap::new();
        let name = Name::from_text("a.bosh").unwrap();
        let (mut close, mut far) = (tap.look(2), tap.look(10));
        assert_eq!(*tap.wanted().borrow(), 2);
        for _ in 0..2000 {
            tap.observe(&request(&name));
        }
        async fn weights(view: &mut TapView) -> u64 {
            let mut sum = 0;
            // All lines are there already: the time only ends the wait for one more.
            let patience = Duration::from_millis(200);
            while let Ok(Some(TapItem::Line(line))) = tokio::time::timeout(patience, view.next()).await {
                sum += u64::from(line.weight);
            }
            sum
        }
        // By chance, so about as many as there were.
        for sum in [weights(&mut close).await, weights(&mut far).await] {
            assert!((1500..2500).contains(&sum), "{sum}");
        }
        drop(close);
        assert_eq!(*tap.wanted().borrow(), 10);
    }

    #[test]
    fn types_without_a_name_have_a_number() {
        assert_eq!(type_text(1), "A");
        assert_eq!(type_text(4242), "TYPE4242");
    }
}
