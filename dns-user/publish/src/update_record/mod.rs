//! DNS Update Records, the lists that bind them to logical clouds and clusters, and the intents
//! that use them, as source document 003 defines them. Pure.

mod intent;

use std::{collections::BTreeMap, fmt, time::Duration as Time};

use dns_core::config::values::parse_duration;
use serde::Serialize;
use serde_json::{Value, json};

pub(crate) use self::intent::{Intent, ListOwner, RecordList};
use self::{
    Group::{Aws, Azure, CoreDns, General, Rfc2136},
    Kind::{Boolean, Choice, Duration, Integer, Text, TextOrBoolean},
};
use crate::{
    endpoint::{Labels, Selector},
    provider::Backend,
    text::{self, Fields, Reader, remedy_for_unknown},
};

/// Label that assigns endpoints to a DNS Update Record.
pub(crate) const PROVIDER_LABEL: &str = "dnsprovider";

/// Default namespace, and project, of documents.
pub(crate) const DEFAULT_PROJECT: &str = "default";

/// Value of `spec.provider` in a DNS Update Record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Provider {
    /// Amazon Route 53, public or private zones.
    Aws,
    /// AWS Cloud Map (service discovery).
    AwsServiceDiscovery,
    /// Azure DNS, for public zones.
    Azure,
    /// Alternative name of Azure DNS.
    AzureDns,
    /// Azure Private DNS, for virtual networks.
    AzurePrivateDns,
    /// CoreDNS's etcd plugin (SkyDNS format).
    CoreDns,
    /// DNS UPDATE (RFC 2136) with TSIG.
    Rfc2136,
    /// A provider behind external-dns's webhook protocol, an extension of the document.
    Webhook,
}

/// A DNS Update Record: a provider and its parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpdateRecord {
    pub metadata: Metadata,
    pub provider: Provider,
    /// `spec.selector`, an extension of the document: selects the endpoints for this provider. By
    /// default, endpoints whose label `dnsprovider` equals the record's name.
    pub selector: Option<Selector>,
    pub parameters: Parameters,
}

/// `metadata` of all resources.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metadata {
    pub name: String,
    /// `description`, free text for people.
    pub description: Option<String>,
    /// `userdata1` or `userData1`, passed through unchanged.
    pub user_data1: Option<String>,
    /// `userdata2` or `userData2`, passed through unchanged.
    pub user_data2: Option<String>,
}

impl Provider {
    /// All providers with their names, in the order of the document; the extension is the last one.
    pub const ALL: [(Self, &str); 8] = [
        (Self::Aws, "aws"),
        (Self::AwsServiceDiscovery, "aws-sd"),
        (Self::Azure, "azure"),
        (Self::AzureDns, "azure-dns"),
        (Self::AzurePrivateDns, "azure-private-dns"),
        (Self::CoreDns, "coredns"),
        (Self::Rfc2136, "rfc2136"),
        (Self::Webhook, "webhook"),
    ];

    pub fn name(self) -> &'static str {
        // Every provider has a row.
        Self::ALL
            .iter()
            .find(|(provider, _)| *provider == self)
            .map_or("", |(_, name)| name)
    }

    /// Returns the provider of this crate that serves it. external-dns itself serves what this
    /// crate does not, as the peer of a webhook.
    pub(crate) fn backend(self) -> Backend {
        match self {
            Self::Aws => Backend::Aws,
            Self::CoreDns => Backend::CoreDns,
            Self::Rfc2136 => Backend::Rfc2136,
            Self::AwsServiceDiscovery
            | Self::Azure
            | Self::AzureDns
            | Self::AzurePrivateDns
            | Self::Webhook => Backend::Webhook,
        }
    }

    pub fn group(self) -> Group {
        match self {
            Self::Aws | Self::AwsServiceDiscovery => Aws,
            Self::Azure | Self::AzureDns | Self::AzurePrivateDns => Azure,
            Self::CoreDns => CoreDns,
            Self::Rfc2136 => Rfc2136,
            Self::Webhook => General,
        }
    }

    fn read(reader: &Reader<'_>) -> Option<Self> {
        let name = reader.text()?;
        let found = Self::ALL
            .into_iter()
            .find(|(_, known)| *known == name)
            .map(|(provider, _)| provider);
        let known = Self::ALL.map(|(_, name)| name).join(", ");
        let found = found.ok_or_else(|| format!("{name:?} is not a provider"));
        reader.accept(found, &format!("use one of {known}"))
    }
}

