//! Decides which interface answers for which endpoint, based on the queries that the kernel delivers.
//!
//! The server reports the interface on which queries reached its sockets. Such a query has passed every
//! filter, NAT rule, VRF, bridge and IPsec policy, so several of them for one endpoint open its
//! admission. While an admission is open the program passes about one query per second to userspace as a
//! probe. Clients of lost probes become witnesses: as long as one of them is silent, the admission is in doubt,
//! and the interface answers only clients whose own queries arrive ([`super::heard`]). One client that the kernel
//! does not admit, or a forged sender, therefore does not affect other clients.
//!
//! Pure bookkeeping: the caller passes the time.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashSet, btree_map::Entry},
    net::IpAddr,
    time::{Duration, Instant},
};

use dns_common::scope::{INTERFACES, LOOPBACK_IFINDEX, MAX_ENDPOINTS};
use dns_fastpath::protocol::{Arrival, MAX_CLIENTS, MIN_QUERIES};

use super::bounded::Bounded;
use crate::scope::Probed;

pub(crate) const WINDOW: Duration = Duration::from_secs(10);

/// Time limit for the arrival of a noticed probe: more than two report intervals of the server.
const PROBE_TIMEOUT: Duration = Duration::from_millis(600);

/// Number of server reports in which a noticed probe may arrive: a server that was stopped, or
/// starved of CPU time, reports again before it has read its sockets.
const PROBE_REPORTS: u64 = 3;

/// Maximum number of outstanding probes per admission; the program passes one per second.
const MAX_PENDING: usize = 8;

/// Maximum number of recent clients per admission. Beyond the reports within [`PROBE_TIMEOUT`], which name at
/// most [`MAX_CLIENTS`] each, so only a server that reports more often than agreed displaces one too early.
const MAX_RECENT: usize = 4 * MAX_CLIENTS;

/// Maximum number of clients of lost probes per admission that are not yet explained.
const MAX_LOST: usize = MAX_PENDING;

/// Number of probes lost within [`LOSS_WINDOW`] that put an admission in doubt: a single one may be lost in a burst.
const LOSSES: usize = 2;

const LOSS_WINDOW: Duration = Duration::from_secs(60);

/// How long the route to a silent client is checked.
const KNOWN_KEPT: Duration = Duration::from_secs(300);

/// Maximum number of witnesses per admission.
const MAX_WITNESSES: usize = 16;

/// Maximum number of clients per admission for which routes are checked.
const MAX_KNOWN: usize = 8;

/// Maximum number of admissions: as many as the programs can serve. A server that was taken over could otherwise
/// report any number of interfaces.
const MAX_ADMISSIONS: usize = INTERFACES * MAX_ENDPOINTS;

/// How long an open admission must stay undisturbed until its probes become rare.
const PROVEN_AFTER: Duration = Duration::from_secs(60);

pub(super) const PROVEN_PROBE_INTERVAL: Duration = Duration::from_secs(10);

/// Returns the arrivals by the interface over which they came. The queries of a local process travel over `lo`,
/// but IP_PKTINFO names the interface that has the destination address (`ipv4_pktinfo_prepare`).
pub(super) fn by_interface<'a>(
    arrival: &'a Arrival,
    local: &HashSet<IpAddr>,
) -> Vec<Cow<'a, Arrival>> {
    if arrival.ifindex == LOOPBACK_IFINDEX {
        // The kernel reports `lo` only for packets that came over it, and their senders are local.
        return vec![Cow::Borrowed(arrival)];
    }
    let mut here = Vec::new();
    let mut elsewhere = Vec::new();
    for &client in &arrival.clients {
        if client.is_loopback() || local.contains(&client) {
            here.push(client);
        } else {
            elsewhere.push(client);
        }
    }
    if here.is_empty() {
        return vec![Cow::Borrowed(arrival)];
    }
    let is_mixed = !elsewhere.is_empty();
    let mut parts = vec![part(arrival, LOOPBACK_IFINDEX, here, is_mixed)];
    if is_mixed {
        parts.push(part(arrival, arrival.ifindex, elsewhere, is_mixed));
    }
    parts
}

