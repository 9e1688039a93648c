//! Creates engines from DNS Update Records, and finds records that would delete each other's names.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
    sync::Arc,
};

use crate::{
    config::Config,
    deletions::RecentDeletions,
    engine::Engine,
    ownership::{Cipher, Mapper, Registry},
    plan::{PlanRules, Policy},
    provider::{Parameter, Parameters, ProviderError, ProviderKind, ProviderSettings, settings},
    publication::{Publication, Target},
    record::{DomainFilter, Name, RecordError, RecordType, TargetSets, host_sets},
    text::remedy_for_unknown,
    update_record::UpdateRecord,
};

/// Process-wide settings shared by all engines.
#[derive(Clone, Debug)]
pub struct LaunchOptions {
    managed: BTreeSet<RecordType>,
    cipher: Option<Cipher>,
    provider_settings: BTreeMap<String, BTreeMap<String, String>>,
    /// File of the recent deletions of all providers.
    deletions: PathBuf,
}

impl LaunchOptions {
    /// Takes the settings from a configuration, and reads the key file that it names.
    pub fn of(config: &Config) -> Result<Self, ProviderError> {
        let mut cipher = None;
        if let Some(path) = &config.txt_encryption_key {
            let key = fs::read_to_string(path).map_err(|error| {
                settings(format!("{}: cannot be read: {error}", path.display()))
            })?;
            // An editor ends the file with a line break.
            let made = Cipher::new(key.trim());
            cipher = Some(made.map_err(|error| settings(format!("{}: {error}", path.display())))?);
        }
        Ok(Self {
            managed: config.managed.clone(),
            cipher,
            provider_settings: config.provider_settings.clone(),
            deletions: config.store.with_file_name(super::DELETIONS_FILE),
        })
    }
}

/// Creates the engine of a target.
///
/// An error names the provider and the remedy.
pub fn launch(target: &Target, options: &LaunchOptions) -> Result<Engine, ProviderError> {
    // Before anything is opened: neither of the two may publish until one is changed.
    if let Some(rival) = &target.rival {
        return Err(settings(rival.clone()));
    }
    let name = target.name();
    let mut engine = open(&target.record, &name, options)?;
    engine.deletions = RecentDeletions::of_file(&options.deletions, &name);
    if let Err(error) = engine.deletions.read() {
        tracing::warn!(
            file = %options.deletions.display(), provider = name, error,
            "the recent deletions are unknown, so the guard counts from zero; the next deletion replaces the file"
        );
    }
    Ok(engine)
}

/// Creates the engine of a record; `name` is `PROJECT/RECORD`.
fn open(
    record: &UpdateRecord,
    name: &str,
    options: &LaunchOptions,
) -> Result<Engine, ProviderError> {
    // First, because they name the remedy; parsing the settings would stop at the first of them.
    let obstacles = record.obstacles();
    if !obstacles.is_empty() {
        return Err(settings(obstacles.join("; ")));
    }
    let parameters = parameters(record, name, options, environment);
    let mapper = Mapper::new(
        parameters.text("txt-prefix").unwrap_or_default(),
        parameters.text("txt-suffix").unwrap_or_default(),
        parameters
            .text("txt-wildcard-replacement")
            .unwrap_or_default(),
    )
    .map_err(|error| settings(format!("txt-prefix or txt-suffix: {error}")))?;
    let registry = Registry {
        mapper,
        cipher: options.cipher.clone(),
    };
    let rules = rules(&parameters, options)?;
    // Only checked: `fill_targets` uses them, and reports no error.
    default_targets(&parameters)?;
    parameters.flag("force-default-targets")?;
    let definition = record.provider.definition();
    // The default address could be another record's peer, which would get these names.
    if definition.is_peer && parameters.text("webhook-provider-url").is_none() {
        return Err(settings(format!(
            "{} is served by external-dns through its webhook: start it beside the publisher as `{}`, and set \
             webhook-provider-url in provider_settings.{name}, for example http://localhost:8888",
            definition.name,
            crate::render::webhook_command(record).join(" ")
        )));
    }
    let provider = (definition.configure)(&parameters)?.open()?;
    Ok(Engine::new(provider, registry, rules))
}

/// Settings of every provider without a parameter in document 003.
const GENERAL_SETTINGS: &[&str] = &[
    "create-ptr",
    "default-targets",
    "exclude-record-types",
    "force-default-targets",
    "managed-record-types",
    "migrate-from-txt-owner",
    "min-ttl",
    "regex-domain-exclusion",
    "regex-domain-filter",
    "txt-suffix",
    "txt-wildcard-replacement",
];