impl UpdateRecord {
    /// Parses `{metadata, spec}`; reports problems, and returns `None` if there are any.
    pub fn read(fields: &mut Fields<'_>) -> Option<Self> {
        let problems = fields.map.problems;
        let before = problems.count();
        let metadata = fields
            .required("metadata")
            .and_then(|metadata| Metadata::read(&mut metadata.fields()?));
        let mut spec = fields.required("spec")?.fields()?;
        let provider = spec
            .required("provider")
            .and_then(|provider| Provider::read(&provider));
        let parameters = spec.optional("external-dns-parameters");
        let parameters = parameters.map(|parameters| Parameters::read(&parameters, provider));
        let selector = spec
            .optional("selector")
            .and_then(|selector| Selector::read(&selector));
        spec.finish();
        let record = Self {
            metadata: metadata?,
            provider: provider?,
            selector,
            parameters: parameters.unwrap_or_default(),
        };
        (problems.count() == before).then_some(record)
    }

    pub fn to_json(&self) -> Value {
        let Self {
            metadata,
            provider,
            selector,
            parameters,
        } = self;
        let mut spec =
            json!({ "provider": provider.name(), "external-dns-parameters": parameters });
        if let Some(selector) = selector {
            spec["selector"] = selector.to_string().into();
        }
        json!({ "metadata": metadata.to_json("userdata"), "spec": spec })
    }

    /// Returns whether endpoints with these labels are published by this record's provider.
    pub fn selects(&self, labels: &Labels) -> bool {
        match &self.selector {
            Some(selector) => selector.matches(labels),
            None => labels.get(PROVIDER_LABEL) == Some(&self.metadata.name),
        }
    }

    /// Returns the reasons why the publisher cannot use the record although it is valid in the document's schema.
    pub fn obstacles(&self) -> Vec<String> {
        let Self {
            metadata: _,
            provider,
            selector: _,
            parameters,
        } = self;
        let required: &[&str] = match provider {
            Provider::Aws
            | Provider::CoreDns
            | Provider::AwsServiceDiscovery
            | Provider::Webhook => &[],
            Provider::Azure | Provider::AzureDns => &["azure-config-file"],
            Provider::AzurePrivateDns => &["azure-resource-group", "azure-subscription-id"],
            Provider::Rfc2136 => &["rfc2136-host", "rfc2136-zone"],
        };
        let missing = required
            .iter()
            .filter(|name| parameters.text(name).is_none());
        let mut found: Vec<String> = missing
            .map(|name| format!("{name} is missing; add it"))
            .collect();
        if *provider == Provider::Rfc2136 {
            found.extend(tsig_obstacles(parameters));
        }
        for name in ["domain-filter", "exclude-domains"] {
            if parameters.is_blank(name) {
                found.push(format!(
                    "{name} is empty, which filters nothing; name domains, or remove it"
                ));
            }
        }
        if parameters.text("registry") == Some("aws-sd") {
            found.push(
                "registry aws-sd is not available in bosh-dns-publish; use txt or noop, or run external-dns itself \
                 (bosh-dns-publish render)"
                    .to_owned(),
            );
        }
        if parameters.text("tls-client-cert").is_some()
            != parameters.text("tls-client-cert-key").is_some()
        {
            found.push(
                "tls-client-cert and tls-client-cert-key require each other; set both or neither"
                    .to_owned(),
            );
        }
        found
    }

