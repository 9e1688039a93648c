//! The alias files: aliases with their targets, merged and with chains resolved.

use std::{
    collections::{BTreeMap, HashMap},
    marker::PhantomData,
    net::IpAddr,
    sync::Arc,
};

use super::{
    records,
    records::{Entries, Text},
};
use crate::name::{Name, NameError};

/// The merged content of all alias files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AliasFiles {
    pub(crate) exact: Arc<BTreeMap<Name, FileAlias>>,
    /// Aliases `_.x`, by `x`: any single label in front matches.
    pub(crate) below: Arc<BTreeMap<Name, FileAlias>>,
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

/// Maximum number of targets of all aliases together: a file of 30 kB could otherwise lead to gigabytes.
const MAX_ALL_TARGETS: usize = 500_000;

/// A target of an alias in an alias file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FileTarget {
    Address(IpAddr),
    /// A name to look up in the records.
    Name(Name),
    /// Only in aliases `_.x`: the label, followed by this name.
    Label(Name),
}

/// Returns the warning that an alias, or a target of one, was skipped. `source` is the path of the alias file, or
/// `records.json`.
pub(super) fn warning(source: &str, alias: &str, problem: &str) -> String {
    format!("{source}: alias {alias:?}: {problem}")
}

/// The reason why alias files were rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {problem}", files.join(", "))]
pub struct AliasError {
    /// Files in error, at least one, as configured.
    pub files: Vec<String>,
    /// Cause and remedy.
    pub problem: String,
}

impl AliasError {
    fn of_file(file: &str, problem: String) -> Self {
        Self {
            files: vec![file.to_owned()],
            problem,
        }
    }
}

