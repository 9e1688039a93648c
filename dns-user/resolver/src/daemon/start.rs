//! Startup: first files, sockets and up-check, then the fast path and the operator's ports, which
//! must never keep DNS from starting.

use std::{net::SocketAddr, path::Path, sync::Arc, time::Instant};

use anyhow::{Context as _, anyhow};
use tokio::{
    sync::{mpsc, oneshot},
    time,
};
use tracing::{info, warn};

use super::{
    event_loop::Daemon,
    failures::Failures,
    fast_path::{self, Lifecycle, OwnAttacher},
    files::{Files, InitialFiles},
    followed_file::Sources,
    listeners::{self, Control, Listeners},
    settings::{WholeConfig, notes},
    upcheck::Upcheck,
    upstreams::Upstreams,
};
use crate::{
    consul::{self, ConsulNames, follow},
    ops::{
        api::{Backend, LocalJobs},
        conditions::events::{CountedEvent, RecentEvents},
        metrics::{self, Metrics, MetricsServer},
        readiness::{CheckLog, Readiness},
        service_status::{Kind, Part, Reloaded, ServiceStatus},
        status::OverloadSource,
        tap::Tap,
        version::VERSION,
    },
    server::{Identity, OwnConnections, ServerMetrics},
    state::ServerState,
};
use dns_common::counters::Outcome;
use dns_consul::config::Config as ConsulConfig;
use dns_core::{
    config::{Config, Loaded, all_addresses},
    resolve::{AllRunning, Health},
};
use dns_fastpath::FastPathHandle;
use dns_health::HealthService;
use dns_kit::{files::watch::Watch, logs::Logs, metrics::labels, privileges, tls::RotatingTls};

/// Interval at which the Consul names answered by the fast path are reported; each report keeps a
/// watch for a minute.
const USE_INTERVAL: time::Duration = time::Duration::from_secs(10);

/// Reads the files, opens the sockets, waits until the up-check succeeds, and opens the operator's
/// ports.
pub(super) async fn start<'a>(
    path: &'a Path,
    (Loaded { config, warnings }, consul_config): WholeConfig,
    (control, attacher): (Option<Control>, Option<OwnAttacher>),
    logs: &'a Logs,
    failures: &Failures,
) -> anyhow::Result<Daemon<'a>> {
    let begun = Instant::now();
    let instruments = Instruments::new(&config, logs, failures)?;
    instruments.note_config(path, warnings, begun);
    instruments.observe_queries(&config)?;
    let service_status = instruments.service_status.clone();
    let (files, initial) =
        Files::start(Sources::of(&config), consul_config.clone(), &service_status)?;
    let watch = watch_files(&files);
    let wanted = all_addresses(config.listen, &initial.addresses);

    let answering = Answering::new(
        &config,
        consul_config.as_ref(),
        initial,
        &wanted,
        &instruments,
    )?;
    answering.follow_changes(&files, &instruments)?;
    let mut serving = Serving::new(&config, &answering, &instruments)?;
    // Before the sockets are bound: from then on a client could get two different answers.
    fast_path::end_earlier_programs(&config.xdp, &wanted).await;
    let listen = serving.come_up(&config, &wanted).await?;
    instruments.note_listening(&config, &listen);
    // Only after the sockets serve: DNS must never wait for the verifier.
    let fast_path = load_fast_path(&config, attacher, &answering, &instruments);
    announce(&listen);

    let operators = OperatorSide::new(&config, &answering, &serving, &instruments)?;
    operators.expose_metrics(&config).await;
    let readiness = operators.readiness.clone();
    let reload_orders = operators
        .open_api(&config, control, &answering, &serving)
        .await;
    Ok(Daemon {
        path,
        config,
        reading: None,
        logs,
        service_status,
        files,
        watch,
        server_state: answering.server_state,
        consul: answering.consul,
        consul_config,
        upstreams: answering.upstreams,
        listeners: serving.listeners,
        wanted,
        own: serving.own,
        server_metrics: serving.server_metrics,
        health: answering.health,
        fast_path,
        readiness,
        check_log: CheckLog::default(),
        reload_orders,
    })
}

/// Receivers of the reports from the parts of the server.
struct Instruments<'a> {
    /// Counts what interfaces answer; without any until the fast path is loaded.
    fast_path: FastPathHandle,
    tap: Tap,
    metrics: Metrics,
    service_status: ServiceStatus,
    logs: &'a Logs,
    failures: &'a Failures,
}

