//! Reverse names: PTR records from the records file and the aliases.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::message::{self, QUESTION_NAME};
use dns_core::{
    catalog::Snapshot,
    wire::{Query, TYPE_ANY, TYPE_PTR, append_opt},
};

/// Returns the reply to a query for the reverse name of an address in `records`; `None` if there is
/// none. AA is set and RA clear (observed). Reverse names have no types other than PTR: the reply
/// is NOERROR without answers.
pub fn reverse_reply(query: &Query<'_>, records: &Snapshot) -> Option<Vec<u8>> {
    reply(query, |address| records.reverse(address))
}

/// Returns the reply with the names of an address: wire format, letter case as in the file.
fn reply(query: &Query<'_>, names: impl Fn(IpAddr) -> Vec<Box<[u8]>>) -> Option<Vec<u8>> {
    let mut names = names(address_of(query.question.raw_name)?);
    if names.is_empty() {
        return None;
    }
    let mut reply = message::begin_reply(query, true, false, message::NOERROR);
    if matches!(query.question.qtype, TYPE_PTR | TYPE_ANY) {
        fastrand::shuffle(&mut names);
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

/// Parses a complete reverse name (RFC 1035, section 3.5; RFC 3596, section 2.5) in wire format, in
/// any letter case.
fn address_of(name: &[u8]) -> Option<IpAddr> {
    /// Suffix of the reverse names of IPv4 addresses.
    const V4: &[u8] = b"\x07in-addr\x04arpa\0";
    /// Suffix of the reverse names of IPv6 addresses.
    const V6: &[u8] = b"\x03ip6\x04arpa\0";
    let strip = |suffix: &[u8]| {
        let split = name.len().checked_sub(suffix.len())?;
        name[split..].eq_ignore_ascii_case(suffix).then(|| &name[..split])
    };
    if let Some(labels) = strip(V6) {
        // 32 labels of one digit each, the last digit first.
        if labels.len() != 64 {
            return None;
        }
        let mut bits = 0u128;
        for label in labels.rchunks(2) {
            let digit = char::from(label[1]).to_digit(16).filter(|_| label[0] == 1)?;
            bits = bits << 4 | u128::from(digit);
        }
        return Some(Ipv6Addr::from_bits(bits).into());
    }
    let mut rest = strip(V4)?;
    let mut octets = [0; 4];
    for octet in octets.iter_mut().rev() {
        let (&length, tail) = rest.split_first()?;
        let (label, tail) = tail.split_at_checked(usize::from(length))?;
        let text = std::str::from_utf8(label).ok()?;
        // Only the canonical spelling: no sign, no leading zeros.
        *octet = text.parse().ok().filter(|number: &u8| number.to_string() == text)?;
        rest = tail;
    }
    rest.is_empty().then(|| Ipv4Addr::from(octets).into())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use dns_core::{
        name::Name,
        wire::{Parsed, parse},
    };

    /// Parses the address from a name in presentation format.
    fn address(text: &str) -> Option<String> {
        address_of(Name::from_text(text).unwrap().as_wire()).map(|address| address.to_string())
    }

    #[test]
    fn only_reverse_names_are_addresses() {
        assert_eq!(address("5.0.1.10.in-addr.arpa").as_deref(), Some("10.1.0.5"));
        let six = "6.1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.3.0.0.0.0.0.0.0.0.0.0.0.0.1.d.f.ip6.arpa";
        assert_eq!(address(six).as_deref(), Some("fd10:0:0:3::16"));
        assert_eq!(address_of(b"\x011\x011\x011\x011\x07IN-addr\x04ARPA\0"), Some([1, 1, 1, 1].into()));
        for other in [
            "in-addr.arpa",
            "arpa",
            "1.2.3.in-addr.arpa",
            "1.2.3.4.5.in-addr.arpa",
            "1.1.1.300.in-addr.arpa",
            "1.1.1.01.in-addr.arpa",
            "1.1.1.+1.in-addr.arpa",
            "x.1.1.1.in-addr.arpa",
            "1.1.1.1.xin-addr.arpa",
            "1.1.1.1.home.arpa",
            "1.ip6.arpa",
            &six[2..],
            &six.replace("d.f.", "df."),
            &six.replace("d.f.", "g.f."),
            ".",
        ] {
            assert_eq!(address(other), None, "{other}");
        }
    }

    #[test]
    fn only_ptr_and_any_are_answered() {
        let names = || vec![Box::from(&b"\x05Third\x04BOSH\0"[..]), Box::from(&b"\x01b\0"[..])];
        let names = |address| if address == Ipv4Addr::new(10, 1, 0, 5) { names() } else { vec![] };
        let ask = |name: &[u8], qtype: u16| {
            let mut message = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0".to_vec();
            message.extend_from_slice(name);
            message.extend_from_slice(&qtype.to_be_bytes());
            message.extend_from_slice(&[0, 1]);
            let Parsed::Query(query) = parse(&message) else { panic!("a query") };
            reply(&query, names)
        };
        let known = b"\x015\x010\x011\x0210\x07in-addr\x04arpa\0";
        for (qtype, count) in [(TYPE_PTR, 2), (TYPE_ANY, 2), (1, 0), (16, 0)] {
            let reply = ask(known, qtype).unwrap();
            assert_eq!(reply[2..8], [0x85, 0, 0, 1, 0, count], "type {qtype}");
        }
        assert_eq!(ask(b"\x016\x010\x011\x0210\x07in-addr\x04arpa\0", TYPE_PTR), None);
        assert_eq!(ask(b"\x03foo\x04arpa\0", TYPE_PTR), None);
    }

    proptest! {
        #[test]
        fn arbitrary_names_never_panic(labels in proptest::collection::vec("[0-9a-fA-F.]{1,3}", 0..40)) {
            let text: String = labels.join(".") + ".ip6.arpa";
            if let Ok(name) = Name::from_text(&text) {
                let _ = address_of(name.as_wire());
            }
            if let Ok(name) = Name::from_text(&text.replace("ip6", "in-addr")) {
                let _ = address_of(name.as_wire());
            }
        }
    }
}
