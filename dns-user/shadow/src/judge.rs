//! From a query and its reply to a verdict.
//!
//! A difference is judged twice: at once, and again when [`TRANSITION`] has passed, because the observed server may have
//! read newer records than we had, or older ones than we have.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    net::IpAddr,
    time::{Duration, Instant},
};

use dns_core::{
    name::Name,
    wire::{
        CLASS_ANY, CLASS_IN, HEADER_LEN, MAX_TCP_SIZE, MAX_UDP_SIZE, MIN_UDP_SIZE, Parsed,
        Transport, parse_by,
    },
};
use serde::Serialize;

use crate::{
    compare::{Cause, Finding, compare},
    pairs::Exchange,
    question::Question,
    reference::{Asked, HealthKnowledge, OurReply, Ours, Reference, Route, Settings},
    reply::{Record, Reply},
    rows::{Circumstances, Row, explain},
};

/// Time around a change of records or health within which a difference may be due to it.
pub const TRANSITION: Duration = Duration::from_secs(5);

/// Maximum number of differences that wait for their second judgement, and of the bytes of their messages.
const MAX_SUSPECTS: usize = 2048;
const MAX_SUSPECT_BYTES: usize = 8 << 20;
/// States of the first judgement, which must not delay the next packet: the last ones explain most differences.
const FIRST_STATES: usize = 4;
/// Maximum number of groups of differences, and of examples in each.
const MAX_GROUPS: usize = 64;
const MAX_EXAMPLES: usize = 3;
/// Maximum number of lines that explain how a name resolves: a group may have thousands of instances.
const MAX_STEPS: usize = 20;
/// Maximum number of characters of such a line, which may list as many addresses.
const MAX_STEP_LEN: usize = 400;
/// Maximum number of questions whose order of answers is followed.
const MAX_ORDERS: usize = 4096;
/// Replies with the same first address after which the order counts as fixed: among two addresses by chance once in
/// 2^39 cases.
const FIXED_ORDER: u64 = 40;

/// The verdict on an exchange.
enum Verdict {
    /// Our reply would be the same.
    Equal,
    /// Our server would ask the same kind of source.
    SameRoute,
    /// The replies differ because records or health are changing.
    InTransition,
    /// Every difference is explained by these rows.
    Documented(Vec<Row>),
    /// These differences have no explanation.
    Unexplained(Vec<Finding>),
}

/// A group of differences with the same cause.
#[derive(Clone, Debug, Default)]
pub struct Group {
    /// How often it was found.
    pub count: u64,
    /// The first of them.
    pub examples: Vec<Example>,
}

/// A difference, as reports show it.
#[derive(Clone, Debug)]
pub struct Example {
    /// The question of the query.
    pub question: Question,
    /// The sender of the query.
    pub client: IpAddr,
    /// The differences of the replies.
    pub findings: Vec<Finding>,
    /// The observed reply; `None` if there was none or it cannot be parsed.
    pub theirs: Option<Reply>,
    /// Our reply; `None` if there is none to compare.
    pub ours: Option<Reply>,
    /// The source that answers the name here.
    pub route: Route,
    /// How the name resolves here; empty for documented differences.
    pub steps: String,
}

/// A cause of a group.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum GroupCause {
    /// Explained by this row.
    Documented(Row),
    /// Unexplained, with the kinds of findings.
    Unexplained(Vec<Cause>),
}

/// Numbers of exchanges by verdict.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Verdicts {
    /// All exchanges that were compared.
    pub compared: u64,
    /// Exchanges with the same reply.
    pub equal: u64,
    /// Exchanges of which only the route was compared, and is the same: another server determines the content.
    pub same_route: u64,
    /// Exchanges that differ only because records or health were changing.
    pub in_transition: u64,
    /// Exchanges that differ as docs/differences.md states.
    pub documented: u64,
    /// Exchanges that differ without an explanation.
    pub unexplained: u64,
    /// Differences that were not judged, because too many waited or the user did not.
    pub unjudged: u64,
}

