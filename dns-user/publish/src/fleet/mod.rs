//! Fleet names published under external names, as `FleetName` documents list them.
//!
//! The running server returns the addresses of a name and their health, and keeps its instances checked. An address
//! is withdrawn only after it has been unhealthy for the hold time, and health never empties a record set.
//!
//! In the other direction, an external-dns writes names of the fleet: [`AliasWriter`].

mod writer;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

use anyhow::{anyhow, bail};
use dns_core::{
    config::{Config as ServerConfig, values::parse_duration},
    name::Name as FleetDomain,
    resolve::{AddressQuery, FleetAddresses, MAX_ADDRESS_QUERIES, NoAddresses},
};
use dns_kit::{files::load_config, http_client::Limits};
use hyper::{Method, StatusCode};
use serde::{Deserialize, Serialize};

pub(crate) use self::writer::{AliasWriter, KnownTargets, WriteError, known_targets};
use crate::{
    control::exchange,
    endpoint::{MAX_TTL, read_name},
    record::{Name, Record, RecordType, Target},
    text::{Fields, Reader},
};

/// Default time for which an address must be unhealthy before it is withdrawn.
const DEFAULT_HOLD: Duration = Duration::from_secs(30);

/// Mapping of one external name to instances of the fleet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetName {
    pub external: Name,
    /// Fleet name that the server resolves: an alias, or a query.
    pub internal: FleetDomain,
    /// TTL of the records in seconds.
    pub ttl: Option<u32>,
    /// Time for which an address must be unhealthy before it is withdrawn.
    pub hold: Duration,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FleetNames {
    /// Mappings that passed validation; the others are reported.
    pub names: Vec<FleetName>,
    /// External names of invalid entries, whose records stay unchanged.
    pub damaged: Vec<Name>,
    /// Whether the list, or the name of an entry, is unreadable, so that all records of the document stay unchanged.
    pub is_unreadable: bool,
}

/// Parses `spec.names`. An invalid entry does not affect the others.
pub(crate) fn read(spec: &Reader<'_>) -> FleetNames {
    let (names, is_unreadable) = spec.only_list("names");
    let mut found = FleetNames {
        is_unreadable,
        ..FleetNames::default()
    };
    let mut seen = BTreeSet::new();
    for item in names {
        let before = item.problems.count();
        let (external, name) = match item.fields() {
            Some(fields) => read_entry(fields, &mut seen),
            None => (None, None),
        };
        match name {
            Some(name) if item.problems.count() == before => found.names.push(name),
            _ => match external {
                // With its name known, the document's other records can change.
                Some(external) => found.damaged.push(external),
                None => found.is_unreadable = true,
            },
        }
    }
    found
}

fn read_entry(
    mut fields: Fields<'_>,
    seen: &mut BTreeSet<Name>,
) -> (Option<Name>, Option<FleetName>) {
    let entry = fields.map.clone();
    let external = fields.required_as("name", read_name);
    let mut given = Vec::new();
    for member in ["alias", "group", "query"] {
        if let Some(reader) = fields.optional(member) {
            given.push((member, reader));
        }
    }
    let ttl = fields.optional_as("ttl", |ttl| ttl.integer(1..=MAX_TTL));
    let hold = match fields.optional("hold") {
        Some(hold) => read_hold(&hold),
        None => Some(DEFAULT_HOLD),
    };
    fields.finish();
    // Three members, because the text of a group could as well be an alias.
    let internal = match &given[..] {
        [(member, reader)] => read_internal(member, reader),
        others => {
            let reason = if others.is_empty() {
                "set none of"
            } else {
                "set more than one of"
            };
            entry.refuse(
                format!("{reason} alias, group and query"),
                "give exactly one of them",
            )
        }
    };
    if let Some(name) = &external
        // Two entries may have different TTLs and hold times, of which neither is right.
        && !seen.insert(name.clone())
    {
        entry.problem(
            format!("{name} occurs twice in this document"),
            "keep one of the two entries",
        );
    }
    let name = match (&external, internal, hold) {
        (Some(external), Some(internal), Some(hold)) => Some(FleetName {
            external: external.clone(),
            internal,
            ttl,
            hold,
        }),
        _ => None,
    };
    (external, name)
}

