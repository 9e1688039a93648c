//! Data of `top`: rates between the last two readings of the counters, and counts per name and
//! client.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    fmt::Write,
    net::IpAddr,
    time::Instant,
};

use dns_command_line::table::Table;
use serde_json::{Value, json};

use super::super::table::{count, duration, percent};
use dns_resolver::ops::{
    status::ServerStatus,
    tap::{TapLine, TapPath},
};
use dns_upstream::admission::client_of;

/// Maximum number of counted names, and of counted clients; beyond it the rarest half is dropped.
const MAX_COUNTED: usize = 10_000;

/// Number of past rates kept for the chart.
const HISTORY: usize = 120;

/// Number of names, and of clients, that are printed.
const PRINTED: usize = 15;

/// Everything `top` shows: latest status, rates, history, counts.
pub(super) struct Model {
    pub(super) status: ServerStatus,
    read_at: Instant,
    pub(super) rates: Rates,
    /// Replies per second, oldest first.
    pub(super) history: VecDeque<u64>,
    names: Counts<(String, String)>,
    clients: Counts<IpAddr>,
    /// Number of lines suppressed by the server.
    pub(super) suppressed: u64,
}

/// Rates per second between two readings.
#[derive(Default)]
pub(super) struct Rates {
    pub(super) fast: f64,
    pub(super) userspace: f64,
    pub(super) external: f64,
    /// Packets by the fast path's outcome.
    pub(super) outcomes: BTreeMap<String, f64>,
    pub(super) interfaces: BTreeMap<String, f64>,
}

/// Queries for one key, estimated from sampled lines.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct QueryCount {
    pub(super) fast: u64,
    pub(super) userspace: u64,
    /// Number of sampled lines behind both estimates.
    pub(super) lines: u64,
}

impl QueryCount {
    /// Returns the number of queries on both paths.
    pub(super) fn total(self) -> u64 {
        self.fast + self.userspace
    }

    /// Returns the half-width of the estimate's 95 % interval relative to the estimate: the number
    /// of sampled lines is binomial.
    pub(super) fn relative_error(self) -> f64 {
        1.96 / (self.lines.max(1) as f64).sqrt()
    }

    /// Formats the error as `±6 %`; empty if every query was counted.
    pub(super) fn error_text(self) -> String {
        if self.lines >= self.total() {
            String::new()
        } else {
            format!("±{:.0} %", (self.relative_error() * 100.0).min(100.0))
        }
    }
}

impl Model {
    pub(super) fn new(status: ServerStatus) -> Self {
        Self {
            status,
            read_at: Instant::now(),
            rates: Rates::default(),
            history: VecDeque::new(),
            names: Counts::default(),
            clients: Counts::default(),
            suppressed: 0,
        }
    }

    pub(super) fn update(&mut self, status: ServerStatus) {
        // Two readings may follow each other within the clock's resolution.
        let seconds = self.read_at.elapsed().as_secs_f64().max(0.001);
        let new = &status.replies;
        let old = &self.status.replies;
        let mut rates = Rates {
            fast: per_second(new.fast, old.fast, seconds),
            userspace: per_second(new.userspace, old.userspace, seconds),
            external: per_second(new.external, old.external, seconds),
            ..Rates::default()
        };
        // Counters of a fast path that has just been loaded have no earlier reading.
        if let (Some(new), Some(old)) = (&status.fast_path, &self.status.fast_path) {
            for (outcome, packets) in &new.outcomes {
                let before = old.outcomes.get(outcome).copied().unwrap_or(0);
                let rate = per_second(*packets, before, seconds);
                rates.outcomes.insert(outcome.clone(), rate);
            }
            for interface in &new.interfaces {
                let mut known = old.interfaces.iter();
                let before = known.find(|other| other.name == interface.name);
                let before = before.map_or(0, |other| other.replies);
                let rate = per_second(interface.replies, before, seconds);
                rates.interfaces.insert(interface.name.clone(), rate);
            }
        }
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history
            .push_back((rates.fast + rates.userspace) as u64);
        self.rates = rates;
        self.status = status;
        self.read_at = Instant::now();
    }

    pub(super) fn rate(&self) -> f64 {
        self.rates.fast + self.rates.userspace
    }

    pub(super) fn count_line(&mut self, line: &TapLine) {
        let weight = u64::from(line.weight);
        let mut queries = QueryCount {
            lines: 1,
            ..QueryCount::default()
        };
        match line.path {
            TapPath::Fast => queries.fast = weight,
            TapPath::Userspace => queries.userspace = weight,
        }
        self.names
            .add((line.name.clone(), line.query_type.clone()), queries);
        // One client, whether it uses IPv4 or a socket for both families.
        self.clients.add(line.client.ip().to_canonical(), queries);
    }