impl Verdicts {
    /// Returns the kinds of verdicts with their counts.
    pub fn rows(&self) -> [(&'static str, u64); 6] {
        [
            ("equal", self.equal),
            ("same route", self.same_route),
            ("in transition", self.in_transition),
            ("documented", self.documented),
            ("unexplained", self.unexplained),
            ("not judged", self.unjudged),
        ]
    }
}

/// The result of the comparisons so far.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Numbers of verdicts.
    pub verdicts: Verdicts,
    /// Queries without a reply, where ours would have been one.
    pub unanswered: u64,
    /// Groups of differences by their cause.
    pub groups: BTreeMap<GroupCause, Group>,
    /// Compared exchanges by route.
    pub routes: BTreeMap<Route, u64>,
    /// Queries that an interface would have answered.
    pub from_interface: u64,
    /// Other queries, by reason.
    pub not_from_interface: BTreeMap<&'static str, u64>,
}

/// How often the first address of the answers to a question was the same.
#[derive(Default)]
struct Order {
    first: String,
    same: u64,
    others: u64,
}

/// Judges exchanges by a reference.
pub struct Judge<R> {
    /// The source of our answers.
    pub reference: R,
    /// The result so far.
    pub tally: Tally,
    suspects: VecDeque<Exchange>,
    /// Bytes of their messages.
    suspect_bytes: usize,
    orders: HashMap<(Vec<u8>, u16), Order>,
}

impl<R: Reference> Judge<R> {
    /// Creates a judge that has seen nothing.
    pub fn new(reference: R) -> Self {
        Self {
            reference,
            tally: Tally::default(),
            suspects: VecDeque::new(),
            suspect_bytes: 0,
            orders: HashMap::new(),
        }
    }

    /// Judges an exchange, at once or when its time has come.
    pub fn judge(&mut self, exchange: Exchange) {
        let (verdict, case) = self.verdict(&exchange, FIRST_STATES);
        self.tally.verdicts.compared += 1;
        *self.tally.routes.entry(case.ours.route).or_default() += 1;
        match case.ours.interface {
            Ok(()) => self.tally.from_interface += 1,
            Err(reason) => *self.tally.not_from_interface.entry(reason).or_default() += 1,
        }
        if matches!(verdict, Verdict::Unexplained(_)) {
            // Each keeps both messages until its second judgement.
            let bytes = self.suspect_bytes + exchange.bytes();
            if self.suspects.len() < MAX_SUSPECTS && bytes <= MAX_SUSPECT_BYTES {
                self.suspect_bytes = bytes;
                self.suspects.push_back(exchange);
            } else {
                self.tally.verdicts.unjudged += 1;
            }
            return;
        }
        self.follow_order(&exchange, &case);
        self.count(&exchange, verdict, case);
    }

    /// Judges the differences a second time for which `now` is late enough.
    pub fn settle(&mut self, now: Instant) {
        while let Some(suspect) = self
            .suspects
            .pop_front_if(|suspect| now.duration_since(suspect.replied) >= TRANSITION)
        {
            self.suspect_bytes -= suspect.bytes();
            let (verdict, case) = self.verdict(&suspect, usize::MAX);
            self.count(&suspect, verdict, case);
        }
    }

    /// Returns whether differences wait for their second judgement.
    pub fn is_settled(&self) -> bool {
        self.suspects.is_empty()
    }

    /// Adds the findings that need all replies. Differences that still wait are not judged any more.
    pub fn finish(&mut self) {
        self.tally.verdicts.unjudged += self.suspects.len() as u64;
        self.suspects.clear();
        self.suspect_bytes = 0;
        for ((name, qtype), order) in std::mem::take(&mut self.orders) {
            // Clients take the first address, so a fixed order would put all load on one instance.
            if order.others > 0 || order.same < FIXED_ORDER {
                continue;
            }
            let question = Question::of_name(&name, qtype);
            let detail = format!("{} first in {} replies", order.first, order.same);
            let finding = Finding::new(Cause::OrderFixed, detail);
            self.tally.verdicts.unexplained += 1;
            let example = Example {
                question,
                // Many clients have asked.
                client: IpAddr::from([0, 0, 0, 0]),
                findings: vec![finding],
                theirs: None,
                ours: None,
                route: Route::Fleet,
                steps: String::new(),
            };
            self.add(GroupCause::Unexplained(vec![Cause::OrderFixed]), example);
        }
    }

