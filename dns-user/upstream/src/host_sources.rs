//! Where the host names of recursors and HTTP servers are looked up: /etc/hosts, recursors configured by
//! address, the nameservers of /etc/resolv.conf, and this server itself, which knows the fleet's names, in
//! this order. If a configured recursor is encrypted, the nameservers of /etc/resolv.conf, which are not, only
//! get the host names of recursors, and only while no recursor is configured by address. Nothing runs on the
//! runtime's pool of blocking threads, as getaddrinfo(3) would.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::Path,
    sync::Arc,
    time::Duration,
};

use futures_util::future::BoxFuture;

use crate::{
    endpoint::{Endpoint, socket_address},
    forward::Forwarder,
    host_names::{HostLookup, HostNames, MAX_LOOK_UP_INTERVAL, MIN_LOOK_UP_INTERVAL},
    message::{Form, MessageIndex},
    own::OwnAddresses,
    recursor::RecursorOptions,
    resolv_conf::nameservers,
    udp::Matching,
};
use dns_core::{
    config::{Compat, RecursorSelection},
    name::Name,
    wire::{FLAG_RD, Parsed, TYPE_A, TYPE_AAAA, parse, query_message},
};
use dns_kit::files::bounded;

/// Host names assigned by the administrator.
const HOSTS: &str = "/etc/hosts";
const TIMEOUT: Duration = Duration::from_secs(2);

/// Sources for host names.
#[derive(Debug)]
struct HostSources {
    /// Recursors configured by address, `address:port` or `tls://address:port#name`.
    recursors: Vec<String>,
    /// Whether the nameservers of /etc/resolv.conf may see the names.
    with_nameservers: bool,
    /// Addresses of this server.
    own: OwnAddresses,
    /// Queries the servers, and keeps from one look-up to the next what it knows of them.
    forwarder: Forwarder,
}

impl HostNames {
    /// Creates a resolver of the host names of handlers and other servers, from the configured recursors and the
    /// server at `own`.
    pub fn new(recursors: &[String], own: OwnAddresses) -> Arc<Self> {
        HostSources::new(recursors, own).into_names()
    }

    /// Creates a resolver of the host names of the recursors themselves.
    pub(crate) fn of_recursors(recursors: &[String], own: OwnAddresses) -> Arc<Self> {
        let mut sources = HostSources::new(recursors, own);
        // Otherwise no source could know the address of the first encrypted recursor.
        sources.with_nameservers |= sources.recursors.is_empty();
        sources.into_names()
    }
}

impl HostSources {
    fn new(recursors: &[String], own: OwnAddresses) -> Self {
        let has_encrypted = recursors
            .iter()
            .any(|name| Endpoint::of(name).tls.is_some());
        let options = RecursorOptions {
            timeout: TIMEOUT,
            max_retries: 0,
            form: Form::default(),
            matching: Matching::Strict,
            randomise_case: false,
        };
        Self {
            recursors: by_address(recursors),
            with_nameservers: !has_encrypted,
            own,
            // It knows no own addresses, so that this server is asked, too.
            forwarder: Forwarder::new(
                &[],
                options,
                RecursorSelection::Serial,
                Compat::default(),
                &Arc::default(),
            ),
        }
    }

    fn into_names(self) -> Arc<HostNames> {
        let own = self.own.clone();
        Arc::new(HostNames::from_source(Box::new(self), own))
    }

    /// Resolves a host name to its addresses and their TTL; `None` if no recursor knows it.
    async fn look_up(&self, host: &str) -> Option<(Vec<IpAddr>, Duration)> {
        let listed = of_hosts(&bounded::read(Path::new(HOSTS)).unwrap_or_default(), host);
        // The file has no TTLs, so it is read again soon.
        if !listed.is_empty() {
            return Some((listed, MIN_LOOK_UP_INTERVAL));
        }
        let name = Name::from_text(host).ok()?;
        if host.eq_ignore_ascii_case("localhost") {
            // RFC 6761, section 6.3.
            return Some((
                vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
                MAX_LOOK_UP_INTERVAL,
            ));
        }
        let own = self.own.current();
        let mut servers = self.recursors.clone();
        if self.with_nameservers {
            servers.extend(nameservers(&own));
        }
        servers.extend(own.listen.iter().map(ToString::to_string));
        self.forwarder.replace(&servers);
        for qtype in [TYPE_A, TYPE_AAAA] {
            let (addresses, ttl) = ask(&self.forwarder, &name, qtype).await;
            if !addresses.is_empty() {
                let ttl = Duration::from_secs(ttl.into());
                return Some((
                    addresses,
                    ttl.clamp(MIN_LOOK_UP_INTERVAL, MAX_LOOK_UP_INTERVAL),
                ));
            }
        }
        None
    }
}

