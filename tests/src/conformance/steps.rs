//! Steps of a scenario: queries between changes of files, health and scripts.

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    client::{self, Response},
    expect,
    replay::{Verdict, ask},
    scenario::{Between, Case, Expect, HealthScript, Query, RecursorScript},
    world::World,
};

/// Time by which the server's counters may lag behind a reply.
const COUNTED: Duration = Duration::from_millis(200);

/// Time limit of an expected exit.
const EXITS: Duration = Duration::from_secs(120);

/// Pause between two looks at a state.
const POLL: Duration = Duration::from_millis(50);

/// A line of `steps.jsonl`. Without `expect` it is executed but not judged.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Step {
    Query(Box<Case>),
    Sleep(Sleep),
    /// Writes a file in the scratch folder.
    WriteFile(WriteFile),
    /// Removes a file in the scratch folder.
    DeleteFile(DeleteFile),
    /// Replaces the script of an instance.
    SetHealth(SetHealth),
    /// Replaces the script of a recursor.
    SetRecursor(Box<SetRecursor>),
    /// Sends a request to the API.
    ApiGet(ApiGet),
    /// Sends several queries on one connection.
    TcpSession(TcpSession),
    /// Compares the number of requests that instances have received so far.
    HealthHits(HealthHits),
    /// Compares the number of requests that instances receive during a period.
    HealthHitsDuring(HealthHits),
    /// Compares the number of queries that scripted servers have received.
    UpstreamCounts(UpstreamCounts),
    Metrics(Metrics),
    /// Sends a signal to the server.
    Signal(SendSignal),
    /// Waits for the server to exit.
    AwaitExit(AwaitExit),
}

