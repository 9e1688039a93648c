//! Parses YAML and JSON to trees whose nodes know their lines, with readers that collect all
//! problems instead of stopping at the first. Pure.
//!
//! Files and API bodies share one reader, so errors have the same wording: position, cause and
//! remedy.

mod json;
mod node;
mod reader;

use std::{cell::RefCell, fmt, sync::Arc};

use serde::{Deserialize, Serialize};

pub use node::{Document, Member, Node, Value, documents, parse};
pub use reader::{Fields, Reader, remedy_for_unknown};

/// A problem in a document. `Display` writes `file:line: path: reason; remedy`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Problem {
    /// File name, or `body` for the body of a request.
    pub file: Arc<str>,
    /// Line in the file, from 1.
    pub line: u64,
    /// Member within the document, such as `spec.endpoints[2].dnsName`; empty for the whole
    /// document.
    pub path: String,
    /// Cause of the problem, in lower case.
    pub reason: String,
    /// Remedy, as an instruction to the operator.
    pub remedy: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, line, path, reason, remedy } = self;
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
    /// Creates an empty list for a file.
    pub fn of(file: impl Into<Arc<str>>) -> Self {
        Self { file: file.into(), found: RefCell::default() }
    }

    /// Adds a problem at a position of the file.
    pub fn add(&self, line: u64, path: &str, reason: impl Into<String>, remedy: impl Into<String>) {
        self.found.borrow_mut().push(Problem {
            file: self.file.clone(),
            line,
            path: path.to_owned(),
            reason: reason.into(),
            remedy: remedy.into(),
        });
    }

    /// Returns the number of problems so far, so that a caller can detect whether a step found any.
    pub fn count(&self) -> usize {
        self.found.borrow().len()
    }

    /// Returns all problems in the order of discovery.
    pub fn into_vec(self) -> Vec<Problem> {
        self.found.into_inner()
    }
}

#[cfg(test)]
mod tests {
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
        let found: Vec<_> =
            documents(text).iter().map(|document| (document.line, document.text.trim())).collect();
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
        let found = problems_of("a: [1\n---\nb: 2\n---\nc: 1\nc: 2\n", |_| seen.set(seen.get() + 1));
        assert_eq!(*seen.get_mut(), 1);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].starts_with("zone.yml:"), "{found:?}");
        assert!(found[1].starts_with("zone.yml:6: not valid YAML or JSON: duplicate"), "{found:?}");
    }

    #[test]
    fn json_reads_like_yaml() {
        let found = problems_of("{\n  \"ttl\": 9999999999,\n  \"tll\": true\n}\n", |root| {
            let mut fields = root.fields().unwrap();
            fields.required("ttl").unwrap().integer(0..=i32::MAX.cast_unsigned());
            fields.finish(&["ttl", "dnsName"]);
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
}