    /// Returns the most frequent pairs of name and type.
    pub(super) fn names(&self) -> Vec<Ranked<'_, (String, String)>> {
        self.names.ranked(self.rate())
    }

    /// Refused queries of a client, or of its network, within the last minute.
    #[cfg_attr(
        not(feature = "screen"),
        allow(dead_code, reason = "only the screen shows it")
    )]
    pub(super) fn refused(&self, client: IpAddr) -> u64 {
        let mut refused = 0;
        for (_, limited) in self.status.overload.limited() {
            // A network of IPv6 counts as one client.
            if limited.client == client_of(client) {
                refused += limited.refused;
            }
        }
        refused
    }

    pub(super) fn clients(&self) -> Vec<Ranked<'_, IpAddr>> {
        self.clients.ranked(self.rate())
    }

    /// Describes the fast path's share of recent replies.
    pub(super) fn hit_ratio(&self) -> String {
        percent(
            self.rates.fast as u64,
            (self.rates.fast + self.rates.userspace) as u64,
        )
    }

    pub(super) fn text(&self) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "{}/s: fast path {}/s ({}), userspace {}/s, to recursors {}/s; up {}",
            count(self.rate() as u64),
            count(self.rates.fast as u64),
            self.hit_ratio(),
            count(self.rates.userspace as u64),
            count(self.rates.external as u64),
            duration(self.status.uptime_seconds)
        );
        let mut names = Table::new(["PER SECOND", "", "FAST", "TYPE", "NAME"]);
        for Ranked {
            key: (name, query_type),
            queries,
            per_second,
        } in self.names().into_iter().take(PRINTED)
        {
            let fast = percent(queries.fast, queries.total());
            names.line([
                rate_text(per_second),
                queries.error_text(),
                fast,
                query_type.clone(),
                name.clone(),
            ]);
        }
        let mut clients = Table::new(["PER SECOND", "", "FAST", "CLIENT"]);
        for Ranked {
            key: client,
            queries,
            per_second,
        } in self.clients().into_iter().take(PRINTED)
        {
            let fast = percent(queries.fast, queries.total());
            clients.line([
                rate_text(per_second),
                queries.error_text(),
                fast,
                client.to_string(),
            ]);
        }
        let mut outcomes = Table::new(["PER SECOND", "PASSED ON BECAUSE"]);
        for (outcome, rate) in self.misses() {
            outcomes.line([format!("{rate:.0}"), outcome.to_owned()]);
        }
        let mut limited = Table::new(["REFUSED", "LIMITED CLIENT", "WAITING FOR"]);
        for (budget, client) in self.status.overload.limited().into_iter().take(PRINTED) {
            limited.line([
                count(client.refused),
                client.client.to_string(),
                budget.to_owned(),
            ]);
        }
        for table in [names, clients, limited, outcomes] {
            table.add_to(&mut out, 0);
        }
        if self.suppressed > 0 {
            let _ = writeln!(
                out,
                "\n{} lines were suppressed: the counts are a sample",
                count(self.suppressed)
            );
        }
        out
    }

    pub(super) fn json(&self) -> String {
        let mut names = Vec::new();
        for ranked in self.names() {
            let (name, query_type) = ranked.key;
            names.push(ranked.json(json!({ "name": name, "type": query_type })));
        }
        let mut clients = Vec::new();
        for ranked in self.clients() {
            clients.push(ranked.json(json!({ "client": ranked.key })));
        }
        let Rates {
            fast,
            userspace,
            external,
            outcomes,
            interfaces,
        } = &self.rates;
        let page = json!({
            "per_second": {
                "fast": fast, "userspace": userspace, "external": external,
                "outcomes": outcomes, "by_interface": interfaces,
            },
            "names": names, "clients": clients, "suppressed": self.suppressed,
            "overload": self.status.overload,
        });
        page.to_string() + "\n"
    }

    /// Returns the reasons for which recent queries were passed to userspace, most frequent first.
    /// Packets that are not queries to this server are excluded.
    pub(super) fn misses(&self) -> Vec<(&str, f64)> {
        let mut misses: Vec<(&str, f64)> = Vec::new();
        for (outcome, &rate) in &self.rates.outcomes {
            let is_miss =
                // By name, since a newer server may have further outcomes.
                !outcome.starts_with("hit") && !matches!(outcome.as_str(), "not_ours" | "response");
            if is_miss && rate > 0.0 {
                misses.push((outcome, rate));
            }
        }
        misses.sort_by(|one, other| other.1.total_cmp(&one.1));
        misses
    }
}

/// Returns the rate of a counter.
fn per_second(new: u64, old: u64, seconds: f64) -> f64 {
    // A restarted server counts from zero.
    new.saturating_sub(old) as f64 / seconds
}

