//! Labels and values shared by all families.

use std::borrow::Cow;

/// Returns CoreDNS's label `type`: the name of common types, `other` for the rest, so that clients
/// cannot create unlimited series.
pub fn type_label(query_type: u16) -> &'static str {
    match query_type {
        1 => "A",
        2 => "NS",
        5 => "CNAME",
        6 => "SOA",
        12 => "PTR",
        15 => "MX",
        16 => "TXT",
        28 => "AAAA",
        33 => "SRV",
        43 => "DS",
        46 => "RRSIG",
        47 => "NSEC",
        48 => "DNSKEY",
        50 => "NSEC3",
        64 => "SVCB",
        65 => "HTTPS",
        251 => "IXFR",
        252 => "AXFR",
        255 => "ANY",
        _ => "other",
    }
}

/// Returns the name of a common query type, or `TYPE` with its number (RFC 3597).
pub fn type_text(query_type: u16) -> String {
    match type_label(query_type) {
        "other" => format!("TYPE{query_type}"),
        label => label.to_owned(),
    }
}

/// Returns the label `rcode`: the name in the IANA registry, or the number.
pub fn rcode_label(rcode: u8) -> Cow<'static, str> {
    Cow::Borrowed(match rcode {
        0 => "NOERROR",
        1 => "FORMERR",
        2 => "SERVFAIL",
        3 => "NXDOMAIN",
        4 => "NOTIMP",
        5 => "REFUSED",
        6 => "YXDOMAIN",
        7 => "YXRRSET",
        8 => "NXRRSET",
        9 => "NOTAUTH",
        10 => "NOTZONE",
        // The number is also BADSIG, but of signed messages only (RFC 8945).
        16 => "BADVERS",
        other => return Cow::Owned(other.to_string()),
    })
}

/// Returns CoreDNS's label `family`: `1` for IPv4, `2` for IPv6.
pub fn family_label(address: std::net::IpAddr) -> &'static str {
    // A socket for both families shows IPv4 clients as mapped addresses.
    if address.to_canonical().is_ipv4() {
        "1"
    } else {
        "2"
    }
}

/// Returns CoreDNS's label `server`, such as `dns://169.254.0.2:53`.
pub fn server_label(listen: std::net::SocketAddr) -> String {
    format!("dns://{listen}")
}

/// CoreDNS's label `zone`; bosh-dns has a single zone (observed).
pub const ZONE: &str = ".";

/// CoreDNS's label `view`, unused by bosh-dns.
pub const VIEW: &str = "";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_match_coredns() {
        assert_eq!(type_label(28), "AAAA");
        assert_eq!(type_label(9999), "other");
        assert_eq!(
            (type_text(28).as_str(), type_text(9999).as_str()),
            ("AAAA", "TYPE9999")
        );
        assert_eq!(rcode_label(3), "NXDOMAIN");
        assert_eq!(rcode_label(11), "11");
        assert_eq!(family_label("::ffff:10.0.0.1".parse().unwrap()), "1");
        assert_eq!(family_label("fd00::1".parse().unwrap()), "2");
        assert_eq!(server_label("[::1]:53".parse().unwrap()), "dns://[::1]:53");
    }

    #[test]
    fn usual_types_and_codes_have_names() {
        for (number, label) in [
            (1, "A"),
            (2, "NS"),
            (5, "CNAME"),
            (6, "SOA"),
            (12, "PTR"),
            (15, "MX"),
            (16, "TXT"),
            (28, "AAAA"),
            (33, "SRV"),
            (43, "DS"),
            (46, "RRSIG"),
            (47, "NSEC"),
            (48, "DNSKEY"),
            (50, "NSEC3"),
            (64, "SVCB"),
            (65, "HTTPS"),
            (251, "IXFR"),
            (252, "AXFR"),
            (255, "ANY"),
        ] {
            assert_eq!(
                (type_label(number), type_text(number)),
                (label, label.to_owned())
            );
        }
        let codes = (0..12).chain([16, 17]).map(rcode_label);
        let codes: Vec<String> = codes.map(Cow::into_owned).collect();
        assert_eq!(
            codes.join(" "),
            "NOERROR FORMERR SERVFAIL NXDOMAIN NOTIMP REFUSED YXDOMAIN YXRRSET NXRRSET NOTAUTH NOTZONE 11 BADVERS 17"
        );
    }
}
