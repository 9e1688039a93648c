//! Queries: names with types.

use std::{fmt, fs, path::Path};

use anyhow::{Context as _, Result, ensure};
use dns_core::{
    catalog::{AliasFiles, Records, Snapshot},
    listing::published_names,
    name::Name,
    wire::{CLASS_IN, TYPE_OPT},
};
use hickory_proto::rr::RecordType;

/// A name and a type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Query {
    name: Name,
    record_type: RecordType,
}

impl fmt::Display for Query {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.record_type)
    }
}

impl Query {
    /// Returns the message as stub resolvers send it, with an OPT of this size if there is one.
    pub(crate) fn message(&self, id: u16, edns: Option<u16>) -> Vec<u8> {
        let mut message = id.to_be_bytes().to_vec();
        // RD; one question.
        message.extend_from_slice(&[1, 0, 0, 1, 0, 0, 0, 0, 0, u8::from(edns.is_some())]);
        message.extend_from_slice(self.name.as_wire());
        message.extend_from_slice(&u16::from(self.record_type).to_be_bytes());
        message.extend_from_slice(&CLASS_IN.to_be_bytes());
        if let Some(size) = edns {
            message.push(0);
            message.extend_from_slice(&TYPE_OPT.to_be_bytes());
            message.extend_from_slice(&size.to_be_bytes());
            message.extend_from_slice(&[0; 6]);
        }
        message
    }
}

/// Reads a query file: lines `name type`; empty lines and comments (`;`, `#`) are skipped.
pub(crate) fn of_file(path: &Path) -> Result<Vec<Query>> {
    let file = path.display();
    let text = fs::read_to_string(path).with_context(|| file.to_string())?;
    parse(&text).with_context(|| file.to_string())
}

fn parse(text: &str) -> Result<Vec<Query>> {
    let mut queries = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with([';', '#']) {
            continue;
        }
        let query = parse_line(line).with_context(|| format!("line {}: {line:?}", number + 1))?;
        queries.push(query);
    }
    ensure!(!queries.is_empty(), "no query; expected lines such as \"q-s0.q-g1.bosh. A\"");
    Ok(queries)
}

fn parse_line(line: &str) -> Result<Query> {
    let (name, record_type) = line.split_once(char::is_whitespace).context("no type after the name")?;
    let name = Name::from_text(name).map_err(|problem| anyhow::anyhow!("no name: {problem}"))?;
    Ok(Query { name, record_type: parse_type(record_type)? })
}

fn parse_type(text: &str) -> Result<RecordType> {
    let text = text.trim().to_ascii_uppercase();
    if let Some(Ok(number)) = text.strip_prefix("TYPE").map(str::parse::<u16>) {
        return Ok(number.into());
    }
    text.parse().map_err(|_| anyhow::anyhow!("{text:?} is no type"))
}

/// Returns queries for the names of records.json, each name with all types.
pub(crate) fn of_records(path: &Path, types: &[String], most: Option<usize>) -> Result<Vec<Query>> {
    let file = path.display();
    let bytes = fs::read(path).with_context(|| file.to_string())?;
    let (records, _unusable_rows) = Records::parse(&bytes).with_context(|| file.to_string())?;
    let (snapshot, _unusable_aliases) = Snapshot::build(records, &AliasFiles::default());
    let types = types.iter().map(|text| parse_type(text)).collect::<Result<Vec<_>>>()?;
    let names = published_names(&snapshot).take(most.unwrap_or(usize::MAX));
    let queries: Vec<Query> = names
        .flat_map(|name| types.iter().map(move |&record_type| Query { name: name.clone(), record_type }))
        .collect();
    ensure!(!queries.is_empty(), "{file}: no names");
    Ok(queries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_queries() {
        let queries = parse("; a comment\nA.bosh. a\n\n  b.bosh\tTYPE65  \n").unwrap();
        let shown: Vec<String> = queries.iter().map(ToString::to_string).collect();
        assert_eq!(shown[0], "a.bosh. A");
        assert_eq!(shown.len(), 2);
        let message = queries[0].message(0x1234, Some(1232));
        assert_eq!(
            message,
            b"\x12\x34\x01\0\0\x01\0\0\0\0\0\x01\x01a\x04bosh\0\0\x01\0\x01\0\0\x29\x04\xd0\0\0\0\0\0\0"
        );
        for (text, expected) in
            [("", "no query"), ("a.bosh.\n", "line 1"), ("a. A\na..b A", "line 2"), ("a. X9", "line 1")]
        {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }
}
