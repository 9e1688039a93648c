//! Fleet names published under external names, as `FleetName` documents list them.
//!
//! Addresses come from [`dns_core::resolve`] on `records.json`, as in the server's own answers.
//! Health comes from the running server; an address is withdrawn only after it has been unhealthy
//! for the hold time, and health never empties a record set.
//!
//! In the other direction, an external-dns writes names of the fleet: [`AliasWriter`].

mod writer;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{anyhow, bail};
use bytes::Bytes;
use dns_core::{
    catalog::{AliasFiles, Records, Snapshot},
    config::{Config as ServerConfig, values::parse_duration},
    name::Name as FleetDomain,
    resolve::{AllRunning, Existence, Health, HealthState, Resolution},
};
use dns_kit::{
    files::{FileStamp, bounded, glob::glob, load_config},
    http_client::Limits,
};
use hyper::{Method, StatusCode};
use serde::{Deserialize, Serialize};
use tokio::net::UdpSocket;

pub(crate) use self::writer::{AliasWriter, WriteError};
use crate::{
    control::exchange,
    endpoint::{LONGEST_TTL, read_name},
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
    /// Whether the name of an entry is unreadable, so that all records of the document stay
    /// unchanged.
    pub is_unreadable: bool,
}

const MEMBERS: [&str; 6] = ["name", "alias", "group", "query", "ttl", "hold"];

/// Parses `spec.names`. An invalid entry does not affect the others.
pub(crate) fn read(spec: &Reader<'_>) -> FleetNames {
    let mut found = FleetNames::default();
    let Some(mut fields) = spec.fields() else { return found };
    let names = fields.required("names").and_then(|names| names.items());
    let mut seen = BTreeSet::new();
    for item in names.into_iter().flatten() {
        let before = item.problems().count();
        let (external, name) = item.fields().map_or((None, None), |fields| read_entry(fields, &mut seen));
        match name {
            Some(name) if item.problems().count() == before => found.names.push(name),
            _ => match external {
                Some(external) => found.damaged.push(external),
                None => found.is_unreadable = true,
            },
        }
    }
    fields.finish(&["names"]);
    found
}

fn read_entry(mut fields: Fields<'_>, seen: &mut BTreeSet<Name>) -> (Option<Name>, Option<FleetName>) {
    let entry = fields.map().clone();
    let external = fields.required("name").and_then(|name| read_name(&name));
    let sources = ["alias", "group", "query"].map(|member| (member, fields.optional(member)));
    let ttl = fields.optional("ttl").and_then(|ttl| ttl.integer(1..=LONGEST_TTL));
    let hold = fields.optional("hold").map_or(Some(DEFAULT_HOLD), |hold| read_hold(&hold));
    fields.finish(&MEMBERS);
    let mut given = sources.into_iter().filter_map(|(member, reader)| Some((member, reader?)));
    let internal = match (given.next(), given.next()) {
        (Some((member, reader)), None) => read_internal(member, &reader),
        (first, _) => {
            let reason = if first.is_some() { "set more than one of" } else { "set none of" };
            entry.problem(format!("{reason} alias, group and query"), "give exactly one of them");
            None
        }
    };
    if let Some(name) = &external
        && !seen.insert(name.clone())
    {
        entry.problem(format!("{name} occurs twice in this document"), "keep one of the two entries");
    }
    let name = (|| Some(FleetName { external: external.clone()?, internal: internal?, ttl, hold: hold? }))();
    (external, name)
}

fn read_hold(reader: &Reader<'_>) -> Option<Duration> {
    let text = reader.text()?;
    match parse_duration(text) {
        Ok(hold) => Some(hold),
        Err(error) => {
            reader.problem(format!("{text:?} {error}"), "use a number with a unit, such as 30s");
            None
        }
    }
}

