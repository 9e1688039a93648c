//! Resolves host names of recursors and HTTP servers in the background.
//!
//! A query never triggers a look-up; it uses the known address. Each name has a task that resolves
//! it again when its TTL expires or its address fails, and ends once nobody uses the name. The sources
//! are, in this order: /etc/hosts, recursors configured by address, the nameservers of /etc/resolv.conf,
//! and this server itself, which knows the fleet's names. If a configured recursor is encrypted, the
//! nameservers of /etc/resolv.conf, which are not, only get the host names of recursors, and only while no
//! recursor is configured by address. Nothing runs on the runtime's pool of blocking threads, as
//! getaddrinfo(3) would.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6},
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::sync::{Notify, watch};

use crate::{
    forward::Forwarder,
    message::{Form, MessageIndex},
    own::{OwnAddresses, Reached},
    recursor::RecursorOptions,
    udp::Matching,
    without_excluded,
};
use dns_core::{
    config::{Compat, RecursorSelection},
    name::Name,
    wire::{FLAG_RD, Parsed, TYPE_A, TYPE_AAAA, parse, query_message},
};
use dns_kit::files::FileStamp;

/// Host names assigned by the administrator.
const HOSTS: &str = "/etc/hosts";
/// Minimum and maximum interval between look-ups of a name, regardless of its TTL.
const TTL: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(600)];
/// Pause after a failed look-up.
const RETRY: Duration = Duration::from_secs(1);
const TIMEOUT: Duration = Duration::from_secs(2);

/// Sources for host names.
#[derive(Clone, Debug, Default)]
pub struct HostNames {
    /// Recursors configured by address, `address:port` or `tls://address:port#name`.
    recursors: Vec<String>,
    /// Whether the nameservers of /etc/resolv.conf may see the names.
    with_nameservers: bool,
    /// Addresses of this server.
    pub(crate) own: OwnAddresses,
}

/// A host name, resolved repeatedly until dropped.
#[derive(Debug)]
pub struct HostName {
    /// Addresses from the last successful look-up; empty before the first.
    addresses: watch::Sender<Arc<[IpAddr]>>,
    /// Number of failures, which selects the address to use.
    failures: AtomicUsize,
    /// Triggers an early look-up.
    again: Arc<Notify>,
}

impl HostNames {
    /// Creates a resolver of the host names of handlers and other servers, from the configured recursors and the
    /// server at `own`.
    pub fn new(recursors: &[String], own: OwnAddresses) -> Arc<Self> {
        Arc::new(Self {
            recursors: by_address(recursors),
            with_nameservers: !recursors
                .iter()
                .any(|name: &String| Endpoint::of(name).tls.is_some()),
            own,
        })
    }

    /// Creates a resolver of the host names of the recursors themselves.
    pub(crate) fn of_recursors(recursors: &[String], own: OwnAddresses) -> Arc<Self> {
        let Self {
            recursors,
            with_nameservers,
            own,
        } = Arc::unwrap_or_clone(Self::new(recursors, own));
        Arc::new(Self {
            // Somebody must know the address of the first encrypted recursor.
            with_nameservers: with_nameservers || recursors.is_empty(),
            recursors,
            own,
        })
    }

    /// Starts resolving a name. Must be called inside a tokio runtime.
    pub fn follow(self: &Arc<Self>, host: &str) -> Arc<HostName> {
        let again = Arc::new(Notify::new());
        let addresses = watch::Sender::new(Arc::from([]));
        let name = Arc::new(HostName {
            addresses,
            failures: AtomicUsize::new(0),
            again: Arc::clone(&again),
        });
        tokio::spawn(resolve_repeatedly(
            Arc::clone(self),
            host.to_owned(),
            Arc::downgrade(&name),
            again,
        ));
        name
    }

