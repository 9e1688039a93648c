//! The main loop: signals, reloads, self-checks, shutdown.

use std::{
    net::SocketAddr,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::bail;
use tokio::{
    sync::{mpsc, oneshot},
    task::{JoinHandle, spawn_blocking},
    time,
};
use tracing::{error, info, warn};

use super::{
    failures::{Failure, Failures},
    fast_path::Lifecycle,
    files::{FileChanges, Files},
    followed_file::{Reading, Sources},
    listeners::Listeners,
    settings::{self, WholeConfig},
    signals::{SignalRequest, Signals},
    upcheck::{Findings, Upcheck},
    upstreams::Upstreams,
};
use crate::{
    consul::ConsulNames,
    ops::{
        readiness::{CheckLog, Readiness},
        service_status::{Kind, Reloaded, ServiceStatus},
    },
    server::{OwnConnections, ServerMetrics},
    state::ServerState,
};
use dns_consul::config::Config as ConsulConfig;
use dns_core::config::{Config, ConfigError, ConfigErrors, Loaded, all_addresses};
use dns_fastpath::REPORT_INTERVAL;
use dns_health::HealthService;
use dns_kit::{
    files::watch::Watch,
    logs::Logs,
    memory,
    service_manager::{self, NotifyState},
};

/// Interval of self-checks.
const UPCHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum number of waiting queries at which the allocator may be busy for a moment: those that need memory wait.
const MAX_AT_REST: usize = 64;

/// Time limit for interfaces to answer from a new snapshot.
const PUBLISHING_TIMEOUT: Duration = Duration::from_secs(2);

/// Time limit for reading config.json.
const CONFIG_TIMEOUT: Duration = Duration::from_secs(1);

/// Number of consecutive rounds without an answer to any client or self-check after which the
/// process ends: 30 s.
const MAX_UPCHECK_FAILURES: u32 = 6;

/// All components of a running server.
pub(super) struct Daemon<'a> {
    pub(super) path: &'a Path,
    /// As of the last successful load.
    pub(super) config: Config,
    /// The last read of config.json.
    pub(super) reading: Option<ConfigReading>,
    pub(super) logs: &'a Logs,
    pub(super) service_status: ServiceStatus,
    pub(super) files: Files,
    /// Wakes when a file may have changed.
    pub(super) watch: Watch,
    pub(super) server_state: Arc<ServerState>,
    /// `None` if Consul is not configured.
    pub(super) consul: Option<Arc<ConsulNames>>,
    pub(super) consul_config: Option<ConsulConfig>,
    /// Routes of non-local names.
    pub(super) upstreams: Upstreams,
    pub(super) listeners: Listeners,
    /// Wanted listen addresses, including unavailable ones.
    pub(super) wanted: Vec<SocketAddr>,
    /// Registry of the self-checks' connections.
    pub(super) own: OwnConnections,
    pub(super) server_metrics: ServerMetrics,
    /// `None` if health checks are off.
    pub(super) health: Option<Arc<HealthService>>,
    pub(super) fast_path: Lifecycle,
    pub(super) readiness: Readiness,
    pub(super) check_log: CheckLog,
    /// Reload requests from the API.
    pub(super) reload_orders: mpsc::Receiver<oneshot::Sender<Reloaded>>,
}

/// A read of config.json, which may hang.
pub(super) type ConfigReading = JoinHandle<Result<WholeConfig, ConfigErrors>>;

