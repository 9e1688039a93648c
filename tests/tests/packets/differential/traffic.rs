//! Random frames of clients, and the replies to them.

use std::{
    collections::BTreeMap,
    io::ErrorKind,
    mem::MaybeUninit,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use anyhow::{Context, Result};
use fastrand::Rng;
use socket2::{Domain, Protocol, SockAddr, SockAddrStorage, Socket, Type};
use whole_system_tests::namespace::Namespace;

use super::set_up::{CLIENT_MAC, SERVER_MAC, SetUp};
use crate::packet::{A, AAAA, Datagram, Opt, Query};

/// Sizes of the groups in the records.
pub(super) const GROUPS: [u16; 4] = [1, 3, 20, 60];

/// Silence after which no further reply is expected.
const SILENCE: Duration = Duration::from_millis(40);

/// Port of the server, in replies.
const PORT: u16 = 53;

/// Clients: two on the link, one beyond it, and over IPv6.
const CLIENTS: [IpAddr; 5] = [
    IpAddr::V4(Ipv4Addr::new(10, 9, 0, 2)),
    IpAddr::V4(Ipv4Addr::new(10, 9, 0, 3)),
    IpAddr::V4(Ipv4Addr::new(198, 51, 100, 7)),
    IpAddr::V6(Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, 2)),
    IpAddr::V6(Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, 3)),
];

/// Addresses of the server, and one of another machine.
const SERVERS: [IpAddr; 5] = [
    IpAddr::V4(Ipv4Addr::new(169, 254, 0, 2)),
    IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1)),
    IpAddr::V4(Ipv4Addr::new(8, 8, 8, 8)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2)),
    IpAddr::V6(Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, 1)),
];

/// Senders that the kernel refuses, or may refuse.
const BAD_SENDERS: [&str; 12] = [
    "0.0.0.0",
    "127.0.0.1",
    "224.0.0.1",
    "255.255.255.255",
    "10.9.0.1",
    "10.9.0.255",
    "169.254.0.2",
    "::",
    "::1",
    "::ffff:10.9.0.2",
    "ff02::1",
    "fd09::1",
];

/// Identifies a reply: its receiver, port and DNS id.
pub(super) type Key = (IpAddr, u16, u16);

/// A reply without the parts in which two correct replies may differ: the order of answers, and the selection
/// from too many addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    from: IpAddr,
    length: usize,
    /// Id, flags and counts.
    header: [u8; 12],
    /// Answers of a complete reply, sorted.
    answers: Vec<Vec<u8>>,
}

/// A client's frame.
#[derive(Clone, Debug)]
pub(super) struct Frame {
    /// DNS id of the query.
    pub(super) id: u16,
    bytes: Vec<u8>,
}

impl Frame {
    pub(super) fn is_v4(&self) -> bool {
        self.bytes[12..14] == [8, 0]
    }
}

/// The link of a client, for whole frames.
pub(super) struct Wire {
    socket: Socket,
    address: SockAddr,
}