/// Returns the arrivals of these senders over an interface.
fn part(arrival: &Arrival, ifindex: u32, clients: Vec<IpAddr>, is_mixed: bool) -> Cow<'_, Arrival> {
    let known = u32::try_from(clients.len()).unwrap_or(u32::MAX);
    // Whose queries they were is unknown, so each sender counts once.
    let queries = if is_mixed {
        arrival.queries.min(known)
    } else {
        arrival.queries
    };
    Cow::Owned(Arrival {
        ifindex,
        queries,
        clients,
        ..*arrival
    })
}

/// The admissions, by interface and by slot of the endpoint.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    /// Admissions with any activity.
    admissions: BTreeMap<(u32, usize), EndpointAdmission>,
    /// Number of the server's reports so far.
    reports: u64,
}

/// The state of one interface for one endpoint.
#[derive(Debug, Default)]
struct EndpointAdmission {
    /// Whether the interface answers.
    open: bool,
    /// Since when it has been open without a lost probe or a change of the machine's network.
    steady_since: Option<Instant>,
    /// Queries that arrived since `since`.
    arrived: u32,
    /// Start of the count; `None` before the first query.
    since: Option<Instant>,
    /// Time of the last report with a datagram of any kind.
    seen: Option<Instant>,
    /// Clients of the reports within [`PROBE_TIMEOUT`] and their time, to explain lost probes. Kept in every state,
    /// because a closed admission may open.
    recent: Bounded<(IpAddr, Instant), MAX_RECENT>,
    /// Clients for which routes are checked.
    /// With the time of the last noticed query.
    known: Bounded<(IpAddr, Instant), MAX_KNOWN>,
    /// Whether the last report omitted clients.
    more: bool,
    /// Number of probes noticed so far.
    probes: u64,
    /// Outstanding probes, oldest first.
    pending: Bounded<PendingProbe, MAX_PENDING>,
    /// Clients of lost probes from which nothing has arrived since, with the time.
    lost: Bounded<(IpAddr, Instant), MAX_LOST>,
    /// Clients of lost probes from which nothing has arrived since.
    witnesses: Bounded<IpAddr, MAX_WITNESSES>,
}

/// A probe that has not arrived yet.
#[derive(Clone, Copy, Debug)]
struct PendingProbe {
    client: IpAddr,
    /// Time at which it was noticed.
    since: Instant,
    /// Number of the server's reports until then.
    reports: u64,
}

impl PendingProbe {
    fn is_overdue(&self, now: Instant, reports: u64) -> bool {
        now.saturating_duration_since(self.since) >= PROBE_TIMEOUT
            && reports >= self.reports + PROBE_REPORTS
    }
}

impl Gate {
    /// Counts a report from the server, with or without arrivals.
    pub(crate) fn reported(&mut self) {
        self.reports += 1;
    }

    /// Opens an admission without evidence, for an interface that the configuration names or a predecessor served.
    /// Probes check it like any other admission.
    pub(crate) fn open(&mut self, ifindex: u32, endpoint: usize, now: Instant) {
        let Some(admission) = self.admission(ifindex, endpoint) else {
            return;
        };
        if !admission.open {
            admission.open = true;
            admission.steady_since = Some(now);
        }
    }

    /// Returns an admission, a new one if necessary; `None` if there are too many.
    fn admission(&mut self, ifindex: u32, endpoint: usize) -> Option<&mut EndpointAdmission> {
        let has_room = self.admissions.len() < MAX_ADMISSIONS;
        match self.admissions.entry((ifindex, endpoint)) {
            Entry::Occupied(known) => Some(known.into_mut()),
            Entry::Vacant(new) if has_room => Some(new.insert(EndpointAdmission::default())),
            // Userspace answers there, as on every interface beyond those that the programs can
            // serve.
            Entry::Vacant(_) => None,
        }
    }

