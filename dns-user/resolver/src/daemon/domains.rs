//! The domains that only this server can answer, for systemd-resolved.

use std::{collections::BTreeSet, path::Path};

use super::shadow::FollowedFleet;
use dns_core::{config::ConfigErrors, name::Name};

/// Follows the files of a configuration.
pub struct RoutedDomains(FollowedFleet);

impl RoutedDomains {
    /// Reads the files that a server with this configuration would read; the configuration itself
    /// is not followed.
    pub fn of(path: &Path) -> Result<Self, ConfigErrors> {
        FollowedFleet::of(path).map(Self)
    }

    /// Returns all domains, sorted, without trailing dots.
    pub fn all(&self) -> Vec<String> {
        let Self(fleet) = self;
        let mut all = BTreeSet::new();
        for domain in fleet.snapshot().domains().chain(&fleet.consul) {
            all.insert(text(domain));
        }
        for handler in &fleet.handlers {
            all.insert(text(&handler.domain));
        }
        for name in &fleet.config.upcheck_domains {
            // systemd-resolved would ask its other servers for them, which do not know these names.
            let parent = name.parent().filter(|parent| parent.label_count() > 0);
            all.insert(text(&parent.unwrap_or_else(|| name.clone())));
        }
        all.into_iter().collect()
    }

    /// Waits until the files may have changed, at most a second, and applies the changes.
    pub async fn follow(&mut self) {
        self.0.follow().await;
    }
}

fn text(domain: &Name) -> String {
    let text = domain.to_string();
    match text.strip_suffix('.') {
        Some(bare) if !bare.is_empty() => bare.to_owned(),
        // Without its dot the root would have no name at all.
        _ => text,
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
            "consul": {"alt_domain": "alt.internal"},
        });
        fs::write(path("config.json"), config.to_string()).unwrap();
        let mut domains = RoutedDomains::of(&path("config.json")).unwrap();
        assert_eq!(
            domains.all(),
            ["alt.internal", "bosh", "bosh-dns", "consul"]
        );
        fs::write(path("new"), records("other.internal")).unwrap();
        fs::rename(path("new"), path("records.json")).unwrap();
        let deny = r#"[{"domain": "corp.example.", "source": {"type": "deny"}}]"#;
        fs::write(path("a.handlers"), deny).unwrap();
        let all = [
            "alt.internal",
            "bosh-dns",
            "consul",
            "corp.example",
            "other.internal",
        ];
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
