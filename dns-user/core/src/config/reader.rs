//! Typed access to the members of a configuration object, with errors that contain file, member,
//! cause and allowed values.

use std::{
    cell::RefCell, collections::BTreeSet, fmt, net::IpAddr, path::PathBuf, rc::Rc, time::Duration,
};

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use super::{ConfigError, values::parse_duration};

/// An object of the configuration with its path.
pub struct ObjectReader<'a> {
    /// Path of the file, for messages.
    file: &'a str,
    /// Path of the object inside the file: empty for the root, or such as `health`.
    path: String,
    /// All members in document order; several objects of the same name are merged, as in bosh-dns.
    members: Vec<(&'a str, &'a Json)>,
    /// Paths requested so far in the whole document.
    requested: Rc<RefCell<BTreeSet<String>>>,
}

impl<'a> ObjectReader<'a> {
    /// Wraps a document, which must be an object.
    pub fn document(file: &'a str, json: &'a Json) -> Result<Self, ConfigError> {
        let Json::Object(members) = json else {
            return Err(ConfigError::of_file(
                file,
                format!("is {}, not an object of settings", json.kind()),
            ));
        };
        Ok(Self {
            file,
            path: String::new(),
            members: borrowed(members).collect(),
            requested: Rc::default(),
        })
    }

    /// Returns the object `name`; empty if absent or null.
    pub fn object(&self, name: &'static str) -> Result<Self, ConfigError> {
        let mut members = Vec::new();
        for value in self.all(name) {
            match value {
                Json::Object(inner) => {
                    members.extend(borrowed(inner));
                }
                Json::Null => {}
                other => return Err(self.wrong(name, other, "an object")),
            }
        }
        Ok(Self {
            file: self.file,
            path: self.path_of(name),
            members,
            requested: self.requested.clone(),
        })
    }

    /// Returns the objects in the list `name`; empty if absent or null.
    pub fn objects(&self, name: &'static str) -> Result<Vec<Self>, ConfigError> {
        let mut objects = Vec::new();
        for (index, item) in self.list(name)?.unwrap_or_default().iter().enumerate() {
            objects.push(self.item(name, index, item)?);
        }
        Ok(objects)
    }

    /// Parses each object in the list `name` and returns every error, not just the first; empty if
    /// absent or null.
    pub fn parse_objects<T>(
        &self,
        name: &'static str,
        parse: impl Fn(&Self) -> Result<T, Vec<ConfigError>>,
    ) -> Result<Vec<T>, Vec<ConfigError>> {
        let mut parsed = Vec::new();
        let mut errors = Vec::new();
        let list = self
            .list(name)
            .map_err(|error| vec![error])?
            .unwrap_or_default();
        for (index, item) in list.iter().enumerate() {
            match self.item(name, index, item) {
                Ok(item) => match parse(&item) {
                    Ok(item) => parsed.push(item),
                    Err(more) => errors.extend(more),
                },
                Err(error) => errors.push(error),
            }
        }
        if errors.is_empty() {
            Ok(parsed)
        } else {
            Err(errors)
        }
    }

    /// Returns whether a member of this name is present and not null.
    pub fn has(&self, name: &'static str) -> bool {
        self.value(name).is_some()
    }