impl AliasFiles {
    /// Parses files given as (name, content) in order of precedence: if several files define an
    /// alias, the first one wins. The first error rejects all files.
    pub fn parse<'a>(
        files: impl IntoIterator<Item = (&'a str, &'a [u8])>,
    ) -> Result<(Self, Vec<String>), AliasError> {
        let (aliases, warnings, errors) = Self::parse_valid(files);
        errors
            .into_iter()
            .next()
            .map_or(Ok((aliases, warnings)), Err)
    }

    /// Parses files like [`Self::parse`], but leaves invalid ones out and returns all their errors.
    pub fn parse_valid<'a>(
        files: impl IntoIterator<Item = (&'a str, &'a [u8])>,
    ) -> (Self, Vec<String>, Vec<AliasError>) {
        let mut valid = Vec::new();
        let mut errors = Vec::new();
        for (file, bytes) in files {
            match AliasFile::read(file, bytes) {
                Ok(file) => valid.push(file),
                Err(more) => errors.extend(more),
            }
        }
        // Each round leaves a file out, so the loop ends.
        loop {
            let mut all = Self::default();
            let mut warnings = Vec::new();
            for file in &valid {
                all.add(file, &mut warnings);
            }
            let Err(error) = all.reduce() else {
                return (all, warnings, errors);
            };
            // All files of a loop, because nothing tells which one is wrong.
            valid.retain(|file| !error.files.iter().any(|wrong| **wrong == *file.file));
            errors.push(error);
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

    /// Adds the aliases that no earlier file defines.
    fn add(&mut self, file: &AliasFile, warnings: &mut Vec<String>) {
        for Alias {
            text,
            key,
            below,
            targets,
        } in &file.aliases
        {
            let aliases = Arc::make_mut(if *below {
                &mut self.below
            } else {
                &mut self.exact
            });
            if aliases.contains_key(key) {
                continue;
            }
            warnings.extend(
                dead_alias(text, targets).map(|problem| warning(&file.file, text, &problem)),
            );
            let mut read = Vec::with_capacity(targets.len());
            for target in targets {
                match FileTarget::read(target, *below) {
                    Ok(target) => read.push(target),
                    Err(error) => {
                        let problem = format!(
                            "target {target:?} is not a domain name and is skipped: {error}"
                        );
                        warnings.push(warning(&file.file, text, &problem));
                    }
                }
            }
            aliases.insert(
                key.clone(),
                FileAlias {
                    file: file.file.clone(),
                    targets: read,
                },
            );
        }
    }

    /// Replaces targets that are aliases by the aliases' targets.
    fn reduce(&mut self) -> Result<(), AliasError> {
        let mut reduced = ReducedAliases::default();
        // Aliases `_.x` are neither reduced nor followed: a target below one is looked up like any other name
        // (observed for targets of aliases `_.x`).
        for alias in self.exact.keys() {
            self.reduce_one(alias, &mut Vec::new(), &mut reduced)?;
        }
        for (name, alias) in Arc::make_mut(&mut self.exact) {
            if let Some(targets) = reduced.targets.remove(name) {
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
        reduced: &mut ReducedAliases,
    ) -> Result<(), AliasError> {
        if reduced.targets.contains_key(alias) {
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
            let path: Vec<String> = path.iter().map(Name::to_string).collect();
            let problem = format!(
                "the aliases {} form a loop; remove one of them",
                path.join(" -> ")
            );
            return Err(AliasError { files, problem });
        }
        // Each link is another call of this function. Without a limit a file could exhaust the
        // stack, which ends the process.
        if path.len() > MAX_CHAIN {
            return Err(self.too_much(path.swap_remove(0)));
        }
        let mut targets = Vec::new();
        for target in &self.exact[alias].targets {
            match target {
                FileTarget::Name(name) if self.exact.contains_key(name) => {
                    self.reduce_one(name, path, reduced)?;
                    targets.extend(reduced.targets[name].iter().cloned());
                }
                other => targets.push(other.clone()),
            }
            // Aliases multiply: twenty layers of two targets each would be a million.
            if targets.len() > MAX_TARGETS || reduced.total + targets.len() > MAX_ALL_TARGETS {
                return Err(self.too_much(path.swap_remove(0)));
            }
        }
        path.pop();
        reduced.total += targets.len();
        reduced.targets.insert(alias.clone(), targets);
        Ok(())
    }

    fn too_much(&self, alias: Name) -> AliasError {
        let problem = format!(
            "the alias {alias} leads to more than {MAX_TARGETS} targets, or through more than {MAX_CHAIN} other \
             aliases, or with all others to more than {MAX_ALL_TARGETS} targets"
        );
        AliasError::of_file(&self.exact[&alias].file, problem)
    }
}

/// The targets of the aliases reduced so far.
#[derive(Default)]
struct ReducedAliases {
    targets: HashMap<Name, Vec<FileTarget>>,
    /// Number of all targets.
    total: usize,
}

/// A file whose aliases have valid names.
struct AliasFile {
    file: Arc<str>,
    aliases: Vec<Alias>,
}

struct Alias {
    /// The alias as written.
    text: String,
    /// The name of the alias; of `_.x` it is `x`.
    key: Name,
    /// Whether this is an alias `_.x`.
    below: bool,
    /// The targets as written.
    targets: Vec<String>,
}

impl AliasFile {
    /// Parses one file and returns every invalid alias, not just the first.
    fn read(file: &str, bytes: &[u8]) -> Result<Self, Vec<AliasError>> {
        let text = records::text(bytes);
        let Entries(entries) = records::read(&text, PhantomData)
            .map_err(|error| vec![AliasError::of_file(file, error.to_string())])?;
        let entries = last_of_each(entries.unwrap_or_default());
        let mut aliases = Vec::with_capacity(entries.len());
        let mut errors = Vec::new();
        for (alias, targets) in entries {
            match Alias::read(alias, targets) {
                Ok(alias) => aliases.push(alias),
                Err((alias, error)) => {
                    let problem = format!("alias {alias:?} is not a domain name: {error}");
                    errors.push(AliasError::of_file(file, problem));
                }
            }
        }
        if errors.is_empty() {
            Ok(Self {
                file: file.into(),
                aliases,
            })
        } else {
            Err(errors)
        }
    }
}

impl Alias {
    /// Parses the name of an alias; returns its text with an error.
    fn read(text: String, targets: Vec<String>) -> Result<Self, (String, NameError)> {
        // `Name::from_text` reads an empty text as the root.
        if text.is_empty() {
            return Err((text, NameError::EmptyLabel));
        }
        let name = match Name::from_text(&text) {
            Ok(name) => name,
            Err(error) => return Err((text, error)),
        };
        let below = name.labels().next() == Some(b"_");
        let key = match name.parent() {
            Some(parent) if below => parent,
            _ => name,
        };
        Ok(Self {
            text,
            key,
            below,
            targets,
        })
    }
}

/// Returns why an alias will not do what its author probably expects; it is accepted nevertheless, as in
/// bosh-dns.
fn dead_alias(text: &str, targets: &[String]) -> Option<String> {
    let dead = dead_wildcard(text);
    if dead.is_none() && targets.is_empty() {
        return Some("has no target, so it never has an address".to_owned());
    }
    dead
}

/// Returns why an alias `*.x`, of a file or of the records, matches no usual name.
pub(super) fn dead_wildcard(text: &str) -> Option<String> {
    let rest = text.strip_prefix("*.")?;
    Some(format!(
        "the star stands for itself, not for any label, so no usual name matches; write \"_.{rest}\""
    ))
}

impl FileTarget {
    /// Parses a target: an address, a name, or `*.x` as short for `q-s0.x`; in an alias `_.x` a leading `_.`
    /// represents the label.
    fn read(text: &str, below: bool) -> Result<Self, NameError> {
        if let Ok(address) = text.parse::<IpAddr>() {
            // An IPv4-mapped address is an IPv4 address for Go, as in the rows of the records.
            return Ok(Self::Address(address.to_canonical()));
        }
        if text.is_empty() {
            return Err(NameError::EmptyLabel);
        }
        if let Some(rest) = text.strip_prefix("*.") {
            return Ok(Self::Name(Name::from_text(&format!("q-s0.{rest}"))?));
        }
        match text.strip_prefix("_.") {
            // In other aliases `_` is an ordinary label.
            Some(rest) if below => Ok(Self::Label(Name::from_text(rest)?)),
            _ => Ok(Self::Name(Name::from_text(text)?)),
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

/// Returns the aliases of a file with their targets, in file order; the last of several equal keys
/// wins.
fn last_of_each(entries: Vec<(String, Option<Vec<Text<'_>>>)>) -> Vec<(String, Vec<String>)> {
    let mut aliases: Vec<(String, Vec<String>)> = Vec::with_capacity(entries.len());
    let mut places: HashMap<String, usize> = HashMap::new();
    for (alias, targets) in entries {
        let targets = targets
            .into_iter()
            .flatten()
            .map(|text| text.0.into_owned())
            .collect();
        match places.get(&alias) {
            // Go decodes the object into a map, where a repeated key replaces the value.
            Some(&place) => aliases[place].1 = targets,
            None => {
                places.insert(alias.clone(), aliases.len());
                aliases.push((alias, targets));
            }
        }
    }
    aliases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dead_aliases_are_reported() {
        let file =
            br#"{"*.apps.example": ["10.0.0.1"], "empty.example": [], "_.fine.example": ["10.0.0.1"]}"#;
        let (aliases, warnings) = AliasFiles::parse([("a.json", file.as_slice())]).unwrap();
        assert_eq!(aliases.len(), 3, "as in bosh-dns");
        let warnings: Vec<String> = warnings.iter().map(ToString::to_string).collect();
        let [star, empty] = &warnings[..] else {
            panic!("{warnings:?}")
        };
        assert!(
            star.contains("\"*.apps.example\"") && star.contains("\"_.apps.example\""),
            "{star}"
        );
        assert!(
            empty.contains("\"empty.example\": has no target"),
            "{empty}"
        );
    }

    #[test]
    fn every_invalid_file_is_left_out() {
        let files: [(&str, &[u8]); 6] = [
            (
                "keys.json",
                br#"{"a..b": [], "lost.x": ["10.0.0.1"], "c..d": []}"#,
            ),
            (
                "loop-1.json",
                br#"{"l.x": ["m.x"], "lost.x": ["10.0.0.2"]}"#,
            ),
            ("loop-2.json", br#"{"m.x": ["l.x"]}"#),
            (
                "good.json",
                br#"{"good.x": ["good..target", "10.0.0.3"], "lost.x": ["10.0.0.4"]}"#,
            ),
            ("self.json", br#"{"s.x": ["s.x"]}"#),
            ("half.json", b"{"),
        ];
        let (aliases, warnings, errors) = AliasFiles::parse_valid(files);
        let names: Vec<String> = aliases.exact.keys().map(Name::to_string).collect();
        assert_eq!(names, ["good.x.", "lost.x."]);
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        let expected = [
            "keys.json: alias \"a..b\" is not a domain name",
            "keys.json: alias \"c..d\" is not a domain name",
            "half.json: line 1, column ",
            "loop-1.json, loop-2.json: the aliases l.x. -> m.x. -> l.x. form a loop",
            "self.json: the aliases s.x. -> s.x. form a loop",
        ];
        assert_eq!(errors.len(), expected.len(), "{errors:?}");
        for (error, expected) in errors.iter().zip(expected) {
            assert!(error.starts_with(expected), "{error}");
        }
        assert_eq!(AliasFiles::parse(files).unwrap_err().files, ["keys.json"]);
    }
}