    /// Notes a change of rules, links, addresses or routes: probes are frequent again for a while.
    pub(crate) fn network_changed(&mut self, now: Instant) {
        for admission in self.admissions.values_mut() {
            // Packets that passed before may be held back from now on, and only probes show it.
            admission.steady_since = Some(now);
        }
    }

    /// Returns whether an admission has been open and undisturbed for [`PROVEN_AFTER`].
    pub(crate) fn is_proven(&self, ifindex: u32, endpoint: usize, now: Instant) -> bool {
        let Some(admission) = self.admissions.get(&(ifindex, endpoint)) else {
            return false;
        };
        let Some(since) = admission.steady_since else {
            return false;
        };
        admission.open
            && admission.lost.is_empty()
            && now.saturating_duration_since(since) >= PROVEN_AFTER
    }

    /// Processes a report. Returns whether an admission has opened.
    pub(crate) fn arrived(&mut self, endpoint: usize, arrival: &Arrival, now: Instant) -> bool {
        let Some(admission) = self.admission(arrival.ifindex, endpoint) else {
            return false;
        };
        // Also for queries that prove nothing, which `waiting` shows: other servers answer them.
        admission.seen = Some(now);
        admission.hear(arrival, now);
        // A fixed window takes one number instead of the time of each query. A burst across its end
        // opens the interface a little later.
        if admission
            .since
            .is_none_or(|since: Instant| now.saturating_duration_since(since) > WINDOW)
        {
            admission.since = Some(now);
            admission.arrived = 0;
        }
        admission.arrived = admission.arrived.saturating_add(arrival.queries);
        let opens = !admission.open && admission.arrived >= MIN_QUERIES;
        if opens {
            admission.open = true;
            admission.arrived = 0;
            admission.steady_since = Some(now);
            // Five queries have just arrived, so an earlier loss proves nothing any more.
            admission.lost.clear();
        }
        opens
    }

    /// Processes the programs' record of probes at an open admission; returns whether there is a new one.
    pub(crate) fn probed(
        &mut self,
        ifindex: u32,
        endpoint: usize,
        probed: Probed,
        now: Instant,
    ) -> bool {
        let Some(admission) = self.admissions.get_mut(&(ifindex, endpoint)) else {
            return false;
        };
        // The slot was cleared when the interface was served again.
        let is_new_count = probed.count < admission.probes;
        if probed.count == admission.probes || is_new_count {
            admission.probes = probed.count;
            return false;
        }
        admission.probes = probed.count;
        // Before it is known whether the probe arrives: a route may refuse replies to this client.
        admission.know(probed.client, now);
        let has_arrived = admission
            .recent
            .iter()
            .any(|&(client, since)| client == probed.client && is_recent(since, now));
        // A report that left clients out may have left out this one: what cannot be recognised must
        // not count as lost.
        if !admission.more && !has_arrived {
            admission.pending.push(PendingProbe {
                client: probed.client,
                since: now,
                reports: self.reports,
            });
        }
        // An arrival explains one probe. The next one needs a report of its own, or a single report
        // would speak for probes of many seconds.
        admission.recent.clear();
        admission.more = false;
        true
    }

