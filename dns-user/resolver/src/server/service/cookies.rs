//! DNS Cookies (RFC 7873) with the interoperable server cookie (RFC 9018), as in BIND, Knot and unbound: servers
//! with the same secret accept each other's cookies.
//!
//! A server cookie proves that the client receives packets at its address. No query is refused without one;
//! `max_reply` does not limit replies to a client that has proved its address.

use std::{
    hash::Hasher as _,
    net::IpAddr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use dns_core::{
    config::CookiesConfig,
    wire::{
        MIN_UDP_SIZE, OPTION_COOKIE, Query, UDP_PAYLOAD_SIZE, error_reply, opt_record,
        opt_without_question, push_option,
    },
};
use hickory_proto::op::ResponseCode;
use siphasher::sip::SipHasher24;

/// Lengths of the option's data: client cookie, and the server cookies of any server (RFC 7873, section 4).
const CLIENT_LEN: usize = 8;
const SERVER_LEN: std::ops::RangeInclusive<usize> = 8..=32;
/// Length of the option in a reply: code, length, the client's cookie and a server cookie of ours.
const REPLY_LEN: usize = 4 + CLIENT_LEN + 16;
/// Version of the server cookie (RFC 9018, section 4.1), followed by three reserved bytes.
const VERSION: u8 = 1;
/// Limits of a cookie's age in seconds (RFC 9018, section 4.3): when it is replaced, when it is no longer
/// valid, and how far in the future it may be.
const RENEW_AFTER: i32 = 30 * 60;
const VALID_FOR: i32 = 60 * 60;
const MAX_AHEAD: i32 = 5 * 60;

/// Creates and verifies server cookies. Clones share the secrets, which must not get into a log: there is no `Debug`.
#[derive(Clone, Default)]
pub struct Cookies {
    /// The first one creates cookies, each is accepted; empty: cookies are off.
    secrets: Arc<[[u8; 16]]>,
}

/// Content of a query's option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presented<'a> {
    Malformed,
    Client([u8; CLIENT_LEN]),
    Both([u8; CLIENT_LEN], &'a [u8]),
}

impl Presented<'_> {
    fn read(data: &[u8]) -> Presented<'_> {
        match data.split_first_chunk() {
            Some((client, [])) => Presented::Client(*client),
            Some((client, server)) if SERVER_LEN.contains(&server.len()) => {
                Presented::Both(*client, server)
            }
            _ => Presented::Malformed,
        }
    }
}

impl Cookies {
    /// Uses the configured secrets, or a random one that lasts as long as the process.
    pub fn new(config: &CookiesConfig) -> Self {
        let secrets: Arc<[[u8; 16]]> = match config.secrets.as_slice() {
            _ if !config.enabled => Arc::default(),
            // From the thread's cryptographic generator: who guesses the secret proves any address.
            // It is lost at a restart, after which clients get a new cookie with their next reply.
            [] => [rand::random()].into(),
            secrets => secrets.into(),
        };
        Self { secrets }
    }

    /// Adds the client's cookie and a server cookie to the reply to a query with a cookie. A malformed
    /// one makes the reply FORMERR (RFC 7873, section 5.2.2).
    pub(super) fn add(&self, query: &Query<'_>, reply: &mut Vec<u8>) {
        let Some((presented, address)) = self.presented(query) else {
            return;
        };
        let now = seconds_since_1970();
        let (client, server) = match presented {
            Presented::Malformed => return *reply = error_reply(query, ResponseCode::FormErr),
            Presented::Both(client, server) if self.is_recent(&client, server, address, now) => {
                (client, None)
            }
            Presented::Client(client) | Presented::Both(client, _) => {
                (client, self.create(&client, address, now))
            }
        };
        let server = match (&server, presented) {
            (Some(server), _) => server.as_slice(),
            // A recent cookie is returned as it is, which spares the client a change (RFC 9018,
            // section 4.3).
            (None, Presented::Both(_, server)) => server,
            (None, _) => return,
        };
        let limit = query.limit_with_options();
        push_option(reply, limit, OPTION_COOKIE, &[&client, server]);
    }

    /// Returns the length of the option in the reply to a query; 0 without one.
    pub(super) fn reply_len(&self, query: &Query<'_>) -> usize {
        match self.presented(query) {
            Some((Presented::Client(_) | Presented::Both(..), _)) => REPLY_LEN,
            Some((Presented::Malformed, _)) | None => 0,
        }
    }

