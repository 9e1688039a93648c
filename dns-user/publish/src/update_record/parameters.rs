//! external-dns's parameters: names, types, enumerations and defaults of document 003, and the values
//! that a record sets, which are written back unchanged.
//!
//! Parsing, validation and the arguments of rendered Deployments are all derived from the table; a test
//! compares it with the OpenAPI document.

use std::{collections::BTreeMap, fmt, time::Duration as Time};

use dns_core::config::values::parse_duration;
use serde::{Deserialize, Serialize};

use self::{
    Effect::{Fixed, KubernetesOnly, Process, Used},
    Group::{Aws, Azure, CoreDns, General, Rfc2136},
    Kind::{Boolean, Choice, Duration, Integer, Text, TextOrBoolean},
};
use super::Provider;
use crate::text::{Reader, Value};

/// One parameter of `external-dns-parameters`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Name in the API, which is also external-dns's flag.
    pub name: &'static str,
    /// Providers for which it is allowed.
    pub group: Group,
    /// Type of the parameter's value.
    pub kind: Kind,
    /// Default, if the document states one.
    pub default: Option<&'static str>,
    pub effect: Effect,
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

/// Effect of a parameter on the publisher. Rendered Deployments contain all parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Applies to the record's provider.
    Used,
    /// Concerns external-dns's sources inside Kubernetes.
    KubernetesOnly,
    /// Concerns the external-dns process; the publisher's configuration has an equivalent.
    Process,
    /// The publisher's behaviour is fixed, as described.
    Fixed(&'static str),
}

impl Group {
    /// Returns the name of the schema in the document.
    pub fn schema(self) -> &'static str {
        match self {
            Self::General => "extdns_general",
            Self::Aws => "extdns_provider_aws",
            Self::Azure => "extdns_provider_azure",
            Self::CoreDns => "extdns_provider_coredns",
            Self::Rfc2136 => "extdns_provider_rfc2136",
        }
    }

    /// Returns whether a record of `provider` may have parameters of this schema.
    pub fn fits(self, provider: Provider) -> bool {
        self == Self::General || self == provider.group()
    }
}

impl Parameter {
    pub fn named(name: &str) -> Option<&'static Self> {
        PARAMETERS.iter().find(|parameter| parameter.name == name)
    }

    /// Returns the reason why the publisher ignores it; `None` if it has an effect.
    pub fn without_effect(&self) -> Option<&'static str> {
        match self.effect {
            Used => None,
            KubernetesOnly => {
                Some("has no effect here: it configures external-dns's sources inside Kubernetes")
            }
            Process => {
                Some("has no effect here: the publisher's own configuration decides for the whole process")
            }
            Fixed(behaviour) => Some(behaviour),
        }
    }
}

/// All parameters, in the order of the document.
#[rustfmt::skip]
pub(crate) const PARAMETERS: &[Parameter] = &[
    general("request-timeout", Duration, KubernetesOnly),
    general("contour-load-balancer", Text, KubernetesOnly).by_default("heptio-contour/contour"),
    general("fqdn-template", Text, KubernetesOnly),
    general("combine-fqdn-annotation", Boolean, KubernetesOnly),
    general("ignore-hostname-annotation", Boolean, KubernetesOnly).by_default("false"),
    general("compatibility", Choice(&["mate", "molecule"]), KubernetesOnly),
    general("publish-internal-services", Boolean, KubernetesOnly),
    general("publish-host-ip", TextOrBoolean, KubernetesOnly),
    general("service-type-filter",
        Choice(&["all", "ClusterIP", "NodePort", "LoadBalancer", "ExternalName"]), KubernetesOnly).by_default("all"),
    general("domain-filter", Text, Used),
    general("exclude-domains", Text, Used),
    general("zone-id-filter", Text, Used),
    general("tls-ca", Text, Used),
    general("tls-client-cert", Text, Used),
    general("tls-client-cert-key", Text, Used),
    general("policy", Choice(&["sync", "upsert-only", "create-only"]), Used).by_default("sync"),
    general("registry", Choice(&["txt", "noop", "aws-sd"]), Used).by_default("txt"),
    general("txt-owner-id", Text, Used).by_default("default"),
    general("txt-prefix", Text, Used),
    general("txt-cache-interval", Duration,
        Fixed("has no effect here: zones are listed in every round")),
    general("interval", Duration, Used).by_default("1m"),
    general("once", Boolean, Process),
    general("dry-run", Boolean, Used),
    general("log-format", Choice(&["text", "json"]), Process).by_default("text"),
    general("metrics-address", Text, Process),
    general("log-level", Choice(&["panic", "debug", "info", "warning", "error", "fatal"]), Process)
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
    used(Rfc2136, "rfc2136-tsig-axfr", Text)
        .with_effect(Fixed("has no effect here: zones are always listed by AXFR, signed if there is a key")),
];

const fn used(group: Group, name: &'static str, kind: Kind) -> Parameter {
    Parameter { name, group, kind, default: None, effect: Used }
}

const fn general(name: &'static str, kind: Kind, effect: Effect) -> Parameter {
    Parameter { name, group: General, kind, default: None, effect }
}

impl Parameter {
    const fn by_default(self, default: &'static str) -> Self {
        Self { default: Some(default), ..self }
    }

    const fn with_effect(self, effect: Effect) -> Self {
        Self { effect, ..self }
    }
}

