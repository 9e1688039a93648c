//! Keeps the names up with a live Consul.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use super::{Catalogs, ConsulNames};
use dns_consul_source::{Settings, Source};

/// Longest pause between two catalogs.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Asks the Consul that the object `"consul"` names, and puts in force what it tells. Calls
/// `installed` with each new catalog. Returns at once where none is named; else never.
pub(crate) async fn follow(
    names: Arc<ConsulNames>,
    catalogs: Arc<Catalogs>,
    installed: impl Fn() + Send + Sync + 'static,
) {
    let config = catalogs.config();
    let Some(api) = config.http.clone() else { return };
    let source = Arc::new(Source::start(Settings {
        api,
        token_file: config.token_file.clone(),
        datacenter: (!config.datacenter_is_default).then(|| config.datacenter.clone()),
        allow_stale: config.dns.allow_stale,
        max_stale: config.dns.max_stale,
    }));
    let mut pictures = source.pictures();
    // It is started here, once for these names.
    let _ = names.source.set(source);
    let mut is_known = false;
    while pictures.changed().await.is_ok() {
        let begun = Instant::now();
        let picture = pictures.borrow_and_update().clone();
        let (names, catalogs) = (names.clone(), catalogs.clone());
        let built = tokio::task::spawn_blocking(move || {
            catalogs.set_live(picture);
            let zone = catalogs.zone();
            let (nodes, instances) = (zone.zone.catalog.node_count(), zone.zone.catalog.instance_count());
            let datacenter = zone.zone.config.datacenter.clone();
            let incomplete = zone.zone.catalog.is_incomplete(&datacenter);
            names.install(zone).then_some((datacenter, nodes, instances, incomplete))
        });
        match built.await {
            Ok(Some((datacenter, nodes, instances, incomplete))) => {
                if !is_known && !incomplete {
                    is_known = true;
                    info!("Consul: {datacenter} is known: {nodes} nodes, {instances} instances");
                }
                installed();
            }
            Ok(None) => {}
            // The panic was logged with its place; the catalog in force stays.
            Err(problem) => warn!("Consul: a catalog cannot be put in force: {problem}"),
        }
        // A large catalog that changes all the time is not all that this machine does.
        sleep((begun.elapsed() * 4).min(LONGEST_PAUSE)).await;
    }
}