impl Daemon<'_> {
    /// Serves until SIGTERM or SIGINT, or until a component fails.
    pub(super) async fn run(
        &mut self,
        signals: &mut Signals,
        failures: &mut Failures,
    ) -> anyhow::Result<()> {
        let mut upchecks =
            time::interval_at(time::Instant::now() + UPCHECK_INTERVAL, UPCHECK_INTERVAL);
        // After a suspend the missed checks would otherwise run in a row and count as many failed
        // rounds.
        upchecks.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        let mut unanswered = Unanswered::default();
        let mut surplus = memory::Surplus::default();
        // Heartbeats come from this loop rather than a separate task, because interfaces may answer
        // only while the loop that updates their answers is running.
        let mut heartbeats = time::interval(self.fast_path.heartbeat_interval());
        heartbeats.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        let mut reports = time::interval(REPORT_INTERVAL);
        // The attacher measures probes by the pace of the reports.
        reports.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = reports.tick() => self.fast_path.report(&self.listeners.options.arrivals),
                () = self.listeners.options.arrivals.evidence(), if self.fast_path.awaits_evidence => {
                    self.fast_path.report_evidence(&self.listeners.options.arrivals);
                }
                _ = heartbeats.tick() => {
                    self.fast_path.heartbeat();
                    self.service_status.change(|state| state.last_turn = Some(Instant::now()));
                    // From the loop itself: a task of its own would keep the service alive while
                    // this loop hangs.
                    service_manager::notify(NotifyState::Watchdog, "Alive");
                }
                () = self.watch.next() => self.reload_files(Reading::IfChanged).await,
                request = signals.next() => match request {
                    SignalRequest::End(name) => {
                        info!("{name}: stopping");
                        return Ok(());
                    }
                    SignalRequest::Reload => drop(self.reload("SIGHUP").await),
                },
                Some(done) = self.reload_orders.recv() => {
                    // The requester may have disconnected.
                    let _ = done.send(self.reload("API").await);
                }
                event = self.fast_path.next() => self.fast_path.follow(event),
                failure = failures.next() => return Err(failure.into()),
                _ = upchecks.tick() => {
                    // A server that ends without being told has panicked, and its address would
                    // stay silent.
                    if let Some(address) = self.listeners.ended() {
                        let part = format!("the server on {address}");
                        return Err(Failure { part, problem: "it ended".to_owned() }.into());
                    }
                    self.listen_again().await;
                    self.run_upchecks(&mut unanswered).await?;
                    self.check_log.log(&self.readiness.checks(), Instant::now());
                    if self.listeners.options.waiting.status().waiting <= MAX_AT_REST {
                        surplus.give_back();
                    }
                }
            }
        }
    }

    /// Runs one round of self-checks. Fails after [`MAX_UPCHECK_FAILURES`] rounds in a row in
    /// which neither a self-check nor a client got an answer. If only some of several addresses are
    /// silent, that is only reported, because a restart would interrupt the working ones.
    async fn run_upchecks(&self, unanswered: &mut Unanswered) -> anyhow::Result<()> {
        // Made for each round: addresses files and reloads change its inputs.
        let upcheck = Upcheck::new(
            &self.service_status.state().listen,
            &self.config.upcheck_domains,
            self.config.internal_upcheck.as_ref(),
            self.own.clone(),
        );
        let Findings {
            answered,
            mut problems,
        } = upcheck.once().await;
        let replies = self.replies();
        // `replies` includes the answers to self-checks.
        // A firewall or a missing loopback may stop the self-checks while clients are served well;
        // a restart would only harm them.
        let others_answered = replies.saturating_sub(unanswered.replies) > answered as u64;
        unanswered.replies = replies;
        let listen_problems = self.listeners.problems().map(str::to_owned);
        let silent: Vec<String> = listen_problems
            .chain(problems.iter().map(ToString::to_string))
            .collect();
        let hung = answered == 0 && !problems.is_empty() && !others_answered;
        if silent != unanswered.silent {
            if silent.is_empty() {
                info!("up-checks succeed again on every address");
            } else {
                warn!("up-checks fail on some addresses: {}", silent.join("; "));
            }
            unanswered.silent.clone_from(&silent);
        }
        self.service_status.change(|state| {
            state.upcheck_error = hung.then(|| silent.join("; "));
            state.silent_addresses = silent;
        });
        unanswered.rounds = if hung { unanswered.rounds + 1 } else { 0 };
        let rounds = unanswered.rounds;
        if let Some(problem) = problems.pop().filter(|_| hung) {
            if rounds >= MAX_UPCHECK_FAILURES {
                bail!("the server no longer answers its own up-checks: {problem}");
            }
            error!(
                "every up-check failed, and no client got an answer (round {rounds} of \
                 {MAX_UPCHECK_FAILURES} before the process exits to be restarted): {problem}"
            );
        }
        Ok(())
    }

    fn replies(&self) -> u64 {
        self.server_metrics.replies() + self.fast_path.replies()
    }

    /// Retries the addresses that were unavailable.
    async fn listen_again(&mut self) {
        // Each time, because a wildcard's addresses change with the interfaces, and none may be
        // asked as a recursor.
        self.upstreams.listens_on(&self.wanted);
        if self.listeners.problems().next().is_some() {
            self.listen_on(self.wanted.clone()).await;
        }
    }

    async fn reload_files(&mut self, reading: Reading) {
        // At once: other files rarely change, and on one CPU looking at them takes its time.
        if let Some(snapshot) = self.files.reload_catalog(reading).await {
            self.upstreams
                .follow(Some(Arc::new(snapshot)), None, &self.config);
        }
        let FileChanges {
            handlers,
            addresses,
            consul,
        } = self.files.reload_others(reading).await;
        if let (Some(names), Some(zone)) = (&self.consul, consul) {
            names.install(zone);
            self.server_state.consul_changed();
        }
        let has_handlers = handlers.is_some();
        self.upstreams.follow(None, handlers, &self.config);
        if has_handlers || reading == Reading::Always {
            // A new handler may have taken over names that the interfaces still answer.
            if !self.fast_path.flushed(PUBLISHING_TIMEOUT).await {
                warn!(
                    "interfaces have not taken over the new files within {PUBLISHING_TIMEOUT:?}: they answer as before \
                     until the publisher has written all names"
                );
            }
        }
        if let Some(addresses) = addresses {
            self.listen_on(all_addresses(self.config.listen, &addresses))
                .await;
        }
        // A pattern may match new folders now, and a link may lead elsewhere.
        if let Some(folders) = self.files.folders() {
            self.watch.set(folders);
        }
    }

    /// Listens on all of these addresses that are available.
    async fn listen_on(&mut self, wanted: Vec<SocketAddr>) {
        self.upstreams.listens_on(&wanted);
        let served = self.listeners.set(&wanted).await;
        self.wanted = wanted;
        if served == self.service_status.state().listen {
            return;
        }
        self.fast_path.set_endpoints(&served);
        let notes = settings::notes(&self.config, &served);
        self.service_status.change(|state| {
            state.listen = served;
            state.notes = notes;
        });
    }

    async fn reload(&mut self, why: &str) -> Reloaded {
        info!("{why}: reloading the configuration and all files");
        match read_config(self.path, &mut self.reading).await {
            Ok((loaded, consul)) => {
                let stays = needs_restart_of_consul(self.consul_config.as_ref(), consul.as_ref());
                self.reconfigure(loaded, stays);
                self.reconfigure_consul(consul.filter(|_| stays.is_none()))
                    .await;
            }
            Err(problems) => {
                error!("{problems}; the current configuration stays in use");
                self.service_status
                    .refused(Kind::Config, vec![self.path.to_owned()], &problems.0);
            }
        }
        // Also after a refused configuration: its error must not keep new records away.
        self.reload_files(Reading::Always).await;
        let reloaded = self.service_status.reloaded();
        match reloaded.failed.as_slice() {
            [] => info!("{why}: reload finished"),
            failed => warn!(
                "{why}: reload finished with {} failures; the last good version of each stays in use: {}",
                failed.len(),
                failed.join("; ")
            ),
        }
        reloaded
    }

    /// Applies another object `"consul"` and the changes it makes to the files and upstreams.
    async fn reconfigure_consul(&mut self, wanted: Option<ConsulConfig>) {
        let (Some(names), Some(wanted)) = (&self.consul, wanted) else {
            return;
        };
        if self.consul_config.as_ref() != Some(&wanted)
            && let Some(zone) = self.files.reconfigure_consul(wanted.clone()).await
        {
            names.install(zone);
        }
        self.upstreams.reconfigure_consul(&wanted, &self.config);
        self.consul_config = Some(wanted);
    }

    /// Applies the settings that can change at runtime. `stays_of_consul`: why the object `"consul"` in use stays.
    fn reconfigure(&mut self, loaded: Loaded, stays_of_consul: Option<&'static str>) {
        let begun = Instant::now();
        let Loaded {
            config,
            mut warnings,
        } = loaded;
        let (config, mut kept) = settings::merge(&self.config, config);
        // The maps were made without room for answers; only userspace can cache them now.
        if self.fast_path.lacks_cache(&config) {
            kept.push("cache.enabled for interfaces");
        }
        if !kept.is_empty() {
            warnings.push(format!(
                "changed, but takes effect only after a restart: {}",
                kept.join(", ")
            ));
        }
        if let Some(why) = stays_of_consul {
            warnings.push(why.to_owned());
            kept.push("consul");
        }
        for warning in &warnings {
            warn!("{warning}");
        }
        self.service_status
            .change(|state| state.pending_restart = kept);
        self.logs.apply(&config.logging);
        self.upstreams.reconfigure(&self.config, &config);
        // The caller reads all files next.
        self.files.follow(Sources::of(&config));
        self.config = config;
        self.service_status.loaded(
            Kind::Config,
            vec![self.path.to_owned()],
            warnings,
            begun.elapsed(),
            "read",
        );
    }

    pub(super) async fn stop(self) {
        let Self {
            listeners,
            health,
            fast_path,
            ..
        } = self;
        // Detach first, so that queries no longer answered by interfaces find the sockets open.
        fast_path.stop().await;
        listeners.stop().await;
        // After the last reply, which is logged as well.
        let _ = spawn_blocking(dns_dnstap::finish).await;
        if let Some(health) = health {
            // Joins a thread, so it must not run on a runtime thread.
            let _ = spawn_blocking(move || health.stop()).await;
        }
        info!("stopped");
    }
}

