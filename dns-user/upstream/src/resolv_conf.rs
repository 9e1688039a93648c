//! The nameservers of /etc/resolv.conf: as recursors, and as sources of host names.

use std::{
    io,
    net::{IpAddr, SocketAddr, SocketAddrV6},
    path::Path,
    sync::Arc,
    time::Duration,
};

use dns_kit::{
    files::{FileStamp, bounded},
    logs::LineLimit,
};

use crate::{
    endpoint::interface_index,
    own::{OwnAddresses, Reached},
    without_excluded,
};

/// The system's list of nameservers.
const RESOLV_CONF: &str = "/etc/resolv.conf";
/// Interval of the check for changes. The file is often a symbolic link into a folder that is
/// recreated (systemd, DHCP clients), which a watch would lose.
const INTERVAL: Duration = Duration::from_secs(1);

/// The usable nameservers of the file, followed as it changes.
pub(crate) struct Nameservers {
    /// Addresses of this server.
    own: OwnAddresses,
    /// Excluded recursors, `host:port`.
    excluded: Vec<String>,
    /// Versions of the file and of `own` from which `names` was read.
    seen: (Option<FileStamp>, Arc<Reached>),
    names: Vec<String>,
}

impl Nameservers {
    /// Reads the file. An unreadable file yields an empty list.
    pub(crate) fn new(own: OwnAddresses, excluded: Vec<String>) -> Self {
        let mut new = Self {
            own,
            excluded,
            seen: Default::default(),
            names: Vec::new(),
        };
        new.names = new.read().unwrap_or_default();
        new
    }

    pub(crate) fn names(&self) -> &[String] {
        &self.names
    }

    /// Passes each new list to `replace` while the list `is_used`. An empty list is ignored: the file
    /// may be in the middle of an update, and possibly outdated recursors are better than none.
    pub(crate) async fn follow(mut self, is_used: impl Fn() -> bool, replace: impl Fn(&[String])) {
        loop {
            tokio::time::sleep(INTERVAL).await;
            if !is_used() {
                return;
            }
            let now = self.version();
            let same_own = Arc::ptr_eq(&now.1, &self.seen.1);
            if now.0 == self.seen.0 && same_own {
                continue;
            }
            let Some(new) = self.read() else { continue };
            // If this server's addresses have changed, an empty list is better than forwarding to
            // itself.
            if new.is_empty() && same_own {
                tracing::warn!(
                    file = RESOLV_CONF,
                    "the file contains no usable nameserver; the current recursors stay in use"
                );
            } else if new != self.names {
                replace(&new);
                tracing::info!(
                    recursors = ?new,
                    "recursors of /etc/resolv.conf reloaded; answers of the earlier ones are void"
                );
                self.names = new;
            }
        }
    }

    /// Returns the version of all inputs to the list.
    fn version(&self) -> (Option<FileStamp>, Arc<Reached>) {
        (FileStamp::of(RESOLV_CONF), self.own.current())
    }

    /// Returns the nameservers of the file, none if it is missing; `None` if it cannot be read now.
    fn read(&mut self) -> Option<Vec<String>> {
        // Taken before the file is read, so that a change in between is noticed next time.
        let present = self.version();
        let before = std::mem::replace(&mut self.seen, present);
        let bytes = match bounded::read(Path::new(RESOLV_CONF)) {
            Ok(bytes) => bytes,
            Err(error) => {
                static LIMIT: LineLimit = LineLimit::new();
                if let Some(suppressed) = LIMIT.admit_per_minute() {
                    tracing::warn!(file = RESOLV_CONF, %error, suppressed, "cannot read the file");
                }
                if error.kind() != io::ErrorKind::NotFound {
                    // It has not been seen, nor by our present addresses: the reason may pass, such as a lack of
                    // descriptors.
                    self.seen = (None, before.1);
                    return None;
                }
                Vec::new()
            }
        };
        let names = parse_resolv_conf(&String::from_utf8_lossy(&bytes), &self.seen.1, false);
        Some(without_excluded(names, &self.excluded))
    }
}

/// Returns the current nameservers of the file as `address:port`, loopback addresses included,
/// without the server's `own` ones.
pub(crate) fn nameservers(own: &Reached) -> Vec<String> {
    let text = bounded::read(Path::new(RESOLV_CONF)).unwrap_or_default();
    parse_resolv_conf(&String::from_utf8_lossy(&text), own, true)
}

