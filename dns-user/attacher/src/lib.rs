//! The privileged side of the fast path: loads, pins and attaches the programs, and reads the kernel's network state to
//! decide where. Whatever of the server needs CAP_BPF, CAP_NET_ADMIN or CAP_PERFMON is in this crate, and no other crate of
//! the server links a loader of programs (`deny.toml`).
//!
//! It never reads from the network; its only peer is the server. The server calls two functions of this crate:
//! [`detach_all`] at its start, before it gives up its capabilities, and [`InterfaceKinds`], a question to the kernel that
//! needs none.
//!
//! # Capabilities
//!
//! Linux 5.8 or later. The last two are given up before the first session.
//!
//! | Capability | Needed for |
//! |---|---|
//! | CAP_BPF | creating maps, loading programs, opening pins ([`bpf`]) |
//! | CAP_NET_ADMIN | attaching programs ([`bpf`]), qdiscs and filters, IPsec policies and nftables ([`attach`](mod@attach)) |
//! | CAP_PERFMON | loading programs that compare pointers, as the verifier demands |
//! | CAP_SYS_ADMIN | mounting a bpffs ([`prepare_pins`]) and naming another program on an interface; not needed later |
//! | CAP_CHOWN | giving the folder of pins to `xdp.attach_user` ([`prepare_pins`]) |
//!
//! # System calls
//!
//! Its seccomp filter (`dns_kit::sandbox`) permits the server's system calls, bpf(2) and membarrier(2). Calls that concern the
//! kernel's network:
//!
//! | Call | Where |
//! |---|---|
//! | bpf(2): maps, programs, links, pins, information about them | [`bpf`], and nowhere else |
//! | membarrier(2): the end of an RCU grace period | [`bpf`] |
//! | netlink: links, addresses, routes, qdiscs and filters (`NETLINK_ROUTE`), nftables and sets (`NETLINK_NETFILTER`), IPsec policies (`NETLINK_XFRM`), owners of sockets (`NETLINK_SOCK_DIAG`) | `attach/netlink.rs` opens the sockets |
//! | getsockopt(2) of a datagram socket: tables of iptables | `attach/rules/xtables.rs` |
//! | mmap(2) of `SCOPE`, `COUNTERS` and a predecessor's `CONTROL` | [`scope`], [`dns_fastpath::map`] |
//! | openat(2), mkdirat, unlinkat, renameat, fchownat, mount(2) on a bpffs, following no symbolic link | `attach/pins.rs` |
//! | sendmsg(2) with descriptors, recvmsg, SO_PEERCRED on the server's socket | [`dns_fastpath::protocol`] |
//!
//! # Messages
//!
//! Lines of JSON on a unix socket, defined by [`dns_fastpath::protocol`] and executed by `service/session.rs`. A line has at
//! most 1 MiB, the first one five seconds.
//!
//! | From the server | Effect |
//! |---|---|
//! | `Request`: layout, addresses | addresses that the configuration names are served ([`Authority`]); maps are created and their descriptors sent, or the reason for a refusal |
//! | `Listen` | replaces the addresses, within the same authority |
//! | `Arrived` | opens and closes interfaces (`attach/gate.rs`) |
//! | `Filled` | attaches, pins, takes over a predecessor's links |
//! | `Grace` | membarrier(2) |
//! | `Stop` | detaches, or leaves everything to a successor |
//!
//! To the server: descriptors of `NAMES`, `ENTRIES`, `ANSWER_NAMES`, `ANSWER_ENTRIES`, `CONTROL`, `COUNTERS` and `TAP`, and of a
//! predecessor's `NAMES` and `ENTRIES`; then `Status`, `GraceOver` and `Watching`.
//!
//! # Files
//!
//! | File | Why |
//! |---|---|
//! | config.json and the addresses files | the authority, read again at `Request` and `Listen` ([`ReadAuthority`]) |
//! | `xdp.bpffs` | pins: links and maps outlive the process |
//! | `xdp.attach_socket` | created, for servers of `xdp.user` |
//! | `/proc/thread-self/net/ip_tables_names`, `ip6_tables_names`; `/sys/module` | the legacy tables that exist |
//! | `/proc/thread-self/net/snmp`, `snmp6` | datagrams that full queues lost: they excuse a lost probe |
//! | `/proc/thread-self/ns/net`, `/proc/self/fd` | the name of the folder of pins; folders by their descriptors |
//! | `/sys/devices/system/cpu/possible` | the number of counters |
//!
//! # Modules
//!
//! * [`process`]: `bosh-dns-xdp attach`, from its start with all privileges to its work with three; [`standby`] replaces it
//!   if it is killed.
//! * [`service`]: the socket and the sessions of servers.
//! * [`attach`](mod@attach): the programs on the interfaces; a thread attaches them once the maps are filled.
//! * [`object`] loads the maps, [`programs`] loads each program once it is needed, both from an [`image`]; [`bpf`]
//!   holds the system calls; [`scope`]: the map `SCOPE`, which only the attacher writes.
//! * [`mailbox`]: channels to threads that wait in poll(2).

