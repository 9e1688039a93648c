//! Reverse names: addresses as names below in-addr.arpa and ip6.arpa.

use std::net::IpAddr;

use hickory_proto::{rr::Name, serialize::binary::BinDecodable as _};

/// Returns the address of a complete reverse name (RFC 1035, section 3.5; RFC 3596, section 2.5) in
/// wire format, in any letter case. Only the canonical spelling is one: no sign, no leading zeros.
pub fn address_of(name: &[u8]) -> Option<IpAddr> {
    if !name.last_chunk::<6>()?.eq_ignore_ascii_case(b"\x04arpa\0") {
        return None;
    }
    let name = Name::from_bytes(name).ok()?;
    let network = name.parse_arpa_name().ok()?;
    // The parser accepts names of networks, and decimal labels with a sign or leading zeros.
    let is_canonical = match network.addr() {
        IpAddr::V4(address) => Name::from(address) == name,
        IpAddr::V6(_) => network.prefix_len() == 128,
    };
    is_canonical.then(|| network.addr())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::name::Name;

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