impl<'a> Instruments<'a> {
    fn new(config: &Config, logs: &'a Logs, failures: &'a Failures) -> anyhow::Result<Self> {
        let fast_path = FastPathHandle::default();
        let metrics = Metrics::new(labels::server_label(config.listen), fast_path.clone())?;
        failures.register(metrics.registry())?;
        failures.spawn(
            "the detection of standstills",
            dns_kit::clock::watch_standstills(),
        );
        Ok(Self {
            fast_path,
            tap: Tap::default(),
            metrics,
            service_status: ServiceStatus::default(),
            logs,
            failures,
        })
    }

    /// Reports the configuration, which was read before there were instruments.
    fn note_config(&self, path: &Path, warnings: Vec<String>, begun: Instant) {
        // Only now: the log's format and level come from the configuration.
        for warning in &warnings {
            warn!("{warning}");
        }
        self.service_status.loaded(
            Kind::Config,
            vec![path.to_owned()],
            warnings,
            begun.elapsed(),
            "read",
        );
    }

    fn note_listening(&self, config: &Config, listen: &[SocketAddr]) {
        self.service_status.change(|state| {
            state.listen = listen.to_vec();
            state.notes = notes(config, listen);
        });
    }

    /// Starts the log of queries and replies, if it is configured, and counts the names of queries.
    fn observe_queries(&self, config: &Config) -> prometheus::Result<()> {
        self.start_dnstap(config)?;
        self.tap
            .expose_top_names(config.metrics.top_names, self.metrics.registry())
    }

    /// Starts the log of queries and replies, if it is configured. Its output may appear later.
    fn start_dnstap(&self, config: &Config) -> prometheus::Result<()> {
        let Some(config) = &config.dnstap else {
            return Ok(());
        };
        if let Err(problem) = dns_dnstap::start(config, &format!("bosh-dns-xdp {VERSION}")) {
            self.service_status.stays_off(
                Part::Dnstap,
                format!("dnstap: cannot start its thread: {problem}; dnstap stays off"),
            );
        }
        if let Some(dnstap) = dns_dnstap::get() {
            dnstap.register(self.metrics.registry())?;
            self.tap.sample_interfaces(dnstap.interface_sample());
        }
        Ok(())
    }
}

/// Watches the folders of the files, which have been read.
fn watch_files(files: &Files) -> Watch {
    let mut watch = Watch::new();
    // After the first read, which tells the folders of links and patterns. A change in between is
    // found by the stamps.
    watch.set(files.folders().unwrap_or_default());
    files.rely_on(watch.writes());
    watch
}

/// Sources of the answers.
struct Answering {
    server_state: Arc<ServerState>,
    consul: Option<Arc<ConsulNames>>,
    upstreams: Upstreams,
    health: Option<Arc<HealthService>>,
}

impl Answering {
    /// Gathers what the answers of a server come from that listens on `wanted`.
    fn new(
        config: &Config,
        consul_config: Option<&ConsulConfig>,
        initial: InitialFiles,
        wanted: &[SocketAddr],
        instruments: &Instruments<'_>,
    ) -> anyhow::Result<Self> {
        let fast_path = &instruments.fast_path;
        let health = health_checks(config, instruments)?;
        let states: Arc<dyn Health + Send + Sync> = match &health {
            Some(health) => health.states(),
            None => Arc::new(AllRunning),
        };
        let consul = initial
            .consul
            .map(|zone| Arc::new(ConsulNames::new(zone, fast_path.clone())));
        let tracker = health.as_ref().map(|health| health.tracker());
        let server_state = Arc::new(ServerState::new(
            initial.snapshot,
            states,
            fast_path.clone(),
            tracker,
            consul.clone(),
        ));
        let upstreams = Upstreams::new(
            server_state.clone(),
            config,
            wanted,
            initial.handlers,
            consul.clone().zip(consul_config.cloned()),
            &instruments.metrics,
        )?;
        Ok(Self {
            server_state,
            consul,
            upstreams,
            health,
        })
    }

    /// Starts the health checks, and follows Consul's catalogs.
    fn follow_changes(&self, files: &Files, instruments: &Instruments<'_>) -> anyhow::Result<()> {
        if let Some(health) = &self.health {
            health.start()?;
        }
        let (Some(names), Some(catalogs)) = (self.consul.clone(), files.consul_catalogs()) else {
            return Ok(());
        };
        consul::register_metrics(instruments.metrics.registry(), names.clone())?;
        let server_state = self.server_state.clone();
        let upstreams = self.upstreams.in_force.clone();
        let following = follow(names.clone(), catalogs, upstreams, move || {
            server_state.consul_changed()
        });
        let failures = instruments.failures;
        failures.spawn("the live source of Consul's names", following);
        failures.spawn("the report of Consul's names in use", async move {
            loop {
                time::sleep(USE_INTERVAL).await;
                names.report_use();
            }
        });
        Ok(())
    }
}

