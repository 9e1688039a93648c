//! A summary of a records file, to read the next one quickly: the length and hash of every row's text, 12 bytes
//! each. A row with the same text means the same, so only the others are parsed.
//!
//! Files are recognised in the form in which directors write them. Any other form, and any error, gives `None`:
//! then the whole file is parsed, which also finds the position of the error.

mod window;

use std::hash::BuildHasher as _;
use std::io;
use std::sync::Arc;

use foldhash::quality::RandomState;

use super::{columns::Edits, records::read, rows::Columns};
use window::Window;

/// Maximum number of skipped elements after which an earlier one is recognised again.
const MAX_RUN: usize = 64;

/// The outline of a records file.
#[derive(Clone, Debug)]
pub(super) struct Outline {
    /// Seeded at random: a file cannot be made to have colliding rows.
    hasher: RandomState,
    pub(super) columns: Columns,
    pub(super) rows: Texts,
    pub(super) pairs: Texts,
    members: Members,
}

/// The members that a file has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Members {
    /// `record_keys`.
    keys: Option<Digest>,
    aliases: Option<Digest>,
    has_rows: bool,
    has_pairs: bool,
    has_version: bool,
}

/// Length and hash of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Digest {
    length: u32,
    hash: u64,
}

/// Lengths and hashes of the elements of a list.
#[derive(Clone, Debug, Default)]
pub(super) struct Texts {
    lengths: Arc<[u32]>,
    hashes: Arc<[u64]>,
}

/// The difference between a file and the one before.
#[derive(Debug, Default)]
pub(super) struct Difference {
    pub(super) rows: ListDifference,
    pub(super) pairs: ListDifference,
    pub(super) version: Option<u64>,
}

/// The difference between a list and the one before.
#[derive(Debug, Default)]
pub(super) struct ListDifference {
    pub(super) edits: Edits,
    /// Texts of the added elements, with a comma before each but the first.
    added: Vec<u8>,
}

impl Outline {
    /// Returns the outline of a valid file with these columns.
    pub(super) fn of(file: &[u8], columns: Columns) -> Option<Self> {
        // Otherwise the parser has read another text (`records::text`).
        str::from_utf8(file).ok()?;
        let empty = Self {
            hasher: RandomState::default(),
            columns,
            rows: Texts::default(),
            pairs: Texts::default(),
            members: Members::default(),
        };
        let scan = Scan {
            file: Window::new(file),
            old: None,
            new: empty,
        };
        let (outline, _) = scan.read()?;
        Some(outline)
    }

    /// Reads the next file; returns its outline and what differs from this one; `None` if that is much, or the file
    /// must be parsed as a whole.
    pub(super) fn follow(&self, file: impl io::Read) -> Option<(Self, Difference)> {
        let new = Self {
            members: Members::default(),
            ..self.clone()
        };
        let scan = Scan {
            file: Window::new(file),
            old: Some(self),
            new,
        };
        let (new, difference) = scan.read()?;
        // Other columns give every cell another meaning, and aliases are not followed here.
        if self.members != new.members {
            return None;
        }
        Some((new, difference))
    }

    fn digest(&self, text: &[u8]) -> Option<Digest> {
        Some(Digest {
            length: u32::try_from(text.len()).ok()?,
            hash: self.hasher.hash_one(text),
        })
    }
}

impl Texts {
    pub(super) fn len(&self) -> usize {
        self.lengths.len()
    }

    fn get(&self, index: usize) -> Option<Digest> {
        Some(Digest {
            length: *self.lengths.get(index)?,
            hash: *self.hashes.get(index)?,
        })
    }
}

impl ListDifference {
    /// Deserialises the added elements as a list.
    pub(super) fn read<S: for<'de> serde::de::DeserializeSeed<'de, Value = V>, V>(
        &self,
        seed: S,
    ) -> Option<V> {
        let text = [b"[", &self.added[..], b"]"].concat();
        read(str::from_utf8(&text).ok()?, seed).ok()
    }

    fn push_added(&mut self, text: &[u8]) {
        if !self.added.is_empty() {
            self.added.push(b',');
        }
        self.added.extend_from_slice(text);
    }
}

/// Reads a file from the beginning.
struct Scan<'o, R> {
    file: Window<R>,
    /// The outline of the file before.
    old: Option<&'o Outline>,
    new: Outline,
}