    /// Returns remarks for the status: parameters without effect, and contradictions that have a
    /// defined resolution.
    pub fn remarks(&self) -> Vec<String> {
        let without_effect = |(parameter, _): (&Parameter, &Setting)| {
            parameter
                .without_effect
                .map(|reason| format!("{} {reason}", parameter.name))
        };
        let mut found: Vec<String> = self.parameters.iter().filter_map(without_effect).collect();
        if self.parameters.is_set("aws-evaluate-target-health")
            && self.parameters.is_set("no-aws-evaluate-target-health")
        {
            found.push(
                "aws-evaluate-target-health and no-aws-evaluate-target-health are both true; the latter wins"
                    .to_owned(),
            );
        }
        found
    }
}

/// TSIG algorithms supported by external-dns.
pub(crate) const TSIG_ALGORITHMS: [&str; 5] = [
    "hmac-sha1",
    "hmac-sha224",
    "hmac-sha256",
    "hmac-sha384",
    "hmac-sha512",
];

fn tsig_obstacles(parameters: &Parameters) -> Vec<String> {
    use base64::{Engine, engine::general_purpose::STANDARD};

    let mut found = Vec::new();

    let algorithm = parameters
        .text("rfc2136-tsig-secret-alg")
        .map(str::to_ascii_lowercase);
    let algorithm = algorithm.as_deref().map(|name| name.trim_end_matches('.'));
    if algorithm == Some("gss-tsig") {
        found.push(
            "the provider rfc2136 does not support GSS-TSIG in bosh-dns-publish; use a shared key \
             (hmac-sha256), or run external-dns itself (bosh-dns-publish render)"
                .to_owned(),
        );
        return found;
    }
    if parameters.is_set("rfc2136-insecure") {
        return found;
    }
    for name in ["rfc2136-tsig-keyname", "rfc2136-tsig-secret"] {
        if parameters.text(name).is_none() {
            found.push(format!(
                "{name} is missing; add it, or set rfc2136-insecure to true"
            ));
        }
    }
    if parameters
        .text("rfc2136-tsig-secret")
        .is_some_and(|secret| STANDARD.decode(secret).is_err())
    {
        // The secret itself must not appear in messages.
        found.push(
            "rfc2136-tsig-secret is not base64; copy it from the server's key file".to_owned(),
        );
    }
    if let Some(name) = algorithm.filter(|name| !TSIG_ALGORITHMS.contains(name)) {
        found.push(format!(
            "rfc2136-tsig-secret-alg {name:?} is unknown; use one of {}",
            TSIG_ALGORITHMS.join(", ")
        ));
    }
    found
}

impl Metadata {
    /// Parses `metadata`. Unknown members, such as Kubernetes adds, are left to the caller.
    pub fn read(fields: &mut Fields<'_>) -> Option<Self> {
        let name = fields
            .required("name")
            .and_then(|name| read_identifier(&name));
        let text = |field: Option<Reader<'_>>| field?.text().map(str::to_owned);
        let description = text(fields.optional("description"));
        let mut user_data = |lower: &'static str, camel: &'static str| {
            let (one, other) = (fields.optional(lower), fields.optional(camel));
            if let (Some(_), Some(other)) = (&one, &other) {
                other.problem(
                    format!("{lower} is also set"),
                    format!("keep one of {lower} and {camel}"),
                );
            }
            text(one.or(other))
        };
        let user_data1 = user_data("userdata1", "userData1");
        let user_data2 = user_data("userdata2", "userData2");
        Some(Self {
            name: name?,
            description,
            user_data1,
            user_data2,
        })
    }

    /// Formats `metadata`. `user_data` begins the names of the free texts, of which the document has two spellings:
    /// `userdata1` in records, `userData1` in lists.
    pub fn to_json(&self, user_data: &str) -> Value {
        let Self {
            name,
            description,
            user_data1,
            user_data2,
        } = self;
        let names = [
            "description".to_owned(),
            format!("{user_data}1"),
            format!("{user_data}2"),
        ];
        let mut metadata = json!({ "name": name });
        for (member, text) in names.into_iter().zip([description, user_data1, user_data2]) {
            if let Some(text) = text {
                metadata[member] = text.as_str().into();
            }
        }
        metadata
    }
}

