//! Ownership of records, stored in adjacent TXT records in external-dns's format: their names and texts. Pure.

mod transaction;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io::{Read, Write},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use ring::{
    aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey},
    digest,
    rand::{SecureRandom, SystemRandom},
};

pub use self::transaction::OwnershipError;
pub(crate) use self::transaction::remove_collisions;
use crate::{
    plan::{Note, Reason},
    record::{Key, Labels, Name, Record, RecordType, Target},
};

/// Reads and writes owner records.
#[derive(Debug, Clone, Default)]
pub struct Registry {
    /// Names of owner records.
    pub mapper: Mapper,
    /// Encrypts the text of owner records.
    pub cipher: Option<Cipher>,
}

/// A listed zone, with ownership applied.
#[derive(Debug, Clone)]
pub struct View {
    /// Apex of the zone.
    pub apex: Name,
    /// Records without the owner texts, each with the labels from its owner text.
    pub records: Vec<Record>,
    /// Notes on owner records without a record, and on owner records that match two records.
    pub notes: Vec<Note>,
    /// Owner records without a record: each with the texts of a single owner, and their labels.
    pub orphans: Vec<Record>,
    /// All sets as listed.
    listed: BTreeMap<Key, Record>,
    /// Records with owner texts in earlier forms, and the keys of these texts.
    earlier: BTreeMap<Key, (Record, Vec<Key>)>,
}

impl View {
    /// Returns whether the zone has a set of this name and type, including owner records.
    pub(crate) fn has(&self, name: &Name, record_type: RecordType) -> bool {
        let from = Key { name: name.clone(), set_identifier: String::new(), record_type: RecordType(0) };
        let mut sets = self.listed.range(from..).take_while(|(key, _)| key.name == *name);
        sets.any(|(key, _)| key.record_type == record_type)
    }
}

/// Owner texts of one TXT set.
type Texts = Vec<(Target, Labels)>;

impl Registry {
    /// Separates records from owner records. The labels of each record are looked up under the name
    /// in external-dns's current form, then in its earlier forms.
    pub fn read(&self, apex: &Name, records: Vec<Record>) -> View {
        let (texts, mut bare) = self.separate(&records);
        let mut used: HashMap<Key, Key> = HashMap::new();
        for record in &mut bare {
            let Some(key) = self.owner_key(record, apex) else { continue };
            if let Some(labels) = texts.get(&key).and_then(|texts| texts.first()) {
                record.labels = labels.1.clone();
                used.insert(key, record.key());
            }
        }
        let mut earlier: BTreeMap<Key, Vec<Key>> = BTreeMap::new();
        let mut ambiguous = BTreeSet::new();
        for record in &mut bare {
            for key in self.earlier_owner_keys(record, apex) {
                let Some((_, labels)) = texts.get(&key).and_then(|texts| texts.first()) else { continue };
                let is_unowned = record.labels.0.is_empty();
                let other = used.get(&key).filter(|other| other.name != record.name);
                match other {
                    Some(other) if is_unowned => ambiguous.extend([record.key(), other.clone()]),
                    // Versions of external-dns wrote both forms.
                    None if is_unowned || record.labels.owner() == labels.owner() => {
                        if is_unowned {
                            record.labels = labels.clone();
                        }
                        used.insert(key.clone(), record.key());
                        earlier.entry(record.key()).or_default().push(key);
                    }
                    _ => {}
                }
            }
        }
        let mut notes = Vec::new();
        let is_ambiguous = |record: &Record| !ambiguous.is_empty() && ambiguous.contains(&record.key());
        for record in bare.iter_mut().filter(|record| is_ambiguous(record)) {
            record.labels = Labels::default();
            notes.push(note(record.name.clone(), record.record_type, Reason::Ambiguous));
        }
        let earlier = match earlier.is_empty() {
            true => BTreeMap::new(),
            false => bare
                .iter()
                .filter_map(|record| Some((record.key(), (record.clone(), earlier.remove(&record.key())?))))
                .collect(),
        };
        let mut orphans = Vec::new();
        for (key, texts) in texts.into_iter().filter(|(key, _)| !used.contains_key(key)) {
            for (target, labels) in texts {
                let reason = Reason::Orphan { owner: labels.owner().to_owned() };
                notes.push(note(key.name.clone(), RecordType::TXT, reason));
                let record = Record::new(key.name.clone(), RecordType::TXT, [target]);
                orphans.push(Record { labels, set_identifier: key.set_identifier.clone(), ..record });
            }
        }
        notes.sort_by(|a, b| a.name.cmp(&b.name));
        orphans.sort_by(|a, b| (a.key(), a.labels.owner()).cmp(&(b.key(), b.labels.owner())));
        let listed = records.into_iter().map(|record| (record.key(), record)).collect();
        View { apex: apex.clone(), records: bare, notes, orphans, listed, earlier }
    }

