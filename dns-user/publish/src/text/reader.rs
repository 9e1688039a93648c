//! Typed readers of a tree.

use std::fmt::Write as _;

use super::{
    Problems,
    node::{Member, Node, Value},
};

/// A node with its path and problem list.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    node: &'a Node,
    path: String,
    problems: &'a Problems,
}

/// The members of a map, each read at most once.
#[derive(Debug)]
pub struct Fields<'a> {
    map: Reader<'a>,
    rest: Vec<&'a Member>,
}

impl<'a> Reader<'a> {
    /// Creates a reader of a document's root.
    pub fn root(node: &'a Node, problems: &'a Problems) -> Self {
        Self { node, path: String::new(), problems }
    }

    /// Returns the unconverted value.
    pub fn value(&self) -> &'a Value {
        &self.node.value
    }

    /// Returns the line in the file, from 1.
    pub fn line(&self) -> u64 {
        self.node.line
    }

    /// Returns the problem list of this document.
    pub fn problems(&self) -> &'a Problems {
        self.problems
    }

    /// Reports a problem at this node.
    pub fn problem(&self, reason: impl Into<String>, remedy: impl Into<String>) {
        self.problems.add(self.node.line, &self.path, reason, remedy);
    }

    /// Returns whether the value is null.
    pub fn is_null(&self) -> bool {
        self.node.value == Value::Null
    }

    /// Returns a text; reports any other type.
    pub fn text(&self) -> Option<&'a str> {
        match &self.node.value {
            Value::Text(text) => Some(text),
            Value::Bool(_) | Value::Integer(_) | Value::Float(_) => {
                self.problem(
                    format!("{} instead of text", self.found()),
                    format!("put it in quotes: \"{}\"", self.scalar()),
                );
                None
            }
            _ => self.expected("text"),
        }
    }

    /// Returns a non-empty text.
    pub fn filled_text(&self) -> Option<&'a str> {
        let text = self.text()?;
        if text.trim().is_empty() {
            self.problem("it is empty", "set a value, or remove the member");
            return None;
        }
        Some(text)
    }

    /// Returns the value if it is a boolean.
    pub fn boolean(&self) -> Option<bool> {
        match self.node.value {
            Value::Bool(value) => Some(value),
            _ => self.expected("true or false"),
        }
    }

    /// Returns an integer within a range.
    pub fn integer<T>(&self, range: std::ops::RangeInclusive<T>) -> Option<T>
    where
        T: Copy + TryFrom<i128> + PartialOrd + std::fmt::Display,
    {
        let wanted = format!("a whole number from {} to {}", range.start(), range.end());
        let Value::Integer(value) = self.node.value else { return self.expected(&wanted) };
        match T::try_from(value) {
            Ok(number) if range.contains(&number) => Some(number),
            _ => {
                self.problem(format!("{value} is out of range"), format!("give {wanted}"));
                None
            }
        }
    }

    /// Returns the items of a list; reports any other type.
    pub fn items(&self) -> Option<impl ExactSizeIterator<Item = Reader<'a>> + use<'a>> {
        let Value::List(items) = &self.node.value else { return self.expected("a list") };
        let (path, problems) = (self.path.clone(), self.problems);
        Some(items.iter().enumerate().map(move |(index, node)| Reader {
            node,
            path: format!("{path}[{index}]"),
            problems,
        }))
    }

    /// Returns the members of a map; reports any other type.
    pub fn fields(&self) -> Option<Fields<'a>> {
        let Value::Map(members) = &self.node.value else { return self.expected("a map") };
        Some(Fields { map: self.clone(), rest: members.iter().collect() })
    }

    /// Reports an unexpected value.
    fn expected<T>(&self, wanted: &str) -> Option<T> {
        self.problem(format!("{} instead of {wanted}", self.found()), format!("give {wanted}"));
        None
    }

    fn found(&self) -> String {
        match &self.node.value {
            Value::Null => "nothing".to_owned(),
            Value::Bool(_) | Value::Integer(_) | Value::Float(_) => self.scalar(),
            Value::Text(text) => format!("the text {:?}", shortened(text)),
            Value::List(_) => "a list".to_owned(),
            Value::Map(_) => "a map".to_owned(),
        }
    }

    /// Formats a scalar as text.
    fn scalar(&self) -> String {
        match &self.node.value {
            Value::Bool(value) => value.to_string(),
            Value::Integer(value) => value.to_string(),
            Value::Float(value) => value.to_string(),
            Value::Text(text) => text.clone(),
            Value::Null | Value::List(_) | Value::Map(_) => String::new(),
        }
    }
}

impl<'a> Fields<'a> {
    /// Returns the map itself, for problems that concern it.
    pub fn map(&self) -> &Reader<'a> {
        &self.map
    }

    /// Takes a member; null counts as absent.
    pub fn optional(&mut self, name: &str) -> Option<Reader<'a>> {
        let index = self.rest.iter().position(|member| member.name == name)?;
        let member = self.rest.remove(index);
        let reader = self.reader(member);
        (!reader.is_null()).then_some(reader)
    }

    /// Takes a member; reports its absence.
    pub fn required(&mut self, name: &str) -> Option<Reader<'a>> {
        let found = self.optional(name);
        if found.is_none() {
            self.map.problem(format!("member {name:?} is missing"), format!("add {name:?}"));
        }
        found
    }

    /// Takes all remaining members.
    pub fn others(&mut self) -> Vec<(&'a str, Reader<'a>)> {
        let rest = std::mem::take(&mut self.rest);
        rest.into_iter().map(|member| (member.name.as_str(), self.reader(member))).collect()
    }

    /// Reports remaining members as unknown. `known` lists the allowed ones for the remedy.
    pub fn finish(mut self, known: &[&str]) {
        for (name, reader) in self.others() {
            reader.problem(format!("unknown member {name:?}"), remedy_for_unknown(name, known));
        }
    }

    fn reader(&self, member: &'a Member) -> Reader<'a> {
        let mut path = self.map.path.clone();
        if !path.is_empty() {
            path.push('.');
        }
        // Writing to a String cannot fail.
        let _ = write!(path, "{}", member.name);
        // A problem is reported at the member's name even if the value begins on a later line.
        Reader { node: &member.node, path, problems: self.map.problems }
    }
}

/// Returns a remedy that suggests the known name closest to an unknown one.
pub fn remedy_for_unknown(name: &str, known: &[&str]) -> String {
    let lower = name.to_lowercase();
    let near = known.iter().map(|word| (strsim::levenshtein(&lower, &word.to_lowercase()), *word)).min();
    match near {
        Some((distance, word)) if distance <= 2.max(name.len() / 4) => {
            format!("did you mean {word:?}? If not, remove it")
        }
        _ if known.len() <= 12 => format!("remove it; known members are {}", known.join(", ")),
        _ => "remove it".to_owned(),
    }
}

/// Returns the beginning of a text, for messages.
fn shortened(text: &str) -> String {
    const LONGEST: usize = 60;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
