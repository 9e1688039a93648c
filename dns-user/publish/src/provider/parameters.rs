//! Parameters of providers: their types and defaults, and their texts once the sources are joined.

use std::{collections::BTreeMap, fmt, path::PathBuf, time::Duration as Time};

use dns_core::config::values::parse_duration;
use serde::Serialize;

use self::ParameterKind::{Boolean, Choice, Duration, Integer, List, SwitchOrBoolean, Text};
use super::{ProviderError, settings};
use crate::{
    endpoint::MAX_TTL,
    text::{self, Reader},
};

/// One parameter of `external-dns-parameters`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Name in the API, which is also external-dns's flag.
    pub name: &'static str,
    /// Type of the value.
    pub kind: ParameterKind,
    /// Default, if the document states one.
    pub default: Option<&'static str>,
    /// The reason why the publisher ignores it, if it does. Rendered Deployments contain all parameters.
    pub without_effect: Option<&'static str>,
}

/// Type of a parameter's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterKind {
    /// A JSON string, taken unchanged.
    Text,
    /// A JSON string with elements separated by commas; external-dns has a flag for each.
    List,
    /// A JSON string that a manifest must not contain; external-dns reads it from the environment.
    Secret,
    /// A JSON string for a boolean flag of external-dns.
    Switch,
    /// Such a string, or the boolean that the document's own example uses instead.
    SwitchOrBoolean,
    /// A JSON string holding a Go duration, such as `30s`.
    Duration,
    /// A JSON boolean.
    Boolean,
    /// A JSON number that is whole and not negative.
    Integer,
    /// A JSON string with one of these values.
    Choice(&'static [&'static str]),
}

const KUBERNETES: &str =
    "has no effect here: it configures external-dns's sources inside Kubernetes";

const PROCESS: &str =
    "has no effect here: the publisher's own configuration decides for the whole process";

impl Parameter {
    pub(crate) const fn new(name: &'static str, kind: ParameterKind) -> Self {
        Self {
            name,
            kind,
            default: None,
            without_effect: None,
        }
    }

    pub(crate) const fn ignored(self, reason: &'static str) -> Self {
        Self {
            without_effect: Some(reason),
            ..self
        }
    }

    const fn by_default(self, default: &'static str) -> Self {
        Self {
            default: Some(default),
            ..self
        }
    }
}

/// Parameters of every provider (`extdns_general`), in the order of the document.
#[rustfmt::skip]
// One row each, so that they can be compared with the document.
pub(crate) const GENERAL: &[Parameter] = &[
    Parameter::new("request-timeout", Duration).ignored(KUBERNETES),
    Parameter::new("contour-load-balancer", Text).ignored(KUBERNETES).by_default("heptio-contour/contour"),
    Parameter::new("fqdn-template", Text).ignored(KUBERNETES),
    Parameter::new("combine-fqdn-annotation", Boolean).ignored(KUBERNETES),
    Parameter::new("ignore-hostname-annotation", Boolean).ignored(KUBERNETES).by_default("false"),
    Parameter::new("compatibility", Choice(&["mate", "molecule"])).ignored(KUBERNETES),
    Parameter::new("publish-internal-services", Boolean).ignored(KUBERNETES),
    Parameter::new("publish-host-ip", SwitchOrBoolean).ignored(KUBERNETES),
    Parameter::new("service-type-filter",
        Choice(&["all", "ClusterIP", "NodePort", "LoadBalancer", "ExternalName"])).ignored(KUBERNETES).by_default("all"),
    Parameter::new("domain-filter", List),
    Parameter::new("exclude-domains", List),
    Parameter::new("zone-id-filter", List),
    Parameter::new("tls-ca", Text),
    Parameter::new("tls-client-cert", Text),
    Parameter::new("tls-client-cert-key", Text),
    Parameter::new("policy", Choice(&["sync", "upsert-only", "create-only"])).by_default("sync"),
    Parameter::new("registry", Choice(&["txt", "noop", "aws-sd"])).by_default("txt"),
    Parameter::new("txt-owner-id", Text).by_default("default"),
    Parameter::new("txt-prefix", Text),
    Parameter::new("txt-cache-interval", Duration).ignored("has no effect here: zones are listed in every round"),
    Parameter::new("interval", Duration).by_default("1m"),
    Parameter::new("once", Boolean).ignored(PROCESS),
    Parameter::new("dry-run", Boolean),
    Parameter::new("log-format", Choice(&["text", "json"])).ignored(PROCESS).by_default("text"),
    Parameter::new("metrics-address", Text).ignored(PROCESS),
    Parameter::new("log-level", Choice(&["panic", "debug", "info", "warning", "error", "fatal"])).ignored(PROCESS)
        .by_default("info"),
];