/// Returns the settings without a parameter of all providers, sorted.
fn known_settings() -> Vec<&'static str> {
    let mut known = GENERAL_SETTINGS.to_vec();
    for provider in ProviderKind::ALL {
        known.extend(provider.definition().settings);
    }
    known.sort_unstable();
    known.dedup();
    known
}

/// Returns the members of `provider_settings` that have no effect, with remedies.
pub fn options_problems(config: &Config, publication: &Publication) -> Vec<String> {
    let mut found = Vec::new();
    let known = known_settings();
    let records: Vec<&str> = publication.targets.keys().map(String::as_str).collect();
    for (name, settings) in &config.provider_settings {
        if !publication.targets.contains_key(name) {
            let remedy = remedy_for_unknown(name, &records);
            found.push(format!(
                "provider_settings.{name}: there is no such DNS Update Record; {remedy}"
            ));
        }
        for setting in settings.keys() {
            if !known.contains(&setting.as_str()) && Parameter::named(setting).is_none() {
                let remedy = remedy_for_unknown(setting, &known);
                found.push(format!(
                    "provider_settings.{name}.{setting}: unknown setting; {remedy}"
                ));
            }
        }
    }
    found
}

/// Fills entries without targets. Without default targets such an entry is a problem.
pub(super) fn fill_targets(publication: &mut Publication, options: &LaunchOptions) {
    for (name, target) in &mut publication.targets {
        // No variable of the environment has default targets.
        let parameters = parameters(&target.record, name, options, |_| None);
        // `open` reports errors.
        let defaults = default_targets(&parameters).unwrap_or_default();
        if defaults.is_empty() && target.untargeted.is_empty() {
            continue;
        }
        // Not shared yet: the workers get their copies later.
        let target = Arc::make_mut(target);
        if !defaults.is_empty() && parameters.flag("force-default-targets").unwrap_or_default() {
            target.clear_targets();
        }
        for (id, name) in target.fill(&defaults) {
            publication.problems.entry(id).or_default().push(format!(
                "{name}: its entry has no target, so its records stay unchanged; add a target, or set \
                 default-targets in provider_settings"
            ));
        }
    }
}

/// Parses `default-targets`: addresses, or one host name.
fn default_targets(parameters: &Parameters) -> Result<TargetSets, ProviderError> {
    let sets = host_sets(parameters.list("default-targets"));
    let sets = sets.map_err(|error| settings(format!("default-targets: {error}")))?;
    sets.ok_or_else(|| {
        settings("default-targets: a host name excludes other targets; name one, or addresses")
    })
}

/// Returns a variable of the process's environment.
fn environment(variable: &str) -> Option<String> {
    std::env::var(variable).ok()
}

/// Returns the settings of a provider. In ascending precedence: the environment,
/// `provider_settings` of the configuration, the record's parameters with their defaults.
fn parameters(
    record: &UpdateRecord,
    name: &str,
    options: &LaunchOptions,
    environment: impl Fn(&str) -> Option<String>,
) -> Parameters {
    let mut all = BTreeMap::new();
    for (variable, setting) in record.provider.definition().environment {
        // An empty variable counts as absent, as for the AWS SDK.
        if let Some(value) = environment(variable)
            && !value.is_empty()
        {
            all.insert((*setting).to_owned(), value);
        }
    }
    if let Some(settings) = options.provider_settings.get(name) {
        all.extend(settings.clone());
    }
    all.extend(record.parameters.texts().0);
    Parameters(all)
}

fn rules(parameters: &Parameters, options: &LaunchOptions) -> Result<PlanRules, ProviderError> {
    let owner = match parameters.text("registry") {
        // Without ownership, records are only created.
        Some("noop") => "",
        _ => parameters.text("txt-owner-id").unwrap_or_default(),
    };
    let include = parameters.list("domain-filter");
    let exclude = parameters.list("exclude-domains");
    let domains = DomainFilter::new(include, exclude)
        .map_err(|error| settings(format!("domain-filter or exclude-domains: {error}")))?
        .with_patterns(
            parameters.text("regex-domain-filter"),
            parameters.text("regex-domain-exclusion"),
        )
        .map_err(|error| {
            settings(format!(
                "regex-domain-filter or regex-domain-exclusion: {error}"
            ))
        })?;
    let mut managed = record_types(parameters, "managed-record-types")?;
    if managed.is_empty() {
        managed.clone_from(&options.managed);
    }
    let creates_pointers = parameters.flag("create-ptr")?;
    if creates_pointers {
        managed.insert(RecordType::PTR);
    }
    // Exclusion wins, as with domains.
    for excluded in record_types(parameters, "exclude-record-types")? {
        managed.remove(&excluded);
    }
    let policy = parameters.text("policy").unwrap_or("sync");
    let policy = Policy::named(policy).ok_or_else(|| {
        settings(format!(
            "policy: unknown policy {policy:?}; use sync, upsert-only or create-only"
        ))
    })?;
    Ok(PlanRules {
        policy,
        owner: owner.to_owned(),
        managed,
        domains,
        migrate_from: parameters.text("migrate-from-txt-owner").map(str::to_owned),
        min_ttl: parameters.ttl("min-ttl")?,
        creates_pointers,
    })
}

