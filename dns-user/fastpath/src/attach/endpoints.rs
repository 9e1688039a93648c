//! The addresses and ports answered by the programs.

use std::net::{IpAddr, SocketAddr};

use dns_common::scope::Endpoint;

/// Expands wildcards to the local addresses covered by their sockets and drops addresses that are
/// not local. Earlier endpoints take precedence if there are too many.
///
/// An IPv6 wildcard covers IPv4 as well, unless IPv4 has a separate socket on the port
/// (`server/sockets.rs`, as in bosh-dns).
pub(super) fn expand(listen: &[SocketAddr], local: &[IpAddr]) -> Vec<SocketAddr> {
    let mut all: Vec<SocketAddr> = Vec::new();
    for endpoint in listen {
        let addresses: Vec<IpAddr> = match endpoint.ip() {
            ip if is_scoped(&ip) => Vec::new(),
            ip if !ip.is_unspecified() => vec![ip],
            ip => {
                let has_v4 = listen.iter().any(|other| other.is_ipv4() && other.port() == endpoint.port());
                let takes = |address: &IpAddr| match address {
                    IpAddr::V4(_) => ip.is_ipv4() || !has_v4,
                    IpAddr::V6(_) => ip.is_ipv6(),
                };
                let mut addresses: Vec<IpAddr> =
                    local.iter().copied().filter(|address| takes(address) && !is_scoped(address)).collect();
                addresses.sort_by_key(|address| (!address.is_loopback(), *address));
                addresses
            }
        };
        for address in addresses {
            let found = SocketAddr::new(address, endpoint.port());
            if !all.contains(&found) {
                all.push(found);
            }
        }
    }
    all
}

/// Returns whether an address is link-local (fe80::/10). The programs do not distinguish links, so
/// userspace answers there.
fn is_scoped(address: &IpAddr) -> bool {
    matches!(address, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// Converts an endpoint to the form that the program compares.
pub(super) fn to_endpoint(endpoint: SocketAddr) -> Endpoint {
    let (address, family) = match endpoint.ip() {
        IpAddr::V4(ip) => (ip.to_ipv6_mapped().octets(), 4),
        IpAddr::V6(ip) => (ip.octets(), 6),
    };
    Endpoint { address, port: endpoint.port().to_be_bytes(), family, padding: [0; 5] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_expand_to_local_addresses() {
        let local: Vec<IpAddr> =
            ["10.0.0.1", "::1", "127.0.0.1", "10.0.0.1"].map(|ip| ip.parse().unwrap()).into();
        let listen = |text: &str| text.parse::<SocketAddr>().unwrap();
        assert_eq!(expand(&[listen("0.0.0.0:53")], &local), [listen("127.0.0.1:53"), listen("10.0.0.1:53")]);
        let both = ["127.0.0.1:53", "[::1]:53", "10.0.0.1:53"].map(listen);
        assert_eq!(expand(&[listen("[::]:53")], &local), both, "IPv6's takes IPv4 too");
        assert_eq!(expand(&[listen("[::]:53"), listen("10.0.0.1:54")], &local)[..3], both);
        let own_v4 = expand(&[listen("[::]:53"), listen("10.0.0.1:53")], &local);
        assert_eq!(own_v4, [listen("[::1]:53"), listen("10.0.0.1:53")], "IPv4 has a socket of its own");
        assert_eq!(expand(&[listen("10.0.0.1:53"), listen("0.0.0.0:53")], &local).len(), 2, "no repeats");
    }

    #[test]
    fn endpoints_are_in_network_order() {
        let endpoint = to_endpoint("169.254.0.2:53".parse().unwrap());
        assert_eq!(endpoint.address, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 169, 254, 0, 2]);
        assert_eq!((endpoint.port, endpoint.family), ([0, 53], 4));
    }
}
