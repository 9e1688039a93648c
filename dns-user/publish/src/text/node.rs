//! The parsed tree.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

use super::{Problems, json};

/// A value and its line.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Line in the file, from 1: of the value, or of its name in a map.
    pub line: u64,
    /// Parsed value, a scalar or a collection.
    pub value: Value,
}

/// A value of YAML's core schema, which includes JSON.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `null`, `~`, or an empty value.
    Null,
    /// The plain scalars `true` and `false`.
    Bool(bool),
    /// A number without fraction or exponent.
    Integer(i128),
    /// A number with fraction or exponent.
    Float(f64),
    /// Quoted text, or any other plain scalar.
    Text(String),
    /// Items in the order of the text.
    List(Vec<Node>),
    /// Members in the order of the text.
    Map(Vec<Member>),
}

/// A member of a map.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    /// Name of the member.
    pub name: String,
    /// Line of the name.
    pub line: u64,
    /// Value of the member, with its position.
    pub node: Node,
}

/// One document of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Document<'a> {
    /// First line in the file, from 1.
    pub line: u64,
    /// Text of this document only.
    pub text: &'a str,
}

/// Splits a file at its `---` lines, skipping documents without content.
///
/// A syntax error therefore affects only its document.
pub fn documents(text: &str) -> Vec<Document<'_>> {
    let mut found = Vec::new();
    let (mut start, mut first, mut line, mut at) = (0, 1, 0, 0);
    for piece in text.split_inclusive('\n') {
        line += 1;
        let end = at + piece.len();
        let marker = piece.trim_end();
        if marker == "---" || marker.starts_with("--- ") {
            found.push(Document { line: first, text: &text[start..at] });
            // Text after the marker belongs to the document.
            (start, first) = (at + 3, line);
        } else if marker == "..." {
            found.push(Document { line: first, text: &text[start..at] });
            (start, first) = (end, line + 1);
        }
        at = end;
    }
    found.push(Document { line: first, text: &text[start..] });
    found.retain(|document| {
        document.text.lines().map(str::trim).any(|line| !line.is_empty() && !line.starts_with('#'))
    });
    found
}

/// Parses one document; reports the reason if it is unreadable.
pub fn parse(document: Document<'_>, problems: &Problems) -> Option<Node> {
    json::parse(document.text, document.line).or_else(|| parse_yaml(document, problems))
}

/// Parses one document with the parser of YAML.
pub(super) fn parse_yaml(document: Document<'_>, problems: &Problems) -> Option<Node> {
    // Without aliases, every event takes an octet of the text; a file may have 100,000 endpoints.
    let most = document.text.len().max(1_000);
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! { max_events: most, max_nodes: most },
    };
    match serde_saphyr::from_str_with_options::<Tree>(document.text, options) {
        Ok(Tree(node)) => Some(shift(node, document.line - 1)),
        Err(error) => {
            let line = error.location().map_or(1, |location| location.line());
            let reason = error.without_snippet().to_string();
            problems.add(
                document.line - 1 + line.max(1),
                "",
                format!("not valid YAML or JSON: {}", reason.lines().next().unwrap_or_default()),
                "correct the syntax at this line",
            );
            None
        }
    }
}

/// Adds an offset to all lines of a tree.
fn shift(mut node: Node, by: u64) -> Node {
    if by > 0 {
        shift_in_place(&mut node, by);
    }
    node
}

fn shift_in_place(node: &mut Node, by: u64) {
    node.line += by;
    match &mut node.value {
        Value::List(items) => items.iter_mut().for_each(|item| shift_in_place(item, by)),
        Value::Map(members) => {
            for member in members {
                member.line += by;
                shift_in_place(&mut member.node, by);
            }
        }
        Value::Null | Value::Bool(_) | Value::Integer(_) | Value::Float(_) | Value::Text(_) => {}
    }
}

/// A [`Node`] that serde can deserialize.
struct Tree(Node);

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = Spanned::<Bare>::deserialize(deserializer)?;
        Ok(Self(Node { line: spanned.referenced.line(), value: spanned.value.0 }))
    }
}

/// A [`Value`] that serde can deserialize.
struct Bare(Value);

impl<'de> Deserialize<'de> for Bare {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(BareVisitor)
    }
}

struct BareVisitor;

impl<'de> Visitor<'de> for BareVisitor {
    type Value = Bare;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value of YAML or JSON")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Bare, E> {
        Ok(Bare(Value::Bool(value)))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Bare, E> {
        Ok(Bare(Value::Integer(value.into())))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Bare, E> {
        Ok(Bare(Value::Integer(value.into())))
    }

    fn visit_i128<E>(self, value: i128) -> Result<Bare, E> {
        Ok(Bare(Value::Integer(value)))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Bare, E> {
        Ok(Bare(Value::Float(value)))
    }

    fn visit_str<E>(self, value: &str) -> Result<Bare, E> {
        Ok(Bare(Value::Text(value.to_owned())))
    }

    fn visit_string<E>(self, value: String) -> Result<Bare, E> {
        Ok(Bare(Value::Text(value)))
    }

    fn visit_unit<E>(self) -> Result<Bare, E> {
        Ok(Bare(Value::Null))
    }

    fn visit_none<E>(self) -> Result<Bare, E> {
        Ok(Bare(Value::Null))
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Bare, D::Error> {
        Bare::deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Bare, A::Error> {
        let mut list = Vec::new();
        while let Some(Tree(node)) = items.next_element()? {
            list.push(node);
        }
        Ok(Bare(Value::List(list)))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Bare, A::Error> {
        let mut members = Vec::new();
        // The position of a name costs as much as the name, so a value does not have another one.
        while let Some((name, Bare(value))) = entries.next_entry::<Spanned<String>, Bare>()? {
            let line = name.referenced.line();
            members.push(Member { line, name: name.value, node: Node { line, value } });
        }
        Ok(Bare(Value::Map(members)))
    }
}
