//! The question of a query, read even from queries that a server rejects.

use dns_core::{
    name::Name,
    wire::{HEADER_LEN, TYPE_OPT, u16_at},
};
use hickory_proto::{
    rr::{DNSClass, RecordType},
    serialize::binary::BinDecodable,
};

/// A question.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Question {
    /// The name in wire format, as written.
    pub wire: Vec<u8>,
    /// The name in presentation form, as written.
    pub name: String,
    /// Type.
    pub qtype: u16,
    /// Class.
    pub qclass: u16,
    /// Number of OPTs of the query.
    pub opts: usize,
    /// UDP payload size of the OPT.
    pub size: Option<u16>,
}

impl Question {
    /// Reads the question of a query; `None` if there is none that can be read.
    pub fn read(query: &[u8]) -> Option<Self> {
        let (_, length) = Name::from_wire(query.get(HEADER_LEN..)?).ok()?;
        let end = HEADER_LEN + length;
        let wire = query[HEADER_LEN..end].to_vec();
        let mut question = Self {
            name: text(&wire),
            wire,
            qtype: u16_at(query, end)?,
            qclass: u16_at(query, end + 2)?,
            ..Self::default()
        };
        // Without the parser of messages, which rejects what must be told apart here: several OPTs,
        // or one with an owner.
        question.read_opts(query, end + 4);
        Some(question)
    }

    /// Returns the question of class IN for a name in wire format.
    pub fn of_name(wire: &[u8], qtype: u16) -> Self {
        Self {
            name: text(wire),
            wire: wire.to_vec(),
            qtype,
            qclass: u16::from(DNSClass::IN),
            ..Self::default()
        }
    }

    /// Counts the OPTs behind the question, as far as the records can be read.
    fn read_opts(&mut self, query: &[u8], mut at: usize) {
        /// Queries have one or two records; a message of 4 KiB could hold hundreds.
        const MAX_RECORDS: usize = 8;
        for _ in 0..MAX_RECORDS {
            let Some(Ok((_, length))) = query.get(at..).map(Name::from_wire) else {
                return;
            };
            at += length;
            let Some(fields) = query.get(at..at + 10) else {
                return;
            };
            if u16_at(fields, 0) == Some(TYPE_OPT) {
                self.opts += 1;
                self.size = u16_at(fields, 2);
            }
            at += 10 + usize::from(u16_at(fields, 8).unwrap_or(0));
        }
    }

    /// Returns whether a label has a byte that message parsers treat differently: a dot, a backslash, or none of ASCII.
    pub fn has_odd_label(&self) -> bool {
        Name::from_wire(&self.wire).is_ok_and(|(name, _)| {
            let mut bytes = name.labels().flatten();
            bytes.any(|byte| matches!(byte, b'.' | b'\\') || !byte.is_ascii_graphic())
        })
    }

    /// Returns type and, unless it is IN, class, with the size of the OPT.
    pub fn about(&self) -> String {
        let mut text = RecordType::from(self.qtype).to_string();
        if self.qclass != u16::from(DNSClass::IN) {
            text += &format!(" class {}", self.qclass);
        }
        match self.size {
            Some(size) => text += &format!(", EDNS {size}"),
            None => text += ", no EDNS",
        }
        text
    }
}

/// Returns a name in presentation form, in its own letter case.
fn text(wire: &[u8]) -> String {
    // `wire` is a name that dns-core has read.
    let name = hickory_proto::rr::Name::from_bytes(wire).unwrap_or_default();
    name.to_ascii()
}
