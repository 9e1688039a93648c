//! Converts a forwarded answer to the entry from which the programs answer, see
//! [`dns_common::forwarded`].

use dns_common::{
    forwarded::{AnswerHeader, MAX_BODY_LEN, MAX_RECORDS, MIN_BODY_LEN, QueryKey, ones_sum, remaining_ttl},
    name::hash_name,
};
use zerocopy::{FromBytes as _, IntoBytes as _};

use dns_core::{
    name::NameRef,
    wire::{ForwardedAnswer, HEADER_LEN, Query},
};

/// Byte of the header that holds opcode, AA, TC and RD.
const TC: u8 = 0x02;
/// RCODEs that are published: NOERROR and NXDOMAIN.
const RCODES: [u8; 2] = [0, 3];
/// AD in the fourth byte of a header.
const AD: u8 = 0x20;
/// Bytes of the question after its name.
const TYPE_CLASS_LEN: usize = 4;
/// TYPE SOA, which a negative answer must have in its authority section (RFC 2308, section 5).
const TYPE_SOA: u16 = 6;

/// Returns the key of the answer to a question of class IN.
pub(crate) fn key(seed: u64, name: NameRef<'_>, qtype: u16, dnssec_ok: bool, checking_disabled: bool) -> u64 {
    QueryKey::new(qtype, dnssec_ok, checking_disabled).hash(hash_name(seed, name.as_wire()))
}

/// Encodes an answer as an entry of `generation`; `None` if userspace must answer it: other RCODEs,
/// truncated answers, negative ones without SOA, too many records, too long a body, or a NUL byte
/// in the name.
pub fn encode(answer: &ForwardedAnswer, seed: u64, generation: u64) -> Option<Vec<u64>> {
    let ForwardedAnswer { name, qtype, dnssec_ok, checking_disabled, message, ttls, ttl, lifetime, since_ns } =
        answer;
    let wire = name.as_wire();
    let body_at = HEADER_LEN + wire.len() + TYPE_CLASS_LEN;
    let (header, body) = (message.get(..HEADER_LEN)?, message.get(body_at..)?);
    let flags = [header[2], header[3]];
    let counts = [[header[6], header[7]], [header[8], header[9]], [header[10], header[11]]];
    let records: usize = counts.iter().map(|&count| usize::from(u16::from_be_bytes(count))).sum();
    let is_fitting = header[4..6] == [0, 1]
        && flags[0] & TC == 0
        && RCODES.contains(&(flags[1] & 0x0f))
        && (MIN_BODY_LEN..=MAX_BODY_LEN).contains(&body.len())
        && records == ttls.len()
        && records <= MAX_RECORDS
        && !name.labels().any(|label| label.contains(&0));
    if !is_fitting {
        return None;
    }
    let mut offsets = [0; MAX_RECORDS];
    let mut body = body.to_vec();
    let mut has_soa = false;
    for (offset, &at) in offsets.iter_mut().zip(ttls) {
        let at = usize::from(at).checked_sub(body_at)?;
        body.get_mut(at..at + 4)?.fill(0);
        // Type and class precede the TTL.
        has_soa |= body.get(at.checked_sub(4)?..at - 2)? == TYPE_SOA.to_be_bytes();
        *offset = u16::try_from(at).ok()?;
    }
    if counts[0] == [0, 0] && !has_soa {
        return None;
    }
    let key = QueryKey::new(*qtype, *dnssec_ok, *checking_disabled);
    let header = AnswerHeader {
        last_used_ns: 0,
        hash: key.hash(hash_name(seed, wire)),
        since_ns: *since_ns,
        generation,
        key,
        ttl: *ttl,
        lifetime: *lifetime,
        flags,
        counts,
        name_len: u16::try_from(wire.len()).ok()?,
        body_len: u16::try_from(body.len()).ok()?,
        body_sum: ones_sum(&body),
        ttl_count: u8::try_from(records).ok()?,
        odd_ttls: u8::try_from(offsets[..records].iter().filter(|&&at| at % 2 == 1).count()).ok()?,
        padding: [0; 4],
        ttls: offsets,
    };
    let mut words = vec![0_u64; header.size() / 8];
    let bytes = words.as_mut_bytes();
    bytes[..size_of::<AnswerHeader>()].copy_from_slice(header.as_bytes());
    bytes[size_of::<AnswerHeader>()..][..wire.len()].copy_from_slice(wire);
    bytes[AnswerHeader::body_offset(wire.len())..][..body.len()].copy_from_slice(&body);
    Some(words)
}

