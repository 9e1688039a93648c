//! The parts of a message from another server, found without parsing their contents.

use super::{HEADER_LEN, TYPE_OPT, skip_name, u16_at};

/// Offset of ARCOUNT in the header.
pub(super) const ADDITIONAL_COUNT_AT: usize = 10;

/// Offsets and counts of a reply's parts.
pub(super) struct Layout {
    /// Start and end of each record.
    pub(super) records: Vec<(usize, usize)>,
    /// Number of answer, authority and additional records.
    pub(super) counts: [u16; 3],
    /// Start of the records, which is the end of the questions.
    pub(super) start: usize,
    pub(super) end: usize,
    /// Start and end of the OPT.
    pub(super) opt: Option<(usize, usize)>,
}

impl Layout {
    /// Scans a message; `None` if it is cut short.
    pub(super) fn read(message: &[u8]) -> Option<Self> {
        let mut at = HEADER_LEN;
        for _ in 0..u16_at(message, 4)? {
            at = skip_name(message, at)? + 4;
        }
        let start = at;
        let counts = [u16_at(message, 6)?, u16_at(message, 8)?, u16_at(message, ADDITIONAL_COUNT_AT)?];
        let before_additionals = usize::from(counts[0]) + usize::from(counts[1]);
        let mut records = Vec::new();
        let mut opt = None;
        for number in 0..before_additionals + usize::from(counts[2]) {
            let fields = skip_name(message, at)?;
            let end = fields + 10 + usize::from(u16_at(message, fields + 8)?);
            if end > message.len() {
                return None;
            }
            if number >= before_additionals && u16_at(message, fields)? == TYPE_OPT {
                opt = Some((at, end));
            }
            records.push((at, end));
            at = end;
        }
        (at <= message.len()).then_some(Self { records, counts, start, end: at, opt })
    }
}
