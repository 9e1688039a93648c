//! Shared parts of these tests: answers from a list, and a fast path in a namespace.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::unix::net::UnixStream,
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use dns_attacher::{Authority, ReadAuthority};
use dns_core::{
    config::XdpConfig,
    name::Name,
    resolve::{AllRunning, Checks, Existence, Health, Resolution},
};
use dns_fastpath::{Admission, AdmitAll, Arrival, FastPath, FastPathHandle, NameSource};
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::RecordType,
};
use whole_system_tests::{
    checksum::{checksum, pseudo},
    client,
    namespace::Namespace,
    pair::{read, v4},
    yardstick::{Hook, Yardstick},
};

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
        self.names
            .insert(name_of(name), Some(addresses.into_iter().collect()));
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
        Box::new(
            self.names
                .keys()
                .filter(|name| !self.unlisted.contains(name))
                .cloned(),
        )
    }

    fn resolve(&self, _health: &dyn Health, name: &Name) -> Option<Resolution> {
        let addresses = self.names.get(name)?;
        let existence = if addresses.is_some() {
            Existence::Found
        } else {
            Existence::NoSuchName
        };
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        for address in addresses.iter().flatten() {
            match address {
                IpAddr::V4(address) => v4.push(*address),
                IpAddr::V6(address) => v6.push(*address),
            }
        }
        Some(Resolution {
            existence,
            v4,
            v6,
            checks: Checks::default(),
        })
    }
}

pub(crate) fn name_of(text: &str) -> Name {
    text.parse().expect("tests write well-formed names")
}

/// Starts a fast path with an attacher in this process, for the caller's network namespace.
pub(crate) fn start_in_process(
    config: &XdpConfig,
    endpoints: &[SocketAddr],
    health: Arc<dyn Health + Send + Sync>,
    admission: Arc<dyn Admission>,
) -> Result<FastPath> {
    let (ours, servers) = UnixStream::pair()?;
    let authority = Authority {
        xdp: config.clone(),
        main: endpoints[0],
        listen: endpoints.to_vec(),
    };
    let read: ReadAuthority = Box::new(move || Ok(authority.clone()));
    thread::spawn(move || dns_attacher::serve(&ours, &read));
    Ok(FastPath::start(
        config,
        servers.into(),
        endpoints,
        health,
        admission,
    )?)
}

/// Starts a fast path in a namespace and waits until it answers.
pub(crate) fn start(
    namespace: &Namespace,
    config: &XdpConfig,
    endpoints: &[SocketAddr],
    answers: impl NameSource + 'static,
) -> Result<Arc<FastPath>> {
    let fast_path = namespace
        .run(|| start_in_process(config, endpoints, Arc::new(AllRunning), Arc::new(AdmitAll)))?
        .context("the fast path does not start")?;
    let fast_path = Arc::new(fast_path);
    let handle = handle_of(&fast_path);
    let answers: Arc<dyn NameSource> = Arc::new(answers);
    handle.install(&answers);
    wait(async {
        handle.flushed().await;
        fast_path.ready().await;
        // No server gives the replies that the short program leaves to it.
        while !fast_path.is_ready() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    Ok(fast_path)
}

pub(crate) fn handle_of(fast_path: &Arc<FastPath>) -> FastPathHandle {
    let handle = FastPathHandle::default();
    handle.fill(fast_path);
    handle
}

/// Runs a future of the fast path to completion.
pub(crate) fn wait<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime can be made")
        .block_on(future)
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
    read(
        from.run(|| {
            client::ask_raw_from(server, |client| unclear(query, client, server), patience)
        })?,
    )
}

/// Sets the one id in 65,536 for which the sum of the pseudo-header, which is the partial checksum,
/// equals the complete checksum.
fn unclear(mut query: Vec<u8>, client: SocketAddr, server: SocketAddr) -> Vec<u8> {
    let udp_len = 8 + u16::try_from(query.len()).expect("a short query");
    let pseudo = pseudo(client.ip(), server.ip(), udp_len);
    let unfinished = !checksum(&[&pseudo]);
    let udp = [client.port(), server.port(), udp_len, unfinished]
        .map(u16::to_be_bytes)
        .concat();
    query[..2].fill(0);
    let id = checksum(&[&pseudo, &udp, &query]);
    query[..2].copy_from_slice(&id.to_be_bytes());
    assert_eq!(checksum(&[&pseudo, &udp, &query]), 0);
    query
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

/// Reports enough queries to [`v4`] on an interface for it to be served.
pub(crate) fn deliver(fast_path: &FastPath, namespace: &Namespace, interface: &str) -> Result<()> {
    let ifindex = namespace.interface_index(interface)?;
    let clients = vec![IpAddr::from([192, 0, 2, 1])];
    fast_path.report(vec![Arrival {
        ifindex,
        endpoint: v4(),
        queries: 5,
        clients,
        more: false,
    }]);
    Ok(())
}

/// Attaches a native XDP program that passes every packet to an interface in a namespace; detached on
/// drop.
pub(crate) fn pass_program(namespace: &Namespace, interface: &str) -> Result<aya::Ebpf> {
    Yardstick::Pass.attach(Hook::Native, namespace, interface)
}
