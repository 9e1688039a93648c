//! The start, in order: files, sockets, up-check, and only then the fast path and
//! what operators touch, which must never keep DNS from starting.

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
    backend::{self, Backend, Control, Views},
    failures::Failures,
    fast_path::{self, Slot},
    files::{Files, First},
    listeners::{self, Listeners, all_addresses},
    serve::Daemon,
    sources::Sources,
    status::Board,
    upcheck::Upcheck,
    upstreams::Upstreams,
    watch::Watch,
    wellness::Wellness,
};
use crate::{
    consul::{ConsulFamilies, ConsulNames, follow},
    fleet::{Fleet, Publish, Track},
    ops::{
        journal::{Journal, Kind},
        metrics::{Metrics, WholeMetrics, certificates::show as show_certificates, http::MetricsServer},
    },
    server::{Identity, OwnConnections, ServerMetrics},
};
use dns_core::{
    config::{Config, Loaded},
    resolve::{AllRunning, Health},
};
use dns_health::HealthService;
use dns_platform::{logs::Logs, metrics::labels};

/// Reads the files, opens the sockets, waits until the server answers itself, and
/// opens what operators touch.
pub(super) async fn start<'a>(
    path: &'a Path,
    loaded: Loaded,
    control: Option<Control>,
    logs: &'a Logs,
    failures: &Failures,
) -> Result<Daemon<'a>, DaemonError> {
    let begun = Instant::now();
    let Loaded { config, warnings } = loaded;
    for warning in &warnings {
        warn!("{warning}");
    }
    let whole = WholeMetrics::new()?;
    let metrics = Metrics::new(labels::server_label(config.listen))?;
    whole.register(metrics.registry())?;
    failures.register(metrics.registry())?;
    let board = Board::new(Journal::new(whole));
    board.loaded(Kind::Config, vec![path.to_owned()], warnings, begun.elapsed(), "read");
    let (consul_config, odd) = crate::consul::load_config(path)?.unzip();
    for warning in odd.iter().flatten() {
        warn!("{warning}");
    }
    let (files, First { snapshot, handlers, addresses, consul }) =
        Files::start(Sources::of(&config), consul_config.clone(), &board)?;
    let consul = consul.map(|zone| Arc::new(ConsulNames::new(zone)));
    let mut watch = Watch::new();
    watch.set(files.folders());
    let listen = all_addresses(config.listen, &addresses);

    let health =
        match config.health.enabled.then(|| HealthService::new(&config.health, config.request_timeout)) {
            None => None,
            Some(Ok(health)) => Some(Arc::new(health)),
            // The reference's way.
            Some(Err(problem)) if config.compat.require_health_certificates => {
                return Err(problem.into());
            }
            // DNS without health checks is better than none.
            Some(Err(problem)) => {
                board.stays_off(format!(
                    "{problem}; health checks stay off: all instances count as running until the server is \
                 started again with usable certificates"
                ));
                None
            }
        };
    let states: Arc<dyn Health + Send + Sync> = match &health {
        Some(health) => health.states(),
        None => Arc::new(AllRunning),
    };
    let tracker = health.as_ref().map(|health| -> Arc<dyn Track> { health.tracker() });
    let slot = Slot::default();
    let fleet = Arc::new(Fleet::new(snapshot, states.clone(), Arc::new(slot.clone()), tracker));
    if let Some(names) = &consul {
        slot.publish_consul(names.clone());
        let learned = slot.clone();
        names.learn_by(move |name| learned.learn(name.into()));
    }
    let upstreams = Upstreams::new(
        fleet.clone(),
        &config,
        &listen,
        handlers,
        consul.clone().zip(consul_config.clone()),
        metrics.registry().clone(),
        metrics.server().to_owned(),
    )?;
    if let Some(health) = &health {
        health.metrics().register(metrics.registry())?;
        let fleet = fleet.clone();
        health.start(Arc::new(move |instances| fleet.health_changed(instances)), Arc::new(slot.clone()))?;
    }

    if let Some((names, catalogs)) = consul.clone().zip(files.consul_catalogs()) {
        metrics.registry().register(Box::new(ConsulFamilies::new(names.clone())?))?;
        let (told, of) = (slot.clone(), fleet.clone());
        let installed = move || told.consul_changed(&of);
        failures.spawn("the live source of Consul's names", follow(names, catalogs, installed));
    }
    let server_metrics = ServerMetrics::new(metrics.server().to_owned())?;
    server_metrics.register(metrics.registry())?;
    let identity = Arc::new(Identity::of_this_host(config.identity));
    let own = OwnConnections::default();
    let options = listeners::options(&config, listen.len(), own.clone());
    let mut listeners = Listeners::new(fleet.clone(), identity, server_metrics.clone(), options);
    let wanted = listen;
    let (listen, upcheck) = come_up(&config, &wanted, &mut listeners, &own).await?;
    let loading = fast_path::load(&config.xdp, &listen, states.clone(), health.as_deref(), &board);
    board.change(|state| {
        state.listen.clone_from(&listen);
        state.notes.extend(config.unbounded_replies(&listen));
    });
    let listed: Vec<String> = listen.iter().map(ToString::to_string).collect();
    info!("up: serving on {}", listed.join(", "));

    let wellness = Wellness { board: board.clone(), slot: slot.clone(), health: health.clone() };
    expose(&config, &metrics, &wellness, logs, failures).await;
    let (reloads, reload_orders) = mpsc::channel(4);
    let mut certificates: Vec<_> = health.iter().map(|health| health.tls().clone()).collect();
    let api_tls = config.api.as_ref().and_then(|api| backend::certificates(api, &board));
    certificates.extend(api_tls.clone());
    show_certificates(&metrics, certificates.clone())?;
    let api = config.api.as_ref().zip(api_tls);
    if api.is_some() || control.is_some() {
        let backend = Backend {
            board: board.clone(),
            wellness,
            logs: logs.clone(),
            metrics: metrics.clone(),
            fleet: fleet.clone(),
            health: states,
            checks: health.clone(),
            jobs_dir: jobs_dir(&config, &board),
            certificates,
            reloads,
            views: views(&upstreams, slot.clone(), consul.clone()),
        };
        let backend = Arc::new(backend);
        if let Some(control) = control {
            backend::open_control(control, backend.clone(), failures);
        }
        if let Some((api, tls)) = api {
            backend::open(api, tls, backend, failures).await;
        }
    }
    Ok(Daemon {
        path,
        config: Arc::new(config),
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
        health_silent: 0,
        slot,
        loading,
        not_loaded_because: None,
        fast_path: None,
        retiring: None,
        tap: None,
        metrics,
        reload_orders,
    })
}

