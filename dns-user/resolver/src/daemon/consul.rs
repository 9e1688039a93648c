//! Builds the zone from the definition files of the object `"consul"` and a live Consul's catalog.

use std::{sync::Arc, time::Instant};

use tracing::{error, warn};

use super::sources::{Contents, Followed, Source};
use crate::{
    consul::{Catalogs, NewZone},
    ops::service_status::{Kind, ServiceStatus},
};
use dns_consul::{config::Config, definition::Definitions};
use dns_core::config::ConfigError;

/// The followed Consul definition files and the catalogs built from them.
pub(super) struct ConsulFiles {
    /// Catalogs of the definition files and of a live Consul.
    catalogs: Arc<Catalogs>,
    followed: Followed,
}

impl ConsulFiles {
    /// Creates the source and reads it for the first time. Invalid files are reported and not
    /// served.
    pub(super) fn start(config: Config, service_status: &ServiceStatus) -> (Self, NewZone) {
        let followed = Followed::new(Source::Patterns(config.files.clone()));
        let mut files = Self { catalogs: Arc::new(Catalogs::new(config)), followed };
        // A forced read returns the contents even if they have not changed.
        let zone = match files.read(true, service_status) {
            Some(Ok(zone)) => zone,
            Some(Err(problem)) => {
                error!("definition files: {problem}; only the other files are in use until it is valid");
                let config = files.catalogs.config();
                let definitions = files.followed.valid(|contents| parse(contents, &config));
                files.catalogs.set_files(definitions.registrations);
                files.catalogs.zone()
            }
            None => files.catalogs.zone(),
        };
        (files, zone)
    }

    /// Switches to another object `"consul"` and returns its zone. Call [`Self::refresh`]
    /// afterwards.
    pub(super) fn reconfigure(&mut self, config: Config) -> NewZone {
        if self.catalogs.config().files != config.files {
            self.followed = Followed::new(Source::Patterns(config.files.clone()));
        }
        self.catalogs.set_config(config);
        self.catalogs.zone()
    }

    /// Catalogs of the definition files and of a live Consul.
    pub(super) fn catalogs(&self) -> &Arc<Catalogs> {
        &self.catalogs
    }

    /// Returns the current zone if the files may have changed and are valid.
    pub(super) fn refresh(&mut self, force: bool, service_status: &ServiceStatus) -> Option<NewZone> {
        let read = self.read(force, service_status)?;
        read.inspect_err(|problem| error!("definition files: {problem}; the current catalog stays in use"))
            .ok()
    }

    /// Returns the source being followed.
    pub(super) fn followed(&self) -> &Followed {
        &self.followed
    }

    /// Reads the files if they may have changed.
    fn read(&mut self, force: bool, service_status: &ServiceStatus) -> Option<Result<NewZone, ConfigError>> {
        let begun = Instant::now();
        let config = self.catalogs.config();
        let (contents, parsed) = self.followed.parsed(force, |contents| parse(contents, &config))?;
        let definitions = match parsed {
            Ok(definitions) => definitions,
            Err(problem) => {
                service_status.refused(Kind::Consul, contents.paths(), &problem.to_string());
                return Some(Err(problem));
            }
        };
        for warning in &definitions.warnings {
            warn!("{warning}");
        }
        let warnings = definitions.warnings.clone();
        let detail = format!(
            "{} nodes, {} instances",
            definitions.registrations.nodes.len(),
            definitions.registrations.instances.len()
        );
        self.catalogs.set_files(definitions.registrations);
        service_status.loaded(Kind::Consul, contents.paths(), warnings, begun.elapsed(), &detail);
        Some(Ok(self.catalogs.zone()))
    }
}

fn parse(contents: &Contents, config: &Config) -> Result<Definitions, ConfigError> {
    let files = contents.readable()?;
    Definitions::read(files.iter().map(|(name, bytes)| (name.as_str(), *bytes)), config)
}
