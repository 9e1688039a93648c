//! Engines from DNS Update Records.

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

/// Settings of the process that every engine shares.
#[derive(Clone, Debug)]
pub struct LaunchOptions {
    managed: BTreeSet<RecordType>,
    cipher: Option<Cipher>,
    provider_settings: BTreeMap<String, BTreeMap<String, String>>,
}

impl LaunchOptions {
    /// Reads the settings of a configuration, and the key file that it names.
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

/// Makes the engine of a record; `name` is `PROJECT/RECORD`.
///
/// An error names the provider and says what to change.
pub fn launch(record: &UpdateRecord, name: &str, options: &LaunchOptions) -> Result<Engine, String> {
    let obstacles = record.obstacles();
    if !obstacles.is_empty() {
        return Err(obstacles.join("; "));
    }
    let parameters = parameters(record, name, options);
    let text = |name: &str| parameters.text(name).unwrap_or_default();
    let mapper = Mapper::new(text("txt-prefix"), text("txt-suffix"), text("txt-wildcard-replacement"))
        .map_err(|error| format!("txt-prefix or txt-suffix: {error}"))?;
    let registry = Registry { mapper, cipher: options.cipher.clone() };
    let rules = rules(&parameters, options)?;
    let provider = provider::open(record.provider.name(), &parameters).map_err(|error| error.to_string())?;
    Ok(Engine { provider, registry, rules })
}

/// Returns the record's parameters with defaults, and the configuration's settings of the provider.
/// The record wins.
fn parameters(record: &UpdateRecord, name: &str, options: &LaunchOptions) -> Parameters {
    let mut all = options.provider_settings.get(name).cloned().unwrap_or_default();
    all.extend(record.parameters.texts());
    Parameters(all)
}

fn rules(parameters: &Parameters, options: &LaunchOptions) -> Result<Rules, String> {
    let owner = match parameters.text("registry") {
        // Without ownership every record in scope is ours.
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