    /// Returns the clients whose probes are lost. If `explained`, a full receive queue or a silent server may be the
    /// reason, so the losses prove nothing.
    pub(crate) fn judge(&mut self, now: Instant, explained: impl FnOnce() -> bool) -> Vec<Loss> {
        self.forget_old(now);
        let reports = self.reports;
        let mut is_calm = true;
        for admission in self.admissions.values() {
            is_calm &= admission.lost.is_empty() && !admission.has_overdue(now, reports);
        }
        // The explanation costs two files of /proc, so it is asked for only if something is
        // overdue.
        if is_calm {
            return Vec::new();
        }
        if explained() {
            // A probe may have been delivered and then dropped by a full queue, so none of them
            // proves a loss.
            for admission in self.admissions.values_mut() {
                admission.pending.clear();
                admission.lost.clear();
            }
            return Vec::new();
        }
        let mut losses = Vec::new();
        for (&(ifindex, endpoint), admission) in &mut self.admissions {
            for pending in std::mem::take(&mut admission.pending).iter() {
                // A probe keeps its place and its time until it is overdue; `hear` removes it if it
                // arrives.
                if !pending.is_overdue(now, reports) {
                    admission.pending.push(*pending);
                    continue;
                }
                losses.push(Loss {
                    ifindex,
                    endpoint,
                    client: pending.client,
                    raises_doubt: admission.lose(pending.client, pending.since),
                });
            }
            admission
                .lost
                .retain(|&(_, since)| now.saturating_duration_since(since) < LOSS_WINDOW);
        }
        losses
    }

    fn forget_old(&mut self, now: Instant) {
        for admission in self.admissions.values_mut() {
            admission
                .known
                .retain(|&(_, seen)| now.saturating_duration_since(seen) < KNOWN_KEPT);
        }
    }

    /// Returns a client whose silence leaves an admission in doubt.
    pub(crate) fn witness(&self, ifindex: u32, endpoint: usize) -> Option<IpAddr> {
        let admission = self.admissions.get(&(ifindex, endpoint))?;
        admission.witnesses.last().copied()
    }

    /// Returns the queries that arrived on an interface in its current windows.
    pub(crate) fn queries(&self, ifindex: u32) -> u32 {
        let admissions = self.admissions.range((ifindex, 0)..=(ifindex, usize::MAX));
        admissions.fold(0, |sum, (_, admission)| {
            sum.saturating_add(admission.arrived)
        })
    }

    pub(crate) fn is_open(&self, ifindex: u32, endpoint: usize) -> bool {
        self.admissions
            .get(&(ifindex, endpoint))
            .is_some_and(|admission| admission.open)
    }

    /// Returns some clients of an admission.
    pub(super) fn known(&self, ifindex: u32, endpoint: usize) -> impl Iterator<Item = IpAddr> {
        let admission = self.admissions.get(&(ifindex, endpoint));
        // Without a copy: each round checks the clients of every open admission.
        let known = admission.into_iter().flat_map(|one| one.known.iter());
        known.map(|&(client, _)| client)
    }

    /// Closes the admissions of a detached interface; only new evidence opens them.
    pub(crate) fn close(&mut self, ifindex: u32) {
        for (_, admission) in self
            .admissions
            .range_mut((ifindex, 0)..=(ifindex, usize::MAX))
        {
            *admission = EndpointAdmission {
                // Their silence is still unexplained when the interface is served again: after a
                // pause for want of replies, it must not answer clients that the kernel holds back.
                witnesses: std::mem::take(&mut admission.witnesses),
                ..EndpointAdmission::default()
            };
        }
    }

    pub(crate) fn interfaces(&self) -> impl Iterator<Item = u32> {
        self.admissions
            .iter()
            .filter(|(_, admission)| admission.open)
            .map(|(&(ifindex, _), _)| ifindex)
    }

    /// Returns the interfaces with a closed admission at which queries arrive, and the number of those in the current
    /// window; others that arrive are answered by other servers.
    pub(crate) fn waiting(&self, now: Instant) -> impl Iterator<Item = (u32, u32)> {
        let mut waiting = Vec::new();
        for (&(ifindex, _), admission) in &self.admissions {
            let is_counting = admission.since.is_some_and(|at| is_in_window(at, now));
            let is_seen = admission.seen.is_some_and(|at| is_in_window(at, now));
            // A window that is over is begun anew only by the next query, so its number is out of
            // date.
            let counted = if is_counting { admission.arrived } else { 0 };
            if !admission.open && (counted > 0 || is_seen) {
                waiting.push((ifindex, counted));
            }
        }
        waiting.into_iter()
    }

