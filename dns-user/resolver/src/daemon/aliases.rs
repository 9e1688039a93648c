//! Generates aliases from the Consul catalog and the records of a configuration.

use std::{path::Path, sync::Arc, time::Duration};

use super::{
    config,
    files::{Files, First},
    sources::Sources,
};
use crate::{
    consul::whole,
    ops::service_status::{Kind, ServiceStatus},
};
use dns_consul::aliases::Aliases;
use dns_core::{
    config::{ConfigError, ConfigErrors, Loaded},
    link_address::Status,
};
use dns_upstream::HostNames;

/// Reads the configured Consul catalog and records, queries a configured live Consul for at most
/// `patience`, and returns the generated aliases.
pub fn aliases_of_consul(path: &Path, health: Status, patience: Duration) -> Result<Aliases, ConfigErrors> {
    let failed =
        |problem: String| ConfigErrors::from(ConfigError::of_file(path.display().to_string(), problem));
    let (Loaded { config, .. }, object) = config::load(path)?;
    let Some(object) = object else {
        return Err(failed("has no object \"consul\", which names the catalog's sources".to_owned()));
    };
    let recursors = config.recursion.recursors.clone();
    let service_status = ServiceStatus::default();
    let (files, First { snapshot, .. }) = Files::start(Sources::of(&config), Some(object), &service_status)?;
    if let Some(problem) = service_status.error(Kind::Consul) {
        return Err(failed(format!("its Consul files cannot be used: {problem}")));
    }
    if snapshot.instances().len() == 0 {
        return Err(failed("its records contain no instance that a name could point to".to_owned()));
    }
    let catalogs =
        files.consul_catalogs().ok_or_else(|| failed("its object \"consul\" has no files".to_owned()))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|problem| failed(problem.to_string()))?;
    let hosts = HostNames::new(&recursors, Arc::default());
    let zone = runtime.block_on(whole(&catalogs, &hosts, patience)).ok_or_else(|| {
        failed(format!(
            "Consul (consul.sources.http) did not return all services within {} s: is it reachable, and may \
             the token read them?",
            patience.as_secs()
        ))
    })?;
    Ok(dns_consul::aliases::aliases(&zone.zone, &snapshot, health))
}
