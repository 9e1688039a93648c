//! Startup in order: files, sockets and up-check, and only then the fast path and the operator's
//! ports, which must never keep DNS from starting.

use std::{
    future,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use tokio::{sync::mpsc, time};
use tracing::{info, warn};

use super::{
    DaemonError,
    api::{self, Control},
    failures::Failures,
    fast_path::Lifecycle,
    files::{Files, First},
    listeners::{self, Listeners, all_addresses},
    serve::Daemon,
    sources::Sources,
    upcheck::Upcheck,
    upstreams::Upstreams,
    watch::Watch,
};
use crate::ops::board::Board;
use crate::{
    consul::{ConsulFamilies, ConsulNames, follow},
    fleet::Fleet,
    ops::{
        api::Backend,
        journal::{Journal, Kind},
        metrics::{CertificateFamilies, Metrics, MomentFamilies, WholeMetrics, http::MetricsServer},
        probe::Wellness,
        tap::Tap,
    },
    server::{Identity, OwnConnections, ServerMetrics},
};
use dns_core::{
    config::{Config, Loaded},
    resolve::{AllRunning, Health},
};
use dns_fastpath::Slot;
use dns_health::HealthService;
use dns_platform::{logs::Logs, metrics::labels};

/// Interval at which the fast path reports the Consul names it answers; each report keeps a watch for
/// a minute.
const USE_INTERVAL: time::Duration = time::Duration::from_secs(10);

/// Reads the files, opens the sockets, waits until the up-check succeeds, and opens the operator's
/// ports.
pub(super) async fn start<'a>(
    path: &'a Path,
    loaded: Loaded,
    control: Option<Control>,
    logs: &'a Logs,
    failures: &Failures,
) -> Result<Daemon<'a>, DaemonError> {
    let begun = Instant::now();
    let Loaded { config, warnings } = loaded;
    let (slot, tap) = (Slot::default(), Tap::new());
    let metrics = Metrics::new(labels::server_label(config.listen), slot.clone())?;
    failures.register(metrics.registry())?;
    let board = board(&metrics, logs)?;
    let (consul_config, odd) = crate::consul::load_config(path)?.unzip();
    for warning in warnings.iter().chain(odd.iter().flatten()) {
        warn!("{warning}");
    }
    board.loaded(Kind::Config, vec![path.to_owned()], warnings, begun.elapsed(), "read");

    let (files, First { snapshot, handlers, addresses, consul }) =
        Files::start(Sources::of(&config), consul_config.clone(), &board)?;
    let mut watch = Watch::new();
    watch.set(files.folders());
    let listen = all_addresses(config.listen, &addresses);

    let health = health_checks(&config, &slot, &metrics, &board)?;
    let states: Arc<dyn Health + Send + Sync> = match &health {
        Some(health) => health.states(),
        None => Arc::new(AllRunning),
    };
    let consul = consul.map(|zone| Arc::new(ConsulNames::new(zone, slot.clone())));
    let tracker = health.as_ref().map(|health| health.tracker());
    let fleet = Arc::new(Fleet::new(snapshot, states.clone(), slot.clone(), tracker, consul.clone()));
    let consul_and_config = consul.clone().zip(consul_config.clone());
    let upstreams = Upstreams::new(fleet.clone(), &config, &listen, handlers, consul_and_config, &metrics)?;
    if let Some(health) = &health {
        health.start()?;
    }
    follow_consul(consul.clone(), &files, &fleet, &metrics, failures)?;

    let server_metrics = ServerMetrics::new(metrics.server().to_owned())?;
    server_metrics.register(metrics.registry())?;
    let identity = Arc::new(Identity::of_this_host(config.identity));
    let own = OwnConnections::default();
    let options = listeners::options(&config, listen.len(), own.clone(), tap.clone());
    let mut listeners = Listeners::new(fleet.clone(), identity, server_metrics.clone(), options);
    let wanted = listen;
    let (listen, upcheck) = come_up(&config, &wanted, &mut listeners, &own).await?;
    board.change(|state| {
        state.listen.clone_from(&listen);
        state.notes.extend(config.unbounded_replies(&listen));
    });
    let mut fast_path =
        Lifecycle::new(&config, fleet.clone(), states.clone(), health.clone(), board.clone(), tap.clone());
    fast_path.load();
    let listed: Vec<String> = listen.iter().map(ToString::to_string).collect();
    info!("up: serving on {}", listed.join(", "));

    let wellness = Wellness { board: board.clone(), slot, health: health.clone(), consul: consul.clone() };
    expose(&config, &metrics, &wellness, failures).await;
    let (reloads, reload_orders) = mpsc::channel(4);
    let api_tls = config.api.as_ref().and_then(|config| api::certificates(config, &board));
    let health_tls = health.iter().map(|health| health.tls().clone());
    let certificates: Vec<_> = health_tls.chain(api_tls.clone()).collect();
    metrics.registry().register(Box::new(CertificateFamilies::new(certificates.clone())?))?;
    let port = config.api.as_ref().zip(api_tls);
    if port.is_some() || control.is_some() {
        let backend = Arc::new(Backend {
            board: board.clone(),
            wellness,
            logs: Some(logs.clone()),
            metrics,
            fleet: fleet.clone(),
            health: states,
            checks: health.clone(),
            jobs_dir: jobs_dir(&config, &board),
            certificates,
            reloads,
            upstreams: upstreams.in_force.clone(),
            consul: consul.clone(),
            tap,
        });
        if let Some(control) = control {
            api::open_control(control, backend.clone(), failures);
        }
        if let Some((config, tls)) = port {
            api::open(config, tls, backend, failures).await;
        }
    }
    Ok(Daemon {
        path,
        config,
        logs,
        board,
        files,
        watch,
        fleet,
        consul,
        consul_config,
        upstreams,
        listeners,
        wanted,
        upcheck,
        own,
        server_metrics,
        health,
        fast_path,
        reload_orders,
    })
}