/// Parses an alias, a query, or a group as `GROUP.NETWORK.DEPLOYMENT.DOMAIN`.
fn read_internal(member: &str, reader: &Reader<'_>) -> Option<FleetDomain> {
    let text = reader.filled_text()?;
    let name = match member {
        "group" => {
            let labels = text.trim_end_matches('.').split('.').count();
            if labels < 4 {
                reader.problem(
                    format!("{text:?} is not a group"),
                    "write it as GROUP.NETWORK.DEPLOYMENT.DOMAIN, such as router.default.cf.bosh",
                );
                return None;
            }
            // Smart health filter, as for an alias without `health_filter`.
            format!("q-s0.{text}")
        }
        _ => text.to_owned(),
    };
    match FleetDomain::from_text(&name) {
        Ok(name) => Some(name),
        Err(error) => {
            reader.problem(format!("{text:?} is not a domain name: {error}"), "use a name of the fleet");
            None
        }
    }
}

/// Time since which each instance has been unhealthy, by fleet name, because a name may select the
/// health of a single job.
#[derive(Debug, Default)]
pub(crate) struct HealthHistory {
    unhealthy: BTreeMap<FleetDomain, BTreeMap<IpAddr, Instant>>,
}

/// A [`HealthHistory`] saved for the next process: milliseconds since 1970 by name and address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedHealth(BTreeMap<String, BTreeMap<IpAddr, u64>>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Resolved {
    /// One set per address family with addresses.
    pub records: Vec<Record>,
    /// Time at which the next unhealthy address reaches its hold time.
    pub next_change: Option<Instant>,
}

impl HealthHistory {
    /// Records the instances of a name that are unhealthy at `now`; all others are healthy.
    pub(crate) fn observe(&mut self, name: &FleetDomain, unhealthy: &BTreeSet<IpAddr>, now: Instant) {
        let known = self.unhealthy.entry(name.clone()).or_default();
        known.retain(|address, _| unhealthy.contains(address));
        for address in unhealthy {
            known.entry(*address).or_insert(now);
        }
    }

    /// Returns the state to save for the next process.
    pub(crate) fn save(&self, now: Instant, wall: SystemTime) -> SavedHealth {
        let wall = milliseconds(wall);
        let since = |since: &Instant| {
            let elapsed = now.saturating_duration_since(*since).as_millis();
            wall.saturating_sub(u64::try_from(elapsed).unwrap_or(u64::MAX))
        };
        let names =
            self.unhealthy.iter().filter(|(_, unhealthy)| !unhealthy.is_empty()).map(|(name, unhealthy)| {
                (
                    name.to_string(),
                    unhealthy.iter().map(|(address, begin)| (*address, since(begin))).collect(),
                )
            });
        SavedHealth(names.collect())
    }

    /// Restores a saved state. A time in the future is replaced by `now`.
    pub(crate) fn restore(saved: &SavedHealth, now: Instant, wall: SystemTime) -> Self {
        let wall = milliseconds(wall);
        let since =
            |since: u64| now.checked_sub(Duration::from_millis(wall.saturating_sub(since))).unwrap_or(now);
        let names = saved.0.iter().filter_map(|(name, unhealthy)| {
            let unhealthy = unhealthy.iter().map(|(address, begin)| (*address, since(*begin))).collect();
            Some((FleetDomain::from_text(name).ok()?, unhealthy))
        });
        Self { unhealthy: names.collect() }
    }

    /// Removes names that are no longer published.
    pub(crate) fn keep(&mut self, names: &BTreeSet<FleetDomain>) {
        self.unhealthy.retain(|name, _| names.contains(name));
    }
}

impl SavedHealth {
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        let addresses = |saved: &Self| -> BTreeSet<(String, IpAddr)> {
            let pairs = saved
                .0
                .iter()
                .flat_map(|(name, unhealthy)| unhealthy.keys().map(|address| (name.clone(), *address)));
            pairs.collect()
        };
        addresses(self) == addresses(other)
    }
}

fn milliseconds(wall: SystemTime) -> u64 {
    let elapsed = wall.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
}

/// Health of a name's instances, unhealthy only after the hold time.
struct HeldHealth<'a> {
    unhealthy: Option<&'a BTreeMap<IpAddr, Instant>>,
    hold: Duration,
    now: Instant,
}

impl Health for HeldHealth<'_> {
    fn state(&self, ip: IpAddr, _group: Option<&str>) -> HealthState {
        let since = self.unhealthy.and_then(|unhealthy| unhealthy.get(&ip));
        match since {
            Some(since) if self.now.saturating_duration_since(*since) >= self.hold => HealthState::Failing,
            _ => HealthState::Running,
        }
    }
}

