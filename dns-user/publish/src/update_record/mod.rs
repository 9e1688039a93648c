//! DNS Update Records, the lists that bind them to logical clouds and clusters, and the intents
//! that use them, as source document 003 defines them. Pure.

mod intent;
pub(crate) mod parameters;

use std::fmt;

use serde_json::{Value, json};

use self::parameters::Group;
pub(crate) use self::{
    intent::{Intent, ListOwner, RecordList},
    parameters::{Parameter, Parameters, Setting},
};
use crate::{
    endpoint::{Labels, Selector},
    text::{Fields, Reader},
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

/// Spelling of a resource's free-text members; the document uses both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spelling {
    /// `userdata1`, as in records.
    Lower,
    /// `userData1`, as in lists.
    Camel,
}

impl Provider {
    /// All providers: those of the document in its order, and the extension.
    pub const ALL: [Self; 8] = [
        Self::Aws,
        Self::AwsServiceDiscovery,
        Self::Azure,
        Self::AzureDns,
        Self::AzurePrivateDns,
        Self::CoreDns,
        Self::Rfc2136,
        Self::Webhook,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Aws => "aws",
            Self::AwsServiceDiscovery => "aws-sd",
            Self::Azure => "azure",
            Self::AzureDns => "azure-dns",
            Self::AzurePrivateDns => "azure-private-dns",
            Self::CoreDns => "coredns",
            Self::Rfc2136 => "rfc2136",
            Self::Webhook => "webhook",
        }
    }

    /// Returns the provider of this crate that serves it. external-dns itself serves what this
    /// crate does not, as the peer of a webhook.
    pub fn served_by(self) -> &'static str {
        match self {
            Self::Aws | Self::CoreDns | Self::Rfc2136 => self.name(),
            _ => Self::Webhook.name(),
        }
    }

    /// Returns the schema of its parameters.
    pub fn group(self) -> Group {
        match self {
            Self::Aws | Self::AwsServiceDiscovery => Group::Aws,
            Self::Azure | Self::AzureDns | Self::AzurePrivateDns => Group::Azure,
            Self::CoreDns => Group::CoreDns,
            Self::Rfc2136 => Group::Rfc2136,
            Self::Webhook => Group::General,
        }
    }

    fn read(reader: &Reader<'_>) -> Option<Self> {
        let name = reader.text()?;
        let found = Self::ALL.into_iter().find(|provider| provider.name() == name);
        if found.is_none() {
            let known = Self::ALL.map(Self::name);
            reader.problem(format!("{name:?} is not a provider"), format!("use one of {}", known.join(", ")));
        }
        found
    }
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl UpdateRecord {
    /// Parses `{metadata, spec}`; reports problems, and returns `None` if there are any.
    pub fn read(fields: &mut Fields<'_>) -> Option<Self> {
        let problems = fields.map().problems();
        let before = problems.count();
        let metadata = fields.required("metadata").and_then(|metadata| Metadata::read(&metadata));
        let mut spec = fields.required("spec")?.fields()?;
        let provider = spec.required("provider").and_then(|provider| Provider::read(&provider));
        let parameters = spec.optional("external-dns-parameters");
        let parameters = parameters.map(|parameters| Parameters::read(&parameters, provider));
        let selector = spec.optional("selector").and_then(|selector| Selector::read(&selector));
        spec.finish();
        let record = Self {
            metadata: metadata?,
            provider: provider?,
            selector,
            parameters: parameters.unwrap_or_default(),
        };
        (problems.count() == before).then_some(record)
    }

    /// Formats the record as in API responses.
    pub fn to_json(&self) -> Value {
        let Self { metadata, provider, selector, parameters } = self;
        let mut spec = json!({ "provider": provider.name(), "external-dns-parameters": parameters });
        if let Some(selector) = selector {
            spec["selector"] = selector.to_string().into();
        }
        json!({ "metadata": metadata.to_json(Spelling::Lower), "spec": spec })
    }

    /// Returns whether endpoints with these labels are published by this record's provider.
    pub fn selects(&self, labels: &Labels) -> bool {
        match &self.selector {
            Some(selector) => selector.matches(labels),
            None => labels.get(PROVIDER_LABEL) == Some(&self.metadata.name),
        }
    }

    /// Returns the reasons why the publisher cannot use the record although it is valid in the
    /// document's schema.
    pub fn obstacles(&self) -> Vec<String> {
        let Self { metadata: _, provider, selector: _, parameters } = self;
        let missing =
            |name: &str| parameters.text(name).is_none().then(|| format!("{name} is missing; add it"));
        let mut found = Vec::new();
        match provider {
            Provider::Aws | Provider::CoreDns | Provider::AwsServiceDiscovery | Provider::Webhook => {}
            Provider::Azure | Provider::AzureDns => found.extend(missing("azure-config-file")),
            Provider::AzurePrivateDns => {
                found.extend(missing("azure-resource-group"));
                found.extend(missing("azure-subscription-id"));
            }
            Provider::Rfc2136 => found.extend(rfc2136_obstacles(parameters)),
        }
        for name in ["domain-filter", "exclude-domains"] {
            if parameters.is_blank(name) {
                found.push(format!("{name} is empty, which filters nothing; name domains, or remove it"));
            }
        }
        if parameters.text("registry") == Some("aws-sd") {
            found.push(
                "registry aws-sd is not available in bosh-dns-publish; use txt or noop, or run external-dns itself \
                 (bosh-dns-publish render)"
                    .to_owned(),
            );
        }
        if parameters.text("tls-client-cert").is_some() != parameters.text("tls-client-cert-key").is_some() {
            found.push(
                "tls-client-cert and tls-client-cert-key require each other; set both or neither".to_owned(),
            );
        }
        found
    }

    /// Returns remarks for the status: parameters without effect, and contradictions that have a
    /// defined resolution.
    pub fn remarks(&self) -> Vec<String> {
        let mut found = self.parameters.without_effect();
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
pub(crate) const TSIG_ALGORITHMS: [&str; 5] =
    ["hmac-sha1", "hmac-sha224", "hmac-sha256", "hmac-sha384", "hmac-sha512"];

fn rfc2136_obstacles(parameters: &Parameters) -> Vec<String> {
    use base64::{Engine, engine::general_purpose::STANDARD};

    let mut found = Vec::new();
    for name in ["rfc2136-host", "rfc2136-zone"] {
        if parameters.text(name).is_none() {
            found.push(format!("{name} is missing; add it"));
        }
    }
    let algorithm = parameters.text("rfc2136-tsig-secret-alg").map(str::to_ascii_lowercase);
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
            found.push(format!("{name} is missing; add it, or set rfc2136-insecure to true"));
        }
    }
    if parameters.text("rfc2136-tsig-secret").is_some_and(|secret| STANDARD.decode(secret).is_err()) {
        // The secret itself must not appear in messages.
        found.push("rfc2136-tsig-secret is not base64; copy it from the server's key file".to_owned());
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
    /// Parses `metadata`. Unknown members, including those that Kubernetes adds, are ignored.
    pub fn read(reader: &Reader<'_>) -> Option<Self> {
        let mut fields = reader.fields()?;
        Self::read_fields(&mut fields)
    }

    /// Like [`Metadata::read`], but leaves other members to the caller.
    pub fn read_fields(fields: &mut Fields<'_>) -> Option<Self> {
        let name = fields.required("name").and_then(|name| read_identifier(&name));
        let text = |field: Option<Reader<'_>>| field?.text().map(str::to_owned);
        let description = text(fields.optional("description"));
        let mut user_data = |lower: &'static str, camel: &'static str| {
            let (one, other) = (fields.optional(lower), fields.optional(camel));
            if let (Some(_), Some(other)) = (&one, &other) {
                other.problem(format!("{lower} is also set"), format!("keep one of {lower} and {camel}"));
            }
            text(one.or(other))
        };
        let user_data1 = user_data("userdata1", "userData1");
        let user_data2 = user_data("userdata2", "userData2");
        Some(Self { name: name?, description, user_data1, user_data2 })
    }

    /// Formats the metadata as in API responses.
    pub fn to_json(&self, spelling: Spelling) -> Value {
        let Self { name, description, user_data1, user_data2 } = self;
        let (first, second) = match spelling {
            Spelling::Lower => ("userdata1", "userdata2"),
            Spelling::Camel => ("userData1", "userData2"),
        };
        let mut metadata = json!({ "name": name });
        for (member, text) in [("description", description), (first, user_data1), (second, user_data2)] {
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
    if !is_identifier(text) {
        reader.problem(
            format!("{text:?} is not a valid name"),
            "use up to 63 letters, digits, dashes, dots and underscores, with a letter or digit at both ends",
        );
        return None;
    }
    Some(text.to_owned())
}

/// Returns whether a text is valid in a URL and in a Kubernetes label.
pub(crate) fn is_identifier(text: &str) -> bool {
    let ends = |edge: Option<char>| edge.is_some_and(|letter| letter.is_ascii_alphanumeric());
    text.len() <= 63
        && ends(text.chars().next())
        && ends(text.chars().next_back())
        && text.chars().all(|letter| letter.is_ascii_alphanumeric() || "-._".contains(letter))
}

#[cfg(test)]
mod tests;