mod attach;
mod bpf;
mod image;
mod mailbox;
mod object;
mod process;
mod programs;
mod scope;
mod service;
mod standby;

use std::{
    io,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use self::attach::{
    attachment::{self, Filters},
    netlink::{Link, Socket},
    pins::Pins,
    rules::{Device, Facts, PacketFilter},
};
pub use self::{
    attach::{pins::FolderState, topology::InterfaceKinds},
    process::{attach, prepare_pins},
    service::{Authority, ReadAuthority, serve},
};
use dns_core::config::XdpConfig;

/// The BPF programs, built from `dns-ebpf` by the build script.
pub const OBJECT: &[u8] = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/dns-ebpf"))).0;

/// Numbers in an ELF file are read where they are.
#[repr(align(8))]
struct Aligned<T: ?Sized>(T);

/// Adds to an error what was being done.
fn during(what: &str, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

/// Links and pins that [`detach_all`] removed.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Detached {
    /// Number of XDP and tcx links removed.
    pub links: usize,
    /// Number of clsact filters removed.
    pub filters: usize,
    /// The folder of pins.
    pub folder: PathBuf,
    /// State of the folder afterwards.
    pub folder_state: FolderState,
}

/// Removes everything that a server at this address, running or not, left attached in the caller's network namespace.
pub fn detach_all(config: &XdpConfig, main: SocketAddr) -> io::Result<Detached> {
    let pins = Pins::at(&config.bpffs, main).map_err(|error| during("finding the pins", error))?;
    // Its pins belong to xdp.attach_user, which may detach any link itself.
    let attacher = config
        .attach_user
        .as_deref()
        .and_then(|name| nix::unistd::User::from_name(name).ok().flatten());
    // Links before the folder, which their pins would keep.
    let mut detached_links = 0;
    for link in pins.pinned_links(attacher.map(|user| user.uid)) {
        attachment::drop_predecessor(link);
        detached_links += 1;
    }
    // A folder that cannot be removed keeps no filter from being removed.
    let folder_state = pins
        .remove()
        .map_err(|error| during("removing the pins", error));
    let mut netlink = Socket::requests().map_err(|error| during("asking netlink", error))?;
    let links = netlink
        .links()
        .map_err(|error| during("listing the interfaces", error))?;
    let detached_filters = detach_filters(&Filters::of(main), &links, &mut netlink)?;
    Ok(Detached {
        links: detached_links,
        filters: detached_filters,
        folder_state: folder_state?,
        folder: pins.folder,
    })
}

/// Removes our filters from these interfaces; returns their number. The first error is returned after a look at each
/// interface.
fn detach_filters(filters: &Filters, links: &[Link], netlink: &mut Socket) -> io::Result<usize> {
    let mut detached = 0;
    let mut problem = None;
    // Filters have no pins: only a look at each interface finds them.
    for link in links {
        match filters.remove(link.ifindex, netlink) {
            Ok(removed) => detached += usize::from(removed),
            // The interface has gone since it was listed, and its filter with it.
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {}
            Err(error) => {
                let error = during(&format!("removing the filter of {}", link.name), error);
                problem.get_or_insert(error);
            }
        }
    }
    match problem {
        Some(error) => Err(error),
        None => Ok(detached),
    }
}

/// Returns the packet filter's objection, in the calling thread's network namespace, to answering
/// queries of `client` for `endpoint` on an interface; `None` without one.
pub fn filter_objection(
    interface: &str,
    client: IpAddr,
    endpoint: SocketAddr,
) -> io::Result<Option<String>> {
    let mut netlink = Socket::requests()?;
    let links = netlink.links()?;
    let local = netlink.addresses()?;
    let link = links
        .iter()
        .find(|link| link.name == interface)
        .ok_or(io::ErrorKind::NotFound)?;
    let device = Device::of(link, endpoint.ip(), &local);
    let objection = PacketFilter::read()?.objection(&device, client, endpoint, &Facts::default());
    Ok(objection.map(|objection| objection.to_string()))
}