    /// Returns the owner texts by TXT set, and the records without them.
    fn separate(&self, records: &[Record]) -> (HashMap<Key, Texts>, Vec<Record>) {
        let mut texts: HashMap<Key, Texts> = HashMap::new();
        let mut bare = Vec::with_capacity(records.len());
        for record in records {
            if record.record_type != RecordType::TXT {
                bare.push(record.clone());
                continue;
            }
            let (owner_texts, others) = self.split(record);
            if !owner_texts.is_empty() {
                texts.insert(record.key(), owner_texts);
            }
            if !others.targets.is_empty() {
                bare.push(others);
            }
        }
        (texts, bare)
    }

    /// Parses a TXT value as an owner text, encrypted or not.
    pub fn parse(&self, value: &str) -> Option<Labels> {
        let decrypted = self.cipher.as_ref().and_then(|cipher| cipher.decrypt(value));
        parse_labels(decrypted.as_deref().unwrap_or(value))
    }

    /// Splits a TXT set into its owner texts and a set of its other values.
    fn split(&self, record: &Record) -> (Texts, Record) {
        let mut others = record.clone();
        let mut texts = Texts::new();
        for target in &record.targets {
            if let Some(labels) = self.parse(target.as_str()) {
                others.targets.remove(target);
                texts.push((target.clone(), labels));
            }
        }
        (texts, others)
    }

    fn owner_key(&self, record: &Record, apex: &Name) -> Option<Key> {
        let name = self.mapper.owner_name(&record.name, record.record_type, apex)?;
        Some(owner_key(record, name))
    }

    /// Returns the keys of a record's owner record in earlier versions of external-dns: before 0.22,
    /// an alias of Route 53 had the one of a CNAME; before 0.12, the name contained no type.
    fn earlier_owner_keys(&self, record: &Record, apex: &Name) -> Vec<Key> {
        let is_alias = record.properties.get("alias").is_some_and(|alias| alias == "true");
        let of_alias = (is_alias && record.record_type == RecordType::A)
            .then(|| self.mapper.owner_name(&record.name, RecordType::CNAME, apex))
            .flatten();
        // Those versions wrote neither AAAA nor TXT. A TXT beside the owner record of another name
        // must not be taken for its record.
        let had_no_type = ![RecordType::AAAA, RecordType::TXT].contains(&record.record_type);
        let without_type = had_no_type.then(|| self.mapper.old_owner_name(&record.name)).flatten();
        of_alias.into_iter().chain(without_type).map(|name| owner_key(record, name)).collect()
    }
}

fn owner_key(record: &Record, name: Name) -> Key {
    Key { name, set_identifier: record.set_identifier.clone(), record_type: RecordType::TXT }
}

fn note(name: Name, record_type: RecordType, reason: Reason) -> Note {
    Note { name, record_type, reason }
}

/// Placeholder for the record type within an affix.
const TEMPLATE: &str = "%{record_type}";

/// Types that external-dns recognises in the name of an owner record.
const MAPPED_BACK: [RecordType; 7] = [
    RecordType::A,
    RecordType::AAAA,
    RecordType::CNAME,
    RecordType::NS,
    RecordType::MX,
    RecordType::SRV,
    RecordType::NAPTR,
];

/// Maps a record to the name of its owner record, as external-dns does.
///
/// The owner record of `api.example.org A` is `a-api.example.org`. A prefix precedes the first
/// label, a suffix follows it; `%{record_type}` in the affix is replaced by the type.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mapper {
    affix: Affix,
    wildcard: String,
}

/// Position and text of the configured affix, in lower case.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum Affix {
    #[default]
    None,
    Prefix(String),
    Suffix(String),
}

impl Mapper {
    /// Creates a mapper. `wildcard` replaces a first label `*`, unless it is empty.
    pub fn new(prefix: &str, suffix: &str, wildcard: &str) -> Result<Self, AffixError> {
        let affix = match (prefix.trim(), suffix.trim()) {
            ("", "") => Affix::None,
            (prefix, "") => Affix::Prefix(prefix.to_ascii_lowercase()),
            ("", suffix) => Affix::Suffix(suffix.to_ascii_lowercase()),
            _ => return Err(AffixError::Both),
        };
        let mapper = Self { affix, wildcard: wildcard.trim().to_ascii_lowercase() };
        // An affix that is invalid in names would leave every record without an owner.
        let probe = mapper.text_of("x.invalid", "cname");
        Name::parse(&probe).map_err(|error| AffixError::Unusable(error.to_string()))?;
        Ok(mapper)
    }

