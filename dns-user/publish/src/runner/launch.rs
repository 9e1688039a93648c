//! Creates engines from DNS Update Records.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use crate::{
    config::Config,
    domain::DomainFilter,
    engine::Engine,
    ownership::{Cipher, Mapper, Registry},
    plan::Rules,
    provider::{self, Parameters},
    record::RecordType,
    update_record::UpdateRecord,
};

/// Process-wide settings shared by all engines.
#[derive(Clone, Debug)]
pub struct LaunchOptions {
    managed: BTreeSet<RecordType>,
    cipher: Option<Cipher>,
    provider_settings: BTreeMap<String, BTreeMap<String, String>>,
}

impl LaunchOptions {
    /// Takes the settings from a configuration, and reads the key file that it names.
    pub fn of(config: &Config) -> Result<Self, String> {
        let cipher = config.txt_encryption_key.as_deref().map(|path| {
            let failed = |reason: String| format!("{}: {reason}", path.display());
            let key = fs::read_to_string(path).map_err(|error| failed(format!("cannot be read: {error}")))?;
            Cipher::new(key.trim()).map_err(|error| failed(error.to_string()))
        });
        Ok(Self {
            managed: config.managed.clone(),
            cipher: cipher.transpose()?,
            provider_settings: config.provider_settings.clone(),
        })
    }
}

/// Creates the engine of a record; `name` is `PROJECT/RECORD`.
///
/// An error names the provider and the remedy.
pub fn launch(record: &UpdateRecord, name: &str, options: &LaunchOptions) -> Result<Engine, String> {
    let obstacles = record.obstacles();
    if !obstacles.is_empty() {
        return Err(obstacles.join("; "));
    }
    let parameters = parameters(record, name, options, |variable| std::env::var(variable).ok());
    let text = |name: &str| parameters.text(name).unwrap_or_default();
    let mapper = Mapper::new(text("txt-prefix"), text("txt-suffix"), text("txt-wildcard-replacement"))
        .map_err(|error| format!("txt-prefix or txt-suffix: {error}"))?;
    let registry = Registry { mapper, cipher: options.cipher.clone() };
    let rules = rules(&parameters, options)?;
    let provider = provider::open(record.provider.name(), &parameters).map_err(|error| error.to_string())?;
    Ok(Engine { provider, registry, rules })
}

/// Parameters that external-dns and its libraries take from the environment.
const ENVIRONMENT: [(&str, &str); 8] = [
    ("ETCD_URLS", "etcd-urls"),
    ("ETCD_USERNAME", "etcd-username"),
    ("ETCD_PASSWORD", "etcd-password"),
    ("AWS_ACCESS_KEY_ID", "aws-access-key-id"),
    ("AWS_SECRET_ACCESS_KEY", "aws-secret-access-key"),
    ("AWS_SESSION_TOKEN", "aws-session-token"),
    ("AWS_DEFAULT_REGION", "aws-region"),
    ("AWS_REGION", "aws-region"),
];

/// Returns the settings of a provider. In ascending precedence: the environment,
/// `provider_settings` of the configuration, the record's parameters with their defaults.
fn parameters(
    record: &UpdateRecord,
    name: &str,
    options: &LaunchOptions,
    environment: impl Fn(&str) -> Option<String>,
) -> Parameters {
    let from_environment = ENVIRONMENT.iter().filter_map(|(variable, setting)| {
        let value = environment(variable).filter(|value| !value.is_empty())?;
        Some(((*setting).to_owned(), value))
    });
    let mut all: BTreeMap<String, String> = from_environment.collect();
    all.extend(options.provider_settings.get(name).cloned().unwrap_or_default());
    all.extend(record.parameters.texts());
    Parameters(all)
}

fn rules(parameters: &Parameters, options: &LaunchOptions) -> Result<Rules, String> {
    let owner = match parameters.text("registry") {
        // Without ownership, records are only created.
        Some("noop") => "",
        _ => parameters.text("txt-owner-id").unwrap_or_default(),
    };
    let (include, exclude) = (parameters.list("domain-filter"), parameters.list("exclude-domains"));
    let domains = DomainFilter::new(include, exclude);
    Ok(Rules {
        policy: parameters
            .text("policy")
            .unwrap_or("sync")
            .parse()
            .map_err(|error| format!("policy: {error}"))?,
        owner: owner.to_owned(),
        managed: options.managed.clone(),
        domains: domains.map_err(|error| format!("domain-filter or exclude-domains: {error}"))?,
        migrate_from: parameters.text("migrate-from-txt-owner").map(str::to_owned),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::Config,
        documents::{Content, Document, DocumentId, Kind},
    };

    fn record(parameters: serde_json::Value) -> UpdateRecord {
        let id = DocumentId { kind: Kind::UpdateRecord, namespace: "shop".to_owned(), name: "r".to_owned() };
        let spec = serde_json::json!({"provider": "coredns", "external-dns-parameters": parameters});
        let body = serde_json::json!({"metadata": {"name": "r"}, "spec": spec});
        match Document::of_resource(&id, &body).unwrap().content {
            Some(Content::UpdateRecord(record)) => record,
            other => panic!("{other:?}"),
        }
    }

    fn options(settings: &[(&str, &str)]) -> LaunchOptions {
        let settings = settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let provider_settings = BTreeMap::from([("shop/r".to_owned(), settings.collect())]);
        LaunchOptions::of(&Config { provider_settings, ..Config::default() }).unwrap()
    }

    #[test]
    fn record_wins_over_configuration() {
        let record = record(serde_json::json!({"txt-owner-id": "me", "once": true}));
        let options =
            options(&[("etcd-urls", "http://etcd:2379"), ("txt-owner-id", "other"), ("txt-suffix", "-own")]);
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
        assert_eq!((other.text("etcd-urls"), other.text("txt-suffix")), (None, None));
    }

    #[test]
    fn rules_follow_parameters() {
        let options = options(&[("migrate-from-txt-owner", "old")]);
        let engine = |parameters| launch(&record(parameters), "shop/r", &options);
        let rules =
            engine(serde_json::json!({"policy": "upsert-only", "domain-filter": "example.org, example.net",
            "exclude-domains": "x.example.org", "txt-owner-id": "me"}))
            .unwrap()
            .rules;
        assert_eq!((rules.owner.as_str(), rules.migrate_from.as_deref()), ("me", Some("old")));
        let matches = |name: &str| rules.domains.matches(&crate::record::Name::parse(name).unwrap());
        assert!(matches("a.example.net") && !matches("a.x.example.org") && !matches("a.example.com"));
        assert_eq!(engine(serde_json::json!({"registry": "noop"})).unwrap().rules.owner, "");
        let refused = engine(serde_json::json!({"txt-prefix": "a..b"})).err().unwrap();
        assert!(refused.starts_with("txt-prefix or txt-suffix: "), "{refused}");
    }

    #[test]
    fn bad_key_file_is_named() {
        let config = Config { txt_encryption_key: Some("/nowhere/key".into()), ..Config::default() };
        assert!(LaunchOptions::of(&config).unwrap_err().starts_with("/nowhere/key: cannot be read"));
    }
}
