//! Definition of a row in the table of external-dns's parameters.

use super::Provider;

pub use super::table::PARAMETERS;

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
    /// Example for the OpenAPI document.
    pub example: &'static str,
    /// Meaning, for the OpenAPI document.
    pub summary: &'static str,
    /// Effect on the publisher.
    pub effect: Effect,
}

/// Schemas into which the document divides the parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// `extdns_general`: for every provider.
    General,
    /// `extdns_provider_aws`: parameters for Route 53.
    Aws,
    /// `extdns_provider_azure`: parameters for Azure DNS.
    Azure,
    /// `extdns_provider_coredns`: parameters for CoreDNS's etcd.
    CoreDns,
    /// `extdns_provider_rfc2136`: parameters for DNS UPDATE.
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
    /// The JSON literals `true` and `false`.
    Boolean,
    /// A non-negative JSON integer.
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
    /// Returns the parameter with this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        PARAMETERS.iter().find(|parameter| parameter.name == name)
    }

    /// Returns the reason why the publisher ignores it; `None` if it has an effect.
    pub fn without_effect(&self) -> Option<&'static str> {
        match self.effect {
            Effect::Used => None,
            Effect::KubernetesOnly => {
                Some("has no effect here: it configures external-dns's sources inside Kubernetes")
            }
            Effect::Process => {
                Some("has no effect here: the publisher's own configuration decides for the whole process")
            }
            Effect::Fixed(behaviour) => Some(behaviour),
        }
    }
}