/// The reason why a fleet name has no addresses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ResolveError {
    #[error("{0} is not a name of the fleet; correct it, or add the alias to the server")]
    Foreign(FleetDomain),
    #[error("{0} matches no instance; correct the name")]
    NoInstance(FleetDomain),
    #[error("{0} is not a valid query; see docs/architecture.md")]
    Malformed(FleetDomain),
    #[error("{0} has no addresses: its instances have none, or its filter excludes all")]
    NoAddresses(FleetDomain),
    #[error("no server is configured; set `server` to the DNS server's config.json")]
    NoServer,
    #[error("{}", .0.as_deref().unwrap_or("the fleet's records cannot be read"))]
    NoRecords(Option<String>),
}

/// Resolves a mapping. If health would remove every address, all addresses are published.
pub(crate) fn resolve(
    name: &FleetName,
    snapshot: &Snapshot,
    history: &HealthHistory,
    now: Instant,
) -> Result<Resolved, ResolveError> {
    let FleetName { external, internal, ttl, hold } = name;
    let unhealthy = history.unhealthy.get(internal);
    let held = HeldHealth { unhealthy, hold: *hold, now };
    let find = |health: &dyn Health| dns_core::resolve::resolve(snapshot, health, internal);
    let mut found = find(&held).ok_or_else(|| ResolveError::Foreign(internal.clone()))?;
    match found.existence {
        Existence::Found => {}
        Existence::NoSuchName => return Err(ResolveError::NoInstance(internal.clone())),
        Existence::Malformed => return Err(ResolveError::Malformed(internal.clone())),
    }
    if found.v4.is_empty() && found.v6.is_empty() {
        // The same name was resolved above.
        found = find(&AllRunning).unwrap_or(found);
    }
    let Resolution { existence: _, v4, v6, checks: _ } = found;
    let record = |record_type, addresses: Vec<String>| {
        let targets = addresses.iter().filter_map(|address| Target::parse(record_type, address).ok());
        let record = Record { ttl: *ttl, ..Record::new(external.clone(), record_type, targets) };
        (!record.targets.is_empty()).then_some(record)
    };
    let v4 = record(RecordType::A, v4.iter().map(ToString::to_string).collect());
    let v6 = record(RecordType::AAAA, v6.iter().map(ToString::to_string).collect());
    let records: Vec<_> = v4.into_iter().chain(v6).collect();
    if records.is_empty() {
        return Err(ResolveError::NoAddresses(internal.clone()));
    }
    let ends = unhealthy.into_iter().flatten().map(|(_, since)| *since + *hold);
    Ok(Resolved { records, next_change: ends.filter(|end| *end > now).min() })
}

/// Limits of a response: an explanation of a group of 10,000 instances takes about 2 MB.
const LIMITS: Limits = Limits { time: Duration::from_secs(5), body: 64 << 20 };

/// A client of the server's control socket.
#[derive(Debug)]
pub(crate) struct ServerClient {
    socket: PathBuf,
    /// DNS address of the server. The server checks the health of instances whose names are
    /// queried, so a query keeps a name's instances checked.
    dns: Option<SocketAddr>,
    queries: Option<UdpSocket>,
}

/// Failure to get the health of a name. The known state stays in use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {reason}", socket.display())]
pub(crate) struct ServerError {
    socket: PathBuf,
    reason: String,
}

#[derive(Debug, Deserialize)]
struct Explanation {
    targets: Vec<ExplainedTarget>,
}

#[derive(Debug, Deserialize)]
struct ExplainedTarget {
    matches: Vec<ExplainedMatch>,
}

#[derive(Debug, Deserialize)]
struct ExplainedMatch {
    ip: Option<IpAddr>,
    health: String,
}

impl ServerClient {
    /// Creates a client of a control socket, which keeps names checked by queries to `dns`.
    pub(crate) fn new(socket: PathBuf, dns: Option<SocketAddr>) -> Self {
        Self { socket, dns, queries: None }
    }