fn record_types(
    parameters: &Parameters,
    name: &str,
) -> Result<BTreeSet<RecordType>, ProviderError> {
    let mut types = BTreeSet::new();
    for word in parameters.list(name) {
        let parsed: Result<_, RecordError> = word.parse();
        types.insert(parsed.map_err(|error| settings(format!("{name}: {error}")))?);
    }
    Ok(types)
}

/// The names that a publisher deletes unless documents want them: all of its owner in the zones that its settings
/// select.
struct Claim {
    settings: Box<dyn ProviderSettings>,
    /// Names of owner records: without the same ones, neither sees records of the other as its own.
    affixes: [String; 2],
    rules: PlanRules,
}

impl Claim {
    /// Returns `None` for a record that never deletes, or that cannot be launched.
    fn of(record: &UpdateRecord, name: &str, options: &LaunchOptions) -> Option<Self> {
        let parameters = parameters(record, name, options, environment);
        let rules = rules(&parameters, options).ok()?;
        // Without an owner nothing is ever deleted (`registry: noop`).
        if rules.owner.is_empty() {
            return None;
        }
        Some(Self {
            // `open` reports errors, and without settings nothing is deleted.
            settings: (record.provider.definition().configure)(&parameters).ok()?,
            affixes: ["txt-prefix", "txt-suffix"]
                .map(|name| parameters.text(name).unwrap_or_default().to_owned()),
            rules,
        })
    }

    /// Returns the zone, if any, in which both would delete the other's names.
    fn shared_zone(&self, other: &Self) -> Option<Name> {
        // One of the two is enough: it deletes the names of the other, which creates them again.
        let deletes = self.rules.policy == Policy::Sync || other.rules.policy == Policy::Sync;
        let is_same_owner = self.rules.owner == other.rules.owner && self.affixes == other.affixes;
        if !deletes || !is_same_owner {
            return None;
        }
        let zones = self.settings.shared_zones(&*other.settings);
        zones.into_iter().find(|zone| {
            let shared = std::slice::from_ref(zone);
            self.rules.domains.overlaps(&other.rules.domains, shared)
        })
    }
}

/// Marks targets with the same owner in the same zone, each of which would delete the names of the
/// other: neither is published until one has another owner or other domains.
pub(super) fn mark_rivals(publication: &mut Publication, options: &LaunchOptions) {
    let mut claims: Vec<(String, Claim)> = Vec::new();
    for (name, target) in &publication.targets {
        if let Some(claim) = Claim::of(&target.record, name, options) {
            claims.push((name.clone(), claim));
        }
    }
    for (name, claim) in &claims {
        let Some((other, zone)) = rival(&claims, name, claim) else {
            continue;
        };
        let place = if zone.is_root() {
            "the same zones".to_owned()
        } else {
            format!("zone {zone}")
        };
        let problem = format!(
            "it has the same txt-owner-id {:?} in {place} as DNS Update Record {other}, so each would delete the \
             other's names; give each its own txt-owner-id, or a domain-filter that excludes the other's names",
            claim.rules.owner
        );
        if let Some(target) = publication.targets.get_mut(name) {
            Arc::make_mut(target).rival = Some(problem);
        }
    }
}