fn read_hold(reader: &Reader<'_>) -> Option<Duration> {
    let text = reader.text()?;
    let hold = parse_duration(text).map_err(|error| format!("{text:?} {error}"));
    reader.accept(hold, "use a number with a unit, such as 30s")
}

/// Parses an alias, a query, or a group as `GROUP.NETWORK.DEPLOYMENT.DOMAIN`.
fn read_internal(member: &str, reader: &Reader<'_>) -> Option<FleetDomain> {
    let text = reader.filled_text()?;
    let name = match member {
        "group" => {
            let labels = text.trim_end_matches('.').split('.').count();
            // Group, network, deployment, and a domain of at least one label.
            if labels < 4 {
                return reader.refuse(
                    format!("{text:?} is not a group"),
                    "write it as GROUP.NETWORK.DEPLOYMENT.DOMAIN, such as router.default.cf.bosh",
                );
            }
            // Smart health filter, as for an alias without `health_filter`.
            format!("q-s0.{text}")
        }
        _ => text.to_owned(),
    };
    let name = FleetDomain::from_text(&name);
    let name = name.map_err(|error| format!("{text:?} is not a domain name: {error}"));
    reader.accept(name, "use a name of the fleet")
}

/// Longest time for which an instance stays ill without a check, in case the server's checks were switched off.
const MAX_UNCHECKED: Duration = Duration::from_mins(10);

/// The illness of each instance, by fleet name, because a name may select the health of a single job.
#[derive(Debug, Default)]
pub(crate) struct HealthHistory {
    unhealthy: BTreeMap<FleetDomain, BTreeMap<IpAddr, Illness>>,
}

#[derive(Clone, Copy, Debug)]
struct Illness {
    since: Instant,
    /// Time at which the server last said so.
    seen: Instant,
}

/// A [`HealthHistory`] saved for the next process: milliseconds since 1970 by name and address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedHealth(BTreeMap<String, BTreeMap<IpAddr, u64>>);

impl HealthHistory {
    /// Records the health of a name's instances at `now`.
    ///
    /// An unchecked instance is no news: after a restart the server knows nothing yet, and a dead machine takes as
    /// long as the server's timeouts to be found dead again.
    fn observe(&mut self, name: &FleetDomain, found: &FleetAddresses, now: Instant) {
        let FleetAddresses {
            addresses: _,
            unhealthy,
            unchecked,
        } = found;
        let known = self.unhealthy.entry(name.clone()).or_default();
        // An instance that the server no longer mentions is healthy, or no longer belongs to the name.
        known.retain(|address, illness| {
            let is_unchecked = unchecked.contains(address);
            unhealthy.contains(address) || is_unchecked && now - illness.seen < MAX_UNCHECKED
        });
        for address in unhealthy {
            // The hold time counts from the first observation, however often the server repeats it.
            let illness = known.entry(*address).or_insert(Illness {
                since: now,
                seen: now,
            });
            illness.seen = now;
        }
    }

    /// Returns the addresses of a name that have been unhealthy for the hold time, and the time at which
    /// the next one will have been.
    fn withdrawn(
        &self,
        name: &FleetDomain,
        hold: Duration,
        now: Instant,
    ) -> (BTreeSet<IpAddr>, Option<Instant>) {
        let mut over = BTreeSet::new();
        let mut next = None;
        for (address, illness) in self.unhealthy.get(name).into_iter().flatten() {
            // Per name, because two documents may publish one name with different hold times.
            let end = illness.since + hold;
            if end <= now {
                over.insert(*address);
            } else if next.is_none_or(|next| end < next) {
                next = Some(end);
            }
        }
        (over, next)
    }