    /// Returns the addresses of a name's unhealthy instances.
    pub(crate) async fn unhealthy_addresses(
        &mut self,
        name: &FleetDomain,
    ) -> Result<BTreeSet<IpAddr>, ServerError> {
        self.keep_checked(name).await;
        let failed = |reason: String| ServerError { socket: self.socket.clone(), reason };
        let answer = self.explain(name).await.map_err(|error| failed(error.to_string()))?;
        let Explanation { targets } = serde_json::from_slice(&answer)
            .map_err(|error| failed(format!("cannot parse the response: {error}")))?;
        let unhealthy = targets.into_iter().flat_map(|target| target.matches).filter_map(|found| {
            // `unchecked` does not mean unhealthy: nothing is known.
            matches!(found.health.as_str(), "failing" | "unknown").then_some(found.ip?)
        });
        Ok(unhealthy.collect())
    }

    async fn explain(&self, name: &FleetDomain) -> anyhow::Result<Bytes> {
        let name: String = url::form_urlencoded::byte_serialize(name.to_string().as_bytes()).collect();
        let path = format!("/resolve?name={name}");
        match exchange(&self.socket, Method::GET, &path, Bytes::new(), LIMITS).await? {
            (StatusCode::OK, body) => Ok(body),
            (status, body) => bail!("{status}: {}", String::from_utf8_lossy(&body).trim_end()),
        }
    }

    /// Sends a DNS query for the name to the server; the answer is ignored.
    async fn keep_checked(&mut self, name: &FleetDomain) {
        let Some(dns) = self.dns else { return };
        if self.queries.is_none() {
            let local = if dns.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
            self.queries = UdpSocket::bind(local).await.ok();
        }
        let Some(socket) = &self.queries else { return };
        let mut reply = [0; 512];
        while socket.try_recv(&mut reply).is_ok() {}
        // Header with id, RD and one question (RFC 1035, section 4.1.1); type A, class IN.
        let mut query = vec![0x5a, 0x5a, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        query.extend_from_slice(name.as_wire());
        query.extend_from_slice(&[0, 1, 0, 1]);
        if let Err(error) = socket.send_to(&query, dns).await {
            tracing::debug!(%dns, %error, "query to the server failed; its health checks may lapse");
        }
    }
}

/// Follows the files; the last valid state of each stays in use.
#[derive(Debug)]
pub(crate) struct FleetFiles {
    records: PathBuf,
    /// Glob pattern of the alias files; empty for none.
    aliases: String,
    /// Stamps of the files at the last refresh.
    stamps: Vec<(PathBuf, Option<FileStamp>)>,
    good_records: Option<Vec<u8>>,
    good_aliases: AliasFiles,
    snapshot: Option<Arc<Snapshot>>,
    problem: Option<SourceError>,
}

/// Failure to read the fleet's files. The last valid state stays in use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {reason}", file.display())]
pub(crate) struct SourceError {
    file: PathBuf,
    reason: String,
}

impl FleetFiles {
    /// Follows the files in a server's `config.json`; also returns that configuration.
    pub(crate) fn of_server(path: &Path) -> anyhow::Result<(Self, ServerConfig)> {
        let config = load_config(path).map_err(anyhow::Error::msg)?.config;
        let records = config.records_file.clone().ok_or_else(|| {
            anyhow!("{}: \"records_file\" is missing; fleet names need the server's records", path.display())
        })?;
        Ok((Self::new(records, config.alias_files_glob.clone()), config))
    }

    /// Follows `records.json` and the alias files that match a glob pattern.
    pub(crate) fn new(records: PathBuf, aliases: String) -> Self {
        Self {
            records,
            aliases,
            stamps: Vec::new(),
            good_records: None,
            good_aliases: AliasFiles::default(),
            snapshot: None,
            problem: None,
        }
    }

    /// Reads changed files. Returns the latest valid state, if any, and the problem of the current
    /// files.
    pub(crate) fn refresh(&mut self) -> (Option<Arc<Snapshot>>, Option<SourceError>) {
        let files = self.files();
        let stamps: Vec<_> = files.iter().map(|path| (path.clone(), FileStamp::of(path))).collect();
        if stamps != self.stamps || self.problem.is_some() {
            self.stamps = stamps;
            self.problem = self.read(&files[1..]).err();
        }
        (self.snapshot.clone(), self.problem.clone())
    }

