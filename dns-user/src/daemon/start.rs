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
use tracing::{error, info, warn};

use super::{
    DaemonError,
    answers::Answers,
    backend::{self, Backend, Views},
    failures::Failures,
    fast_path::{self, Slot},
    files::{Files, First},
    listeners::{self, Listeners},
    serve::{Daemon, all_addresses},
    sources::Sources,
    status::Board,
    upcheck::Upcheck,
    watch::Watch,
    wellness::Wellness,
};
use crate::{
    config::{Config, Loaded},
    health::HealthService,
    ops::{
        identity::Identity,
        journal::{Journal, Kind},
        logs::Logs,
        metrics::{
            Metrics, WholeMetrics, certificates::show as show_certificates, http::MetricsServer, labels,
        },
    },
    resolve::{AllRunning, Health},
    server::{Local, Router, Routes, ServerMetrics, Track},
};

/// Reads the files, opens the sockets, waits until the server answers itself, and
/// opens what operators touch.
pub(super) async fn start<'a>(
    path: &'a Path,
    loaded: Loaded,
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
    let board = Board::new(Journal::new(whole));
    board.loaded(Kind::Config, vec![path.to_owned()], warnings, begun.elapsed(), "read");
    let (files, First { snapshot, handlers, addresses }) = Files::start(Sources::of(&config), &board)?;
    let mut watch = Watch::new();
    watch.set(files.folders());
    let listen = all_addresses(config.listen, &addresses);

    let health = match config.health.enabled {
        true => Some(Arc::new(HealthService::new(&config.health, config.request_timeout)?)),
        false => None,
    };
    let states: Arc<dyn Health + Send + Sync> = match &health {
        Some(health) => health.states(),
        None => Arc::new(AllRunning),
    };
    let tracker = health.as_ref().map(|health| -> Arc<dyn Track> { health.tracker() });
    let slot = Slot::default();
    let local = Arc::new(Local::new(snapshot, states.clone(), Arc::new(slot.clone()), tracker));
    let router = Arc::new(Router::new(local.clone(), Routes::default()));
    router.set_chaos(Arc::new(Identity::of_this_host(config.identity)));
    let answers = Answers::new(
        router.clone(),
        &config,
        &listen,
        handlers,
        metrics.registry().clone(),
        metrics.server().to_owned(),
    )?;
    if let Some(health) = &health {
        health.metrics().register(metrics.registry())?;
        let local = local.clone();
        health.start(Arc::new(move |instances| local.health_changed(instances)), Arc::new(slot.clone()))?;
    }

    let server_metrics = ServerMetrics::new(metrics.server().to_owned())?;
    server_metrics.register(metrics.registry())?;
    let mut listeners = Listeners::new(router, server_metrics, listeners::options(config.request_timeout));
    let upcheck = Upcheck::new(&listen, &config.upcheck_domains, config.internal_upcheck.as_ref());
    come_up(&config, &listen, &mut listeners, &upcheck).await?;
    let loading = fast_path::load(&config.xdp, &listen, states.clone(), health.as_deref(), &board);
    board.change(|state| state.listen.clone_from(&listen));
    let listed: Vec<String> = listen.iter().map(ToString::to_string).collect();
    info!("up: serving on {}", listed.join(", "));

    expose(&config, &metrics, &board, logs, failures).await;
    let (reloads, reload_orders) = mpsc::channel(4);
    let mut certificates: Vec<_> = health.iter().map(|health| health.tls().clone()).collect();
    let api_tls = config.api.as_ref().and_then(|api| backend::certificates(api, &board));
    certificates.extend(api_tls.clone());
    show_certificates(&metrics, certificates.clone())?;
    if let (Some(api), Some(tls)) = (&config.api, api_tls) {
        let backend = Backend {
            board: board.clone(),
            logs: logs.clone(),
            metrics: metrics.clone(),
            local: local.clone(),
            health: states,
            checks: health.clone(),
            jobs_dir: jobs_dir(&config, &board),
            certificates,
            reloads,
            views: views(&answers, slot.clone()),
        };
        backend::open(api.port, tls, backend, failures).await;
    }
    Ok(Daemon {
        path,
        config: Arc::new(config),
        logs,
        board,
        files,
        watch,
        local,
        answers,
        listeners,
        upcheck,
        health,
        slot,
        loading,
        fast_path: None,
        metrics,
        reload_orders,
    })
}

/// Binds the sockets and waits until the server answers itself, both within `timeout`.
async fn come_up(
    config: &Config,
    listen: &[SocketAddr],
    listeners: &mut Listeners,
    upcheck: &Upcheck,
) -> Result<(), DaemonError> {
    let begun = Instant::now();
    time::timeout(config.timeout, listeners.start(listen))
        .await
        .map_err(|_| DaemonError::BindTimeout(config.timeout))??;
    let left = config.timeout.saturating_sub(begun.elapsed());
    upcheck.until_up(left).await.map_err(DaemonError::NotUp)
}

/// Opens the metrics port.
async fn expose(config: &Config, metrics: &Metrics, board: &Board, logs: &Logs, failures: &Failures) {
    if !config.metrics.enabled {
        return;
    }
    let (journal, logs) = (board.journal().clone(), logs.clone());
    metrics.before_exposition(move || journal.metrics().refresh(&journal, Some(&logs)));
    let probe = Arc::new(Wellness(board.clone()));
    match MetricsServer::bind(config.metrics.listen, metrics.clone(), probe).await {
        Ok(server) => failures.spawn("the metrics port", async {
            if let Err(problem) = server.run(future::pending()).await {
                error!("metrics: {problem}");
            }
        }),
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
        None => board.stays_off("jobs_dir is missing; /local-groups stays empty".to_owned()),
    }
    None
}

/// What the rooms tell of themselves.
fn views(answers: &Answers, slot: Slot) -> Views {
    let (recursors, flush, cache) =
        (answers.current.clone(), answers.current.clone(), answers.current.clone());
    let published = slot.clone();
    Views {
        fast_path: Box::new(move || slot.view()),
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
