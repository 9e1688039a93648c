//! Parses YAML and JSON to trees whose nodes know their lines, with readers that collect all
//! problems instead of stopping at the first. Pure.
//!
//! Files and API bodies share one reader, so errors have the same wording: position, cause and remedy.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashSet},
    fmt,
    sync::Arc,
};

use dns_kit::foreign::cut;
use serde::{
    Deserialize, Serialize,
    de::{Deserializer, MapAccess, SeqAccess, Visitor},
};
use serde_saphyr::Spanned;

/// A problem in a document. `Display` writes `file:line: path: reason; remedy`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Problem {
    /// File name, or `body` for the body of a request.
    pub file: Arc<str>,
    /// Line in the file, from 1.
    pub line: u64,
    /// Member within the document, such as `spec.endpoints[2].dnsName`; empty for the whole document.
    pub path: String,
    /// Cause of the problem, in lower case.
    pub reason: String,
    /// Remedy, as an instruction to the operator.
    pub remedy: String,
}

impl Problem {
    pub(crate) fn new(
        file: impl Into<Arc<str>>,
        line: u64,
        path: &str,
        reason: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            file: file.into(),
            line,
            path: path.to_owned(),
            reason: reason.into(),
            remedy: remedy.into(),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            file,
            line,
            path,
            reason,
            remedy,
        } = self;
        write!(f, "{file}:{line}: ")?;
        if !path.is_empty() {
            write!(f, "{path}: ")?;
        }
        write!(f, "{reason}; {remedy}")
    }
}

impl std::error::Error for Problem {}

/// Collects the problems of one file or request.
#[derive(Debug)]
pub struct Problems {
    file: Arc<str>,
    found: RefCell<Vec<Problem>>,
}

impl Problems {
    pub fn of(file: impl Into<Arc<str>>) -> Self {
        Self {
            file: file.into(),
            found: RefCell::default(),
        }
    }

    pub fn add(&self, line: u64, path: &str, reason: impl Into<String>, remedy: impl Into<String>) {
        self.found
            .borrow_mut()
            .push(Problem::new(self.file.clone(), line, path, reason, remedy));
    }

    /// Returns the number of problems so far, so that a caller can detect whether a step found any.
    pub fn count(&self) -> usize {
        self.found.borrow().len()
    }

    pub fn into_vec(self) -> Vec<Problem> {
        self.found.into_inner()
    }
}

/// A node with its path and problem list.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    pub node: &'a Node,
    path: String,
    pub problems: &'a Problems,
}

/// The members of a map, each read at most once.
#[derive(Debug)]
pub struct Fields<'a> {
    /// The map itself, for problems that concern it.
    pub map: Reader<'a>,
    rest: Vec<&'a (String, Node)>,
    /// Names that were asked for.
    known: Vec<&'static str>,
}

impl<'a> Reader<'a> {
    pub fn root(node: &'a Node, problems: &'a Problems) -> Self {
        Self {
            node,
            path: String::new(),
            problems,
        }
    }

    pub fn problem(&self, reason: impl Into<String>, remedy: impl Into<String>) {
        self.problems
            .add(self.node.line, &self.path, reason, remedy);
    }

    /// Reports a problem in place of a value.
    pub fn refuse<T>(&self, reason: impl Into<String>, remedy: impl Into<String>) -> Option<T> {
        self.problem(reason, remedy);
        None
    }

    /// Returns a converted value; reports the reason if there is none.
    pub fn accept<T>(&self, converted: Result<T, impl fmt::Display>, remedy: &str) -> Option<T> {
        converted
            .map_err(|error| self.problem(error.to_string(), remedy))
            .ok()
    }

