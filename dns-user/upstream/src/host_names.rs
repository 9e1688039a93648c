//! Resolves host names of recursors and HTTP servers in the background.
//!
//! A query never triggers a look-up; it uses the known address. Each name has a task that resolves
//! it again when its TTL expires or its address fails. The sources are, in this order: /etc/hosts,
//! recursors configured by address, the nameservers of /etc/resolv.conf, and this server itself,
//! which knows the fleet's names. Nothing runs on the runtime's pool of blocking threads, as
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

use arc_swap::ArcSwap;
use tokio::sync::{Notify, watch};

use super::{
    forward::Forwarder,
    message::{self, MessageIndex},
    outgoing::Form,
    recursor::RecursorOptions,
    resolv_conf,
    udp::Matching,
};
use dns_core::{
    config::{Compat, RecursorSelection},
    name::Name,
    wire::{CLASS_IN, Parsed, TYPE_A, TYPE_AAAA, Transport, parse},
};

/// Host names assigned by the administrator.
const HOSTS: &str = "/etc/hosts";
/// Minimum and maximum interval between look-ups of a name, regardless of its TTL.
const TTL: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(600)];
/// Pause after a failed look-up.
const RETRY: Duration = Duration::from_secs(1);
const TIMEOUT: Duration = Duration::from_secs(2);

/// Sources for host names.
#[derive(Debug, Default)]
pub struct HostNames {
    /// Recursors configured by address, `address:port`.
    recursors: Vec<String>,
    /// Listen addresses of this server.
    own: Arc<ArcSwap<Vec<SocketAddr>>>,
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
    /// Creates a resolver from the recursors configured by address and a server that listens on
    /// `own`.
    pub fn new(recursors: &[String], own: Arc<ArcSwap<Vec<SocketAddr>>>) -> Arc<Self> {
        let by_address = |name: &&String| name.parse::<SocketAddr>().is_ok();
        Arc::new(Self { recursors: recursors.iter().filter(by_address).cloned().collect(), own })
    }

    /// Starts resolving a name. Must be called inside a tokio runtime.
    pub fn follow(self: &Arc<Self>, host: &str) -> Arc<HostName> {
        let again = Arc::new(Notify::new());
        let addresses = watch::Sender::new(Arc::from([]));
        let name = Arc::new(HostName { addresses, failures: AtomicUsize::new(0), again: Arc::clone(&again) });
        tokio::spawn(keep_up(Arc::clone(self), host.to_owned(), Arc::downgrade(&name), again));
        name
    }

    /// Resolves a host name to its addresses and their TTL; `None` if no recursor knows it.
    async fn look_up(&self, host: &str) -> Option<(Vec<IpAddr>, Duration)> {
        let [least, longest] = TTL;
        if let Some(address) = literal(host) {
            return Some((vec![address], longest));
        }
        let listed = of_hosts(&fs::read_to_string(HOSTS).unwrap_or_default(), host);
        if !listed.is_empty() {
            return Some((listed, least));
        }
        let name = Name::from_text(host).ok()?;
        if host.eq_ignore_ascii_case("localhost") {
            // RFC 6761, section 6.3.
            return Some((vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()], longest));
        }
        let mut servers = self.recursors.clone();
        servers.extend(resolv_conf::nameservers(&self.own.load()));
        servers.extend(self.own.load().iter().map(ToString::to_string));
        let options = RecursorOptions {
            timeout: TIMEOUT,
            max_retries: 0,
            form: Form::default(),
            matching: Matching::Strict,
            randomise_case: false,
        };
        let nobody = Arc::new(Self::default());
        let forwarder =
            Forwarder::new(&servers, options, RecursorSelection::Serial, Compat::default(), &nobody);
        for qtype in [TYPE_A, TYPE_AAAA] {
            let (addresses, ttl) = ask(&forwarder, &name, qtype).await;
            if !addresses.is_empty() {
                return Some((addresses, Duration::from_secs(ttl.into()).clamp(least, longest)));
            }
        }
        None
    }
}

