//! `records.json` as it is read: members and columns in the reference's lenient
//! way, bad rows dropped one by one.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::fleet::FleetBuilder;
use super::json::{self, Each, JsonError, Text};
use super::rows::{Columns, RowsReader};

pub use super::rows::{RECORD_KEYS, RowWarning};

/// The content of `records.json`, parsed. [`super::Snapshot::build`] makes
/// something useful of it.
#[derive(Debug, Default)]
pub struct Records {
    pub(super) fleet: FleetBuilder,
    /// `records`: pairs of an address and the name it is called, for reverse look-ups.
    pub(super) pairs: Vec<(IpAddr, Box<str>)>,
    /// `aliases`, in the order of the file.
    pub(super) aliases: Vec<(String, Vec<AliasDefinition>)>,
    pub(super) version: Option<u64>,
}

/// One way in which an alias of `records.json` finds its instances.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AliasDefinition {
    /// Id of the group, as a text.
    pub(super) group_id: String,
    /// The domain of the group.
    pub(super) root_domain: String,
    /// What a `_` in the alias stands for; unknown words count as nothing.
    pub(super) placeholder_type: String,
    /// smart, unhealthy, healthy or all; other words count as smart.
    pub(super) health_filter: String,
    /// asynchronous or synchronous; other words count as neither.
    pub(super) initial_health_check: String,
}

/// Why `records.json` was refused as a whole.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {reason}")]
pub struct RecordsError {
    /// From 1; 0 where the file as a whole is meant.
    pub line: usize,
    /// From 1, in bytes; 0 at the end of a line.
    pub column: usize,
    /// What is wrong there.
    pub reason: String,
}

/// Most bytes that a records file may have: positions in its texts are kept as `u32`.
const MAX_SIZE: usize = u32::MAX as usize;

impl Records {
    /// Reads the file's content.
    ///
    /// Rows that cannot be used are dropped and reported one by one; anything
    /// else that is not as it should be refuses the whole (observed).
    pub fn parse(bytes: &[u8]) -> Result<(Self, Vec<RowWarning>), RecordsError> {
        if bytes.len() > MAX_SIZE {
            let reason = format!("{} bytes are more than the {MAX_SIZE} that can be read", bytes.len());
            return Err(RecordsError { line: 0, column: 0, reason });
        }
        let text = json::text(bytes);
        let mut file = json::read(&text, File::default())?;
        if !file.rows_fit_keys {
            // `record_keys` came after the rows, or twice: now that they are
            // known, the rows can be read.
            file = json::read(&text, File { preset: Some(file.keys), ..File::default() })?;
        }
        let File { rows, pairs, mut aliases, version, .. } = file;
        keep_last(&mut aliases);
        let (fleet, warnings) = rows.finish();
        Ok((Self { fleet, pairs, aliases, version }, warnings))
    }
}

impl From<JsonError> for RecordsError {
    fn from(JsonError { line, column, reason }: JsonError) -> Self {
        Self { line, column, reason }
    }
}

/// The file while it is being read. Members come in any order and any letter
/// case; of one that comes twice the last counts, aliases add up.
#[derive(Default)]
struct File {
    /// The columns, when they are known from an earlier reading.
    preset: Option<Vec<String>>,
    keys: Vec<String>,
    /// Whether `rows` were read as `keys` say.
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
        // A file that holds just `null` is an empty one, as everywhere in Go's JSON.
        Ok(Self { rows_fit_keys: true, ..self })
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self, A::Error> {
        let mut read_with = None;
        while let Some(name) = map.next_key::<String>()? {
            match name.to_ascii_lowercase().as_str() {
                "record_keys" => {
                    let keys: Option<Vec<Option<String>>> = map.next_value()?;
                    self.keys = keys.unwrap_or_default().into_iter().map(Option::unwrap_or_default).collect();
                }
                "record_infos" => {
                    let keys = self.preset.clone().unwrap_or_else(|| self.keys.clone());
                    self.rows = map.next_value_seed(RowsReader::new(Columns::new(&keys)))?;
                    read_with = Some(keys);
                }
                "records" => self.pairs = map.next_value::<Pairs>()?.0,
                "aliases" => match map.next_value::<Aliases>()?.0 {
                    None => self.aliases.clear(),
                    Some(aliases) => self.aliases.extend(aliases),
                },
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

/// Of aliases with the same name the last one counts.
fn keep_last(aliases: &mut Vec<(String, Vec<AliasDefinition>)>) {
    let last: HashMap<String, usize> =
        aliases.iter().enumerate().map(|(index, (name, _))| (name.clone(), index)).collect();
    let mut index = 0;
    aliases.retain(|(name, _)| {
        index += 1;
        last.get(name) == Some(&(index - 1))
    });
}

/// `records`: pairs of an address and a name. Lists of another length are
/// accepted (observed); what is no address can never be asked for.
struct Pairs(Vec<(IpAddr, Box<str>)>);

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut pairs = Vec::new();
        deserializer.deserialize_any(Each::new("a list of [address, name]", |Pair(address, name)| {
            if let Ok(address) = address.parse::<IpAddr>()
                && !name.is_empty()
            {
                pairs.push((address.to_canonical(), name.into()));
            }
        }))?;
        Ok(Self(pairs))
    }
}

/// One element of `records`; empty where it is too short.
struct Pair<'de>(Cow<'de, str>, Cow<'de, str>);

impl<'de> Deserialize<'de> for Pair<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut texts = [Cow::Borrowed(""), Cow::Borrowed("")];
        let mut index = 0;
        deserializer.deserialize_any(Each::new("a list of texts", |Text(text)| {
            if let Some(place) = texts.get_mut(index) {
                *place = text;
            }
            index += 1;
        }))?;
        let [address, name] = texts;
        Ok(Self(address, name))
    }
}

/// `aliases`; `None` where the file says null.
struct Aliases(Option<Vec<(String, Vec<AliasDefinition>)>>);

impl<'de> Deserialize<'de> for Aliases {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AliasesVisitor;

        impl<'de> Visitor<'de> for AliasesVisitor {
            type Value = Aliases;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of aliases")
            }

            fn visit_unit<E>(self) -> Result<Aliases, E> {
                Ok(Aliases(None))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Aliases, A::Error> {
                let mut aliases = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    let definitions: Option<Vec<AliasDefinition>> = map.next_value()?;
                    aliases.push((name, definitions.unwrap_or_default()));
                }
                Ok(Aliases(Some(aliases)))
            }
        }

        deserializer.deserialize_any(AliasesVisitor)
    }
}

impl<'de> Deserialize<'de> for AliasDefinition {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// Reads the object: names in any letter case, unknown ones passed over, null for an empty text.
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
