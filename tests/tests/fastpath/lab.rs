//! Shared parts of the fast path tests: answers from a list, a fast path in a namespace, and
//! clients.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    process::Command,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use aya::programs::{SchedClassifier, TcAttachType, XdpMode};
use dns_core::{
    config::XdpConfig,
    name::Name,
    resolve::{AllRunning, Checks, Existence, Health, Resolution},
};
use dns_fastpath::{Arrival, Everything, FastPath, NameSource};
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::RecordType,
};
pub(crate) use whole_system_tests::bpffs::{Bpffs, config};
use whole_system_tests::{
    checksum::{checksum, pseudo},
    client,
    namespace::{End, Namespace, join},
    process::capture,
    yardstick::{Hook, Yardstick},
};

/// Timeout if a reply is expected.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// Timeout if no reply is expected.
pub(crate) const SHORT: Duration = Duration::from_millis(150);

/// A resolver that answers from a list.
#[derive(Clone, Default)]
pub(crate) struct List {
    /// Addresses by name; `None` if the name is in our zone but does not exist.
    names: BTreeMap<Name, Option<Vec<IpAddr>>>,
    /// Names that are published only after they were learned.
    unlisted: Vec<Name>,
}

impl List {
    /// Adds a name with these addresses.
    pub(crate) fn with(mut self, name: &str, addresses: impl IntoIterator<Item = IpAddr>) -> Self {
        self.names.insert(name_of(name), Some(addresses.into_iter().collect()));
        self
    }

    /// Adds a name with `count` addresses of each family.
    pub(crate) fn counted(self, name: &str, count: u16) -> Self {
        self.with(name, (0..count).map(v4_of).chain((0..count).map(v6_of)))
    }

    /// Adds an unlisted name with one address, which must be learned.
    pub(crate) fn unlisted(mut self, name: &str, address: IpAddr) -> Self {
        self.unlisted.push(name_of(name));
        self.with(name, [address])
    }

    /// Adds a nonexistent name in our zone.
    pub(crate) fn without(mut self, name: &str) -> Self {
        self.unlisted.push(name_of(name));
        self.names.insert(name_of(name), None);
        self
    }
}

impl NameSource for List {
    fn published_names(&self) -> Box<dyn Iterator<Item = Name> + '_> {
        Box::new(self.names.keys().filter(|name| !self.unlisted.contains(name)).cloned())
    }

    fn resolve(&self, _health: &dyn Health, name: &Name) -> Option<Resolution> {
        let addresses = self.names.get(name)?;
        let existence = if addresses.is_some() { Existence::Found } else { Existence::NoSuchName };
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        for address in addresses.iter().flatten() {
            match address {
                IpAddr::V4(address) => v4.push(*address),
                IpAddr::V6(address) => v6.push(*address),
            }
        }
        Some(Resolution { existence, v4, v6, checks: Checks::default() })
    }
}

pub(crate) fn name_of(text: &str) -> Name {
    text.parse().expect("tests write well-formed names")
}

/// Starts a fast path in a namespace and waits until it answers.
pub(crate) fn start(
    namespace: &Namespace,
    config: &XdpConfig,
    endpoints: &[SocketAddr],
    answers: impl NameSource + 'static,
) -> Result<FastPath> {
    let fast_path = namespace
        .run(|| FastPath::start_in_process(config, endpoints, Arc::new(AllRunning), Arc::new(Everything)))?
        .context("the fast path does not start")?;
    fast_path.publisher().install(Arc::new(answers));
    wait(async {
        fast_path.publisher().flushed().await;
        fast_path.ready().await;
    });
    Ok(fast_path)
}

/// Runs a future of the fast path to completion.
pub(crate) fn wait<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime can be made")
        .block_on(future)
}

/// Queries from inside a namespace; `None` on timeout.
pub(crate) fn ask(
    from: &Namespace,
    server: SocketAddr,
    name: &str,
    record_type: RecordType,
    edns: Option<u16>,
    patience: Duration,
) -> Result<Option<Message>> {
    let query = client::query(name, record_type, edns)?;
    let bytes = query.to_vec()?;
    let reply = read(from.run(|| client::ask_raw(server, &bytes, patience))?)?;
    if let Some(reply) = &reply {
        ensure!(reply.metadata.id == query.metadata.id, "a reply to another query");
    }
    Ok(reply)
}

/// Like [`ask`], with a query whose checksum field is ambiguous: complete or partial.
pub(crate) fn ask_unclear(
    from: &Namespace,
    server: SocketAddr,
    name: &str,
    record_type: RecordType,
    patience: Duration,
) -> Result<Option<Message>> {
    let query = client::query(name, record_type, Some(4096))?.to_vec()?;
    read(from.run(|| client::ask_raw_from(server, |client| unclear(query, client, server), patience))?)
}

/// Sets the one id in 65,536 for which the sum of the pseudo-header, which is the partial checksum,
/// equals the complete checksum.
fn unclear(mut query: Vec<u8>, client: SocketAddr, server: SocketAddr) -> Vec<u8> {
    let udp_len = 8 + u16::try_from(query.len()).expect("a short query");
    let pseudo = pseudo(client.ip(), server.ip(), udp_len);
    let unfinished = !checksum(&[&pseudo]);
    let udp = [client.port(), server.port(), udp_len, unfinished].map(u16::to_be_bytes).concat();
    query[..2].fill(0);
    let id = checksum(&[&pseudo, &udp, &query]);
    query[..2].copy_from_slice(&id.to_be_bytes());
    assert_eq!(checksum(&[&pseudo, &udp, &query]), 0);
    query
}