    /// Forgets interfaces and endpoints that are gone.
    pub(crate) fn retain(&mut self, keep: impl Fn(u32, usize) -> bool) {
        self.admissions
            .retain(|&(ifindex, endpoint), _| keep(ifindex, endpoint));
    }
}

/// A probe that did not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Loss {
    pub(crate) ifindex: u32,
    /// Slot of the endpoint.
    pub(crate) endpoint: usize,
    pub(crate) client: IpAddr,
    /// Whether the admission is in doubt since this loss.
    pub(crate) raises_doubt: bool,
}

impl EndpointAdmission {
    fn has_overdue(&self, now: Instant, reports: u64) -> bool {
        self.pending
            .iter()
            .any(|pending| pending.is_overdue(now, reports))
    }

    /// Notes the clients of a report: their probes have arrived, and they are no longer witnesses.
    fn hear(&mut self, arrival: &Arrival, now: Instant) {
        let heard = &arrival.clients;
        // A client that asks in every report takes one place, at the time of its last query.
        self.recent
            .retain(|(client, since)| is_recent(*since, now) && !heard.contains(client));
        // The number is not the sender's to choose.
        for &client in heard.iter().take(MAX_CLIENTS) {
            self.recent.push((client, now));
            self.know(client, now);
        }
        self.more |= arrival.more;
        self.witnesses.retain(|client| !heard.contains(client));
        self.lost.retain(|(client, _)| !heard.contains(client));
        // Any outstanding probe may have been among the clients that the report left out.
        let more = self.more;
        self.pending
            .retain(|pending| !more && !heard.contains(&pending.client));
    }

    fn know(&mut self, client: IpAddr, now: Instant) {
        if let Some((_, seen)) = self.known.iter_mut().find(|(known, _)| *known == client) {
            *seen = now;
            return;
        }
        self.known.push((client, now));
    }

    /// Notes the loss of a client's probe; returns whether the admission is in doubt since this loss.
    fn lose(&mut self, client: IpAddr, since: Instant) -> bool {
        self.lost.push((client, since));
        self.steady_since = Some(since);
        let was_in_doubt = !self.witnesses.is_empty();
        // Once there is doubt, every further silent client is a witness: it ends only when all of
        // them are heard.
        if !was_in_doubt && self.lost.len() < LOSSES {
            return false;
        }
        for (client, _) in std::mem::take(&mut self.lost).iter() {
            // Moved to the end: the one silent for the longest time is displaced first, and
            // `status` names the latest.
            self.witnesses.retain(|known| known != client);
            self.witnesses.push(*client);
        }
        !was_in_doubt
    }
}

fn is_in_window(at: Instant, now: Instant) -> bool {
    now.saturating_duration_since(at) <= WINDOW
}

