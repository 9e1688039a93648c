//! Replies made elsewhere, cut to what the client and its transport take.

use hickory_proto::{
    op::{HeaderCounts, Message, emit_message_parts},
    serialize::binary::BinEncoder,
};

use super::{HEADER_LEN, Query, TYPE_OPT, Transport, flag, reply::error_reply, skip_name, u16_at};

/// Brings a whole reply to the form that the client takes:
///
/// * an OPT is added where the query had one and the reply has none (RFC 6891,
///   section 6.1.1); one that is there stays as it is;
/// * past the client's size names are compressed, and if that is not enough as
///   many records as fit are kept, in their order, with TC set.
///
/// A reply that cannot be read is passed on while it fits; else SERVFAIL.
pub fn fit(query: &Query<'_>, mut reply: Vec<u8>, transport: Transport) -> Vec<u8> {
    let limit = query.limit(transport);
    let ours = query.reply_opt(0);
    if reply.len() <= limit && ours.is_none_or(|opt| ends_with_opt(&reply, &opt)) {
        return reply;
    }
    let Some(layout) = Layout::read(&reply) else {
        return if reply.len() <= limit { reply } else { unreadable(query) };
    };
    let opt = match (layout.opt, ours) {
        (Some((start, end)), _) => reply[start..end].to_vec(),
        (None, Some(opt)) => {
            reply.truncate(layout.end);
            reply.extend_from_slice(&opt);
            add_to_count(&mut reply, ADDITIONAL_COUNT_AT, 1);
            opt.to_vec()
        }
        (None, None) => Vec::new(),
    };
    if reply.len() <= limit {
        return reply;
    }
    let room = limit - opt.len().min(limit);
    let Some(mut cut) = compress(&reply, room).or_else(|| cut_raw(&reply, room)) else {
        return unreadable(query);
    };
    if !opt.is_empty() {
        cut.extend_from_slice(&opt);
        add_to_count(&mut cut, ADDITIONAL_COUNT_AT, 1);
    }
    cut
}

/// Whether the last record is `opt`. (Data of another record that looks like it would
/// cost the client its OPT, nothing else.)
fn ends_with_opt(reply: &[u8], opt: &[u8]) -> bool {
    u16_at(reply, ADDITIONAL_COUNT_AT).is_some_and(|count| count > 0) && reply.ends_with(opt)
}

/// Where ARCOUNT stands in the header.
const ADDITIONAL_COUNT_AT: usize = 10;

/// Where things stand in a reply.
struct Layout {
    /// Start and end of each record.
    records: Vec<(usize, usize)>,
    /// How many of them are answers, then authorities, then additionals.
    counts: [u16; 3],
    /// Start of the records, end of the questions.
    start: usize,
    /// End of the last record.
    end: usize,
    /// Start and end of the OPT.
    opt: Option<(usize, usize)>,
}

impl Layout {
    /// Walks over a message; `None` if it ends too early.
    fn read(message: &[u8]) -> Option<Self> {
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

/// The message encoded anew with compressed names, at most `room` bytes, without
/// its OPT; `None` where hickory cannot read or write it. Behind a record that
/// does not fit nothing is kept, smaller ones in later sections neither (observed).
fn compress(message: &[u8], room: usize) -> Option<Vec<u8>> {
    let mut message = Message::from_vec(message).ok()?;
    loop {
        let (bytes, kept) = encode(&message, room)?;
        if usize::from(kept.answers) < message.answers.len()
            && !(message.authorities.is_empty() && message.additionals.is_empty())
        {
            message.authorities.clear();
            message.additionals.clear();
        } else if usize::from(kept.authorities) < message.authorities.len() && !message.additionals.is_empty()
        {
            message.additionals.clear();
        } else {
            return Some(bytes);
        }
        // TC stays set if what is left fits now.
        message.metadata.truncation = true;
    }
}

/// As much of the message as fits into `room`, section by section, and what that is.
fn encode(message: &Message, room: usize) -> Option<(Vec<u8>, HeaderCounts)> {
    let mut bytes = Vec::with_capacity(room);
    let mut encoder = BinEncoder::new(&mut bytes);
    encoder.set_max_size(room.try_into().ok()?);
    let header = emit_message_parts(
        &message.metadata,
        &mut message.queries.iter(),
        &mut message.answers.iter(),
        &mut message.authorities.iter(),
        &mut message.additionals.iter(),
        None,
        message.signature.as_deref(),
        &mut encoder,
    )
    .ok()?;
    // What was begun of a record that did not fit.
    encoder.trim();
    Some((bytes, header.counts))
}

/// The first records that fit, as they are: pointers lead backwards, and so to
/// what was kept. Without the OPT, which is the caller's to append.
fn cut_raw(message: &[u8], room: usize) -> Option<Vec<u8>> {
    let Layout { records, counts, start, end: _, opt } = Layout::read(message)?;
    if start > room {
        return None;
    }
    let mut kept = message[..start].to_vec();
    let mut kept_counts = [0u16; 3];
    let mut rest = records.into_iter();
    'sections: for (kept_count, count) in kept_counts.iter_mut().zip(counts) {
        for (start, end) in rest.by_ref().take(usize::from(count)) {
            if Some((start, end)) == opt {
                continue;
            }
            if kept.len() + (end - start) > room {
                kept[2] |= (flag::TC >> 8) as u8;
                break 'sections;
            }
            kept.extend_from_slice(&message[start..end]);
            *kept_count += 1;
        }
    }
    for (at, count) in [6, 8, ADDITIONAL_COUNT_AT].into_iter().zip(kept_counts) {
        kept[at..at + 2].copy_from_slice(&count.to_be_bytes());
    }
    Some(kept)
}

/// What a client gets in place of a reply that is too large and cannot be read.
fn unreadable(query: &Query<'_>) -> Vec<u8> {
    error_reply(query, hickory_proto::op::ResponseCode::ServFail)
}

/// Adds to one of the counts of a header, without overflow.
fn add_to_count(message: &mut [u8], at: usize, by: u16) {
    if let Some(field) = message.get_mut(at..at + 2) {
        let count = u16::from_be_bytes([field[0], field[1]]).saturating_add(by);
        field.copy_from_slice(&count.to_be_bytes());
    }
}