    /// Returns `records.json`, followed by the alias files in order of precedence.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let mut files = vec![self.records.clone()];
        // A malformed pattern matches no file; the server reports it.
        files.extend(glob(&self.aliases).unwrap_or_default());
        files
    }

    fn read(&mut self, alias_files: &[PathBuf]) -> Result<(), SourceError> {
        let records = read_file(&self.records);
        let mut contents = Vec::new();
        let mut problem = None;
        for path in alias_files {
            match read_file(path) {
                Ok(bytes) => contents.push((path.display().to_string(), bytes)),
                Err(error) => problem = Some(error),
            }
        }
        if problem.is_none() {
            let files = contents.iter().map(|(file, bytes)| (file.as_str(), bytes.as_slice()));
            match AliasFiles::parse(files) {
                Ok((aliases, _)) => self.good_aliases = aliases,
                Err(error) => {
                    problem =
                        Some(SourceError { file: PathBuf::from(&self.aliases), reason: error.to_string() });
                }
            }
        }
        let refused = |reason: String| SourceError { file: self.records.clone(), reason };
        match records.and_then(|bytes| match Records::parse(&bytes) {
            Ok(parsed) => Ok((bytes, parsed)),
            Err(error) => Err(refused(error.to_string())),
        }) {
            Ok((bytes, (records, _))) => {
                self.good_records = Some(bytes);
                self.snapshot = Some(Arc::new(Snapshot::build(records, &self.good_aliases).0));
            }
            Err(error) => {
                problem = Some(error);
                // New aliases apply to the last valid records, which were parsed successfully
                // before.
                let good = self.good_records.as_deref().and_then(|bytes| Records::parse(bytes).ok());
                if let Some((records, _)) = good {
                    self.snapshot = Some(Arc::new(Snapshot::build(records, &self.good_aliases).0));
                }
            }
        }
        problem.map_or(Ok(()), Err)
    }
}

fn read_file(path: &Path) -> Result<Vec<u8>, SourceError> {
    bounded::read(path)
        .map_err(|error| SourceError { file: path.to_owned(), reason: format!("cannot be read: {error}") })
}