/// Parses a name that is valid in a URL and in a Kubernetes label.
pub(crate) fn read_identifier(reader: &Reader<'_>) -> Option<String> {
    let text = reader.text()?;
    let remedy = "use up to 63 letters, digits, dashes, dots and underscores, with a letter or digit at both ends";
    match is_identifier(text) {
        true => Some(text.to_owned()),
        false => reader.refuse(format!("{text:?} is not a valid name"), remedy),
    }
}

/// Returns whether a text is valid in a URL and in a Kubernetes label.
pub(crate) fn is_identifier(text: &str) -> bool {
    let ends = |edge: Option<char>| edge.is_some_and(|letter| letter.is_ascii_alphanumeric());
    text.len() <= 63
        && ends(text.chars().next())
        && ends(text.chars().next_back())
        && text
            .chars()
            .all(|letter| letter.is_ascii_alphanumeric() || "-._".contains(letter))
}

/// One parameter of `external-dns-parameters`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Name in the API, which is also external-dns's flag.
    pub name: &'static str,
    /// Providers for which it is allowed.
    pub group: Group,
    pub kind: Kind,
    /// Default, if the document states one.
    pub default: Option<&'static str>,
    /// The reason why the publisher ignores it, if it does. Rendered Deployments contain all parameters.
    pub without_effect: Option<&'static str>,
}

/// Schemas into which the document divides the parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// `extdns_general`: for every provider.
    General,
    Aws,
    Azure,
    CoreDns,
    Rfc2136,
}

/// Type of a parameter's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A JSON string, taken unchanged.
    Text,
    /// A JSON string, or the boolean that the document's own example uses instead.
    TextOrBoolean,
    /// A JSON string holding a Go duration, such as `30s`.
    Duration,
    Boolean,
    Integer,
    /// A JSON string with one of these values.
    Choice(&'static [&'static str]),
}

/// It applies to the record's provider.
const USED: Option<&str> = None;

const KUBERNETES: Option<&str> =
    Some("has no effect here: it configures external-dns's sources inside Kubernetes");

const PROCESS: Option<&str> =
    Some("has no effect here: the publisher's own configuration decides for the whole process");

impl Parameter {
    pub fn named(name: &str) -> Option<&'static Self> {
        PARAMETERS.iter().find(|parameter| parameter.name == name)
    }

    const fn by_default(self, default: &'static str) -> Self {
        Self {
            default: Some(default),
            ..self
        }
    }
}

