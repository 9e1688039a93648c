//! Builds queries to recursors from a client's question.
//!
//! Only the parts of a client's message that a recursor needs are forwarded: name, type and class,
//! RD, CD and DO, and Client Subnet if configured. An option or flag from one client therefore
//! cannot affect a reply that other clients share.

use smallvec::SmallVec;

use dns_core::wire::{OPT_LEN, Query, UDP_PAYLOAD_SIZE, opt_record};

/// RD, AD and CD in the second 16 bits of a header.
const RD: u16 = 0x0100;
pub(crate) const AD: u16 = 0x0020;
const CD: u16 = 0x0010;

/// Selects the parts of a client's query that are forwarded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Form {
    /// Forwards a query without EDNS without it, and AD as set by the client
    /// (`compat.transparent_forwarding`). Otherwise every query carries an OPT and AD, so that AD
    /// in the reply shows whether the recursor has validated it (RFC 6840, section 5.7).
    pub(crate) transparent: bool,
    /// Forwards Client Subnet (`recursor_client_subnet`).
    pub(crate) client_subnet: bool,
}

/// Everything that distinguishes recursor queries: flags, type, class, name in lower case, Client
/// Subnet.
pub(crate) type Key = SmallVec<[u8; 128]>;

/// Offset of the class in a [`Key`].
pub(crate) const KEY_CLASS: usize = 3;

/// The fields of a [`Key`] without Client Subnet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyFields<'a> {
    pub(crate) dnssec_ok: bool,
    pub(crate) checking_disabled: bool,
    pub(crate) qtype: u16,
    pub(crate) qclass: u16,
    /// The name in lower case.
    pub(crate) name: &'a [u8],
}

impl<'a> KeyFields<'a> {
    /// Splits a key; `None` if it is too short.
    pub(crate) fn of(key: &'a [u8]) -> Option<Self> {
        let ([flags, type_high, type_low, class_high, class_low], name) = key.split_first_chunk()?;
        Some(Self {
            dnssec_ok: flags & 1 != 0,
            checking_disabled: flags & 2 != 0,
            qtype: u16::from_be_bytes([*type_high, *type_low]),
            qclass: u16::from_be_bytes([*class_high, *class_low]),
            name,
        })
    }
}

impl Form {
    /// Returns the message to a recursor, with id 0.
    pub(crate) fn message(self, query: &Query<'_>) -> Vec<u8> {
        let mut flags = query.flags & (RD | CD | AD);
        if !self.transparent {
            flags |= AD;
        }
        let has_opt = self.has_opt(query);
        let question = &query.message[query.question_range()];
        let subnet = self.subnet(query).unwrap_or_default();
        let mut message = Vec::with_capacity(12 + question.len() + OPT_LEN + subnet.len());
        message.extend_from_slice(&[0, 0]);
        message.extend_from_slice(&flags.to_be_bytes());
        message.extend_from_slice(&[0, 1, 0, 0, 0, 0, 0, u8::from(has_opt)]);
        message.extend_from_slice(question);
        if has_opt {
            let [fields @ .., _, _] = opt_record(UDP_PAYLOAD_SIZE, 0, query.dnssec_ok());
            message.extend_from_slice(&fields);
            // The option's length was parsed from 16 bits.
            message.extend_from_slice(&(subnet.len() as u16).to_be_bytes());
            message.extend_from_slice(subnet);
        }
        message
    }

    /// Returns the key of the recursor query. Recursors cannot distinguish queries with equal keys.
    pub(crate) fn key(self, query: &Query<'_>) -> Key {
        let mut flags = u8::from(query.dnssec_ok())
            | u8::from(query.checking_disabled()) << 1
            | u8::from(query.recursion_desired()) << 2;
        if self.transparent {
            flags |= u8::from(query.flags & AD != 0) << 3 | u8::from(query.edns.is_some()) << 4;
        }
        let ([t, y], [c, l]) = (query.question.qtype.to_be_bytes(), query.question.qclass.to_be_bytes());
        let fields = [flags, t, y, c, l];
        let mut key = Key::from_slice(&fields);
        key.extend_from_slice(query.question.raw_name);
        key[fields.len()..].make_ascii_lowercase();
        if let Some(subnet) = self.subnet(query) {
            key.extend_from_slice(subnet);
        }
        key
    }

    /// Returns the Client Subnet option to forward, if any.
    pub(crate) fn subnet<'a>(self, query: &Query<'a>) -> Option<&'a [u8]> {
        self.client_subnet.then(|| query.client_subnet()).flatten()
    }

    pub(crate) fn has_opt(self, query: &Query<'_>) -> bool {
        !self.transparent || query.edns.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dns_core::wire::{Parsed, parse};

    /// Builds a query for `oK. A` with these flags and OPT.
    fn message(flags: [u8; 2], opt: &[u8]) -> Vec<u8> {
        let count = u8::from(!opt.is_empty());
        let header = [0x12, 0x34, flags[0], flags[1], 0, 1, 0, 0, 0, 0, 0, count];
        [&header[..], b"\x02oK\0\0\x01\0\x01", opt].concat()
    }

    /// Parses the query in `message`.
    fn query(message: &[u8]) -> Query<'_> {
        let Parsed::Query(query) = parse(message) else { panic!("a query of our own making") };
        query
    }

    /// An OPT of 4096 bytes with DO, a cookie that is too short, and Client Subnet.
    const OPT: &[u8] = b"\0\0\x29\x10\0\0\0\x80\0\0\x10\0\x0a\0\x01x\0\x08\0\x07\0\x01\x18\0\xc0\0\x02";

    #[test]
    fn client_options_stay_behind() {
        let asked = message([0x01, 0x10], OPT);
        let sent = Form::default().message(&query(&asked));
        assert_eq!(sent[..12], *b"\0\0\x01\x30\0\x01\0\0\0\0\0\x01", "AD is ours, CD is the client's");
        assert_eq!(sent[12..], *b"\x02oK\0\0\x01\0\x01\0\0\x29\x04\xd0\0\0\x80\0\0\0");
        let with_subnet = Form { client_subnet: true, ..Form::default() };
        let sent = with_subnet.message(&query(&asked));
        assert_eq!(sent[29..], *b"\0\x0b\0\x08\0\x07\0\x01\x18\0\xc0\0\x02");
    }

    #[test]
    fn key_splits_into_fields() {
        let asked = message([0x01, 0x10], OPT);
        let key = Form::default().key(&query(&asked));
        let fields = KeyFields::of(&key);
        let expected =
            KeyFields { dnssec_ok: true, checking_disabled: true, qtype: 1, qclass: 1, name: b"\x02ok\0" };
        assert_eq!((fields, KeyFields::of(&key[..4])), (Some(expected), None));
    }

    #[test]
    fn keys_differ_as_messages_do() {
        let opt = |dnssec_ok: bool| opt_record(512, 0, dnssec_ok).to_vec();
        let messages: Vec<Vec<u8>> = [[0, 0], [1, 0], [1, 0x10], [1, 0x20]]
            .into_iter()
            .flat_map(|flags| [&[][..], &opt(false), &opt(true), OPT].map(|opt| message(flags, opt)))
            .collect();
        for form in [
            Form::default(),
            Form { transparent: true, client_subnet: false },
            Form { transparent: false, client_subnet: true },
        ] {
            for one in &messages {
                for other in &messages {
                    let (one, other) = (query(one), query(other));
                    assert_eq!(
                        form.key(&one) == form.key(&other),
                        form.message(&one) == form.message(&other),
                        "{form:?}: {one:?} and {other:?}"
                    );
                }
            }
        }
    }
}
