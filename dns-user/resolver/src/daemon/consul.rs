//! Builds the zone from the definition files of the object `"consul"` and a live Consul's catalog.

use std::{sync::Arc, time::Instant};

use tracing::{debug, error, warn};

use super::followed_file::{FileSource, Followed, Reading, error_lines};
use crate::{
    consul::{Catalogs, NewZone},
    ops::service_status::{Kind, ServiceStatus},
};
use dns_consul::{catalog::registrations::Registrations, config::Config, definition::Definitions};
use dns_core::config::ParsedFiles;

/// The followed Consul definition files and the catalogs built from them.
pub(super) struct ConsulFiles {
    /// Catalogs of the definition files and of a live Consul.
    pub(super) catalogs: Arc<Catalogs>,
    pub(super) followed: Followed,
}

impl ConsulFiles {
    /// Creates the source and reads it for the first time. Invalid files are reported and not
    /// served.
    pub(super) fn start(config: Config, service_status: &ServiceStatus) -> (Self, NewZone) {
        let followed = Followed::new(FileSource::Patterns(config.files.clone()));
        let mut files = Self {
            catalogs: Arc::new(Catalogs::new(config)),
            followed,
        };
        // A forced read returns the contents even if they have not changed.
        let ParsedFiles { valid, errors } = files
            .read(Reading::Always, service_status)
            .unwrap_or_default();
        let others = "only the other files are in use until it is valid";
        for line in error_lines("definition files", &errors, others) {
            error!("{line}");
        }
        files.catalogs.set_files(valid);
        let zone = files.catalogs.zone();
        (files, zone)
    }

    /// Switches to another object `"consul"` and returns its zone. Call [`Self::refresh`]
    /// afterwards.
    pub(super) fn reconfigure(&mut self, config: Config) -> NewZone {
        // The same patterns keep their stamps, so unchanged files are not read again.
        if self.catalogs.config().files != config.files {
            self.followed = Followed::new(FileSource::Patterns(config.files.clone()));
        }
        self.catalogs.set_config(config);
        self.catalogs.zone()
    }

    pub(super) fn refresh(
        &mut self,
        reading: Reading,
        service_status: &ServiceStatus,
    ) -> Option<NewZone> {
        let read = self.read(reading, service_status)?;
        let stays = "the current catalog stays in use";
        for line in error_lines("definition files", &read.errors, stays) {
            error!("{line}");
        }
        // A wrong file may have held half of the registrations; the last complete ones stay.
        self.catalogs.set_files(read.whole().ok()?);
        Some(self.catalogs.zone())
    }

    fn read(
        &mut self,
        reading: Reading,
        service_status: &ServiceStatus,
    ) -> Option<ParsedFiles<Registrations>> {
        let begun = Instant::now();
        let config = self.catalogs.config();
        let (contents, parsed) = self.followed.parsed(reading, |files| {
            Definitions::read(files.iter().copied(), &config)
        })?;
        let ParsedFiles {
            valid:
                Definitions {
                    registrations,
                    warnings,
                    ignored,
                    ..
                },
            errors,
        } = parsed;
        for line in &ignored {
            // An agent's own files have many members that concern other parts of Consul.
            debug!("{line}");
        }
        if errors.is_empty() {
            for warning in &warnings {
                warn!("{warning}");
            }
            let nodes = registrations.nodes.len();
            let instances = registrations.instances.len();
            let detail = format!("{nodes} nodes, {instances} instances");
            service_status.loaded(
                Kind::Consul,
                contents.paths(),
                warnings,
                begun.elapsed(),
                &detail,
            );
        } else {
            service_status.refused(Kind::Consul, contents.paths(), &errors);
        }
        Some(ParsedFiles {
            valid: registrations,
            errors,
        })
    }
}
