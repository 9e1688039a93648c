//! Follows the domains that only this server can answer, for systemd-resolved.

use std::{collections::BTreeSet, path::Path};

use super::{
    files::{FileChanges, Files, InitialFiles},
    followed_file::{Reading, Sources},
};
use crate::ops::service_status::ServiceStatus;
use dns_core::{catalog::Snapshot, config::ConfigErrors, name::Name};
use dns_kit::files::watch::Watch;
use dns_upstream::HandlerConfig;

/// Follows records and handlers; reads a file again only if it has changed.
pub struct RoutedDomains {
    files: Files,
    /// Wakes when a file may have changed.
    watch: Watch,
    of_records: Vec<String>,
    of_handlers: Vec<String>,
    /// Parent domains of the up-check names.
    of_upchecks: Vec<String>,
}

impl RoutedDomains {
    /// Reads the files that a server with this configuration would read; the configuration itself
    /// is not followed.
    pub fn of(path: &Path) -> Result<Self, ConfigErrors> {
        let config = dns_kit::files::load_config(path)?.config;
        let (
            files,
            InitialFiles {
                snapshot, handlers, ..
            },
        ) = Files::start(Sources::of(&config), None, &ServiceStatus::default())?;
        let mut watch = Watch::new();
        watch.set(files.folders());
        Ok(Self {
            files,
            watch,
            of_records: domains_of_records(&snapshot),
            of_handlers: domains_of_handlers(&handlers),
            // systemd-resolved would ask its other servers for them, which do not know these names.
            of_upchecks: config.upcheck_domains.iter().map(parent).collect(),
        })
    }

    /// Returns all domains, sorted, without trailing dots.
    pub fn all(&self) -> Vec<String> {
        let Self {
            files: _,
            watch: _,
            of_records,
            of_handlers,
            of_upchecks,
        } = self;
        let all: BTreeSet<String> = of_records
            .iter()
            .chain(of_handlers)
            .chain(of_upchecks)
            .map(|name: &String| match name.trim_end_matches('.') {
                // Without its dot the root would have no name at all.
                "" => ".".to_owned(),
                name => name.to_owned(),
            })
            .collect();
        all.into_iter().collect()
    }

    /// Waits until the files may have changed, at most a second, and applies the changes.
    pub async fn follow(&mut self) {
        self.watch.next().await;
        let snapshot = self.files.reload_catalog(Reading::IfChanged).await;
        let FileChanges { handlers, .. } = self.files.reload_others(Reading::IfChanged).await;
        if let Some(snapshot) = snapshot {
            self.of_records = domains_of_records(&snapshot);
        }
        if let Some(handlers) = handlers {
            self.of_handlers = domains_of_handlers(&handlers);
        }
        self.watch.set(self.files.folders());
    }
}

fn domains_of_records(snapshot: &Snapshot) -> Vec<String> {
    snapshot.domains().map(ToString::to_string).collect()
}

fn domains_of_handlers(handlers: &[HandlerConfig]) -> Vec<String> {
    handlers
        .iter()
        .map(|handler| handler.domain.to_string())
        .collect()
}

/// Returns the name without its first label.
fn parent(name: &Name) -> String {
    let name = name.to_string();
    match name.trim_end_matches('.').split_once('.') {
        Some((_, parent)) => parent.to_owned(),
        None => name,
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, time::Duration};

    use super::*;

    /// Returns a records.json with one instance in `domain`.
    fn records(domain: &str) -> String {
        format!(
            r#"{{"record_keys": ["id", "instance_group", "az", "network", "deployment", "ip", "domain"],
                "record_infos": [["a", "web", "z1", "net", "dep", "10.0.0.1", "{domain}"]], "version": 1}}"#
        )
    }

    #[tokio::test]
    async fn record_and_handler_changes_are_followed() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("records.json"), records("bosh")).unwrap();
        let config = serde_json::json!({
            "address": "127.0.0.1", "port": 53, "records_file": path("records.json"),
            "handlers_files_glob": path("*.handlers"), "upcheck_domains": ["upcheck.bosh-dns."],
        });
        fs::write(path("config.json"), config.to_string()).unwrap();
        let mut domains = RoutedDomains::of(&path("config.json")).unwrap();
        assert_eq!(domains.all(), ["bosh", "bosh-dns"]);
        fs::write(path("new"), records("other.internal")).unwrap();
        fs::rename(path("new"), path("records.json")).unwrap();
        let deny = r#"[{"domain": "corp.example.", "source": {"type": "deny"}}]"#;
        fs::write(path("a.handlers"), deny).unwrap();
        let all = ["bosh-dns", "corp.example", "other.internal"];
        let followed = async {
            while domains.all() != all {
                domains.follow().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), followed)
            .await
            .unwrap();
    }
}