/// State of the failed self-checks.
#[derive(Default)]
struct Unanswered {
    /// Consecutive rounds without an answer to any client or self-check.
    rounds: u32,
    /// Reply count at the last round.
    replies: u64,
    /// Failures of the last round.
    silent: Vec<String>,
}

/// Reads config.json on a blocking thread, for at most [`CONFIG_TIMEOUT`]. `last` is the read of an earlier call.
async fn read_config(
    path: &Path,
    last: &mut Option<ConfigReading>,
) -> Result<WholeConfig, ConfigErrors> {
    let file = path.display().to_string();
    let failed = |problem: String| ConfigErrors::from(ConfigError::of_file(file, problem));
    // A read that hangs cannot be cancelled: each would take one of the threads that other files need.
    let hangs = last.as_ref().is_some_and(|reading| !reading.is_finished());
    if !hangs {
        let path = path.to_owned();
        // What an overdue read has found in the end may be outdated by now.
        let reading = last.insert(spawn_blocking(move || settings::load_config(&path)));
        match time::timeout(CONFIG_TIMEOUT, reading).await {
            Ok(Ok(result)) => return result,
            // The panic has been logged with its location.
            Ok(Err(panic)) => return Err(failed(panic.to_string())),
            Err(_) => {}
        }
    }
    Err(failed(format!(
        "the file system did not respond within {} s",
        CONFIG_TIMEOUT.as_secs()
    )))
}