/// All parameters, in the order of the document.
#[rustfmt::skip]
pub(crate) const PARAMETERS: &[Parameter] = &[
    general("request-timeout", Duration, KUBERNETES),
    general("contour-load-balancer", Text, KUBERNETES).by_default("heptio-contour/contour"),
    general("fqdn-template", Text, KUBERNETES),
    general("combine-fqdn-annotation", Boolean, KUBERNETES),
    general("ignore-hostname-annotation", Boolean, KUBERNETES).by_default("false"),
    general("compatibility", Choice(&["mate", "molecule"]), KUBERNETES),
    general("publish-internal-services", Boolean, KUBERNETES),
    general("publish-host-ip", TextOrBoolean, KUBERNETES),
    general("service-type-filter",
        Choice(&["all", "ClusterIP", "NodePort", "LoadBalancer", "ExternalName"]), KUBERNETES).by_default("all"),
    general("domain-filter", Text, USED),
    general("exclude-domains", Text, USED),
    general("zone-id-filter", Text, USED),
    general("tls-ca", Text, USED),
    general("tls-client-cert", Text, USED),
    general("tls-client-cert-key", Text, USED),
    general("policy", Choice(&["sync", "upsert-only", "create-only"]), USED).by_default("sync"),
    general("registry", Choice(&["txt", "noop", "aws-sd"]), USED).by_default("txt"),
    general("txt-owner-id", Text, USED).by_default("default"),
    general("txt-prefix", Text, USED),
    general("txt-cache-interval", Duration,
        Some("has no effect here: zones are listed in every round")),
    general("interval", Duration, USED).by_default("1m"),
    general("once", Boolean, PROCESS),
    general("dry-run", Boolean, USED),
    general("log-format", Choice(&["text", "json"]), PROCESS).by_default("text"),
    general("metrics-address", Text, PROCESS),
    general("log-level", Choice(&["panic", "debug", "info", "warning", "error", "fatal"]), PROCESS)
        .by_default("info"),
    used(Aws, "aws-zone-type", Choice(&["public", "private"])),
    used(Aws, "aws-zone-tags", Text),
    used(Aws, "aws-assume-role", Text),
    used(Aws, "aws-batch-change-size", Integer),
    used(Aws, "aws-batch-change-interval", Duration),
    used(Aws, "aws-evaluate-target-health", Boolean),
    used(Aws, "no-aws-evaluate-target-health", Boolean),
    used(Aws, "aws-api-retries", Integer),
    used(Aws, "aws-prefer-cname", Boolean),
    used(Azure, "azure-config-file", Text),
    used(Azure, "azure-resource-group", Text),
    used(Azure, "azure-subscription-id", Text),
    used(Azure, "azure-user-assigned-identity-client-id", Text),
    used(CoreDns, "coredns-prefix", Text),
    used(Rfc2136, "rfc2136-host", Text),
    used(Rfc2136, "rfc2136-zone", Text),
    used(Rfc2136, "rfc2136-insecure", Boolean),
    used(Rfc2136, "rfc2136-tsig-keyname", Text),
    used(Rfc2136, "rfc2136-tsig-secret", Text),
    used(Rfc2136, "rfc2136-tsig-secret-alg", Text),
    Parameter {
        without_effect: Some("has no effect here: zones are always listed by AXFR, signed if there is a key"),
        ..used(Rfc2136, "rfc2136-tsig-axfr", Text)
    },
];

const fn used(group: Group, name: &'static str, kind: Kind) -> Parameter {
    Parameter {
        name,
        group,
        kind,
        default: None,
        without_effect: USED,
    }
}

const fn general(
    name: &'static str,
    kind: Kind,
    without_effect: Option<&'static str>,
) -> Parameter {
    Parameter {
        name,
        group: General,
        kind,
        default: None,
        without_effect,
    }
}

/// Maximum length of a text in octets; lists of domains and zones are the longest.
const MAX_TEXT: usize = 16 * 1024;

/// Parameters set in a record. Defaults are omitted, so a record is returned as written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Parameters(BTreeMap<&'static str, Setting>);

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Setting {
    Boolean(bool),
    /// Value of an integer parameter, not negative.
    Integer(u32),
    /// Value of any other parameter, as text.
    Text(String),
}

impl Parameters {
    /// Parses `external-dns-parameters`; reports members that the table does not allow.
    pub fn read(reader: &Reader<'_>, provider: Option<Provider>) -> Self {
        let mut settings = BTreeMap::new();
        let Some(mut fields) = reader.fields() else {
            return Self(settings);
        };
        // The document's schema also requires `provider` among the general parameters.
        if let (Some(again), Some(provider)) = (fields.optional("provider"), provider)
            && again.text().is_some_and(|name| name != provider.name())
        {
            again.problem(
                "it differs from spec.provider",
                "remove it: spec.provider decides",
            );
        }
        for (name, value) in fields.others() {
            let Some(parameter) = Parameter::named(name) else {
                let known: Vec<_> = PARAMETERS.iter().map(|parameter| parameter.name).collect();
                value.problem(
                    format!("external-dns has no parameter {name:?} in document 003"),
                    remedy_for_unknown(name, &known),
                );
                continue;
            };
            let has_not =
                |provider: &Provider| ![General, provider.group()].contains(&parameter.group);
            if let Some(provider) = provider.filter(has_not) {
                value.problem(
                    format!(
                        "{name} is not a parameter of the provider {}",
                        provider.name()
                    ),
                    "remove it, or change spec.provider",
                );
                continue;
            }
            if let (false, Some(setting)) = (
                value.node.value == text::Value::Null,
                parameter.kind.read(&value),
            ) {
                settings.insert(parameter.name, setting);
            }
        }
        Self(settings)
    }