    /// Returns the name in external-dns's form. It may be too long to be valid.
    pub fn text_of(&self, name: &str, record_type: &str) -> String {
        let record_type = record_type.to_ascii_lowercase();
        let (first, behind) = name.split_once('.').unwrap_or((name, ""));
        let first = if first == "*" && !self.wildcard.is_empty() { &self.wildcard } else { first };
        let label = match &self.affix {
            Affix::None => format!("{record_type}-{first}"),
            Affix::Prefix(text) if text.contains(TEMPLATE) => {
                format!("{}{first}", text.replace(TEMPLATE, &record_type))
            }
            Affix::Suffix(text) if text.contains(TEMPLATE) => {
                format!("{first}{}", text.replace(TEMPLATE, &record_type))
            }
            Affix::Prefix(text) => format!("{text}{record_type}-{first}"),
            Affix::Suffix(text) => format!("{record_type}-{first}{text}"),
        };
        if behind.is_empty() { label } else { format!("{label}.{behind}") }
    }

    /// Returns the name under which the owner record is written: external-dns's form if it is valid
    /// within `apex`, otherwise the same form with a hashed label.
    ///
    /// The hashed label replaces the first label, or as many as necessary to stay within 255
    /// octets. `None` if no name fits even directly below the apex.
    pub fn owner_name(&self, name: &Name, record_type: RecordType, apex: &Name) -> Option<Name> {
        let record_type = record_type.to_string();
        let usable = |text: String| Name::parse(&text).ok().filter(|owner| owner.is_within(apex));
        if let Some(owner) = usable(self.text_of(name.as_str(), &record_type)) {
            return Some(owner);
        }
        let hash = digest::digest(&digest::SHA256, name.as_str().as_bytes());
        let label: String = hash.as_ref()[..16].iter().map(|octet| format!("{octet:02x}")).collect();
        let mut above = if name == apex { Some(name.clone()) } else { name.parent() };
        while let Some(parent) = above.filter(|parent| parent.is_within(apex)) {
            let below = if parent.is_root() { label.clone() } else { format!("{label}.{parent}") };
            if let Some(owner) = usable(self.text_of(&below, &record_type)) {
                return Some(owner);
            }
            above = parent.parent();
        }
        None
    }

    /// Returns the name in the older form, which contains no type.
    pub fn old_owner_name(&self, name: &Name) -> Option<Name> {
        let (first, behind) = name.as_str().split_once('.').unwrap_or((name.as_str(), ""));
        let first = if first == "*" && !self.wildcard.is_empty() { &self.wildcard } else { first };
        let label = match &self.affix {
            Affix::None => first.to_owned(),
            Affix::Prefix(text) => format!("{}{first}", text.replace(TEMPLATE, "")),
            Affix::Suffix(text) => format!("{first}{}", text.replace(TEMPLATE, "")),
        };
        Name::parse(&if behind.is_empty() { label } else { format!("{label}.{behind}") }).ok()
    }

    /// Maps an owner record back to name and type, as external-dns does. The type is `None`
    /// in the older form; the result is `None` if the name lacks the affix.
    ///
    /// The mapping is ambiguous: a record `a-team` of the older form reads as type A of
    /// `team`. The registry therefore looks owner records up from the records.
    pub fn record_of(&self, owner: &Name) -> Option<(String, Option<RecordType>)> {
        let text = owner.as_str();
        match &self.affix {
            Affix::None => Some(split_type(text)),
            Affix::Prefix(prefix) => strip(prefix, |affix| text.strip_prefix(affix)),
            Affix::Suffix(suffix) => {
                let dots = suffix.matches('.').count();
                let end = text.match_indices('.').nth(dots).map_or(text.len(), |(index, _)| index);
                let (head, behind) = text.split_at(end);
                let (name, record_type) = strip(suffix, |affix| head.strip_suffix(affix))?;
                Some((name + behind, record_type))
            }
        }
    }
}

/// Removes an affix with `cut`, and returns the rest and the type.
fn strip<'a>(affix: &str, cut: impl Fn(&str) -> Option<&'a str>) -> Option<(String, Option<RecordType>)> {
    if affix.contains(TEMPLATE) {
        for record_type in MAPPED_BACK {
            let affix = affix.replace(TEMPLATE, &record_type.to_string().to_ascii_lowercase());
            if let Some(name) = cut(&affix) {
                return Some((name.to_owned(), Some(record_type)));
            }
        }
    }
    cut(&affix.replace(TEMPLATE, "")).map(split_type)
}

/// Splits `a-api.example.org` into name and type.
fn split_type(text: &str) -> (String, Option<RecordType>) {
    let split = text.split_once('-').and_then(|(first, rest)| {
        let is_first = |record_type: &RecordType| record_type.to_string().eq_ignore_ascii_case(first);
        Some((rest.to_owned(), MAPPED_BACK.into_iter().find(is_first)?))
    });
    split.map_or_else(|| (text.to_owned(), None), |(name, record_type)| (name, Some(record_type)))
}

