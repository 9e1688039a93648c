//! Reverse names: PTR records from the records file and the aliases.

use std::net::IpAddr;

use super::message::{self, QUESTION_NAME};
use dns_core::{
    catalog::Snapshot,
    name,
    wire::{Query, ReplyFlags, TYPE_ANY, TYPE_PTR, append_opt, begin_reply},
};

/// Returns the reply to a query for the reverse name of an address in `records`; `None` if there is
/// none. AA is set and RA clear (observed). Reverse names have no types other than PTR: the reply
/// is NOERROR without answers. Several names are in random order.
pub fn reverse_reply(
    query: &Query<'_>,
    records: &Snapshot,
    random: impl FnOnce() -> fastrand::Rng,
) -> Option<Vec<u8>> {
    reply(query, |address| records.reverse(address), random)
}

/// Returns the reply with the names of an address: wire format, letter case as in the file.
fn reply(
    query: &Query<'_>,
    names: impl Fn(IpAddr) -> Vec<Box<[u8]>>,
    random: impl FnOnce() -> fastrand::Rng,
) -> Option<Vec<u8>> {
    let mut names = names(name::address_of(query.question.raw_name)?);
    if names.is_empty() {
        return None;
    }
    let flags = ReplyFlags {
        authoritative: true,
        recursion_available: false,
    };
    let mut reply = begin_reply(query, message::NOERROR, flags);
    if matches!(query.question.qtype, TYPE_PTR | TYPE_ANY) {
        if names.len() > 1 {
            random().shuffle(&mut names);
        }
        // TTL 0, as in bosh-dns (observed).
        for name in &names {
            if !message::push_answer(&mut reply, &QUESTION_NAME, TYPE_PTR, 0, name) {
                message::set_truncated(&mut reply, true);
                break;
            }
        }
    }
    append_opt(query, &mut reply);
    Some(reply)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use dns_core::wire::{Parsed, parse};

    #[test]
    fn only_ptr_and_any_are_answered() {
        let names = || {
            vec![
                Box::from(&b"\x05Third\x04BOSH\0"[..]),
                Box::from(&b"\x01b\0"[..]),
            ]
        };
        let ask = |name: &[u8], qtype: u16| {
            let mut message = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0".to_vec();
            message.extend_from_slice(name);
            message.extend_from_slice(&qtype.to_be_bytes());
            message.extend_from_slice(&[0, 1]);
            let Parsed::Query(query) = parse(&message) else {
                panic!("a query")
            };
            reply(
                &query,
                |address| {
                    if address == Ipv4Addr::new(10, 1, 0, 5) {
                        names()
                    } else {
                        vec![]
                    }
                },
                fastrand::Rng::new,
            )
        };
        let known = b"\x015\x010\x011\x0210\x07in-addr\x04arpa\0";
        for (qtype, count) in [(TYPE_PTR, 2), (TYPE_ANY, 2), (1, 0), (16, 0)] {
            let reply = ask(known, qtype).unwrap();
            assert_eq!(reply[2..8], [0x85, 0, 0, 1, 0, count], "type {qtype}");
        }
        assert_eq!(
            ask(b"\x016\x010\x011\x0210\x07in-addr\x04arpa\0", TYPE_PTR),
            None
        );
        assert_eq!(ask(b"\x03foo\x04arpa\0", TYPE_PTR), None);
    }

    #[test]
    fn several_names_are_shuffled() {
        let name = |label: u8| Box::from([1, label, 0]);
        let message = crate::tests::query(b"\x011\x010\x010\x03127\x07in-addr\x04arpa\0", TYPE_PTR);
        let query = crate::tests::parsed(&message);
        let single = reply(&query, |_| vec![name(b'a')], || panic!("one has no order"));
        let mut expected = message.clone();
        expected[2..4].copy_from_slice(&[0x85, 0]);
        expected[7] = 1;
        expected.extend_from_slice(b"\xc0\x0c\0\x0c\0\x01\0\0\0\0\0\x03\x01a\0");
        assert_eq!(single, Some(expected));
        let mut first = std::collections::HashSet::new();
        for seed in 0..32 {
            let names = |_| vec![name(b'a'), name(b'b')];
            let random = || fastrand::Rng::with_seed(seed);
            let reply = reply(&query, names, random).unwrap();
            assert_eq!((reply[2], reply[7]), (0x85, 2));
            first.insert(reply[reply.len() - 2]);
        }
        assert_eq!(first.len(), 2, "either comes last");
        // Names that do not fit into the largest message are left out.
        let many = |_| vec![name(b'a'); 5000];
        let cut = reply(&query, many, fastrand::Rng::new).unwrap();
        assert_eq!(cut[2], 0x87);
        assert!(cut.len() <= 65_535 && cut.len() > 65_535 - 15);
    }
}