    /// Returns a text; reports any other type.
    pub fn text(&self) -> Option<&'a str> {
        match &self.node.value {
            Value::Text(text) => Some(text),
            _ => {
                let Some(scalar) = self.scalar() else {
                    return self.expected("text");
                };
                self.refuse(
                    format!("{scalar} instead of text"),
                    format!("put it in quotes: \"{scalar}\""),
                )
            }
        }
    }

    /// Returns a non-empty text.
    pub fn filled_text(&self) -> Option<&'a str> {
        let text = self.text()?;
        match text.trim() {
            "" => self.refuse("it is empty", "set a value, or remove the member"),
            _ => Some(text),
        }
    }

    /// Returns a non-empty text of its own.
    pub fn owned_text(&self) -> Option<String> {
        self.filled_text().map(str::to_owned)
    }

    pub fn boolean(&self) -> Option<bool> {
        match self.node.value {
            Value::Bool(value) => Some(value),
            _ => self.expected("true or false"),
        }
    }

    pub fn integer<T>(&self, range: std::ops::RangeInclusive<T>) -> Option<T>
    where
        T: Copy + TryFrom<i128> + PartialOrd + fmt::Display,
    {
        let wanted = format!("a whole number from {} to {}", range.start(), range.end());
        let Value::Integer(value) = self.node.value else {
            return self.expected(&wanted);
        };
        match T::try_from(value) {
            Ok(number) if range.contains(&number) => Some(number),
            _ => self.refuse(format!("{value} is out of range"), format!("give {wanted}")),
        }
    }

    /// Returns the items of a list; reports any other type.
    pub fn items(&self) -> Option<impl ExactSizeIterator<Item = Reader<'a>> + use<'a>> {
        let Value::List(items) = &self.node.value else {
            return self.expected("a list");
        };
        let path = self.path.clone();
        let problems = self.problems;
        Some(items.iter().enumerate().map(move |(index, node)| Reader {
            node,
            path: format!("{path}[{index}]"),
            problems,
        }))
    }

    /// Returns the non-empty texts of a list; reports other items.
    pub fn texts(&self) -> Vec<String> {
        let mut texts = Vec::new();
        for item in self.items().into_iter().flatten() {
            texts.extend(item.owned_text());
        }
        texts
    }

    /// Returns the members of a map; reports any other type.
    pub fn fields(&self) -> Option<Fields<'a>> {
        let Value::Map(members) = &self.node.value else {
            return self.expected("a map");
        };
        Some(Fields {
            map: self.clone(),
            rest: members.iter().collect(),
            known: Vec::new(),
        })
    }

    /// Returns the items of a list that is the only member of a map, and whether the map has a problem beside them:
    /// a misspelt or damaged list may have held any item.
    pub fn only_list(&self, name: &'static str) -> (Vec<Reader<'a>>, bool) {
        let before = self.problems.count();
        let mut items = None;
        if let Some(mut fields) = self.fields() {
            items = fields.required_as(name, Reader::items);
            fields.finish();
        }
        let has_problem = self.problems.count() > before;
        (items.into_iter().flatten().collect(), has_problem)
    }

    /// Returns the texts of a map by their names; reports other values.
    pub fn text_map(&self) -> Option<BTreeMap<String, String>> {
        let mut texts = BTreeMap::new();
        for (name, value) in self.fields()?.others() {
            if let Some(text) = value.text() {
                texts.insert(name.to_owned(), text.to_owned());
            }
        }
        Some(texts)
    }

    fn expected<T>(&self, wanted: &str) -> Option<T> {
        self.refuse(
            format!("{} instead of {wanted}", self.found()),
            format!("give {wanted}"),
        )
    }

    fn found(&self) -> String {
        match &self.node.value {
            Value::Text(text) => format!("the text {:?}", cut(text, MAX_SHOWN)),
            Value::List(_) => "a list".to_owned(),
            Value::Map(_) => "a map".to_owned(),
            _ => self.scalar().unwrap_or_else(|| "nothing".to_owned()),
        }
    }

    /// Returns the text of a boolean or number.
    fn scalar(&self) -> Option<String> {
        match &self.node.value {
            Value::Bool(value) => Some(value.to_string()),
            Value::Integer(value) => Some(value.to_string()),
            Value::Float(value) => Some(value.to_string()),
            _ => None,
        }
    }
}