    /// Resolves a host name to its addresses and their TTL; `None` if no recursor knows it.
    async fn look_up(&self, host: &str) -> Option<(Vec<IpAddr>, Duration)> {
        let [least, longest] = TTL;
        if let Ok(address) = host.parse() {
            return Some((vec![address], longest));
        }
        let listed = of_hosts(&fs::read_to_string(HOSTS).unwrap_or_default(), host);
        if !listed.is_empty() {
            return Some((listed, least));
        }
        let name = Name::from_text(host).ok()?;
        if host.eq_ignore_ascii_case("localhost") {
            // RFC 6761, section 6.3.
            return Some((
                vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
                longest,
            ));
        }
        let own = self.own.current();
        let mut servers = self.recursors.clone();
        if self.with_nameservers {
            servers.extend(nameservers(&own));
        }
        servers.extend(own.listen.iter().map(ToString::to_string));
        let options = RecursorOptions {
            timeout: TIMEOUT,
            max_retries: 0,
            form: Form::default(),
            matching: Matching::Strict,
            randomise_case: false,
        };
        let nobody = Arc::new(Self::default());
        let forwarder = Forwarder::new(
            &servers,
            options,
            RecursorSelection::Serial,
            Compat::default(),
            &nobody,
        );
        for qtype in [TYPE_A, TYPE_AAAA] {
            let (addresses, ttl) = ask(&forwarder, &name, qtype).await;
            if !addresses.is_empty() {
                return Some((
                    addresses,
                    Duration::from_secs(ttl.into()).clamp(least, longest),
                ));
            }
        }
        None
    }
}

/// Returns the recursors that are configured by address.
fn by_address(recursors: &[String]) -> Vec<String> {
    let mut found = Vec::new();
    for name in recursors {
        if socket_address(Endpoint::of(name).address).is_some() {
            found.push(name.clone());
        }
    }
    found
}

impl HostName {
    /// Returns the current address; waits for the first look-up if necessary, for at most
    /// `patience`.
    pub async fn address(&self, patience: Duration) -> Option<IpAddr> {
        let mut addresses = self.addresses.subscribe();
        let known =
            tokio::time::timeout(patience, addresses.wait_for(|known| !known.is_empty())).await;
        let known = known.ok()?.ok()?;
        let turn = self.failures.load(Ordering::Relaxed) % known.len();
        known.get(turn).copied()
    }

    /// Reports the current address as unreachable: the next one is used, and the name is looked up
    /// again.
    pub fn failed(&self) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        self.again.notify_one();
    }
}

impl Drop for HostName {
    fn drop(&mut self) {
        // The task would otherwise sleep until the TTL has passed.
        self.again.notify_one();
    }
}

/// Resolves a name repeatedly while it is in use.
async fn resolve_repeatedly(
    hosts: Arc<HostNames>,
    host: String,
    name: Weak<HostName>,
    again: Arc<Notify>,
) {
    let mut is_known = true;
    while name.strong_count() > 0 {
        let found = hosts.look_up(&host).await;
        let Some(name) = name.upgrade() else { return };
        let pause = match found {
            Some((addresses, ttl)) => {
                is_known = true;
                name.addresses.send_if_modified(|known| {
                    let is_new = known[..] != addresses[..];
                    if is_new {
                        *known = addresses.into();
                    }
                    is_new
                });
                ttl
            }
            None => {
                if is_known {
                    tracing::warn!(
                        host,
                        "cannot look up the host name of a recursor or handler; the current addresses stay \
                         in use; trying again every second"
                    );
                }
                is_known = false;
                RETRY
            }
        };
        drop(name);
        // Limits the rate of look-ups, however many queries fail.
        tokio::time::sleep(RETRY).await;
        let _early = tokio::time::timeout(pause.saturating_sub(RETRY), again.notified()).await;
    }
}

/// Queries the addresses of a host; returns them with their smallest TTL.
async fn ask(forwarder: &Forwarder, name: &Name, qtype: u16) -> (Vec<IpAddr>, u32) {
    let message = query_message(0, FLAG_RD, name.as_wire(), qtype);
    // `message` was built above and always parses.
    let Parsed::Query(query) = parse(&message) else {
        return (Vec::new(), 0);
    };
    let reply = forwarder.forward(&query).await.reply;
    let index = MessageIndex::of(&reply).unwrap_or_default();
    let mut smallest = u32::MAX;
    let answers = index
        .walk(&reply)
        .filter(|(section, record)| *section == 0 && record.rtype == qtype);
    let addresses = answers.filter_map(|(_, record)| {
        smallest = smallest.min(record.ttl);
        let data = reply.get(record.data)?;
        let v4 = <[u8; 4]>::try_from(data).map(IpAddr::from);
        v4.or_else(|_| <[u8; 16]>::try_from(data).map(IpAddr::from))
            .ok()
    });
    (addresses.collect(), smallest)
}

