//! Typed access to the members of a configuration object, with errors that contain file, member,
//! cause and allowed values.

use std::{cell::RefCell, collections::BTreeSet, net::IpAddr, rc::Rc, time::Duration};

use super::{ConfigError, duration::parse_duration, json::Json};

/// An object of the configuration with its path.
pub struct Reader<'a> {
    /// Path of the file, for messages.
    file: &'a str,
    /// Path of the object inside the file: empty for the root, or such as `health`.
    path: String,
    /// All members in document order; several objects of the same name are merged, as in bosh-dns.
    members: Vec<(&'a str, &'a Json)>,
    /// Paths requested so far in the whole document.
    asked: Rc<RefCell<BTreeSet<String>>>,
}

impl<'a> Reader<'a> {
    /// Wraps a document, which must be an object.
    pub fn document(file: &'a str, json: &'a Json) -> Result<Self, ConfigError> {
        let Json::Object(members) = json else {
            return Err(ConfigError::of_file(file, format!("is {}, not an object of settings", json.kind())));
        };
        let members = members.iter().map(|(name, value)| (name.as_str(), value)).collect();
        Ok(Self { file, path: String::new(), members, asked: Rc::default() })
    }

    /// Returns the object `name`; empty if absent or null.
    pub fn object(&self, name: &'static str) -> Result<Reader<'a>, ConfigError> {
        let mut members = Vec::new();
        for value in self.all(name) {
            match value {
                Json::Object(inner) => {
                    members.extend(inner.iter().map(|(name, value)| (name.as_str(), value)));
                }
                Json::Null => {}
                other => return Err(self.wrong(name, other, "an object")),
            }
        }
        Ok(Reader { file: self.file, path: self.path_of(name), members, asked: self.asked.clone() })
    }

    /// Returns the objects in the list `name`; empty if absent or null.
    pub fn objects(&self, name: &'static str) -> Result<Vec<Reader<'a>>, ConfigError> {
        let mut readers = Vec::new();
        for (index, item) in self.list(name)?.unwrap_or_default().iter().enumerate() {
            readers.push(self.item(name, index, item)?);
        }
        Ok(readers)
    }

    /// Parses each object in the list `name` and returns every error, not just the first; empty if
    /// absent or null.
    pub fn parse_objects<T>(
        &self,
        name: &'static str,
        parse: impl Fn(&Reader<'a>) -> Result<T, Vec<ConfigError>>,
    ) -> Result<Vec<T>, Vec<ConfigError>> {
        let (mut parsed, mut errors) = (Vec::new(), Vec::new());
        let list = self.list(name).map_err(|error| vec![error])?.unwrap_or_default();
        for (index, item) in list.iter().enumerate() {
            match self.item(name, index, item).map_err(|error| vec![error]).and_then(|item| parse(&item)) {
                Ok(item) => parsed.push(item),
                Err(more) => errors.extend(more),
            }
        }
        if errors.is_empty() { Ok(parsed) } else { Err(errors) }
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

    /// Returns the integer `name` after checking its range.
    pub fn number(&self, name: &'static str, min: u64, max: u64) -> Result<Option<u64>, ConfigError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let number = match value {
            Json::Number(number) => number.as_u64(),
            _ => None,
        };
        match number {
            Some(number) if (min..=max).contains(&number) => Ok(Some(number)),
            _ => Err(self.wrong(name, value, &format!("a whole number from {min} to {max}"))),
        }
    }

    /// Returns the list of integers `name`, each from `min` to `max`; empty if absent.
    pub fn numbers(&self, name: &'static str, min: u64, max: u64) -> Result<Vec<u64>, ConfigError> {
        let allowed = format!("a list of whole numbers from {min} to {max}");
        let numbers = self.list(name)?.unwrap_or_default().iter().map(|item| match item {
            Json::Number(number) => number
                .as_u64()
                .filter(|number| (min..=max).contains(number))
                .ok_or_else(|| self.wrong(name, item, &allowed)),
            other => Err(self.wrong(name, other, &allowed)),
        });
        numbers.collect()
    }

    /// Returns the port number `name`, from 1.
    pub fn port(&self, name: &'static str) -> Result<Option<u16>, ConfigError> {
        let port = self.number(name, 1, u16::MAX.into())?;
        // The range check above makes this lossless.
        Ok(port.map(|port| port as u16))
    }

    /// Returns the IP address `name`; `None` if absent or null.
    pub fn address(&self, name: &'static str) -> Result<Option<IpAddr>, ConfigError> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
        bare.parse().map(Some).map_err(|_| self.error(name, &format!("{text:?} is not an IP address")))
    }

    /// Returns the duration `name`. Null is an error, as in bosh-dns.
    pub fn duration(&self, name: &'static str) -> Result<Option<Duration>, ConfigError> {
        const ALLOWED: &str = "a duration such as \"400ms\", \"5s\" or \"1h2m3.5s\"";
        match self.all(name).last() {
            None => Ok(None),
            Some(Json::Text(text)) => parse_duration(text)
                .map(Some)
                .map_err(|reason| self.error(name, &format!("{text:?} {reason}; expected {ALLOWED}"))),
            Some(other) => Err(self.wrong(name, other, ALLOWED)),
        }
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
        let Some(list) = self.list(name)? else { return Ok(None) };
        let texts = list.iter().map(|item| match item {
            Json::Text(text) => Ok(text.as_str()),
            other => Err(self.wrong(name, other, "a list of texts")),
        });
        texts.collect::<Result<_, _>>().map(Some)
    }

    /// Returns the value chosen by the string `name` from a set.
    pub fn choice<T: Copy>(
        &self,
        name: &'static str,
        choices: &[(&str, T)],
    ) -> Result<Option<T>, ConfigError> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        match choices.iter().find(|(word, _)| *word == text) {
            Some((_, value)) => Ok(Some(*value)),
            None => {
                let words: Vec<String> = choices.iter().map(|(word, _)| format!("{word:?}")).collect();
                Err(self.error(name, &format!("{text:?} is unknown; expected one of {}", words.join(", "))))
            }
        }
    }

    /// Returns the object `value` of [`Self::entries`].
    pub fn entry(&self, name: &str, value: &'a Json) -> Result<Reader<'a>, ConfigError> {
        let Json::Object(members) = value else { return Err(self.wrong(name, value, "an object")) };
        Ok(Reader {
            file: self.file,
            path: self.path_of(name),
            members: members.iter().map(|(name, value)| (name.as_str(), value)).collect(),
            asked: self.asked.clone(),
        })
    }

    /// Returns all members, for objects whose names are data.
    pub fn entries(&self) -> impl Iterator<Item = (&'a str, &'a Json)> {
        self.members.iter().copied()
    }

    /// Creates an error about member `name`.
    pub fn error(&self, name: &str, problem: &str) -> ConfigError {
        ConfigError { file: self.file.to_owned(), key: Some(self.path_of(name)), problem: problem.to_owned() }
    }

    /// Returns the paths of the members of this object that were not requested.
    pub fn unknown(&self) -> Vec<String> {
        let asked = self.asked.borrow();
        self.members
            .iter()
            // Comments, as written by `bosh-dns-xdp config --default`.
            .filter(|(name, _)| !name.starts_with('#'))
            .map(|(name, _)| self.path_of(name))
            .filter(|path| !asked.iter().any(|known| known.eq_ignore_ascii_case(path)))
            .collect()
    }

    /// Returns the paths requested in the whole document, except objects and lists of objects.
    pub fn leaves_asked(&self) -> BTreeSet<String> {
        let asked = self.asked.borrow();
        let inner = |path: &String| {
            asked.iter().any(|other| {
                other.strip_prefix(path.as_str()).is_some_and(|rest| rest.starts_with(['.', '[']))
            })
        };
        asked.iter().filter(|path| !inner(path)).cloned().collect()
    }

    /// Returns the object at `index` of the list `name`.
    fn item(&self, name: &str, index: usize, item: &'a Json) -> Result<Reader<'a>, ConfigError> {
        let name = format!("{name}[{index}]");
        let Json::Object(members) = item else { return Err(self.wrong(&name, item, "an object")) };
        Ok(Reader {
            file: self.file,
            path: self.path_of(&name),
            members: members.iter().map(|(name, value)| (name.as_str(), value)).collect(),
            asked: self.asked.clone(),
        })
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
        self.asked.borrow_mut().insert(self.path_of(name));
        let found: Vec<&'a Json> = self
            .members
            .iter()
            .filter(|(member, _)| member.eq_ignore_ascii_case(name))
            .map(|&(_, value)| value)
            .collect();
        found.into_iter()
    }

    /// Creates an error about a value of the wrong type.
    fn wrong(&self, name: &str, found: &Json, allowed: &str) -> ConfigError {
        self.error(name, &format!("is {found}; expected {allowed}"))
    }

    /// Returns the path of a member.
    fn path_of(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }
}
