//! DNS Update Records, the lists that bind them to logical clouds and clusters, and the intents
//! that use them, as source document 003 defines them. Pure.

mod intent;

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;
use serde_json::{Value, json};

pub(crate) use self::intent::{Intent, ListOwner, RecordList};
use crate::{
    endpoint::{Labels, Selector},
    provider::{Parameter, Parameters, ProviderKind, Setting},
    text::{self, Fields, Reader, remedy_for_unknown},
};

/// Label that assigns endpoints to a DNS Update Record.
pub(crate) const PROVIDER_LABEL: &str = "dnsprovider";

/// Default namespace, and project, of documents.
pub(crate) const DEFAULT_PROJECT: &str = "default";

/// A DNS Update Record: a provider and its parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpdateRecord {
    pub metadata: Metadata,
    pub provider: ProviderKind,
    /// `spec.selector`, an extension of the document: selects the endpoints for this provider. By
    /// default, endpoints whose label `dnsprovider` equals the record's name.
    pub selector: Option<Selector>,
    pub parameters: DocumentParameters,
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

impl UpdateRecord {
    /// Parses `{metadata, spec}`; reports problems, and returns `None` if there are any.
    pub fn read(fields: &mut Fields<'_>) -> Option<Self> {
        let problems = fields.map.problems;
        let before = problems.count();
        let metadata = fields.required_as("metadata", Metadata::read_member);
        let mut spec = fields.required("spec")?.fields()?;
        let provider = spec.required_as("provider", read_provider);
        let parameters = spec.optional_as("external-dns-parameters", |parameters| {
            Some(DocumentParameters::read(parameters, provider))
        });
        let selector = spec.optional_as("selector", Selector::read);
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
        let texts = self.parameters.texts();
        let mut found = self.provider.definition().all_obstacles(&texts);
        for name in ["domain-filter", "exclude-domains"] {
            // A restriction was meant, but all names would be published.
            if self.parameters.is_blank(name) {
                found.push(format!(
                    "{name} is empty, which filters nothing; name domains, or remove it"
                ));
            }
        }
        // This registry keeps ownership in AWS Cloud Map, which only external-dns reaches.
        if texts.text("registry") == Some("aws-sd") {
            found.push(
                "registry aws-sd is not available in bosh-dns-publish; use txt or noop, or run external-dns itself \
                 (bosh-dns-publish render)"
                    .to_owned(),
            );
        }
        found
    }

    /// Returns remarks for the status: parameters without effect, and contradictions that have a
    /// defined resolution.
    pub fn remarks(&self) -> Vec<String> {
        let mut found = Vec::new();
        for (parameter, _) in self.parameters.iter() {
            if let Some(reason) = parameter.without_effect {
                found.push(format!("{} {reason}", parameter.name));
            }
        }
        let texts = self.parameters.texts();
        found.extend((self.provider.definition().remarks)(&texts));
        found
    }
}

fn read_provider(reader: &Reader<'_>) -> Option<ProviderKind> {
    let name = reader.text()?;
    let found = ProviderKind::ALL
        .into_iter()
        .find(|provider| provider.name() == name)
        .ok_or_else(|| format!("{name:?} is not a provider"));
    let known = ProviderKind::ALL.map(ProviderKind::name).join(", ");
    reader.accept(found, &format!("use one of {known}"))
}

impl Metadata {
    /// Parses the member `metadata`, whose unknown members are ignored.
    fn read_member(reader: &Reader<'_>) -> Option<Self> {
        Self::read(&mut reader.fields()?)
    }