impl Wire {
    /// Opens the client's interface.
    pub(super) fn open(client: &Namespace, set_up: &SetUp) -> Result<Self> {
        let index = client.interface_index(set_up.client_interface())?;
        let protocol = (libc::ETH_P_ALL as u16).to_be();
        let mut storage = SockAddrStorage::zeroed();
        // SAFETY: a sockaddr_ll is one of the addresses that the storage is made for.
        let address = unsafe { storage.view_as::<libc::sockaddr_ll>() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = protocol;
        address.sll_ifindex = index.cast_signed();
        // SAFETY: family and length belong to a sockaddr_ll.
        let address =
            unsafe { SockAddr::new(storage, size_of::<libc::sockaddr_ll>() as libc::socklen_t) };
        let socket = client.run(|| -> std::io::Result<Socket> {
            let socket = Socket::new(
                Domain::PACKET,
                Type::RAW,
                Some(Protocol::from(i32::from(protocol))),
            )?;
            socket.bind(&address)?;
            socket.set_recv_buffer_size(4 << 20)?;
            Ok(socket)
        })??;
        socket.set_read_timeout(Some(SILENCE))?;
        Ok(Self { socket, address })
    }

    /// Sends frames, except frames too long for the interface's MTU.
    pub(super) fn send(&self, frames: &[Frame]) -> Result<()> {
        for frame in frames {
            match self.socket.send_to(&frame.bytes, &self.address) {
                Ok(_) => {}
                Err(error)
                    if matches!(error.raw_os_error(), Some(libc::EMSGSIZE | libc::EINVAL)) => {}
                Err(error) => return Err(error).context("sending a frame"),
            }
        }
        Ok(())
    }

    /// Receives replies until none arrives for [`SILENCE`].
    pub(super) fn receive(&self) -> Result<BTreeMap<Key, Reply>> {
        let mut buffer = vec![MaybeUninit::uninit(); 16_384];
        let (mut replies, mut fragments) = (BTreeMap::new(), Fragments::default());
        loop {
            let (length, from) = match self.socket.recv_from(&mut buffer) {
                Ok(received) => received,
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
                {
                    return Ok(replies);
                }
                Err(error) => return Err(error.into()),
            };
            // SAFETY: the address of a packet socket is a sockaddr_ll.
            let from = unsafe { &*from.as_ptr().cast::<libc::sockaddr_ll>() };
            if from.sll_pkttype == libc::PACKET_OUTGOING {
                continue;
            }
            // SAFETY: the kernel has written these bytes.
            let frame: Vec<u8> = buffer[..length]
                .iter()
                .map(|byte| unsafe { byte.assume_init() })
                .collect();
            if let Some((from, to, udp)) = fragments.take(&frame)
                && let Some((key, reply)) = read(from, to, &udp)
            {
                replies.entry(key).or_insert(reply);
            }
        }
    }
}

/// Datagrams of which fragments have arrived, by addresses and id.
#[derive(Default)]
struct Fragments(BTreeMap<(IpAddr, IpAddr, u32), Parts>);

/// The fragments of a datagram.
#[derive(Default)]
struct Parts {
    by_offset: BTreeMap<usize, Vec<u8>>,
    /// Length of the datagram, known from its last fragment.
    length: Option<usize>,
}

impl Fragments {
    /// Returns the UDP datagram that a frame contains or completes, and its addresses.
    fn take(&mut self, frame: &[u8]) -> Option<(IpAddr, IpAddr, Vec<u8>)> {
        let half = |at: usize| Some(u16::from_be_bytes(*frame.get(at..)?.first_chunk()?));
        let (from, to, id, offset, more, udp) = match half(12)? {
            0x0800 => {
                let header = usize::from(frame.get(14)? & 15) * 4;
                let end = 14 + usize::from(half(16)?);
                let address = |at: usize| Some(IpAddr::from(*frame.get(at..)?.first_chunk::<4>()?));
                if *frame.get(23)? != 17 {
                    return None;
                }
                let place = half(20)?;
                let part = frame.get(14 + header..end)?;
                (
                    address(26)?,
                    address(30)?,
                    half(18)?.into(),
                    place & 0x1fff,
                    place & 0x2000 != 0,
                    part,
                )
            }
            0x86dd => {
                let address =
                    |at: usize| Some(IpAddr::from(*frame.get(at..)?.first_chunk::<16>()?));
                let end = 54 + usize::from(half(18)?);
                match *frame.get(20)? {
                    17 => (address(22)?, address(38)?, 0, 0, false, frame.get(54..end)?),
                    44 if *frame.get(54)? == 17 => {
                        let id = u32::from_be_bytes(*frame.get(58..)?.first_chunk()?);
                        let place = half(56)?;
                        (
                            address(22)?,
                            address(38)?,
                            id,
                            place >> 3,
                            place & 1 != 0,
                            frame.get(62..end)?,
                        )
                    }
                    _ => return None,
                }
            }
            _ => return None,
        };
        let offset = usize::from(offset) * 8;
        if offset == 0 && !more {
            return Some((from, to, udp.to_vec()));
        }
        let parts = self.0.entry((from, to, id)).or_default();
        parts.by_offset.insert(offset, udp.to_vec());
        if !more {
            parts.length = Some(offset + udp.len());
        }
        let joined: Vec<u8> = parts.by_offset.values().flatten().copied().collect();
        (parts.length == Some(joined.len())).then_some((from, to, joined))
    }
}

/// Reads a reply of the server.
fn read(from: IpAddr, to: IpAddr, udp: &[u8]) -> Option<(Key, Reply)> {
    let half = |at: usize| Some(u16::from_be_bytes(*udp.get(at..)?.first_chunk()?));
    if half(0)? != PORT {
        return None;
    }
    let message = udp.get(8..)?;
    let header: [u8; 12] = *message.first_chunk()?;
    let is_cut = header[2] & 2 != 0;
    let count = usize::from(u16::from_be_bytes([header[6], header[7]]));
    let mut answers = if is_cut {
        Vec::new()
    } else {
        answers(message, count)
    };
    answers.sort();
    let id = u16::from_be_bytes([header[0], header[1]]);
    Some((
        (to, half(2)?, id),
        Reply {
            from,
            length: message.len(),
            header,
            answers,
        },
    ))
}

/// Splits the answer section after one question.
fn answers(message: &[u8], count: usize) -> Vec<Vec<u8>> {
    let mut at = 12;
    while message
        .get(at)
        .is_some_and(|&label| label != 0 && label < 64)
    {
        at += 1 + usize::from(message[at]);
    }
    at += 5;
    let mut found = Vec::new();
    for _ in 0..count {
        // The owner is a pointer; then type, class, TTL and the length of the data.
        let Some(length) = message
            .get(at + 10..)
            .and_then(|rest| rest.first_chunk::<2>())
        else {
            break;
        };
        let end = at + 12 + usize::from(u16::from_be_bytes(*length));
        found.extend(message.get(at..end).map(<[u8]>::to_vec));
        at = end;
    }
    found
}

/// Returns the frame of a datagram between client and server.
fn frame(datagram: &Datagram) -> Vec<u8> {
    let mut frame = datagram.frame();
    frame[..6].copy_from_slice(&SERVER_MAC);
    frame[6..12].copy_from_slice(&CLIENT_MAC);
    frame
}

/// Returns a valid query of every client to every address of its family.
pub(super) fn every_valid_frame() -> Vec<Frame> {
    let mut frames = Vec::new();
    for (number, client) in CLIENTS.into_iter().enumerate() {
        for server in SERVERS
            .into_iter()
            .filter(|server| server.is_ipv4() == client.is_ipv4())
        {
            for group in GROUPS {
                let id = frames.len() as u16;
                let query = Query {
                    id,
                    ..Query::new(&format!("q-s0.q-g{group}.bosh"), A)
                };
                let query = query.opt(Opt::new(1232)).bytes();
                let port = 30_000 + number as u16;
                let datagram = Datagram {
                    from: (client, port),
                    to: (server, PORT),
                    ..Datagram::v4(query)
                };
                frames.push(Frame {
                    id,
                    bytes: frame(&datagram),
                });
            }
        }
    }
    frames
}

/// Returns frames that the program passes to the kernel: the outcome that it counts, and whether the
/// kernel drops them.
pub(super) fn refused_frames() -> [(&'static str, bool, Vec<Frame>); 3] {
    let query = |id| {
        Query {
            id,
            ..Query::new("q-s0.q-g3.bosh", A)
        }
        .bytes()
    };
    let from = |sender: IpAddr, port: u16, id: u16| {
        let to = if sender.is_ipv4() {
            SERVERS[0]
        } else {
            SERVERS[3]
        };
        let datagram = Datagram {
            from: (sender, port),
            to: (to, PORT),
            ..Datagram::v4(query(id))
        };
        Frame {
            id,
            bytes: frame(&datagram),
        }
    };
    let bad = BAD_SENDERS.iter().filter_map(|text| text.parse().ok());
    let mut senders: Vec<Frame> = bad
        .zip(1..)
        .map(|(sender, id)| from(sender, 40_000, id))
        .collect();
    senders.extend([from(CLIENTS[0], 0, 101), from(CLIENTS[3], 0, 102)]);
    let mut of_many = from(CLIENTS[0], 40_000, 103);
    of_many.bytes[6..12].fill(0xff);
    // Of the IP header over IPv4, then of UDP, and none over IPv6.
    let mut checksums = vec![from(CLIENTS[0], 40_000, 111), from(CLIENTS[0], 40_000, 112)];
    checksums.extend([from(CLIENTS[3], 40_000, 113), from(CLIENTS[3], 40_000, 114)]);
    checksums[0].bytes[24] ^= 0x10;
    checksums[1].bytes[40] ^= 0x10;
    checksums[2].bytes[60] ^= 0x10;
    checksums[3].bytes[60..62].fill(0);
    // Only the kernel knows these: it has delivered the two networks since Linux 5.3.
    let odd: [IpAddr; 2] = [
        Ipv4Addr::new(0, 1, 2, 3).into(),
        Ipv4Addr::new(240, 0, 0, 1).into(),
    ];
    let odd = vec![
        of_many,
        from(odd[0], 40_000, 104),
        from(odd[1], 40_000, 105),
    ];
    [
        ("bad_sender", true, senders),
        ("bad_sender", false, odd),
        ("bad_checksum", true, checksums),
    ]
}

/// Returns a frame that is valid, or invalid in one or several ways.
pub(super) fn random_frame(id: u16, rng: &mut Rng) -> Frame {
    let group = GROUPS[rng.usize(..GROUPS.len())];
    let name = match rng.u8(..12) {
        0 => "nobody.bosh".to_owned(),
        1 => format!("Q-s0.q-G{group}.boSH"),
        _ => format!("q-s0.q-g{group}.bosh"),
    };
    let kind = [A, A, A, A, AAAA, 33, 255][rng.usize(..7)];
    let mut query = Query {
        id,
        ..Query::new(&name, kind)
    };
    if rng.bool() {
        query.opt = Some(Opt::new([100, 512, 1232, 4096][rng.usize(..4)]));
    }
    let v6 = rng.u8(..3) == 0;
    let pick = |rng: &mut Rng, all: &[IpAddr]| {
        let all: Vec<IpAddr> = all
            .iter()
            .copied()
            .filter(|address| address.is_ipv6() == v6)
            .collect();
        all[rng.usize(..all.len())]
    };
    let (mut from, to) = (pick(rng, &CLIENTS), pick(rng, &SERVERS));
    let is_bad = rng.u8(..10) == 0;
    if is_bad {
        let bad: Vec<IpAddr> = BAD_SENDERS
            .iter()
            .filter_map(|text| text.parse().ok())
            .collect();
        from = pick(rng, &bad);
    }
    let from_port = if rng.u8(..30) == 0 {
        0
    } else {
        rng.u16(1024..)
    };
    let to_port = if rng.u8(..20) == 0 {
        [54, 5353][rng.usize(..2)]
    } else {
        PORT
    };
    let mut datagram = Datagram {
        from: (from, from_port),
        to: (to, to_port),
        ..Datagram::v4(query.bytes())
    };
    if rng.u8(..20) == 0 {
        datagram.tags = vec![(0x8100, rng.u16(..8))];
    }
    if rng.u8(..8) == 0 {
        datagram.padding = rng.usize(..40);
    }
    let mut frame = frame(&datagram);
    match rng.u8(..24) {
        0 => frame[..6].fill(0xff),
        1 => frame[5] ^= 7,
        2 => frame[..6].copy_from_slice(&[1, 0, 0x5e, 0, 0, 1]),
        3 => frame[6..12].fill(0xff),
        // Another sender on the same link.
        4 => frame[11] ^= 7,
        5..=7 => {
            // Two changes may leave the checksum correct. A sender at another address gets no reply from
            // the kernel, which does not find its Ethernet address.
            let source = 14 + 4 * datagram.tags.len() + if v6 { 8 } else { 12 };
            let source = source..source + if v6 { 16 } else { 4 };
            for _ in 0..rng.usize(1..4) {
                let (place, bit) = (rng.usize(12..frame.len()), rng.u8(..8));
                if !source.contains(&place) {
                    frame[place] ^= 1 << bit;
                }
            }
        }
        8 => frame.truncate(rng.usize(42..=frame.len())),
        _ => {}
    }
    Frame { id, bytes: frame }
}