    fn save(&self, now: Instant, wall: SystemTime) -> SavedHealth {
        let wall = milliseconds(wall);
        let mut names = BTreeMap::new();
        for (name, unhealthy) in &self.unhealthy {
            let mut addresses = BTreeMap::new();
            for (address, illness) in unhealthy {
                let elapsed = now.saturating_duration_since(illness.since).as_millis();
                let elapsed = u64::try_from(elapsed).unwrap_or(u64::MAX);
                // By the wall clock, since a monotonic one starts anew with the machine.
                addresses.insert(*address, wall.saturating_sub(elapsed));
            }
            if !addresses.is_empty() {
                names.insert(name.to_string(), addresses);
            }
        }
        SavedHealth(names)
    }

    /// Restores a saved state. A time in the future is replaced by `now`.
    pub(crate) fn restore(saved: &SavedHealth, now: Instant, wall: SystemTime) -> Self {
        let wall = milliseconds(wall);
        let mut restored = Self::default();
        for (name, saved) in &saved.0 {
            // The file may have been edited, and such a name is never asked for.
            let Ok(name) = FleetDomain::from_text(name) else {
                continue;
            };
            let unhealthy = restored.unhealthy.entry(name).or_default();
            for (address, begin) in saved {
                let elapsed = Duration::from_millis(wall.saturating_sub(*begin));
                let illness = Illness {
                    // The monotonic clock may not reach back that far after a restart of the
                    // machine; then the hold time begins again.
                    since: now.checked_sub(elapsed).unwrap_or(now),
                    // The limit for unchecked instances counts from the start, because the server
                    // may not have checked them in between.
                    seen: now,
                };
                unhealthy.insert(*address, illness);
            }
        }
        restored
    }
}

impl SavedHealth {
    /// Returns whether both have the same addresses, at whatever times.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        // Times differ by the resolution of two clocks, which would write the file in every round.
        self.addresses().eq(other.addresses())
    }

    fn addresses(&self) -> impl Iterator<Item = (&String, &IpAddr)> {
        self.0
            .iter()
            .flat_map(|(name, unhealthy)| unhealthy.keys().map(move |address| (name, address)))
    }
}

fn milliseconds(wall: SystemTime) -> u64 {
    let elapsed = wall
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
}

/// The reason why the records of a fleet name stay unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ResolveError {
    #[error("{0} {1}")]
    Unresolved(FleetDomain, NoAddresses),
    #[error("no server is configured; set `server` to the DNS server's config.json")]
    NoServer,
    #[error("{}", .0.as_deref().unwrap_or("the server has not answered yet"))]
    NoAnswer(Option<String>),
}

/// Limits of a response: the addresses of a group of 10,000 instances take about 200 KB.
const LIMITS: Limits = Limits {
    time: Duration::from_secs(5),
    body: 64 << 20,
};

#[derive(Clone, Debug)]
pub(crate) struct ServerClient {
    socket: PathBuf,
}

type Answer = Result<FleetAddresses, NoAddresses>;

impl ServerClient {
    pub(crate) fn of_server(path: &Path) -> anyhow::Result<(Self, ServerConfig)> {
        let config = load_config(path).map_err(anyhow::Error::msg)?.config;
        let Some(control) = &config.control else {
            bail!(
                "{}: \"control.socket\" is empty; fleet names need the server's socket",
                path.display()
            );
        };
        let socket = control.socket.clone();
        Ok((Self { socket }, config))
    }

    /// Asks for the addresses of names. After an error the last known state stays in use.
    pub(crate) async fn ask(&self, queries: &[AddressQuery]) -> anyhow::Result<Vec<Answer>> {
        let mut answers = Vec::with_capacity(queries.len());
        // The server refuses a longer list, so that one request cannot occupy it for long.
        for part in queries.chunks(MAX_ADDRESS_QUERIES) {
            let found = self.exchange(part).await;
            answers.extend(found.map_err(|error| anyhow!("{}: {error}", self.socket.display()))?);
        }
        Ok(answers)
    }