    /// Compares with the states that the observed server may have answered from, at most so many.
    fn verdict(&mut self, exchange: &Exchange, most: usize) -> (Verdict, Case) {
        let (first, case) = self.verdict_of(exchange, 0);
        if !matches!(first, Verdict::Unexplained(_)) {
            return (first, case);
        }
        let since = exchange.asked.checked_sub(TRANSITION);
        let states = self.reference.states(since.unwrap_or(exchange.asked));
        let states = states.min(most);
        // The current state has just been compared.
        for state in 1..states {
            let (verdict, case) = self.verdict_of(exchange, state);
            if !matches!(verdict, Verdict::Unexplained(_)) {
                return (Verdict::InTransition, case);
            }
        }
        // Of records that change often, two servers may read different versions, and none of them all.
        if let Verdict::Unexplained(findings) = &first
            && findings.iter().all(|finding| finding.cause.is_of_answer())
        {
            let now = self.meaning(exchange, 0);
            if (1..states).any(|state| self.meaning(exchange, state) != now) {
                return (Verdict::InTransition, case);
            }
        }
        (first, case)
    }

    /// Answers the query of an exchange over a transport.
    fn answer(
        &mut self,
        exchange: &Exchange,
        transport: Transport,
        settings: Settings,
        state: usize,
    ) -> Ours {
        let asked = Asked {
            query: &exchange.query,
            client: exchange.client,
            transport,
        };
        self.reference.answer(&asked, settings, state)
    }

    /// Returns what a query means in a state: RCODE and all records.
    fn meaning(&mut self, exchange: &Exchange, state: usize) -> Option<(u16, Vec<Record>)> {
        // Over TCP, because a truncated reply holds other records each time.
        let ours = self.answer(exchange, Transport::Tcp, Settings::Configured, state);
        let mut reply = read_ours(&ours)?;
        // Answers are shuffled.
        reply.answers.sort();
        Some((reply.rcode, reply.answers))
    }

    fn verdict_of(&mut self, exchange: &Exchange, state: usize) -> (Verdict, Case) {
        let ours = self.answer(exchange, exchange.transport, Settings::Configured, state);
        let mut case = Case {
            theirs: Reply::read(&exchange.reply),
            our_reply: read_ours(&ours),
            findings: Vec::new(),
            ours,
        };
        match case.ours.reply {
            OurReply::Message(_) => {}
            OurReply::Elsewhere => return self.judge_route(exchange, case),
            OurReply::Silence if exchange.reply.is_empty() => return (Verdict::Equal, case),
            // Only messages that are no queries get no reply here.
            OurReply::Silence => {
                return (Verdict::Documented(vec![Row::MalformedMessages]), case);
            }
        }
        if exchange.reply.is_empty() {
            case.findings = vec![Finding::new(Cause::NoReply, "")];
        } else {
            case.findings = self.findings(exchange, &case, Settings::Configured, state);
        }
        if case.findings.is_empty() {
            return (Verdict::Equal, case);
        }
        if is_due_to_health(&case) {
            // Without health, all instances are candidates, and nothing can be said about the selection.
            let verdict = if case.ours.health == HealthKnowledge::Ignored {
                Verdict::Equal
            } else {
                Verdict::InTransition
            };
            return (verdict, case);
        }
        let verdict = self.explain(exchange, &case, state);
        (verdict, case)
    }