/// Binds the sockets and waits until the server answers itself, both within `timeout`.
/// Gives the addresses that are served and what the server asks itself there.
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
async fn expose(config: &Config, metrics: &Metrics, wellness: &Wellness, logs: &Logs, failures: &Failures) {
    if !config.metrics.enabled {
        return;
    }
    let board = &wellness.board;
    let (journal, logs) = (board.journal().clone(), logs.clone());
    metrics.before_exposition(move || journal.metrics().refresh(&journal, Some(&logs)));
    let probe = Arc::new(wellness.clone());
    match MetricsServer::bind(config.metrics.listen, metrics.clone(), probe).await {
        Ok(server) => failures.spawn("the metrics port", server.run(future::pending())),
        Err(problem) => {
            let listen = config.metrics.listen;
            board.stays_off(format!("metrics: cannot listen on {listen}: {problem}; metrics stay off"));
        }
    }
}

/// The folder of the jobs, if it is there.
fn jobs_dir(config: &Config, board: &Board) -> Option<PathBuf> {
    match &config.jobs_dir {
        Some(folder) if folder.is_dir() => return Some(folder.clone()),
        Some(folder) => {
            let folder = folder.display();
            board.stays_off(format!("jobs_dir: {folder}: no such folder; /local-groups stays empty"));
        }
        // Where there are jobs, there is an API.
        None if config.api.is_none() => {}
        None => board.stays_off("jobs_dir is missing; /local-groups stays empty".to_owned()),
    }
    None
}

/// What the rooms tell of themselves.
fn views(upstreams: &Upstreams, slot: Slot, consul: Option<Arc<ConsulNames>>) -> Views {
    let (recursors, flush, cache) =
        (upstreams.current.clone(), upstreams.current.clone(), upstreams.current.clone());
    let published = slot.clone();
    Views {
        fast_path: Box::new(move || slot.view()),
        explain_consul: {
            let consul = consul.clone();
            Box::new(move |name| consul.as_ref()?.zone().explain(name))
        },
        consul: Box::new(move || consul.as_ref().map(|names| names.view()).unwrap_or_default()),
        is_published: Box::new(move |name| published.is_published(name)),
        recursors: Box::new(move || {
            let upstream = recursors.upstream.load().status();
            let all = upstream.into_iter().chain(recursors.handlers.load().status());
            all.filter_map(|status| serde_json::to_value(status).ok()).collect()
        }),
        cache: Box::new(move || {
            let status = cache.upstream.load().cache_status();
            serde_json::to_value(status).unwrap_or_default()
        }),
        flush: Box::new(move || {
            let upstream = flush.upstream.load();
            let before = upstream.cache_status().map(|status| status.entries);
            upstream.flush_cache();
            flush.handlers.load().flush_cache();
            before
        }),
    }
}