    async fn exchange(&self, queries: &[AddressQuery]) -> anyhow::Result<Vec<Answer>> {
        let body = serde_json::to_vec(queries)?.into();
        let answers: Vec<Answer> = match exchange(
            &self.socket,
            Method::POST,
            "/addresses",
            body,
            LIMITS,
        )
        .await?
        {
            (StatusCode::OK, body) => serde_json::from_slice(&body).map_err(|error| {
                anyhow!("cannot parse the response: {error}; update server and publisher")
            })?,
            (StatusCode::NOT_FOUND, _) => {
                bail!("the server is older than the publisher and cannot name addresses; update it")
            }
            (status, body) => bail!("{status}: {}", String::from_utf8_lossy(&body).trim_end()),
        };
        // Answers have no names: after a missing one, each would be taken for another name's.
        if answers.len() != queries.len() {
            bail!(
                "{} answers for {} names; update server and publisher",
                answers.len(),
                queries.len()
            );
        }
        Ok(answers)
    }
}

/// The names of the fleet that documents publish, with the last answers of the server.
#[derive(Debug)]
pub(crate) struct Fleet {
    server: ServerClient,
    history: HealthHistory,
    answers: BTreeMap<FleetQuery, Answer>,
}

pub(crate) type FleetQuery = (FleetDomain, Duration);

impl Fleet {
    pub(crate) fn new(server: ServerClient, history: HealthHistory) -> Self {
        Self {
            server,
            history,
            answers: BTreeMap::new(),
        }
    }

    /// Asks the server for the addresses of these names, and forgets others.
    pub(crate) async fn ask(&mut self, names: &BTreeSet<FleetQuery>) -> anyhow::Result<()> {
        let now = Instant::now();
        let domains: BTreeSet<&FleetDomain> = names.iter().map(|(name, _)| name).collect();
        self.history
            .unhealthy
            .retain(|name, _| domains.contains(name));
        self.answers.retain(|name, _| names.contains(name));
        let mut queries = Vec::with_capacity(names.len());
        for (name, hold) in names {
            queries.push(AddressQuery {
                name: name.to_string(),
                // The server leaves these out, unless nothing else remains.
                withdrawn: self.history.withdrawn(name, *hold, now).0,
            });
        }
        let answers = self.server.ask(&queries).await?;
        for ((name, hold), answer) in names.iter().zip(answers) {
            self.observe(name, *hold, answer, now);
        }
        Ok(())
    }

    fn observe(&mut self, name: &FleetDomain, hold: Duration, answer: Answer, now: Instant) {
        // A name that the server does not know says nothing about the health of its instances.
        if let Ok(found) = &answer {
            self.history.observe(name, found, now);
        }
        self.answers.insert((name.clone(), hold), answer);
    }

    pub(crate) fn health(&self) -> SavedHealth {
        self.history.save(Instant::now(), SystemTime::now())
    }

    /// Returns the time at which the next unhealthy address reaches its hold time.
    pub(crate) fn next_change(&self, now: Instant) -> Option<Instant> {
        self.answers
            .keys()
            .filter_map(|(name, hold)| self.history.withdrawn(name, *hold, now).1)
            .min()
    }