/// Finds the addresses of a host in the text of /etc/hosts (hosts(5)).
fn of_hosts(text: &str, host: &str) -> Vec<IpAddr> {
    let lines = text
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default());
    let matching = lines.filter_map(|line| {
        let mut words = line.split_whitespace();
        let address = words.next()?.parse().ok()?;
        words
            .any(|word| word.eq_ignore_ascii_case(host))
            .then_some(address)
    });
    matching.collect()
}

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
        let (Some((one, one_port)), Some((another, other_port))) = (
            self.address.rsplit_once(':'),
            other.address.rsplit_once(':'),
        ) else {
            return self == other;
        };
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
    let (host, port) = name.rsplit_once(':')?;
    let (address, zone) = host.strip_prefix('[')?.strip_suffix(']')?.split_once('%')?;
    let index = interface_index(zone)?;
    Some(SocketAddrV6::new(address.parse().ok()?, port.parse().ok()?, 0, index).into())
}

/// Returns whether `name` (`host:port`) has a host name.
pub(crate) fn has_host_name(name: &str) -> bool {
    !name.starts_with('[') && name.parse::<SocketAddr>().is_err()
}

//----------- resolv.conf ----------------------------------------------------

/// The system's list of nameservers.
const RESOLV_CONF: &str = "/etc/resolv.conf";
/// Interval of the check for changes. The file is often a symbolic link into a folder that is
/// recreated (systemd, DHCP clients), which a watch would lose.
const INTERVAL: Duration = Duration::from_secs(1);

/// The usable nameservers of the file, followed as it changes.
pub(super) struct Nameservers {
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
    pub(super) fn new(own: OwnAddresses, excluded: Vec<String>) -> Self {
        let mut new = Self {
            own,
            excluded,
            seen: Default::default(),
            names: Vec::new(),
        };
        new.seen = new.version();
        new.names = new.read();
        new
    }

    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// Passes each new list to `replace` while the list `is_used`. An empty list is ignored: the file
    /// may be in the middle of an update, and possibly outdated recursors are better than none.
    pub(super) async fn follow(mut self, is_used: impl Fn() -> bool, replace: impl Fn(&[String])) {
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
            // Taken before the file is read, so that a change in between is noticed next time.
            self.seen = now;
            let new = self.read();
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

    fn read(&self) -> Vec<String> {
        let names = match fs::read(RESOLV_CONF) {
            Ok(bytes) => parse_resolv_conf(&String::from_utf8_lossy(&bytes), &self.seen.1, false),
            Err(error) => {
                tracing::warn!(file = RESOLV_CONF, %error, "cannot read the file");
                Vec::new()
            }
        };
        without_excluded(names, &self.excluded)
    }
}

/// Returns the current nameservers of the file as `address:port`, loopback addresses included,
/// without the server's `own` ones.
pub(super) fn nameservers(own: &Reached) -> Vec<String> {
    let text = fs::read(RESOLV_CONF).unwrap_or_default();
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
        let (address, zone) = word
            .split_once('%')
            .map_or((word, None), |(ip, zone)| (ip, Some(zone)));
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

fn interface_index(zone: &str) -> Option<u32> {
    zone.parse()
        .ok()
        .or_else(|| nix::net::if_::if_nametoindex(zone).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_read() {
        let text = "127.0.0.1 localhost\n# 10.0.0.1 ns\n10.0.0.2\tns.Example ns # x\nfd00::2 ns\nns 10.0.0.3\n";
        let addresses: Vec<String> = of_hosts(text, "NS")
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(addresses, ["10.0.0.2", "fd00::2"]);
        assert!(of_hosts(text, "x").is_empty());
    }

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
}