/// Returns the programs' reply to a query from the answer in `entry`, which is `age_ns` old; `None`
/// if they pass the query to userspace. A model of `dns-ebpf/src/forwarded.rs`, for tests.
pub fn model(entry: &[u64], query: &Query<'_>, age_ns: u64) -> Option<Vec<u8>> {
    let bytes = entry.as_bytes();
    let (header, _) = AnswerHeader::read_from_prefix(bytes).ok()?;
    let name = bytes.get(size_of::<AnswerHeader>()..)?.get(..usize::from(header.name_len))?;
    let key = QueryKey::new(query.question.qtype, query.dnssec_ok(), query.checking_disabled());
    if !query.recursion_desired()
        || query.question.qclass != 1
        || header.key != key
        || !query.question.raw_name.eq_ignore_ascii_case(name)
    {
        return None;
    }
    let ttl = remaining_ttl(header.ttl, header.lifetime, age_ns)?;
    let mut body =
        bytes.get(AnswerHeader::body_offset(name.len())..)?.get(..usize::from(header.body_len))?.to_vec();
    for &at in header.ttls.get(..usize::from(header.ttl_count))? {
        body.get_mut(usize::from(at)..)?.get_mut(..4)?.copy_from_slice(&ttl.to_be_bytes());
    }
    let [high, low] = header.flags;
    let low = if query.wants_authentic_data() { low } else { low & !AD };
    let mut reply = query.id.to_be_bytes().to_vec();
    reply.extend([high, low, 0, 1]);
    reply.extend(header.counts.as_flattened());
    reply.extend(&query.message[query.question_range()]);
    reply.extend(body);
    if let Some(opt) = query.reply_opt(0) {
        let count = u16::from_be_bytes(header.counts[2]) + 1;
        reply[10..12].copy_from_slice(&count.to_be_bytes());
        reply.extend(opt);
    }
    (reply.len() <= query.limit(dns_core::wire::Transport::Udp)).then_some(reply)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dns_core::wire::{Parsed, parse};

    /// Returns an answer with one A record of a TTL of 300 s, owned by the question's name.
    fn answer() -> ForwardedAnswer {
        let message = b"\0\0\x81\xa0\0\x01\0\x01\0\0\0\0\x02ok\0\0\x01\0\x01\xc0\x0c\0\x01\0\x01\0\0\x01\x2c\0\x04\x0a\0\0\x01";
        ForwardedAnswer {
            name: "ok".parse().unwrap(),
            qtype: 1,
            dnssec_ok: false,
            checking_disabled: false,
            message: message[..].into(),
            ttls: [26].into(),
            ttl: 300,
            lifetime: 300,
            since_ns: 5,
        }
    }

    #[test]
    fn body_has_zero_ttls() {
        let words = encode(&answer(), 7, 3).unwrap();
        let (header, rest) = AnswerHeader::read_from_prefix(words.as_bytes()).unwrap();
        assert_eq!((header.name_len, header.body_len, header.ttl_count, header.odd_ttls), (4, 16, 1, 0));
        assert_eq!((header.ttls[0], header.generation, header.since_ns), (6, 3, 5));
        assert_eq!(&rest[..8], b"\x02ok\0\0\0\0\0");
        assert_eq!(&rest[8..24], b"\xc0\x0c\0\x01\0\x01\0\0\0\0\0\x04\x0a\0\0\x01");
        assert_eq!(header.hash, key(7, NameRef::from(&answer().name), 1, false, false));
    }

    #[test]
    fn incomplete_answers_are_refused() {
        let with = |change: &dyn Fn(&mut ForwardedAnswer)| {
            let mut answer = answer();
            change(&mut answer);
            encode(&answer, 7, 3)
        };
        assert!(with(&|_| {}).is_some());
        assert!(with(&|answer| answer.message[2] |= TC).is_none(), "truncated");
        assert!(with(&|answer| answer.message[3] |= 2).is_none(), "SERVFAIL");
        assert!(with(&|answer| answer.message[7] = 2).is_none(), "a record without TTL");
        assert!(with(&|answer| answer.ttls[0] = 40).is_none(), "a TTL behind the end");
        assert!(with(&|answer| answer.message[7..10].copy_from_slice(&[0, 0, 1])).is_none(), "no SOA");
        assert!(with(&|answer| answer.name = dns_core::name::Name::from_text("a\\000").unwrap()).is_none());
    }

    #[test]
    fn model_counts_the_ttl_down() {
        let words = encode(&answer(), 7, 3).unwrap();
        let message = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x02Ok\0\0\x01\0\x01";
        let Parsed::Query(query) = parse(message) else { panic!("a query") };
        let reply = model(&words, &query, 299_999_999_999).unwrap();
        assert_eq!(reply[..12], *b"\x12\x34\x81\x80\0\x01\0\x01\0\0\0\0", "AD is hidden");
        assert_eq!(reply[12..26], *b"\x02Ok\0\0\x01\0\x01\xc0\x0c\0\x01\0\x01");
        assert_eq!(reply[26..30], [0, 0, 0, 1]);
        assert_eq!(model(&words, &query, 300_000_000_000), None);
    }
}