    /// Returns each parameter that is set, with its value.
    pub fn iter(&self) -> impl Iterator<Item = (&'static Parameter, &Setting)> {
        // All names come from the table.
        self.0
            .iter()
            .filter_map(|(name, setting)| Some((Parameter::named(name)?, setting)))
    }

    /// Returns the text of a parameter, or its default; `None` if empty.
    pub fn text(&self, name: &str) -> Option<&str> {
        let text = match self.0.get(name) {
            Some(Setting::Text(text)) => text.as_str(),
            _ => Parameter::named(name)?.default?,
        };
        Some(text.trim()).filter(|text| !text.is_empty())
    }

    pub fn is_blank(&self, name: &str) -> bool {
        matches!(self.0.get(name), Some(Setting::Text(text)) if text.trim().is_empty())
    }

    pub fn is_set(&self, name: &str) -> bool {
        self.0.get(name) == Some(&Setting::Boolean(true))
    }

    /// Returns every parameter that is set or has a default, as text.
    pub fn texts(&self) -> BTreeMap<String, String> {
        let defaults = PARAMETERS
            .iter()
            .filter_map(|parameter| Some((parameter.name, parameter.default?)));
        let mut texts: BTreeMap<String, String> = defaults
            .map(|(name, text)| (name.to_owned(), text.to_owned()))
            .collect();
        texts.extend(
            self.0
                .iter()
                .map(|(name, setting)| ((*name).to_owned(), setting.to_string())),
        );
        texts
    }

    pub fn duration(&self, name: &str) -> Option<Time> {
        // Only valid durations are accepted by `read`.
        parse_duration(self.text(name)?).ok()
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Boolean(value) => value.fmt(f),
            Self::Integer(value) => value.fmt(f),
            Self::Text(text) => text.fmt(f),
        }
    }
}

impl Setting {
    /// Formats the value for external-dns's command line.
    pub fn argument(&self, name: &str) -> String {
        match self {
            Self::Boolean(true) => format!("--{name}"),
            Self::Boolean(false) => format!("--no-{name}"),
            Self::Integer(value) => format!("--{name}={value}"),
            Self::Text(text) => format!("--{name}={text}"),
        }
    }
}

impl Kind {
    fn read(self, value: &Reader<'_>) -> Option<Setting> {
        if let text::Value::Text(text) = &value.node.value
            && text.len() > MAX_TEXT
        {
            return value.refuse(
                format!("it has {} octets", text.len()),
                format!("use at most {MAX_TEXT}"),
            );
        }
        let text = match (self, &value.node.value) {
            (Boolean, _) | (TextOrBoolean, text::Value::Bool(_)) => {
                return value.boolean().map(Setting::Boolean);
            }
            (Integer, _) => return value.integer(0..=u32::MAX).map(Setting::Integer),
            _ => value.text()?,
        };
        match self {
            Duration => {
                let parsed = parse_duration(text).map_err(|error| format!("{text:?} {error}"));
                value.accept(parsed, "use a number with a unit, such as 30s or 1m")?;
            }
            Choice(words) if !words.contains(&text) => {
                let remedy = format!("use one of {}", words.join(", "));
                return value.refuse(format!("{text:?} is not a value of this parameter"), remedy);
            }
            _ => {}
        }
        Some(Setting::Text(text.to_owned()))
    }
}

#[cfg(test)]
mod tests;