/// Returns whether a report is so recent that it may name the client of a probe that was noticed only now.
fn is_recent(reported: Instant, now: Instant) -> bool {
    now.saturating_duration_since(reported) < PROBE_TIMEOUT
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 255, 10, 2));
    const OTHER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 255, 10, 3));

    fn arrival(client: IpAddr, queries: u32) -> Arrival {
        let endpoint = "169.254.0.2:53".parse().unwrap();
        Arrival {
            ifindex: 7,
            endpoint,
            queries,
            clients: vec![client],
            more: false,
        }
    }

    fn probed(client: IpAddr, count: u64) -> Probed {
        Probed { count, client }
    }

    /// Returns a gate with an open admission, and the time.
    fn open() -> (Gate, Instant) {
        let mut gate = Gate::default();
        let now = Instant::now();
        assert!(gate.arrived(0, &arrival(CLIENT, MIN_QUERIES), now));
        (gate, now)
    }

    /// Returns the number of values in all collections.
    fn kept(gate: &Gate) -> usize {
        let of_each = gate.admissions.values().map(|admission| {
            let EndpointAdmission {
                open: _,
                steady_since: _,
                arrived: _,
                since: _,
                seen: _,
                recent,
                known,
                more: _,
                probes: _,
                pending,
                lost,
                witnesses,
            } = admission;
            recent.len() + known.len() + pending.len() + lost.len() + witnesses.len()
        });
        of_each.sum::<usize>() + gate.admissions.len()
    }

    /// State in which an admission stays for an hour.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Hour {
        /// Outside names alone: nothing counts as evidence.
        OutsideNames,
        /// Open, but without a program, for example because rules limit its queries.
        NotServed,
        /// Open, and its probes arrive.
        Served,
        /// In doubt because of clients of which nothing arrives.
        Witness,
        /// Detached for want of replies, again and again.
        Idle,
    }

    #[test]
    fn an_hour_of_reports_takes_bounded_memory() {
        const REPORTS: u64 = 3600 * 4;
        const BOUND: usize = 1 + MAX_RECENT + MAX_KNOWN + MAX_PENDING + MAX_LOST + MAX_WITNESSES;
        let hours = [
            Hour::OutsideNames,
            Hour::NotServed,
            Hour::Served,
            Hour::Witness,
            Hour::Idle,
        ];
        for hour in hours {
            let mut gate = Gate::default();
            let mut now = Instant::now();
            let mut most = 0;
            for number in 0..REPORTS {
                let address = |client: u64| {
                    let number = u32::try_from(number * 32 + client).expect("an hour is short");
                    IpAddr::from((10 << 24 | number).to_be_bytes())
                };
                let report = Arrival {
                    queries: u32::from(hour != Hour::OutsideNames) * 32,
                    clients: (0..MAX_CLIENTS as u64).map(address).collect(),
                    ..arrival(CLIENT, 0)
                };
                gate.reported();
                gate.arrived(0, &report, now);
                let is_second = number % 4 == 0;
                match hour {
                    Hour::Served if is_second => {
                        gate.probed(7, 0, probed(address(0), number + 1), now);
                    }
                    Hour::Witness if is_second => {
                        gate.probed(7, 0, probed(OTHER, number + 1), now);
                    }
                    Hour::Idle if number % 1200 == 0 => gate.close(7),
                    _ => {}
                }
                gate.judge(now, || false);
                most = most.max(kept(&gate));
                now += Duration::from_millis(250);
            }
            assert!(most <= BOUND, "{hour:?}: {most} values");
            // Nothing is left of an hour but what the last reports brought.
            assert!(
                kept(&gate) <= 1 + 3 * MAX_CLIENTS + MAX_KNOWN + MAX_PENDING + MAX_WITNESSES,
                "{hour:?}: {} values",
                kept(&gate)
            );
        }
    }

    #[test]
    fn invented_interfaces_take_bounded_memory() {
        let mut gate = Gate::default();
        let now = Instant::now();
        for ifindex in 0..2 * MAX_ADMISSIONS as u32 {
            let report = Arrival {
                ifindex,
                ..arrival(CLIENT, MIN_QUERIES)
            };
            gate.arrived(0, &report, now);
        }
        assert_eq!(gate.admissions.len(), MAX_ADMISSIONS);
    }

    #[test]
    fn enough_queries_in_time_open() {
        let mut gate = Gate::default();
        let now = Instant::now();
        assert!(!gate.arrived(0, &arrival(CLIENT, MIN_QUERIES - 1), now));
        assert!(
            !gate.arrived(0, &arrival(CLIENT, 1), now + WINDOW * 2),
            "too far apart"
        );
        assert!(gate.arrived(0, &arrival(CLIENT, MIN_QUERIES - 1), now + WINDOW * 2));
        assert!(gate.is_open(7, 0) && !gate.is_open(7, 1) && !gate.is_open(8, 0));
    }

    #[test]
    fn arriving_probes_keep_the_admission_open() {
        let (mut gate, mut now) = open();
        for count in 1..100 {
            gate.probed(7, 0, probed(CLIENT, count), now);
            now += Duration::from_millis(250);
            gate.arrived(0, &arrival(CLIENT, 1), now);
            now += Duration::from_millis(750);
            assert_eq!(gate.judge(now, || false), []);
        }
        assert!(gate.is_open(7, 0));
    }

    #[test]
    fn early_arrival_counts() {
        let (mut gate, mut now) = open();
        for count in 1..10 {
            gate.arrived(0, &arrival(CLIENT, 1), now);
            gate.probed(7, 0, probed(CLIENT, count), now);
            now += Duration::from_secs(1);
            assert_eq!(gate.judge(now, || false), []);
        }
    }

    #[test]
    fn lost_probes_raise_doubt_within_three_seconds() {
        let (mut gate, begin) = open();
        let mut now = begin;
        let mut losses = Vec::new();
        while gate.witness(7, 0).is_none() {
            let elapsed = now.duration_since(begin);
            assert!(elapsed < Duration::from_secs(3), "no doubt yet");
            gate.reported();
            // The program passes one query per second.
            gate.probed(7, 0, probed(CLIENT, elapsed.as_secs()), now);
            losses.extend(gate.judge(now, || false));
            now += Duration::from_millis(250);
        }
        let raises: Vec<bool> = losses.iter().map(|loss| loss.raises_doubt).collect();
        assert_eq!(raises, [false, true]);
        assert!(losses.iter().all(|loss| loss.client == CLIENT));
        gate.arrived(0, &arrival(OTHER, 100), now);
        assert_eq!(gate.witness(7, 0), Some(CLIENT), "it is still silent");
        gate.arrived(0, &arrival(CLIENT, 1), now);
        assert_eq!(gate.witness(7, 0), None);
        assert!(gate.is_open(7, 0));
    }

    #[test]
    fn client_among_many_is_heard() {
        let (mut gate, mut now) = open();
        let mut lost = Vec::new();
        for count in 1..6 {
            let client = if count % 2 == 0 { OTHER } else { CLIENT };
            gate.probed(7, 0, probed(client, count), now);
            if client == CLIENT {
                gate.arrived(0, &arrival(CLIENT, 1), now);
            }
            now += Duration::from_secs(1);
            (0..4).for_each(|_| gate.reported());
            lost.extend(gate.judge(now, || false).iter().map(|loss| loss.client));
        }
        assert_eq!(lost, [OTHER, OTHER], "although others arrive");
        assert_eq!(gate.witness(7, 0), Some(OTHER));
    }

    #[test]
    fn uncounted_queries_are_shown() {
        let mut gate = Gate::default();
        let now = Instant::now();
        gate.arrived(0, &arrival(CLIENT, 0), now);
        assert!(gate.waiting(now).eq([(7, 0)]));
        assert_eq!(gate.waiting(now + WINDOW * 2).count(), 0);
        gate.arrived(0, &arrival(CLIENT, 1), now + WINDOW * 2);
        assert!(gate.waiting(now + WINDOW * 2).eq([(7, 1)]));
    }

    #[test]
    fn silent_client_is_forgotten() {
        let (mut gate, now) = open();
        gate.probed(7, 0, probed(OTHER, 1), now);
        assert!(gate.known(7, 0).eq([CLIENT, OTHER]));
        gate.arrived(0, &arrival(CLIENT, 1), now + KNOWN_KEPT);
        gate.judge(now + KNOWN_KEPT, || false);
        assert!(gate.known(7, 0).eq([CLIENT]));
    }

    #[test]
    fn local_senders_count_for_lo() {
        let local = HashSet::from([OTHER]);
        let mixed = Arrival {
            clients: vec![CLIENT, OTHER],
            ..arrival(CLIENT, 100)
        };
        let counted = |arrival: &Arrival| -> Vec<(u32, Vec<IpAddr>, u32)> {
            let parts = by_interface(arrival, &local);
            parts
                .iter()
                .map(|part: &Cow<'_, Arrival>| (part.ifindex, part.clients.clone(), part.queries))
                .collect()
        };
        assert_eq!(
            counted(&mixed),
            [(LOOPBACK_IFINDEX, vec![OTHER], 1), (7, vec![CLIENT], 1)]
        );
        let alone = [(LOOPBACK_IFINDEX, vec![OTHER], 100)];
        assert_eq!(counted(&arrival(OTHER, 100)), alone);
        assert_eq!(counted(&arrival(CLIENT, 100)), [(7, vec![CLIENT], 100)]);
        let loopback = IpAddr::from([127, 0, 0, 9]);
        assert_eq!(
            counted(&arrival(loopback, 5)),
            [(LOOPBACK_IFINDEX, vec![loopback], 5)]
        );
        let over_lo = Arrival {
            ifindex: LOOPBACK_IFINDEX,
            ..mixed
        };
        assert_eq!(by_interface(&over_lo, &local), [Cow::Borrowed(&over_lo)]);
    }

    #[test]
    fn proven_admission_is_probed_rarely() {
        let (mut gate, begin) = open();
        let proven = begin + PROVEN_AFTER;
        assert!(
            !gate.is_proven(7, 0, begin)
                && gate.is_proven(7, 0, proven)
                && !gate.is_proven(7, 1, proven)
        );
        gate.network_changed(proven);
        assert!(!gate.is_proven(7, 0, proven), "a rule has changed");
        let again = proven + PROVEN_AFTER;
        assert!(gate.is_proven(7, 0, again));
        // A single lost probe suffices.
        assert!(
            gate.probed(7, 0, probed(OTHER, 1), again)
                && !gate.probed(7, 0, probed(OTHER, 1), again)
        );
        (0..4).for_each(|_| gate.reported());
        let later = again + Duration::from_secs(1);
        assert_eq!(gate.judge(later, || false).len(), 1);
        assert_eq!(gate.witness(7, 0), None);
        assert!(!gate.is_proven(7, 0, later));
    }

    #[test]
    fn cleared_slot_is_no_probe() {
        let (mut gate, mut now) = open();
        gate.probed(7, 0, probed(CLIENT, 5), now);
        gate.arrived(0, &arrival(CLIENT, 1), now);
        now += Duration::from_secs(1);
        gate.probed(7, 0, probed(IpAddr::from([0; 16]), 0), now);
        assert_eq!(gate.judge(now + Duration::from_secs(1), || false), []);
        assert_eq!(gate.witness(7, 0), None);
    }

    #[test]
    fn full_queue_explains_losses() {
        let (mut gate, mut now) = open();
        for count in 1..10 {
            gate.probed(7, 0, probed(CLIENT, count), now);
            now += Duration::from_secs(1);
            assert_eq!(gate.judge(now, || true), []);
        }
        assert_eq!(gate.witness(7, 0), None);
    }

    #[test]
    fn stopped_server_loses_no_probe() {
        let (mut gate, mut now) = open();
        for count in 1..20 {
            gate.probed(7, 0, probed(CLIENT, count), now);
            // The server was stopped for a while; its first report precedes its reading of the probe.
            now += Duration::from_secs(2);
            gate.reported();
            assert_eq!(gate.judge(now, || false), []);
            now += Duration::from_millis(250);
            gate.reported();
            gate.arrived(0, &arrival(CLIENT, 1), now);
            assert_eq!(gate.judge(now, || false), []);
        }
        assert!(gate.is_open(7, 0));
    }

    #[test]
    fn doubt_outlasts_idleness() {
        let (mut gate, now) = open();
        for count in 1..4 {
            gate.probed(7, 0, probed(OTHER, count), now + Duration::from_secs(count));
        }
        (0..4).for_each(|_| gate.reported());
        assert_eq!(gate.judge(now + Duration::from_secs(4), || false).len(), 3);
        gate.close(7);
        assert!(!gate.is_open(7, 0));
        assert!(gate.arrived(
            0,
            &arrival(CLIENT, MIN_QUERIES),
            now + Duration::from_secs(600)
        ));
        assert_eq!(
            gate.witness(7, 0),
            Some(OTHER),
            "other clients' queries say nothing about it"
        );
    }
}
