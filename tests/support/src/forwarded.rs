//! A model of `dns-ebpf/src/forwarded.rs`: the programs' replies from forwarded answers and local replies.

use dns_common::forwarded::{AnswerHeader, NARROW, PLAIN, QueryKey, Variant, WIDE, counted};
use dns_core::wire::Query;
use zerocopy::{FromBytes as _, IntoBytes as _};

/// AD in the fourth byte of a header.
const AD: u8 = 0x20;

/// Returns the programs' reply to a query from the answer in `entry`, which is `age_ns` old; `None`
/// if they pass the query to userspace.
pub fn model(entry: &[u64], query: &Query<'_>, age_ns: u64) -> Option<Vec<u8>> {
    models(entry, query, age_ns).into_iter().next()
}

/// Returns the replies from which the programs choose at random, see [`model`].
pub fn models(entry: &[u64], query: &Query<'_>, age_ns: u64) -> Vec<Vec<u8>> {
    let Ok((header, _)) = AnswerHeader::read_from_prefix(entry.as_bytes()) else {
        return Vec::new();
    };
    let [least, most] = header.wide_limits;
    let group = match query.edns {
        None => PLAIN,
        Some(edns) if edns.udp_size <= 512 => NARROW,
        Some(edns) if (least..=most).contains(&edns.udp_size) => WIDE,
        Some(_) => return Vec::new(),
    };
    let [first, count] = header.variants[group];
    let replies = (first..first + count)
        .filter_map(|index| reply(entry, &header, index.into(), query, age_ns));
    replies.collect()
}

fn reply(
    entry: &[u64],
    header: &AnswerHeader,
    index: usize,
    query: &Query<'_>,
    age_ns: u64,
) -> Option<Vec<u8>> {
    let bytes = entry.as_bytes();
    let name = bytes
        .get(size_of::<AnswerHeader>()..)?
        .get(..usize::from(header.name_len))?;
    let key = QueryKey::new(
        query.question.qtype,
        query.dnssec_ok(),
        query.checking_disabled(),
    );
    if !query.recursion_desired()
        || query.question.qclass != 1
        || query.has_options()
        || header.key != key
        || !query.question.raw_name.eq_ignore_ascii_case(name)
    {
        return None;
    }
    let number = counted(header.ttl, header.lifetime, header.generation, age_ns)?;
    let at = AnswerHeader::variants_offset(name.len()) + index * size_of::<Variant>();
    let (variant, _) = Variant::read_from_prefix(bytes.get(at..)?).ok()?;
    let mut body = bytes
        .get(usize::from(variant.body_at)..)?
        .get(..usize::from(variant.body_len))?
        .to_vec();
    for &at in header.ttls.get(..usize::from(header.ttl_count))? {
        body.get_mut(usize::from(at)..)?
            .get_mut(..4)?
            .copy_from_slice(&number.to_be_bytes());
    }
    let [high, low] = variant.flags;
    let low = if query.wants_authentic_data() {
        low
    } else {
        low & !AD
    };
    let mut reply = query.id.to_be_bytes().to_vec();
    reply.extend([high, low, 0, 1]);
    reply.extend(variant.counts.as_flattened());
    reply.extend(&query.message[query.question_range()]);
    reply.extend(body);
    if let Some(opt) = query.reply_opt(0) {
        let count = u16::from_be_bytes(variant.counts[2]) + 1;
        reply[10..12].copy_from_slice(&count.to_be_bytes());
        reply.extend(opt);
    }
    (reply.len() <= query.limit()).then_some(reply)
}
