//! The alias files: aliases with their targets, merged and with chains resolved.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, Visitor};

use super::json::{self, Text};
use crate::name::{Name, NameError};

/// The merged content of all alias files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AliasFiles {
    pub(crate) exact: BTreeMap<Name, FileAlias>,
    /// Aliases `_.x`, by `x`: any single label in front matches.
    pub(crate) below: BTreeMap<Name, FileAlias>,
}

/// An alias from an alias file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileAlias {
    pub(crate) file: Arc<str>,
    /// The target list, in the order of the file.
    pub(crate) targets: Vec<FileTarget>,
}

/// Maximum length of a chain of aliases.
const MAX_CHAIN: usize = 500;

/// Maximum number of targets of one alias, after resolving chains.
const MAX_TARGETS: usize = 100_000;

/// A target of an alias in an alias file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FileTarget {
    Address(IpAddr),
    /// A name to look up in the records.
    Name(Name),
    /// Only in aliases `_.x`: the label, followed by this name.
    Label(Name),
}

/// An alias, or a target of one, that was skipped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AliasWarning {
    /// Path of the alias file, or `records.json`.
    pub source: String,
    /// The alias as written.
    pub alias: String,
    /// The problem and its consequence.
    pub problem: String,
}

impl fmt::Display for AliasWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { source, alias, problem } = self;
        write!(f, "{source}: alias {alias:?}: {problem}")
    }
}

/// The reason why the alias files were rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AliasError {
    /// The file is not a JSON object whose values are lists of strings.
    #[error("{file}: line {line}, column {column}: {reason}")]
    Json {
        /// Path of the file, as configured.
        file: String,
        /// Line of the error, from 1.
        line: usize,
        /// Column of the error, from 1.
        column: usize,
        /// Cause, without the position.
        reason: String,
    },
    /// The alias is not a valid domain name.
    #[error("{file}: alias {alias:?} is not a domain name: {error}")]
    Key {
        /// Path of the file, as configured.
        file: String,
        /// The key as written.
        alias: String,
        /// Reason why the key is not a valid name.
        error: NameError,
    },
    /// Aliases refer to each other in a loop.
    #[error("{}: the aliases {} form a loop; remove one of them", files.join(", "), texts(path).join(" -> "))]
    Loop {
        /// Files that define these aliases, each once.
        files: Vec<String>,
        /// The aliases in order, ending with the first one again.
        path: Vec<Name>,
    },
    /// The alias has too many targets or too long a chain.
    #[error(
        "the alias {0} leads to more than {MAX_TARGETS} targets, or through more than {MAX_CHAIN} other \
         aliases"
    )]
    TooMuch(Name),
}

impl AliasError {
    /// Returns the files in error; empty if the error belongs to no single file.
    pub fn files(&self) -> &[String] {
        match self {
            Self::Json { file, .. } | Self::Key { file, .. } => std::slice::from_ref(file),
            Self::Loop { files, .. } => files,
            Self::TooMuch(_) => &[],
        }
    }
}

fn texts(names: &[Name]) -> Vec<String> {
    names.iter().map(Name::to_string).collect()
}