/// Reason why an affix cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum AffixError {
    #[error("txt-prefix and txt-suffix are both set; remove one of them")]
    Both,
    #[error("txt-prefix or txt-suffix produces invalid names: {0}")]
    Unusable(String),
}

/// Value of `heritage`, and prefix of every label.
const HERITAGE: &str = "external-dns";

/// Maximum size of a decompressed text in octets; an owner record is far smaller.
const MAX_TEXT: u64 = 64 * 1024;

/// Parses the text of an owner record; `None` for other TXT records.
///
/// Unknown labels are kept. If a label appears twice, the last one counts.
pub fn parse_labels(text: &str) -> Option<Labels> {
    let mut labels = Labels::default();
    let mut is_ours = false;
    for (key, value) in text.trim_matches('"').split(',').filter_map(|token| token.split_once('=')) {
        if key == "heritage" {
            if value != HERITAGE {
                return None;
            }
            is_ours = true;
        } else if key.starts_with(HERITAGE) {
            let label = key.strip_prefix("external-dns/").unwrap_or(key);
            labels.0.insert(label.to_owned(), value.to_owned());
        }
    }
    is_ours.then_some(labels)
}

/// Formats labels, sorted by key, without quotes.
pub fn write_labels(labels: &Labels) -> String {
    let mut text = format!("heritage={HERITAGE}");
    for (label, value) in &labels.0 {
        text.push_str(&format!(",{HERITAGE}/{label}={value}"));
    }
    text
}

/// Checks that a value survives [`write_labels()`] and [`parse_labels()`].
pub fn check_value(value: &str) -> Result<(), ValueError> {
    let bad = value.chars().find(|character| {
        matches!(character, ',' | '"' | '\\') || !character.is_ascii() || character.is_ascii_control()
    });
    bad.map_or(Ok(()), |character| Err(ValueError { value: value.to_owned(), character }))
}

/// A value that an owner record cannot hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("owner or resource {value:?} contains {character:?}, which separates labels; choose another text")]
pub struct ValueError {
    value: String,
    character: char,
}

/// Key that encrypts owner records: AES-256-GCM over gzip, in base64.
#[derive(Clone)]
pub struct Cipher(LessSafeKey);

impl Cipher {
    /// Length of a key in octets.
    pub const KEY_LEN: usize = 32;

    /// Parses a key of 32 octets, or its base64 (standard or URL-safe).
    pub fn new(key: &str) -> Result<Self, KeyError> {
        let decoded = if key.len() == Self::KEY_LEN {
            key.as_bytes().to_vec()
        } else {
            let standard: String = key
                .trim()
                .trim_end_matches('=')
                .chars()
                .map(|c| match c {
                    '-' => '+',
                    '_' => '/',
                    c => c,
                })
                .collect();
            base64::engine::general_purpose::STANDARD_NO_PAD.decode(standard).unwrap_or_default()
        };
        if decoded.len() != Self::KEY_LEN {
            return Err(KeyError);
        }
        let key = UnboundKey::new(&AES_256_GCM, &decoded).map_err(|_| KeyError)?;
        Ok(Self(LessSafeKey::new(key)))
    }

    /// Encrypts with a random nonce.
    pub fn encrypt(&self, text: &str) -> Result<String, CipherError> {
        let mut nonce = [0; NONCE_LEN];
        SystemRandom::new().fill(&mut nonce).map_err(|_| CipherError)?;
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(text.as_bytes()).map_err(|_| CipherError)?;
        let mut sealed = encoder.finish().map_err(|_| CipherError)?;
        let unique = Nonce::assume_unique_for_key(nonce);
        self.0.seal_in_place_append_tag(unique, Aad::empty(), &mut sealed).map_err(|_| CipherError)?;
        Ok(STANDARD.encode([&nonce[..], &sealed].concat()))
    }

    /// Decrypts a text; `None` if it was not encrypted with this key.
    pub fn decrypt(&self, text: &str) -> Option<String> {
        let mut octets = STANDARD.decode(text.trim_matches('"')).ok()?;
        let (nonce, sealed) = octets.split_at_mut_checked(NONCE_LEN)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let plain = self.0.open_in_place(nonce, Aad::empty(), sealed).ok()?;
        let mut text = Vec::new();
        let unpacked = GzDecoder::new(&*plain).take(MAX_TEXT).read_to_end(&mut text);
        // external-dns accepts uncompressed texts.
        String::from_utf8(if unpacked.is_ok() { text } else { plain.to_vec() }).ok()
    }
}

impl std::fmt::Debug for Cipher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Cipher")
    }
}

/// A key of the wrong size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("txt-encrypt-aes-key needs 32 bytes, or their base64; `openssl rand -base64 32` makes one")]
pub struct KeyError;

/// Encryption failed because the system returned no random numbers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot encrypt an owner record: no random numbers")]
pub struct CipherError;