impl<R: io::Read> Scan<'_, R> {
    fn read(mut self) -> Option<(Outline, Difference)> {
        let mut difference = Difference::default();
        let old = self.old.map(|old| old.members).unwrap_or_default();
        self.file.expect(b'{')?;
        loop {
            let name = self.file.word()?;
            self.file.expect(b':')?;
            // A file that repeats a member is parsed as a whole.
            let Members {
                keys,
                aliases,
                has_rows,
                has_pairs,
                has_version,
            } = self.new.members;
            match &name[..] {
                b"record_keys" if keys.is_none() => {
                    self.new.members.keys = Some(self.member(old.keys)?);
                }
                b"aliases" if aliases.is_none() => {
                    self.new.members.aliases = Some(self.member(old.aliases)?);
                }
                b"record_infos" if !has_rows => {
                    (self.new.rows, difference.rows) = self.list(&self.new.rows.clone())?;
                    self.new.members.has_rows = true;
                }
                b"records" if !has_pairs => {
                    (self.new.pairs, difference.pairs) = self.list(&self.new.pairs.clone())?;
                    self.new.members.has_pairs = true;
                }
                b"version" if !has_version => {
                    // Any other form, such as 1.0 or `null`, is left to the parser.
                    difference.version = Some(self.file.number()?);
                    self.new.members.has_version = true;
                }
                _ => return None,
            }
            if !self.file.has_more(b'}')? {
                break;
            }
        }
        self.file.skip_space();
        if !self.file.is_at_end() {
            return None;
        }
        Some((self.new, difference))
    }

    /// Reads the value of a member that must be the same as before.
    fn member(&mut self, old: Option<Digest>) -> Option<Digest> {
        self.file.skip_space();
        let length = match old {
            Some(old) => old.length as usize,
            None if self.old.is_some() => return None,
            None => self.file.value_length()?,
        };
        let digest = self.new.digest(self.file.peek(length)?)?;
        self.file.advance(length);
        if old.is_some_and(|old| old != digest) {
            return None;
        }
        Some(digest)
    }

    /// Reads a list and compares its elements with the previous list's.
    fn list(&mut self, old: &Texts) -> Option<(Texts, ListDifference)> {
        // Beyond these, `changes::between` resolves all names again, so reading less would gain
        // little.
        let max_edits = match self.old {
            Some(_) => (old.len() / 8).max(256),
            None => usize::MAX,
        };
        let mut list = ListDifference::default();
        let mut added = Vec::new();
        let mut known = 0;
        self.file.expect(b'[')?;
        let mut has_more = !self.file.skips(b']');
        while has_more {
            self.file.skip_space();
            if self.skip_same(old.get(known)) {
                list.edits.keep(known);
                known += 1;
            } else {
                let text = self.file.list_text()?;
                let digest = self.new.digest(text)?;
                // A bounded search: in a list of another order it would be quadratic.
                let mut later = known + 1..old.len().min(known + 1 + MAX_RUN);
                if let Some(found) = later.find(|&index| old.get(index) == Some(digest)) {
                    list.edits.remove(known..found);
                    list.edits.keep(found);
                    known = found + 1;
                } else {
                    list.edits.add();
                    // The parser has read the rows of a first file.
                    if self.old.is_some() {
                        list.push_added(text);
                    }
                    added.push(digest);
                }
                self.file.advance(digest.length as usize);
                if list.edits.count() > max_edits {
                    return None;
                }
            }
            has_more = self.file.has_more(b']')?;
        }
        list.edits.remove(known..old.len());
        if list.edits.count() > max_edits {
            return None;
        }
        let lengths: Vec<u32> = added.iter().map(|digest| digest.length).collect();
        let hashes: Vec<u64> = added.iter().map(|digest| digest.hash).collect();
        let texts = Texts {
            lengths: list.edits.apply(&old.lengths, &lengths),
            hashes: list.edits.apply(&old.hashes, &hashes),
        };
        Some((texts, list))
    }

    /// Skips an element if it is this one.
    #[inline]
    fn skip_same(&mut self, old: Option<Digest>) -> bool {
        let Some(Digest { length, hash }) = old else {
            return false;
        };
        let Some(text) = self.file.peek(length as usize) else {
            return false;
        };
        // The same bytes end with the same bracket, so the end of the element need not be searched.
        let is_same = self.new.hasher.hash_one(text) == hash;
        if is_same {
            self.file.advance(length as usize);
        }
        is_same
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::super::{
        IndexedRecords,
        columns::{Column, Dictionary},
        instances::InstanceIndex,
        records::Records,
        rows::RECORD_KEYS,
    };

    /// A file that a test edits.
    #[derive(Clone)]
    struct Draft {
        keys: Vec<&'static str>,
        rows: Vec<String>,
        pairs: Vec<String>,
        aliases: Vec<&'static str>,
        version: u64,
        /// White space between the parts.
        space: &'static str,
        /// Whether the rows precede the keys.
        has_rows_first: bool,
    }

    impl Draft {
        fn write(&self) -> Vec<u8> {
            let Self {
                keys,
                rows,
                pairs,
                aliases,
                version,
                space,
                has_rows_first,
            } = self;
            let list = |items: &[String]| items.join(&format!(",{space}"));
            let keys: Vec<String> = keys.iter().map(|key| format!("\"{key}\"")).collect();
            let keys = format!("\"record_keys\":{space}[{}]", keys.join(","));
            let rows = format!("\"record_infos\": [{}{space}]", list(rows));
            let [first, second] = if *has_rows_first {
                [rows, keys]
            } else {
                [keys, rows]
            };
            let pairs = list(pairs);
            let aliases = aliases.join(",");
            format!(
                "{{{space}\"records\":[{pairs}],{first},{second},\"version\":{version}{space},\"aliases\":{{{aliases}}}}}{space}"
            )
            .into_bytes()
        }

        fn edit(&mut self, random: &mut fastrand::Rng) {
            let rows = self.rows.len();
            match random.u8(..40) {
                0..10 if rows > 0 => self.rows[random.usize(..rows)] = row(random),
                10..13 => self.rows.insert(random.usize(..=rows), row(random)),
                13..16 if rows > 0 => drop(self.rows.remove(random.usize(..rows))),
                16..18 if rows > 1 => self.rows.swap(random.usize(..rows), random.usize(..rows)),
                18 if rows > 0 => self.rows.push(self.rows[random.usize(..rows)].clone()),
                19..22 if rows > 0 => {
                    let row = random.usize(..rows);
                    self.pairs.push(pair_of(&self.rows[row]));
                }
                22..25 => self
                    .pairs
                    .insert(random.usize(..=self.pairs.len()), pair(random)),
                25..28 if !self.pairs.is_empty() => {
                    let at = random.usize(..self.pairs.len());
                    self.pairs[at] = pair(random);
                }
                28..31 if !self.pairs.is_empty() => {
                    self.pairs.remove(random.usize(..self.pairs.len()));
                }
                31 => self
                    .aliases
                    .push(r#""a.b":[{"group_id":"1","root_domain":"bosh"}]"#),
                32 => self.aliases.clear(),
                33 => self.keys.swap(random.usize(..13), random.usize(..13)),
                34 => self.space = if self.space.is_empty() { "\n " } else { "" },
                35 => self.has_rows_first = !self.has_rows_first,
                36 if rows > 0 => {
                    const UNUSUAL: [&str; 6] = [
                        "null",
                        "[]",
                        "{}",
                        "[\"a\"]",
                        "[1,[2],{\"b\": \"]\"}]",
                        "\"\\u0041\"",
                    ];
                    self.rows[random.usize(..rows)] =
                        (*random.choice(&UNUSUAL[..]).unwrap()).to_owned();
                }
                37 if rows > 0 => {
                    let number = random.usize(..rows);
                    self.rows[number] = self.rows[number].replace("10.0.", "\\u0031\\u0030.0.");
                }
                _ => self.version = random.u64(..),
            }
        }
    }

    fn row(random: &mut fastrand::Rng) -> String {
        let id = random.u8(..12);
        // Mostly one of few places and one of few domains.
        let group = if random.u8(..6) == 0 {
            "q-odd"
        } else {
            ["web", "db"][usize::from(id % 2)]
        };
        let domain = if random.u8(..12) == 0 {
            "other."
        } else {
            "bosh"
        };
        let az = ["null", "\"z1\"", "\"z2\"", "\"\""][random.usize(..4)];
        let groups = [
            "[]",
            "[\"1\"]",
            "[\"1\",\"2\"]",
            "[\"3\",\"1\",\"3\"]",
            "[\"\"]",
        ][random.usize(..5)];
        let ip = if random.u8(..60) == 0 {
            "nowhere".to_owned()
        } else {
            format!("10.0.0.{id}")
        };
        let number = random.u8(..16);
        let index = random.u8(..3);
        let agent = random.u8(..3);
        format!(
            r#"["i{id}","{number}","{group}",{groups},{az},"1","net","{index}","dep","{ip}","{domain}","agent-{id}-{agent}",{index}]"#
        )
    }

    fn pair(random: &mut fastrand::Rng) -> String {
        let text = [
            "i1.web.net.dep.bosh",
            "i2.db.net.dep.bosh",
            "odd",
            "i3.web.net.dep.other",
        ];
        let name = random.choice(&text[..]).unwrap();
        let ip = if random.u8(..40) == 0 {
            "x".to_owned()
        } else {
            format!("10.0.0.{}", random.u8(..6))
        };
        format!(r#"["{ip}","{name}"]"#)
    }

    /// Returns the pair that a director writes for a row.
    fn pair_of(row: &str) -> String {
        let cells: Vec<&str> = row
            .split(['"', ','])
            .filter(|cell| !cell.is_empty())
            .collect();
        match cells[..] {
            [_, id, _, group, ..] => format!(r#"["10.0.0.9","{id}.{group}.net.dep.bosh"]"#),
            _ => r#"["10.0.0.9","x"]"#.to_owned(),
        }
    }

    /// Returns everything that records mean and how they are numbered.
    fn contents(records: &IndexedRecords) -> String {
        let mut text = String::new();
        let InstanceIndex {
            id,
            num_id,
            az,
            az_id,
            network_id,
            agent_id,
            ..
        } = &*records.instances;
        let index = &*records.instances;
        let columns: [&Column; 6] = [id, num_id, az, az_id, network_id, agent_id];
        let mut dictionary = |name: &str, dictionary: &Dictionary| {
            for (symbol, string) in dictionary.iter() {
                assert_eq!(
                    dictionary.find(string.as_bytes()),
                    Some(symbol),
                    "{name}: {string}"
                );
                write!(text, "{name} {symbol} {string:?}; ").unwrap();
            }
        };
        for column in columns {
            dictionary("column", &column.dictionary);
        }
        dictionary("group", &index.groups);
        dictionary("domain", &index.domains);
        for names in [
            &index.places.instance_groups,
            &index.places.networks,
            &index.places.deployments,
        ] {
            dictionary("place", names);
        }
        for column in columns {
            let rows = (0..column.dictionary.len() as u32).map(|symbol| column.rows(symbol));
            writeln!(text, "{:?} {:?}", column.values, rows.collect::<Vec<_>>()).unwrap();
        }
        writeln!(
            text,
            "{:?} {:?} {:?}",
            index.row_places, index.addresses, index.indexes
        )
        .unwrap();
        writeln!(
            text,
            "{:?} {:?} {:?}",
            index.by_place, index.by_domain, index.by_group
        )
        .unwrap();
        for row in 0..index.len() as u32 {
            let by_index = index.indexes[row as usize].map(|number| index.rows_with_index(number));
            write!(text, "{:?} {by_index:?} ", index.groups_of(row)).unwrap();
        }
        for position in &records.pairs.order {
            let address = records.pairs.list[*position as usize].0;
            let names: Vec<_> = records.pairs.names(index, address).collect();
            write!(text, "\n{position} {address} {names:?}").unwrap();
        }
        write!(text, "\n{:?} {:?}", records.definitions, records.version).unwrap();
        text
    }

    /// Checks that the rows that two indexes share are the same, and the only ones.
    fn check_edits(old: &InstanceIndex, new: &InstanceIndex) {
        let Some((removed, added)) = new.edits_since(old) else {
            return;
        };
        let kept = |index: &InstanceIndex, except: &[u32]| -> Vec<String> {
            let rows = (0..index.len() as u32).filter(|row| !except.contains(row));
            rows.map(|row| {
                let instance = index.instance(row);
                let groups: Vec<&str> = instance.group_ids().collect();
                format!(
                    "{:?}",
                    (
                        index.long_form(row),
                        instance.ip,
                        instance.agent_id,
                        instance.az,
                        groups
                    )
                )
            })
            .collect()
        };
        assert_eq!(kept(old, removed), kept(new, added));
    }

    #[test]
    fn edits_equal_a_complete_reading() {
        // Emulated processors get fewer, as of property tests.
        let cases = std::env::var("PROPTEST_CASES")
            .ok()
            .and_then(|count| count.parse().ok());
        let fleets: u32 = cases.unwrap_or(60).min(60);
        let random = &mut fastrand::Rng::with_seed(3);
        let mut edited = 0;
        let mut shared = 0;
        let mut refused = 0;
        for _ in 0..fleets {
            let mut draft = Draft {
                keys: RECORD_KEYS.to_vec(),
                rows: (0..random.usize(..14)).map(|_| row(random)).collect(),
                pairs: Vec::new(),
                aliases: vec![
                    r#""_.x":[{"group_id":"1","root_domain":"bosh","placeholder_type":"uuid"}]"#,
                ],
                version: 1,
                space: "",
                has_rows_first: false,
            };
            draft.pairs = draft.rows.iter().map(|row| pair_of(row)).collect();
            let mut current = IndexedRecords::from(Records::default());
            for _ in 0..60 {
                let before = draft.clone();
                for _ in 0..random.usize(..4) {
                    draft.edit(random);
                }
                let mut file = draft.write();
                let is_damaged = random.u8(..8) == 0;
                if is_damaged {
                    let at = random.usize(..file.len());
                    match random.u8(..4) {
                        0 => file.truncate(at),
                        1 => drop(file.remove(at)),
                        2 => file[at] = *random.choice(&b"[]{},:\"\\ a\xff1"[..]).unwrap(),
                        _ => file.insert(at, *random.choice(&b"[]{},:\"\\ a\xff1"[..]).unwrap()),
                    }
                    draft = before;
                }
                let complete = Records::parse(&file);
                edited += u32::from(current.follow(&file[..]).is_some());
                match (current.next(&file), complete) {
                    (Ok((next, warnings)), Ok((records, expected))) => {
                        assert_eq!(warnings, expected);
                        assert_eq!(
                            contents(&next),
                            contents(&records.into()),
                            "{}",
                            file.escape_ascii()
                        );
                        check_edits(&current.instances, &next.instances);
                        shared += u32::from(std::sync::Arc::ptr_eq(
                            &next.instances.id,
                            &current.instances.id,
                        ));
                        current = next;
                    }
                    (Err(error), Err(expected)) => {
                        assert_eq!(error, expected);
                        refused += 1;
                    }
                    (next, complete) => panic!("{next:?}, {complete:?}: {}", file.escape_ascii()),
                }
            }
        }
        let are_enough = edited > 13 * fleets && shared > 6 * fleets && refused > 2 * fleets;
        assert!(are_enough, "{edited} {shared} {refused}");
    }

    #[test]
    fn unchanged_rows_are_not_parsed() {
        let rows = |count: u32, changed: u32| -> Vec<u8> {
            let rows: Vec<String> = (0..count).map(|number: u32| {
                let last = if number == changed { 1 } else { 0 };
                format!(
                    r#"["i{number}","{number}","web",["1"],"z1","1","net","1","dep","10.{last}.0.1","bosh","a{number}",0]"#
                )
            }).collect();
            let keys = RECORD_KEYS.map(|key| format!("\"{key}\"")).join(",");
            format!(
                r#"{{"record_keys":[{keys}],"record_infos":[{}],"version":2}}"#,
                rows.join(",")
            )
            .into_bytes()
        };
        let first = IndexedRecords::from(Records::default());
        let (first, _) = first.next(&rows(1_000, 0)).unwrap();
        let file = rows(1_000, 500);
        let (_, difference) = first.outline.as_ref().unwrap().follow(&file[..]).unwrap();
        // The row that has changed back, and the one that has changed now.
        assert_eq!(difference.rows.edits.count(), 4);
        let (second, _) = first.next(&file).unwrap();
        assert!(std::sync::Arc::ptr_eq(
            &first.instances.agent_id,
            &second.instances.agent_id
        ));
        assert!(std::sync::Arc::ptr_eq(
            &first.instances.by_group,
            &second.instances.by_group
        ));
        assert_eq!(
            second.instances.edits_since(&first.instances),
            Some((&[0, 500][..], &[0, 500][..]))
        );
        let (third, _) = second.next(&rows(1_001, 500)).unwrap();
        assert_eq!(
            third.instances.edits_since(&second.instances),
            Some((&[][..], &[1_000][..]))
        );
    }
}