/// Formats a rate; whole numbers from 10 on.
pub(super) fn rate_text(per_second: f64) -> String {
    if per_second < 10.0 {
        format!("{per_second:.1}")
    } else {
        count(per_second.round() as u64)
    }
}

//----------- Counts ---------------------------------------------------------

/// A key with its rate of queries.
#[derive(Debug, PartialEq)]
pub(super) struct Ranked<'a, K> {
    pub(super) key: &'a K,
    pub(super) queries: QueryCount,
    /// Queries per second, estimated from the share in the sample and the exact total rate.
    pub(super) per_second: f64,
}

/// Bounded counts per key.
struct Counts<K> {
    counts: HashMap<K, QueryCount>,
    /// Total of all counts, including dropped keys.
    total: u64,
}

impl<K> Default for Counts<K> {
    fn default() -> Self {
        Self {
            counts: HashMap::new(),
            total: 0,
        }
    }
}

impl<K: std::hash::Hash + Eq + Ord> Counts<K> {
    /// Counts `key`; beyond the limit the rarest half is dropped.
    fn add(&mut self, key: K, queries: QueryCount) {
        let entry = self.counts.entry(key).or_default();
        entry.fast += queries.fast;
        entry.userspace += queries.userspace;
        entry.lines += queries.lines;
        self.total += queries.total();
        if self.counts.len() > MAX_COUNTED {
            let mut totals: Vec<u64> = self
                .counts
                .values()
                .map(|queries| queries.total())
                .collect();
            let (_, median, _) = totals.select_nth_unstable(MAX_COUNTED / 2);
            let median = *median;
            // If most keys were seen once, `> median` keeps only the frequent ones.
            self.counts.retain(|_, queries| queries.total() > median);
        }
    }

    /// Returns all keys, most frequent first. `rate` is the total rate in queries per second.
    fn ranked(&self, rate: f64) -> Vec<Ranked<'_, K>> {
        // The sample gives shares only; the counters give the rate, which is exact.
        let per_query = rate / self.total.max(1) as f64;
        let mut ranked = Vec::with_capacity(self.counts.len());
        for (key, &queries) in &self.counts {
            ranked.push(Ranked {
                key,
                queries,
                per_second: queries.total() as f64 * per_query,
            });
        }
        // Equally frequent keys keep their places from one update to the next.
        ranked.sort_by(|one, other| {
            let by_count = other.queries.total().cmp(&one.queries.total());
            by_count.then_with(|| one.key.cmp(other.key))
        });
        ranked
    }
}

impl<K> Ranked<'_, K> {
    /// Adds the counts to an object that names the key.
    fn json(&self, mut named: Value) -> Value {
        let QueryCount {
            fast,
            userspace,
            lines,
        } = self.queries;
        named["fast"] = json!(fast);
        named["userspace"] = json!(userspace);
        named["lines"] = json!(lines);
        named["queries_per_second"] = json!(self.per_second);
        named["relative_error"] = json!(self.queries.relative_error());
        named
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hot_keys_survive_rare_flood() {
        let mut counts = Counts::default();
        let once = QueryCount {
            fast: 1,
            userspace: 0,
            lines: 1,
        };
        for number in 0..3 * MAX_COUNTED as u64 {
            counts.add(number + 1_000_000, once);
            counts.add(number % 7, once);
        }
        assert!(counts.counts.len() <= MAX_COUNTED);
        let hottest: Vec<u64> = counts
            .ranked(1.0)
            .iter()
            .take(7)
            .map(|ranked| *ranked.key)
            .collect();
        let mut sorted = hottest.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, [0, 1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn rates_follow_shares() {
        let mut counts = Counts::default();
        let frequent = QueryCount {
            fast: 300,
            userspace: 0,
            lines: 3,
        };
        counts.add("a", frequent);
        counts.add(
            "b",
            QueryCount {
                fast: 0,
                userspace: 100,
                lines: 1,
            },
        );
        let ranked = counts.ranked(1000.0);
        assert_eq!(
            ranked[0],
            Ranked {
                key: &"a",
                queries: frequent,
                per_second: 750.0
            }
        );
        assert_eq!(ranked[1].per_second, 250.0);
    }

    #[test]
    fn error_shrinks_with_sample() {
        let sampled = |lines| QueryCount {
            fast: lines * 10,
            userspace: 0,
            lines,
        };
        assert_eq!(sampled(100).error_text(), "±20 %");
        assert_eq!(sampled(10_000).error_text(), "±2 %");
        assert_eq!(
            QueryCount {
                fast: 7,
                userspace: 1,
                lines: 8
            }
            .error_text(),
            ""
        );
    }
}
