//! Keeps the catalog up to date with a live Consul.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep, timeout_at};
use tracing::{info, warn};

use super::{Catalogs, ConsulNames};
use dns_consul::{catalog::Place, source::LiveSettings};
use dns_consul_source::LiveConsul;
use dns_upstream::CurrentUpstreams;

/// Longest pause between two catalogs.
const MAX_PAUSE: Duration = Duration::from_secs(2);

/// Queries the Consul configured in the object `"consul"`, installs its catalogs, and switches to
/// another one when the object changes. Host names of agents are resolved like recursors'.
/// Calls `installed` with each new catalog. Returns when a source has failed internally.
pub(crate) async fn follow(
    names: Arc<ConsulNames>,
    catalogs: Arc<Catalogs>,
    upstreams: Arc<CurrentUpstreams>,
    installed: impl Fn() + Send + Sync + 'static,
) {
    let mut settings = catalogs.settings();
    let mut predecessor: Option<Arc<LiveConsul>> = None;
    loop {
        let wanted = settings.borrow_and_update().clone();
        let installing = async {
            // Close the predecessor's connections before opening new ones, because an agent limits
            // the connections per client.
            let before = predecessor.take();
            let wanted = wanted?;
            let until = before.and_then(|before| good_until(&before, &wanted));
            let source = Arc::new(LiveConsul::start(
                wanted,
                upstreams.upstream.load().host_names(),
            ));
            names.source.store(Some(source.clone()));
            install_catalogs(&source, until, &names, &catalogs, &installed).await;
            Some(())
        };
        tokio::select! {
            // The sender is in `catalogs`.
            _ = settings.changed() => {}
            Some(()) = installing => return,
        }
        predecessor = names.source.swap(None);
    }
}

/// Returns until when the catalog of the previous source is better than an incomplete one of its
/// successor; `None` if the previous source has delivered nothing.
fn good_until(source: &LiveConsul, wanted: &LiveSettings) -> Option<Instant> {
    let age = Duration::try_from_secs_f64(source.status().last_contact_seconds?).ok()?;
    Instant::now().checked_add(wanted.max_stale.saturating_sub(age))
}

/// Installs the catalogs of a source. The previous catalog stays until the source has delivered
/// everything, but no longer than `until`.
async fn install_catalogs(
    source: &LiveConsul,
    until: Option<Instant>,
    names: &Arc<ConsulNames>,
    catalogs: &Arc<Catalogs>,
    installed: &(impl Fn() + Send + Sync + 'static),
) {
    let mut views = source.views();
    if let Some(until) = until {
        let complete = views.wait_for(|view| view.is_complete());
        // Ends after the time limit or with a better catalog; the caller owns the source.
        let _ = timeout_at(until, complete).await;
        views.mark_changed();
    }
    let mut is_known = false;
    while views.changed().await.is_ok() {
        let begun = Instant::now();
        let view = views.borrow_and_update().clone();
        let to = names.clone();
        let catalogs = catalogs.clone();
        let built = tokio::task::spawn_blocking(move || {
            catalogs.set_live(view);
            to.install(catalogs.zone())
        });
        match built.await {
            Ok(true) => {
                let zone = names.zone();
                let datacenter = &zone.config.datacenter;
                let own = Place::Datacenter(datacenter.as_str().into());
                if !is_known && !zone.catalog.is_incomplete(&own) {
                    is_known = true;
                    let nodes = zone.catalog.node_count();
                    let instances = zone.catalog.instance_count();
                    info!(
                        "Consul: the catalog of {datacenter} is complete: {nodes} nodes, {instances} instances"
                    );
                }
                installed();
            }
            Ok(false) => {}
            // The panic was logged with its location; the current catalog stays in use.
            Err(problem) => {
                warn!("Consul: cannot use the new catalog: {problem}; the current one stays in use")
            }
        }
        // A large catalog that changes constantly must not occupy the CPU.
        sleep((begun.elapsed() * 4).min(MAX_PAUSE)).await;
    }
}