    /// Parses `metadata`. Unknown members, such as Kubernetes adds, are left to the caller.
    pub fn read(fields: &mut Fields<'_>) -> Option<Self> {
        let name = fields.required_as("name", read_identifier);
        let description = fields.optional_as("description", read_text);
        let user_data1 = read_user_data(fields, "userdata1", "userData1");
        let user_data2 = read_user_data(fields, "userdata2", "userData2");
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

fn read_text(reader: &Reader<'_>) -> Option<String> {
    reader.text().map(str::to_owned)
}

/// Reads a member whose name has two spellings.
fn read_user_data(
    fields: &mut Fields<'_>,
    lower: &'static str,
    camel: &'static str,
) -> Option<String> {
    let one = fields.optional(lower);
    let other = fields.optional(camel);
    if let (Some(_), Some(other)) = (&one, &other) {
        // Which of the two is meant is not known.
        other.problem(
            format!("{lower} is also set"),
            format!("keep one of {lower} and {camel}"),
        );
    }
    read_text(&one.or(other)?)
}

/// Parses a name that is valid in a URL and in a Kubernetes label.
pub(crate) fn read_identifier(reader: &Reader<'_>) -> Option<String> {
    let text = reader.text()?;
    let remedy = "use up to 63 letters, digits, dashes, dots and underscores, with a letter or digit at both ends";
    if is_identifier(text) {
        Some(text.to_owned())
    } else {
        reader.refuse(format!("{text:?} is not a valid name"), remedy)
    }
}

/// Returns whether a text is valid in a URL and in a Kubernetes label.
pub(crate) fn is_identifier(text: &str) -> bool {
    // As labels of Kubernetes, from which documents come; they become file names here.
    text.len() <= 63
        && text.starts_with(|letter: char| letter.is_ascii_alphanumeric())
        && text.ends_with(|letter: char| letter.is_ascii_alphanumeric())
        && text
            .chars()
            .all(|letter| letter.is_ascii_alphanumeric() || "-._".contains(letter))
}

/// Parameters set in a record. Defaults are omitted, so a record is returned as written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct DocumentParameters(BTreeMap<&'static str, Setting>);

impl DocumentParameters {
    /// Parses `external-dns-parameters`; reports members that the table does not allow.
    pub fn read(reader: &Reader<'_>, provider: Option<ProviderKind>) -> Self {
        let mut settings = BTreeMap::new();
        let Some(mut fields) = reader.fields() else {
            return Self(settings);
        };
        // The document's schema also requires `provider` among the general parameters.
        if let (Some(again), Some(provider)) = (fields.optional("provider"), provider)
            && let Some(name) = again.text()
            && name != provider.name()
        {
            again.problem(
                "it differs from spec.provider",
                "remove it: spec.provider decides",
            );
        }
        for (name, value) in fields.others() {
            let Some(parameter) = Parameter::named(name) else {
                let known: Vec<_> = Parameter::all().map(|parameter| parameter.name).collect();
                value.problem(
                    format!("external-dns has no parameter {name:?} in document 003"),
                    remedy_for_unknown(name, &known),
                );
                continue;
            };
            if let Some(provider) = provider
                && !provider.has(parameter)
            {
                value.problem(
                    format!(
                        "{name} is not a parameter of the provider {}",
                        provider.name()
                    ),
                    "remove it, or change spec.provider",
                );
                continue;
            }
            if value.node.value != text::Value::Null
                && let Some(setting) = parameter.kind.read(&value)
            {
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

    pub fn is_blank(&self, name: &str) -> bool {
        matches!(self.0.get(name), Some(Setting::Text(text)) if text.trim().is_empty())
    }

    pub fn is_set(&self, name: &str) -> bool {
        self.0.get(name) == Some(&Setting::Boolean(true))
    }

    /// Returns every parameter that is set or has a default, as text.
    pub fn texts(&self) -> Parameters {
        let mut texts = BTreeMap::new();
        for parameter in Parameter::all() {
            if let Some(default) = parameter.default {
                texts.insert(parameter.name.to_owned(), default.to_owned());
            }
        }
        for (name, setting) in &self.0 {
            texts.insert((*name).to_owned(), setting.to_string());
        }
        Parameters(texts)
    }

    /// Returns the time from one round to the next.
    pub fn interval(&self) -> Duration {
        // `read` accepts only valid durations, and there is a default.
        let interval = self.texts().duration("interval", Duration::ZERO);
        interval.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
