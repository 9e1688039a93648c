//! Startup: first files, sockets and up-check, then the fast path and the operator's ports, which
//! must never keep DNS from starting.

use std::{
    future,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use anyhow::{Context as _, anyhow};
use tokio::{sync::mpsc, time};
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
        api::Backend,
        conditions::events::{CountedEvent, RecentEvents},
        metrics::{self, Metrics, MetricsServer},
        readiness::{CheckLog, Readiness},
        service_status::{Kind, Part, ServiceStatus},
        status::OverloadSource,
        tap::Tap,
        version::VERSION,
    },
    server::{Identity, OwnConnections, ServerMetrics},
    state::ServerState,
};
use dns_common::counters::Outcome;
use dns_core::{
    config::{Config, Loaded, all_addresses},
    resolve::{AllRunning, Health},
};
use dns_fastpath::FastPathHandle;
use dns_health::HealthService;
use dns_kit::{files::watch::Watch, logs::Logs, metrics::labels, privileges};
use dns_upstream::CurrentUpstreams;

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
    let handle = FastPathHandle::default();
    let tap = Tap::default();
    let metrics = Metrics::new(labels::server_label(config.listen), handle.clone())?;
    failures.register(metrics.registry())?;
    let service_status = ServiceStatus::default();
    failures.spawn(
        "the detection of standstills",
        dns_kit::clock::watch_standstills(),
    );
    // Only now: the log's format and level come from the configuration.
    for warning in &warnings {
        warn!("{warning}");
    }
    service_status.loaded(
        Kind::Config,
        vec![path.to_owned()],
        warnings,
        begun.elapsed(),
        "read",
    );

    start_dnstap(&config, &tap, &metrics, &service_status)?;
    tap.expose_top_names(config.metrics.top_names, metrics.registry())?;
    let (
        files,
        InitialFiles {
            snapshot,
            handlers,
            addresses,
            consul,
        },
    ) = Files::start(Sources::of(&config), consul_config.clone(), &service_status)?;
    let mut watch = Watch::new();
    // After the first read, which tells the folders of links and patterns. A change in between is
    // found by the stamps.
    watch.set(files.folders());
    files.rely_on(watch.writes());
    let listen = all_addresses(config.listen, &addresses);

    let health = health_checks(&config, &handle, &metrics, &service_status)?;
    let states: Arc<dyn Health + Send + Sync> = match &health {
        Some(health) => health.states(),
        None => Arc::new(AllRunning),
    };
    let consul = consul.map(|zone| Arc::new(ConsulNames::new(zone, handle.clone())));
    let tracker = health.as_ref().map(|health| health.tracker());
    let server_state = Arc::new(ServerState::new(
        snapshot,
        states,
        handle.clone(),
        tracker,
        consul.clone(),
    ));
    let consul_and_config = consul.clone().zip(consul_config.clone());
    let upstreams = Upstreams::new(
        server_state.clone(),
        &config,
        &listen,
        handlers,
        consul_and_config,
        &metrics,
    )?;
    if let Some(health) = &health {
        health.start()?;
    }
    follow_consul(
        consul.clone(),
        &files,
        &server_state,
        &upstreams.in_force,
        &metrics,
        failures,
    )?;

    let server_metrics = ServerMetrics::new(metrics.server().to_owned());
    server_metrics.register(metrics.registry())?;
    let identity = Arc::new(Identity::of_this_host(config.identity));
    let own = OwnConnections::default();
    let options = listeners::options(&config, own.clone(), tap.clone());
    let overload = OverloadSource {
        waiting: options.waiting.clone(),
        upstreams: upstreams.in_force.clone(),
        fast_path: handle.clone(),
    };
    overload.clone().register(metrics.registry())?;
    let mut listeners = Listeners::new(
        server_state.clone(),
        identity,
        server_metrics.clone(),
        options,
    );
    let wanted = listen;
    // Before the sockets are bound: from then on a client could get two different answers.
    fast_path::end_earlier_programs(&config.xdp, &wanted).await;
    let listen = come_up(&config, &wanted, &mut listeners, &own).await?;
    service_status.change(|state| {
        state.listen.clone_from(&listen);
        state.notes = notes(&config, &listen);
    });
    let mut fast_path = Lifecycle::new(
        &config,
        attacher,
        server_state.clone(),
        health.clone(),
        service_status.clone(),
        tap.clone(),
    );
    // Only after the sockets serve: DNS must never wait for the verifier.
    fast_path.load();
    if let Some(requested) = handle.renewals() {
        failures.spawn(
            "the renewal of answers that interfaces use",
            fast_path::follow_renewals(server_state.clone(), requested),
        );
    }
    if let Some(remark) = privileges::remaining_root() {
        info!("{remark}");
    }
    let listed: Vec<String> = listen.iter().map(ToString::to_string).collect();
    info!("up: serving on {}", listed.join(", "));

    let api_tls = config
        .api
        .as_ref()
        .and_then(|config| listeners::api_certificates(config, &service_status));
    let health_tls = health.iter().map(|health| health.tls().clone());
    let certificates: Vec<_> = health_tls.chain(api_tls.clone()).collect();
    metrics::register_certificates(metrics.registry(), certificates.clone())?;
    let events = recent_events(failures, &server_metrics, logs, &handle);
    let readiness = Readiness {
        events: Arc::new(events),
        service_status: service_status.clone(),
        fast_path: handle,
        health: health.clone(),
        consul: consul.clone(),
        upstreams: upstreams.in_force.clone(),
        certificates,
    };
    metrics::register_server(metrics.registry(), logs.clone(), readiness.clone())?;
    expose(&config, &metrics, &readiness, failures).await;
    // Bounded, since each reload reads everything again.
    let (reloads, reload_orders) = mpsc::channel(4);
    let port = config.api.as_ref().zip(api_tls);
    if port.is_some() || control.is_some() {
        let backend = Arc::new(Backend {
            readiness: readiness.clone(),
            logs: Some(logs.clone()),
            metrics,
            server_state: server_state.clone(),
            jobs_dir: jobs_dir(&config, &service_status),
            reloads,
            overload,
            tap,
        });
        if let Some(control) = control {
            listeners::open_control(control, backend.clone(), failures);
        }
        if let Some((config, tls)) = port {
            listeners::open_api(config, tls, backend, failures).await;
        }
    }
    Ok(Daemon {
        path,
        config,
        logs,
        service_status,
        files,
        watch,
        server_state,
        consul,
        consul_config,
        upstreams,
        listeners,
        wanted,
        own,
        server_metrics,
        health,
        fast_path,
        readiness,
        check_log: CheckLog::default(),
        reload_orders,
    })
}

