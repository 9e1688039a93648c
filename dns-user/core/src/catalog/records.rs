//! Parser of `records.json`: accepts what bosh-dns accepts, drops invalid rows one by one.

use std::{borrow::Cow, collections::HashMap, fmt, marker::PhantomData, net::IpAddr};

use serde::{
    Deserialize,
    de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor},
};

use super::{
    instances::InstanceIndexBuilder,
    rows::{Columns, RowsReader},
};

pub use super::rows::RECORD_KEYS;

/// The parsed content of `records.json`, input of [`super::Snapshot::build`].
#[derive(Debug, Default)]
pub struct Records {
    pub(super) instances: InstanceIndexBuilder,
    /// `records`: pairs of address and name, for reverse lookups.
    pub(super) pairs: Vec<(IpAddr, Box<str>)>,
    /// `aliases`, in file order.
    pub(super) aliases: Vec<(String, Vec<AliasDefinition>)>,
    pub(super) version: Option<u64>,
    pub(super) columns: Columns,
}

/// One definition of an alias in `records.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AliasDefinition {
    pub(super) group_id: String,
    pub(super) root_domain: String,
    /// Meaning of `_` in the alias; unknown values are ignored.
    pub(super) placeholder_type: String,
    /// smart, unhealthy, healthy or all; other values mean smart.
    pub(super) health_filter: String,
    /// asynchronous or synchronous; other values are ignored.
    pub(super) initial_health_check: String,
}

/// The reason why `records.json`, or an alias file, was rejected as a whole.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {reason}")]
pub struct RecordsError {
    /// Line from 1; 0 if the error concerns the whole file.
    pub line: usize,
    /// Column in bytes, from 1; 0 at the end of a line.
    pub column: usize,
    /// Reason without the position.
    pub reason: String,
}

/// Maximum size of a records file in bytes: text positions are stored as `u32`.
const MAX_SIZE: usize = u32::MAX as usize;

impl Records {
    /// Parses the file.
    ///
    /// Unusable rows are dropped and reported one by one; any other error rejects the file
    /// (observed).
    pub fn parse(bytes: &[u8]) -> Result<(Self, Vec<String>), RecordsError> {
        if bytes.len() > MAX_SIZE {
            let reason = format!("{} bytes exceed the limit of {MAX_SIZE}", bytes.len());
            return Err(RecordsError {
                line: 0,
                column: 0,
                reason,
            });
        }
        let text = text(bytes);
        let mut file = read(&text, File::default())?;
        if !file.rows_fit_keys {
            // `record_keys` followed the rows or occurred twice: read the rows again with the final
            // columns.
            file = read(
                &text,
                File {
                    preset: Some(file.keys),
                    ..File::default()
                },
            )?;
        }
        let File {
            keys,
            rows,
            pairs,
            mut aliases,
            version,
            ..
        } = file;
        keep_last(&mut aliases);
        let (instances, warnings) = rows.finish();
        Ok((
            Self {
                instances,
                pairs,
                aliases,
                version,
                columns: Columns::new(&keys),
            },
            warnings,
        ))
    }
}

/// Deserialises the file. Members may have any order and letter case; the last of several equal
/// members wins, except that aliases accumulate.
#[derive(Default)]
struct File {
    /// The columns, if known from a first pass.
    preset: Option<Vec<String>>,
    keys: Vec<String>,
    /// Whether `rows` were read with the columns in `keys`.
    rows_fit_keys: bool,
    rows: RowsReader,
    pairs: Vec<(IpAddr, Box<str>)>,
    aliases: Vec<(String, Vec<AliasDefinition>)>,
    version: Option<u64>,
}