/// The sockets that serve DNS, and what is known about them.
struct Serving {
    listeners: Listeners,
    own: OwnConnections,
    server_metrics: ServerMetrics,
    overload: OverloadSource,
}

impl Serving {
    fn new(
        config: &Config,
        answering: &Answering,
        instruments: &Instruments<'_>,
    ) -> prometheus::Result<Self> {
        let metrics = &instruments.metrics;
        let server_metrics = ServerMetrics::new(metrics.server().to_owned());
        server_metrics.register(metrics.registry())?;
        let identity = Arc::new(Identity::of_this_host(config.identity));
        let own = OwnConnections::default();
        let options = listeners::options(config, own.clone(), instruments.tap.clone());
        let overload = OverloadSource {
            waiting: options.waiting.clone(),
            upstreams: answering.upstreams.in_force.clone(),
            fast_path: instruments.fast_path.clone(),
        };
        overload.clone().register(metrics.registry())?;
        let listeners = Listeners::new(
            answering.server_state.clone(),
            identity,
            server_metrics.clone(),
            options,
        );
        Ok(Self {
            listeners,
            own,
            server_metrics,
            overload,
        })
    }

    /// Binds the sockets and waits until the up-check succeeds, both within `timeout`. Returns the
    /// addresses served.
    async fn come_up(
        &mut self,
        config: &Config,
        wanted: &[SocketAddr],
    ) -> anyhow::Result<Vec<SocketAddr>> {
        let begun = Instant::now();
        let served = time::timeout(config.timeout, self.listeners.start(wanted))
            .await
            .with_context(|| {
                format!(
                    "the sockets were not bound within `timeout` ({:?})",
                    config.timeout
                )
            })??;
        let left = config.timeout.saturating_sub(begun.elapsed());
        let internal = config.internal_upcheck.as_ref();
        let upcheck = Upcheck::new(&served, &config.upcheck_domains, internal, self.own.clone());
        let silent = |error| {
            anyhow!("the server does not answer its own up-checks within `timeout`: {error}")
        };
        upcheck.until_up(left).await.map_err(silent)?;
        Ok(served)
    }
}

/// Loads the fast path, which answers the renewals that interfaces ask for.
fn load_fast_path(
    config: &Config,
    attacher: Option<OwnAttacher>,
    answering: &Answering,
    instruments: &Instruments<'_>,
) -> Lifecycle {
    let server_state = &answering.server_state;
    let mut fast_path = Lifecycle::new(
        config,
        attacher,
        server_state.clone(),
        answering.health.clone(),
        instruments.service_status.clone(),
        instruments.tap.clone(),
    );
    fast_path.load();
    if let Some(requested) = instruments.fast_path.renewals() {
        instruments.failures.spawn(
            "the renewal of answers that interfaces use",
            fast_path::follow_renewals(server_state.clone(), requested),
        );
    }
    fast_path
}

/// Reports that the server serves, and with which rights.
fn announce(listen: &[SocketAddr]) {
    if let Some(remark) = privileges::remaining_root() {
        info!("{remark}");
    }
    let listed: Vec<String> = listen.iter().map(ToString::to_string).collect();
    info!("up: serving on {}", listed.join(", "));
}

/// The API for operators, and its certificate.
struct OperatorSide<'a> {
    readiness: Readiness,
    /// `None` without an API, or without a valid certificate for it.
    api_tls: Option<Arc<RotatingTls>>,
    instruments: &'a Instruments<'a>,
}

