//! Fleet names that an external-dns writes, as an alias file of the DNS server.
//!
//! An alias has neither a TTL nor text, so all records, ownership included, are saved in a file of
//! their own, and the alias file is made of them. A failed write is repeated by the next request.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use anyhow::{anyhow, bail};
use dns_core::{
    catalog::AliasFiles,
    config::{Config as ServerConfig, values},
    name::Name as FleetDomain,
    resolve::{AddressQuery, NoAddresses},
};
use dns_kit::files::{
    atomic::{self, Attributes},
    bounded,
    glob::glob,
};

use super::ServerClient;
use crate::{
    config::WebhookConfig,
    go_json,
    record::{DomainFilter, Key, Name, Record, RecordType, Target, by_key},
    webhook::{Changes, Domains, Endpoint},
};

type Records = BTreeMap<Key, Record>;

#[derive(Debug)]
pub(crate) struct AliasWriter {
    pub domains: Domains,
    filter: DomainFilter,
    alias_file: PathBuf,
    state_file: PathBuf,
    /// Glob pattern of the server's alias files.
    alias_files: String,
    /// `None` until the state file was read.
    records: Option<Records>,
    /// Names left out by the last adjustment, to log a change only.
    refused: BTreeSet<String>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum WriteError {
    #[error("{name}: {reason}")]
    Unfit { name: String, reason: String },
    #[error("{0}: not as the message states; list the records again")]
    Conflict(Name),
    #[error("{}: {reason}", path.display())]
    File { path: PathBuf, reason: String },
    #[error(transparent)]
    Server(#[from] anyhow::Error),
}

/// Names of the fleet that are targets of CNAMEs.
pub(crate) type KnownTargets = BTreeSet<FleetDomain>;

pub(crate) async fn known_targets(
    server: &ServerClient,
    targets: KnownTargets,
) -> Result<KnownTargets, WriteError> {
    let mut queries = Vec::with_capacity(targets.len());
    for target in &targets {
        queries.push(AddressQuery {
            name: target.to_string(),
            withdrawn: BTreeSet::new(),
        });
    }
    let answers = server.ask(&queries).await?;
    let mut known = KnownTargets::new();
    for (target, answer) in targets.into_iter().zip(answers) {
        // An alias may point to a name of the fleet that has no addresses at the moment.
        if answer != Err(NoAddresses::Foreign) {
            known.insert(target);
        }
    }
    Ok(known)
}

impl AliasWriter {
    /// Prepares the writer of `config.alias_file`, which the server with this `config.json` reads. Also
    /// returns the client of that server.
    pub(crate) fn new(
        config: &WebhookConfig,
        server: &Path,
        state_file: PathBuf,
    ) -> anyhow::Result<(Self, ServerClient)> {
        let WebhookConfig {
            address: _,
            domains,
            alias_file,
        } = config;
        let (
            client,
            ServerConfig {
                alias_files_glob: pattern,
                ..
            },
        ) = ServerClient::of_server(server)?;
        // The server would not read the file, and acknowledged changes would have no effect.
        if !is_matched(&pattern, alias_file) {
            bail!(
                "webhook.alias_file: {} does not match alias_files_glob {pattern:?} of {}; choose a file that \
                 matches",
                alias_file.display(),
                server.display()
            );
        }
        let filter = domains
            .filter()
            .map_err(|error| anyhow!("webhook: {error}"))?;
        let writer = Self {
            domains: domains.clone(),
            filter,
            alias_file: alias_file.clone(),
            state_file,
            alias_files: pattern,
            records: None,
            refused: BTreeSet::new(),
        };
        Ok((writer, client))
    }

    /// Removes what a killed publisher left of unfinished writes. Only the running publisher may call this.
    pub(crate) fn sweep(&self) {
        atomic::sweep(&self.state_file);
        atomic::sweep(&self.alias_file);
    }

    /// Returns all records, after the alias file agrees with them.
    pub(crate) fn list(&mut self) -> Result<Vec<Endpoint>, WriteError> {
        let records = self.load()?;
        let listed = records.values().map(Endpoint::of).collect();
        self.write_aliases(&records)?;
        Ok(listed)
    }

    /// Returns the targets of CNAMEs that only the server may know.
    pub(crate) fn other_targets<'a>(
        &mut self,
        endpoints: impl Iterator<Item = &'a Endpoint> + Clone,
    ) -> Result<KnownTargets, WriteError> {
        let records = self.load()?;
        let mut names = BTreeSet::new();
        // A target may be another name of the same message, which the server does not know yet.
        for endpoint in endpoints.clone() {
            names.extend(Name::parse(&endpoint.dns_name).ok());
        }
        names.extend(records.into_values().map(|record| record.name));
        let mut targets = KnownTargets::new();
        for endpoint in endpoints {
            // The text of an owner record is no name.
            if endpoint.record_type == "TXT" {
                continue;
            }
            for target in &endpoint.targets {
                let is_here = target.parse::<IpAddr>().is_ok()
                    || Name::parse(target).is_ok_and(|target| names.contains(&target));
                if !is_here {
                    targets.extend(FleetDomain::from_text(target).ok());
                }
            }
        }
        Ok(targets)
    }

    /// Returns wanted endpoints in the form in which they will be listed, without names that cannot be aliases.
    pub(crate) fn adjust(&mut self, endpoints: &[Endpoint], known: &KnownTargets) -> Vec<Endpoint> {
        let mut names = BTreeSet::new();
        for endpoint in endpoints {
            names.extend(Name::parse(&endpoint.dns_name).ok());
        }
        let mut adjusted = Vec::new();
        let mut refused = BTreeMap::new();
        for endpoint in endpoints {
            let record = match endpoint.record() {
                Err(error) => Err(error.to_string()),
                // The server's alias files have names and addresses only.
                Ok(record) if record.record_type == RecordType::TXT => {
                    Err("an alias has no text".to_owned())
                }
                Ok(record) => self.check_alias(&record, &names, known).map(|()| record),
            };
            match record {
                Ok(record) => adjusted.push(Endpoint {
                    // `record` drops them, and external-dns would lose the resource.
                    labels: endpoint.labels.clone(),
                    ..Endpoint::of(&plain(record))
                }),
                Err(reason) => drop(refused.insert(endpoint.dns_name.clone(), reason)),
            }
        }
        let names: BTreeSet<String> = refused.keys().cloned().collect();
        // external-dns asks every minute; the same names are logged once.
        if names != self.refused {
            let news = refused
                .iter()
                .filter(|(name, _)| !self.refused.contains(*name));
            // The first ones show the cause; a cluster may have thousands.
            for (name, reason) in news.take(3) {
                tracing::warn!(
                    name,
                    reason,
                    "external-dns wants a name that cannot be an alias; it is left out"
                );
            }
            self.refused = names;
        }
        adjusted
    }

    /// Applies the changes of a message, all or none. Returns the number of record sets that changed.
    pub(crate) fn apply(
        &mut self,
        changes: &Changes,
        known: &KnownTargets,
    ) -> Result<usize, WriteError> {
        let mut records = self.load()?;
        let Changes {
            create,
            update_old,
            update_new,
            delete,
        } = changes;
        for record in read(delete)?.into_iter().chain(read(update_old)?) {
            match records.remove(&record.key()) {
                // The protocol has no compare-and-set, so this comparison is all that stops a
                // message made from an old listing.
                Some(found) if found.targets == record.targets => {}
                _ => return Err(WriteError::Conflict(record.name)),
            }
        }
        let mut added = read(create)?;
        added.extend(read(update_new)?);
        let added: Vec<Record> = added.into_iter().map(plain).collect();
        // After the deletions, so that no new alias points to a name that goes.
        let mut names = BTreeSet::new();
        for record in records.values().chain(&added) {
            names.insert(record.name.clone());
        }
        for record in added {
            self.check_alias(&record, &names, known)
                .map_err(|reason| WriteError::Unfit {
                    name: record.name.to_string(),
                    reason,
                })?;
            let name = record.name.clone();
            // external-dns believes that the name is free: its listing is older than the records.
            if records.insert(record.key(), record).is_some() {
                return Err(WriteError::Conflict(name));
            }
        }
        self.check(&records)?;
        let listed: Vec<Endpoint> = records.values().map(Endpoint::of).collect();
        // The records first: after a crash between both files, `list` makes the aliases of them.
        let text = serde_json::to_vec(&listed).unwrap_or_default();
        atomic::replace_own(&self.state_file, &text, Attributes::PRIVATE)
            .map_err(|error| unusable(&self.state_file, &error.cause))?;
        self.records = Some(records.clone());
        self.write_aliases(&records)?;
        Ok(create.len() + update_new.len() + delete.len())
    }

    /// Returns the current records, from the state file at the first time.
    fn load(&mut self) -> Result<Records, WriteError> {
        if let Some(records) = &self.records {
            return Ok(records.clone());
        }
        let path = &self.state_file;
        let endpoints: Vec<Endpoint> = match bounded::read(path) {
            Ok(bytes) => go_json::from_slice(&bytes).map_err(|error| {
                let reason =
                    format!("{error}; remove the file, and external-dns writes its names again");
                WriteError::File {
                    path: path.clone(),
                    reason,
                }
            })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(unusable(path, &error)),
        };
        let records = by_key(read(&endpoints)?);
        self.records = Some(records.clone());
        Ok(records)
    }

    fn write_aliases(&self, records: &Records) -> Result<(), WriteError> {
        let text = alias_text(records);
        // The server reads a changed file at once; an unchanged one must not cost a reload.
        if bounded::read(&self.alias_file).is_ok_and(|current| current == text) {
            return Ok(());
        }
        atomic::replace(&self.alias_file, &text, Attributes::PUBLIC)
            .map_err(|error| unusable(&self.alias_file, &error.cause))?;
        Ok(())
    }

    /// Returns the reason why a record cannot be an alias. `names` are the names after the change.
    fn check_alias(
        &self,
        record: &Record,
        names: &BTreeSet<Name>,
        known: &KnownTargets,
    ) -> Result<(), String> {
        let Record {
            name,
            record_type,
            set_identifier,
            targets,
            ..
        } = record;
        if *record_type == RecordType::TXT {
            // Ownership, which may be beside the domains.
            return Ok(());
        }
        if !record_type.is_address() && *record_type != RecordType::CNAME {
            return Err(format!(
                "an alias has no records of type {record_type}; use A, AAAA or CNAME"
            ));
        }
        if !self.filter.matches(name) {
            let domains = serde_json::to_string(&self.domains).unwrap_or_default();
            return Err(format!("it is outside of the webhook's domains {domains}"));
        }
        if !set_identifier.is_empty() {
            return Err("an alias has no set identifier; use one set of targets".to_owned());
        }
        if targets.is_empty() {
            return Err("it has no target; add one".to_owned());
        }
        if alias_of(name).is_none() {
            return Err(
                "the server's alias files cannot express the name; use letters, digits and -"
                    .to_owned(),
            );
        }
        for target in targets {
            let target = target.as_str();
            if target.parse::<IpAddr>().is_ok() {
                continue;
            }
            let is_known = Name::parse(target).is_ok_and(|target| names.contains(&target))
                || FleetDomain::from_text(target).is_ok_and(|target| known.contains(&target));
            if !is_known {
                return Err(format!(
                    "its target {target} is not a name of the fleet; use an address"
                ));
            }
        }
        Ok(())
    }

    /// Checks what concerns several records: CNAMEs beside others, and loops.
    fn check(&self, records: &Records) -> Result<(), WriteError> {
        let mut served: Vec<&Record> = records.values().collect();
        served.retain(|record| record.record_type != RecordType::TXT);
        for pair in served.windows(2) {
            let types = [pair[0].record_type, pair[1].record_type];
            // Sets are sorted by name, so those of one name are neighbours.
            if pair[0].name == pair[1].name && types.contains(&RecordType::CNAME) {
                return Err(WriteError::Unfit {
                    name: pair[0].name.to_string(),
                    reason: "a CNAME excludes other records; remove one of them".to_owned(),
                });
            }
        }
        let text = alias_text(records);
        let ours = self.alias_file.display().to_string();
        // With the server's other files: an alias may close a loop with one that an operator wrote.
        let mut files: Vec<(String, Vec<u8>)> = vec![(ours.clone(), text)];
        // A malformed pattern matches no file; the server reports it.
        let mut paths = glob(&self.alias_files).unwrap_or_default();
        paths.retain(|path| *path != self.alias_file);
        for path in paths {
            // The server leaves an unreadable file out as well.
            if let Ok(bytes) = bounded::read(&path) {
                files.push((path.display().to_string(), bytes));
            }
        }
        let files = files.iter().map(|(file, bytes)| (&**file, &**bytes));
        let (_, _, errors) = AliasFiles::parse_valid(files);
        match errors.into_iter().find(|error| error.files.contains(&ours)) {
            Some(error) => Err(WriteError::Unfit {
                name: "the alias file".to_owned(),
                reason: error.to_string(),
            }),
            None => Ok(()),
        }
    }
}

fn is_matched(pattern: &str, file: &Path) -> bool {
    let file = file.to_string_lossy();
    let patterns: Vec<&str> = pattern.split('/').collect();
    let parts: Vec<&str> = file.split('/').collect();
    let mut pairs = patterns.iter().zip(&parts);
    // As in a shell, a wildcard matches no slash.
    patterns.len() == parts.len()
        && pairs.all(|(pattern, part)| {
            values::pattern_matches(pattern.as_bytes(), part.as_bytes()).unwrap_or(false)
        })
}

fn read(endpoints: &[Endpoint]) -> Result<Vec<Record>, WriteError> {
    let mut records = Vec::new();
    for endpoint in endpoints {
        let record = endpoint.record().map_err(|error| WriteError::Unfit {
            name: endpoint.dns_name.clone(),
            reason: error.to_string(),
        })?;
        records.push(record);
    }
    Ok(records)
}

fn plain(record: Record) -> Record {
    Record {
        // external-dns would send what no listing shows again and again.
        ttl: None,
        properties: BTreeMap::new(),
        ..record
    }
}

fn unusable(path: &Path, error: &io::Error) -> WriteError {
    WriteError::File {
        path: path.to_owned(),
        reason: format!("{error}; the publisher must be able to write this file and its folder"),
    }
}

/// Returns a name in the form of an alias file; `None` if it has none.
fn alias_of(name: &Name) -> Option<String> {
    let text = name.as_str();
    // Alias files write the label that stands for any other as `_`.
    let (below, rest) = match text.strip_prefix("*.") {
        Some(rest) => ("_.", rest),
        None => ("", text),
    };
    let is_usable = rest
        .bytes()
        .all(|octet| octet.is_ascii_alphanumeric() || b"-._".contains(&octet))
        // A literal `_` as the first label would be read as that.
        && !rest.starts_with("_.")
        && !name.is_root();
    is_usable.then(|| format!("{below}{rest}"))
}

fn alias_text(records: &Records) -> Vec<u8> {
    let mut aliases: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for record in records.values() {
        // Ownership is beside the aliases.
        if record.record_type == RecordType::TXT {
            continue;
        }
        if let Some(alias) = alias_of(&record.name) {
            let targets = aliases.entry(alias).or_default();
            targets.extend(record.targets.iter().map(Target::as_str));
        }
    }
    let mut text = serde_json::to_vec_pretty(&aliases).unwrap_or_default();
    text.push(b'\n');
    text
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{Value, json};

    use super::*;

    struct Lab {
        folder: tempfile::TempDir,
    }

    impl Lab {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let path = |name: &str| folder.path().join(name);
            fs::create_dir(path("aliases")).unwrap();
            fs::write(
                path("aliases/own.json"),
                r#"{"router.internal": ["*.router.default.cf.bosh"]}"#,
            )
            .unwrap();
            let config = json!({
                "port": 53, "alias_files_glob": path("aliases/*.json"),
            });
            fs::write(path("config.json"), config.to_string()).unwrap();
            Self { folder }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn try_open(&self, alias_file: &str) -> anyhow::Result<AliasWriter> {
            let config = WebhookConfig {
                address: "127.0.0.1:8888".parse().unwrap(),
                domains: Domains {
                    include: vec!["apps.internal".to_owned()],
                    exclude: vec!["closed.apps.internal".to_owned()],
                    ..Domains::default()
                },
                alias_file: self.path(alias_file),
            };
            let opened = AliasWriter::new(
                &config,
                &self.path("config.json"),
                self.path("webhook.json"),
            );
            opened.map(|(writer, _)| writer)
        }

        fn open(&self) -> AliasWriter {
            self.try_open("aliases/external-dns.json").unwrap()
        }

        fn aliases(&self) -> Value {
            serde_json::from_slice(&fs::read(self.path("aliases/external-dns.json")).unwrap())
                .unwrap()
        }
    }

    fn endpoint(name: &str, record_type: &str, targets: &[&str]) -> Value {
        json!({"dnsName": name, "recordType": record_type, "targets": targets, "recordTTL": 60})
    }

    /// The names of the fleet that the server knows.
    fn known() -> KnownTargets {
        [FleetDomain::from_text("router.internal").unwrap()].into()
    }

    fn changes(member: &str, endpoints: &[Value]) -> Changes {
        serde_json::from_value(json!({ member: endpoints })).unwrap()
    }

    #[test]
    fn records_become_aliases() {
        let lab = Lab::new();
        let mut writer = lab.open();
        let created = [
            endpoint("web.apps.internal", "A", &["192.0.2.1", "192.0.2.2"]),
            endpoint("web.apps.internal", "AAAA", &["2001:db8::1"]),
            endpoint("*.w.apps.internal", "A", &["192.0.2.3"]),
            endpoint("alias.apps.internal", "CNAME", &["router.internal"]),
            endpoint(
                "a-web.apps.internal",
                "TXT",
                &["\"heritage=external-dns,external-dns/owner=k8s\""],
            ),
        ];
        assert_eq!(
            writer
                .apply(&changes("create", &created), &known())
                .unwrap(),
            5
        );
        let expected = json!({
            "_.w.apps.internal": ["192.0.2.3"],
            "alias.apps.internal": ["router.internal"],
            "web.apps.internal": ["192.0.2.1", "192.0.2.2", "2001:db8::1"],
        });
        assert_eq!(lab.aliases(), expected);
        // A new process knows the records, and repairs the alias file.
        fs::remove_file(lab.path("aliases/external-dns.json")).unwrap();
        let mut writer = lab.open();
        let listed = serde_json::to_value(writer.list().unwrap()).unwrap();
        assert_eq!(listed.as_array().unwrap().len(), 5);
        assert!(
            listed
                .to_string()
                .contains("\\\"heritage=external-dns,external-dns/owner=k8s\\\""),
            "{listed}"
        );
        assert_eq!(lab.aliases(), expected);
        assert!(matches!(
            writer.apply(&changes("create", &created[..1]), &known()),
            Err(WriteError::Conflict(_))
        ));
        writer
            .apply(&changes("delete", &created[1..]), &known())
            .unwrap();
        assert_eq!(
            lab.aliases(),
            json!({"web.apps.internal": ["192.0.2.1", "192.0.2.2"]})
        );
        fs::write(lab.path("webhook.json"), "[").unwrap();
        assert!(
            lab.open()
                .list()
                .unwrap_err()
                .to_string()
                .contains("webhook.json: ")
        );
        assert!(
            lab.try_open("elsewhere.json")
                .unwrap_err()
                .to_string()
                .contains("alias_files_glob")
        );
    }

    #[test]
    fn unfit_records_change_nothing() {
        let lab = Lab::new();
        let mut writer = lab.open();
        let good = endpoint("web.apps.internal", "A", &["192.0.2.1"]);
        writer
            .apply(&changes("create", std::slice::from_ref(&good)), &known())
            .unwrap();
        let before = lab.aliases();
        let mut identified = endpoint("x.apps.internal", "A", &["192.0.2.1"]);
        identified["setIdentifier"] = "blue".into();
        for (endpoint, reason) in [
            (
                endpoint("x.example.org", "A", &["192.0.2.1"]),
                "outside of the webhook's domains",
            ),
            (
                endpoint("x.closed.apps.internal", "A", &["192.0.2.1"]),
                "outside of the webhook's domains",
            ),
            (
                endpoint("x.apps.internal", "SRV", &["0 0 80 a.apps.internal"]),
                "no records of type SRV",
            ),
            (
                endpoint("x.apps.internal", "CNAME", &["elb.amazonaws.com"]),
                "not a name of the fleet",
            ),
            (
                endpoint("_.apps.internal", "A", &["192.0.2.1"]),
                "cannot express",
            ),
            (
                endpoint("web.apps.internal", "CNAME", &["router.internal"]),
                "excludes other records",
            ),
            (
                endpoint("x.apps.internal", "CNAME", &["x.apps.internal"]),
                "form a loop",
            ),
            (endpoint("x.apps.internal", "A", &[]), "no target"),
            (
                endpoint("x.apps.internal", "A", &["192.0.2.300"]),
                "not a name of the fleet",
            ),
            (identified, "set identifier"),
        ] {
            let error = writer
                .apply(&changes("create", &[endpoint]), &known())
                .unwrap_err();
            assert!(matches!(error, WriteError::Unfit { .. }), "{error:?}");
            assert!(error.to_string().contains(reason), "{error}");
        }
        let stale = endpoint("web.apps.internal", "A", &["192.0.2.9"]);
        let stale = writer
            .apply(&changes("delete", &[stale]), &known())
            .unwrap_err();
        assert!(matches!(stale, WriteError::Conflict(_)), "{stale:?}");
        assert_eq!(lab.aliases(), before);
        let mut wanted = good.clone();
        wanted["labels"] = json!({"resource": "service/default/web"});
        wanted["providerSpecific"] = json!([{"name": "alias", "value": "false"}]);
        let all = [
            wanted,
            endpoint("t.apps.internal", "TXT", &["\"x\""]),
            endpoint("x.example.org", "A", &["192.0.2.1"]),
        ];
        let all: Vec<Endpoint> = serde_json::from_value(json!(all)).unwrap();
        let adjusted = serde_json::to_value(writer.adjust(&all, &known())).unwrap();
        let expected = json!([{"dnsName": "web.apps.internal", "recordType": "A", "targets": ["192.0.2.1"],
            "labels": {"resource": "service/default/web"}}]);
        assert_eq!(adjusted, expected);
    }

    #[test]
    fn alias_file_names_have_form() {
        for (name, expected) in [
            ("a.example.org", Some("a.example.org")),
            ("*.example.org", Some("_.example.org")),
            ("a-b_c.9", Some("a-b_c.9")),
            ("_a.example.org", Some("_a.example.org")),
            ("_.example.org", None),
            ("*._.example.org", None),
            ("a.*.example.org", None),
            (r"a\.b.example.org", None),
            ("a!.example.org", None),
            (".", None),
        ] {
            assert_eq!(
                alias_of(&Name::parse(name).unwrap()).as_deref(),
                expected,
                "{name}"
            );
        }
    }

    #[test]
    fn alias_pattern_matches_by_part() {
        for (pattern, file, expected) in [
            ("/a/*.json", "/a/b.json", true),
            ("/a/*.json", "/a/b.yml", false),
            ("/a/*.json", "/a/b/c.json", false),
            ("/a/*.json", "/b.json", false),
            ("/*/b.json", "/a/b.json", true),
            ("/a/[", "/a/b", false),
        ] {
            assert_eq!(
                is_matched(pattern, Path::new(file)),
                expected,
                "{pattern} {file}"
            );
        }
    }

    #[test]
    fn only_foreign_targets_are_asked() {
        let lab = Lab::new();
        let mut writer = lab.open();
        let stored = [endpoint("known.apps.internal", "A", &["192.0.2.1"])];
        writer.apply(&changes("create", &stored), &known()).unwrap();
        let endpoints: Vec<Endpoint> = serde_json::from_value(json!([
            endpoint("a.apps.internal", "CNAME", &["known.apps.internal"]),
            endpoint("b.apps.internal", "CNAME", &["A.apps.internal."]),
            endpoint("c.apps.internal", "CNAME", &["router.internal"]),
            endpoint("d.apps.internal", "A", &["192.0.2.2"]),
            endpoint("t.apps.internal", "TXT", &["text.example"]),
        ]))
        .unwrap();
        let asked = writer.other_targets(endpoints.iter()).unwrap();
        assert_eq!(asked, known());
    }

    #[test]
    fn message_changes_are_counted() {
        let lab = Lab::new();
        let mut writer = lab.open();
        let set =
            |name: &str, address: &str| endpoint(&format!("{name}.apps.internal"), "A", &[address]);
        let created = [set("a", "192.0.2.1"), set("b", "192.0.2.1")];
        assert_eq!(
            writer
                .apply(&changes("create", &created), &known())
                .unwrap(),
            2
        );
        let mixed: Changes = serde_json::from_value(json!({
            "create": [set("c", "192.0.2.1")],
            "updateOld": [set("a", "192.0.2.1")],
            "updateNew": [set("a", "192.0.2.2")],
            "delete": [set("b", "192.0.2.1")],
        }))
        .unwrap();
        assert_eq!(writer.apply(&mixed, &known()).unwrap(), 3);
        let expected = json!({"a.apps.internal": ["192.0.2.2"], "c.apps.internal": ["192.0.2.1"]});
        assert_eq!(lab.aliases(), expected);
        // An alias must not point to a name that goes with the same message.
        let mut alias = changes(
            "create",
            &[endpoint("x.apps.internal", "CNAME", &["c.apps.internal"])],
        );
        alias.delete = changes("delete", &[set("c", "192.0.2.1")]).delete;
        assert_eq!(
            writer.apply(&alias, &known()).unwrap_err().to_string(),
            "x.apps.internal: its target c.apps.internal is not a name of the fleet; use an address"
        );
        // A name that another message has changed is a conflict.
        let stale = writer.apply(&mixed, &known()).unwrap_err().to_string();
        assert_eq!(
            stale,
            "b.apps.internal: not as the message states; list the records again"
        );
        assert_eq!(lab.aliases(), expected);
    }

    #[test]
    fn refusals_describe_permitted_aliases() {
        let lab = Lab::new();
        let mut writer = lab.open();
        let mut identified = endpoint("x.apps.internal", "A", &["192.0.2.1"]);
        identified["setIdentifier"] = "blue".into();
        for (wanted, expected) in [
            (
                endpoint("x.apps.internal", "MX", &["10 a.b"]),
                "an alias has no records of type MX; use A, AAAA or CNAME",
            ),
            (
                endpoint("x.example.org", "A", &["192.0.2.1"]),
                "it is outside of the webhook's domains {\"include\":[\"apps.internal\"],\"exclude\":\
                 [\"closed.apps.internal\"]}",
            ),
            (
                identified,
                "an alias has no set identifier; use one set of targets",
            ),
            (
                endpoint("x.apps.internal", "A", &[]),
                "it has no target; add one",
            ),
            (
                endpoint("x!.apps.internal", "A", &["192.0.2.1"]),
                "the server's alias files cannot express the name; use letters, digits and -",
            ),
        ] {
            let name = wanted["dnsName"].as_str().unwrap().to_owned();
            let created = changes("create", &[wanted]);
            let error = writer.apply(&created, &known()).unwrap_err();
            assert_eq!(error.to_string(), format!("{name}: {expected}"));
            // It is left out of what external-dns wants, whatever else it wants.
            let mut all = created.create.clone();
            all.push(
                serde_json::from_value(endpoint("y.apps.internal", "A", &["192.0.2.1"])).unwrap(),
            );
            let adjusted = writer.adjust(&all, &known());
            let names: Vec<&str> = adjusted
                .iter()
                .map(|endpoint| endpoint.dns_name.as_str())
                .collect();
            assert_eq!(names, ["y.apps.internal"]);
            assert_eq!(writer.refused, BTreeSet::from([name]));
        }
    }

    #[test]
    fn unchanged_alias_file_stays_unwritten() {
        let lab = Lab::new();
        let mut writer = lab.open();
        assert!(writer.list().unwrap().is_empty());
        let file = lab.path("aliases/external-dns.json");
        assert_eq!(fs::read_to_string(&file).unwrap(), "{}\n");
        let before = fs::metadata(&file).unwrap();
        writer.list().unwrap();
        use std::os::unix::fs::MetadataExt as _;
        assert_eq!(fs::metadata(&file).unwrap().ino(), before.ino());
        fs::write(&file, "{}").unwrap();
        writer.list().unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "{}\n");
        // Files that a killed publisher left are swept.
        for left in [
            "aliases/.external-dns.json.part-abc123",
            ".webhook.json.part-abc123",
        ] {
            fs::write(lab.path(left), "x").unwrap();
            writer.sweep();
            assert!(!lab.path(left).exists(), "{left}");
        }
    }
}