/// Parses the nameservers of a resolv.conf (resolv.conf(5)), with port 53, without our own
/// addresses and, unless `with_loopback` is set, without loopback addresses, because a server there
/// may forward to us.
fn parse_resolv_conf(text: &str, own: &Reached, with_loopback: bool) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        if words.next() != Some("nameserver") {
            continue;
        }
        let Some(word) = words.next() else { continue };
        // A link-local address may contain its interface: `fe80::1%eth0`.
        let (address, zone) = match word.split_once('%') {
            Some((address, zone)) => (address, Some(zone)),
            None => (word, None),
        };
        let Ok(address) = address.parse::<IpAddr>() else {
            tracing::warn!(nameserver = word, "nameserver skipped: not an IP address");
            continue;
        };
        if address.is_loopback() && !with_loopback || own.has(address) {
            continue;
        }
        let name = match (address, zone.and_then(interface_index)) {
            (IpAddr::V6(v6), Some(index)) => SocketAddrV6::new(v6, 53, 0, index).to_string(),
            _ => SocketAddr::new(address, 53).to_string(),
        };
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use test_support::own_process;

    use super::*;

    #[test]
    fn loopback_and_own_addresses_are_skipped() {
        let text = "# nameserver 9.9.9.9\nsearch x\nnameserver 127.0.0.53\nnameserver 169.254.0.2\n\
                    nameserver 10.0.0.2\n  nameserver\t10.0.0.3 \nnameserver ::1\nnameserver fd00::1\n\
                    nameserver nonsense\nnameserver 10.0.0.2\nnameserver fe80::1%7\n";
        let own = OwnAddresses::new(&["169.254.0.2:53".parse().unwrap()]).current();
        assert_eq!(
            parse_resolv_conf(text, &own, false),
            [
                "10.0.0.2:53",
                "10.0.0.3:53",
                "[fd00::1]:53",
                "[fe80::1%7]:53"
            ]
        );
    }

    #[test]
    fn loopback_addresses_provide_host_names() {
        let text = "nameserver 127.0.0.53\nnameserver\nnameserver ::1 \nnameserver 10.0.0.1\n\
                    nameserver 10.0.0.2%7\nnameserver fe80::1%no-such-interface\noptions nameserver 10.0.0.9\n";
        let own = OwnAddresses::new(&["127.0.0.53:53".parse().unwrap()]).current();
        for (with_loopback, expected) in [
            (
                true,
                &["[::1]:53", "10.0.0.1:53", "10.0.0.2:53", "[fe80::1]:53"][..],
            ),
            (false, &["10.0.0.1:53", "10.0.0.2:53", "[fe80::1]:53"]),
        ] {
            assert_eq!(parse_resolv_conf(text, &own, with_loopback), expected);
        }
    }

    #[tokio::test]
    async fn own_address_changes_the_list() {
        let own = OwnAddresses::default();
        let current = Nameservers::new(own.clone(), vec![]);
        let listed = current.names().to_vec();
        let followed = Nameservers {
            names: vec!["192.0.2.1:53".to_owned()],
            ..current
        };
        let rounds = std::cell::Cell::new(0);
        let is_used = || {
            rounds.set(rounds.get() + 1);
            if rounds.get() == 2 {
                own.set(&["192.0.2.9:53".parse().unwrap()]);
            }
            rounds.get() < 3
        };
        let replaced = std::cell::RefCell::new(Vec::new());
        let replace = |names: &[String]| replaced.borrow_mut().push((rounds.get(), names.to_vec()));
        followed.follow(is_used, replace).await;
        assert_eq!(replaced.into_inner(), [(2, listed)]);
    }

    #[test]
    fn failed_read_is_repeated() {
        // The limit on open files belongs to the whole process.
        if !own_process::is_here() {
            let mut test = own_process::command(module_path!(), "failed_read_is_repeated");
            return own_process::run(&mut test);
        }
        let mut nameservers = own_process::without_descriptors(|| {
            Nameservers::new(OwnAddresses::default(), Vec::new())
        });
        assert!(nameservers.seen.0.is_none() && nameservers.names().is_empty());
        let expected = Nameservers::new(OwnAddresses::default(), Vec::new());
        assert_eq!(nameservers.read().unwrap(), expected.names());
        assert_eq!(nameservers.seen.0, expected.seen.0);
    }

    #[test]
    fn file_gives_nameservers() {
        let own = OwnAddresses::default();
        let text = std::fs::read_to_string(RESOLV_CONF).unwrap_or_default();
        let expected = parse_resolv_conf(&text, &own.current(), true);
        assert_eq!(nameservers(&own.current()), expected);
        let others = parse_resolv_conf(&text, &own.current(), false);
        assert_eq!(Nameservers::new(own.clone(), Vec::new()).names(), others);
        let none = Nameservers::new(own, others);
        assert_eq!(none.names(), Vec::<String>::new(), "all are excluded");
    }
}
