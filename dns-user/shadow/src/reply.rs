//! A reply in the form in which replies are compared.

use dns_core::wire::{HEADER_LEN, u16_at};
use dns_kit::metrics::labels::rcode_label;
use hickory_proto::{
    op::Message,
    rr::{DNSClass, RecordType},
};

/// Bits of the header's flags (RFC 1035, section 4.1.1; RFC 4035, section 3).
const AA: u16 = 0x0400;
const TC: u16 = 0x0200;

/// Flags of a header that are compared, with their names. TC is compared with the records.
pub const FLAGS: [(u16, &str); 7] = [
    (0x7800, "opcode"),
    (AA, "AA"),
    (0x0100, "RD"),
    (0x0080, "RA"),
    (0x0040, "Z"),
    (0x0020, "AD"),
    (0x0010, "CD"),
];

/// A reply in its parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Length of the message in bytes.
    pub length: usize,
    /// The second 16 bits of the header.
    pub flags: u16,
    /// The RCODE, extended by the OPT.
    pub rcode: u16,
    /// Name as written, type and class of the first question; `None` without one.
    pub question: Option<(String, RecordType, DNSClass)>,
    /// Records of the answer section.
    pub answers: Vec<Record>,
    /// Records of the authority section.
    pub authority: Vec<Record>,
    /// The additional section without the OPT.
    pub additional: Vec<Record>,
    /// The OPT, if there is one.
    pub opt: Option<Opt>,
}

/// A record; ordered by its parts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Record {
    /// Owner in its letter case.
    pub owner: String,
    /// Type of the record.
    pub rtype: RecordType,
    /// Class of the record.
    pub class: u16,
    /// Data in presentation form.
    pub data: String,
    /// Time to live in seconds.
    pub ttl: u32,
}

/// The OPT of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opt {
    /// The server's UDP payload size.
    pub size: u16,
    /// Whether DO is set.
    pub dnssec_ok: bool,
    /// Version of EDNS.
    pub version: u8,
    /// Codes of its options.
    pub options: Vec<u16>,
}

impl Reply {
    /// Reads a reply; `None` if it is malformed.
    pub fn read(message: &[u8]) -> Option<Self> {
        let flags = u16_at(message, 2)?;
        if message.len() < HEADER_LEN {
            return None;
        }
        let parsed = Message::from_vec(message).ok()?;
        let mut question = None;
        if let Some(query) = parsed.queries.first() {
            // In the letter case of the message: a reply must repeat the query's.
            let name = query.name().to_ascii();
            question = Some((name, query.query_type(), query.query_class()));
        }
        let mut opt = None;
        if let Some(edns) = &parsed.edns {
            let mut options = Vec::new();
            for (code, _) in &edns.options().options {
                // Codes only: the data, such as a cookie, is each server's own.
                options.push(u16::from(*code));
            }
            opt = Some(Opt {
                size: edns.max_payload(),
                dnssec_ok: edns.flags().dnssec_ok,
                version: edns.version(),
                options,
            });
        }
        Some(Self {
            length: message.len(),
            flags,
            rcode: u16::from(parsed.metadata.response_code),
            question,
            answers: records(&parsed.answers),
            authority: records(&parsed.authorities),
            additional: records(&parsed.additionals),
            opt,
        })
    }

    /// Returns whether TC is set.
    pub fn is_truncated(&self) -> bool {
        self.flags & TC != 0
    }

    /// Returns whether AA is set.
    pub fn is_authoritative(&self) -> bool {
        self.flags & AA != 0
    }

    /// Returns the name of the RCODE.
    pub fn rcode_name(&self) -> String {
        // The OPT extends the RCODE to 12 bits (RFC 6891, section 6.1.3), of which none above 255 is assigned for messages.
        match u8::try_from(self.rcode) {
            Ok(rcode) => rcode_label(rcode).into_owned(),
            Err(_) => self.rcode.to_string(),
        }
    }

    /// Returns the reply in lines, as reports show it.
    pub fn lines(&self) -> Vec<String> {
        let mut flags = Vec::new();
        for (bit, name) in FLAGS.iter().chain(&[(TC, "TC")]) {
            if self.flags & bit != 0 {
                flags.push(*name);
            }
        }
        let mut lines = vec![format!(
            "{} [{}], {} bytes",
            self.rcode_name(),
            flags.join(" "),
            self.length
        )];
        let sections = [
            ("answer", &self.answers),
            ("authority", &self.authority),
            ("additional", &self.additional),
        ];
        for (section, records) in sections {
            for record in records.iter().take(MAX_SHOWN_RECORDS) {
                lines.push(format!(
                    "{section}: {} {} {} {}",
                    record.owner, record.ttl, record.rtype, record.data
                ));
            }
            if records.len() > MAX_SHOWN_RECORDS {
                lines.push(format!(
                    "{section}: and {} more",
                    records.len() - MAX_SHOWN_RECORDS
                ));
            }
        }
        if let Some(opt) = &self.opt {
            let dnssec_ok = if opt.dnssec_ok { ", DO" } else { "" };
            lines.push(format!("OPT: {} bytes{dnssec_ok}", opt.size));
        }
        lines
    }
}

/// Maximum number of records of a section that a report shows.
const MAX_SHOWN_RECORDS: usize = 8;

fn records(records: &[hickory_proto::rr::Record]) -> Vec<Record> {
    let mut all = Vec::with_capacity(records.len());
    for record in records {
        all.push(Record {
            owner: record.name.to_ascii(),
            rtype: record.record_type(),
            class: u16::from(record.dns_class),
            data: record.data.to_string(),
            ttl: record.ttl,
        });
    }
    all
}
