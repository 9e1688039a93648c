//! Parsing of client messages.

use hickory_proto::{
    op::ResponseCode,
    rr::Record,
    serialize::binary::{BinDecodable, BinDecoder},
};

use super::{
    Edns, EdnsOptions, HEADER_LEN, Parsed, Query, Question, ReplySettings, TYPE_OPT, flag,
    reply::{ReplyFlags, empty_reply, questionless_reply},
    skip_name, u16_at,
};

/// Parses a message from a client. Rules in this order (observed, except BADVERS, which is RFC
/// 6891, section 6.1.3):
///
/// * shorter than a header, or QR set: no reply;
/// * an opcode other than QUERY: NOTIMP, without the question;
/// * not exactly one question, more than one answer or authority record, more than two additional
///   records, or an unparsable or compressed question: FORMERR, without the question;
/// * an unparsable record, a second OPT (RFC 6891, section 6.1.1) or one whose owner is not the root
///   (section 6.1.2): FORMERR, with the question;
/// * an EDNS version above 0: BADVERS.
///
/// Trailing bytes are ignored.
pub fn parse(message: &[u8]) -> Parsed<'_> {
    let Some(header) = message.first_chunk::<HEADER_LEN>() else {
        return Parsed::Drop;
    };
    let field = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
    let (id, flags) = (field(0), field(2));
    let counts = Counts { answers: field(6), authorities: field(8), additionals: field(10) };
    if flags & flag::QR != 0 {
        return Parsed::Drop;
    }
    if flags & flag::OPCODE != 0 {
        return Parsed::Reply(questionless_reply(id, flags, ResponseCode::NotImp));
    }
    if field(4) != 1 || counts.answers > 1 || counts.authorities > 1 || counts.additionals > 2 {
        return Parsed::Reply(questionless_reply(id, flags, ResponseCode::FormErr));
    }
    let Some((question, end)) = read_question(message) else {
        return Parsed::Reply(questionless_reply(id, flags, ResponseCode::FormErr));
    };
    let settings = ReplySettings::default();
    let query = Query { message, id, flags, question, edns: None, client: None, settings };
    let Some(opt) = read_records(message, end, counts) else {
        return Parsed::Reply(empty_reply(&query, ResponseCode::FormErr, ReplyFlags::ERROR));
    };
    let Some(opt) = opt else {
        return Parsed::Query(query);
    };
    let query = Query { edns: Some(opt.edns), ..query };
    if opt.version != 0 {
        return Parsed::Reply(empty_reply(&query, ResponseCode::BADVERS, ReplyFlags::ERROR));
    }
    Parsed::Query(query)
}

/// Reads the OPT of a query that has neither a question nor other records, which only asks for a cookie (RFC 7873,
/// section 5.4); [`parse`] answers it with FORMERR.
pub fn opt_without_question(message: &[u8]) -> Option<(Edns, EdnsOptions<'_>)> {
    /// QDCOUNT to ARCOUNT.
    const COUNTS: [u8; 8] = [0, 0, 0, 0, 0, 0, 0, 1];
    if message.get(4..HEADER_LEN)? != COUNTS || u16_at(message, 2)? & (flag::QR | flag::OPCODE) != 0 {
        return None;
    }
    let counts = Counts { answers: 0, authorities: 0, additionals: 1 };
    let Opt { edns, version } = read_records(message, HEADER_LEN, counts)??;
    let (start, end) = edns.options;
    let options = EdnsOptions(message.get(usize::from(start)..usize::from(end))?);
    (version == 0).then_some((edns, options))
}

/// Record counts of the header by section.
#[derive(Clone, Copy)]
struct Counts {
    answers: u16,
    authorities: u16,
    additionals: u16,
}

/// An OPT whose version is not checked yet.
struct Opt {
    edns: Edns,
    version: u8,
}

/// Parses the question behind the header; also returns its end.
fn read_question(message: &[u8]) -> Option<(Question<'_>, usize)> {
    let rest = message.get(HEADER_LEN..)?;
    let name_len = name_len(rest)?;
    let raw_name = rest.get(..name_len)?;
    let fields = HEADER_LEN + name_len;
    let question =
        Question { raw_name, qtype: u16_at(message, fields)?, qclass: u16_at(message, fields + 2)? };
    Some((question, fields + 4))
}

/// Returns the length of the uncompressed name at the start of `bytes`; `None` if invalid.
fn name_len(bytes: &[u8]) -> Option<usize> {
    let mut end = 0;
    loop {
        match *bytes.get(end)? {
            0 => return Some(end + 1),
            length @ 1..=63 => end += usize::from(length) + 1,
            _ => return None,
        }
        // One byte must be left for the root label.
        if end >= dns_common::name::MAX_NAME_LEN {
            return None;
        }
    }
}

/// Finds the OPT among the records from `at` on; the outer `None` means that they are unparsable.
fn read_records(message: &[u8], at: usize, counts: Counts) -> Option<Option<Opt>> {
    match counts {
        Counts { answers: 0, authorities: 0, additionals: 0 } => Some(None),
        // Nearly every client with EDNS sends an OPT and no other record.
        Counts { answers: 0, authorities: 0, additionals: 1 } if message.get(at) == Some(&0) => {
            match u16_at(message, at + 1)? {
                TYPE_OPT => Some(Some(read_opt(message, at + 1)?.0)),
                _ => walk_records(message, at, counts),
            }
        }
        _ => walk_records(message, at, counts),
    }
}

/// Parses the OPT whose TYPE is at `at`; also returns its end.
fn read_opt(message: &[u8], at: usize) -> Option<(Opt, usize)> {
    let fixed: &[u8; 10] = message.get(at..)?.first_chunk()?;
    let [_, _, size_high, size_low, _extended_rcode, version, flags_high, _, length_high, length_low] =
        *fixed;
    let start = at + fixed.len();
    let end = start + usize::from(u16::from_be_bytes([length_high, length_low]));
    let options = message.get(..end)?;
    let mut next = start;
    while next < end {
        next += 4 + usize::from(u16_at(options, next + 2)?);
    }
    if next > end {
        return None;
    }
    // A message is not longer than 65,535 bytes.
    let range = (u16::try_from(start).ok()?, u16::try_from(end).ok()?);
    let udp_size = u16::from_be_bytes([size_high, size_low]);
    let edns = Edns { udp_size, dnssec_ok: flags_high & 0x80 != 0, options: range };
    Some((Opt { edns, version }, end))
}

/// Like [`read_records`], for everything that a plain query does not contain. The records are
/// ignored but must be well-formed.
fn walk_records(message: &[u8], start: usize, counts: Counts) -> Option<Option<Opt>> {
    let mut decoder = BinDecoder::new(message);
    decoder.read_slice(start).ok()?;
    let mut found = None;
    let before_additionals = counts.answers + counts.authorities;
    for number in 0..before_additionals + counts.additionals {
        let type_at = skip_name(message, decoder.index())?;
        if u16_at(message, type_at)? == TYPE_OPT {
            let owner = decoder.index();
            let (opt, end) = read_opt(message, type_at)?;
            decoder.read_slice(end - owner).ok()?;
            // An OPT outside the additional section is ignored (observed).
            if number >= before_additionals && (message[owner] != 0 || found.replace(opt).is_some()) {
                return None;
            }
        } else {
            Record::read(&mut decoder).ok()?;
        }
    }
    Some(found)
}
