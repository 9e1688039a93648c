//! Properties of each provider, so that no other module distinguishes providers.

use std::any::Any;

use super::{Parameter, Parameters, Provider, ProviderError};
use crate::record::Name;

/// A value of `spec.provider`: its parameters, its obstacles, and what serves it.
#[derive(Debug)]
pub struct Definition {
    /// Name in documents, which external-dns's `--provider` shares.
    pub name: &'static str,
    /// Parameters of document 003 that not every provider has.
    pub parameters: &'static [Parameter],
    /// Parameters without which the provider cannot be used.
    pub required: &'static [&'static str],
    /// Members of `provider_settings` that document 003 has no parameter for.
    pub settings: &'static [&'static str],
    /// Settings that external-dns and its libraries take from the environment: variable and setting, in ascending
    /// precedence.
    pub environment: &'static [(&'static str, &'static str)],
    /// Switches of external-dns that a rendered Deployment needs unless the record sets them.
    pub switches: &'static [&'static str],
    /// Whether external-dns itself serves the provider, as the peer of a webhook.
    pub is_peer: bool,
    /// Returns further reasons why a valid record cannot be used.
    pub obstacles: fn(&Parameters) -> Vec<String>,
    /// Returns remarks on contradictions that have a defined resolution.
    pub remarks: fn(&Parameters) -> Vec<String>,
    /// Formats a parameter, given by name and text, whose form on external-dns's command line differs from the
    /// document's.
    pub arguments: fn(&str, &str) -> Option<Vec<String>>,
    /// Parses the settings.
    pub(crate) configure: Configure,
}

pub(crate) type Configure = fn(&Parameters) -> Result<Box<dyn ProviderSettings>, ProviderError>;

impl Definition {
    /// Returns the definition of a provider that has only general parameters.
    pub(crate) const fn new(name: &'static str, configure: Configure) -> Self {
        Self {
            name,
            parameters: &[],
            required: &[],
            settings: &[],
            environment: &[],
            switches: &[],
            is_peer: false,
            obstacles: |_| Vec::new(),
            remarks: |_| Vec::new(),
            arguments: |_, _| None,
            configure,
        }
    }

    /// Returns the reasons why a record with these parameters cannot be used, although it is valid in the document's
    /// schema.
    pub(crate) fn all_obstacles(&self, parameters: &Parameters) -> Vec<String> {
        let mut found = Vec::new();
        for name in self.required {
            if parameters.text(name).is_none() {
                found.push(format!("{name} is missing; add it"));
            }
        }
        found.extend((self.obstacles)(parameters));
        found
    }
}

/// Parsed settings of one provider.
pub(crate) trait ProviderSettings: Any {
    /// Opens the provider without sending a request.
    fn open(self: Box<Self>) -> Result<Box<dyn Provider>, ProviderError>;

    /// Returns the zones that the settings of both select. The root stands for zones that only the service knows.
    fn shared_zones(&self, other: &dyn Any) -> Vec<Name>;
}

/// Returns the root if settings of the same type may reach the same zones.
pub(crate) fn shared_root<S: 'static>(
    one: &S,
    other: &dyn Any,
    may_share: impl FnOnce(&S, &S) -> bool,
) -> Vec<Name> {
    // Settings of another provider reach other zones.
    match other.downcast_ref() {
        Some(other) if may_share(one, other) => vec![Name::root()],
        _ => Vec::new(),
    }
}