    /// Compares the observed reply with ours under some settings.
    fn findings(
        &mut self,
        exchange: &Exchange,
        case: &Case,
        settings: Settings,
        state: usize,
    ) -> Vec<Finding> {
        let Some(theirs) = &case.theirs else {
            return vec![Finding::new(Cause::Unparsable, "")];
        };
        let ours = match settings {
            Settings::Configured => case.our_reply.clone(),
            Settings::Compatible => {
                read_ours(&self.answer(exchange, exchange.transport, settings, state))
            }
        };
        let Some(ours) = ours else {
            return vec![Finding::new(Cause::Route, "")];
        };
        let mut whole = None;
        // Which records a truncated reply holds is a matter of chance. The whole answer over TCP
        // tells whether they belong to it.
        if theirs.is_truncated() || ours.is_truncated() {
            whole = read_ours(&self.answer(exchange, Transport::Tcp, settings, state));
        }
        let whole = whole.as_ref().unwrap_or(&ours);
        let mut findings = compare(theirs, &ours, whole, limit(exchange));
        let is_local = matches!(case.ours.route, Route::Fleet | Route::Upcheck);
        if !findings.is_empty() && is_local && looks_forwarded(theirs) {
            let detail = format!("like a recursor, instead of {}", case.ours.route.text());
            // First: another source explains all other differences.
            findings.insert(0, Finding::new(Cause::Route, detail));
        }
        findings
    }

    /// Judges a reply to a name that our server would forward: by its form and its likely source.
    fn judge_route(&mut self, exchange: &Exchange, case: Case) -> (Verdict, Case) {
        // A recursor, or the network before it, may lose any query; and whether a reply that was passed on can be
        // parsed is not the server's doing.
        let Some(theirs) = &case.theirs else {
            return (Verdict::SameRoute, case);
        };
        // In some cases bosh-dns passes on a reply that is larger than its client accepts.
        if theirs.length > limit(exchange) {
            return (Verdict::Documented(vec![Row::LargeReplies]), case);
        }
        let mut findings = Vec::new();
        let asked = Question::read(&exchange.query).unwrap_or_default();
        if theirs.question.is_some()
            && let Some(repeated) = Question::read(&exchange.reply)
                        // Recursors may change the letter case.
            && !repeated.wire.eq_ignore_ascii_case(&asked.wire)
        {
            findings.push(Finding::of_values(
                Cause::Question,
                repeated.name,
                &asked.name,
            ));
        }
        if self.is_like_fleet(theirs) {
            let detail = format!("like the fleet, instead of {}", case.ours.route.text());
            findings.push(Finding::new(Cause::Route, detail));
        }
        if findings.is_empty() {
            return (Verdict::SameRoute, case);
        }
        let name = Name::from_wire(&asked.wire);
        if name.is_ok_and(|(name, _)| self.reference.nature(&name).has_other_domain) {
            return (Verdict::Documented(vec![Row::TextualSuffix]), case);
        }
        (Verdict::Unexplained(findings), case)
    }

    /// Returns whether a reply has the form of one from records: addresses of the fleet with TTL 0 and AA.
    fn is_like_fleet(&self, reply: &Reply) -> bool {
        if !reply.is_authoritative() || reply.answers.is_empty() {
            return false;
        }
        for record in &reply.answers {
            match record.data.parse() {
                Ok(address) if record.ttl == 0 && self.reference.is_of_fleet(address) => {}
                _ => return false,
            }
        }
        true
    }

    /// Explains findings by rows, or leaves the ones without an explanation.
    fn explain(&mut self, exchange: &Exchange, case: &Case, state: usize) -> Verdict {
        let given = self.circumstances(exchange, case);
        // bosh-dns never uses such a handler again, so everything is the recursors'.
        let is_handler = case.ours.route == Route::Handler;
        if is_handler && given.nature.is_of_former_handler && given.looks_forwarded {
            return Verdict::Documented(vec![Row::RetiredHandlers]);
        }
        // A finding that the compatibility settings remove is what such a setting restores.
        let compatible = self.findings(exchange, case, Settings::Compatible, state);
        let mut rows = Vec::new();
        let mut unexplained = Vec::new();
        for finding in &case.findings {
            let is_restored = !compatible.iter().any(|other| other.cause == finding.cause);
            match explain(finding, is_restored, &given) {
                Some(row) => rows.push(row),
                None => unexplained.push(finding.clone()),
            }
        }
        rows.sort_unstable();
        rows.dedup();
        // Everything else in the reply follows from another RCODE.
        let rcode = case
            .findings
            .iter()
            .find(|finding| finding.cause == Cause::Rcode);
        let is_rcode_explained = rcode.is_some_and(|rcode| !unexplained.contains(rcode));
        let is_documented = unexplained
            .iter()
            .all(|finding| is_rcode_explained && finding.cause != Cause::Question);
        if is_documented {
            Verdict::Documented(rows)
        } else {
            Verdict::Unexplained(unexplained)
        }
    }

