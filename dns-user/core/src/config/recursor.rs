//! Recursor addresses in configurations and handler files.

use std::net::{IpAddr, Ipv6Addr};

/// A text that is not the address of a recursor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a recursor; expected an IP address, IP:port, [IPv6]:port or host:port, with DNS over TLS \
     after tls:// and with the name in the server's certificate after #"
)]
pub struct NoRecursor(pub String);

/// Adds port 53 if there is none: `10.0.0.2`, `::1`, `10.0.0.2:5353`, `[::1]:5353`, `name:53`.
///
/// A host without a port must be an IP address, and brackets require a port (observed: `[::1]`
/// alone is rejected). With `tls://`, the default is port 853, and a name may follow:
/// `tls://9.9.9.9#dns.quad9.net`.
pub fn with_port(text: &str) -> Result<String, NoRecursor> {
    let refused = || NoRecursor(text.to_owned());
    if let Some(tls) = text.strip_prefix("tls://") {
        let (server, name) = tls.split_once('#').map_or((tls, None), |(server, name)| (server, Some(name)));
        let server = match server.parse::<IpAddr>() {
            Ok(IpAddr::V4(address)) => format!("{address}:853"),
            _ if is_ipv6(server) => format!("[{server}]:853"),
            _ => with_port(server).map_err(|_| refused())?,
        };
        return match name {
            None => Ok(format!("tls://{server}")),
            Some(name) if is_host_name(name) => Ok(format!("tls://{server}#{name}")),
            Some(_) => Err(refused()),
        };
    }
    match text.parse::<IpAddr>() {
        Ok(IpAddr::V4(address)) => return Ok(format!("{address}:53")),
        _ if is_ipv6(text) => return Ok(format!("[{text}]:53")),
        _ => {}
    }
    let (host, port) = text.rsplit_once(':').ok_or_else(refused)?;
    let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let host_is_sound = match bracketed {
        Some(host) => is_ipv6(host),
        None => !host.is_empty() && !host.contains([':', '[', ']', '/', ' ']),
    };
    if !host_is_sound || port.parse::<u16>().map_or(true, |port| port == 0) {
        return Err(refused());
    }
    Ok(text.to_owned())
}

/// Returns whether the text is a host name or an address, as certificates contain them.
fn is_host_name(text: &str) -> bool {
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
    };
    text.parse::<IpAddr>().is_ok() || text.len() <= 253 && text.split('.').all(is_label)
}

/// Returns whether the text is an IPv6 address, optionally with a zone (`fe80::2%eth0`, RFC 6874).
/// Only link-local addresses may have one.
fn is_ipv6(text: &str) -> bool {
    let (address, zone) = text.split_once('%').map_or((text, None), |(address, zone)| (address, Some(zone)));
    address.parse::<Ipv6Addr>().is_ok_and(|address| {
        zone.is_none_or(|zone| {
            address.is_unicast_link_local()
                && !zone.is_empty()
                && !zone.contains([':', '[', ']', '/', ' ', '%'])
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_ports_become_53() {
        for (text, expected) in [
            ("127.0.0.1", "127.0.0.1:53"),
            ("127.0.0.1:5353", "127.0.0.1:5353"),
            ("::1", "[::1]:53"),
            ("[::1]:53", "[::1]:53"),
            ("localhost:53", "localhost:53"),
            ("fe80::2%eth0", "[fe80::2%eth0]:53"),
            ("[fe80::2%eth0]:53", "[fe80::2%eth0]:53"),
            ("tls://9.9.9.9", "tls://9.9.9.9:853"),
            ("tls://9.9.9.9:8853#dns.quad9.net", "tls://9.9.9.9:8853#dns.quad9.net"),
            ("tls://2620:fe::fe#dns.quad9.net", "tls://[2620:fe::fe]:853#dns.quad9.net"),
            ("tls://dns.example:853#10.0.0.2", "tls://dns.example:853#10.0.0.2"),
        ] {
            assert_eq!(with_port(text).as_deref(), Ok(expected));
        }
        for text in [
            "",
            "1.2.3",
            "localhost",
            "not-an-ip",
            "[::1]",
            "[x]:53",
            ":53",
            "a:b:53",
            "a:0",
            "a:x",
            "[fe80::2%]:53",
            "[2001:db8::2%eth0]:53",
            "fe80::2%e/0",
            "tls://",
            "tls://9.9.9.9#",
            "tls://9.9.9.9#a b",
            "tls://dns.example",
            "https://9.9.9.9",
        ] {
            assert!(with_port(text).is_err(), "{text}");
        }
    }
}
