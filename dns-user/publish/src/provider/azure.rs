//! Azure DNS and Azure Private DNS, which external-dns serves.

use super::{Definition, Parameter, ParameterKind::Text, webhook};

/// Azure DNS, for public zones.
pub(super) const DEFINITION: Definition = Definition {
    parameters: PARAMETERS,
    required: &["azure-config-file"],
    ..webhook::peer("azure")
};

pub(super) const ALTERNATIVE: Definition = Definition {
    name: "azure-dns",
    ..DEFINITION
};

/// Azure Private DNS, for virtual networks.
pub(super) const PRIVATE: Definition = Definition {
    parameters: PARAMETERS,
    required: &["azure-resource-group", "azure-subscription-id"],
    ..webhook::peer("azure-private-dns")
};

const PARAMETERS: &[Parameter] = &[
    Parameter::new("azure-config-file", Text),
    Parameter::new("azure-resource-group", Text),
    Parameter::new("azure-subscription-id", Text),
    Parameter::new("azure-user-assigned-identity-client-id", Text),
];