impl HostLookup for HostSources {
    fn look_up<'a>(&'a self, host: &'a str) -> BoxFuture<'a, Option<(Vec<IpAddr>, Duration)>> {
        Box::pin(self.look_up(host))
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

/// Queries the addresses of a host; returns them with their smallest TTL.
async fn ask(forwarder: &Forwarder, name: &Name, qtype: u16) -> (Vec<IpAddr>, u32) {
    let message = query_message(0, FLAG_RD, name.as_wire(), qtype);
    // `message` was built above and always parses.
    let Parsed::Query(query) = parse(&message) else {
        return (Vec::new(), 0);
    };
    let reply = forwarder.forward(&query).await.reply;
    let index = MessageIndex::of(&reply).unwrap_or_default();
    let mut addresses = Vec::new();
    let mut smallest = u32::MAX;
    for (section, record) in index.walk(&reply) {
        if section != 0 || record.rtype != qtype {
            continue;
        }
        smallest = smallest.min(record.ttl);
        let data = &reply[record.data];
        if let Ok(v4) = <[u8; 4]>::try_from(data) {
            addresses.push(v4.into());
        } else if let Ok(v6) = <[u8; 16]>::try_from(data) {
            addresses.push(v6.into());
        }
    }
    (addresses, smallest)
}

/// Finds the addresses of a host in the text of /etc/hosts (hosts(5)).
fn of_hosts(text: &[u8], host: &str) -> Vec<IpAddr> {
    let mut addresses = Vec::new();
    // Comments may have any encoding.
    for line in String::from_utf8_lossy(text).lines() {
        let mut words = line
            .split('#')
            .next()
            .unwrap_or_default()
            .split_whitespace();
        if let Some(address) = words.next()
            && let Ok(address) = address.parse()
            && words.any(|word| word.eq_ignore_ascii_case(host))
        {
            addresses.push(address);
        }
    }
    addresses
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_read() {
        // A comment in Latin 1.
        let text = b"127.0.0.1 localhost\n# 10.0.0.1 ns\n10.0.0.2\tns.Example ns # B\xfcro\nfd00::2 ns\nns 10.0.0.3\n";
        let addresses: Vec<String> = of_hosts(text, "NS")
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(addresses, ["10.0.0.2", "fd00::2"]);
        assert!(of_hosts(text, "x").is_empty());
    }

    #[tokio::test]
    async fn look_ups_share_their_servers() {
        // A port that is closed.
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let recursor = socket.local_addr().unwrap().to_string();
        drop(socket);
        let sources = HostSources {
            with_nameservers: false,
            ..HostSources::new(&[recursor], OwnAddresses::default())
        };
        for _ in 0..2 {
            assert_eq!(sources.look_up("ns.no-such-host.test").await, None);
        }
        // Failures of one series are logged in summaries, not once for each look-up.
        let set = sources.forwarder.set();
        let tries: Vec<u64> = set
            .recursors
            .iter()
            .map(|recursor| recursor.counters.failed.tries())
            .collect();
        assert_eq!(tries, [4], "A and AAAA of both look-ups");
    }

    #[test]
    fn unencrypted_nameservers_see_few_names() {
        for (recursors, with_nameservers, of_recursors, by_address) in [
            (&[][..], true, true, 0),
            (&["192.0.2.1:53", "ns.test:53"], true, true, 1),
            (&["tls://192.0.2.1:853#ns.test"], false, false, 1),
            (&["tls://ns.test:853"], false, true, 0),
            (&["tls://ns.test:853", "192.0.2.1:53"], false, false, 1),
        ] {
            let recursors: Vec<String> = recursors.iter().map(ToString::to_string).collect();
            let own = OwnAddresses::default();
            let sources = HostSources::new(&recursors, own.clone());
            assert_eq!(sources.with_nameservers, with_nameservers, "{recursors:?}");
            assert_eq!(sources.recursors.len(), by_address, "{recursors:?}");
            let names = HostNames::of_recursors(&recursors, own.clone());
            let expected = format!("with_nameservers: {of_recursors}");
            assert!(format!("{names:?}").contains(&expected), "{recursors:?}");
            let names = HostNames::new(&recursors, own);
            let expected = format!("with_nameservers: {with_nameservers}");
            assert!(format!("{names:?}").contains(&expected), "{recursors:?}");
        }
    }

    #[test]
    fn hosts_have_addresses_and_names() {
        let text = b"10.0.0.1\n10.0.0.2 a b\nc 10.0.0.3\n10.0.0.4 #a\n#10.0.0.5 a\n::6\tx\tA\n\n";
        for (host, expected) in [
            ("a", &["10.0.0.2", "::6"][..]),
            ("B", &["10.0.0.2"]),
            ("c", &[]),
            ("10.0.0.3", &[]),
            ("#a", &[]),
        ] {
            let found: Vec<String> = of_hosts(text, host)
                .iter()
                .map(ToString::to_string)
                .collect();
            assert_eq!(found, expected, "{host}");
        }
    }

    /// Answers queries by UDP: two addresses of IPv4 with these TTLs if there are any, else one of IPv6.
    async fn serve(socket: tokio::net::UdpSocket, v4: Option<[u32; 2]>, v6: u32) {
        let mut buffer = [0; 512];
        loop {
            let (length, client) = socket.recv_from(&mut buffer).await.unwrap();
            let Parsed::Query(query) = parse(&buffer[..length]) else {
                panic!("a query")
            };
            let mut reply = query.message[..query.question_range().end].to_vec();
            reply[2..4].copy_from_slice(&[0x81, 0x80]);
            reply[11] = 0;
            let owner = &crate::message::QUESTION_NAME;
            let mut push = |rtype: u16, ttl, data: &[u8]| {
                assert!(crate::message::push_answer(
                    &mut reply, owner, rtype, ttl, data
                ));
            };
            match (query.question.qtype, v4) {
                (TYPE_A, Some([first, second])) => {
                    push(TYPE_A, first, &[192, 0, 2, 1]);
                    // Another type is no address.
                    push(TYPE_AAAA, 1, &[0; 16]);
                    push(TYPE_A, second, &[192, 0, 2, 2]);
                    // Nor is an additional record.
                    push(TYPE_A, 1, &[192, 0, 2, 3]);
                    reply[7] -= 1;
                    reply[11] += 1;
                }
                (TYPE_AAAA, None) => push(TYPE_AAAA, v6, &Ipv6Addr::LOCALHOST.octets()),
                _ => {}
            }
            socket.send_to(&reply, client).await.unwrap();
        }
    }

    #[tokio::test]
    async fn hosts_are_asked_for_both_families() {
        let v4 = [1, 2].map(|last| IpAddr::from([192, 0, 2, last])).to_vec();
        let v6 = vec![IpAddr::from(Ipv6Addr::LOCALHOST)];
        for (v4_ttls, v6_ttl, expected, seconds) in [
            (Some([300, 20]), 1, &v4, 20),
            (Some([20, 300]), 1, &v4, 20),
            (Some([2, 9]), 1, &v4, 5),
            (Some([86_400, 86_400]), 1, &v4, 600),
            (None, 40, &v6, 40),
        ] {
            let socket = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
            let recursor = socket.local_addr().unwrap().to_string();
            let server = tokio::spawn(serve(socket, v4_ttls, v6_ttl));
            let sources = HostSources {
                with_nameservers: false,
                ..HostSources::new(&[recursor], OwnAddresses::default())
            };
            // On a busy machine, the server may be too late for once.
            let looking = async {
                loop {
                    if let Some(found) = sources.look_up("ns.no-such-host.test").await {
                        break found;
                    }
                }
            };
            let found = tokio::time::timeout(Duration::from_secs(120), looking).await;
            let (addresses, ttl) = found.expect("the server replies within two minutes");
            assert_eq!(&addresses, expected);
            assert_eq!(ttl, Duration::from_secs(seconds));
            let names = HostNames::from_source(Box::new(sources), OwnAddresses::default());
            let name = Arc::new(names).follow("ns.no-such-host.test");
            let address = name.address(Duration::from_secs(600)).await;
            assert_eq!(address, Some(expected[0]));
            server.abort();
        }
        let none = HostSources {
            with_nameservers: false,
            ..HostSources::new(&[], OwnAddresses::default())
        };
        assert_eq!(none.look_up("ns.no-such-host.test").await, None);
        assert_eq!(none.look_up("a..b").await, None, "no name");
    }
}