impl AliasFiles {
    /// Parses files given as (name, content) in order of precedence: if several files define an
    /// alias, the first one wins.
    pub fn parse<'a>(
        files: impl IntoIterator<Item = (&'a str, &'a [u8])>,
    ) -> Result<(Self, Vec<AliasWarning>), AliasError> {
        let mut all = Self::default();
        let mut warnings = Vec::new();
        for (file, bytes) in files {
            let text = json::text(bytes);
            let file: Arc<str> = file.into();
            let aliases = json::read(&text, FileReader).map_err(|error| AliasError::Json {
                file: file.to_string(),
                line: error.line,
                column: error.column,
                reason: error.reason,
            })?;
            for (alias, targets) in aliases {
                all.add(&file, alias, &targets, &mut warnings)?;
            }
        }
        all.reduce()?;
        Ok((all, warnings))
    }

    /// Parses these files; invalid ones are skipped.
    pub fn parse_valid<'a>(mut files: Vec<(&'a str, &'a [u8])>) -> (Self, Vec<AliasWarning>) {
        loop {
            let error = match Self::parse(files.iter().copied()) {
                Ok(parsed) => return parsed,
                Err(error) => error,
            };
            let before = files.len();
            files.retain(|(file, _)| !error.files().iter().any(|wrong| wrong == file));
            if files.len() == before {
                return (Self::default(), Vec::new());
            }
        }
    }

    /// Returns the number of aliases.
    pub fn len(&self) -> usize {
        self.exact.len() + self.below.len()
    }

    /// Returns whether the files define no alias.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds an alias unless an earlier file defines it.
    fn add(
        &mut self,
        file: &Arc<str>,
        alias: String,
        targets: &[String],
        warnings: &mut Vec<AliasWarning>,
    ) -> Result<(), AliasError> {
        let bad_key = |error| AliasError::Key { file: file.to_string(), alias: alias.clone(), error };
        if alias.is_empty() {
            return Err(bad_key(NameError::EmptyLabel));
        }
        let name = Name::from_text(&alias).map_err(bad_key)?;
        let below = name.labels().next() == Some(b"_");
        let key = match name.parent() {
            Some(parent) if below => parent,
            _ => name,
        };
        let aliases = if below { &mut self.below } else { &mut self.exact };
        if aliases.contains_key(&key) {
            return Ok(());
        }
        let mut read = Vec::with_capacity(targets.len());
        for text in targets {
            match FileTarget::read(text, below) {
                Ok(target) => read.push(target),
                Err(error) => warnings.push(AliasWarning {
                    source: file.to_string(),
                    alias: alias.clone(),
                    problem: format!("target {text:?} is not a domain name and is skipped: {error}"),
                }),
            }
        }
        aliases.insert(key, FileAlias { file: file.clone(), targets: read });
        Ok(())
    }

    /// Replaces targets that are aliases by the aliases' targets. Aliases `_.x` are neither reduced
    /// nor followed: a target below one is looked up like any other name (observed for targets of
    /// aliases `_.x`).
    fn reduce(&mut self) -> Result<(), AliasError> {
        let mut reduced: HashMap<Name, Vec<FileTarget>> = HashMap::new();
        for alias in self.exact.keys() {
            self.reduce_one(alias, &mut Vec::new(), &mut reduced)?;
        }
        for (name, alias) in &mut self.exact {
            if let Some(targets) = reduced.remove(name) {
                alias.targets = targets;
            }
        }
        Ok(())
    }

    /// Returns the reduced targets of an alias in `exact`. `path` is the chain of aliases so far.
    fn reduce_one(
        &self,
        alias: &Name,
        path: &mut Vec<Name>,
        reduced: &mut HashMap<Name, Vec<FileTarget>>,
    ) -> Result<(), AliasError> {
        if reduced.contains_key(alias) {
            return Ok(());
        }
        let start = path.iter().position(|name| name == alias);
        path.push(alias.clone());
        if let Some(start) = start {
            let path = path.split_off(start);
            let mut files: Vec<String> = Vec::new();
            for alias in &path {
                let file = &self.exact[alias].file;
                if !files.iter().any(|known| **known == **file) {
                    files.push(file.to_string());
                }
            }
            return Err(AliasError::Loop { files, path });
        }
        if path.len() > MAX_CHAIN {
            return Err(AliasError::TooMuch(path.swap_remove(0)));
        }
        let mut targets = Vec::new();
        for target in &self.exact[alias].targets {
            match target {
                FileTarget::Name(name) if self.exact.contains_key(name) => {
                    self.reduce_one(name, path, reduced)?;
                    targets.extend(reduced[name].iter().cloned());
                }
                other => targets.push(other.clone()),
            }
            if targets.len() > MAX_TARGETS {
                return Err(AliasError::TooMuch(path.swap_remove(0)));
            }
        }
        path.pop();
        reduced.insert(alias.clone(), targets);
        Ok(())
    }
}

impl FileTarget {
    /// Parses a target: an address, a name, or `*.x` as short for `q-s0.x`; in an alias `_.x` a leading `_.`
    /// represents the label.
    fn read(text: &str, below: bool) -> Result<Self, NameError> {
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(Self::Address(address.to_canonical()));
        }
        if text.is_empty() {
            return Err(NameError::EmptyLabel);
        }
        match text.strip_prefix("*.") {
            Some(rest) => Name::from_text(&format!("q-s0.{rest}")).map(Self::Name),
            None => match text.strip_prefix("_.") {
                Some(rest) if below => Name::from_text(rest).map(Self::Label),
                _ => Name::from_text(text).map(Self::Name),
            },
        }
    }

    /// Returns the target with the label inserted; `None` if the name gets too long.
    pub(crate) fn with_label(&self, label: &[u8]) -> Option<Self> {
        match self {
            Self::Label(rest) => rest.with_labels([label]).map(Self::Name),
            other => Some(other.clone()),
        }
    }
}

/// Deserialises one file into aliases with their targets, in file order; the last of several equal
/// keys wins.
struct FileReader;

impl<'de> DeserializeSeed<'de> for FileReader {
    type Value = Vec<(String, Vec<String>)>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for FileReader {
    type Value = Vec<(String, Vec<String>)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of aliases, each with a list of targets")
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Vec::new())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut aliases: Self::Value = Vec::new();
        let mut places: HashMap<String, usize> = HashMap::new();
        while let Some(alias) = map.next_key::<String>()? {
            let targets: Option<Vec<Text<'de>>> = map.next_value()?;
            let targets = targets.unwrap_or_default().into_iter().map(|text| text.0.into_owned()).collect();
            match places.get(&alias) {
                Some(&place) => aliases[place].1 = targets,
                None => {
                    places.insert(alias.clone(), aliases.len());
                    aliases.push((alias, targets));
                }
            }
        }
        Ok(aliases)
    }
}