/// Declares the members of a step besides its id and description.
macro_rules! step {
    ($(#[$about:meta])* $name:ident { $($(#[$attribute:meta])* $member:ident: $kind:ty,)* }) => {
        $(#[$about])*
        #[derive(Clone, Debug, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            #[serde(default)]
            id: String,
            #[serde(default, rename = "why")]
            _why: String,
            $($(#[$attribute])* $member: $kind,)*
        }
    };
}

step! {
    Sleep {
        ms: u64,
    }
}

step! {
    /// See [`Step::WriteFile`]; the contents come from one of three sources.
    WriteFile {
        /// Path in the scratch folder.
        path: String,
        /// A file in the scenario's folder.
        from: Option<String>,
        json: Option<Value>,
        text: Option<String>,
        /// Writes a temporary file and renames it; true by default.
        atomic: Option<bool>,
    }
}

step! {
    DeleteFile {
        /// Path in the scratch folder.
        path: String,
    }
}

step! {
    SetHealth {
        ip: IpAddr,
        /// The new script; `None` closes the port.
        health: Option<HealthScript>,
    }
}

step! {
    SetRecursor {
        name: String,
        spec: RecursorScript,
    }
}

step! {
    ApiGet {
        path: String,
        /// Client certificate: `api_client` by default; `null` for none.
        #[serde(default = "api_client")]
        cert: Option<String>,
        /// Placeholder; `API_PORT` by default.
        port: Option<String>,
        /// 127.0.0.1 by default.
        addr: Option<IpAddr>,
        /// Defaults to GET if absent.
        method: Option<String>,
        expect: Option<Response>,
        /// Reason for which the server may answer differently.
        quirk: Option<String>,
    }
}

/// Default client certificate for the API.
fn api_client() -> Option<String> {
    Some("api_client".to_owned())
}

step! {
    TcpSession {
        queries: Vec<Query>,
        expect: Option<Vec<Expect>>,
        /// Reason for which the server may answer differently.
        quirk: Option<String>,
    }
}

step! {
    HealthHits {
        ips: Vec<IpAddr>,
        /// Length of the period, for [`Step::HealthHitsDuring`].
        #[serde(default)]
        ms: u64,
        expect: Option<BTreeMap<IpAddr, Count>>,
        /// Reason for which the server may behave differently.
        quirk: Option<String>,
    }
}

step! {
    UpstreamCounts {
        names: Vec<String>,
        /// Recorded counts by `placeholder.transport`.
        expect: Option<BTreeMap<String, Count>>,
        /// Reason for which the server may behave differently.
        quirk: Option<String>,
    }
}

step! {
    Metrics {
        names: Vec<String>,
        /// Defaults to `/metrics` if absent.
        path: Option<String>,
        /// Placeholder; `METRICS_PORT` by default.
        port: Option<String>,
        expect: Option<Value>,
        /// Reason for which the server may behave differently.
        quirk: Option<String>,
    }
}

step! {
    SendSignal {
        signal: String,
    }
}

step! {
    AwaitExit {
        within_ms: Option<u64>,
        expect: Option<Value>,
        /// Reason for which the server may behave differently.
        quirk: Option<String>,
    }
}

/// A number in the format of recordings.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(untagged)]
enum Count {
    Exactly(u64),
    Within(Between),
}

impl Step {
    pub fn id(&self) -> &String {
        match self {
            Self::Query(case) => &case.id,
            Self::Sleep(step) => &step.id,
            Self::WriteFile(step) => &step.id,
            Self::DeleteFile(step) => &step.id,
            Self::SetHealth(step) => &step.id,
            Self::SetRecursor(step) => &step.id,
            Self::ApiGet(step) => &step.id,
            Self::TcpSession(step) => &step.id,
            Self::HealthHits(step) | Self::HealthHitsDuring(step) => &step.id,
            Self::UpstreamCounts(step) => &step.id,
            Self::Metrics(step) => &step.id,
            Self::Signal(step) => &step.id,
            Self::AwaitExit(step) => &step.id,
        }
    }

    /// Returns whether the step has a recorded result.
    pub fn is_judged(&self) -> bool {
        match self {
            Self::Query(case) => case.expect.is_some() || case.expect_any.is_some(),
            Self::ApiGet(step) => step.expect.is_some(),
            Self::TcpSession(step) => step.expect.is_some(),
            Self::HealthHits(step) | Self::HealthHitsDuring(step) => step.expect.is_some(),
            Self::UpstreamCounts(step) => step.expect.is_some(),
            Self::Metrics(step) => step.expect.is_some(),
            Self::AwaitExit(step) => step.expect.is_some(),
            Self::Sleep(_)
            | Self::WriteFile(_)
            | Self::DeleteFile(_)
            | Self::SetHealth(_)
            | Self::SetRecursor(_)
            | Self::Signal(_) => false,
        }
    }

    /// Returns whether the verdict depends on the second of the query, by a TTL countdown or by the
    /// reply time.
    pub fn counts_seconds(&self) -> bool {
        let Self::Query(case) = self else {
            return false;
        };
        let expected = case.expect.iter().chain(case.expect_any.iter().flatten());
        case.elapsed_ms.is_some() || expected.into_iter().any(|expect| expect.ttl_slack > 0)
    }

    /// Returns the explicit pause in milliseconds.
    pub fn pauses_ms(&self) -> u64 {
        match self {
            Self::Sleep(step) => step.ms,
            Self::HealthHitsDuring(step) => step.ms,
            Self::Query(case) => case.count_after_ms,
            _ => 0,
        }
    }

    /// Executes the step; returns a verdict if it has a recorded result. Waits for a recorded state that
    /// on a busy machine comes later than in the recording.
    ///
    /// # Errors
    ///
    /// Fails if the step cannot be executed.
    pub fn carry_out(&self, world: &mut World<'_>) -> Result<Option<Verdict>> {
        let mut verdict = self.carry_out_once(world)?;
        world.is_changing |= self.changes_state();
        // Before any change nothing is on its way: the first result counts.
        let is_awaited = world.is_changing && self.shows_state();
        let begun = Instant::now();
        while is_awaited
            && verdict.as_ref().is_some_and(Verdict::failed)
            && begun.elapsed() < world.patience
        {
            thread::sleep(POLL);
            verdict = self.carry_out_once(world)?;
        }
        let waited = begun.elapsed();
        if waited >= POLL {
            eprintln!("{}: waited {waited:?} for the recorded state", self.id());
        }
        world.patience = world.patience.saturating_sub(waited);
        Ok(verdict)
    }

    /// Returns whether the step changes a state, or gives it time.
    fn changes_state(&self) -> bool {
        matches!(
            self,
            Self::Sleep(_)
                | Self::WriteFile(_)
                | Self::DeleteFile(_)
                | Self::SetHealth(_)
                | Self::SetRecursor(_)
                | Self::Signal(_)
        )
    }

    /// Returns whether the step shows a state that follows checks, files or counters. It counts no queries and no
    /// seconds, so it may be repeated.
    fn shows_state(&self) -> bool {
        match self {
            Self::Query(case) => {
                case.upstream.is_none() && case.upstream_last.is_none() && !self.counts_seconds()
            }
            Self::ApiGet(_) | Self::HealthHits(_) | Self::Metrics(_) => true,
            _ => false,
        }
    }

    fn carry_out_once(&self, world: &mut World<'_>) -> Result<Option<Verdict>> {
        let (differences, quirk) = match self {
            Self::Query(case) => {
                let asked = ask(world, case)?;
                let differences = self
                    .is_judged()
                    .then(|| asked.differences(world, case))
                    .transpose()?;
                (differences, &case.quirk)
            }
            Self::Sleep(step) => {
                thread::sleep(Duration::from_millis(step.ms));
                (None, &None)
            }
            Self::WriteFile(step) => {
                step.write(world).with_context(|| step.path.clone())?;
                (None, &None)
            }
            Self::DeleteFile(step) => {
                fs::remove_file(world.folder.path().join(&step.path))
                    .with_context(|| step.path.clone())?;
                (None, &None)
            }
            Self::SetHealth(step) => {
                world.set_health(step.ip, step.health.clone())?;
                (None, &None)
            }
            Self::SetRecursor(step) => {
                let recursor = world
                    .recursors
                    .get(&step.name)
                    .with_context(|| step.name.clone())?;
                recursor.set_script(step.spec.clone());
                (None, &None)
            }
            Self::Signal(step) => {
                world.signal(&step.signal)?;
                (None, &None)
            }
            Self::ApiGet(step) => {
                let got = step.request(world)?;
                (
                    step.expect
                        .as_ref()
                        .map(|wanted| compare_api(wanted, &got))
                        .transpose()?,
                    &step.quirk,
                )
            }
            Self::TcpSession(step) => (step.converse(world)?, &step.quirk),
            Self::HealthHits(step) | Self::HealthHitsDuring(step) => {
                (step.count(world), &step.quirk)
            }
            Self::UpstreamCounts(step) => (step.count(world), &step.quirk),
            Self::Metrics(step) => (same(step.expect.as_ref(), &step.read(world)?), &step.quirk),
            Self::AwaitExit(step) => {
                let code = world.wait_for_exit(step.limit())?;
                let got = json!({"exited": code.is_some(), "code": code});
                (same(step.expect.as_ref(), &got), &step.quirk)
            }
        };
        let verdict = |differences| Verdict {
            id: self.id().clone(),
            differences,
            quirk: quirk.clone(),
        };
        Ok(differences.map(verdict))
    }
}

impl AwaitExit {
    /// Returns how long to wait: beyond the recorded time if the server should exit.
    fn limit(&self) -> Duration {
        let should_exit = self
            .expect
            .as_ref()
            .is_some_and(|expect| expect["exited"] == true);
        if should_exit {
            EXITS
        } else {
            Duration::from_millis(self.within_ms.unwrap_or(8000))
        }
    }
}

impl WriteFile {
    fn write(&self, world: &World<'_>) -> Result<()> {
        let text = match (&self.from, &self.json, &self.text) {
            (Some(file), None, None) => fs::read_to_string(world.source.join(file))?,
            (None, Some(document), None) => document.to_string(),
            (None, None, Some(text)) => text.clone(),
            _ => anyhow::bail!("exactly one of from, json and text must be given"),
        };
        world.write_file(&self.path, &text, self.atomic.unwrap_or(true))
    }
}

impl ApiGet {
    fn request(&self, world: &World<'_>) -> Result<Response> {
        let port = self.port.as_deref().unwrap_or("API_PORT");
        let port = *world.ports.get(port).with_context(|| port.to_owned())?;
        let server = SocketAddr::new(self.addr.unwrap_or(Ipv4Addr::LOCALHOST.into()), port);
        let method = self.method.as_deref().unwrap_or("GET");
        let name = world.scenario.server.certificate_name();
        let path = world.expand(&self.path);
        client::api(
            server,
            name,
            method,
            &path,
            world.certificates,
            self.cert.as_deref(),
        )
    }
}

/// Returns the differences between two responses; JSON lines may come in any order.
fn compare_api(wanted: &Response, got: &Response) -> Result<Vec<String>> {
    let mut found = Vec::new();
    if wanted.error.is_some() || got.error.is_some() {
        if wanted.error != got.error {
            found.push(format!("api: want {wanted:?}, got {got:?}"));
        }
        return Ok(found);
    }
    if wanted.status != got.status {
        found.push(format!(
            "api status: want {:?}, got {:?}",
            wanted.status, got.status
        ));
    }
    let body = got.body.as_deref().unwrap_or_default();
    if let Some(wanted) = &wanted.ndjson {
        let lines = body.lines().filter(|line| !line.trim().is_empty());
        let Ok(mut rows) = lines
            .map(serde_json::from_str)
            .collect::<Result<Vec<Value>, _>>()
        else {
            found.push(format!("the body is not JSON lines: {body:?}"));
            return Ok(found);
        };
        let mut wanted = wanted.clone();
        wanted.sort_by_cached_key(Value::to_string);
        rows.sort_by_cached_key(Value::to_string);
        if wanted != rows {
            found.push(format!("api rows: want {wanted:?}, got {rows:?}"));
        }
    } else if wanted.body.as_deref().is_some_and(|wanted| wanted != body) {
        found.push(format!("api body: want {:?}, got {body:?}", wanted.body));
    }
    Ok(found)
}

impl TcpSession {
    /// Returns the queries with their recorded replies; none if the step is not judged.
    pub fn exchanges(&self) -> impl Iterator<Item = (&Query, &Expect)> {
        self.queries.iter().zip(self.expect.iter().flatten())
    }

    /// Sends all queries and compares the replies.
    fn converse(&self, world: &World<'_>) -> Result<Option<Vec<String>>> {
        let server = SocketAddr::from((Ipv4Addr::LOCALHOST, world.ports["PORT"]));
        let observed = client::ask_session(&self.queries, server)?;
        let Some(expected) = &self.expect else {
            return Ok(None);
        };
        let mut found = Vec::new();
        if expected.len() != self.queries.len() {
            found.push("the recording lacks an expectation for some query".to_owned());
        }
        for (number, ((query, expected), observed)) in
            self.queries.iter().zip(expected).zip(&observed).enumerate()
        {
            let differences =
                expect::compare(query, expected, observed, world.source, world.late())?;
            found.extend(
                differences
                    .iter()
                    .map(|difference| format!("#{number} {difference}")),
            );
        }
        Ok(Some(found))
    }
}

impl HealthHits {
    /// Counts requests so far, or during the given period.
    fn count(&self, world: &World<'_>) -> Option<Vec<String>> {
        let hits = || {
            self.ips
                .iter()
                .map(|&ip| (ip, world.health_hits(ip)))
                .collect::<BTreeMap<_, _>>()
        };
        let during = self.ms > 0;
        let before = during.then(hits).unwrap_or_default();
        thread::sleep(Duration::from_millis(self.ms));
        let mut got = hits();
        for (ip, count) in &mut got {
            *count = count.saturating_sub(before.get(ip).copied().unwrap_or(0));
        }
        let mut wanted = self.expect.clone()?;
        // A replay that lags sees the checks of the time that it lost.
        for count in wanted.values_mut() {
            if let Count::Within(bounds) = count
                && bounds.max > 0
            {
                bounds.max += u64::from(world.late());
            }
        }
        Some(compare_counts(&wanted, &got))
    }
}

impl UpstreamCounts {
    /// Counts queries so far.
    fn count(&self, world: &World<'_>) -> Option<Vec<String>> {
        let mut got = BTreeMap::new();
        for (name, counts) in world.upstream_counts() {
            if self.names.contains(&name) {
                got.extend(
                    counts
                        .into_iter()
                        .map(|(proto, count)| (format!("{name}.{proto}"), count)),
                );
            }
        }
        self.expect
            .as_ref()
            .map(|wanted| compare_counts(wanted, &got))
    }
}

/// Returns the differences between counts; an absent count is 0.
fn compare_counts<K: Ord + std::fmt::Display>(
    wanted: &BTreeMap<K, Count>,
    got: &BTreeMap<K, u64>,
) -> Vec<String> {
    let differs = |(key, wanted): (&K, &Count)| {
        let got = got.get(key).copied().unwrap_or(0);
        let is_right = match wanted {
            Count::Exactly(count) => *count == got,
            Count::Within(bounds) => bounds.holds(got),
        };
        (!is_right).then(|| format!("{key}: want {wanted:?}, got {got}"))
    };
    wanted.iter().filter_map(differs).collect()
}

impl Metrics {
    /// Reads the values in the format of recordings.
    fn read(&self, world: &World<'_>) -> Result<Value> {
        thread::sleep(COUNTED);
        let port = self.port.as_deref().unwrap_or("METRICS_PORT");
        let port = *world.ports.get(port).with_context(|| port.to_owned())?;
        let server = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let response = client::get(server, self.path.as_deref().unwrap_or("/metrics"));
        if let Some(error) = response.error {
            return Ok(json!({"error": error}));
        }
        let mut values = serde_json::Map::new();
        for line in response.body.unwrap_or_default().lines() {
            if let Some((name, value)) = line.rsplit_once(' ')
                && self.names.iter().any(|wanted| wanted == name)
            {
                values.insert(name.to_owned(), value.parse::<f64>()?.into());
            }
        }
        Ok(json!({"status": response.status, "values": values}))
    }
}

fn same(wanted: Option<&Value>, got: &Value) -> Option<Vec<String>> {
    let wanted = wanted?;
    Some(if wanted == got {
        Vec::new()
    } else {
        vec![format!("want {wanted}, got {got}")]
    })
}
