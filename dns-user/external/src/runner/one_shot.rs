//! The sources, read once for a command.

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

/// Longest wait for a publisher that is starting or ending.
const PATIENCE: Duration = Duration::from_secs(25);

/// Sources at one moment.
#[derive(Debug)]
pub struct Read {
    /// Documents and what is wanted.
    pub state: State,
    /// Resources that came by the API.
    pub resources: Vec<Resource>,
}

/// Reads documents, stored resources and the fleet.
///
/// While `run` holds the store, the resources come through its control socket.
pub async fn read_once(config: &Config) -> anyhow::Result<Read> {
    let resources = resources(config).await?;
    let mut sources = Sources::new(config, false).map_err(anyhow::Error::msg)?;
    let state = sources.read(&Sources::stored(&resources)).await;
    Ok(Read { state, resources })
}

async fn resources(config: &Config) -> anyhow::Result<Vec<Resource>> {
    if !Path::new(&config.store).exists() {
        // No API was ever used; a command leaves no files behind.
        return Ok(Vec::new());
    }
    // A publisher that is starting or ending holds the store and does not answer.
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