    /// Returns what decides which rows explain a difference.
    fn circumstances(&self, exchange: &Exchange, case: &Case) -> Circumstances {
        /// `arpa.` in wire format.
        const ARPA: &[u8] = b"\x04arpa\0";
        const IP6_ARPA: &[u8] = b"\x03ip6\x04arpa\0";
        /// An AAAA record of class IN with TTL 0 and no data, behind its owner.
        const EMPTY_ADDRESS: &[u8] = &[0, 28, 0, 1, 0, 0, 0, 0, 0, 0];
        let question = Question::read(&exchange.query).unwrap_or_default();
        let parsed = parse_by(exchange.transport, &exchange.query);
        let name = Name::from_wire(&question.wire);
        let lower = question.wire.to_ascii_lowercase();
        Circumstances {
            is_other_class: !matches!(question.qclass, CLASS_IN | CLASS_ANY)
                && exchange.query.len() > HEADER_LEN,
            qtype: question.qtype,
            is_reverse: lower.ends_with(ARPA),
            is_of_ipv6: lower.ends_with(IP6_ARPA),
            is_fleet: case.ours.route == Route::Fleet,
            nature: name
                .map(|(name, _)| self.reference.nature(&name))
                .unwrap_or_default(),
            is_rejected: !matches!(parsed, Parsed::Query(_)),
            is_odd: question.has_odd_label(),
            // Searched in the bytes, because a reply with such a record cannot be parsed.
            has_empty_address: exchange
                .reply
                .windows(EMPTY_ADDRESS.len())
                .any(|window| window == EMPTY_ADDRESS),
            looks_forwarded: case.theirs.as_ref().is_some_and(looks_forwarded),
            opts: question.opts,
            rcodes: (
                case.theirs.as_ref().map_or(0, |reply| reply.rcode),
                case.our_reply.as_ref().map_or(0, |reply| reply.rcode),
            ),
        }
    }

    /// Follows which address comes first.
    fn follow_order(&mut self, exchange: &Exchange, case: &Case) {
        // Only the fleet's answers are shuffled by the server itself.
        if case.ours.route != Route::Fleet {
            return;
        }
        let Some(theirs) = &case.theirs else {
            return;
        };
        let Some(Record { rtype, data, .. }) = theirs.answers.first() else {
            return;
        };
        // An address that is repeated, or the only one of its family, comes first without a choice.
        let is_chosen = theirs
            .answers
            .iter()
            .any(|other| other.rtype == *rtype && other.data != *data);
        // A truncated reply holds other addresses each time, so its first one says nothing.
        if !is_chosen || theirs.is_truncated() {
            return;
        }
        let Some(question) = Question::read(&exchange.query) else {
            return;
        };
        let key = (question.wire.to_ascii_lowercase(), question.qtype);
        // Names come from the network, and any number of them may be asked for.
        if self.orders.len() >= MAX_ORDERS && !self.orders.contains_key(&key) {
            return;
        }
        let order = self.orders.entry(key).or_default();
        if order.same == 0 {
            order.first.clone_from(data);
        }
        if order.first == *data {
            order.same += 1;
        } else {
            order.others += 1;
        }
    }