impl<'de> DeserializeSeed<'de> for File {
    type Value = Self;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for File {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with record_keys and record_infos")
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        // A file that contains just `null` is empty, as for Go's JSON decoder.
        Ok(Self {
            rows_fit_keys: true,
            ..self
        })
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self, A::Error> {
        let mut read_with = None;
        while let Some(name) = map.next_key::<String>()? {
            match name.to_ascii_lowercase().as_str() {
                "record_keys" => {
                    let keys: Option<Vec<Option<String>>> = map.next_value()?;
                    self.keys = keys
                        .unwrap_or_default()
                        .into_iter()
                        .map(Option::unwrap_or_default)
                        .collect();
                }
                // Read while the keys are known, so that no row is kept as JSON.
                "record_infos" => {
                    let keys = self.preset.clone().unwrap_or_else(|| self.keys.clone());
                    self.rows = map.next_value_seed(RowsReader::new(Columns::new(&keys)))?;
                    read_with = Some(keys);
                }
                "records" => {
                    let pairs: Option<Vec<Pair>> = map.next_value()?;
                    // Go empties a repeated list first, but adds to a map: aliases accumulate.
                    self.pairs.clear();
                    for Pair(pair) in pairs.into_iter().flatten() {
                        self.pairs.extend(pair);
                    }
                }
                "aliases" => {
                    let Entries(aliases): Entries<Option<Vec<AliasDefinition>>> =
                        map.next_value()?;
                    match aliases {
                        None => self.aliases.clear(),
                        Some(aliases) => {
                            for (name, list) in aliases {
                                self.aliases.push((name, list.unwrap_or_default()));
                            }
                        }
                    }
                }
                "version" => self.version = map.next_value()?,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        self.rows_fit_keys = read_with.is_none_or(|keys| keys == self.keys);
        Ok(self)
    }
}

fn keep_last(aliases: &mut Vec<(String, Vec<AliasDefinition>)>) {
    // Go's map has one value per key, the last.
    let last: HashMap<String, usize> = aliases
        .iter()
        .enumerate()
        .map(|(index, (name, _))| (name.clone(), index))
        .collect();
    let mut index = 0;
    aliases.retain(|(name, _)| {
        index += 1;
        last.get(name) == Some(&(index - 1))
    });
}

/// An element of `records`: an address and a name. Lists of other lengths are accepted (observed);
/// an element without a valid address or name is unreachable: `None`.
pub(super) struct Pair(pub(super) Option<(IpAddr, Box<str>)>);

impl<'de> Deserialize<'de> for Pair {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PairVisitor;

        impl<'de> Visitor<'de> for PairVisitor {
            type Value = Pair;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of an address and a name")
            }

            fn visit_unit<E>(self) -> Result<Pair, E> {
                Ok(Pair(None))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut texts: A) -> Result<Pair, A::Error> {
                let [address, name]: [Option<Text<'_>>; 2] =
                    [texts.next_element()?, texts.next_element()?];
                // Go reads a list of strings: a further element of another type rejects the file.
                while texts.next_element::<Text<'_>>()?.is_some() {}
                let address = address.and_then(|Text(text)| text.parse::<IpAddr>().ok());
                let name = name.filter(|Text(text)| !text.is_empty());
                Ok(Pair(address.zip(name).map(|(address, Text(name))| {
                    (address.to_canonical(), name.into())
                })))
            }
        }

        deserializer.deserialize_any(PairVisitor)
    }
}

impl<'de> Deserialize<'de> for AliasDefinition {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// Visits the object: members in any letter case, unknown ones skipped, null read as the
        /// empty string.
        struct DefinitionVisitor;

        impl<'de> Visitor<'de> for DefinitionVisitor {
            type Value = AliasDefinition;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with group_id and root_domain")
            }

            fn visit_unit<E>(self) -> Result<AliasDefinition, E> {
                Ok(AliasDefinition::default())
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<AliasDefinition, A::Error> {
                let mut definition = AliasDefinition::default();
                while let Some(name) = map.next_key::<String>()? {
                    let place = match name.to_ascii_lowercase().as_str() {
                        "group_id" => &mut definition.group_id,
                        "root_domain" => &mut definition.root_domain,
                        "placeholder_type" => &mut definition.placeholder_type,
                        "health_filter" => &mut definition.health_filter,
                        "initial_health_check" => &mut definition.initial_health_check,
                        _ => {
                            map.next_value::<IgnoredAny>()?;
                            continue;
                        }
                    };
                    *place = map.next_value::<Text<'_>>()?.0.into_owned();
                }
                Ok(definition)
            }
        }

        deserializer.deserialize_any(DefinitionVisitor)
    }
}

//----------- Json ---------------------------------------------------------
//
// JSON helpers for reading records and alias files.

/// Decodes UTF-8, replacing invalid bytes by U+FFFD: bosh-dns accepts them too, and one bad byte in
/// one row must not lose the whole fleet.
pub(super) fn text(bytes: &[u8]) -> Cow<'_, str> {
    // Validation alone is several times as fast as the lossy conversion.
    str::from_utf8(bytes).map_or_else(|_| String::from_utf8_lossy(bytes), Cow::Borrowed)
}

/// Deserialises a whole JSON text; only white space may follow the value.
pub(super) fn read<'de, S: DeserializeSeed<'de>>(
    text: &'de str,
    seed: S,
) -> Result<S::Value, RecordsError> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = seed.deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok(value)
}

impl From<serde_json::Error> for RecordsError {
    fn from(error: serde_json::Error) -> Self {
        let line = error.line();
        let column = error.column();
        let mut reason = error.to_string();
        // serde_json appends the position, which this error states first.
        let place = format!(" at line {line} column {column}");
        if reason.ends_with(&place) {
            reason.truncate(reason.len() - place.len());
        }
        Self {
            line,
            column,
            reason,
        }
    }
}

/// A string, borrowed from the file if possible. null is read as the empty string, as by Go's JSON
/// decoder.
pub(super) struct Text<'de>(pub(super) Cow<'de, str>);

impl<'de> Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;

        impl<'de> Visitor<'de> for TextVisitor {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text")
            }

            fn visit_unit<E>(self) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed("")))
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }

        deserializer.deserialize_any(TextVisitor)
    }
}

/// The members of an object in file order; `None` if the file says null.
pub(super) struct Entries<T>(pub(super) Option<Vec<(String, T)>>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Entries<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntriesVisitor<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for EntriesVisitor<T> {
            type Value = Entries<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of aliases, each with a list of targets")
            }

            fn visit_unit<E>(self) -> Result<Entries<T>, E> {
                Ok(Entries(None))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries<T>, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(Some(entries)))
            }
        }

        deserializer.deserialize_any(EntriesVisitor(PhantomData))
    }
}
