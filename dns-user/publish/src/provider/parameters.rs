//! Settings of a provider, named like external-dns's parameters.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use dns_core::config::values::parse_duration;

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
        parse_duration(text).map_err(|_| bad(name, text, "a duration such as 500ms, 1s or 2m"))
    }
}

fn bad(name: &str, value: &str, expected: &str) -> ProviderError {
    ProviderError::Settings(format!("{name} is {value:?}; write {expected}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_of_the_parameter_table_are_read() {
        let read = |text: &str| {
            let parameters = Parameters(BTreeMap::from([("interval".to_owned(), text.to_owned())]));
            parameters.duration("interval", Duration::from_secs(7)).map_err(|error| error.to_string())
        };
        for (text, seconds) in [("", 7), ("0", 0), ("2m", 120), ("1h", 3600), ("1m30s", 90)] {
            assert_eq!(read(text), Ok(Duration::from_secs(seconds)), "{text:?}");
        }
        let refused = read("5").unwrap_err();
        assert!(
            refused.ends_with("interval is \"5\"; write a duration such as 500ms, 1s or 2m"),
            "{refused}"
        );
    }
}