impl<'a> Fields<'a> {
    /// Takes a member; null counts as absent.
    pub fn optional(&mut self, name: &'static str) -> Option<Reader<'a>> {
        // Also of an absent member, because `finish` suggests names that it did not find.
        self.known.push(name);
        let index = self.rest.iter().position(|(member, _)| member == name)?;
        let member = self.rest.remove(index);
        // Go programs and templates write `null` for what is not set.
        Some(self.reader(member)).filter(|reader| reader.node.value != Value::Null)
    }

    /// Takes a member; reports its absence.
    pub fn required(&mut self, name: &'static str) -> Option<Reader<'a>> {
        let found = self.optional(name);
        if found.is_none() {
            self.map.problem(
                format!("member {name:?} is missing"),
                format!("add {name:?}"),
            );
        }
        found
    }

    /// Takes and converts a member; `None` without it.
    pub fn optional_as<T>(
        &mut self,
        name: &'static str,
        convert: impl FnOnce(&Reader<'a>) -> Option<T>,
    ) -> Option<T> {
        convert(&self.optional(name)?)
    }

    /// Takes and converts a member; reports its absence.
    pub fn required_as<T>(
        &mut self,
        name: &'static str,
        convert: impl FnOnce(&Reader<'a>) -> Option<T>,
    ) -> Option<T> {
        convert(&self.required(name)?)
    }

    pub fn others(&mut self) -> Vec<(&'a str, Reader<'a>)> {
        let mut others = Vec::new();
        for member in std::mem::take(&mut self.rest) {
            others.push((member.0.as_str(), self.reader(member)));
        }
        others
    }

    /// Reports remaining members as unknown; the remedy names the expected ones.
    pub fn finish(mut self) {
        for (name, reader) in self.others() {
            reader.problem(
                format!("unknown member {name:?}"),
                remedy_for_unknown(name, &self.known),
            );
        }
    }

    fn reader(&self, (name, node): &'a (String, Node)) -> Reader<'a> {
        let path = match &*self.map.path {
            "" => name.clone(),
            above => format!("{above}.{name}"),
        };
        Reader {
            node,
            path,
            problems: self.map.problems,
        }
    }
}

/// Maximum number of characters of a text that a message repeats.
const MAX_SHOWN: usize = 60;

/// Returns a remedy that suggests the known name closest to an unknown one.
pub(crate) fn remedy_for_unknown(name: &str, known: &[&str]) -> String {
    let lower = name.to_lowercase();
    let near = known
        .iter()
        .map(|word| (strsim::levenshtein(&lower, &word.to_lowercase()), *word))
        .min();
    match near {
        // Two slips of the keyboard, or one in four letters: what differs more is another word.
        Some((distance, word)) if distance <= 2.max(name.len() / 4) => {
            format!("did you mean {word:?}? If not, remove it")
        }
        // A longer list would hide the cause in a message of one line.
        _ if known.len() <= 12 => format!("remove it; known members are {}", known.join(", ")),
        _ => "remove it".to_owned(),
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Line in the file, from 1: of the value, or of its name in a map.
    pub line: u64,
    pub value: Value,
}

/// A value of YAML's core schema, which includes JSON.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `null`, `~`, or an empty value.
    Null,
    /// A plain scalar such as `true` or `no`, as in YAML 1.1, which Kubernetes reads.
    Bool(bool),
    /// A number without fraction or exponent.
    Integer(i128),
    /// A number with fraction or exponent.
    Float(f64),
    /// Quoted text, or any other plain scalar.
    Text(String),
    List(Vec<Node>),
    Map(Vec<(String, Node)>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RawDocument<'a> {
    /// First line in the file, from 1.
    pub line: u64,
    pub text: &'a str,
}

/// Splits a file at its `---` lines, skipping documents without content.
///
/// A syntax error therefore affects only its document.
pub(crate) fn documents(text: &str) -> Vec<RawDocument<'_>> {
    let mut found = Vec::new();
    let mut start = 0;
    let mut first = 1;
    let mut line = 0;
    let mut at = 0;
    for piece in text.split_inclusive('\n') {
        line += 1;
        let end = at + piece.len();
        let marker = piece.trim_end();
        // Before parsing: a parser stops at the first error of a stream, and a broken document
        // would take the ones behind it along.
        if marker == "---" || marker.starts_with("--- ") {
            found.push(RawDocument {
                line: first,
                text: &text[start..at],
            });
            // Text after the marker belongs to the document.
            (start, first) = (at + 3, line);
        } else if marker == "..." {
            found.push(RawDocument {
                line: first,
                text: &text[start..at],
            });
            (start, first) = (end, line + 1);
        }
        at = end;
    }
    found.push(RawDocument {
        line: first,
        text: &text[start..],
    });
    found.retain(|document| {
        document
            .text
            .lines()
            .map(str::trim)
            .any(|line| !line.is_empty() && !line.starts_with('#'))
    });
    found
}

/// Parses one document; reports the reason if it is unreadable.
pub(crate) fn parse(document: RawDocument<'_>, problems: &Problems) -> Option<Node> {
    // Large lists come from programs, mostly as strict JSON, which needs none of YAML's rules;
    // everything else is judged by the parser of YAML.
    parse_json(document.text, document.line).or_else(|| parse_yaml(document, problems))
}

fn parse_yaml(document: RawDocument<'_>, problems: &Problems) -> Option<Node> {
    // Without aliases, every event takes an octet of the text; a file may have 100,000 endpoints.
    let most = document.text.len().max(1_000);
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! { max_events: most, max_nodes: most },
    };
    match serde_saphyr::from_str_with_options::<Node>(document.text, options) {
        Ok(mut node) => {
            shift(&mut node, document.line - 1);
            Some(node)
        }
        Err(error) => {
            // Some errors, such as an exhausted budget, have no place.
            let line = error.location().map_or(1, |location| location.line());
            let reason = error.without_snippet().to_string();
            problems.add(
                document.line - 1 + line.max(1),
                "",
                format!(
                    "not valid YAML or JSON: {}",
                    reason.lines().next().unwrap_or_default()
                ),
                "correct the syntax at this line",
            );
            None
        }
    }
}

fn shift(node: &mut Node, by: u64) {
    node.line += by;
    match &mut node.value {
        Value::List(items) => items.iter_mut().for_each(|item| shift(item, by)),
        Value::Map(members) => members.iter_mut().for_each(|(_, member)| shift(member, by)),
        Value::Null | Value::Bool(_) | Value::Integer(_) | Value::Float(_) | Value::Text(_) => {}
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = Spanned::<Value>::deserialize(deserializer)?;
        Ok(Self {
            line: spanned.referenced.line(),
            value: spanned.value,
        })
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value of YAML or JSON")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Integer(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Integer(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Value::Float(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::Text(value.to_owned()))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(item) = items.next_element()? {
            values.push(item);
        }
        Ok(Value::List(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut members = Vec::new();
        // The position of a name costs as much as the name, so a value does not have another one.
        while let Some((name, value)) = entries.next_entry::<Spanned<String>, Value>()? {
            let line = name.referenced.line();
            members.push((name.value, Node { line, value }));
        }
        Ok(Value::Map(members))
    }
}

/// Maximum depth of lists and maps. The parser of YAML has another limit.
const DEPTH: usize = 64;

/// Number of members up to which duplicates are found by comparing all pairs.
const FEW: usize = 8;

/// Parses a document of strict JSON whose first line is `line`, to the same tree as the parser of YAML. Returns
/// `None` for everything else: other YAML, rare forms, and errors, which that parser describes.
fn parse_json(text: &str, line: u64) -> Option<Node> {
    let mut json = Json { rest: text, line };
    json.skip_blanks();
    if !json.rest.starts_with(['{', '[']) {
        return None;
    }
    let node = json.node(DEPTH)?;
    json.skip_blanks();
    json.rest.is_empty().then_some(node)
}

struct Json<'a> {
    rest: &'a str,
    line: u64,
}

impl<'a> Json<'a> {
    fn node(&mut self, depth: usize) -> Option<Node> {
        let line = self.line;
        // Each level takes a frame of the stack, so `depth` bounds them: a document of brackets
        // alone would overflow it.
        let value = match self.rest.as_bytes().first()? {
            b'"' => Value::Text(self.text()?),
            b'[' => Value::List(self.list(depth.checked_sub(1)?)?),
            b'{' => Value::Map(self.map(depth.checked_sub(1)?)?),
            _ => self.plain()?,
        };
        Some(Node { line, value })
    }

    fn list(&mut self, depth: usize) -> Option<Vec<Node>> {
        let mut items = Vec::new();
        self.each(']', |json| {
            items.push(json.node(depth)?);
            Some(())
        })?;
        Some(items)
    }

    fn map(&mut self, depth: usize) -> Option<Vec<(String, Node)>> {
        let mut members: Vec<(String, Node)> = Vec::new();
        self.each('}', |json| {
            let line = json.line;
            // A name without quotes is YAML.
            if !json.rest.starts_with('"') {
                return None;
            }
            let name = json.text()?;
            json.skip_blanks();
            json.skip(':')?;
            json.skip_blanks();
            let value = json.node(depth)?.value;
            // As in YAML, a value has the line of its name.
            members.push((name, Node { line, value }));
            Some(())
        })?;
        // YAML merges the members of "<<".
        let is_plain = members.iter().all(|(name, _)| name != "<<") && !has_duplicate(&members);
        is_plain.then_some(members)
    }

    /// Parses a bracket, elements with commas between them, and the bracket `end`.
    fn each(&mut self, end: char, mut element: impl FnMut(&mut Self) -> Option<()>) -> Option<()> {
        self.rest = &self.rest[1..];
        self.skip_blanks();
        if self.skip(end).is_some() {
            return Some(());
        }
        loop {
            element(self)?;
            self.skip_blanks();
            if self.skip(end).is_some() {
                return Some(());
            }
            self.skip(',')?;
            self.skip_blanks();
        }
    }

    /// Parses a text, which begins with a quote.
    fn text(&mut self) -> Option<String> {
        let bytes = self.rest.as_bytes();
        let mut end = 1;
        let mut has_escapes = false;
        loop {
            match bytes.get(end)? {
                b'"' => break,
                // The octet behind a backslash never ends the text.
                b'\\' => (end, has_escapes) = (end + 2, true),
                // Line breaks among them.
                0..0x20 => return None,
                _ => end += 1,
            }
        }
        let quoted = self.take(end + 1)?;
        // Hardly any text has escapes, and a plain copy is faster.
        if has_escapes {
            serde_json::from_str(quoted).ok()
        } else {
            Some(quoted[1..end].to_owned())
        }
    }

    /// Parses a scalar without quotes.
    fn plain(&mut self) -> Option<Value> {
        // A document that ends here is broken; the parser of YAML describes its error.
        let end = self.rest.find([',', ']', '}', ' ', '\t', '\r', '\n'])?;
        Some(match self.take(end)? {
            "null" => Value::Null,
            "true" => Value::Bool(true),
            "false" => Value::Bool(false),
            digits => {
                let number: i64 = digits.parse().ok()?;
                // Neither signs nor zeros that JSON does not permit.
                (number.to_string() == digits).then_some(Value::Integer(number.into()))?
            }
        })
    }

    fn take(&mut self, length: usize) -> Option<&'a str> {
        let (taken, rest) = self.rest.split_at_checked(length)?;
        self.rest = rest;
        Some(taken)
    }

    fn skip(&mut self, expected: char) -> Option<()> {
        self.rest = self.rest.strip_prefix(expected)?;
        Some(())
    }

    fn skip_blanks(&mut self) {
        let rest = self.rest.trim_start_matches([' ', '\t', '\n', '\r']);
        let blanks = &self.rest[..self.rest.len() - rest.len()];
        self.line += blanks.matches('\n').count() as u64;
        self.rest = rest;
    }
}

fn has_duplicate(members: &[(String, Node)]) -> bool {
    // Most maps have a few members, for which a set costs more than comparing all pairs.
    if members.len() > FEW {
        let mut names = HashSet::new();
        return !members.iter().all(|(name, _)| names.insert(&**name));
    }
    members
        .iter()
        .enumerate()
        .any(|(index, (name, _))| members[..index].iter().any(|(other, _)| other == name))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn problems_of(text: &str, read: impl Fn(&Reader<'_>)) -> Vec<String> {
        let problems = Problems::of("zone.yml");
        for document in documents(text) {
            if let Some(node) = parse(document, &problems) {
                read(&Reader::root(&node, &problems));
            }
        }
        problems.into_vec().iter().map(Problem::to_string).collect()
    }

    #[test]
    fn documents_keep_lines() {
        let text = "# head\n---\na: 1\n--- # second\nb: 2\n---\n...\nc: 3\n";
        let found: Vec<_> = documents(text)
            .iter()
            .map(|document| (document.line, document.text.trim()))
            .collect();
        assert_eq!(found, [(2, "a: 1"), (4, "# second\nb: 2"), (8, "c: 3")]);
    }

    #[test]
    fn lines_count_within_file() {
        let found = problems_of("a: 1\n---\nb:\n- {c: 2}\n- d\n", |root| {
            let mut fields = root.fields().unwrap();
            if let Some(list) = fields.optional("b") {
                for item in list.items().unwrap() {
                    if let Some(mut item) = item.fields() {
                        item.required("c").unwrap().text();
                    }
                }
            }
        });
        assert_eq!(
            found,
            [
                "zone.yml:4: b[0].c: 2 instead of text; put it in quotes: \"2\"",
                "zone.yml:5: b[1]: the text \"d\" instead of a map; give a map",
            ]
        );
    }

    #[test]
    fn syntax_error_stays_in_document() {
        let mut seen = std::cell::Cell::new(0);
        let found = problems_of("a: [1\n---\nb: 2\n---\nc: 1\nc: 2\n", |_| {
            seen.set(seen.get() + 1)
        });
        assert_eq!(*seen.get_mut(), 1);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].starts_with("zone.yml:"), "{found:?}");
        assert!(
            found[1].starts_with("zone.yml:6: not valid YAML or JSON: duplicate"),
            "{found:?}"
        );
    }

    #[test]
    fn json_reads_like_yaml() {
        let found = problems_of("{\n  \"ttl\": 9999999999,\n  \"tll\": true\n}\n", |root| {
            let mut fields = root.fields().unwrap();
            fields
                .required("ttl")
                .unwrap()
                .integer(0..=i32::MAX.cast_unsigned());
            fields.optional("dnsName");
            fields.finish();
        });
        assert_eq!(
            found,
            [
                "zone.yml:2: ttl: 9999999999 is out of range; give a whole number from 0 to 2147483647",
                "zone.yml:3: tll: unknown member \"tll\"; did you mean \"ttl\"? If not, remove it",
            ]
        );
    }

    #[test]
    fn distant_names_are_not_suggested() {
        assert_eq!(
            remedy_for_unknown("colour", &["ttl", "dnsName"]),
            "remove it; known members are ttl, dnsName"
        );
        assert!(remedy_for_unknown("dnsname", &["ttl", "dnsName"]).contains("\"dnsName\""));
    }

    /// Parses a text as YAML.
    fn as_yaml(text: &str) -> Option<Node> {
        parse_yaml(RawDocument { line: 3, text }, &Problems::of("file"))
    }

    fn value() -> impl Strategy<Value = serde_json::Value> {
        let text = prop_oneof![
            "[ -~]{0,12}",
            "[a-zé€\u{1f600}\"\\\\\n\t/:#{}\\[\\],-]{0,8}"
        ];
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            any::<u64>().prop_map(Into::into),
            (-100_i8..100).prop_map(Into::into),
            (-1e3..1e3_f64).prop_map(Into::into),
            text.prop_map(Into::into),
        ];
        leaf.prop_recursive(4, 40, 12, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..12).prop_map(Into::into),
                proptest::collection::btree_map("[a-zA-Z/ \"<é0-9.-]{1,6}", inner, 0..12)
                    .prop_map(|map| serde_json::Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn json_yields_tree_of_yaml(value in value()) {
            for text in [value.to_string(), serde_json::to_string_pretty(&value).unwrap()] {
                if let Some(node) = parse_json(&text, 3) {
                    prop_assert_eq!(Some(node), as_yaml(&text), "{}", text);
                }
            }
        }

        #[test]
        fn damaged_json_yields_tree_of_yaml(value in value(), at: prop::sample::Index, by in "[{}\\[\\],:\"0a \\\\]?") {
            let mut text: Vec<char> = serde_json::to_string_pretty(&value).unwrap().chars().collect();
            let at = at.index(text.len());
            text.splice(at..at + 1, by.chars());
            let text: String = text.into_iter().collect();
            if let Some(node) = parse_json(&text, 3) {
                prop_assert_eq!(Some(node), as_yaml(&text), "{}", text);
            }
        }
    }

    #[test]
    fn usual_json_is_parsed_here() {
        let text =
            "\n{ \"a\" : [ 1, -2, null, true, \"x\\\"\\u00e9\" ],\r\n\t\"b\": {}, \"c\": [] }\n";
        assert!(parse_json(text, 3).is_some());
        assert_eq!(parse_json(text, 3), as_yaml(text));
    }

    #[test]
    fn everything_else_is_left_to_yaml() {
        let deep = "[".repeat(65) + &"]".repeat(65);
        let many = format!(
            "{{{}\"n3\": 0}}",
            (0..20)
                .map(|n| format!("\"n{n}\": 0, "))
                .collect::<String>()
        );
        for text in [
            "",
            "a: 1",
            "1",
            "\"a\"",
            "{a: 1}",
            "[1,]",
            "[1 2]",
            "[01]",
            "[+1]",
            "[1.5]",
            "[1e3]",
            "[.5]",
            "[~]",
            "['a']",
            "[a]",
            "[\"a\nb\"]",
            "[1] x",
            "[1",
            "{\"a\" 1}",
            "{\"a\": 1, \"a\": 2}",
            "{\"<<\": {\"a\": 1}}",
            "[\"\\x41\"]",
            "# comment\n[1]",
            &deep,
            &many,
        ] {
            assert_eq!(parse_json(text, 1), None, "{text}");
        }
    }

    /// Reads a document of one member `m` by `read`, and returns what was found and the problems.
    fn member<T>(
        text: &str,
        read: impl FnOnce(&Reader<'_>) -> Option<T>,
    ) -> (Option<T>, Vec<String>) {
        let problems = Problems::of("f");
        let text = format!("m: {text}\n");
        let node = parse(documents(&text)[0], &problems).unwrap();
        let mut fields = Reader::root(&node, &problems).fields().unwrap();
        let found = fields.required_as("m", read);
        let problems = problems.into_vec().iter().map(Problem::to_string).collect();
        (found, problems)
    }

    #[test]
    fn values_of_other_types_are_described() {
        for (value, wanted) in [
            ("[1]", "a list instead of text; give text"),
            ("{a: 1}", "a map instead of text; give text"),
            ("12", "12 instead of text; put it in quotes: \"12\""),
            ("true", "true instead of text; put it in quotes: \"true\""),
            ("1.5", "1.5 instead of text; put it in quotes: \"1.5\""),
        ] {
            let (found, problems) = member(value, |reader| reader.text().map(str::to_owned));
            assert_eq!(
                (found, &problems[..]),
                (None, &[format!("f:1: m: {wanted}")][..])
            );
        }
        for (value, wanted) in [
            (
                "x",
                "the text \"x\" instead of true or false; give true or false",
            ),
            ("1", "1 instead of true or false; give true or false"),
            ("[]", "a list instead of true or false; give true or false"),
            ("{}", "a map instead of true or false; give true or false"),
        ] {
            let (found, problems) = member(value, |reader| reader.boolean());
            assert_eq!(
                (found, &problems[..]),
                (None, &[format!("f:1: m: {wanted}")][..])
            );
        }
        let long = "y".repeat(60);
        for (text, shown) in [
            (long.clone(), long.clone()),
            (format!("{long}z"), format!("{long}…")),
        ] {
            let (_, problems) = member(&text, |reader| reader.boolean());
            assert!(
                problems[0].contains(&format!("the text {shown:?} instead")),
                "{problems:?}"
            );
        }
        assert_eq!(
            member("true", |reader| reader.boolean()),
            (Some(true), vec![])
        );
        assert_eq!(
            member("false", |reader| reader.boolean()),
            (Some(false), vec![])
        );
        assert_eq!(
            member("x", |reader| reader.items().map(|_| ())).1,
            ["f:1: m: the text \"x\" instead of a list; give a list"]
        );
        assert_eq!(
            member("x", |reader| reader.fields().map(|_| ())).1,
            ["f:1: m: the text \"x\" instead of a map; give a map"]
        );
    }

    #[test]
    fn texts_may_have_to_be_filled() {
        assert_eq!(
            member("''", |reader| reader.text().map(str::to_owned)),
            (Some(String::new()), vec![])
        );
        for text in ["''", "'  '"] {
            let (found, problems) = member(text, |reader| reader.owned_text());
            assert_eq!(found, None);
            assert_eq!(
                problems,
                ["f:1: m: it is empty; set a value, or remove the member"]
            );
        }
        assert_eq!(
            member("' a '", |reader| reader.owned_text()),
            (Some(" a ".to_owned()), vec![])
        );
        assert_eq!(
            member("[a, 1, '', b]", |reader| Some(reader.texts())),
            (
                Some(vec!["a".to_owned(), "b".to_owned()]),
                vec![
                    "f:1: m[1]: 1 instead of text; put it in quotes: \"1\"".to_owned(),
                    "f:1: m[2]: it is empty; set a value, or remove the member".to_owned(),
                ]
            )
        );
    }

    #[test]
    fn numbers_lie_in_their_range() {
        for (text, found) in [
            ("2", Some(2)),
            ("5", Some(5)),
            ("1", None),
            ("6", None),
            ("-1", None),
            ("300", None),
        ] {
            let (number, problems) = member(text, |reader| reader.integer(2_u8..=5));
            assert_eq!(number, found, "{text}");
            let expected = match found {
                Some(_) => vec![],
                None => vec![format!(
                    "f:1: m: {text} is out of range; give a whole number from 2 to 5"
                )],
            };
            assert_eq!(problems, expected);
        }
        assert_eq!(
            member("2.5", |reader| reader.integer(2_u8..=5)).1,
            ["f:1: m: 2.5 instead of a whole number from 2 to 5; give a whole number from 2 to 5"]
        );
    }

    #[test]
    fn absent_required_members_are_reported() {
        let read = |text: &str| {
            problems_of(text, |root| {
                let mut fields = root.fields().unwrap();
                if let Some(mut inner) = fields.required_as("outer", Reader::fields) {
                    inner.required("inner");
                    inner.finish();
                }
                fields.finish();
            })
        };
        let missing = "member \"inner\" is missing; add \"inner\"";
        assert_eq!(read("outer: {inner: 1}\n"), [] as [&str; 0]);
        assert_eq!(
            read("outer: {inner: null}\n"),
            [format!("zone.yml:1: outer: {missing}")]
        );
        assert_eq!(
            read("\nouter: {}\n"),
            [format!("zone.yml:2: outer: {missing}")]
        );
        assert_eq!(
            read("outer: null\n"),
            ["zone.yml:1: member \"outer\" is missing; add \"outer\""]
        );
        assert_eq!(
            read("outer:\n  inner: 1\n  innner: 2\nother: 3\n"),
            [
                "zone.yml:3: outer.innner: unknown member \"innner\"; did you mean \"inner\"? If not, remove it",
                "zone.yml:4: other: unknown member \"other\"; did you mean \"outer\"? If not, remove it",
            ]
        );
    }

    #[test]
    fn suggestions_are_near() {
        let meant = |word: &str| format!("did you mean {word:?}? If not, remove it");
        for (name, known, expected) in [
            ("", &["ab"][..], meant("ab")),
            ("", &["abc"], "remove it; known members are abc".to_owned()),
            ("axy", &["a"], meant("a")),
            ("axyz", &["a"], "remove it; known members are a".to_owned()),
            // One slip in four letters: 3 of 12, not of 11.
            ("abcdefghixyz", &["abcdefghi"], meant("abcdefghi")),
            (
                "abcdefghxyz",
                &["abcdefgh"],
                "remove it; known members are abcdefgh".to_owned(),
            ),
            ("TTL", &["name", "ttl"], meant("ttl")),
            ("x", &[], "remove it; known members are ".to_owned()),
        ] {
            assert_eq!(remedy_for_unknown(name, known), expected, "{name}");
        }
        let many = ["aaaaaaaaaaaa"; 13];
        assert_eq!(remedy_for_unknown("x", &many), "remove it");
        assert_eq!(
            remedy_for_unknown("x", &many[..12]),
            format!("remove it; known members are {}", many[..12].join(", "))
        );
    }

    #[test]
    fn markers_split_files() {
        let split = |text| {
            let mut found = Vec::new();
            for document in documents(text) {
                found.push((document.line, document.text));
            }
            found
        };
        for (text, expected) in [
            ("", &[][..]),
            ("# only\n\n  # comments\n", &[]),
            ("---\n---\n...\n", &[]),
            ("a: 1", &[(1, "a: 1")]),
            ("a: 1\n---", &[(1, "a: 1\n")]),
            ("--- a: 1\n", &[(1, " a: 1\n")]),
            ("---a: 1\n", &[(1, "---a: 1\n")]),
            (" ---\na: 1\n", &[(1, " ---\na: 1\n")]),
            (
                "a: 1\r\n---\r\nb: 2\r\n",
                &[(1, "a: 1\r\n"), (2, "\r\nb: 2\r\n")],
            ),
            (
                "a: 1\n...\nb: 2\n...\n# end\n",
                &[(1, "a: 1\n"), (3, "b: 2\n")],
            ),
            ("a: 1\n... x\n", &[(1, "a: 1\n... x\n")]),
        ] {
            assert_eq!(split(text), expected, "{text:?}");
        }
    }

    #[test]
    fn json_values_have_lines() {
        let node =
            parse_json("{\n\n\"a\":\n[\n1,\r\n\"x\"], \"b\": {\n\"c\": null}}\n", 5).unwrap();
        let leaf = |line, value| Node { line, value };
        let list = vec![
            leaf(9, Value::Integer(1)),
            leaf(10, Value::Text("x".to_owned())),
        ];
        let inner = vec![("c".to_owned(), leaf(11, Value::Null))];
        let expected = vec![
            // A value has the line of its name.
            ("a".to_owned(), leaf(7, Value::List(list))),
            ("b".to_owned(), leaf(10, Value::Map(inner))),
        ];
        assert_eq!(node, leaf(5, Value::Map(expected)));
    }

    #[test]
    fn json_is_parsed_to_a_depth() {
        let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
        assert!(parse_json(&nested(64), 1).is_some());
        assert!(parse_json(&nested(65), 1).is_none());
        let maps = |depth: usize| "{\"a\":".repeat(depth) + "[]" + &"}".repeat(depth);
        assert!(parse_json(&maps(63), 1).is_some());
        assert!(parse_json(&maps(64), 1).is_none());
    }

    #[test]
    fn strict_json_is_recognised() {
        let one = |text: &str| match parse_json(&format!("[{text}]"), 1)?.value {
            Value::List(mut items) if items.len() == 1 => Some(items.remove(0).value),
            other => panic!("{other:?}"),
        };
        for (text, expected) in [
            ("0", Value::Integer(0)),
            ("-7", Value::Integer(-7)),
            (
                "9223372036854775807",
                Value::Integer(9_223_372_036_854_775_807),
            ),
            ("true", Value::Bool(true)),
            ("false", Value::Bool(false)),
            (" null\t", Value::Null),
            ("\"\"", Value::Text(String::new())),
            ("\" ~é\"", Value::Text(" ~é".to_owned())),
            (r#""\\""#, Value::Text("\\".to_owned())),
            (r#""a\"b""#, Value::Text("a\"b".to_owned())),
            (r#""\u0041\n""#, Value::Text("A\n".to_owned())),
            ("[ ]", Value::List(Vec::new())),
            ("{ }", Value::Map(Vec::new())),
        ] {
            assert_eq!(one(text), Some(expected), "{text}");
        }
        for text in [
            "-0",
            "-",
            "00",
            "9223372036854775808",
            "\"\u{1f}\"",
            "\"\t\"",
            "\"a",
            "True",
            "nul",
            "\"a\" 1",
        ] {
            assert_eq!(one(text), None, "{text}");
        }
        // Few members are compared in pairs, many by a set.
        for count in [2, 8, 9, 30] {
            let members: Vec<String> = (0..count)
                .map(|number| format!("\"n{number}\": 0"))
                .collect();
            let whole = format!("{{{}}}", members.join(","));
            assert!(parse_json(&whole, 1).is_some(), "{count}");
            for repeated in [0, count - 2] {
                let again = format!("{{{},\"n{repeated}\": 1}}", members[..count - 1].join(","));
                assert_eq!(parse_json(&again, 1), None, "{count} {repeated}");
            }
        }
    }

    #[test]
    fn yaml_values_have_their_types() {
        let text =
            "a: 1\nb: 1.5\nc: yes\nd: ~\ne: true\nf: '1'\ng: [x]\nh: {}\ni: 18446744073709551615\n";
        let node = as_yaml(text).unwrap();
        let leaf = |line, value| Node { line, value };
        let expected = [
            ("a", Value::Integer(1)),
            ("b", Value::Float(1.5)),
            // As in YAML 1.1, which Kubernetes reads.
            ("c", Value::Bool(true)),
            ("d", Value::Null),
            ("e", Value::Bool(true)),
            ("f", Value::Text("1".to_owned())),
            ("g", Value::List(vec![leaf(9, Value::Text("x".to_owned()))])),
            ("h", Value::Map(Vec::new())),
            ("i", Value::Integer(u64::MAX.into())),
        ];
        let mut members = Vec::new();
        for (line, (name, value)) in (3..).zip(expected) {
            members.push((name.to_owned(), leaf(line, value)));
        }
        assert_eq!(node, leaf(3, Value::Map(members)));
    }

    #[test]
    fn syntax_errors_have_a_remedy() {
        let problems = Problems::of("f");
        assert_eq!(
            parse_yaml(
                RawDocument {
                    line: 7,
                    text: "a: 1\nb: 2\nb: 3\n"
                },
                &problems
            ),
            None
        );
        let found = problems.into_vec();
        assert_eq!((found.len(), found[0].line, &*found[0].path), (1, 9, ""));
        assert!(
            found[0]
                .reason
                .starts_with("not valid YAML or JSON: duplicate"),
            "{}",
            found[0]
        );
        assert_eq!(found[0].remedy, "correct the syntax at this line");
        assert!(!found[0].reason.contains('\n'));
    }
}
