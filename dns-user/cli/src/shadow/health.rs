//! The health of instances, as far as it is followed.

use std::{
    collections::{HashMap, VecDeque},
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, ensure};
use bytes::Bytes;
use http_body_util::Full;
use hyper::Request;
use parking_lot::Mutex;
use serde::Deserialize;

use crate::operate::{SERVER_NAME, client_files, connect_tls};
use dns_core::{
    config::{ApiConfig, Config},
    name::Name,
    resolve::{AllRunning, Health, HealthState, Resolution},
};
use dns_fastpath::FastPathHandle;
use dns_health::HealthService;
use dns_kit::{
    http_client::{Limits, exchange},
    tls::RotatingTls,
};
use dns_shadow::{judge::TRANSITION, reference::HealthKnowledge};

/// Interval between questions to the API, and between looks at our checks.
const INTERVAL: Duration = Duration::from_secs(1);
/// Limits of the API's reply: 100,000 instances take 30 MB.
const LIMITS: Limits = Limits {
    time: Duration::from_secs(10),
    body: 64 << 20,
};

/// Where the health of instances comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum HealthSource {
    /// Check the instances with the configured certificates, as the server would
    Watch,
    /// Ask the API of the running server
    Ask,
    /// Compare with and without each instance
    None,
}

/// The health of instances.
#[derive(Clone)]
pub(super) enum FollowedHealth {
    /// The configuration disables health checks.
    Off,
    Ignored,
    Asked(Arc<Asked>),
    Checked(Arc<Checked>),
}

impl FollowedHealth {
    /// Begins to follow. Must be called inside a tokio runtime.
    pub(super) fn begin(source: HealthSource, config: &Config) -> anyhow::Result<Self> {
        if !config.health.enabled {
            return Ok(Self::Off);
        }
        match source {
            HealthSource::None => Ok(Self::Ignored),
            HealthSource::Ask => {
                let api = config.api.clone().context(
                    "--health ask: the configuration has no API; use --health watch or none",
                )?;
                let tls = RotatingTls::load("shadow", SERVER_NAME, &client_files(&api.tls))
                    .map_err(|error| anyhow!("--health ask: {error}"))?;
                let asked = Arc::new(Asked::default());
                tokio::spawn(asked.clone().follow(api, tls));
                Ok(Self::Asked(asked))
            }
            HealthSource::Watch => {
                let handle = FastPathHandle::default();
                let service = HealthService::new(&config.health, config.request_timeout, handle)?;
                service.start()?;
                // A change reaches each server within an interval of its checks.
                let window = config.health.check_interval + TRANSITION;
                let checked = Arc::new(Checked {
                    service,
                    window,
                    changes: Mutex::default(),
                });
                tokio::spawn(checked.clone().follow());
                Ok(Self::Checked(checked))
            }
        }
    }

    /// Returns the source of states for answers.
    pub(super) fn states(&self) -> Arc<dyn Health + Send + Sync> {
        match self {
            Self::Off | Self::Ignored => Arc::new(AllRunning),
            Self::Asked(asked) => asked.clone(),
            Self::Checked(checked) => checked.service.states(),
        }
    }

    /// Follows the health of a name's instances, and returns what is known of it.
    pub(super) fn knowledge(&self, name: &Name, resolution: &Resolution) -> HealthKnowledge {
        if !resolution.checks.tracked {
            return HealthKnowledge::Settled;
        }
        match self {
            Self::Off => HealthKnowledge::Settled,
            Self::Ignored => HealthKnowledge::Ignored,
            Self::Asked(asked) => asked.knowledge(name, &resolution.checks.instances),
            Self::Checked(checked) => checked.knowledge(name, resolution),
        }
    }

    /// Returns how health is followed, in words.
    pub(super) fn text(&self) -> String {
        match self {
            Self::Off => "off in the configuration".to_owned(),
            Self::Ignored => {
                "not followed: any selection of a name's instances is accepted".to_owned()
            }
            Self::Asked(asked) => match &asked.state.lock().problem {
                Some(problem) => format!("asked from the server's API: {problem}"),
                None => {
                    "asked from the server's API; names of groups accept any selection".to_owned()
                }
            },
            Self::Checked(checked) => match checked.service.outage() {
                Some(problem) => format!("checked by shadow: {problem}"),
                None => "checked by shadow".to_owned(),
            },
        }
    }
}

//----------- Asked ----------------------------------------------------------

/// States that the observed server has told.
#[derive(Default)]
pub(super) struct Asked {
    state: Mutex<Told>,
}

#[derive(Default)]
struct Told {
    /// State of each instance, and when it became so.
    states: HashMap<IpAddr, (HealthState, Instant)>,
    /// Why the last question failed.
    problem: Option<String>,
}

