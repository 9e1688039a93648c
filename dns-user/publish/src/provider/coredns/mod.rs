//! CoreDNS, which answers from keys in etcd (plugin `etcd`, in the format of SkyDNS).
//!
//! Keys are read and written through etcd's JSON gateway: the few calls do not justify a gRPC stack. A transaction
//! compares the revisions of all keys of its names, and modifies exact keys only, never a prefix.

mod etcd;

use std::{
    any::Any,
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use dns_kit::foreign::{printable, redacted_text};
use futures_util::future::BoxFuture;

use self::etcd::{Etcd, EtcdKey, Pair, Service, Txn, key_of, name_of};
use super::{
    Batch, Definition, GroupSender, Parameter, ParameterKind::Text, Parameters, Progress, Provider,
    ProviderError, ProviderSettings, Results, Step, TlsFiles, Transaction, TransactionResult, Zone,
    definition::shared_root, send_groups, settings, unfit,
};
use crate::record::{Key, Name, Record, RecordType};

/// Maximum number of operations, and of comparisons, in a transaction: etcd's default of `--max-txn-ops`.
const MAX_OPERATIONS: usize = 128;

/// Property that holds CoreDNS's group.
const GROUP: &str = "coredns/group";

/// Types that the format can represent.
const HELD: [RecordType; 5] = [
    RecordType::A,
    RecordType::AAAA,
    RecordType::CNAME,
    RecordType::PTR,
    RecordType::TXT,
];

pub(super) const DEFINITION: Definition = Definition {
    parameters: &[Parameter::new("coredns-prefix", Text)],
    settings: &[
        "coredns-strictly-owned",
        "etcd-password",
        "etcd-urls",
        "etcd-username",
    ],
    environment: &[
        ("ETCD_URLS", "etcd-urls"),
        ("ETCD_USERNAME", "etcd-username"),
        ("ETCD_PASSWORD", "etcd-password"),
    ],
    ..Definition::new("coredns", |parameters| {
        Ok(Box::new(CoreDnsSettings::from_parameters(parameters)?))
    })
};

/// Settings of one etcd cluster.
#[derive(Debug, Clone)]
pub struct CoreDnsSettings {
    /// URLs of the members; the first reachable one is used.
    pub urls: Vec<String>,
    /// First component of all keys, which begin with `/<prefix>/`.
    pub prefix: String,
    /// User name and password for etcd.
    pub user: Option<(String, String)>,
    /// Owner label to write into values. If set, keys of other owners are not listed.
    pub strict_owner: Option<String>,
    /// Certificates for the connection to etcd.
    pub files: TlsFiles,
    /// Timeout of a response.
    pub timeout: Duration,
}

impl CoreDnsSettings {
    /// Parses the parameters `coredns-prefix`, `coredns-strictly-owned`, `etcd-urls`,
    /// `etcd-username`, `etcd-password` and `tls-*`.
    pub fn from_parameters(parameters: &Parameters) -> Result<Self, ProviderError> {
        let mut urls = Vec::new();
        for url in parameters.list("etcd-urls") {
            if !url.starts_with("http://") && !url.starts_with("https://") {
                return Err(settings(format!(
                    "etcd-urls has {:?}; write http://host:2379 or https://host:2379",
                    redacted_text(url)
                )));
            }
            urls.push(url.trim_end_matches('/').to_owned());
        }
        if urls.is_empty() {
            // etcd's default, which external-dns has as well.
            urls.push("http://localhost:2379".to_owned());
        }
        let prefix = parameters
            .text("coredns-prefix")
            .unwrap_or("skydns")
            .trim_matches('/');
        let user = parameters.pair("etcd-username", "etcd-password")?;
        let mut strict_owner = None;
        if parameters.flag("coredns-strictly-owned")? {
            let owner = parameters.text("txt-owner-id").unwrap_or("default");
            strict_owner = Some(owner.to_owned());
        }
        Ok(Self {
            urls,
            prefix: match prefix {
                // CoreDNS with `path /`: the first labels are at the top.
                "" => "/".to_owned(),
                prefix => format!("/{prefix}/"),
            },
            user,
            strict_owner,
            files: TlsFiles::from_parameters(parameters)?,
            timeout: Duration::from_secs(10),
        })
    }
}

impl ProviderSettings for CoreDnsSettings {
    fn open(self: Box<Self>) -> Result<Box<dyn Provider>, ProviderError> {
        Ok(Box::new(CoreDns::new(*self)?))
    }

    fn shared_zones(&self, other: &dyn Any) -> Vec<Name> {
        // The same keys: a member in common, and the same prefix.
        shared_root(self, other, |one, other| {
            one.prefix == other.prefix && one.urls.iter().any(|url| other.urls.contains(url))
        })
    }
}

/// Provider for one etcd cluster.
pub struct CoreDns {
    settings: CoreDnsSettings,
    etcd: Etcd,
    listed: Listed,
}

#[derive(Default)]
struct Listed {
    revision: i64,
    sets: HashMap<Key, Vec<EtcdKey>>,
    /// Values of keys that hold records, with the revision of each.
    services: HashMap<EtcdKey, (i64, Service)>,
}

impl Listed {
    fn add(
        &mut self,
        name: &Name,
        pair: Pair,
        service: Service,
        records: &mut BTreeMap<Key, Record>,
    ) {
        // A and AAAA are two sets. External-dns lists them as one, and changes it in every run.
        for (record_type, target) in service.records(name) {
            let mut record = Record {
                ttl: service.ttl,
                ..Record::new(name.clone(), record_type, [])
            };
            if let Some(group) = &service.group {
                record.set_property(GROUP, group);
            }
            let key = record.key();
            let sets = self.sets.entry(key.clone()).or_default();
            // One value may belong to two sets, of its host and of its text.
            sets.push(pair.key.clone());
            records.entry(key).or_insert(record).targets.insert(target);
        }
        self.services.insert(pair.key, (pair.mod_revision, service));
    }
}

impl CoreDns {
    /// Creates a provider without sending a request.
    pub fn new(settings: CoreDnsSettings) -> Result<Self, ProviderError> {
        let etcd = Etcd::new(&settings)?;
        Ok(Self {
            settings,
            etcd,
            listed: Listed::default(),
        })
    }

    async fn list_keys(&mut self) -> Result<Zone, ProviderError> {
        let prefix = self.settings.prefix.clone();
        let (revision, pairs) = self.etcd.range(&prefix).await?;
        let mut listed = Listed {
            revision,
            ..Listed::default()
        };
        let mut records: BTreeMap<Key, Record> = BTreeMap::new();
        let mut warnings = Vec::new();
        for pair in pairs {
            let key = String::from_utf8_lossy(&pair.key);
            let service = match Service::read(&pair.value) {
                Ok(service) => service,
                // External-dns exits at such a value.
                Err(error) => {
                    warnings.push(printable(&format!(
                        "etcd key {key} left unchanged: its value is not JSON ({error})"
                    )));
                    continue;
                }
            };
            let strict_owner = &self.settings.strict_owner;
            // As external-dns with `--coredns-strictly-owned`.
            if strict_owner.is_some() && service.owner != *strict_owner {
                continue;
            }
            let Some(name) = name_of(&prefix, &pair.key, service.targetstrip) else {
                warnings.push(printable(&format!(
                    "etcd key {key} left unchanged: it contains no domain name"
                )));
                continue;
            };
            listed.add(&name, pair, service, &mut records);
        }
        self.listed = listed;
        // The names of all zones share one tree.
        Ok(Zone {
            id: prefix,
            content: Ok(records.into_values().collect()),
            warnings,
            ..Zone::of(Name::root())
        })
    }

    async fn apply_all(&mut self, batch: &Batch, progress: Progress<'_>) -> Vec<TransactionResult> {
        // The comparison of a name covers the keys below it, so shorter names are written first.
        let mut order: Vec<usize> = (0..batch.transactions.len()).collect();
        order.sort_by_key(|place| batch.transactions[*place].name.labels().count());
        let mut converted = Vec::with_capacity(order.len());
        for place in &order {
            let txn = self.convert(&batch.transactions[*place]);
            converted.push(txn.map_err(TransactionResult::Failed));
        }
        let sent = send_groups(&mut self.etcd, converted, batch.on_conflict, progress).await;
        // Each place is overwritten: `send_groups` returns a result for each transaction.
        let mut results = vec![TransactionResult::Conflict; order.len()];
        for (place, result) in order.into_iter().zip(sent) {
            results[place] = result;
        }
        results
    }

    /// Converts a transaction to comparisons and operations on keys.
    fn convert(&self, transaction: &Transaction) -> Result<Txn, ProviderError> {
        let mut edits = BTreeMap::new();
        let mut txn = Txn::default();
        let mut names: Vec<&Name> = Vec::new();
        for step in &transaction.steps {
            let (name, before, after) = match step {
                Step::Require(record) => (&record.name, Some(record), None),
                // The comparison of the name's keys below covers it.
                Step::RequireAbsent(name, _) => (name, None, None),
                Step::Create(record) => (&record.name, None, Some(record)),
                Step::Delete(record) => (&record.name, Some(record), None),
                Step::Replace { before, after } => (&before.name, Some(before), Some(after)),
            };
            // A second comparison of one name would only use up the limit.
            if !names.contains(&name) {
                names.push(name);
            }
            if step.is_change() {
                self.edit(&mut edits, before, after)?;
            }
            for key in self.keys_of(before) {
                if let Some((revision, _)) = self.listed.services.get(key) {
                    txn.compare_revision(key, *revision);
                }
            }
        }
        for name in names {
            let directory = key_of(&self.settings.prefix, name);
            // Against the revision of the listing: keys that another writer has added have none
            // that could be compared.
            txn.compare_unchanged(&directory, self.listed.revision);
        }
        for (key, service) in edits {
            // A value without host and text answers nothing.
            if service.is_empty() {
                txn.write(&key, None);
            } else {
                let value = serde_json::to_vec(&service).unwrap_or_default();
                txn.write(&key, Some(&value));
            }
        }
        if txn.compare.len() > MAX_OPERATIONS || txn.operations.len() > MAX_OPERATIONS {
            let reason = format!(
                "its change exceeds etcd's limit of {MAX_OPERATIONS} operations; use fewer targets"
            );
            return Err(unfit(&transaction.name, reason));
        }
        Ok(txn)
    }

    /// Changes the keys of a set; keys of unchanged targets are kept.
    fn edit(
        &self,
        edits: &mut BTreeMap<EtcdKey, Service>,
        before: Option<&Record>,
        after: Option<&Record>,
    ) -> Result<(), ProviderError> {
        let mut wanted = match after {
            Some(after) => self.services(after)?,
            None => Vec::new(),
        };
        let record_type = before.map_or(RecordType::A, |before| before.record_type);
        for key in self.keys_of(before) {
            let Some((_, listed)) = self.listed.services.get(key) else {
                continue;
            };
            // An earlier step may have changed the host of the value, and this one its text.
            let current = edits.get(key).unwrap_or(listed).clone();
            let same = wanted
                .iter()
                .position(|(_, service)| listed.has_target_of(service, record_type));
            let edited = match same {
                Some(index) => {
                    let (_, service) = wanted.swap_remove(index);
                    Service {
                        ttl: service.ttl,
                        group: service.group,
                        ..current
                    }
                }
                None => current.without(record_type),
            };
            // A key that is not written cannot conflict with another writer.
            if edited == *listed {
                edits.remove(key);
            } else {
                edits.insert(key.clone(), edited);
            }
        }
        for (key, service) in wanted {
            edits.insert(key, service);
        }
        Ok(())
    }

    /// Returns the keys of a listed set.
    fn keys_of(&self, set: Option<&Record>) -> &[EtcdKey] {
        match set.and_then(|set| self.listed.sets.get(&set.key())) {
            Some(keys) => keys,
            None => &[],
        }
    }

    fn services(&self, record: &Record) -> Result<Vec<(EtcdKey, Service)>, ProviderError> {
        if !HELD.contains(&record.record_type) {
            let reason = format!(
                "CoreDNS's etcd format has no records of type {}",
                record.record_type
            );
            return Err(unfit(&record.name, reason));
        }
        let directory = key_of(&self.settings.prefix, &record.name);
        // External-dns writes a label with a slash as two.
        if name_of(&self.settings.prefix, &directory, 0).as_ref() != Some(&record.name) {
            let reason = "a slash within a label would divide it in CoreDNS's etcd format; choose another name";
            return Err(unfit(&record.name, reason));
        }
        let is_pointer = record.record_type == RecordType::PTR;
        // The key of a pointer is the name itself, which has one value.
        let targets = if is_pointer { 1 } else { usize::MAX };
        let mut services = Vec::new();
        for target in record.targets.iter().take(targets) {
            // As external-dns does: each target has a separate key below the name, which `targetstrip` cuts off.
            let mut key = directory.clone();
            if !is_pointer {
                // Two targets of one name hardly ever get the same number; if they do, the next
                // listing lacks one of them, and it is written again.
                key.extend(format!("/{:08x}", fastrand::u32(..)).bytes());
            }
            let service = Service {
                ttl: record.ttl,
                targetstrip: u32::from(!is_pointer),
                group: record.properties.get(GROUP).cloned(),
                owner: self.settings.strict_owner.clone(),
                ..Service::of(record.record_type, target)
            };
            services.push((key, service));
        }
        Ok(services)
    }
}

impl Provider for CoreDns {
    fn adjust(&self, desired: &mut Vec<Record>) {
        for record in desired {
            // Properties that a value cannot hold would differ from the listed set in every round.
            record.properties.retain(|name, _| name == GROUP);
        }
    }

    fn list(&mut self) -> BoxFuture<'_, Result<Vec<Zone>, ProviderError>> {
        Box::pin(async { Ok(vec![self.list_keys().await?]) })
    }

    fn apply<'a>(&'a mut self, batch: &'a Batch, progress: Progress<'a>) -> Results<'a> {
        Box::pin(self.apply_all(batch, progress))
    }
}