/// Maximum length of a text in octets; lists of domains and zones are the longest.
const MAX_TEXT: usize = 16 * 1024;

/// Value of a parameter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Setting {
    /// Value of a boolean parameter.
    Boolean(bool),
    /// Value of an integer parameter, not negative.
    Integer(u32),
    /// Value of any other parameter, as text.
    Text(String),
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

impl ParameterKind {
    pub(crate) fn read(self, value: &Reader<'_>) -> Option<Setting> {
        if let text::Value::Text(text) = &value.node.value
            // First of all, because the messages below repeat the text.
            && text.len() > MAX_TEXT
        {
            return value.refuse(
                format!("it has {} octets", text.len()),
                format!("use at most {MAX_TEXT}"),
            );
        }
        let text = match (self, &value.node.value) {
            // The document's schema has a text for these switches, its example a boolean.
            (Boolean, _) | (SwitchOrBoolean, text::Value::Bool(_)) => {
                return value.boolean().map(Setting::Boolean);
            }
            (Integer, _) => return value.integer(0..=u32::MAX).map(Setting::Integer),
            _ => value.text()?,
        };
        match self {
            // Only checked: a record is returned as it was written.
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

/// Parameters of one record as text, by external-dns's names such as `rfc2136-host`. A blank text counts as absent.
#[derive(Debug, Clone, Default)]
pub struct Parameters(pub BTreeMap<String, String>);

impl Parameters {
    /// Returns a parameter's text; `None` if absent.
    pub fn text(&self, name: &str) -> Option<&str> {
        match self.0.get(name)?.trim() {
            "" => None,
            text => Some(text),
        }
    }

    /// Returns a mandatory parameter's text.
    pub fn required(&self, name: &str) -> Result<&str, ProviderError> {
        self.text(name)
            .ok_or_else(|| settings(format!("{name} is missing; set it")))
    }

    /// Returns the elements of a comma-separated list.
    pub fn list(&self, name: &str) -> Vec<&str> {
        elements(self.text(name).unwrap_or("")).collect()
    }

    /// Returns two parameters that require each other; `None` if both are absent.
    pub(crate) fn pair(
        &self,
        one: &str,
        other: &str,
    ) -> Result<Option<(String, String)>, ProviderError> {
        match (self.text(one), self.text(other)) {
            (Some(one), Some(other)) => Ok(Some((one.to_owned(), other.to_owned()))),
            (None, None) => Ok(None),
            _ => Err(settings(format!(
                "{one} and {other} require each other; set both or neither"
            ))),
        }
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
        let Some(text) = self.text(name) else {
            return Ok(default);
        };
        text.parse()
            .map_err(|_| bad(name, text, "a non-negative number"))
    }

    /// Returns a TTL in seconds, written as a duration such as `72s` or as a number; 0 if absent.
    pub fn ttl(&self, name: &str) -> Result<u32, ProviderError> {
        let text = self.text(name).unwrap_or("0");
        let seconds = match text.parse() {
            Ok(seconds) => seconds,
            Err(_) => self.duration(name, Time::ZERO)?.as_secs(),
        };
        match u32::try_from(seconds) {
            Ok(ttl) if ttl <= MAX_TTL => Ok(ttl),
            // Servers read a larger one as 0 (RFC 2181, section 8), and it would be changed in every round.
            _ => Err(bad(name, text, &format!("at most {MAX_TTL} s"))),
        }
    }

    /// Returns a duration such as `500ms`, `1s` or `2m`, or the default if absent.
    pub fn duration(&self, name: &str, default: Time) -> Result<Time, ProviderError> {
        let Some(text) = self.text(name) else {
            return Ok(default);
        };
        parse_duration(text).map_err(|_| bad(name, text, "a duration such as 500ms, 1s or 2m"))
    }
}

/// Returns the elements of a comma-separated list.
pub(crate) fn elements(list: &str) -> impl Iterator<Item = &str> {
    let parts = list.split(',').map(str::trim);
    parts.filter(|part| !part.is_empty())
}

fn bad(name: &str, value: &str, expected: &str) -> ProviderError {
    settings(format!("{name} is {value:?}; write {expected}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_of_the_parameter_table_are_read() {
        let read = |text: &str| {
            let parameters = Parameters(BTreeMap::from([("interval".to_owned(), text.to_owned())]));
            parameters
                .duration("interval", Time::from_secs(7))
                .map_err(|error| error.to_string())
        };
        for (text, seconds) in [("", 7), ("0", 0), ("2m", 120), ("1h", 3600), ("1m30s", 90)] {
            assert_eq!(read(text), Ok(Time::from_secs(seconds)), "{text:?}");
        }
        let refused = read("5").unwrap_err();
        assert!(
            refused.ends_with("interval is \"5\"; write a duration such as 500ms, 1s or 2m"),
            "{refused}"
        );
    }

    #[test]
    fn values_have_their_type() {
        let with = |text: &str| Parameters(BTreeMap::from([("p".to_owned(), text.to_owned())]));
        let absent = Parameters(BTreeMap::new());
        for (text, ttl) in [
            ("72", Some(72)),
            ("72s", Some(72)),
            ("2m", Some(120)),
            ("2147483647", Some(MAX_TTL)),
            ("2147483648", None),
            ("4294967296", None),
            ("600000h", None),
            ("x", None),
        ] {
            assert_eq!(with(text).ttl("p").ok(), ttl, "{text}");
        }
        assert_eq!(absent.ttl("p").ok(), Some(0));
        for (text, flag) in [("true", Some(true)), ("false", Some(false)), ("yes", None)] {
            assert_eq!(with(text).flag("p").ok(), flag, "{text}");
        }
        assert_eq!(absent.flag("p").ok(), Some(false));
        for (text, number) in [("0", Some(0)), ("9", Some(9)), ("-1", None)] {
            assert_eq!(with(text).number("p", 5).ok(), number, "{text}");
        }
        assert_eq!(absent.number("p", 5).ok(), Some(5));
        assert_eq!(with("/f").path("p"), Some(PathBuf::from("/f")));
        assert_eq!(absent.path("p"), None);
    }

    /// Reads a value of JSON as a parameter of a kind.
    fn read(kind: ParameterKind, value: &str) -> Result<Setting, String> {
        let problems = text::Problems::of("f");
        let whole = format!("[{value}]");
        let node = text::parse(text::documents(&whole)[0], &problems).unwrap();
        let root = Reader::root(&node, &problems);
        let item = root.items().unwrap().next().unwrap();
        let found = kind.read(&item);
        let problems = problems.into_vec();
        assert_eq!(found.is_none(), problems.len() == 1, "{problems:?}");
        found.ok_or_else(|| problems[0].to_string())
    }

    #[test]
    fn settings_have_the_parameters_kind() {
        let text = |text: &str| Ok(Setting::Text(text.to_owned()));
        for (kind, value, expected) in [
            (Text, "\"a b\"", text("a b")),
            (List, "\"a,b\"", text("a,b")),
            (ParameterKind::Secret, "\"s\"", text("s")),
            (ParameterKind::Switch, "\"x\"", text("x")),
            (SwitchOrBoolean, "\"x\"", text("x")),
            (SwitchOrBoolean, "true", Ok(Setting::Boolean(true))),
            (Boolean, "false", Ok(Setting::Boolean(false))),
            (Integer, "0", Ok(Setting::Integer(0))),
            (Integer, "4294967295", Ok(Setting::Integer(u32::MAX))),
            (Duration, "\"1m30s\"", text("1m30s")),
            (Choice(&["a", "b"]), "\"b\"", text("b")),
            (Text, "1", Err("1 instead of text; put it in quotes: \"1\"")),
            (
                ParameterKind::Switch,
                "true",
                Err("true instead of text; put it in quotes: \"true\""),
            ),
            (
                SwitchOrBoolean,
                "1",
                Err("1 instead of text; put it in quotes: \"1\""),
            ),
            (
                Boolean,
                "\"true\"",
                Err("the text \"true\" instead of true or false; give true or false"),
            ),
            (
                Integer,
                "4294967296",
                Err("4294967296 is out of range; give a whole number from 0 to 4294967295"),
            ),
            (
                Choice(&["a", "b"]),
                "\"c\"",
                Err("\"c\" is not a value of this parameter; use one of a, b"),
            ),
        ] {
            let expected = expected.map_err(|reason| format!("f:1: [0]: {reason}"));
            assert_eq!(read(kind, value), expected, "{kind:?} {value}");
        }
        let long = |length: usize| format!("\"{}\"", "x".repeat(length));
        assert!(read(Text, &long(16_384)).is_ok());
        assert_eq!(
            read(Text, &long(16_385)).unwrap_err(),
            "f:1: [0]: it has 16385 octets; use at most 16384"
        );
        let refused = read(Duration, "\"30\"").unwrap_err();
        assert!(
            refused.starts_with("f:1: [0]: \"30\" ")
                && refused.ends_with("; use a number with a unit, such as 30s or 1m"),
            "{refused}"
        );
    }

    #[test]
    fn settings_become_arguments() {
        for (setting, argument, shown) in [
            (Setting::Boolean(true), "--p", "true"),
            (Setting::Boolean(false), "--no-p", "false"),
            (Setting::Integer(7), "--p=7", "7"),
            (Setting::Text("a b".to_owned()), "--p=a b", "a b"),
        ] {
            assert_eq!(setting.argument("p"), argument);
            assert_eq!(setting.to_string(), shown);
        }
        assert_eq!(format!("[{:>3}]", Setting::Integer(7)), "[  7]");
    }

    #[test]
    fn mistakes_name_the_parameter() {
        let with = |text: &str| Parameters(BTreeMap::from([("p".to_owned(), text.to_owned())]));
        let shown = |error: ProviderError| error.to_string();
        assert_eq!(
            shown(with("x").number("p", 0).unwrap_err()),
            "p is \"x\"; write a non-negative number"
        );
        assert_eq!(
            shown(with("x").flag("p").unwrap_err()),
            "p is \"x\"; write true or false"
        );
        assert_eq!(
            shown(with("x").ttl("p").unwrap_err()),
            "p is \"x\"; write a duration such as 500ms, 1s or 2m"
        );
        assert_eq!(
            shown(with("600000h").ttl("p").unwrap_err()),
            "p is \"600000h\"; write at most 2147483647 s"
        );
        assert_eq!(
            shown(with("").required("p").unwrap_err()),
            "p is missing; set it"
        );
        let both = Parameters(BTreeMap::from([
            ("p".to_owned(), "1".to_owned()),
            ("q".to_owned(), " 2 ".to_owned()),
        ]));
        assert_eq!(
            both.pair("p", "q").unwrap(),
            Some(("1".to_owned(), "2".to_owned()))
        );
        assert_eq!(both.pair("r", "s").unwrap(), None);
        for (one, other) in [("p", "r"), ("r", "p")] {
            assert_eq!(
                shown(both.pair(one, other).unwrap_err()),
                format!("{one} and {other} require each other; set both or neither")
            );
        }
        assert_eq!(elements(" a ,, b,").collect::<Vec<_>>(), ["a", "b"]);
    }
}