    /// Turns the FORMERR for a query without a question into the reply that RFC 7873 (section 5.4) demands if it has
    /// a cookie: a cookie, and BADCOOKIE if the client's server cookie is not valid.
    pub(in crate::server) fn answer_without_question(
        &self,
        message: &[u8],
        address: IpAddr,
        reply: &mut Vec<u8>,
    ) {
        if self.secrets.is_empty() {
            return;
        }
        let Some((edns, mut options)) = opt_without_question(message) else {
            return;
        };
        let Some(option) = options.find(|option| option.code == OPTION_COOKIE) else {
            return;
        };
        let address = address.to_canonical();
        let now = seconds_since_1970();
        let (client, rcode, known) = match Presented::read(option.data) {
            // FORMERR stays (RFC 7873, section 5.2.2).
            Presented::Malformed => return,
            Presented::Client(client) => (client, ResponseCode::NoError, None),
            Presented::Both(client, server)
                if self.age(&client, server, address, now).is_none() =>
            {
                (client, ResponseCode::BADCOOKIE, None)
            }
            Presented::Both(client, server) => {
                let is_recent = self.is_recent(&client, server, address, now);
                (client, ResponseCode::NoError, is_recent.then_some(server))
            }
        };
        let Some(new) = self.create(&client, address, now) else {
            return;
        };
        // The header without counts; RCODE is in the low bits of its fourth byte.
        // `wire::parse` answers a message without a question by a header alone, so 12 bytes exist.
        reply[3] = reply[3] & 0xf0 | rcode.low();
        reply.extend_from_slice(&opt_record(UDP_PAYLOAD_SIZE, rcode.high(), edns.dnssec_ok));
        reply[11] = 1;
        push_option(
            reply,
            MIN_UDP_SIZE,
            OPTION_COOKIE,
            &[&client, known.unwrap_or(&new)],
        );
    }

    pub(in crate::server) fn is_proved(&self, query: &Query<'_>) -> bool {
        match self.presented(query) {
            Some((Presented::Both(client, server), address)) => self
                .age(&client, server, address, seconds_since_1970())
                .is_some(),
            _ => false,
        }
    }

    /// Returns the query's cookies and its client; `None` without them.
    fn presented<'a>(&self, query: &Query<'a>) -> Option<(Presented<'a>, IpAddr)> {
        if self.secrets.is_empty() || !query.has_options() {
            return None;
        }
        Some((
            Presented::read(query.option(OPTION_COOKIE)?.data),
            query.client?,
        ))
    }

    /// Creates a server cookie; `None` if cookies are off.
    fn create(&self, client: &[u8; CLIENT_LEN], address: IpAddr, now: u32) -> Option<[u8; 16]> {
        let mut fixed = [VERSION, 0, 0, 0, 0, 0, 0, 0];
        fixed[4..].copy_from_slice(&now.to_be_bytes());
        let hash = hash(self.secrets.first()?, client, fixed, address);
        let mut cookie = [0; 16];
        cookie[..8].copy_from_slice(&fixed);
        cookie[8..].copy_from_slice(&hash);
        Some(cookie)
    }

    /// Returns whether a server cookie is valid, made with the first secret, and not yet to be replaced.
    fn is_recent(
        &self,
        client: &[u8; CLIENT_LEN],
        server: &[u8],
        address: IpAddr,
        now: u32,
    ) -> bool {
        self.age(client, server, address, now)
            // After a change of the secret, clients with a cookie of the old one get a new one, so
            // that the old secret can be removed (RFC 9018, section 5).
            .is_some_and(|(age, secret)| age < RENEW_AFTER && secret == 0)
    }

    /// Returns the age in seconds of a valid server cookie and the number of its secret.
    fn age(
        &self,
        client: &[u8; CLIENT_LEN],
        server: &[u8],
        address: IpAddr,
        now: u32,
    ) -> Option<(i32, usize)> {
        let (fixed, theirs) = server.split_first_chunk::<8>()?;
        let [version, _, _, _, a, b, c, d] = *fixed;
        // Of another server, or invented: as good as none, and answered like a client without one.
        if version != VERSION {
            return None;
        }
        // Serial number arithmetic (RFC 1982), so that 2106 is no problem.
        let age = now.wrapping_sub(u32::from_be_bytes([a, b, c, d])) as i32;
        // Another server behind the same address may have a clock that is some minutes ahead.
        if !(-MAX_AHEAD..=VALID_FOR).contains(&age) {
            return None;
        }
        Some((
            age,
            self.secrets.iter().position(|secret: &[u8; 16]| {
                is_equal(&hash(secret, client, *fixed, address), theirs)
            })?,
        ))
    }
}