/// Returns whether the complete checksum of a query equals the sum of its pseudo-header, as a
/// partial checksum does.
pub(crate) fn looks_unfinished(query: &[u8], client: SocketAddr, server: SocketAddr) -> bool {
    let udp_len = 8 + u16::try_from(query.len()).expect("a short query");
    let pseudo = pseudo(client.ip(), server.ip(), udp_len);
    let udp = [client.port(), server.port(), udp_len, !checksum(&[&pseudo])].map(u16::to_be_bytes).concat();
    checksum(&[&pseudo, &udp, query]) == 0
}

/// Parses a reply; `None` on timeout.
fn read(reply: io::Result<Vec<u8>>) -> Result<Option<Message>> {
    match reply {
        Ok(reply) => Ok(Some(Message::from_vec(&reply)?)),
        Err(error)
            if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionRefused) =>
        {
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// Queries A and returns the addresses; `None` on timeout.
pub(crate) fn addresses(
    from: &Namespace,
    server: SocketAddr,
    name: &str,
    patience: Duration,
) -> Result<Option<Vec<IpAddr>>> {
    let reply = ask(from, server, name, RecordType::A, Some(1232), patience)?;
    Ok(reply.map(|reply| client::addresses(&reply)))
}

/// Checks that a reply holds only addresses of a name that [`List::counted`] gave `count` of them,
/// without duplicates.
pub(crate) fn see_own_addresses(reply: &Message, count: u16) -> Result<()> {
    let mut seen = BTreeSet::new();
    for address in client::addresses(reply) {
        let own = (0..count).any(|number| address == v4_of(number) || address == v6_of(number));
        ensure!(
            own && seen.insert(address),
            "{address} is not an address of a name with {count}, or occurs twice"
        );
    }
    Ok(())
}

/// Returns an IPv4 address of a name of [`List::counted`].
fn v4_of(number: u16) -> IpAddr {
    Ipv4Addr::from(0x0a00_0000 + u32::from(number)).into()
}

fn v6_of(number: u16) -> IpAddr {
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, number).into()
}

pub(crate) fn code(reply: &Message) -> ResponseCode {
    reply.metadata.response_code
}

/// A server and a client, joined by veth.
pub(crate) struct Pair {
    /// The server's namespace: interface `srv`, 169.254.0.2 and fd00::2.
    pub(crate) server: Namespace,
    /// The client's namespace: interface `cli`, 169.254.0.1 and fd00::1.
    pub(crate) client: Namespace,
}

impl Pair {
    pub(crate) fn new(label: &str) -> Result<Self> {
        let server = Namespace::new(&format!("{label}-s"))?;
        server.forward()?;
        let client = Namespace::new(&format!("{label}-c"))?;
        join(
            End { namespace: &server, interface: "srv", addresses: &["169.254.0.2/24", "fd00::2/64"] },
            End { namespace: &client, interface: "cli", addresses: &["169.254.0.1/24", "fd00::1/64"] },
        )?;
        Ok(Self { server, client })
    }
}

/// Reports enough queries to [`v4`] on an interface for it to be served.
pub(crate) fn deliver(fast_path: &FastPath, namespace: &Namespace, interface: &str) -> Result<()> {
    let ifindex = namespace.interface_index(interface)?;
    let clients = vec![IpAddr::from([192, 0, 2, 1])];
    fast_path.report(vec![Arrival { ifindex, endpoint: v4(), queries: 5, clients, more: false }]);
    Ok(())
}

/// Returns the server's IPv4 endpoint.
pub(crate) fn v4() -> SocketAddr {
    SocketAddr::from(([169, 254, 0, 2], 53))
}

/// Returns the server's IPv6 endpoint.
pub(crate) fn v6() -> SocketAddr {
    SocketAddr::from(([0xfd00, 0, 0, 0, 0, 0, 0, 2], 53))
}

/// Attaches a program that passes every packet to an interface in a namespace; detached on drop.
pub(crate) fn pass_program(namespace: &Namespace, interface: &str, mode: XdpMode) -> Result<aya::Ebpf> {
    let hook = if matches!(mode, XdpMode::Driver) { Hook::Native } else { Hook::Generic };
    Yardstick::Pass.attach(hook, namespace, interface)
}

/// Returns the XDP and tcx programs attached to the interfaces of a namespace (Debian 12's bpftool
/// does not show tcx).
pub(crate) fn attached(namespace: &Namespace) -> Result<Vec<String>> {
    let links = capture(Command::new("ip").args(["-n", namespace.name(), "-o", "link", "show"]))?;
    let mut found: Vec<String> =
        links.lines().filter(|line| line.contains("prog/xdp")).map(str::to_owned).collect();
    for line in links.lines() {
        let name = line.split([':', '@']).nth(1).context("ip shows number and name")?.trim().to_owned();
        let (_, programs) = namespace.run(|| SchedClassifier::query_tcx(&name, TcAttachType::Ingress))??;
        found.extend(
            programs.iter().map(|program| format!("{name}: {}", program.name_as_str().unwrap_or("?"))),
        );
    }
    Ok(found)
}
