//! Strict JSON, which is also YAML, but read many times as fast. Pure.

use std::collections::HashSet;

use super::{Member, Node, Value};

/// Maximum depth of lists and maps. The parser of YAML has another limit.
const DEPTH: usize = 64;

/// Number of members up to which duplicates are found by comparing all pairs.
const FEW: usize = 8;

/// Parses a document of strict JSON whose first line is `line`, to the same tree as the parser of
/// YAML. Returns `None` for everything else: other YAML, rare forms, and errors, which that parser
/// describes.
pub(super) fn parse(text: &str, line: u64) -> Option<Node> {
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
    /// Parses the value at the current position.
    fn node(&mut self, depth: usize) -> Option<Node> {
        let line = self.line;
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

    fn map(&mut self, depth: usize) -> Option<Vec<Member>> {
        let mut members: Vec<Member> = Vec::new();
        self.each('}', |json| {
            let line = json.line;
            let name = json.rest.starts_with('"').then(|| json.text())??;
            json.skip_blanks();
            json.skip(':')?;
            json.skip_blanks();
            let value = json.node(depth)?.value;
            // As in YAML, a value has the line of its name.
            members.push(Member { name, line, node: Node { line, value } });
            Some(())
        })?;
        // YAML merges the members of "<<".
        let is_plain = members.iter().all(|member| member.name != "<<") && !has_duplicate(&members);
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
        let (mut end, mut has_escapes) = (1, false);
        loop {
            match bytes.get(end)? {
                b'"' => break,
                b'\\' => (end, has_escapes) = (end + 2, true),
                // Line breaks among them.
                0..0x20 => return None,
                _ => end += 1,
            }
        }
        let quoted = self.take(end + 1)?;
        if has_escapes { serde_json::from_str(quoted).ok() } else { Some(quoted[1..end].to_owned()) }
    }

    /// Parses a scalar without quotes.
    fn plain(&mut self) -> Option<Value> {
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
        let blanks =
            self.rest.bytes().take_while(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r')).count();
        let (blanks, rest) = self.rest.split_at(blanks);
        self.line += blanks.bytes().filter(|byte| *byte == b'\n').count() as u64;
        self.rest = rest;
    }
}

fn has_duplicate(members: &[Member]) -> bool {
    if members.len() > FEW {
        let mut names = HashSet::new();
        return !members.iter().all(|member| names.insert(&*member.name));
    }
    members.iter().enumerate().any(|(index, one)| members[..index].iter().any(|other| other.name == one.name))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{
        super::{Document, Problems, parse_yaml},
        *,
    };

    /// Parses a text as YAML.
    fn as_yaml(text: &str) -> Option<Node> {
        parse_yaml(Document { line: 3, text }, &Problems::of("file"))
    }

    fn value() -> impl Strategy<Value = serde_json::Value> {
        let text = prop_oneof!["[ -~]{0,12}", "[a-zé€\u{1f600}\"\\\\\n\t/:#{}\\[\\],-]{0,8}"];
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
                if let Some(node) = parse(&text, 3) {
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
            if let Some(node) = parse(&text, 3) {
                prop_assert_eq!(Some(node), as_yaml(&text), "{}", text);
            }
        }
    }

    #[test]
    fn usual_json_is_parsed_here() {
        let text = "\n{ \"a\" : [ 1, -2, null, true, \"x\\\"\\u00e9\" ],\r\n\t\"b\": {}, \"c\": [] }\n";
        assert!(parse(text, 3).is_some());
        assert_eq!(parse(text, 3), as_yaml(text));
    }

    #[test]
    fn everything_else_is_left_to_yaml() {
        let deep = "[".repeat(65) + &"]".repeat(65);
        let many = format!("{{{}\"n3\": 0}}", (0..20).map(|n| format!("\"n{n}\": 0, ")).collect::<String>());
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
            assert_eq!(parse(text, 1), None, "{text}");
        }
    }
}