/// A line of `/instances`.
#[derive(Deserialize)]
struct InstanceState {
    ip: String,
    health_state: String,
}

impl Asked {
    async fn follow(self: Arc<Self>, api: ApiConfig, tls: Arc<RotatingTls>) {
        loop {
            let result = ask(&api, &tls).await;
            self.record(result, Instant::now());
            tokio::time::sleep(INTERVAL).await;
        }
    }

    /// Takes over what the server told at a moment.
    pub(super) fn record(&self, result: anyhow::Result<Vec<(IpAddr, HealthState)>>, now: Instant) {
        let mut told = self.state.lock();
        let states = match result {
            Ok(states) => states,
            Err(problem) => {
                told.problem = Some(format!("{problem:#}"));
                // Old states would explain differences that the server does not have.
                told.states.clear();
                return;
            }
        };
        told.problem = None;
        // Instances that are gone are forgotten.
        let mut before = std::mem::take(&mut told.states);
        for (address, state) in states {
            let since = before
                .remove(&address)
                .filter(|(earlier, _)| *earlier == state)
                .map_or(now, |(_, since)| since);
            told.states.insert(address, (state, since));
        }
    }

    fn knowledge(&self, name: &Name, instances: &[IpAddr]) -> HealthKnowledge {
        // The API tells the state of an instance, but not of its groups.
        let is_of_group = name.labels().any(|label| label.starts_with(b"q-g"));
        let told = self.state.lock();
        if is_of_group || told.problem.is_some() {
            return HealthKnowledge::Ignored;
        }
        if instances.iter().all(|address: &IpAddr| {
            told.states
                .get(address)
                .is_some_and(|(_, since)| since.elapsed() > TRANSITION)
        }) {
            HealthKnowledge::Settled
        } else {
            HealthKnowledge::Changing
        }
    }
}

impl Health for Asked {
    fn state(&self, ip: IpAddr, _group: Option<&str>) -> HealthState {
        let told = self.state.lock();
        told.states
            .get(&ip)
            .map_or(HealthState::Unchecked, |(state, _)| *state)
    }
}

/// Asks the API for the states of all instances.
async fn ask(api: &ApiConfig, tls: &RotatingTls) -> anyhow::Result<Vec<(IpAddr, HealthState)>> {
    let address = format!("127.0.0.1:{}", api.port);
    // `exchange` limits only what follows the connection.
    let stream = tokio::time::timeout(LIMITS.time, connect_tls(&address, tls))
        .await
        .context("no connection in time")??;
    let request = Request::get("/instances")
        .header("host", SERVER_NAME)
        .body(Full::<Bytes>::default())?;
    let response = exchange(stream, request, LIMITS).await?;
    ensure!(response.status().is_success(), "{}", response.status());
    let mut states = Vec::new();
    for line in serde_json::Deserializer::from_slice(response.body()).into_iter() {
        let InstanceState { ip, health_state } = line?;
        let state = match health_state.as_str() {
            "running" => HealthState::Running,
            "failing" => HealthState::Failing,
            "unchecked" => HealthState::Unchecked,
            // Also a state of a newer server.
            _ => HealthState::Unknown,
        };
        if let Ok(address) = ip.parse() {
            states.push((address, state));
        }
    }
    Ok(states)
}

//----------- Checked --------------------------------------------------------

/// States that our own checks found.
pub(super) struct Checked {
    service: HealthService,
    /// Time within which both servers have seen a change.
    window: Duration,
    /// The number of changes at moments within the window, the earliest first.
    changes: Mutex<VecDeque<(Instant, u64)>>,
}

impl Checked {
    async fn follow(self: Arc<Self>) {
        let states = self.service.states();
        loop {
            let now = Instant::now();
            {
                let mut changes = self.changes.lock();
                changes.push_back((now, states.changes()));
                // The first one is older than the window, as soon as there is such a one.
                while changes
                    .get(1)
                    .is_some_and(|(at, _)| now.duration_since(*at) > self.window)
                {
                    changes.pop_front();
                }
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }

    fn knowledge(&self, name: &Name, resolution: &Resolution) -> HealthKnowledge {
        let instances = &resolution.checks.instances;
        // As a query would: the checks of its instances begin, and the next query knows more.
        self.service.tracker().track(name, resolution);
        let states = self.service.states();
        let mut is_settled = instances.iter().all(|&address| states.is_checked(address));
        if let Some((at, changes)) = self.changes.lock().front() {
            // Before that, a change may have happened that the first reading already contains.
            is_settled &= at.elapsed() > self.window;
            is_settled &= !states.has_changed(states.set_of(instances), *changes);
        } else {
            is_settled = false;
        }
        if is_settled {
            HealthKnowledge::Settled
        } else {
            HealthKnowledge::Changing
        }
    }
}
