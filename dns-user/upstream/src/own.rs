//! The addresses of this server. A query sent there would come back to it until it times out.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use arc_swap::ArcSwap;
use dns_core::config::wildcard_receives;

/// The addresses at which this server answers, which are never asked as recursors. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct OwnAddresses(Arc<ArcSwap<Reached>>);

/// The listen addresses, and what their wildcards cover.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Reached {
    pub(crate) listen: Vec<SocketAddr>,
    /// Addresses of the machine's interfaces that a wildcard covers.
    interfaces: Vec<IpAddr>,
}

impl OwnAddresses {
    /// Returns the addresses of a server that listens on `listen`.
    pub fn new(listen: &[SocketAddr]) -> Self {
        let own = Self::default();
        own.set(listen);
        own
    }

    /// Replaces the listen addresses. Must be called from time to time even if they stay, because a wildcard
    /// also covers addresses that the machine gets later.
    pub fn set(&self, listen: &[SocketAddr]) {
        let now = Reached::of(listen);
        // Users compare versions by pointer.
        if **self.0.load() != now {
            self.0.store(Arc::new(now));
        }
    }

    /// Returns whether queries to `address` reach this server.
    pub fn contains(&self, address: SocketAddr) -> bool {
        let current = self.0.load();
        // An IPv4 address may be written as an IPv6 one (RFC 4291, section 2.5.5.2).
        let ip = address.ip().to_canonical();
        // Linux delivers to a wildcard what is sent to any address of 127.0.0.0/8, or to the wildcard itself.
        let is_of_machine =
            ip.is_loopback() || ip.is_unspecified() || current.interfaces.contains(&ip);
        current.listen.iter().any(|own| {
            // Asked before each try, and mostly there is no wildcard.
            let is_covered = own.ip().is_unspecified()
                && is_of_machine
                && wildcard_receives(*own, ip, &current.listen);
            own.port() == address.port() && (own.ip().to_canonical() == ip || is_covered)
        })
    }

    pub(crate) fn current(&self) -> Arc<Reached> {
        self.0.load_full()
    }
}

impl Reached {
    fn of(listen: &[SocketAddr]) -> Self {
        let mut interfaces = Vec::new();
        // Mostly there is no wildcard, and then the kernel need not be asked.
        if listen.iter().any(|own| own.ip().is_unspecified()) {
            interfaces = interface_addresses();
            interfaces.retain(|&ip| listen.iter().any(|own| wildcard_receives(*own, ip, listen)));
        }
        Self {
            listen: listen.to_vec(),
            interfaces,
        }
    }

    /// Returns whether an address is this server's, at any port.
    pub(crate) fn has(&self, address: IpAddr) -> bool {
        self.interfaces.contains(&address) || self.listen.iter().any(|own| own.ip() == address)
    }
}

fn interface_addresses() -> Vec<IpAddr> {
    let mut addresses = Vec::new();
    for interface in nix::ifaddrs::getifaddrs().into_iter().flatten() {
        // An interface without an address is listed, too (getifaddrs(3)).
        let Some(address) = interface.address else {
            continue;
        };
        if let Some(v4) = address.as_sockaddr_in() {
            addresses.push(v4.ip().into());
        } else if let Some(v6) = address.as_sockaddr_in6() {
            addresses.push(v6.ip().into());
        }
    }
    addresses
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(listen: &[&str]) -> OwnAddresses {
        let listen: Vec<SocketAddr> = listen.iter().map(|text| text.parse().unwrap()).collect();
        OwnAddresses::new(&listen)
    }

    fn contains(own: &OwnAddresses, address: &str) -> bool {
        own.contains(address.parse().unwrap())
    }

    #[test]
    fn own_addresses_follow_the_listen_addresses() {
        let own = own(&["169.254.0.2:53"]);
        assert!(contains(&own, "169.254.0.2:53") && contains(&own, "[::ffff:169.254.0.2]:53"));
        assert!(!contains(&own, "169.254.0.2:5353") && !contains(&own, "127.0.0.1:53"));
        assert!(own.current().has([169, 254, 0, 2].into()));
        let before = own.current();
        own.set(&before.listen);
        assert!(Arc::ptr_eq(&before, &own.current()), "the same version");
        own.set(&["127.0.0.1:53".parse().unwrap()]);
        assert!(contains(&own, "127.0.0.1:53") && !contains(&own, "169.254.0.2:53"));
    }

    #[test]
    fn wildcard_covers_the_machine() {
        for wildcard in ["0.0.0.0:53", "[::]:53"] {
            let own = own(&[wildcard]);
            for address in ["127.0.0.9:53", "0.0.0.0:53"] {
                assert!(contains(&own, address), "{wildcard} {address}");
            }
            // No socket of IPv4 receives IPv6: another server may have it.
            let has_v6 = wildcard == "[::]:53";
            assert_eq!(contains(&own, "[::1]:53"), has_v6, "{wildcard}");
            for address in interface_addresses() {
                let is_own = has_v6 || address.is_ipv4();
                assert_eq!(
                    own.contains(SocketAddr::new(address, 53)),
                    is_own,
                    "{address}"
                );
                assert_eq!(own.current().has(address), is_own, "{address}");
            }
            assert!(!contains(&own, "192.0.2.1:53") && !contains(&own, "127.0.0.9:54"));
        }
    }

    #[test]
    fn ipv4_with_sockets_of_its_own_is_not_covered() {
        let own = own(&["[::]:53", "127.0.0.2:53"]);
        assert!(contains(&own, "[::1]:53") && contains(&own, "127.0.0.2:53"));
        assert!(!contains(&own, "127.0.0.3:53"));
        assert!(!own.current().has([127, 0, 0, 1].into()));
    }

    #[test]
    fn interfaces_have_the_loopback_address() {
        assert!(interface_addresses().contains(&[127, 0, 0, 1].into()));
    }
}
