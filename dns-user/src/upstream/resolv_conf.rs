//! Recursors from /etc/resolv.conf, followed as it changes.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    sync::Weak,
    time::Duration,
};

use super::{forward::Forwarder, without_excluded};

/// The system's list of nameservers.
const RESOLV_CONF: &str = "/etc/resolv.conf";
/// How often it is looked at. It is often a symbolic link into a folder that
/// comes and goes (systemd, DHCP clients), which a watch would lose.
const INTERVAL: Duration = Duration::from_secs(1);

/// The nameservers that are not us: `address:port`. A file that cannot be read names none.
pub(crate) fn read(own: &[SocketAddr]) -> Vec<String> {
    match fs::read(RESOLV_CONF) {
        Ok(bytes) => parse(&String::from_utf8_lossy(&bytes), own),
        Err(error) => {
            tracing::warn!(file = RESOLV_CONF, %error, "the file cannot be read");
            Vec::new()
        }
    }
}

/// Keeps a forwarder's list up to date as long as it lives. A file that names
/// nobody changes nothing: it may be about to be written, and recursors that may
/// be gone are better than none.
pub(crate) fn follow(forwarder: Weak<Forwarder>, own: Vec<SocketAddr>, excluded: Vec<String>) {
    tokio::spawn(async move {
        let stamp = || fs::metadata(RESOLV_CONF).and_then(|data| Ok((data.modified()?, data.len()))).ok();
        let mut seen = stamp();
        let mut names = without_excluded(read(&own), &excluded);
        loop {
            tokio::time::sleep(INTERVAL).await;
            let Some(forwarder) = forwarder.upgrade() else { return };
            let now = stamp();
            if now == seen {
                continue;
            }
            seen = now;
            let new = without_excluded(read(&own), &excluded);
            if new.is_empty() {
                tracing::warn!(file = RESOLV_CONF, "no nameservers there: the recursors in use stay");
            } else if new != names {
                tracing::info!(recursors = ?new, "recursors of /etc/resolv.conf have changed");
                forwarder.replace(&new);
                names = new;
            }
        }
    });
}

/// The nameservers of a resolv.conf (resolv.conf(5)) on port 53, without our own
/// addresses and loopback, where we may well be asked ourselves.
fn parse(text: &str, own: &[SocketAddr]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        if words.next() != Some("nameserver") {
            continue;
        }
        let Some(word) = words.next() else { continue };
        // A link-local address may name its interface: `fe80::1%eth0`.
        let (address, zone) = word.split_once('%').map_or((word, None), |(ip, zone)| (ip, Some(zone)));
        let Ok(address) = address.parse::<IpAddr>() else {
            tracing::warn!(nameserver = word, "not an address, left out");
            continue;
        };
        if address.is_loopback() || own.iter().any(|own| own.ip() == address) {
            continue;
        }
        let name = match (address, zone.and_then(interface_index)) {
            (IpAddr::V6(v6), Some(index)) => std::net::SocketAddrV6::new(v6, 53, 0, index).to_string(),
            _ => SocketAddr::new(address, 53).to_string(),
        };
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// Number of an interface.
fn interface_index(zone: &str) -> Option<u32> {
    zone.parse().ok().or_else(|| nix::net::if_::if_nametoindex(zone).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_and_own_addresses_are_left_out() {
        let text = "# nameserver 9.9.9.9\nsearch x\nnameserver 127.0.0.53\nnameserver 169.254.0.2\n\
                    nameserver 10.0.0.2\n  nameserver\t10.0.0.3 \nnameserver ::1\nnameserver fd00::1\n\
                    nameserver nonsense\nnameserver 10.0.0.2\nnameserver fe80::1%7\n";
        let own = ["169.254.0.2:53".parse().unwrap()];
        assert_eq!(parse(text, &own), ["10.0.0.2:53", "10.0.0.3:53", "[fd00::1]:53", "[fe80::1%7]:53"]);
    }
}
