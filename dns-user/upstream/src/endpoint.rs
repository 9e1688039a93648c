//! The addresses of recursors as they are written: host and port, with the zone of a link-local address.

use std::net::{IpAddr, SocketAddr, SocketAddrV6};

/// The parts of a recursor's name: `host:port`, or `tls://host:port#name`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint<'a> {
    /// The part `host:port`.
    pub(crate) address: &'a str,
    /// The name in the certificate, if the recursor is encrypted.
    pub(crate) tls: Option<Option<&'a str>>,
}

impl<'a> Endpoint<'a> {
    pub(crate) fn of(name: &'a str) -> Self {
        let Some(rest) = name.strip_prefix("tls://") else {
            return Self {
                address: name,
                tls: None,
            };
        };
        match rest.split_once('#') {
            Some((address, server)) => Self {
                address,
                tls: Some(Some(server)),
            },
            None => Self {
                address: rest,
                tls: Some(None),
            },
        }
    }

    /// Returns whether two recursors are the same server: with the same host, and the same port or the default port of
    /// their transport, which may not have been written. The name in a certificate does not matter.
    pub(crate) fn is_same_server(self, other: Endpoint<'_>) -> bool {
        let Some((one, one_port)) = self.address.rsplit_once(':') else {
            return self == other;
        };
        let Some((another, other_port)) = other.address.rsplit_once(':') else {
            return self == other;
        };
        // Ports that were not written have been added (`with_port`), by the transport of each.
        let has_default_ports =
            one_port == self.default_port() && other_port == other.default_port();
        same_host(one, another) && (one_port == other_port || has_default_ports)
    }

    fn default_port(self) -> &'static str {
        if self.tls.is_some() { "853" } else { "53" }
    }
}

/// Returns whether two hosts are equal: addresses by value, names without letter case.
fn same_host(one: &str, other: &str) -> bool {
    match (host_address(one), host_address(other)) {
        (Some(one), Some(other)) => one == other,
        _ => one.eq_ignore_ascii_case(other),
    }
}

/// Returns the address of a host, with its zone; `None` for a name.
fn host_address(host: &str) -> Option<SocketAddr> {
    let address = socket_address(&format!("{host}:0"))?;
    match address.ip().to_canonical() {
        // Without a zone.
        IpAddr::V4(ip) => Some(SocketAddr::new(ip.into(), 0)),
        IpAddr::V6(_) => Some(address),
    }
}

/// Parses `name` (`address:port`, `[address%zone]:port`); `None` if it has a host name, or its zone
/// is not a current interface.
pub(crate) fn socket_address(name: &str) -> Option<SocketAddr> {
    if let Ok(address) = name.parse() {
        return Some(address);
    }
    // The standard library parses zones only as numbers.
    let (host, port) = name.rsplit_once(':')?;
    let (address, zone) = host.strip_prefix('[')?.strip_suffix(']')?.split_once('%')?;
    let index = interface_index(zone)?;
    Some(SocketAddrV6::new(address.parse().ok()?, port.parse().ok()?, 0, index).into())
}

/// Returns whether `name` (`host:port`) has a host name.
pub(crate) fn has_host_name(name: &str) -> bool {
    !name.starts_with('[') && name.parse::<SocketAddr>().is_err()
}