#[cfg(test)]
mod tests {
    use dns_core::catalog::{AliasFiles, Records};

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
        let [router, database] = &found.names[..] else { panic!("{found:?}") };
        assert_eq!((router.external.as_str(), router.ttl), ("router.example.org", Some(60)));
        assert_eq!(router.hold, Duration::from_secs(10));
        assert_eq!(database.internal.to_string().trim_end_matches('.'), "q-s0.mysql.default.cf.bosh");
        assert_eq!(database.hold, DEFAULT_HOLD);
        assert_eq!(found.damaged.len(), 5);
        let problems = problems.into_vec();
        let lines: Vec<_> = problems.iter().map(|problem| problem.line).collect();
        assert_eq!(lines, [4, 5, 6, 7, 8], "{problems:?}");
    }

    /// Two instances of group `router`, on addresses 10.0.0.1 and 10.0.0.2, and one of `db`.
    fn snapshot() -> Snapshot {
        let records = br#"{
            "record_keys": ["id", "instance_group", "network", "deployment", "ip", "domain", "group_ids", "az_id"],
            "record_infos": [
                ["r1", "router", "default", "cf", "10.0.0.1", "bosh", ["1"], "1"],
                ["r2", "router", "default", "cf", "10.0.0.2", "bosh", ["1"], "1"],
                ["d1", "db", "default", "cf", "fd00::1", "bosh", ["2"], "1"]
            ],
            "records": []
        }"#;
        Snapshot::build(Records::parse(records).unwrap().0, &AliasFiles::default()).0
    }

    fn mapping(internal: &str) -> FleetName {
        FleetName {
            external: Name::parse("x.example.org").unwrap(),
            internal: FleetDomain::from_text(internal).unwrap(),
            ttl: Some(60),
            hold: Duration::from_secs(30),
        }
    }

    fn unhealthy(addresses: &[&str]) -> BTreeSet<IpAddr> {
        addresses.iter().map(|address| address.parse().unwrap()).collect()
    }

    fn shown(resolved: Result<Resolved, ResolveError>) -> Vec<String> {
        resolved.unwrap().records.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn address_leaves_after_hold() {
        let (snapshot, name) = (snapshot(), mapping("q-s0.q-g1.bosh"));
        let mut history = HealthHistory::default();
        let begin = Instant::now();
        let both = ["x.example.org 60 A 10.0.0.1,10.0.0.2"];
        history.observe(&name.internal, &unhealthy(&["10.0.0.1"]), begin);
        let first = resolve(&name, &snapshot, &history, begin).unwrap();
        assert_eq!(first.next_change, Some(begin + name.hold));
        assert_eq!(shown(Ok(first)), both);
        let almost = begin + Duration::from_millis(29_999);
        history.observe(&name.internal, &unhealthy(&["10.0.0.1"]), almost);
        assert_eq!(shown(resolve(&name, &snapshot, &history, almost)), both);
        let after = begin + name.hold;
        assert_eq!(shown(resolve(&name, &snapshot, &history, after)), ["x.example.org 60 A 10.0.0.2"]);
        // Recovery takes effect at once, and a relapse must last for the hold time again.
        history.observe(&name.internal, &unhealthy(&[]), after);
        assert_eq!(shown(resolve(&name, &snapshot, &history, after)), both);
        history.observe(&name.internal, &unhealthy(&["10.0.0.1"]), after);
        assert_eq!(shown(resolve(&name, &snapshot, &history, after + Duration::from_secs(1))), both);
    }

    #[test]
    fn illness_outlives_a_restart() {
        let (snapshot, name) = (snapshot(), mapping("q-s0.q-g1.bosh"));
        let mut history = HealthHistory::default();
        let (begin, wall) = (Instant::now(), SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000));
        history.observe(&name.internal, &unhealthy(&["10.0.0.1"]), begin);
        let saved = history.save(begin + Duration::from_secs(20), wall);
        assert!(saved.is_like(&saved) && !saved.is_like(&SavedHealth::default()));
        let text = serde_json::to_string(&saved).unwrap();
        let saved: SavedHealth = serde_json::from_str(&text).unwrap();
        let later = Instant::now() + Duration::from_secs(3600);
        let history = HealthHistory::restore(&saved, later, wall + Duration::from_secs(9));
        assert!(shown(resolve(&name, &snapshot, &history, later))[0].contains("10.0.0.1"));
        let history = HealthHistory::restore(&saved, later, wall + Duration::from_secs(10));
        assert!(!shown(resolve(&name, &snapshot, &history, later))[0].contains("10.0.0.1"));
    }

    #[test]
    fn health_never_empties_a_set() {
        let snapshot = snapshot();
        let begin = Instant::now();
        for query in ["q-s0.q-g1.bosh", "q-s3.q-g1.bosh", "q-s0.router.default.cf.bosh"] {
            let name = mapping(query);
            let mut history = HealthHistory::default();
            history.observe(&name.internal, &unhealthy(&["10.0.0.1", "10.0.0.2"]), begin);
            let later = begin + Duration::from_secs(3600);
            assert_eq!(
                shown(resolve(&name, &snapshot, &history, later)),
                ["x.example.org 60 A 10.0.0.1,10.0.0.2"]
            );
        }
    }

    #[test]
    fn addresses_divide_by_family() {
        let name = mapping("q-s4.q-g2.bosh");
        let found = resolve(&name, &snapshot(), &HealthHistory::default(), Instant::now());
        assert_eq!(shown(found), ["x.example.org 60 AAAA fd00::1"]);
    }

    #[test]
    fn unknown_names_are_errors() {
        for (query, reason) in [
            ("q-s0.q-g9.bosh", "matches no instance"),
            ("router.cf.internal", "not a name of the fleet"),
            ("q-zz.q-g1.bosh", "not a valid query"),
        ] {
            let error =
                resolve(&mapping(query), &snapshot(), &HealthHistory::default(), Instant::now()).unwrap_err();
            assert!(error.to_string().contains(reason), "{query}: {error}");
        }
    }
}