/// Follows the counters of events that an operator must know about.
fn recent_events(
    failures: &Failures,
    server_metrics: &ServerMetrics,
    logs: &Logs,
    fast_path: &FastPathHandle,
) -> RecentEvents {
    let panics = failures.panics();
    let server_metrics = server_metrics.clone();
    let logs = logs.clone();
    let fast_path = fast_path.clone();
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
    fast_path: &FastPathHandle,
    metrics: &Metrics,
    service_status: &ServiceStatus,
) -> anyhow::Result<Option<Arc<HealthService>>> {
    if !config.health.enabled {
        return Ok(None);
    }
    match HealthService::new(&config.health, config.request_timeout, fast_path.clone()) {
        Ok(health) => {
            health.metrics().register(metrics.registry())?;
            Ok(Some(Arc::new(health)))
        }
        // bosh-dns refuses to start as well.
        Err(problem) if config.compat.require_health_certificates => Err(problem),
        // Serving DNS without health checks is better than not serving.
        Err(problem) => {
            service_status.stays_off(
                Part::HealthChecks,
                format!("{problem}; health checks stay off"),
            );
            Ok(None)
        }
    }
}

/// Starts the log of queries and replies, if it is configured. Its output may appear later.
fn start_dnstap(
    config: &Config,
    tap: &Tap,
    metrics: &Metrics,
    service_status: &ServiceStatus,
) -> prometheus::Result<()> {
    let Some(config) = &config.dnstap else {
        return Ok(());
    };
    if let Err(problem) = dns_dnstap::start(config, &format!("bosh-dns-xdp {VERSION}")) {
        service_status.stays_off(
            Part::Dnstap,
            format!("dnstap: cannot start its thread: {problem}; dnstap stays off"),
        );
    }
    if let Some(dnstap) = dns_dnstap::get() {
        dnstap.register(metrics.registry())?;
        tap.sample_interfaces(dnstap.interface_sample());
    }
    Ok(())
}

fn follow_consul(
    consul: Option<Arc<ConsulNames>>,
    files: &Files,
    server_state: &Arc<ServerState>,
    upstreams: &Arc<CurrentUpstreams>,
    metrics: &Metrics,
    failures: &Failures,
) -> prometheus::Result<()> {
    if let Some((names, catalogs)) = consul.zip(files.consul_catalogs()) {
        consul::register_metrics(metrics.registry(), names.clone())?;
        let server_state = server_state.clone();
        let following = follow(names.clone(), catalogs, upstreams.clone(), move || {
            server_state.consul_changed()
        });
        failures.spawn("the live source of Consul's names", following);
        failures.spawn("the report of Consul's names in use", async move {
            loop {
                time::sleep(USE_INTERVAL).await;
                names.report_use();
            }
        });
    }
    Ok(())
}

/// Binds the sockets and waits until the up-check succeeds, both within `timeout`. Returns the
/// addresses served.
async fn come_up(
    config: &Config,
    wanted: &[SocketAddr],
    listeners: &mut Listeners,
    own: &OwnConnections,
) -> anyhow::Result<Vec<SocketAddr>> {
    let begun = Instant::now();
    let served = time::timeout(config.timeout, listeners.start(wanted))
        .await
        .with_context(|| {
            format!(
                "the sockets were not bound within `timeout` ({:?})",
                config.timeout
            )
        })??;
    let left = config.timeout.saturating_sub(begun.elapsed());
    let internal = config.internal_upcheck.as_ref();
    let upcheck = Upcheck::new(&served, &config.upcheck_domains, internal, own.clone());
    let silent =
        |error| anyhow!("the server does not answer its own up-checks within `timeout`: {error}");
    upcheck.until_up(left).await.map_err(silent)?;
    Ok(served)
}

async fn expose(config: &Config, metrics: &Metrics, readiness: &Readiness, failures: &Failures) {
    if !config.metrics.enabled {
        return;
    }
    let probe = Arc::new(readiness.clone());
    match MetricsServer::bind(config.metrics.listen, metrics.clone(), probe).await {
        Ok(server) => failures.spawn("the metrics port", server.run(future::pending())),
        Err(problem) => {
            let listen = config.metrics.listen;
            readiness.service_status.stays_off(
                Part::Metrics,
                format!("metrics: cannot listen on {listen}: {problem}; metrics stay off"),
            );
        }
    }
}

fn jobs_dir(config: &Config, service_status: &ServiceStatus) -> Option<PathBuf> {
    match &config.jobs_dir {
        Some(folder) if folder.is_dir() => return Some(folder.clone()),
        Some(folder) => {
            let folder = folder.display();
            service_status.stays_off(
                Part::LocalGroups,
                format!("jobs_dir: {folder}: no such folder; /local-groups stays empty"),
            );
        }
        // Intended, see `notes`.
        None => {}
    }
    None
}