    /// Returns the records of a mapping, one set per address family. Without an answer, `problem` is the reason.
    pub(crate) fn records(
        &self,
        name: &FleetName,
        problem: Option<&str>,
    ) -> Result<Vec<Record>, ResolveError> {
        let FleetName {
            external,
            internal,
            ttl,
            hold,
        } = name;
        let answer = self.answers.get(&(internal.clone(), *hold));
        let answer = answer.ok_or_else(|| ResolveError::NoAnswer(problem.map(str::to_owned)))?;
        let found = answer
            .as_ref()
            .map_err(|reason| ResolveError::Unresolved(internal.clone(), *reason))?;
        let mut sets = Vec::new();
        for record_type in [RecordType::A, RecordType::AAAA] {
            let mut record = Record::new(external.clone(), record_type, []);
            record.ttl = *ttl;
            for address in &found.addresses {
                if address.is_ipv4() == (record_type == RecordType::A) {
                    let target = Target::parse(record_type, &address.to_string());
                    record.targets.extend(target.ok());
                }
            }
            // An empty set would keep existing records, although the fleet has none of this family.
            if !record.targets.is_empty() {
                sets.push(record);
            }
        }
        Ok(sets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        record::Name,
        text::{Problems, documents, parse},
    };

    #[test]
    fn bad_mapping_spares_good_mappings() {
        let problems = Problems::of("names.yml");
        let text = "names:\n- {name: Router.example.org, alias: gorouter.cf.internal, ttl: 60, hold: 10s}\n\
                    - {name: db.example.org, group: mysql.default.cf.bosh}\n\
                    - {name: all.example.org, query: q-s4.q-g1.bosh, alias: x.y}\n\
                    - {name: none.example.org}\n- {name: bad.example.org, group: mysql}\n\
                    - {name: router.example.org, alias: other.internal}\n- {name: h.example.org, alias: a.b, hold: '30'}\n";
        let node = parse(documents(text)[0], &problems).unwrap();
        let found = read(&Reader::root(&node, &problems));
        assert_eq!(found.names.len(), 2);
        let [router, database] = &found.names[..] else {
            panic!("{found:?}")
        };
        assert_eq!(
            (router.external.as_str(), router.ttl),
            ("router.example.org", Some(60))
        );
        assert_eq!(router.hold, Duration::from_secs(10));
        assert_eq!(
            database.internal.to_string().trim_end_matches('.'),
            "q-s0.mysql.default.cf.bosh"
        );
        assert_eq!(database.hold, DEFAULT_HOLD);
        assert_eq!(found.damaged.len(), 5);
        let problems = problems.into_vec();
        let lines: Vec<_> = problems.iter().map(|problem| problem.line).collect();
        assert_eq!(lines, [4, 5, 6, 7, 8], "{problems:?}");
    }

    fn mapping(internal: &str) -> FleetName {
        FleetName {
            external: Name::parse("x.example.org").unwrap(),
            internal: FleetDomain::from_text(internal).unwrap(),
            ttl: Some(60),
            hold: Duration::from_secs(30),
        }
    }

    fn set(addresses: &[&str]) -> BTreeSet<IpAddr> {
        addresses
            .iter()
            .map(|address| address.parse().unwrap())
            .collect()
    }

    fn ill(unhealthy: &BTreeSet<IpAddr>) -> FleetAddresses {
        FleetAddresses {
            unhealthy: unhealthy.clone(),
            ..FleetAddresses::default()
        }
    }

    #[test]
    fn unchecked_is_no_news() {
        let name = FleetDomain::from_text("q-s0.q-g1.bosh").unwrap();
        let hold = Duration::from_secs(30);
        let mut history = HealthHistory::default();
        let begin = Instant::now();
        let dead = set(&["10.0.0.1"]);
        history.observe(&name, &ill(&dead), begin);
        // The server restarts, then the publisher, then both, before any check has finished.
        let unchecked = FleetAddresses {
            unchecked: set(&["10.0.0.1", "10.0.0.2"]),
            ..FleetAddresses::default()
        };
        let after = begin + hold;
        history.observe(&name, &unchecked, after);
        assert_eq!(history.withdrawn(&name, hold, after).0, dead);
        let wall = SystemTime::now();
        let saved = history.save(after, wall);
        let mut history = HealthHistory::restore(&saved, after, wall);
        history.observe(&name, &unchecked, after);
        assert_eq!(history.withdrawn(&name, hold, after).0, dead);
        // An answer of the instance is news, and so is an instance that is gone.
        let mut other = HealthHistory::restore(&saved, after, wall);
        other.observe(&name, &FleetAddresses::default(), after);
        assert_eq!(other.withdrawn(&name, hold, after).0, set(&[]));
        // Without checks, an illness ends some time.
        history.observe(&name, &unchecked, after + MAX_UNCHECKED);
        assert_eq!(history.withdrawn(&name, hold, after).0, set(&[]));
    }

    #[test]
    fn address_leaves_after_hold() {
        let name = FleetDomain::from_text("q-s0.q-g1.bosh").unwrap();
        let hold = Duration::from_secs(30);
        let mut history = HealthHistory::default();
        let begin = Instant::now();
        let unhealthy = set(&["10.0.0.1"]);
        history.observe(&name, &ill(&unhealthy), begin);
        assert_eq!(
            history.withdrawn(&name, hold, begin),
            (set(&[]), Some(begin + hold))
        );
        let almost = begin + Duration::from_millis(29_999);
        history.observe(&name, &ill(&unhealthy), almost);
        assert_eq!(
            history.withdrawn(&name, hold, almost),
            (set(&[]), Some(begin + hold))
        );
        let after = begin + hold;
        assert_eq!(
            history.withdrawn(&name, hold, after),
            (unhealthy.clone(), None)
        );
        // Recovery takes effect at once, and a relapse must last for the hold time again.
        history.observe(&name, &ill(&set(&[])), after);
        assert_eq!(history.withdrawn(&name, hold, after), (set(&[]), None));
        history.observe(&name, &ill(&unhealthy), after);
        let later = after + Duration::from_secs(1);
        assert_eq!(
            history.withdrawn(&name, hold, later),
            (set(&[]), Some(after + hold))
        );
    }

    #[test]
    fn illness_outlives_a_restart() {
        let name = FleetDomain::from_text("q-s0.q-g1.bosh").unwrap();
        let hold = Duration::from_secs(30);
        let mut history = HealthHistory::default();
        let begin = Instant::now();
        let wall = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let unhealthy = set(&["10.0.0.1"]);
        history.observe(&name, &ill(&unhealthy), begin);
        let saved = history.save(begin + Duration::from_secs(20), wall);
        assert!(saved.is_like(&saved) && !saved.is_like(&SavedHealth::default()));
        let text = serde_json::to_string(&saved).unwrap();
        let saved: SavedHealth = serde_json::from_str(&text).unwrap();
        let later = Instant::now() + Duration::from_secs(3600);
        let history = HealthHistory::restore(&saved, later, wall + Duration::from_secs(9));
        assert_eq!(history.withdrawn(&name, hold, later).0, set(&[]));
        let history = HealthHistory::restore(&saved, later, wall + Duration::from_secs(10));
        assert_eq!(history.withdrawn(&name, hold, later).0, unhealthy);
    }

    #[test]
    fn last_answer_stays_without_a_server() {
        let folder = tempfile::tempdir().unwrap();
        let server = ServerClient {
            socket: folder.path().join("control.sock"),
        };
        let mut fleet = Fleet::new(server, HealthHistory::default());
        let name = mapping("q-s4.q-g2.bosh");
        let begin = Instant::now();
        let records = |fleet: &Fleet, name: &FleetName| {
            let found = fleet.records(name, Some("the reason"));
            found.map(|records| records.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        assert_eq!(
            records(&fleet, &name).unwrap_err().to_string(),
            "the reason"
        );
        let answer = FleetAddresses {
            addresses: set(&["fd00::1", "10.0.0.2", "10.0.0.1"]),
            unhealthy: set(&["10.0.0.1"]),
            unchecked: set(&[]),
        };
        fleet.observe(&name.internal, name.hold, Ok(answer), begin);
        let other = mapping("a.cf.internal");
        let foreign = NoAddresses::Foreign;
        fleet.observe(&other.internal, other.hold, Err(foreign), begin);
        let names = [&name, &other].map(|name| (name.internal.clone(), name.hold));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let error = runtime
            .block_on(fleet.ask(&names.clone().into()))
            .unwrap_err()
            .to_string();
        assert!(error.contains("control.sock: "), "{error}");
        let expected = [
            "x.example.org 60 A 10.0.0.1,10.0.0.2",
            "x.example.org 60 AAAA fd00::1",
        ];
        assert_eq!(records(&fleet, &name).unwrap(), expected);
        assert_eq!(fleet.next_change(begin), Some(begin + name.hold));
        assert!(
            records(&fleet, &other)
                .unwrap_err()
                .to_string()
                .contains("not a name of the fleet")
        );
        // A name that is no longer published is forgotten.
        runtime
            .block_on(fleet.ask(&BTreeSet::from([names[1].clone()])))
            .unwrap_err();
        assert!(matches!(
            fleet.records(&name, None),
            Err(ResolveError::NoAnswer(None))
        ));
        assert_eq!(fleet.next_change(begin), None);
    }

    #[test]
    fn mistakes_of_mappings_are_described() {
        for (entry, expected) in [
            (
                "{name: a.b}",
                "names[0]: set none of alias, group and query; give exactly one of them",
            ),
            (
                "{name: a.b, alias: x.y, query: q.r}",
                "names[0]: set more than one of alias, group and query; give exactly one of them",
            ),
            (
                "{name: a.b, group: a.b.c.}",
                "names[0].group: \"a.b.c.\" is not a group; write it as GROUP.NETWORK.DEPLOYMENT.DOMAIN, such as \
                 router.default.cf.bosh",
            ),
            (
                "{name: a.b, alias: x.y, ttl: 0}",
                "names[0].ttl: 0 is out of range; give a whole number from 1 to 2147483647",
            ),
            (
                "{name: a.b, alias: x.y, ttl: 2147483648}",
                "names[0].ttl: 2147483648 is out of range; give a whole number from 1 to 2147483647",
            ),
            (
                "{name: a.b, alias: x.y, holt: 1s}",
                "names[0].holt: unknown member \"holt\"; did you mean \"hold\"? If not, remove it",
            ),
            (
                "{alias: x.y}",
                "names[0]: member \"name\" is missing; add \"name\"",
            ),
            ("x", "names[0]: the text \"x\" instead of a map; give a map"),
        ] {
            let problems = Problems::of("f");
            let text = format!("names:\n- {entry}\n");
            let node = parse(documents(&text)[0], &problems).unwrap();
            let found = read(&Reader::root(&node, &problems));
            let is_named = entry.contains("name: a.b");
            assert_eq!(
                (found.names.len(), found.damaged.len()),
                (0, usize::from(is_named)),
                "{entry}"
            );
            assert_eq!(found.is_unreadable, !is_named, "{entry}");
            let problems: Vec<String> = problems
                .into_vec()
                .iter()
                .map(ToString::to_string)
                .collect();
            assert_eq!(problems, [format!("f:2: {expected}")]);
        }
        let problems = Problems::of("f");
        let text = "names: [{name: a.b, group: g.n.d.bosh., ttl: 2147483647, hold: '0'}, {name: b.b, query: q-s4.x}]\n";
        let node = parse(documents(text)[0], &problems).unwrap();
        let found = read(&Reader::root(&node, &problems));
        assert_eq!(problems.count(), 0);
        let name = |external: &str, internal: &str, ttl, hold| FleetName {
            external: Name::parse(external).unwrap(),
            internal: FleetDomain::from_text(internal).unwrap(),
            ttl,
            hold: Duration::from_secs(hold),
        };
        assert_eq!(
            found.names,
            [
                name("a.b", "q-s0.g.n.d.bosh", Some(i32::MAX as u32), 0),
                name("b.b", "q-s4.x", None, 30)
            ]
        );
    }

    #[test]
    fn next_withdrawal_is_known() {
        let name = FleetDomain::from_text("a.bosh").unwrap();
        let begin = Instant::now();
        let hold = Duration::from_secs(30);
        let second = Duration::from_secs(1);
        for order in [[0, 5, 9], [9, 5, 0], [5, 0, 9]] {
            let mut history = HealthHistory::default();
            let mut known = BTreeSet::new();
            for (host, seconds) in order.into_iter().enumerate() {
                known.insert(format!("10.0.0.{host}").parse().unwrap());
                // Each is seen ill for the first time at its second.
                let mut only = HealthHistory::default();
                only.observe(&name, &ill(&known), begin + seconds * second);
                for (address, illness) in only.unhealthy.remove(&name).unwrap() {
                    history
                        .unhealthy
                        .entry(name.clone())
                        .or_default()
                        .entry(address)
                        .or_insert(illness);
                }
            }
            let at = |seconds: u32| history.withdrawn(&name, hold, begin + seconds * second);
            assert_eq!((at(9).0.len(), at(9).1), (0, Some(begin + hold)));
            assert_eq!(
                (at(30).0.len(), at(30).1),
                (1, Some(begin + hold + 5 * second))
            );
            assert_eq!(
                (at(35).0.len(), at(35).1),
                (2, Some(begin + hold + 9 * second))
            );
            assert_eq!((at(39).0.len(), at(39).1), (3, None));
        }
        let other = FleetDomain::from_text("b.bosh").unwrap();
        assert_eq!(
            HealthHistory::default().withdrawn(&other, hold, begin),
            (set(&[]), None)
        );
    }

    #[test]
    fn wall_clock_dates_saved_health() {
        let name = FleetDomain::from_text("a.bosh").unwrap();
        let begin = Instant::now();
        let wall = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000);
        let mut history = HealthHistory::default();
        history.observe(&name, &ill(&set(&["10.0.0.1", "fd00::1"])), begin);
        history.observe(
            &FleetDomain::from_text("well.bosh").unwrap(),
            &ill(&set(&[])),
            begin,
        );
        let saved = history.save(begin + Duration::from_millis(1_500), wall);
        assert_eq!(
            serde_json::to_value(&saved).unwrap(),
            serde_json::json!({"a.bosh.": {"10.0.0.1": 998_500, "fd00::1": 998_500}})
        );
        // Other times are no other state, other addresses are.
        let later = history.save(begin + Duration::from_secs(9), wall);
        assert!(later != saved && later.is_like(&saved));
        history.observe(&name, &ill(&set(&["10.0.0.1"])), begin);
        assert!(!history.save(begin, wall).is_like(&saved));
        // A time in the future, and a name that is none.
        let edited: SavedHealth =
            serde_json::from_str(r#"{"a.bosh.": {"10.0.0.1": 2000000}, "a..b": {"10.0.0.2": 1}}"#)
                .unwrap();
        let restored = HealthHistory::restore(&edited, begin, wall);
        assert_eq!(restored.unhealthy.len(), 1);
        let hold = Duration::from_secs(30);
        assert_eq!(
            restored.withdrawn(&name, hold, begin),
            (set(&[]), Some(begin + hold))
        );
        assert_eq!(milliseconds(SystemTime::UNIX_EPOCH - hold), 0);
    }

    #[test]
    fn unchecked_illness_lasts_ten_minutes() {
        let name = FleetDomain::from_text("a.bosh").unwrap();
        let begin = Instant::now();
        let dead = set(&["10.0.0.1"]);
        let unchecked = FleetAddresses {
            unchecked: dead.clone(),
            ..FleetAddresses::default()
        };
        for (seconds, is_ill) in [(599, true), (600, false), (601, false)] {
            let mut history = HealthHistory::default();
            history.observe(&name, &ill(&dead), begin);
            let now = begin + Duration::from_secs(seconds);
            history.observe(&name, &unchecked, now);
            assert_eq!(
                !history.withdrawn(&name, Duration::ZERO, now).0.is_empty(),
                is_ill,
                "{seconds}"
            );
        }
    }

    #[test]
    fn unchanged_records_name_a_remedy() {
        let name = FleetDomain::from_text("a.bosh").unwrap();
        for (error, expected) in [
            (
                ResolveError::Unresolved(name, NoAddresses::NoInstance),
                "a.bosh. matches no instance; correct the name",
            ),
            (
                ResolveError::NoServer,
                "no server is configured; set `server` to the DNS server's config.json",
            ),
            (
                ResolveError::NoAnswer(None),
                "the server has not answered yet",
            ),
            (ResolveError::NoAnswer(Some("x".to_owned())), "x"),
        ] {
            assert_eq!(error.to_string(), expected);
        }
    }
}