    fn count(&mut self, exchange: &Exchange, verdict: Verdict, case: Case) {
        let tally = &mut self.tally;
        match verdict {
            Verdict::Equal => tally.verdicts.equal += 1,
            Verdict::SameRoute => tally.verdicts.same_route += 1,
            Verdict::InTransition => tally.verdicts.in_transition += 1,
            Verdict::Documented(rows) => {
                tally.verdicts.documented += 1;
                for row in rows {
                    let example = self.example(exchange, &case, Vec::new());
                    self.add(GroupCause::Documented(row), example);
                }
            }
            Verdict::Unexplained(findings) => {
                tally.verdicts.unexplained += 1;
                let mut causes: Vec<Cause> = findings.iter().map(|finding| finding.cause).collect();
                // Findings come in the order in which replies are compared, so equal causes are
                // neighbours.
                causes.dedup();
                if causes.contains(&Cause::NoReply) {
                    tally.unanswered += 1;
                }
                let example = self.example(exchange, &case, findings);
                self.add(GroupCause::Unexplained(causes), example);
            }
        }
    }

    fn example(&self, exchange: &Exchange, case: &Case, findings: Vec<Finding>) -> Example {
        let question = Question::read(&exchange.query).unwrap_or_default();
        let mut steps = String::new();
        // A documented difference needs no steps, and there may be many of them.
        if !findings.is_empty()
            && let Ok((name, _)) = Name::from_wire(&question.wire)
        {
            steps = first_steps(&self.reference.steps(&name));
        }
        Example {
            question,
            client: exchange.client.ip(),
            findings,
            theirs: case.theirs.clone(),
            ours: case.our_reply.clone(),
            route: case.ours.route,
            steps,
        }
    }

    fn add(&mut self, cause: GroupCause, example: Example) {
        let groups = &mut self.tally.groups;
        // The counts of the verdicts include it all the same.
        if groups.len() >= MAX_GROUPS && !groups.contains_key(&cause) {
            return;
        }
        let group = groups.entry(cause).or_default();
        group.count += 1;
        // The same name in another letter case or form tells nothing new.
        let name = &example.question.wire;
        let mut known = group.examples.iter().map(|other| &other.question.wire);
        let is_new = !known.any(|other| other.eq_ignore_ascii_case(name));
        if is_new && group.examples.len() < MAX_EXAMPLES {
            group.examples.push(example);
        }
    }
}

/// Returns the first lines of an explanation, the last ones, which have the result, and how many are between.
fn first_steps(text: &str) -> String {
    /// The RCODE with the addresses, and a remark on health.
    const LAST: usize = 2;
    let total = text.lines().count();
    let mut shown = String::new();
    for (number, line) in text.lines().enumerate() {
        let is_shown = number < MAX_STEPS || number + LAST >= total;
        if is_shown {
            shown.extend(line.chars().take(MAX_STEP_LEN));
            shown.push('\n');
        } else if number == MAX_STEPS {
            let more = total - MAX_STEPS - LAST;
            shown += &format!("  ... and {more} more lines\n");
        }
    }
    shown
}

/// An exchange with both replies.
struct Case {
    theirs: Option<Reply>,
    our_reply: Option<Reply>,
    findings: Vec<Finding>,
    ours: Ours,
}

/// Returns our reply in its parts, if it is made from local data.
fn read_ours(ours: &Ours) -> Option<Reply> {
    match &ours.reply {
        OurReply::Message(message) => Reply::read(message),
        OurReply::Elsewhere | OurReply::Silence => None,
    }
}

/// Returns the maximum size of a reply that the client accepts. Limits for some clients are settings of ours, and do
/// not count.
fn limit(exchange: &Exchange) -> usize {
    if exchange.transport == Transport::Tcp {
        return MAX_TCP_SIZE;
    }
    match parse_by(exchange.transport, &exchange.query) {
        Parsed::Query(query) => query.limit(),
        // Rejected here because of its OPT, whose size the observed server may have accepted.
        Parsed::Reply(_) if Question::read(&exchange.query).is_some_and(|asked| asked.opts > 0) => {
            MAX_UDP_SIZE
        }
        Parsed::Reply(_) | Parsed::Drop => MIN_UDP_SIZE,
    }
}

/// Returns whether a reply looks like one that was passed on: no AA, a TTL, or an SOA.
fn looks_forwarded(reply: &Reply) -> bool {
    !reply.is_authoritative()
        || reply.answers.iter().any(|record| record.ttl > 0)
        || !reply.authority.is_empty()
}