/// Returns SipHash-2-4 of the client cookie, the first eight bytes of the server cookie, and the client's
/// address (RFC 9018, section 4.4).
fn hash(secret: &[u8; 16], client: &[u8; CLIENT_LEN], fixed: [u8; 8], address: IpAddr) -> [u8; 8] {
    let mut hasher = SipHasher24::new_with_key(secret);
    hasher.write(client);
    hasher.write(&fixed);
    match address {
        IpAddr::V4(address) => hasher.write(&address.octets()),
        IpAddr::V6(address) => hasher.write(&address.octets()),
    }
    hasher.finish().to_le_bytes()
}

/// Compares in constant time.
fn is_equal(ours: &[u8; 8], theirs: &[u8]) -> bool {
    theirs.len() == ours.len()
        && ours
            .iter()
            .zip(theirs)
            .fold(0, |differs, (a, b)| differs | a ^ b)
            == 0
}

/// Returns the time in the 32 bits of a cookie.
fn seconds_since_1970() -> u32 {
    SystemTime::UNIX_EPOCH
        .elapsed()
        .unwrap_or(Duration::ZERO)
        .as_secs() as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use dns_core::wire::{Parsed, ReplySettings, RequestInfo, Transport, parse, parse_from};

    fn bytes<const N: usize>(hex: &str) -> [u8; N] {
        std::array::from_fn(|at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap())
    }

    fn cookies(secrets: &[&str]) -> Cookies {
        let secrets = secrets.iter().map(|secret| bytes(secret)).collect();
        Cookies::new(&CookiesConfig {
            enabled: true,
            secrets,
        })
    }

    /// The examples of RFC 9018, appendix A.
    #[test]
    fn cookies_match_rfc_vectors() {
        let ours = cookies(&["e5e973e5a6b2a43f48e7dc849e37bfcf"]);
        let address = "198.51.100.100".parse().unwrap();
        let client = bytes("2464c4abcf10c957");
        let cookie = ours.create(&client, address, 1_559_731_985).unwrap();
        assert_eq!(cookie, bytes("010000005cf79f111f8130c3eee29480"));
        // The other server of the example set the reserved bytes; the cookie is valid, but old.
        let client = bytes("fc93fc62807ddb86");
        let address = "203.0.113.203".parse().unwrap();
        let theirs: [u8; 16] = bytes("01abcdef5cf78f71a314227b6679ebf5");
        assert_eq!(
            ours.age(&client, &theirs, address, 1_559_728_385),
            Some((400, 0))
        );
        let renewed = ours.create(&client, address, 1_559_734_700).unwrap();
        assert_eq!(renewed, bytes("010000005cf7a9acf73a7810aca2381e"));
        // A change of secrets, and IPv6.
        let rolled = cookies(&[
            "445536bcd2513298075a5d379663c962",
            "dd3bdf9344b678b185a6f5cb60fca715",
        ]);
        let client = bytes("22681ab97d52c298");
        let address = "2001:db8:220:1:59de:d0f4:8769:82b8".parse().unwrap();
        let old: [u8; 16] = bytes("010000005cf7c57926556bd0934c72f8");
        let now = 1_559_741_961;
        assert_eq!(
            rolled
                .age(&client, &old, address, now)
                .map(|(_, secret)| secret),
            Some(1)
        );
        assert!(
            !rolled.is_recent(&client, &old, address, now),
            "replaced by one of the new secret"
        );
        assert_eq!(
            rolled.create(&client, address, now).unwrap(),
            bytes("010000005cf7c609a6bb79d16625507a")
        );
    }

    #[test]
    fn foreign_cookies_are_invalid() {
        let ours = cookies(&["000102030405060708090a0b0c0d0e0f"]);
        let client = [7; 8];
        let address = "10.0.0.1".parse().unwrap();
        let now = 4_294_967_290;
        let good = ours.create(&client, address, now).unwrap();
        let age = |server: &[u8], address, now| ours.age(&client, server, address, now);
        assert_eq!(
            age(&good, address, now.wrapping_add(20)),
            Some((20, 0)),
            "across the end of 32 bits"
        );
        assert_eq!(age(&good, address, now - 299), Some((-299, 0)));
        assert_eq!(age(&good, address, now - 301), None);
        assert_eq!(age(&good, address, now.wrapping_add(3601)), None);
        assert_eq!(age(&good, "10.0.0.2".parse().unwrap(), now), None);
        assert_eq!(ours.age(&[8; 8], &good, address, now), None);
        for wrong in [&good[..15], &good[..8], b"", &[&good[..], b"x"].concat()] {
            assert_eq!(age(wrong, address, now), None);
        }
        for at in 0..16 {
            let mut changed = good;
            changed[at] ^= 1;
            assert_eq!(age(&changed, address, now), None, "byte {at}");
        }
    }

    /// Builds a query for `a.` A with this cookie.
    fn query(cookie: &[u8]) -> Vec<u8> {
        let mut message =
            b"\0\x01\x01\0\0\x01\0\0\0\0\0\x01\x01a\0\0\x01\0\x01\0\0\x29\x04\xd0\0\0\0\0".to_vec();
        message.extend_from_slice(&(cookie.len() as u16 + 4).to_be_bytes());
        message.extend_from_slice(&OPTION_COOKIE.to_be_bytes());
        message.extend_from_slice(&(cookie.len() as u16).to_be_bytes());
        message.extend_from_slice(cookie);
        message
    }

    /// Returns RCODE and cookie of the reply to a query with this cookie.
    fn exchange(cookies: &Cookies, cookie: &[u8]) -> (u8, Option<Vec<u8>>) {
        let message = query(cookie);
        let from = RequestInfo {
            client: "192.0.2.1".parse().ok(),
            transport: Transport::Udp,
        };
        let Parsed::Query(query) = parse_from(&message, from, &ReplySettings::default()) else {
            panic!("a query")
        };
        let mut reply = error_reply(&query, ResponseCode::Refused);
        let bare = reply.len();
        cookies.add(&query, &mut reply);
        let has_cookie = reply.len() > bare && reply[bare..bare + 2] == OPTION_COOKIE.to_be_bytes();
        assert_eq!(
            cookies.is_proved(&query),
            has_cookie && reply[bare + 4..] == *cookie
        );
        (
            reply[3] & 15,
            has_cookie.then(|| reply[bare + 4..].to_vec()),
        )
    }

    #[test]
    fn client_keeps_valid_cookie() {
        let ours = cookies(&[]);
        let (rcode, first) = exchange(&ours, b"client..");
        let first = first.unwrap();
        assert_eq!((rcode, first.len(), &first[..8]), (5, 24, &b"client.."[..]));
        assert_eq!(exchange(&ours, &first), (5, Some(first.clone())));
        let (_, other) = exchange(&ours, &[b"another.", &first[8..]].concat());
        assert_ne!(other.unwrap()[8..], first[8..]);
        for malformed in [&b""[..], b"short", &first[..15], &[0; 41]] {
            assert_eq!(exchange(&ours, malformed), (1, None), "FORMERR");
        }
        assert_eq!(exchange(&Cookies::default(), b"client.."), (5, None));
    }

    #[test]
    fn questionless_queries_get_cookies() {
        let cookies = cookies(&["000102030405060708090a0b0c0d0e0f"]);
        let ask = |cookies: &Cookies, cookie: &[u8]| {
            let mut message = query(cookie);
            // Without the question `a. A`.
            message[5] = 0;
            message.drain(12..19);
            let Parsed::Reply(mut reply) = parse(&message) else {
                panic!("no question")
            };
            cookies.answer_without_question(
                &message,
                "::ffff:192.0.2.1".parse().unwrap(),
                &mut reply,
            );
            reply
        };
        let header = b"\0\x01\x81\0\0\0\0\0\0\0\0\x01".as_slice();
        let rcode = |reply: &[u8]| reply[3] & 15;
        let first = ask(&cookies, b"clientck");
        assert!(
            first.starts_with(header) && first[27..35] == *b"clientck",
            "{first:?}"
        );
        let cookie = first[27..].to_vec();
        assert_eq!(ask(&cookies, &cookie), first, "a valid cookie is returned");
        let mut wrong = cookie.clone();
        wrong[20] ^= 1;
        let refused = ask(&cookies, &wrong);
        // BADCOOKIE is 23: 7, and 1 in the OPT.
        assert_eq!(
            (rcode(&refused), refused[17], &refused[27..]),
            (7, 1, &cookie[..])
        );
        for reply in [
            ask(&cookies, b"short"),
            ask(&Cookies::default(), b"clientck"),
        ] {
            assert_eq!((rcode(&reply), reply.len()), (1, 12), "FORMERR");
        }
    }
}
