//! Frames that the kernel would have dropped, from a client that writes its own headers: to a
//! loopback address, in a VLAN that is not served, to another machine's address.

use std::{
    io::{self, Read as _},
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use dns_common::counters::Outcome;
use dns_core::config::{HookMode, XdpConfig};
use hickory_proto::rr::RecordType;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use whole_system_tests::{
    bpffs::{Bpffs, config},
    checksum::checksum,
    client,
    namespace::Namespace,
    pair::{Pair, SHORT, TIMEOUT, v4},
    process::capture,
    requires,
};

use crate::lab::{List, pass_program, start};

/// Source port of the client.
const PORT: u16 = 40_053;

/// The VLAN that is served.
const SERVED_VLAN: u16 = 100;

/// Sends and receives complete frames on an interface.
struct Wire {
    /// A packet socket that receives every frame.
    socket: Socket,
    /// Ethernet address of the interface.
    own: [u8; 6],
}

impl Wire {
    /// Opens an interface in a namespace.
    fn new(namespace: &Namespace, interface: &str) -> Result<Self> {
        let (index, own) = (
            namespace.interface_index(interface)?,
            address_of(namespace, interface)?,
        );
        let socket = namespace
            .run(|| bind_to(index))?
            .context("a packet socket")?;
        Ok(Self { socket, own })
    }

    /// Sends a query for `one.bosh` to this Ethernet and IP address in this VLAN; returns whether a
    /// reply arrives in time.
    fn ask(
        &mut self,
        (to, ip): ([u8; 6], Ipv4Addr),
        vlan: Option<u16>,
        patience: Duration,
    ) -> Result<bool> {
        let query = client::query("one.bosh.", RecordType::A, None)?;
        self.socket
            .send(&frame(self.own, to, ip, vlan, &query.to_vec()?))?;
        let deadline = Instant::now() + patience;
        let mut buffer = [0; 2048];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            self.socket.set_read_timeout(Some(left))?;
            match (&self.socket).read(&mut buffer) {
                Ok(length) if is_reply(&buffer[..length], query.metadata.id) => return Ok(true),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Opens a packet socket on an interface.
fn bind_to(index: u32) -> io::Result<Socket> {
    let all = (libc::ETH_P_ALL as u16).to_be();
    let socket = Socket::new(
        Domain::PACKET,
        Type::RAW,
        Some(Protocol::from(i32::from(all))),
    )?;
    // SAFETY: the storage is larger than and aligned for a `sockaddr_ll`, and the length set is
    // that type's.
    let ((), address) = unsafe {
        SockAddr::try_init(|storage, length| {
            let address: *mut libc::sockaddr_ll = storage.cast();
            (*address).sll_family = libc::AF_PACKET as u16;
            (*address).sll_protocol = all;
            (*address).sll_ifindex = index as i32;
            *length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
            Ok(())
        })
    }?;
    socket.bind(&address)?;
    Ok(socket)
}

/// Returns the Ethernet address of an interface.
fn address_of(namespace: &Namespace, interface: &str) -> Result<[u8; 6]> {
    let mut cat = namespace.with_own_sysfs("cat");
    let text = capture(cat.arg(format!("/sys/class/net/{interface}/address")))?;
    let bytes = text
        .trim()
        .split(':')
        .map(|byte| u8::from_str_radix(byte, 16));
    let bytes: Vec<u8> = bytes.collect::<Result<_, _>>()?;
    bytes.try_into().ok().context("six bytes")
}

/// Builds the frame of a query.
fn frame(from: [u8; 6], to: [u8; 6], ip: Ipv4Addr, vlan: Option<u16>, message: &[u8]) -> Vec<u8> {
    let udp_len = 8 + message.len() as u16;
    let mut header = vec![0x45, 0];
    header.extend((20 + udp_len).to_be_bytes());
    header.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
    header.extend([169, 254, 0, 1]);
    header.extend(ip.octets());
    let sum = checksum(&[&header]);
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    let tag = vlan
        .map(|vlan| [[0x81, 0], vlan.to_be_bytes()].concat())
        .unwrap_or_default();
    // A UDP checksum of zero means that there is none (RFC 768).
    let udp = [PORT, 53, udp_len, 0].map(u16::to_be_bytes).concat();
    [&to[..], &from, &tag, &[8, 0], &header, &udp, message].concat()
}

/// Returns whether a frame is the reply to the query with this id.
fn is_reply(frame: &[u8], id: u16) -> bool {
    // The kernel removes the VLAN tag before it delivers a frame.
    let Some([0x08, 0x00, packet @ ..]) = frame.get(12..) else {
        return false;
    };
    let Some(udp) = packet.get(20..) else {
        return false;
    };
    packet[9] == 17
        && udp.get(..4) == Some(&[53_u16, PORT].map(u16::to_be_bytes).concat()[..])
        && udp.get(8..10) == Some(&id.to_be_bytes()[..])
}

#[test]
fn dropped_packets_are_not_answered() -> Result<()> {
    requires!(namespaces, bpf);
    let loopback = Ipv4Addr::LOCALHOST;
    for mode in [HookMode::Tc, HookMode::Native] {
        let (pair, bpffs) = (Pair::new("outside")?, Bpffs::new()?);
        // Native XDP_TX on a veth needs an XDP program on the other end.
        let _pass = match mode {
            HookMode::Native => Some(pass_program(&pair.client, "cli")?),
            _ => None,
        };
        let config = XdpConfig {
            vlans: vec![SERVED_VLAN],
            ..config(mode, &bpffs)
        };
        let names = List::default().with("one.bosh", [[10, 0, 0, 1].into()]);
        let endpoints = [v4(), (loopback, 53).into()];
        let fast_path = start(&pair.server, &config, &endpoints, names)?;
        let mut wire = Wire::new(&pair.client, "cli")?;
        let here = address_of(&pair.server, "srv")?;
        let mut elsewhere = here;
        elsewhere[5] ^= 1;
        let address = Ipv4Addr::new(169, 254, 0, 2);
        for (what, to, vlan, answered) in [
            ("as it should be", (here, address), None, true),
            (
                "in a VLAN that is served",
                (here, address),
                Some(SERVED_VLAN),
                true,
            ),
            (
                "with a priority, in a VLAN that is served",
                (here, address),
                Some(0xe000 | SERVED_VLAN),
                true,
            ),
            ("in another VLAN", (here, address), Some(200), false),
            ("to another machine", (elsewhere, address), None, false),
            ("to all", ([0xff; 6], address), None, false),
            ("to a loopback address", (here, loopback), None, false),
        ] {
            let patience = if answered { TIMEOUT } else { SHORT };
            for _ in 0..3 {
                ensure!(
                    wire.ask(to, vlan, patience)? == answered,
                    "{what}, mode {mode:?}"
                );
            }
        }
        let counters = fast_path.counters();
        ensure!(
            counters.hits() == 3 * 3,
            "{mode:?}: {} hits",
            counters.hits()
        );
        ensure!(
            counters.outcome(Outcome::NotOurs) >= 4 * 3,
            "{mode:?}: passed queries are counted"
        );
        // Address changes of the interface are followed.
        pair.server.ip("link set srv address 02:00:00:00:00:99")?;
        let here = [2, 0, 0, 0, 0, 0x99];
        whole_system_tests::process::wait_until("the new address", TIMEOUT, || {
            matches!(wire.ask((here, address), None, SHORT), Ok(true))
        })?;
        fast_path.stop();
    }
    Ok(())
}