/// Returns the first other claim on the same names, and the zone.
fn rival<'a>(claims: &'a [(String, Claim)], name: &str, claim: &Claim) -> Option<(&'a str, Name)> {
    for (other, rival) in claims {
        if other != name
            && let Some(zone) = claim.shared_zone(rival)
        {
            return Some((other, zone));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        config::Config,
        text::{Problems, Reader, documents, parse},
    };

    fn record(parameters: Value) -> UpdateRecord {
        let spec = json!({"provider": "coredns", "external-dns-parameters": parameters});
        let body = json!({"metadata": {"name": "r"}, "spec": spec}).to_string();
        let problems = Problems::of("body");
        let node = parse(documents(&body)[0], &problems).unwrap();
        UpdateRecord::read(&mut Reader::root(&node, &problems).fields().unwrap()).unwrap()
    }

    fn options(settings: &[(&str, &str)]) -> LaunchOptions {
        let settings = settings
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let provider_settings = BTreeMap::from([("shop/r".to_owned(), settings.collect())]);
        LaunchOptions::of(&Config {
            provider_settings,
            ..Config::default()
        })
        .unwrap()
    }

    #[test]
    fn record_wins_over_configuration() {
        let record = record(json!({"txt-owner-id": "me", "once": true}));
        let options = options(&[
            ("etcd-urls", "http://etcd:2379"),
            ("txt-owner-id", "other"),
            ("txt-suffix", "-own"),
        ]);
        let environment = |name: &str| match name {
            "ETCD_URLS" => Some("http://elsewhere:2379".to_owned()),
            "ETCD_USERNAME" => Some("user".to_owned()),
            _ => None,
        };
        let all = parameters(&record, "shop/r", &options, environment);
        for (name, value) in [
            ("etcd-urls", "http://etcd:2379"),
            ("etcd-username", "user"),
            ("txt-owner-id", "me"),
            ("txt-suffix", "-own"),
            ("policy", "sync"),
            ("once", "true"),
        ] {
            assert_eq!(all.text(name), Some(value), "{name}");
        }
        let other = parameters(&record, "shop/other", &options, |_| None);
        assert_eq!(
            (other.text("etcd-urls"), other.text("txt-suffix")),
            (None, None)
        );
    }

    #[test]
    fn rules_follow_parameters() {
        let more = [
            ("migrate-from-txt-owner", "old"),
            ("create-ptr", "true"),
            ("managed-record-types", "A, AAAA, MX"),
            ("exclude-record-types", "AAAA"),
        ];
        let options = options(&more);
        let engine = |parameters| open(&record(parameters), "shop/r", &options);
        let rules = engine(
            json!({"policy": "upsert-only", "domain-filter": "example.org, example.net",
            "exclude-domains": "x.example.org", "txt-owner-id": "me"}),
        )
        .unwrap()
        .rules;
        assert_eq!(
            (rules.owner.as_str(), rules.migrate_from.as_deref()),
            ("me", Some("old"))
        );
        assert_eq!(
            rules.managed,
            BTreeSet::from([RecordType::A, RecordType::MX, RecordType::PTR])
        );
        let matches = |name: &str| rules.domains.matches(&Name::parse(name).unwrap());
        assert!(
            matches("a.example.net") && !matches("a.x.example.org") && !matches("a.example.com")
        );
        assert_eq!(engine(json!({"registry": "noop"})).unwrap().rules.owner, "");
        let refused = engine(json!({"txt-prefix": "a..b"}))
            .err()
            .unwrap()
            .to_string();
        assert!(
            refused.starts_with("txt-prefix or txt-suffix: "),
            "{refused}"
        );
    }

    #[test]
    fn bad_key_file_is_named() {
        let config = Config {
            txt_encryption_key: Some("/nowhere/key".into()),
            ..Config::default()
        };
        assert!(
            LaunchOptions::of(&config)
                .unwrap_err()
                .to_string()
                .starts_with("/nowhere/key: cannot be read")
        );
    }

    /// Returns whether two records with the same owner are rivals.
    fn are_rivals(provider: &str, one: &Value, other: &Value) -> bool {
        let mut config = Config::default();
        let claim = |name: &str, parameters: &Value, config: &mut Config| {
            let mut document = serde_json::Map::new();
            let mut settings = BTreeMap::new();
            for (parameter, value) in parameters.as_object().unwrap() {
                if Parameter::named(parameter).is_some() {
                    document.insert(parameter.clone(), value.clone());
                } else {
                    settings.insert(parameter.clone(), value.as_str().unwrap().to_owned());
                }
            }
            document.insert("txt-owner-id".to_owned(), "me".into());
            config.provider_settings.insert(name.to_owned(), settings);
            let spec = json!({"provider": provider, "external-dns-parameters": document});
            let body = json!({"metadata": {"name": "r"}, "spec": spec}).to_string();
            let problems = Problems::of("body");
            let node = parse(documents(&body)[0], &problems).unwrap();
            let record = UpdateRecord::read(&mut Reader::root(&node, &problems).fields().unwrap());
            record.unwrap_or_else(|| panic!("{body}: {:?}", problems.into_vec()))
        };
        let records = [("shop/a", one), ("shop/b", other)]
            .map(|(name, parameters)| (name, claim(name, parameters, &mut config)));
        let options = LaunchOptions::of(&config).unwrap();
        let [one, other] = records.map(|(name, record)| {
            Claim::of(&record, name, &options).unwrap_or_else(|| panic!("{name} has no claim"))
        });
        let found = one.shared_zone(&other).is_some();
        assert_eq!(other.shared_zone(&one).is_some(), found, "it is mutual");
        found
    }

    #[test]
    fn zones_that_settings_tell_apart_are_not_claimed_twice() {
        let role = |account: &str, name: &str| json!({"aws-assume-role": format!("arn:aws:iam::{account}:role/{name}")});
        let here = "111111111111";
        let there = "222222222222";
        for (one, other, expected) in [
            (json!({}), json!({}), true),
            // The commonest split horizon: a public and a private zone of one domain.
            (
                json!({"aws-zone-type": "public"}),
                json!({"aws-zone-type": "private"}),
                false,
            ),
            (json!({"aws-zone-type": "public"}), json!({}), true),
            (
                json!({"zone-id-filter": "Z1,Z2"}),
                json!({"zone-id-filter": "Z3"}),
                false,
            ),
            (
                json!({"zone-id-filter": "Z1,Z2"}),
                json!({"zone-id-filter": "/hostedzone/Z2"}),
                true,
            ),
            (
                json!({"zone-id-filter": "XZ1"}),
                json!({"zone-id-filter": "Z1"}),
                true,
            ),
            (
                json!({"aws-profile": "blue"}),
                json!({"aws-profile": "green"}),
                false,
            ),
            (
                json!({"aws-profile": "blue"}),
                json!({"aws-profile": "blue"}),
                true,
            ),
            (
                json!({"aws-zone-tags": "env=a"}),
                json!({"aws-zone-tags": "env=b"}),
                false,
            ),
            (
                json!({"aws-zone-tags": "env=a,x"}),
                json!({"aws-zone-tags": "env,team=b"}),
                true,
            ),
            (role(here, "dns"), role(there, "dns"), false),
            (role(here, "dns"), role(here, "other"), true),
            (role(here, "dns"), json!({}), false),
            (
                json!({"aws-region": "eu-west-1"}),
                json!({"aws-region": "cn-north-1"}),
                false,
            ),
            (
                json!({"aws-region": "eu-west-1"}),
                json!({"aws-region": "us-east-1"}),
                true,
            ),
            (
                json!({"domain-filter": "a.org"}),
                json!({"domain-filter": "b.org"}),
                false,
            ),
            (
                json!({"txt-prefix": "a-"}),
                json!({"txt-prefix": "b-"}),
                false,
            ),
            (json!({"zone-id-filter": "Z1"}), json!({}), true),
            (
                json!({"policy": "upsert-only"}),
                json!({"policy": "upsert-only"}),
                false,
            ),
            (
                json!({"policy": "upsert-only"}),
                json!({"policy": "sync"}),
                true,
            ),
        ] {
            assert_eq!(are_rivals("aws", &one, &other), expected, "{one} {other}");
        }
    }

    #[test]
    fn every_provider_knows_its_zones() {
        let bind = |host: &str, zone: &str| json!({"rfc2136-host": host, "rfc2136-zone": zone, "rfc2136-insecure": true});
        for (one, other, expected) in [
            (bind("a", "x.org,y.org"), bind("a:53", "y.org,z.org"), true),
            (bind("a", "x.org"), bind("a", "y.org"), false),
            (bind("a", "x.org"), bind("a:54", "x.org"), false),
            (bind("a,b", "x.org"), bind("B", "X.org."), true),
        ] {
            assert_eq!(
                are_rivals("rfc2136", &one, &other),
                expected,
                "{one} {other}"
            );
        }
        for (one, other, expected) in [
            (json!({}), json!({}), true),
            (
                json!({"coredns-prefix": "/a"}),
                json!({"coredns-prefix": "a/"}),
                true,
            ),
            (
                json!({"coredns-prefix": "a"}),
                json!({"coredns-prefix": "b"}),
                false,
            ),
            (
                json!({"etcd-urls": "http://a:1,http://b:1"}),
                json!({"etcd-urls": "http://b:1/"}),
                true,
            ),
            (
                json!({"etcd-urls": "http://a:1"}),
                json!({"etcd-urls": "http://b:1"}),
                false,
            ),
        ] {
            assert_eq!(
                are_rivals("coredns", &one, &other),
                expected,
                "{one} {other}"
            );
        }
        for provider in ["webhook", "azure-private-dns", "aws-sd"] {
            for (one, other, expected) in [
                (json!({}), json!({}), true),
                (
                    json!({"webhook-provider-url": "http://localhost:8888/"}),
                    json!({}),
                    true,
                ),
                (
                    json!({"webhook-provider-url": "http://localhost:8889"}),
                    json!({}),
                    false,
                ),
            ] {
                assert_eq!(
                    are_rivals(provider, &one, &other),
                    expected,
                    "{provider} {one} {other}"
                );
            }
        }
    }

    #[test]
    fn rules_have_defaults_and_exact_values() {
        let of = |settings: &[(&str, &str)], parameters: Value| {
            let options = options(settings);
            open(&record(parameters), "shop/r", &options)
                .map(|engine| engine.rules)
                .map_err(|error| error.to_string())
        };
        let usual = of(&[], json!({})).unwrap();
        assert_eq!(
            (usual.owner.as_str(), usual.policy),
            ("default", Policy::Sync)
        );
        assert_eq!(usual.managed, BTreeSet::from(RecordType::DEFAULT_MANAGED));
        assert_eq!(
            (usual.min_ttl, usual.creates_pointers, usual.migrate_from),
            (0, false, None)
        );
        for (text, expected) in [("60", 60), ("2m", 120)] {
            let rules = of(&[("min-ttl", text)], json!({})).unwrap();
            assert_eq!(rules.min_ttl, expected);
        }
        let noop = of(&[], json!({"registry": "noop", "policy": "create-only"})).unwrap();
        assert_eq!((noop.owner.as_str(), noop.policy), ("", Policy::CreateOnly));
        let pattern = of(&[("regex-domain-filter", "^a")], json!({})).unwrap();
        assert!(pattern.domains.matches(&Name::parse("ab").unwrap()));
        assert!(!pattern.domains.matches(&Name::parse("ba").unwrap()));
        for (settings, parameters, expected) in [
            (
                ("managed-record-types", "A,X"),
                json!({}),
                "managed-record-types: unknown record type \"X\"; use A, AAAA, CNAME, DNAME, TXT, SRV, NS, PTR, MX, \
                 NAPTR or TYPE<number>",
            ),
            (
                ("regex-domain-filter", "("),
                json!({}),
                "regex-domain-filter or regex-domain-exclusion: ",
            ),
            (
                ("x", "y"),
                json!({"domain-filter": "a..b"}),
                "domain-filter or exclude-domains: \"a..b\" is not",
            ),
            (
                ("default-targets", "a,192.0.2.1"),
                json!({}),
                "default-targets: a host name excludes other targets; name one, or addresses",
            ),
            (
                ("default-targets", "a..b"),
                json!({}),
                "default-targets: \"a..b\" is not valid data for a record of type CNAME: ",
            ),
            (
                ("force-default-targets", "x"),
                json!({}),
                "force-default-targets is \"x\"; write true or false",
            ),
            (
                ("min-ttl", "9999999999"),
                json!({}),
                "min-ttl is \"9999999999\"; write at most 2147483647 s",
            ),
            (
                ("create-ptr", "x"),
                json!({}),
                "create-ptr is \"x\"; write true or false",
            ),
            (
                ("txt-suffix", "-a"),
                json!({"txt-prefix": "b-"}),
                "txt-prefix or txt-suffix: txt-prefix and txt-suffix are both set; remove one of them",
            ),
            (
                ("x", "y"),
                json!({"domain-filter": " ", "registry": "aws-sd"}),
                "domain-filter is empty, which filters nothing; name domains, or remove it; registry aws-sd is not \
                 available",
            ),
        ] {
            let error = of(&[settings], parameters).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }

    fn of_provider(provider: &str) -> UpdateRecord {
        let body = json!({"metadata": {"name": "r"}, "spec": {"provider": provider, "external-dns-parameters": {
            "azure-config-file": "/f", "interval": "5m", "policy": "upsert-only", "domain-filter": "a,b",
            "txt-prefix": "t-", "registry": "txt",
        }}})
        .to_string();
        let problems = Problems::of("body");
        let node = parse(documents(&body)[0], &problems).unwrap();
        UpdateRecord::read(&mut Reader::root(&node, &problems).fields().unwrap()).unwrap()
    }

    #[test]
    fn a_peer_needs_an_address() {
        let azure = of_provider("azure");
        let error = open(&azure, "shop/r", &options(&[]))
            .err()
            .unwrap()
            .to_string();
        assert_eq!(
            error,
            "azure is served by external-dns through its webhook: start it beside the publisher as `external-dns \
             --webhook-server --provider=azure --azure-config-file=/f --domain-filter=a --domain-filter=b`, and set \
             webhook-provider-url in provider_settings.shop/r, for example http://localhost:8888"
        );
        let with_url = options(&[("webhook-provider-url", "http://localhost:1")]);
        assert!(open(&azure, "shop/r", &with_url).is_ok());
    }

    fn publication(names: &[&str]) -> Publication {
        let mut publication = Publication::default();
        for name in names {
            let (namespace, own) = name.split_once('/').unwrap();
            let target = Target {
                id: crate::documents::DocumentId {
                    kind: crate::documents::Kind::UpdateRecord,
                    namespace: namespace.to_owned(),
                    name: own.to_owned(),
                },
                record: record(json!({})),
                desired: Default::default(),
                untargeted: Vec::new(),
                origins: BTreeMap::new(),
                counts: BTreeMap::new(),
                rival: None,
            };
            publication
                .targets
                .insert((*name).to_owned(), Arc::new(target));
        }
        publication
    }

    #[test]
    fn settings_without_effect_are_named() {
        let mut config = Config::default();
        let mut set = |record: &str, setting: &str| {
            let settings: &mut BTreeMap<_, _> = config
                .provider_settings
                .entry(record.to_owned())
                .or_default();
            settings.insert(setting.to_owned(), "x".to_owned());
        };
        set("shop/bind", "rfc2136-port");
        set("shop/bind", "txt-sufix");
        set("shop/bind", "txt-prefix");
        set("shop/bnd", "min-ttl");
        set("completely/else", "etcd-urls");
        assert_eq!(
            options_problems(&config, &publication(&["shop/bind", "shop/etcd"])),
            [
                "provider_settings.completely/else: there is no such DNS Update Record; remove it; known members are \
                 shop/bind, shop/etcd",
                "provider_settings.shop/bind.txt-sufix: unknown setting; did you mean \"txt-suffix\"? If not, remove it",
                "provider_settings.shop/bnd: there is no such DNS Update Record; did you mean \"shop/bind\"? If not, \
                 remove it",
            ]
        );
        let known = known_settings();
        assert!(known.is_sorted() && known.windows(2).all(|pair| pair[0] != pair[1]));
        assert!(known.contains(&"aws-region") && known.contains(&"create-ptr"));
    }

    #[test]
    fn owners_sharing_a_zone_are_rivals() {
        let mut found = publication(&["shop/a", "shop/b", "shop/c"]);
        let other = record(json!({"txt-owner-id": "other"}));
        Arc::make_mut(found.targets.get_mut("shop/c").unwrap()).record = other;
        mark_rivals(&mut found, &options(&[]));
        let rival = |name: &str| {
            format!(
                "it has the same txt-owner-id \"default\" in the same zones as DNS Update Record {name}, so each would \
                 delete the other's names; give each its own txt-owner-id, or a domain-filter that excludes the \
                 other's names"
            )
        };
        let marks: Vec<Option<String>> = found
            .targets
            .values()
            .map(|target| target.rival.clone())
            .collect();
        assert_eq!(marks, [Some(rival("shop/b")), Some(rival("shop/a")), None]);
        let error = launch(&found.targets["shop/a"], &options(&[]))
            .err()
            .unwrap();
        assert_eq!(error.to_string(), rival("shop/b"));
        // Without ownership nothing is deleted.
        let mut noop = publication(&["shop/a", "shop/b"]);
        for target in noop.targets.values_mut() {
            Arc::make_mut(target).record = record(json!({"registry": "noop"}));
        }
        mark_rivals(&mut noop, &options(&[]));
        assert!(noop.targets.values().all(|target| target.rival.is_none()));
    }

    #[test]
    fn zones_of_rivals_are_named() {
        let mut found = publication(&["shop/a", "shop/b"]);
        for target in found.targets.values_mut() {
            let spec = json!({"provider": "rfc2136", "external-dns-parameters": {
                "rfc2136-host": "ns", "rfc2136-zone": "example.org", "rfc2136-insecure": true}});
            let body = json!({"metadata": {"name": "r"}, "spec": spec}).to_string();
            let problems = Problems::of("body");
            let node = parse(documents(&body)[0], &problems).unwrap();
            let read = UpdateRecord::read(&mut Reader::root(&node, &problems).fields().unwrap());
            Arc::make_mut(target).record = read.unwrap();
        }
        mark_rivals(&mut found, &options(&[]));
        let rival = found.targets["shop/a"].rival.as_deref().unwrap();
        assert!(
            rival.contains(" in zone example.org as DNS Update Record shop/b,"),
            "{rival}"
        );
    }

    #[test]
    fn empty_entries_get_default_targets() {
        let entry = || {
            let id = crate::documents::DocumentId {
                kind: crate::documents::Kind::Endpoint,
                namespace: "shop".to_owned(),
                name: "one".to_owned(),
            };
            let name = Name::parse("a.example.org").unwrap();
            (id, crate::record::Record::new(name, RecordType::A, []))
        };
        let filled = |settings: &[(&str, &str)], has_entry: bool| {
            let mut publication = publication(&["shop/r"]);
            let target = Arc::make_mut(publication.targets.get_mut("shop/r").unwrap());
            let (id, _) = entry();
            target.counts.insert(id.clone(), 1);
            let mut own =
                crate::record::Record::parse("b.example.org", RecordType::A, ["192.0.2.9"])
                    .unwrap();
            own.labels = crate::record::Labels::of("", &id.resource());
            target.desired.records.push(own);
            if has_entry {
                target.untargeted.push(entry());
            }
            fill_targets(&mut publication, &options(settings));
            let records = &publication.targets["shop/r"].desired.records;
            let lines: Vec<String> = records.iter().map(ToString::to_string).collect();
            let problems: Vec<String> = publication.problems.into_values().flatten().collect();
            (lines, problems)
        };
        let own = "b.example.org 0 A 192.0.2.9".to_owned();
        let given = "a.example.org 0 A 198.51.100.1".to_owned();
        let defaults = ("default-targets", "198.51.100.1");
        let problem = "a.example.org: its entry has no target, so its records stay unchanged; add a target, or set \
                       default-targets in provider_settings"
            .to_owned();
        assert_eq!(filled(&[], false), (vec![own.clone()], vec![]));
        assert_eq!(
            filled(&[], true),
            (
                vec![own.clone(), "a.example.org 0 A ".to_owned()],
                vec![problem]
            )
        );
        assert_eq!(
            filled(&[defaults], true),
            (vec![own.clone(), given.clone()], vec![])
        );
        assert_eq!(filled(&[defaults], false), (vec![own.clone()], vec![]));
        let forced = [defaults, ("force-default-targets", "true")];
        let replaced = "b.example.org 0 A 198.51.100.1".to_owned();
        assert_eq!(filled(&forced, true), (vec![given, replaced], vec![]));
        // Without default targets, nothing is forced.
        assert_eq!(filled(&forced[1..], false), (vec![own], vec![]));
    }

    #[test]
    fn engines_know_saved_deletions() {
        let folder = tempfile::tempdir().unwrap();
        let config = Config {
            store: folder.path().join("store"),
            ..Config::default()
        };
        let options = LaunchOptions::of(&config).unwrap();
        let file = folder.path().join("deletions.json");
        let now = std::time::SystemTime::now();
        let since = now.duration_since(std::time::UNIX_EPOCH).unwrap();
        let names = json!({"z": {"a.example.org": since.as_secs()}});
        fs::write(&file, json!({"shop/r": names}).to_string()).unwrap();
        let known = |name: &str| {
            let engine = launch(&publication(&[name]).targets[name], &options).unwrap();
            engine.deletions.count("z", &Default::default(), now)
        };
        assert_eq!([known("shop/r"), known("shop/x")], [1, 0]);
        // Without the file nothing is known, which does not prevent the launch.
        fs::write(&file, "[").unwrap();
        assert_eq!(known("shop/r"), 0);
    }

    #[test]
    fn owner_keys_come_from_files() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("key");
        let config = Config {
            txt_encryption_key: Some(file.clone()),
            ..Config::default()
        };
        fs::write(&file, format!("{}\n", "k".repeat(32))).unwrap();
        let options = LaunchOptions::of(&config).unwrap();
        assert!(options.cipher.is_some());
        let engine = open(&record(json!({})), "shop/r", &options).unwrap();
        assert!(engine.registry.cipher.is_some());
        fs::write(&file, "short").unwrap();
        assert_eq!(
            LaunchOptions::of(&config).unwrap_err().to_string(),
            format!(
                "{}: txt-encrypt-aes-key needs 32 bytes, or their base64; `openssl rand -base64 32` makes one",
                file.display()
            )
        );
        assert!(
            LaunchOptions::of(&Config::default())
                .unwrap()
                .cipher
                .is_none()
        );
    }
}
