//! Fitting of foreign replies to the limits of client and transport.

use hickory_proto::{
    op::{HeaderCounts, Message, emit_message_parts},
    serialize::binary::BinEncoder,
};

use super::{
    ADDITIONAL_COUNT_AT, ExtendedError, InfoCode, Layout, Query, Transport, flag, reply::error_reply, u16_at,
};

/// Adapts a complete reply to the client:
///
/// * adds an OPT if the query has one and the reply has none (RFC 6891, section 6.1.1); an existing
///   one stays unchanged;
/// * above the client's size limit, compresses names, and if that is not enough keeps the records
///   that fit, in their order, with TC set.
///
/// An unparsable reply is passed on if it fits; otherwise the result is SERVFAIL.
pub fn truncate_to_client(query: &Query<'_>, mut reply: Vec<u8>, transport: Transport) -> Vec<u8> {
    let limit = query.limit(transport);
    let ours = query.reply_opt(0);
    if reply.len() <= limit && ours.is_none_or(|opt| ends_with_opt(&reply, &opt)) {
        return reply;
    }
    let Some(layout) = Layout::read(&reply) else {
        return if reply.len() <= limit { reply } else { unreadable(query, transport) };
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
        return unreadable(query, transport);
    };
    if !opt.is_empty() {
        cut.extend_from_slice(&opt);
        add_to_count(&mut cut, ADDITIONAL_COUNT_AT, 1);
    }
    cut
}

/// Returns whether the last record is `opt`. (If another record's data happens to look like it, the
/// client merely loses its OPT.)
fn ends_with_opt(reply: &[u8], opt: &[u8]) -> bool {
    u16_at(reply, ADDITIONAL_COUNT_AT).is_some_and(|count| count > 0) && reply.ends_with(opt)
}

/// Re-encodes the message with compressed names in at most `room` bytes, without its OPT; `None` if
/// hickory cannot parse or encode it. After the first record that does not fit, all others are
/// dropped, even smaller ones in later sections (observed).
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
        // TC stays set even if the remaining records fit now.
        message.metadata.truncation = true;
    }
}

/// Encodes the sections up to `room` bytes; returns the bytes and the record counts.
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
    // Drop the partially encoded record.
    encoder.trim();
    Some((bytes, header.counts))
}

/// Keeps the leading records that fit, unchanged: compression pointers only point backwards, to
/// data that is kept. The OPT is omitted; the caller appends it.
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

/// Returns the reply sent instead of one that is too large and unparsable.
fn unreadable(query: &Query<'_>, transport: Transport) -> Vec<u8> {
    let mut reply = error_reply(query, hickory_proto::op::ResponseCode::ServFail);
    ExtendedError::new(InfoCode::Other, "the reply is too long and cannot be cut")
        .push(query, transport, &mut reply);
    reply
}

/// Adds to a count in the header, saturating.
fn add_to_count(message: &mut [u8], at: usize, by: u16) {
    if let Some(field) = message.get_mut(at..at + 2) {
        let count = u16::from_be_bytes([field[0], field[1]]).saturating_add(by);
        field.copy_from_slice(&count.to_be_bytes());
    }
}