/// As many transactions as fit are sent in one etcd transaction.
impl GroupSender for Etcd {
    type Item = Txn;

    fn fitting(&self, transactions: &[Txn]) -> usize {
        let mut comparisons = 0;
        let mut operations = 0;
        transactions
            .iter()
            .take_while(|txn| {
                comparisons += txn.compare.len();
                operations += txn.operations.len();
                comparisons <= MAX_OPERATIONS && operations <= MAX_OPERATIONS
            })
            .count()
    }

    async fn send(&mut self, groups: &[&[Txn]]) -> Vec<TransactionResult> {
        vec![match self.txn(groups[0]).await {
            Ok(true) => TransactionResult::Applied,
            Ok(false) => TransactionResult::Conflict,
            Err(error) => TransactionResult::Failed(error),
        }]
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// Returns a transaction with numbers of comparisons and of operations.
    fn txn((comparisons, operations): (usize, usize)) -> Txn {
        Txn {
            compare: vec![Value::Null; comparisons],
            operations: vec![Value::Null; operations],
        }
    }

    #[test]
    fn transactions_are_joined_up_to_etcds_limit() {
        let settings = CoreDnsSettings::from_parameters(&Parameters::default()).unwrap();
        let etcd = Etcd::new(&settings).unwrap();
        for (sizes, expected) in [
            ([(64, 1), (64, 1), (1, 1)], 2),
            ([(1, 64), (1, 64), (1, 1)], 2),
            ([(64, 1), (65, 1), (1, 1)], 1),
            ([(1, 64), (1, 65), (1, 1)], 1),
            ([(42, 42), (43, 43), (43, 43)], 3),
        ] {
            assert_eq!(etcd.fitting(&sizes.map(txn)), expected, "{sizes:?}");
        }
    }

    #[test]
    fn a_change_may_fill_etcds_limit() {
        let settings = CoreDnsSettings::from_parameters(&Parameters::default()).unwrap();
        let provider = CoreDns::new(settings).unwrap();
        for (count, fits) in [(MAX_OPERATIONS, true), (MAX_OPERATIONS + 1, false)] {
            let targets: Vec<String> = (0..count).map(|host| format!("10.0.0.{host}")).collect();
            let targets = targets.iter().map(String::as_str);
            let record = Record::parse("a.example.org", RecordType::A, targets).unwrap();
            let transaction = Transaction {
                name: record.name.clone(),
                steps: vec![Step::Create(record)],
            };
            let converted = provider.convert(&transaction);
            assert_eq!(converted.is_ok(), fits, "{count} targets");
        }
    }

    fn settings_of(pairs: &[(&str, &str)]) -> Result<CoreDnsSettings, String> {
        let mut parameters = Parameters::default();
        for (name, value) in pairs {
            parameters.0.insert((*name).to_owned(), (*value).to_owned());
        }
        CoreDnsSettings::from_parameters(&parameters).map_err(|error| error.to_string())
    }

    #[test]
    fn settings_are_read_from_parameters() {
        let usual = settings_of(&[]).unwrap();
        assert_eq!(usual.urls, ["http://localhost:2379"]);
        assert_eq!((usual.prefix.as_str(), usual.user), ("/skydns/", None));
        assert_eq!(
            (usual.strict_owner, usual.timeout),
            (None, Duration::from_secs(10))
        );
        let given = settings_of(&[
            ("etcd-urls", "http://a:1/, https://b:2"),
            ("coredns-prefix", "/x/y/"),
            ("etcd-username", "u"),
            ("etcd-password", "p"),
            ("coredns-strictly-owned", "true"),
            ("txt-owner-id", "me"),
        ])
        .unwrap();
        assert_eq!(given.urls, ["http://a:1", "https://b:2"]);
        assert_eq!(given.prefix, "/x/y/");
        let top = settings_of(&[("coredns-prefix", "/")]).unwrap();
        assert_eq!(top.prefix, "/");
        assert_eq!(given.user, Some(("u".to_owned(), "p".to_owned())));
        assert_eq!(given.strict_owner.as_deref(), Some("me"));
        let strict = settings_of(&[("coredns-strictly-owned", "true")]).unwrap();
        assert_eq!(strict.strict_owner.as_deref(), Some("default"));
        for (given, expected) in [
            (
                ("etcd-urls", "ftp://a:1"),
                "etcd-urls has \"ftp://a:1\"; write http://host:2379 or https://host:2379",
            ),
            (
                ("etcd-urls", "a:1"),
                "etcd-urls has \"a:1\"; write http://host:2379 or https://host:2379",
            ),
            (
                ("etcd-username", "u"),
                "etcd-username and etcd-password require each other; set both or neither",
            ),
        ] {
            assert_eq!(settings_of(&[given]).unwrap_err(), expected);
        }
    }

    /// Returns a provider that has listed these keys, all at revision 7 of a store at 9.
    fn listing(pairs: &[(&str, &str)]) -> (CoreDns, Vec<Record>) {
        let mut provider = CoreDns::new(settings_of(&[]).unwrap()).unwrap();
        let mut records = BTreeMap::new();
        let mut listed = Listed {
            revision: 9,
            ..Listed::default()
        };
        for (key, value) in pairs {
            let key = format!("/skydns/{key}").into_bytes();
            let service = Service::read(value.as_bytes()).unwrap();
            let name = name_of("/skydns/", &key, service.targetstrip).unwrap();
            let pair = Pair {
                key,
                value: Vec::new(),
                mod_revision: 7,
            };
            listed.add(&name, pair, service, &mut records);
        }
        provider.listed = listed;
        (provider, records.into_values().collect())
    }

    /// Returns the operations of steps as lines, with stars for random numbers.
    fn operations(provider: &CoreDns, steps: Vec<Step>) -> Result<(usize, Vec<String>), String> {
        use base64::{Engine as _, engine::general_purpose::STANDARD};
        let name = Name::parse("a.example.org").unwrap();
        let converted = provider.convert(&Transaction { name, steps });
        let txn = converted.map_err(|error| error.to_string())?;
        let decoded = |value: &Value| {
            let octets = STANDARD.decode(value.as_str().unwrap()).unwrap();
            String::from_utf8(octets).unwrap()
        };
        let mut lines = Vec::new();
        for operation in &txn.operations {
            let put = &operation["request_put"];
            lines.push(if put.is_null() {
                format!("- {}", decoded(&operation["request_delete_range"]["key"]))
            } else {
                let key = decoded(&put["key"]);
                let key = match key.rsplit_once('/') {
                    Some((directory, number)) if number.len() == 8 => format!("{directory}/*"),
                    _ => key,
                };
                format!("{key} {}", decoded(&put["value"]))
            });
        }
        Ok((txn.compare.len(), lines))
    }

    fn set(line: &str) -> Record {
        let words: Vec<&str> = line.splitn(3, ' ').collect();
        let record_type: RecordType = words[1].parse().unwrap();
        Record::parse(words[0], record_type, words[2].split('|')).unwrap()
    }

    #[test]
    fn values_become_record_sets() {
        let (_, records) = listing(&[
            (
                "org/example/a/1",
                r#"{"host": "192.0.2.1", "ttl": 60, "targetstrip": 1}"#,
            ),
            (
                "org/example/a/2",
                r#"{"host": "192.0.2.2", "ttl": 90, "targetstrip": 1}"#,
            ),
            (
                "org/example/a/3",
                r#"{"host": "2001:db8::1", "targetstrip": 1, "group": "g"}"#,
            ),
            ("org/example/b", r#"{"host": "c.example.org", "text": "x"}"#),
            ("arpa/in-addr/192/0/2/1", r#"{"host": "a.example.org"}"#),
        ]);
        let lines: Vec<String> = records
            .iter()
            .map(|record| format!("{record} {}", record.property(GROUP)))
            .collect();
        assert_eq!(
            lines,
            [
                "1.2.0.192.in-addr.arpa 0 PTR a.example.org ",
                "a.example.org 60 A 192.0.2.1,192.0.2.2 ",
                "a.example.org 0 AAAA 2001:db8::1 g",
                "b.example.org 0 CNAME c.example.org ",
                "b.example.org 0 TXT x ",
            ]
        );
    }

    #[test]
    fn targets_have_own_keys() {
        let (provider, _) = listing(&[]);
        let mut created = set("a.example.org A 192.0.2.1|192.0.2.2");
        created.ttl = Some(60);
        created.set_property(GROUP, "g");
        let key = "/skydns/org/example/a/*";
        assert_eq!(
            operations(&provider, vec![Step::Create(created)])
                .unwrap()
                .1
                .len(),
            2
        );
        let one = Record {
            ttl: Some(60),
            ..set("a.example.org CNAME b.example.org")
        };
        assert_eq!(
            operations(&provider, vec![Step::Create(one)]),
            Ok((
                2,
                vec![format!(
                    "{key} {{\"host\":\"b.example.org\",\"ttl\":60,\"targetstrip\":1}}"
                )]
            ))
        );
        // A pointer's key is the name itself, which has one value.
        assert_eq!(
            operations(
                &provider,
                vec![Step::Create(set(
                    "1.2.0.192.in-addr.arpa PTR a.example.org|b.example.org"
                ))]
            ),
            Ok((
                2,
                vec!["/skydns/arpa/in-addr/192/0/2/1 {\"host\":\"a.example.org\"}".to_owned()]
            ))
        );
        assert_eq!(
            operations(
                &provider,
                vec![Step::Create(set("a.example.org MX 10 m.example.org"))]
            )
            .unwrap_err(),
            "a.example.org: CoreDNS's etcd format has no records of type MX"
        );
        assert_eq!(
            operations(
                &provider,
                vec![Step::Create(set("a/b.example.org A 192.0.2.1"))]
            )
            .unwrap_err(),
            "a/b.example.org: a slash within a label would divide it in CoreDNS's etcd format; choose another name"
        );
    }

    #[test]
    fn changes_keep_unconcerned_values() {
        let (provider, _) = listing(&[
            (
                "org/example/a/1",
                r#"{"host": "192.0.2.1", "targetstrip": 1, "priority": 5}"#,
            ),
            (
                "org/example/a/2",
                r#"{"host": "192.0.2.2", "text": "t", "targetstrip": 1}"#,
            ),
        ]);
        let listed = set("a.example.org A 192.0.2.1|192.0.2.2");
        // Two comparisons of the directory, and one of each listed key.
        assert_eq!(
            operations(&provider, vec![Step::Require(listed.clone())]),
            Ok((4, vec![]))
        );
        let absent = Step::RequireAbsent(listed.name.clone(), RecordType::CNAME);
        assert_eq!(operations(&provider, vec![absent.clone()]), Ok((2, vec![])));
        assert_eq!(
            operations(&provider, vec![Step::Require(listed.clone()), absent]),
            Ok((4, vec![])),
            "one comparison of a name"
        );
        assert_eq!(
            operations(&provider, vec![Step::Delete(listed.clone())]),
            Ok((
                4,
                vec![
                    "- /skydns/org/example/a/1".to_owned(),
                    "/skydns/org/example/a/2 {\"text\":\"t\",\"targetstrip\":1}".to_owned(),
                ]
            ))
        );
        let mut after = set("a.example.org A 192.0.2.1|192.0.2.3");
        after.ttl = Some(60);
        let replaced = Step::Replace {
            before: listed.clone(),
            after,
        };
        let mut lines = operations(&provider, vec![replaced]).unwrap().1;
        lines.sort();
        assert_eq!(
            lines,
            [
                "/skydns/org/example/a/* {\"host\":\"192.0.2.3\",\"ttl\":60,\"targetstrip\":1}",
                "/skydns/org/example/a/1 {\"host\":\"192.0.2.1\",\"ttl\":60,\"targetstrip\":1,\"priority\":5}",
                "/skydns/org/example/a/2 {\"text\":\"t\",\"targetstrip\":1}",
            ]
        );
        let mut grouped = listed.clone();
        grouped.set_property(GROUP, "g");
        let replaced = Step::Replace {
            before: listed.clone(),
            after: grouped,
        };
        assert_eq!(
            operations(&provider, vec![replaced]).unwrap().1[0],
            "/skydns/org/example/a/1 {\"host\":\"192.0.2.1\",\"targetstrip\":1,\"group\":\"g\",\"priority\":5}"
        );
        // Host and text of one value go in two steps.
        let text = set("a.example.org TXT t");
        let lines = operations(&provider, vec![Step::Delete(listed), Step::Delete(text)])
            .unwrap()
            .1;
        assert_eq!(
            lines,
            ["- /skydns/org/example/a/1", "- /skydns/org/example/a/2"]
        );
    }

    #[test]
    fn properties_keep_the_group_only() {
        let (provider, _) = listing(&[]);
        let mut record = set("a.example.org A 192.0.2.1");
        record.set_property(GROUP, "g");
        record.set_property("aws/weight", "1");
        let mut desired = vec![record];
        provider.adjust(&mut desired);
        let expected = BTreeMap::from([(GROUP.to_owned(), "g".to_owned())]);
        assert_eq!(desired[0].properties, expected);
    }
}
