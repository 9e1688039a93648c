//! Values of parameters, parsed by the table and written back unchanged.

use std::{collections::BTreeMap, fmt, time::Duration};

use dns_core::config::duration::parse_duration;
use serde::{Deserialize, Serialize};

use super::{
    Provider,
    parameters::{Kind, PARAMETERS, Parameter},
};
use crate::text::{Reader, Value};

/// Maximum length of a text in octets; lists of domains and zones are the longest.
const MAX_TEXT: usize = 16 * 1024;

/// Parameters set in a record. Defaults are omitted, so a record is returned as written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Parameters(BTreeMap<&'static str, Setting>);

/// The value of a parameter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Setting {
    /// Value of a boolean parameter.
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
            if let (false, Some(setting)) = (value.is_null(), parameter.kind.read(&value)) {
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

    /// Returns a duration, or its default.
    pub fn duration(&self, name: &str) -> Option<Duration> {
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
    /// Parses a value of this type.
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