impl<'a> OperatorSide<'a> {
    fn new(
        config: &Config,
        answering: &Answering,
        serving: &Serving,
        instruments: &'a Instruments<'a>,
    ) -> prometheus::Result<Self> {
        let Instruments {
            metrics,
            service_status,
            ..
        } = instruments;
        let api_tls = config
            .api
            .as_ref()
            .and_then(|config| listeners::api_certificates(config, service_status));
        let health_tls = answering.health.iter().map(|health| health.tls().clone());
        let certificates: Vec<_> = health_tls.chain(api_tls.clone()).collect();
        metrics::register_certificates(metrics.registry(), certificates.clone())?;
        let events = recent_events(&serving.server_metrics, instruments);
        let readiness = Readiness {
            events: Arc::new(events),
            service_status: service_status.clone(),
            fast_path: instruments.fast_path.clone(),
            health: answering.health.clone(),
            consul: answering.consul.clone(),
            upstreams: answering.upstreams.in_force.clone(),
            certificates,
        };
        metrics::register_server(
            metrics.registry(),
            instruments.logs.clone(),
            readiness.clone(),
        )?;
        Ok(Self {
            readiness,
            api_tls,
            instruments,
        })
    }

    /// Opens the port of the metrics.
    async fn expose_metrics(&self, config: &Config) {
        if !config.metrics.enabled {
            return;
        }
        let Instruments {
            metrics, failures, ..
        } = self.instruments;
        let probe = Arc::new(self.readiness.clone());
        match MetricsServer::bind(config.metrics.listen, metrics.clone(), probe).await {
            Ok(server) => failures.spawn("the metrics port", server.run()),
            Err(problem) => {
                let listen = config.metrics.listen;
                self.readiness.service_status.stays_off(
                    Part::Metrics,
                    format!("metrics: cannot listen on {listen}: {problem}; metrics stay off"),
                );
            }
        }
    }

    /// Opens the control socket and the API's port. Returns the reloads that are ordered there.
    async fn open_api(
        self,
        config: &Config,
        control: Option<Control>,
        answering: &Answering,
        serving: &Serving,
    ) -> mpsc::Receiver<oneshot::Sender<Reloaded>> {
        let Instruments {
            tap,
            metrics,
            service_status,
            logs,
            failures,
            ..
        } = self.instruments;
        // Bounded, since each reload reads everything again.
        let (reloads, reload_orders) = mpsc::channel(4);
        let port = config.api.as_ref().zip(self.api_tls);
        if port.is_none() && control.is_none() {
            return reload_orders;
        }
        let folder = config.jobs_dir.clone();
        let jobs = folder.map(|folder| Arc::new(LocalJobs::new(folder, service_status.clone())));
        if let Some(jobs) = &jobs {
            failures.spawn("the look at jobs_dir", jobs.clone().watch());
        }
        let backend = Arc::new(Backend {
            readiness: self.readiness,
            logs: (*logs).clone(),
            metrics: metrics.clone(),
            server_state: answering.server_state.clone(),
            jobs,
            reloads,
            overload: serving.overload.clone(),
            tap: tap.clone(),
        });
        if let Some(control) = control {
            listeners::open_control(control, backend.clone(), failures);
        }
        if let Some((config, tls)) = port {
            listeners::open_api(config, tls, backend, failures).await;
        }
        reload_orders
    }
}

/// Follows the counters of events that an operator must know about.
fn recent_events(server_metrics: &ServerMetrics, instruments: &Instruments<'_>) -> RecentEvents {
    let panics = instruments.failures.panics();
    let server_metrics = server_metrics.clone();
    let logs = instruments.logs.clone();
    let fast_path = instruments.fast_path.clone();
    RecentEvents::of(vec![
        (CountedEvent::Panic, Box::new(move || panics.get())),
        (
            CountedEvent::RefusedConnection,
            Box::new(move || server_metrics.refused_connections()),
        ),
        (CountedEvent::LostLogLine, Box::new(move || logs.dropped())),
        (
            CountedEvent::ShedQuery,
            Box::new(move || fast_path.counters().outcome(Outcome::Shed)),
        ),
    ])
}

/// Loads the health checks' certificates; `None` if the checks stay off.
fn health_checks(
    config: &Config,
    instruments: &Instruments<'_>,
) -> anyhow::Result<Option<Arc<HealthService>>> {
    if !config.health.enabled {
        return Ok(None);
    }
    let fast_path = instruments.fast_path.clone();
    match HealthService::new(&config.health, config.request_timeout, fast_path) {
        Ok(health) => {
            let registry = instruments.metrics.registry();
            health.metrics().register(registry)?;
            Ok(Some(Arc::new(health)))
        }
        // bosh-dns refuses to start as well.
        Err(problem) if config.compat.require_health_certificates => Err(problem),
        // Serving DNS without health checks is better than not serving.
        Err(problem) => {
            instruments.service_status.stays_off(
                Part::HealthChecks,
                format!("{problem}; health checks stay off"),
            );
            Ok(None)
        }
    }
}