/// Creates the status board and the server-wide metrics.
fn board(metrics: &Metrics, logs: &Logs) -> Result<Board, DaemonError> {
    let whole = WholeMetrics::new()?;
    whole.register(metrics.registry())?;
    let journal = Journal::new(whole);
    metrics.registry().register(Box::new(MomentFamilies::new(journal.clone(), logs.clone())?))?;
    Ok(Board::new(journal))
}

/// Loads the health checks' certificates; `None` if the checks stay off.
fn health_checks(
    config: &Config,
    slot: &Slot,
    metrics: &Metrics,
    board: &Board,
) -> Result<Option<Arc<HealthService>>, DaemonError> {
    if !config.health.enabled {
        return Ok(None);
    }
    match HealthService::new(&config.health, config.request_timeout, slot.clone()) {
        Ok(health) => {
            health.metrics().register(metrics.registry())?;
            Ok(Some(Arc::new(health)))
        }
        // bosh-dns refuses to start too.
        Err(problem) if config.compat.require_health_certificates => Err(problem.into()),
        // Serving DNS without health checks is better than not serving.
        Err(problem) => {
            board.stays_off(format!(
                "{problem}; health checks stay off: all instances count as running until the server is started \
                 again with usable certificates"
            ));
            Ok(None)
        }
    }
}

/// Follows a live Consul, if Consul is configured.
fn follow_consul(
    consul: Option<Arc<ConsulNames>>,
    files: &Files,
    fleet: &Arc<Fleet>,
    metrics: &Metrics,
    failures: &Failures,
) -> Result<(), DaemonError> {
    if let Some((names, catalogs)) = consul.zip(files.consul_catalogs()) {
        metrics.registry().register(Box::new(ConsulFamilies::new(names.clone())?))?;
        let fleet = fleet.clone();
        let installed = move || fleet.consul_changed();
        failures.spawn("the live source of Consul's names", follow(names.clone(), catalogs, installed));
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
/// addresses served and the up-check for them.
async fn come_up(
    config: &Config,
    wanted: &[SocketAddr],
    listeners: &mut Listeners,
    own: &OwnConnections,
) -> Result<(Vec<SocketAddr>, Upcheck), DaemonError> {
    let begun = Instant::now();
    let served = time::timeout(config.timeout, listeners.start(wanted))
        .await
        .map_err(|_| DaemonError::BindTimeout(config.timeout))??;
    let left = config.timeout.saturating_sub(begun.elapsed());
    let internal = config.internal_upcheck.as_ref();
    let upcheck = Upcheck::new(&served, &config.upcheck_domains, internal, own.clone());
    upcheck.until_up(left).await.map_err(DaemonError::NotUp)?;
    Ok((served, upcheck))
}

/// Opens the metrics port.
async fn expose(config: &Config, metrics: &Metrics, wellness: &Wellness, failures: &Failures) {
    if !config.metrics.enabled {
        return;
    }
    let probe = Arc::new(wellness.clone());
    match MetricsServer::bind(config.metrics.listen, metrics.clone(), probe).await {
        Ok(server) => failures.spawn("the metrics port", server.run(future::pending())),
        Err(problem) => {
            let listen = config.metrics.listen;
            wellness
                .board
                .stays_off(format!("metrics: cannot listen on {listen}: {problem}; metrics stay off"));
        }
    }
}

/// Returns the jobs folder, if it exists.
fn jobs_dir(config: &Config, board: &Board) -> Option<PathBuf> {
    match &config.jobs_dir {
        Some(folder) if folder.is_dir() => return Some(folder.clone()),
        Some(folder) => {
            let folder = folder.display();
            board.stays_off(format!("jobs_dir: {folder}: no such folder; /local-groups stays empty"));
        }
        // A VM with BOSH jobs always configures the API.
        None if config.api.is_none() => {}
        None => board.stays_off("jobs_dir is missing; /local-groups stays empty".to_owned()),
    }
    None
}