    /// Returns the string `name`; `None` if absent or null.
    pub fn text(&self, name: &'static str) -> Result<Option<&'a str>, ConfigError> {
        match self.value(name) {
            None => Ok(None),
            Some(Json::Text(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(name, other, "a text")),
        }
    }

    /// Returns the boolean `name`; `None` if absent or null.
    pub fn boolean(&self, name: &'static str) -> Result<Option<bool>, ConfigError> {
        match self.value(name) {
            None => Ok(None),
            Some(Json::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(self.wrong(name, other, "true or false")),
        }
    }

    /// Returns a text; an empty one counts as absent.
    pub fn filled(&self, name: &'static str) -> Result<Option<&'a str>, ConfigError> {
        Ok(self.text(name)?.filter(|text| !text.is_empty()))
    }

    /// Returns a path; an empty one counts as absent.
    pub fn path(&self, name: &'static str) -> Result<Option<PathBuf>, ConfigError> {
        Ok(self.filled(name)?.map(PathBuf::from))
    }

    /// Returns the integer `name` after checking its range.
    pub fn number(
        &self,
        name: &'static str,
        min: u64,
        max: u64,
    ) -> Result<Option<u64>, ConfigError> {
        let Some(value) = self.value(name) else {
            return Ok(None);
        };
        match value.number_within(min, max) {
            Some(number) => Ok(Some(number)),
            None => Err(self.wrong(name, value, &format!("a whole number from {min} to {max}"))),
        }
    }

    /// Returns the list of integers `name`, each from `min` to `max`; empty if absent.
    pub fn numbers(&self, name: &'static str, min: u64, max: u64) -> Result<Vec<u64>, ConfigError> {
        let allowed = format!("a list of whole numbers from {min} to {max}");
        let mut numbers = Vec::new();
        for item in self.list(name)?.unwrap_or_default() {
            let Some(number) = item.number_within(min, max) else {
                return Err(self.wrong(name, item, &allowed));
            };
            numbers.push(number);
        }
        Ok(numbers)
    }

    /// Returns the port number `name`, from 1.
    pub fn port(&self, name: &'static str) -> Result<Option<u16>, ConfigError> {
        let port = self.number(name, 1, u16::MAX.into())?;
        // The range check above makes this lossless.
        Ok(port.map(|port| port as u16))
    }

    /// Returns the IP address `name`; an empty text counts as absent.
    pub fn address(&self, name: &'static str) -> Result<Option<IpAddr>, ConfigError> {
        // For Go's decoder a missing string and an empty one are the same zero value.
        let Some(text) = self.filled(name)? else {
            return Ok(None);
        };
        let bare = text
            .strip_prefix('[')
            .and_then(|text| text.strip_suffix(']'))
            .unwrap_or(text);
        match bare.parse() {
            Ok(address) => Ok(Some(address)),
            Err(_) => Err(self.error(name, &format!("{text:?} is not an IP address"))),
        }
    }

    /// Returns the duration `name`. Null is an error, as in bosh-dns.
    pub fn duration(&self, name: &'static str) -> Result<Option<Duration>, ConfigError> {
        const ALLOWED: &str = "a duration such as \"400ms\", \"5s\" or \"1h2m3.5s\"";
        // Durations of bosh-dns decode themselves, so Go hands them `null` too, which is no text.
        match self.all(name).last() {
            None => Ok(None),
            Some(Json::Text(text)) => parse_duration(text).map(Some).map_err(|reason| {
                self.error(name, &format!("{text:?} {reason}; expected {ALLOWED}"))
            }),
            Some(other) => Err(self.wrong(name, other, ALLOWED)),
        }
    }

    /// Returns the duration `name`; zero counts as absent, as in Go.
    pub fn nonzero(&self, name: &'static str) -> Result<Option<Duration>, ConfigError> {
        Ok(self.duration(name)?.filter(|time| !time.is_zero()))
    }

    /// Returns the duration `name`, which must not be zero.
    pub fn positive(&self, name: &'static str) -> Result<Option<Duration>, ConfigError> {
        match self.duration(name)? {
            Some(Duration::ZERO) => Err(self.error(name, "must be longer than 0")),
            other => Ok(other),
        }
    }

    /// Returns the list of strings `name`; `None` if absent or null.
    pub fn texts(&self, name: &'static str) -> Result<Option<Vec<&'a str>>, ConfigError> {
        let Some(list) = self.list(name)? else {
            return Ok(None);
        };
        let mut texts = Vec::with_capacity(list.len());
        for item in list {
            match item {
                Json::Text(text) => texts.push(text.as_str()),
                other => return Err(self.wrong(name, other, "a list of texts")),
            }
        }
        Ok(Some(texts))
    }

    /// Returns the value chosen by the string `name` from a set.
    pub fn choice<T: Copy>(
        &self,
        name: &'static str,
        choices: &[(&str, T)],
    ) -> Result<Option<T>, ConfigError> {
        let Some(text) = self.text(name)? else {
            return Ok(None);
        };
        match choices.iter().find(|(word, _)| *word == text) {
            Some((_, value)) => Ok(Some(*value)),
            None => {
                let mut words = Vec::new();
                for (word, _) in choices {
                    words.push(format!("{word:?}"));
                }
                Err(self.error(
                    name,
                    &format!("{text:?} is unknown; expected one of {}", words.join(", ")),
                ))
            }
        }
    }

    /// Returns the object `value` of [`Self::entries`].
    pub fn entry(&self, name: &str, value: &'a Json) -> Result<Self, ConfigError> {
        let Json::Object(members) = value else {
            return Err(self.wrong(name, value, "an object"));
        };
        Ok(Self {
            file: self.file,
            path: self.path_of(name),
            members: borrowed(members).collect(),
            requested: self.requested.clone(),
        })
    }

    /// Returns all members, for objects whose names are data.
    pub fn entries(&self) -> impl Iterator<Item = (&'a str, &'a Json)> {
        self.members.iter().copied()
    }

    /// Creates an error about member `name`.
    pub fn error(&self, name: &str, problem: &str) -> ConfigError {
        ConfigError {
            file: self.file.to_owned(),
            key: Some(self.path_of(name)),
            problem: problem.to_owned(),
        }
    }

    /// Returns the paths of the members of this object that were not requested.
    pub fn unknown(&self) -> Vec<String> {
        let requested = self.requested.borrow();
        let mut unknown = Vec::new();
        for (name, _) in &self.members {
            // Comments, as written by `bosh-dns-xdp config --default`.
            if name.starts_with('#') {
                continue;
            }
            let path = self.path_of(name);
            let mut known = requested.iter();
            if !known.any(|known| known.eq_ignore_ascii_case(&path)) {
                unknown.push(path);
            }
        }
        unknown
    }

    /// Returns the paths requested in the whole document, except objects and lists of objects.
    pub fn requested_leaves(&self) -> BTreeSet<String> {
        let requested = self.requested.borrow();
        let mut leaves = BTreeSet::new();
        for path in requested.iter() {
            let has_inner = requested.iter().any(|other| {
                let rest = other.strip_prefix(path.as_str());
                rest.is_some_and(|rest| rest.starts_with(['.', '[']))
            });
            if !has_inner {
                leaves.insert(path.clone());
            }
        }
        leaves
    }

    /// Returns the object at `index` of the list `name`.
    fn item(&self, name: &str, index: usize, item: &'a Json) -> Result<Self, ConfigError> {
        self.entry(&format!("{name}[{index}]"), item)
    }

    fn list(&self, name: &'static str) -> Result<Option<&'a [Json]>, ConfigError> {
        match self.value(name) {
            None => Ok(None),
            Some(Json::List(list)) => Ok(Some(list)),
            Some(other) => Err(self.wrong(name, other, "a list")),
        }
    }

    /// Returns the last value of this name that is not null.
    fn value(&self, name: &'static str) -> Option<&'a Json> {
        self.all(name).filter(|value| **value != Json::Null).last()
    }

    /// Returns all values of this name, in any letter case.
    fn all(&self, name: &'static str) -> impl Iterator<Item = &'a Json> + use<'a> {
        // Absent keys count as well: the set is what the parser knows, not what the file has.
        self.requested.borrow_mut().insert(self.path_of(name));
        let mut found = Vec::new();
        for &(member, value) in &self.members {
            // Go's decoder assigns every spelling of a key to the same field, in document order.
            if member.eq_ignore_ascii_case(name) {
                found.push(value);
            }
        }
        found.into_iter()
    }

    fn wrong(&self, name: &str, found: &Json, allowed: &str) -> ConfigError {
        self.error(name, &format!("is {found}; expected {allowed}"))
    }

    fn path_of(&self, name: &str) -> String {
        if self.path.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.path)
        }
    }
}

/// Parses each object of a file that is a list, and returns every error, not just the first. Errors name an item
/// `name[3]`; `expected` describes the list.
pub fn parse_list<T>(
    file: &str,
    bytes: &[u8],
    name: &'static str,
    expected: &str,
    parse: impl Fn(&ObjectReader<'_>) -> Result<T, Vec<ConfigError>>,
) -> Result<Vec<T>, Vec<ConfigError>> {
    let list = Json::of_file(file, bytes).map_err(|error| vec![error])?;
    // Go decodes `null` into an empty list.
    if !matches!(list, Json::List(_) | Json::Null) {
        let problem = format!("is {}; expected {expected}", list.kind());
        return Err(vec![ConfigError::of_file(file, problem)]);
    }
    let document = Json::Object(vec![(name.to_owned(), list)]);
    ObjectReader::document(file, &document)
        .map_err(|error| vec![error])?
        .parse_objects(name, parse)
}

fn borrowed(members: &[(String, Json)]) -> impl Iterator<Item = (&str, &Json)> {
    members.iter().map(|(name, value)| (name.as_str(), value))
}

//----------- Json ---------------------------------------------------------
//
// JSON with the semantics of Go's decoder: members in document order and any letter case, the last
// of several wins, `null` leaves a setting unchanged.

/// A JSON value that keeps the order of members and repeated names.
#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    /// The literal `null`, which leaves a setting at its default.
    Null,
    /// One of the literals `true` and `false`.
    Bool(bool),
    /// Any number, exactly as written.
    Number(serde_json::Number),
    /// A string; invalid UTF-8 is replaced by U+FFFD.
    Text(String),
    /// A list of values of any kind.
    List(Vec<Json>),
    /// An object with its members in document order.
    Object(Vec<(String, Json)>),
}

impl Json {
    /// Parses a whole file. Invalid UTF-8 is replaced by U+FFFD, as in Go. The error contains line,
    /// column and reason.
    pub fn parse(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_str(&String::from_utf8_lossy(bytes))
    }

    /// Parses the content of `file`, which errors name.
    pub fn of_file(file: &str, bytes: &[u8]) -> Result<Self, ConfigError> {
        Self::parse(bytes)
            .map_err(|error| ConfigError::of_file(file, format!("is not JSON: {error}")))
    }

    /// Removes the member at `path`, such as `xdp.mode` or `logging.tags[0].name`, in every
    /// spelling; returns whether there was one.
    pub(super) fn remove(&mut self, path: &str) -> bool {
        let (first, rest) = match path.split_once('.') {
            Some((first, rest)) => (first, Some(rest)),
            None => (path, None),
        };
        let indexed = first
            .strip_suffix(']')
            .and_then(|text| text.split_once('['));
        let (name, index) = match indexed {
            Some((name, index)) => (name, index.parse::<usize>().ok()),
            None => (first, None),
        };
        let Self::Object(members) = self else {
            return false;
        };
        let before = members.len();
        if rest.is_none() && index.is_none() {
            // An earlier spelling would otherwise take effect in place of the invalid last one.
            members.retain(|(member, _)| !member.eq_ignore_ascii_case(name));
            return members.len() < before;
        }
        let mut inside = false;
        for (member, value) in members {
            if !member.eq_ignore_ascii_case(name) {
                continue;
            }
            match (value, index) {
                // List items have required members, so an invalid one is removed as a
                // whole.
                (Self::List(items), Some(index)) if index < items.len() => {
                    items.remove(index);
                    inside = true;
                }
                (value, None) => inside |= rest.is_some_and(|rest| value.remove(rest)),
                _ => {}
            }
        }
        inside
    }

    /// Returns the integer if the value is one in this range.
    pub fn number_within(&self, min: u64, max: u64) -> Option<u64> {
        let Self::Number(number) = self else {
            return None;
        };
        // `as_u64` refuses 53.0 and 5e1, as Go does for the field of an integer.
        number
            .as_u64()
            .filter(|number| (min..=max).contains(number))
    }

    /// Returns the kind of the value with its article, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Number(_) => "a number",
            Self::Text(_) => "a text",
            Self::List(_) => "a list",
            Self::Object(_) => "an object",
        }
    }
}

/// Formats the value as JSON, shortened to fit in a message.
impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Number(value) => write!(f, "{value}"),
            // A message is one line of the log, and a text may be a whole certificate in the wrong
            // place.
            Self::Text(value) if value.chars().count() > 60 => {
                write!(f, "{:?}...", value.chars().take(60).collect::<String>())
            }
            Self::Text(value) => write!(f, "{value:?}"),
            Self::List(_) | Self::Object(_) => f.write_str(self.kind()),
        }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(Json::Number(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(Json::Number(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
        // serde_json refuses 1e999 as out of range, so the number is finite.
        Ok(serde_json::Number::from_f64(value).map_or(Json::Null, Json::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        Ok(Json::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Json, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Json::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Json, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = entries.next_entry()? {
            members.push(member);
        }
        Ok(Json::Object(members))
    }
}

#[cfg(test)]
mod json_tests {
    use super::*;

    #[test]
    fn order_and_repeats_are_kept() {
        let json = Json::parse(br#"{"b": 1, "a": [null, true, "x"], "b": -2.5}"#).unwrap();
        let Json::Object(members) = json else {
            panic!("no object")
        };
        let names: Vec<&str> = members.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["b", "a", "b"]);
        assert_eq!(
            members[1].1,
            Json::List(vec![Json::Null, Json::Bool(true), Json::Text("x".into())])
        );
    }

    #[test]
    fn messages_show_short_values() {
        let shown = |text: &str| Json::parse(text.as_bytes()).unwrap().to_string();
        for (text, expected) in [
            ("null", "null"),
            ("true", "true"),
            ("-7", "-7"),
            ("1.5", "1.5"),
            ("[1]", "a list"),
            ("{}", "an object"),
            (r#""a\n""#, r#""a\n""#),
        ] {
            assert_eq!(shown(text), expected);
        }
        // Characters count, not bytes.
        let most = "é".repeat(60);
        assert_eq!(shown(&format!("{most:?}")), format!("{most:?}"));
        assert_eq!(shown(&format!("\"{most}x\"")), format!("{most:?}..."));
        // Numbers are kept as written if a setting can have them.
        for (text, number) in [
            ("18446744073709551615", Some(u64::MAX)),
            ("18446744073709551616", None),
            ("-1", None),
            ("5.0", None),
            ("5e0", None),
            ("\"5\"", None),
        ] {
            let json = Json::parse(text.as_bytes()).unwrap();
            assert_eq!(json.number_within(0, u64::MAX), number, "{text}");
        }
        let five = Json::Number(5.into());
        let found = [(5, 5), (4, 6), (6, 9), (0, 4)].map(|(min, max)| five.number_within(min, max));
        assert_eq!(found, [Some(5), Some(5), None, None]);
    }

    #[test]
    fn members_have_types_and_limits() {
        let json = Json::parse(
            br#"{"n": [1, 2], "t": ["a", ""], "o": [{"x": 1}, {"x": 2}], "six": "[::1]", "four": "10.0.0.1",
                "d": "5s", "zero": "0s", "word": "b", "empty": "", "path": "/p", "off": false, "none": null,
                "port": 65535, "many": 65536}"#,
        )
        .unwrap();
        let root = ObjectReader::document("f", &json).unwrap();
        let text = |error: ConfigError| error.to_string();
        assert_eq!(root.numbers("n", 1, 2).unwrap(), [1, 2]);
        assert_eq!(root.numbers("none", 1, 2).unwrap(), [0; 0]);
        assert_eq!(
            root.numbers("n", 2, 9).map_err(text),
            Err("f: n: is 1; expected a list of whole numbers from 2 to 9".to_owned())
        );
        assert_eq!(root.texts("t").unwrap(), Some(vec!["a", ""]));
        assert_eq!(root.texts("none").unwrap(), None);
        assert_eq!(
            root.texts("n").map_err(text),
            Err("f: n: is 1; expected a list of texts".to_owned())
        );
        assert_eq!(
            root.texts("d").map_err(text),
            Err("f: d: is \"5s\"; expected a list".to_owned())
        );
        let objects = root.objects("o").unwrap();
        let numbers: Vec<Option<u64>> = objects
            .iter()
            .map(|object| object.number("x", 0, 9).unwrap())
            .collect();
        assert_eq!(numbers, [Some(1), Some(2)]);
        assert_eq!(root.objects("none").unwrap().len(), 0);
        assert_eq!(root.address("six").unwrap(), "::1".parse().ok());
        assert_eq!(root.address("four").unwrap(), "10.0.0.1".parse().ok());
        assert_eq!(root.address("none").unwrap(), None);
        assert_eq!(root.address("empty").unwrap(), None);
        assert_eq!(
            root.address("d").map_err(text),
            Err("f: d: \"5s\" is not an IP address".to_owned())
        );
        assert_eq!(root.duration("d").unwrap(), Some(Duration::from_secs(5)));
        assert_eq!(root.positive("d").unwrap(), Some(Duration::from_secs(5)));
        assert_eq!(root.duration("zero").unwrap(), Some(Duration::ZERO));
        assert_eq!(root.nonzero("zero").unwrap(), None);
        assert_eq!(root.nonzero("d").unwrap(), Some(Duration::from_secs(5)));
        assert_eq!(
            root.positive("zero").map_err(text),
            Err("f: zero: must be longer than 0".to_owned())
        );
        assert_eq!(root.positive("absent").unwrap(), None);
        assert!(root.duration("none").is_err(), "as in bosh-dns");
        let choices = [("a", 1), ("b", 2)];
        assert_eq!(root.choice("word", &choices).unwrap(), Some(2));
        assert_eq!(root.choice("none", &choices).unwrap(), None);
        assert_eq!(
            root.choice("d", &choices).map_err(text),
            Err("f: d: \"5s\" is unknown; expected one of \"a\", \"b\"".to_owned())
        );
        assert_eq!(
            (root.text("empty").unwrap(), root.filled("empty").unwrap()),
            (Some(""), None)
        );
        assert_eq!(
            (root.text("d").unwrap(), root.filled("d").unwrap()),
            (Some("5s"), Some("5s"))
        );
        assert_eq!(root.path("path").unwrap(), Some("/p".into()));
        assert_eq!(root.path("empty").unwrap(), None);
        assert_eq!(root.boolean("off").unwrap(), Some(false));
        assert_eq!(root.boolean("none").unwrap(), None);
        assert_eq!(root.port("port").unwrap(), Some(65_535));
        assert_eq!(root.port("none").unwrap(), None);
        assert_eq!(
            root.port("many").map_err(text),
            Err("f: many: is 65536; expected a whole number from 1 to 65535".to_owned())
        );
        // Every wrong item is told.
        let errors = root
            .parse_objects("o", |item: &ObjectReader<'_>| -> Result<u64, _> {
                let number = item.number("x", 0, 9).unwrap().unwrap();
                Err(vec![item.error("x", &format!("is odd: {number}"))])
            })
            .unwrap_err();
        let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        assert_eq!(errors, ["f: o[0].x: is odd: 1", "f: o[1].x: is odd: 2"]);
        let parsed = root.parse_objects("o", |item: &ObjectReader<'_>| {
            Ok(item.number("x", 0, 9).unwrap())
        });
        assert_eq!(parsed.unwrap(), [Some(1), Some(2)]);
    }

    #[test]
    fn unrequested_members_are_unknown() {
        let json = Json::parse(
            br##"{"known": 1, "KNOWN": null, "# comment": 3, "other": {"x": 1}, "Other": {"y": 2}, "more": null,
                "list": [{"a": 1}, 7]}"##,
        )
        .unwrap();
        let root = ObjectReader::document("f.json", &json).unwrap();
        assert_eq!(
            root.unknown(),
            ["known", "KNOWN", "other", "Other", "more", "list"]
        );
        // `null` leaves a setting as it was.
        assert_eq!(root.number("known", 0, 9).unwrap(), Some(1));
        assert!(!root.has("more") && !root.has("less") && root.has("known"));
        let inner = root.object("other").unwrap();
        assert_eq!(
            inner.entries().map(|(name, _)| name).collect::<Vec<_>>(),
            ["x", "y"]
        );
        assert_eq!(inner.number("y", 0, 9).unwrap(), Some(2));
        assert_eq!(root.unknown(), ["list"]);
        assert_eq!(inner.unknown(), ["other.x"]);
        assert_eq!(
            root.objects("list").map(drop).unwrap_err().to_string(),
            "f.json: list[1]: is 7; expected an object"
        );
        let leaves: Vec<String> = root.requested_leaves().into_iter().collect();
        assert_eq!(leaves, ["known", "less", "list", "more", "other.y"]);
        let list = Json::parse(b"[]").unwrap();
        assert_eq!(
            ObjectReader::document("f.json", &list)
                .map(drop)
                .unwrap_err()
                .to_string(),
            "f.json: is a list, not an object of settings"
        );
    }

    #[test]
    fn trailing_text_is_refused() {
        let error = Json::parse(b"{}\n x").unwrap_err();
        assert_eq!((error.line(), error.column()), (2, 2));
        assert!(Json::parse(b"").is_err());
        assert!(Json::parse("\u{feff}{}".as_bytes()).is_err());
    }
}
