//! Special-use names that never need a recursor: `localhost`, `invalid` (RFC 6761), `onion`
//! (RFC 7686) and the reverse names of private addresses (RFC 6303, RFC 7793), with the answers of
//! unbound's default local zones.

use std::{
    collections::HashMap,
    net::{Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use futures_util::future::BoxFuture;

use super::{
    Answer, WaitingQuery,
    message::{self, QUESTION_NAME},
};
use dns_core::{
    name::Name,
    wire::{
        CLASS_IN, ForwardedAnswer, Query, ReplyFlags, TYPE_A, TYPE_AAAA, TYPE_ANY, TYPE_PTR,
        append_opt, begin_reply,
    },
};

/// TTL of the answers in seconds.
const TTL: u32 = 10_800;
/// `localhost.` in wire format.
const LOCALHOST: &[u8] = b"\x09localhost\0";
/// Data of the SOA: `localhost. nobody.invalid. 1 3600 1200 604800 10800`.
const SOA: &[u8] =
    b"\x09localhost\0\x06nobody\x07invalid\0\0\0\0\x01\0\0\x0e\x10\0\0\x04\xb0\0\x09\x3a\x80\0\0\x2a\x30";
/// Zones without names, in presentation format.
const EMPTY_ZONES: [&str; 16] = [
    "invalid",
    "onion",
    "0.in-addr.arpa",
    "10.in-addr.arpa",
    "168.192.in-addr.arpa",
    "254.169.in-addr.arpa",
    "2.0.192.in-addr.arpa",
    "100.51.198.in-addr.arpa",
    "113.0.203.in-addr.arpa",
    "255.255.255.255.in-addr.arpa",
    "d.f.ip6.arpa",
    "8.e.f.ip6.arpa",
    "9.e.f.ip6.arpa",
    "a.e.f.ip6.arpa",
    "b.e.f.ip6.arpa",
    "8.b.d.0.1.0.0.2.ip6.arpa",
];

/// Answers special-use names, and passes all others on.
pub struct SpecialNames {
    next: Arc<dyn Answer>,
    zones: HashMap<Name, Content, foldhash::fast::RandomState>,
}

/// The records of a special zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// Nothing: names below the zone do not exist.
    Empty,
    /// The loopback addresses, at every name.
    Loopback,
    /// PTR `localhost.` at this name, nothing below.
    Reverse,
}

impl SpecialNames {
    /// Creates an answerer in front of `next`.
    pub fn new(next: Arc<dyn Answer>) -> Self {
        let mut all = vec![
            ("localhost".to_owned(), Content::Loopback),
            ("1.0.0.127.in-addr.arpa".to_owned(), Content::Reverse),
            ("127.in-addr.arpa".to_owned(), Content::Empty),
            (format!("1.{}ip6.arpa", "0.".repeat(31)), Content::Reverse),
            (format!("0.{}ip6.arpa", "0.".repeat(31)), Content::Empty),
        ];
        for zone in EMPTY_ZONES {
            all.push((zone.to_owned(), Content::Empty));
        }
        // 172.16.0.0/12 (RFC 6303).
        for second in 16..32 {
            all.push((format!("{second}.172.in-addr.arpa"), Content::Empty));
        }
        // 100.64.0.0/10 (RFC 7793).
        for second in 64..128 {
            all.push((format!("{second}.100.in-addr.arpa"), Content::Empty));
        }
        let mut zones = HashMap::default();
        for (text, content) in all {
            if let Ok(name) = Name::from_text(&text) {
                zones.insert(name, content);
            }
        }
        Self { next, zones }
    }

    /// Returns the reply to a query for a special-use name; `None` for any other.
    fn reply(&self, query: &Query<'_>) -> Option<Vec<u8>> {
        // The zones of these RFCs are of class IN.
        if query.question.qclass != CLASS_IN {
            return None;
        }
        let name = query.question.name();
        // The longest zone that contains the name: the loopback address is inside its network's.
        let (zone, content) = name
            .suffixes()
            .find_map(|suffix| self.zones.get_key_value(suffix))?;
        // Names below `localhost` have its addresses as well (RFC 6761, section 6.3).
        let exists = name == *zone || *content == Content::Loopback;
        let rcode = if exists {
            message::NOERROR
        } else {
            message::NXDOMAIN
        };
        let mut reply = begin_reply(query, rcode, ReplyFlags::LOCAL);
        const V4: &[u8] = &Ipv4Addr::LOCALHOST.octets();
        const V6: &[u8] = &Ipv6Addr::LOCALHOST.octets();
        let records = match content {
            Content::Loopback => &[(TYPE_A, V4), (TYPE_AAAA, V6)][..],
            Content::Reverse if exists => &[(TYPE_PTR, LOCALHOST)],
            Content::Reverse | Content::Empty => &[],
        };
        let mut has_data = false;
        for (rtype, data) in records {
            if [*rtype, TYPE_ANY].contains(&query.question.qtype) {
                message::push_answer(&mut reply, &QUESTION_NAME, *rtype, TTL, data);
                has_data = true;
            }
        }
        // Without an SOA, clients could not cache the denial (RFC 2308, section 5).
        if !has_data {
            message::push_soa(&mut reply, zone.as_wire(), TTL, SOA);
        }
        append_opt(query, &mut reply);
        Some(reply)
    }
}

impl Answer for SpecialNames {
    fn answer<'a>(&'a self, query: &'a Query<'a>) -> BoxFuture<'a, Vec<u8>> {
        match self.reply(query) {
            Some(reply) => Box::pin(std::future::ready(reply)),
            None => self.next.answer(query),
        }
    }

    fn answer_at_once(&self, query: &Query<'_>, out: &mut Vec<u8>) -> bool {
        match self.reply(query) {
            Some(reply) => {
                *out = reply;
                true
            }
            None => self.next.answer_at_once(query, out),
        }
    }

    fn begin(&self, waiting: Box<dyn WaitingQuery>) {
        // A special name has its reply at once, so this query is the next answerer's.
        self.next.begin(waiting);
    }

    fn cached(&self, query: &Query<'_>) -> Option<ForwardedAnswer> {
        self.next.cached(query)
    }

    fn refresh<'a>(&'a self, query: &'a Query<'a>) -> BoxFuture<'a, ()> {
        self.next.refresh(query)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dns_core::wire::{OwnedQuery, Parsed, parse};

    struct Refuses;

    impl Answer for Refuses {
        fn answer<'a>(&'a self, query: &'a Query<'a>) -> BoxFuture<'a, Vec<u8>> {
            Box::pin(std::future::ready(begin_reply(
                query,
                message::REFUSED,
                ReplyFlags::RECURSION,
            )))
        }
    }

    /// Returns RCODE, counts of the sections and the end of the reply.
    fn ask(name: &str, qtype: u16) -> Option<(u8, [u16; 3], Vec<u8>)> {
        let mut message = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0".to_vec();
        message.extend_from_slice(Name::from_text(name).unwrap().as_wire());
        message.extend_from_slice(&qtype.to_be_bytes());
        message.extend_from_slice(&[0, 1]);
        let Parsed::Query(query) = parse(&message) else {
            panic!("a query")
        };
        let reply = SpecialNames::new(Arc::new(Refuses)).reply(&query)?;
        let index = message::MessageIndex::of(&reply).unwrap();
        Some((
            reply[3] & 15,
            index.records,
            reply[index.question_end..].to_vec(),
        ))
    }

    #[test]
    fn special_names_are_answered() {
        for (name, qtype, rcode, counts, end) in [
            ("localhost", 1, 0, [1, 0, 0], &[127, 0, 0, 1][..]),
            ("a.b.LocalHost", 28, 0, [1, 0, 0], b"\0\0\0\x01"),
            ("localhost", 255, 0, [2, 0, 0], b""),
            ("localhost", 15, 0, [0, 1, 0], b"\0\0\x2a\x30"),
            ("invalid", 1, 0, [0, 1, 0], b"\0\0\x2a\x30"),
            ("x.invalid", 1, 3, [0, 1, 0], b"\0\0\x2a\x30"),
            (
                "facebookwkhpilnemxj7asaniu7vnjjbiltxjqhye3mhbshg7kx5tfyd.onion",
                1,
                3,
                [0, 1, 0],
                b"",
            ),
            ("1.0.0.127.in-addr.arpa", 12, 0, [1, 0, 0], LOCALHOST),
            ("2.0.0.127.in-addr.arpa", 12, 3, [0, 1, 0], b""),
            (
                &format!("1.{}ip6.arpa", "0.".repeat(31)),
                12,
                0,
                [1, 0, 0],
                LOCALHOST,
            ),
            ("4.3.2.10.in-addr.arpa", 12, 3, [0, 1, 0], b""),
            ("1.1.100.100.in-addr.arpa", 12, 3, [0, 1, 0], b""),
        ] {
            let (found_rcode, found_counts, records) = ask(name, qtype).unwrap();
            assert_eq!(
                (found_rcode, found_counts),
                (rcode, counts),
                "{name} {qtype}"
            );
            assert!(records.ends_with(end), "{name} {qtype}: {records:02x?}");
        }
        for name in [
            "localhosts",
            "example.com",
            "4.3.2.11.in-addr.arpa",
            "1.1.128.100.in-addr.arpa",
            ".",
        ] {
            assert_eq!(ask(name, 1), None, "{name}");
        }
    }

    #[test]
    fn every_zone_is_a_name() {
        assert_eq!(
            SpecialNames::new(Arc::new(Refuses)).zones.len(),
            EMPTY_ZONES.len() + 16 + 64 + 5
        );
    }

    /// Answers everything, and has a cached answer to everything.
    #[derive(Default)]
    struct Everything {
        refreshed: std::sync::atomic::AtomicBool,
        begun: std::sync::atomic::AtomicBool,
    }

    impl Answer for Everything {
        fn answer<'a>(&'a self, _query: &'a Query<'a>) -> BoxFuture<'a, Vec<u8>> {
            Box::pin(std::future::ready(b"later".to_vec()))
        }

        fn answer_at_once(&self, query: &Query<'_>, out: &mut Vec<u8>) -> bool {
            out.extend_from_slice(b"now");
            query.question.qtype == TYPE_A
        }

        fn begin(&self, _waiting: Box<dyn WaitingQuery>) {
            self.begun.store(true, std::sync::atomic::Ordering::Relaxed);
        }

        fn cached(&self, query: &Query<'_>) -> Option<ForwardedAnswer> {
            Some(ForwardedAnswer {
                name: query.question.name(),
                qtype: query.question.qtype,
                dnssec_ok: false,
                checking_disabled: false,
                message: Box::default(),
                ttls: Box::default(),
                ttl: 0,
                lifetime: 0,
                since_ns: 0,
            })
        }

        fn refresh<'a>(&'a self, _query: &'a Query<'a>) -> BoxFuture<'a, ()> {
            self.refreshed
                .store(true, std::sync::atomic::Ordering::Relaxed);
            Box::pin(std::future::ready(()))
        }
    }

    /// A query that no task may wait for.
    struct Taskless(OwnedQuery);

    impl WaitingQuery for Taskless {
        fn query(&self) -> Query<'_> {
            self.0.as_query()
        }

        fn time_limit(&self) -> std::time::Duration {
            std::time::Duration::ZERO
        }

        fn reply(self: Box<Self>, _reply: &mut Vec<u8>) {}

        fn wait(self: Box<Self>, _begun: Option<BoxFuture<'static, Vec<u8>>>) {
            panic!("the next answerer needs no task");
        }
    }

    #[tokio::test]
    async fn other_names_are_passed_on() {
        let next = Arc::<Everything>::default();
        let names = SpecialNames::new(next.clone());
        let special = crate::tests::query(b"\x09LocalHost\0", TYPE_A);
        let other = crate::tests::query(b"\x07example\0", TYPE_A);
        let slow = crate::tests::query(b"\x07example\0", TYPE_AAAA);
        let mut chaos = special.clone();
        *chaos.last_mut().unwrap() = 3;
        for (message, is_answered, at_once) in [
            (&special, true, true),
            (&other, false, true),
            (&slow, false, false),
            (&chaos, false, true),
        ] {
            let query = crate::tests::parsed(message);
            let own = names.reply(&query);
            assert_eq!(own.is_some(), is_answered);
            let mut out = Vec::new();
            assert_eq!(names.answer_at_once(&query, &mut out), at_once);
            assert_eq!(out, own.clone().unwrap_or(b"now".to_vec()));
            let later = names.answer(&query).await;
            assert_eq!(later, own.unwrap_or(b"later".to_vec()));
        }
        let query = crate::tests::parsed(&other);
        assert_eq!(names.cached(&query), next.cached(&query));
        names.refresh(&query).await;
        assert!(next.refreshed.load(std::sync::atomic::Ordering::Relaxed));
        names.begin(Box::new(Taskless(query.to_owned())));
        assert!(next.begun.load(std::sync::atomic::Ordering::Relaxed));
        // The whole reply: question, then address with a TTL of three hours.
        let reply = names.reply(&crate::tests::parsed(&special)).unwrap();
        let mut expected = special.clone();
        expected[2..4].copy_from_slice(&[0x85, 0x80]);
        expected[7] = 1;
        expected.extend_from_slice(b"\xc0\x0c\0\x01\0\x01\0\0\x2a\x30\0\x04\x7f\0\0\x01");
        assert_eq!(reply, expected);
    }
}