/// Maximum length of a text in octets; lists of domains and zones are the longest.
const MAX_TEXT: usize = 16 * 1024;

/// Parameters set in a record. Defaults are omitted, so a record is returned as written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Parameters(BTreeMap<&'static str, Setting>);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
        let Some(mut fields) = reader.fields() else { return Self(settings) };
        // The document's schema also requires `provider` among the general parameters.
        if let (Some(again), Some(provider)) = (fields.optional("provider"), provider)
            && again.text().is_some_and(|name| name != provider.name())
        {
            again.problem("it differs from spec.provider", "remove it: spec.provider decides");
        }
        for (name, value) in fields.others() {
            let Some(parameter) = Parameter::named(name) else {
                let known: Vec<_> = PARAMETERS.iter().map(|parameter| parameter.name).collect();
                value.problem(
                    format!("external-dns has no parameter {name:?} in document 003"),
                    crate::text::remedy_for_unknown(name, &known),
                );
                continue;
            };
            if let Some(provider) = provider.filter(|provider| !parameter.group.fits(*provider)) {
                value.problem(
                    format!("{name} is not a parameter of the provider {}", provider.name()),
                    "remove it, or change spec.provider",
                );
                continue;
            }
            if let (false, Some(setting)) = (*value.value() == Value::Null, parameter.kind.read(&value)) {
                settings.insert(parameter.name, setting);
            }
        }
        Self(settings)
    }

    /// Returns each parameter that is set, with its value.
    pub fn iter(&self) -> impl Iterator<Item = (&'static Parameter, &Setting)> {
        // All names come from the table.
        self.0.iter().filter_map(|(name, setting)| Some((Parameter::named(name)?, setting)))
    }

    /// Returns the text of a parameter, or its default; `None` if empty.
    pub fn text(&self, name: &str) -> Option<&str> {
        let text = match self.0.get(name) {
            Some(Setting::Text(text)) => text.as_str(),
            _ => Parameter::named(name)?.default?,
        };
        Some(text.trim()).filter(|text| !text.is_empty())
    }

    /// Returns whether a text is set, but empty.
    pub fn is_blank(&self, name: &str) -> bool {
        matches!(self.0.get(name), Some(Setting::Text(text)) if text.trim().is_empty())
    }

    /// Returns whether a boolean is set and true.
    pub fn is_set(&self, name: &str) -> bool {
        self.0.get(name) == Some(&Setting::Boolean(true))
    }

    /// Returns every parameter that is set or has a default, as text.
    pub fn texts(&self) -> BTreeMap<String, String> {
        let defaults = PARAMETERS.iter().filter_map(|parameter| Some((parameter.name, parameter.default?)));
        let mut texts: BTreeMap<String, String> =
            defaults.map(|(name, text)| (name.to_owned(), text.to_owned())).collect();
        texts.extend(self.0.iter().map(|(name, setting)| ((*name).to_owned(), setting.to_string())));
        texts
    }

    pub fn duration(&self, name: &str) -> Option<Time> {
        // Only valid durations are accepted by `read`.
        parse_duration(self.text(name)?).ok()
    }

    /// Returns the parameters that are set but ignored by the publisher, with the reasons.
    pub fn without_effect(&self) -> Vec<String> {
        let reason = |(parameter, _): (&Parameter, &Setting)| {
            parameter.without_effect().map(|reason| format!("{} {reason}", parameter.name))
        };
        self.iter().filter_map(reason).collect()
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
        if let Value::Text(text) = value.value()
            && text.len() > MAX_TEXT
        {
            value.problem(format!("it has {} octets", text.len()), format!("use at most {MAX_TEXT}"));
            return None;
        }
        match self {
            Self::Text => value.text().map(|text| Setting::Text(text.to_owned())),
            Self::TextOrBoolean => match value.value() {
                Value::Bool(known) => Some(Setting::Boolean(*known)),
                _ => value.text().map(|text| Setting::Text(text.to_owned())),
            },
            Self::Boolean => value.boolean().map(Setting::Boolean),
            Self::Integer => value.integer(0..=u32::MAX).map(Setting::Integer),
            Self::Duration => {
                let text = value.text()?;
                if let Err(error) = parse_duration(text) {
                    value.problem(format!("{text:?} {error}"), "use a number with a unit, such as 30s or 1m");
                    return None;
                }
                Some(Setting::Text(text.to_owned()))
            }
            Self::Choice(words) => {
                let text = value.text()?;
                if !words.contains(&text) {
                    value.problem(
                        format!("{text:?} is not a value of this parameter"),
                        format!("use one of {}", words.join(", ")),
                    );
                    return None;
                }
                Some(Setting::Text(text.to_owned()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_defaults_fit() {
        let mut names: Vec<_> = PARAMETERS.iter().map(|parameter| parameter.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), PARAMETERS.len());
        for Parameter { name, kind, default, .. } in PARAMETERS {
            if let Some(text) = *default {
                let fits = match kind {
                    Text | TextOrBoolean => true,
                    Duration => parse_duration(text).is_ok(),
                    Boolean => text.parse::<bool>().is_ok(),
                    Integer => text.parse::<u32>().is_ok(),
                    Choice(words) => words.contains(&text),
                };
                assert!(fits, "{name}: {text}");
            }
        }
    }
}