/// Describes a change of the object `"consul"` that needs a restart.
fn needs_restart_of_consul(
    old: Option<&ConsulConfig>,
    new: Option<&ConsulConfig>,
) -> Option<&'static str> {
    match (old, new) {
        (None, None) => None,
        (Some(old), Some(new)) => {
            let datacenter = |config: &ConsulConfig| {
                // A default is replaced by the agent's datacenter, so two defaults are equal.
                (!config.datacenter_is_default).then(|| config.datacenter.clone())
            };
            let is_live = old.http.is_some() && new.http.is_some();
            (is_live && datacenter(old) != datacenter(new)).then_some(
                "consul.datacenter changed, which takes effect only after a restart because the live source \
                 is in use: the current object \"consul\" stays in use",
            )
        }
        (None, Some(_)) => {
            Some("the object \"consul\" was added: it takes effect only after a restart")
        }
        (Some(_), None) => Some(
            "the object \"consul\" was removed, which takes effect only after a restart: the current one \
             stays in use",
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::{future::pending, io::Write as _};

    use super::*;

    #[tokio::test]
    async fn hung_configuration_takes_one_thread() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut last = Some(tokio::spawn(pending()));
        let hanging = last.as_ref().map(JoinHandle::id);
        for _ in 0..3 {
            let error = read_config(file.path(), &mut last).await.unwrap_err();
            assert!(error.to_string().contains("did not respond"), "{error}");
            assert_eq!(last.as_ref().map(JoinHandle::id), hanging);
        }
        // An overdue read that ends says nothing about the file as it is now.
        let overdue = tokio::spawn(async { Err(ConfigErrors(Vec::new())) });
        while !overdue.is_finished() {
            tokio::task::yield_now().await;
        }
        last = Some(overdue);
        file.write_all(br#"{"port": 53}"#).unwrap();
        let (loaded, _) = read_config(file.path(), &mut last).await.unwrap();
        assert_eq!(loaded.config.listen.port(), 53);
    }
}