/// Returns whether only the filter of health can be the reason for other addresses, and is in doubt.
fn is_due_to_health(case: &Case) -> bool {
    let Some(theirs) = &case.theirs else {
        return false;
    };
    // An alias may have addresses beside its instances, which have no health.
    let mut ours = Vec::new();
    if let Some(reply) = &case.our_reply {
        ours.extend(reply.answers.iter().map(|record| &*record.data));
    }
    if case.ours.health == HealthKnowledge::Settled {
        return false;
    }
    for finding in &case.findings {
        match finding.cause {
            Cause::MissingAddresses
            | Cause::ExtraAddresses
            | Cause::TcMissing
            | Cause::TcUnneeded
            | Cause::TruncatedTooFar => {}
            _ => return false,
        }
    }
    for Record { data, .. } in &theirs.answers {
        let is_instance = data
            .parse()
            .is_ok_and(|address| case.ours.instances.contains(&address));
        if !is_instance && !ours.contains(&&**data) {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use dns_core::{
        resolve::{Existence, LocalAnswer},
        wire::{FLAG_RD, Shuffle, TYPE_A, TYPE_ANY, error_reply, local_reply, query_message},
    };
    use hickory_proto::op::ResponseCode;

    use super::*;
    use crate::reference::Nature;

    fn reply(addresses: &[&str]) -> Reply {
        Reply {
            length: 100,
            flags: 0x8580,
            rcode: 0,
            question: None,
            answers: addresses
                .iter()
                .map(|address: &&str| Record {
                    owner: "web.internal.".to_owned(),
                    rtype: hickory_proto::rr::RecordType::A,
                    class: CLASS_IN,
                    data: (*address).to_owned(),
                    ttl: 0,
                })
                .collect(),
            authority: Vec::new(),
            additional: Vec::new(),
            opt: None,
        }
    }

    /// An alias of an address and of a group, whose instances the observed server may leave out.
    #[test]
    fn addresses_of_aliases_have_no_health() {
        let case = |theirs: &[&str], cause| Case {
            theirs: Some(reply(theirs)),
            our_reply: Some(reply(&["10.0.0.1", "10.0.0.2"])),
            findings: vec![Finding::new(cause, "")],
            ours: Ours {
                reply: OurReply::Silence,
                route: Route::Fleet,
                instances: vec!["10.0.0.2".parse().unwrap()],
                health: HealthKnowledge::Ignored,
                interface: Ok(()),
            },
        };
        let left_out = case(&["10.0.0.1"], Cause::MissingAddresses);
        assert!(is_due_to_health(&left_out));
        let foreign = case(&["10.0.0.1", "10.0.0.9"], Cause::ExtraAddresses);
        assert!(!is_due_to_health(&foreign));
    }

    /// A server that gives the same reply always.
    struct Fixed(Vec<u8>);

    impl Reference for Fixed {
        fn states(&self, _since: Instant) -> usize {
            1
        }

        fn answer(&mut self, _asked: &Asked<'_>, _settings: Settings, _state: usize) -> Ours {
            Ours {
                reply: OurReply::Message(self.0.clone()),
                route: Route::Fleet,
                instances: Vec::new(),
                health: HealthKnowledge::Settled,
                interface: Ok(()),
            }
        }

        fn is_of_fleet(&self, _address: IpAddr) -> bool {
            false
        }

        fn steps(&self, _name: &Name) -> String {
            String::new()
        }

        fn nature(&self, _name: &Name) -> Nature {
            Nature::default()
        }
    }

    fn answered(query: &[u8], rcode: ResponseCode) -> Vec<u8> {
        let Parsed::Query(query) = parse_by(Transport::Udp, query) else {
            panic!("not a query");
        };
        error_reply(&query, rcode)
    }

    fn query(qtype: u16) -> Vec<u8> {
        let name = Name::from_text("web.bosh.").unwrap();
        query_message(7, FLAG_RD, name.as_wire(), qtype)
    }

    fn exchange(query: &[u8], reply: &[u8], now: Instant) -> Exchange {
        Exchange {
            client: "10.9.9.9:4000".parse().unwrap(),
            transport: Transport::Udp,
            query: query.to_vec(),
            reply: reply.to_vec(),
            asked: now,
            replied: now,
            latency: None,
        }
    }

    /// Large replies, which all differ, take no more memory than small ones.
    #[test]
    fn waiting_differences_take_bounded_memory() {
        const COUNT: u64 = 1000;
        let query = query(TYPE_A);
        let now = Instant::now();
        let mut judge = Judge::new(Fixed(answered(&query, ResponseCode::Refused)));
        let mut reply = answered(&query, ResponseCode::NXDomain);
        reply.resize(60_000, 0);
        for _ in 0..COUNT {
            judge.judge(exchange(&query, &reply, now));
        }
        let waiting = judge.suspects.len() as u64;
        assert!(judge.suspects.len() * reply.len() <= MAX_SUSPECT_BYTES);
        assert_eq!(judge.tally.verdicts.unjudged, COUNT - waiting);
        judge.settle(now + TRANSITION);
        assert_eq!(judge.tally.verdicts.unexplained, waiting);
        judge.judge(exchange(&query, &reply, now));
        assert!(!judge.is_settled(), "there is room again");
    }

    /// Without a choice of the first address its order says nothing: the only one of a family in a reply to ANY, and an
    /// instance that bosh-dns repeats.
    #[test]
    fn only_a_chosen_order_is_fixed() {
        let [a, b] = [Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2)];
        for (v4, v6, expected) in [
            (vec![a, b], vec![], 1),
            (vec![a, a], vec![], 0),
            (vec![a], vec![Ipv6Addr::LOCALHOST], 0),
        ] {
            let query = query(TYPE_ANY);
            let Parsed::Query(parsed) = parse_by(Transport::Tcp, &query) else {
                panic!("not a query");
            };
            let answer = LocalAnswer {
                existence: Existence::Found,
                v4: &v4,
                v6: &v6,
            };
            let mut reply = Vec::new();
            local_reply(&parsed, answer, &mut Shuffle::with_seed(1), &mut reply);
            let now = Instant::now();
            let mut judge = Judge::new(Fixed(reply.clone()));
            for _ in 0..FIXED_ORDER {
                judge.judge(exchange(&query, &reply, now));
            }
            judge.finish();
            let verdicts = judge.tally.verdicts;
            assert_eq!(verdicts.equal, FIXED_ORDER, "{:#?}", judge.tally);
            assert_eq!(verdicts.unexplained, expected, "{v4:?} {v6:?}");
        }
    }

    /// A user who does not wait for the second judgement must not read that everything is equal.
    #[test]
    fn waiting_differences_are_not_judged() {
        let query = query(TYPE_A);
        let now = Instant::now();
        let mut judge = Judge::new(Fixed(answered(&query, ResponseCode::Refused)));
        let reply = answered(&query, ResponseCode::NXDomain);
        judge.judge(exchange(&query, &reply, now));
        judge.settle(now);
        assert!(!judge.is_settled());
        judge.finish();
        assert!(judge.is_settled());
        assert_eq!(judge.tally.verdicts.unjudged, 1);
        assert_eq!(judge.tally.verdicts.unexplained, 0);
    }

    #[test]
    fn long_explanations_keep_beginning_and_result() {
        let short = "web.bosh.\n  NOERROR 10.0.0.1\n";
        assert_eq!(first_steps(short), short);
        let mut long: String = (0..1000)
            .map(|number| format!("    + {number}\n"))
            .collect();
        long += "  NOERROR ";
        long += &"10.0.0.1 ".repeat(1000);
        long += "\n  a query starts health checks\n";
        let shown = first_steps(&long);
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines.len(), MAX_STEPS + 3);
        assert_eq!(lines[MAX_STEPS - 1], "    + 19");
        assert_eq!(lines[MAX_STEPS], "  ... and 980 more lines");
        assert_eq!(lines[MAX_STEPS + 1].len(), MAX_STEP_LEN);
        assert_eq!(lines[MAX_STEPS + 2], "  a query starts health checks");
    }
}
