//! Settings of a provider, named like external-dns's parameters.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use super::ProviderError;

/// Parameters of one record as text, by external-dns's names such as `rfc2136-host`. A blank text
/// counts as absent.
#[derive(Debug, Clone, Default)]
pub struct Parameters(pub BTreeMap<String, String>);

impl Parameters {
    /// Returns a parameter's text; `None` if absent.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(|value| value.trim()).filter(|value| !value.is_empty())
    }

    /// Returns a mandatory parameter's text.
    pub fn required(&self, name: &str) -> Result<&str, ProviderError> {
        self.text(name).ok_or_else(|| ProviderError::Settings(format!("{name} is missing; set it")))
    }

    /// Returns the elements of a comma-separated list.
    pub fn list(&self, name: &str) -> Vec<&str> {
        let parts = self.text(name).unwrap_or("").split(',').map(str::trim);
        parts.filter(|part| !part.is_empty()).collect()
    }

    /// Returns a parameter as a path; `None` if absent.
    pub fn path(&self, name: &str) -> Option<PathBuf> {
        self.text(name).map(PathBuf::from)
    }

    /// Returns a flag; false if absent.
    pub fn flag(&self, name: &str) -> Result<bool, ProviderError> {
        match self.text(name) {
            None | Some("false") => Ok(false),
            Some("true") => Ok(true),
            Some(other) => Err(bad(name, other, "true or false")),
        }
    }

    /// Returns a number, or the default if absent.
    pub fn number(&self, name: &str, default: u32) -> Result<u32, ProviderError> {
        let Some(text) = self.text(name) else { return Ok(default) };
        text.parse().map_err(|_| bad(name, text, "a non-negative number"))
    }

    /// Returns a duration such as `500ms`, `1s` or `2m`, or the default if absent.
    pub fn duration(&self, name: &str, default: Duration) -> Result<Duration, ProviderError> {
        let Some(text) = self.text(name) else { return Ok(default) };
        let digits = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let factor = match unit {
            "ms" => Some(Duration::from_millis(1)),
            "s" => Some(Duration::from_secs(1)),
            "m" => Some(Duration::from_mins(1)),
            _ => None,
        };
        let parsed =
            number.parse().ok().zip(factor).and_then(|(count, unit): (u32, _)| unit.checked_mul(count));
        parsed.ok_or_else(|| bad(name, text, "a duration such as 500ms, 1s or 2m"))
    }
}

fn bad(name: &str, value: &str, expected: &str) -> ProviderError {
    ProviderError::Settings(format!("{name} is {value:?}; write {expected}"))
}