/// Returns the number of an interface, which may be written as its name.
pub(crate) fn interface_index(zone: &str) -> Option<u32> {
    zone.parse()
        .ok()
        .or_else(|| nix::net::if_::if_nametoindex(zone).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excluded_recursors_are_compared_by_address() {
        let is_same = |one, other| {
            let one = Endpoint::of(one);
            let other = Endpoint::of(other);
            one.is_same_server(other) && other.is_same_server(one)
        };
        for (recursor, excluded) in [
            ("10.0.0.1:53", "10.0.0.1:53"),
            ("[::1]:53", "[0:0:0:0:0:0:0:1]:53"),
            ("[::ffff:10.0.0.1]:53", "10.0.0.1:53"),
            ("[fe80::2%lo]:53", "[fe80::2%1]:53"),
            ("ns.Example:53", "ns.example:53"),
            ("tls://9.9.9.9:853#dns.quad9.net", "tls://9.9.9.9:853"),
            ("tls://9.9.9.9:853#dns.quad9.net", "tls://9.9.9.9:853#other"),
            ("tls://9.9.9.9:853", "9.9.9.9:853"),
            (
                "tls://[2620:fe::fe]:853#dns.quad9.net",
                "[2620:fe:0::fe]:853",
            ),
            // Written without a port.
            ("tls://9.9.9.9:853#dns.quad9.net", "9.9.9.9:53"),
            ("tls://dns.quad9.net:853", "dns.quad9.net:53"),
        ] {
            assert!(is_same(recursor, excluded), "{recursor} {excluded}");
        }
        for (recursor, other) in [
            ("10.0.0.1:53", "10.0.0.2:53"),
            ("10.0.0.1:53", "10.0.0.1:5353"),
            ("tls://9.9.9.9:8853", "9.9.9.9:53"),
            ("tls://9.9.9.9:853", "tls://9.9.9.9:8853"),
            ("9.9.9.9:853", "9.9.9.9:53"),
            ("ns.example:53", "ns.other:53"),
        ] {
            assert!(!is_same(recursor, other), "{recursor} {other}");
        }
    }

    #[test]
    fn zones_are_interfaces() {
        let Ok(index) = nix::net::if_::if_nametoindex("lo") else {
            return;
        };
        let expected = SocketAddrV6::new("fe80::2".parse().unwrap(), 53, 0, index);
        assert_eq!(socket_address("[fe80::2%lo]:53"), Some(expected.into()));
        assert_eq!(socket_address("[fe80::2%no-such-if]:53"), None);
        assert!(!has_host_name("[fe80::2%no-such-if]:53") && has_host_name("ns.example:53"));
    }

    #[test]
    fn names_are_split_into_their_parts() {
        for (name, address, tls) in [
            ("10.0.0.1:53", "10.0.0.1:53", None),
            ("tls://10.0.0.1:853", "10.0.0.1:853", Some(None)),
            ("tls://[::1]:853#a#b", "[::1]:853", Some(Some("a#b"))),
            ("tls://ns.example:853#", "ns.example:853", Some(Some(""))),
        ] {
            let endpoint = Endpoint::of(name);
            assert_eq!(endpoint, Endpoint { address, tls }, "{name}");
            let port = if tls.is_some() { "853" } else { "53" };
            assert_eq!(endpoint.default_port(), port, "{name}");
        }
        for (one, other, expected) in [
            ("ns.example", "ns.example", true),
            ("ns.example", "ns.other", false),
            ("ns.example", "ns.example:53", false),
            ("tls://ns.example", "ns.example", false),
        ] {
            let (one, other) = (Endpoint::of(one), Endpoint::of(other));
            assert_eq!(one.is_same_server(other), expected, "{one:?} {other:?}");
            assert_eq!(other.is_same_server(one), expected, "{one:?} {other:?}");
        }
    }

    #[test]
    fn hosts_are_addresses_or_names() {
        for (name, address, has_name) in [
            ("10.0.0.1:53", Some("10.0.0.1:53"), false),
            ("[::1]:5353", Some("[::1]:5353"), false),
            ("[fe80::1%7]:53", Some("[fe80::1%7]:53"), false),
            ("[fe80::1%7]:x", None, false),
            ("[10.0.0.1%7]:53", None, false),
            ("fe80::1%7:53", None, true),
            ("ns.example:53", None, true),
            ("10.0.0.1", None, true),
        ] {
            let found = socket_address(name).map(|address| address.to_string());
            assert_eq!(found.as_deref(), address, "{name}");
            assert_eq!(has_host_name(name), has_name, "{name}");
        }
        assert_eq!(interface_index("7"), Some(7));
        assert_eq!(interface_index("no-such-interface"), None);
        assert!(same_host("10.0.0.1", "::ffff:10.0.0.1") || same_host("a", "A"));
        assert_eq!(host_address("ns.example"), None);
        assert_eq!(host_address("10.0.0.1"), "10.0.0.1:0".parse().ok());
        assert_eq!(host_address("[::ffff:10.0.0.1]"), "10.0.0.1:0".parse().ok());
    }
}
