//! Reads the sources once for a command.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use super::{Sources, sources::State};
use crate::{
    config::Config,
    control,
    store::{Resource, Store, StoreError},
};

/// Maximum wait for a publisher that is starting or stopping.
const PATIENCE: Duration = Duration::from_secs(25);

/// The sources at one point in time.
#[derive(Debug)]
pub struct Read {
    /// Documents and wanted records.
    pub state: State,
    /// Resources stored through the API.
    pub resources: Vec<Resource>,
}

/// Reads documents, stored resources and the fleet.
///
/// While `run` has the store open, the resources are read through its control socket.
pub async fn read_once(config: &Config) -> anyhow::Result<Read> {
    let resources = resources(config).await?;
    let mut sources = Sources::new(config, false).map_err(anyhow::Error::msg)?;
    let state = sources.read(&Sources::stored(&resources)).await;
    Ok(Read { state, resources })
}

async fn resources(config: &Config) -> anyhow::Result<Vec<Resource>> {
    if !Path::new(&config.store).exists() {
        // The API was never used, and a command must not create the store.
        return Ok(Vec::new());
    }
    // A publisher that is starting or stopping has the store open but does not respond.
    let deadline = Instant::now() + PATIENCE;
    loop {
        let problem = match Store::open(&config.store) {
            Ok(store) => return Ok(store.all()?),
            Err(StoreError::InUse(_)) => match control::get(&config.socket, "/resources").await {
                Ok(body) => return Ok(serde_json::from_slice(&body)?),
                Err(error) => error,
            },
            Err(error) => return Err(error.into()),
        };
        if Instant::now() > deadline {
            return Err(problem);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