impl HostName {
    /// Returns the current address; waits for the first look-up if necessary, for at most
    /// `patience`.
    pub async fn address(&self, patience: Duration) -> Option<IpAddr> {
        let mut addresses = self.addresses.subscribe();
        let known = tokio::time::timeout(patience, addresses.wait_for(|known| !known.is_empty())).await;
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

/// Resolves a name repeatedly while it is in use.
async fn keep_up(hosts: Arc<HostNames>, host: String, name: Weak<HostName>, again: Arc<Notify>) {
    let mut is_known = true;
    loop {
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
    let mut message = b"\0\0\x01\0\0\x01\0\0\0\0\0\0".to_vec();
    message.extend_from_slice(name.as_wire());
    message.extend_from_slice(&qtype.to_be_bytes());
    message.extend_from_slice(&CLASS_IN.to_be_bytes());
    // `message` was built above and always parses.
    let Parsed::Query(query) = parse(&message) else { return (Vec::new(), 0) };
    let reply = forwarder.forward(&query, Transport::Udp).await.reply;
    let index = MessageIndex::of(&reply).unwrap_or_default();
    let mut smallest = u32::MAX;
    let answers = index.walk(&reply).filter(|(section, record)| *section == 0 && record.rtype == qtype);
    let addresses = answers.filter_map(|(_, record)| {
        smallest = smallest.min(record.ttl);
        let data = message::bytes(&reply, record.data)?;
        let v4 = <[u8; 4]>::try_from(data).map(IpAddr::from);
        v4.or_else(|_| <[u8; 16]>::try_from(data).map(IpAddr::from)).ok()
    });
    (addresses.collect(), smallest)
}

/// Finds the addresses of a host in the text of /etc/hosts (hosts(5)).
fn of_hosts(text: &str, host: &str) -> Vec<IpAddr> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default());
    let matching = lines.filter_map(|line| {
        let mut words = line.split_whitespace();
        let address = words.next()?.parse().ok()?;
        words.any(|word| word.eq_ignore_ascii_case(host)).then_some(address)
    });
    matching.collect()
}

/// Parses a host that is written as an address, without its zone.
fn literal(host: &str) -> Option<IpAddr> {
    host.parse().ok()
}

/// Parses `name` (`address:port`, `[address%zone]:port`); `None` if it has a host name, or its zone
/// is not a current interface.
pub(crate) fn socket_address(name: &str) -> Option<SocketAddr> {
    if let Ok(address) = name.parse() {
        return Some(address);
    }
    let (host, port) = name.rsplit_once(':')?;
    let (address, zone) = host.strip_prefix('[')?.strip_suffix(']')?.split_once('%')?;
    let index = resolv_conf::interface_index(zone)?;
    Some(SocketAddrV6::new(address.parse().ok()?, port.parse().ok()?, 0, index).into())
}

/// Returns whether `name` (`host:port`) has a host name.
pub(crate) fn has_host_name(name: &str) -> bool {
    !name.starts_with('[') && name.parse::<SocketAddr>().is_err()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_read() {
        let text =
            "127.0.0.1 localhost\n# 10.0.0.1 ns\n10.0.0.2\tns.Example ns # x\nfd00::2 ns\nns 10.0.0.3\n";
        let addresses: Vec<String> = of_hosts(text, "NS").iter().map(ToString::to_string).collect();
        assert_eq!(addresses, ["10.0.0.2", "fd00::2"]);
        assert!(of_hosts(text, "x").is_empty());
    }

    #[test]
    fn zones_are_interfaces() {
        let Ok(index) = nix::net::if_::if_nametoindex("lo") else { return };
        let expected = SocketAddrV6::new("fe80::2".parse().unwrap(), 53, 0, index);
        assert_eq!(socket_address("[fe80::2%lo]:53"), Some(expected.into()));
        assert_eq!(socket_address("[fe80::2%no-such-if]:53"), None);
        assert!(!has_host_name("[fe80::2%no-such-if]:53") && has_host_name("ns.example:53"));
    }
}
