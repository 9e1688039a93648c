//! Queries, names with types, and their Ethernet frames.

use std::{
    fmt, fs,
    net::{Ipv4Addr, SocketAddrV4},
    path::Path,
};

use anyhow::{Context as _, Result, bail, ensure};
use bench_programs::generator::{FIRST_PORT, MAX_FRAME_LEN, PORTS};
use dns_core::{
    catalog::{AliasFiles, Records, Snapshot},
    listing::published_names,
    name::Name,
    wire::{CLASS_IN, TYPE_OPT},
};
use hickory_proto::rr::RecordType;

/// The kernel's ARP table, with the interface in the sixth column.
const ARP: &str = "/proc/net/arp";

/// The way of the frames.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    /// Hardware addresses of the receiver and of our interface.
    hardware: [[u8; 6]; 2],
    source: Ipv4Addr,
    server: SocketAddrV4,
}

impl Route {
    /// Looks up hardware addresses; `next_hop` is the receiver's, if known.
    pub(crate) fn of(
        interface: &str,
        next_hop: Option<&str>,
        source: Ipv4Addr,
        server: SocketAddrV4,
    ) -> Result<Self> {
        let own = own_address(interface)
            .with_context(|| format!("{interface:?} is no interface with an Ethernet address"))?;
        let theirs = match next_hop {
            Some(text) => parse_address(text)
                .with_context(|| format!("--mac: {text:?} is no hardware address"))?,
            None => {
                let table = fs::read_to_string(ARP).context(ARP)?;
                of_table(&table, interface, *server.ip()).with_context(|| {
                    format!(
                        "{} is no neighbour at {interface}: name the router's hardware address with --mac, if the \
                         server and every link up to it are yours to load",
                        server.ip()
                    )
                })?
            }
        };
        Ok(Self {
            hardware: [theirs, own],
            source,
            server,
        })
    }
}

/// Returns the hardware address of an interface of this machine.
fn own_address(interface: &str) -> Option<[u8; 6]> {
    let mut all = nix::ifaddrs::getifaddrs()
        .ok()?
        .filter(|found| found.interface_name == interface);
    all.find_map(|found| found.address?.as_link_addr()?.addr())
}

/// Returns the hardware address of a neighbour in the text of [`ARP`].
fn of_table(table: &str, interface: &str, address: Ipv4Addr) -> Option<[u8; 6]> {
    table.lines().skip(1).find_map(|line| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let [ip, _, _, hardware, _, device] = columns[..] else {
            return None;
        };
        let found = ip.parse() == Ok(address) && device == interface;
        // An unanswered request leaves zeros.
        found
            .then(|| parse_address(hardware))
            .flatten()
            .filter(|hardware| *hardware != [0; 6])
    })
}

fn parse_address(text: &str) -> Option<[u8; 6]> {
    let bytes: Vec<u8> = text
        .split(':')
        .map(|part| u8::from_str_radix(part, 16).ok())
        .collect::<Option<_>>()?;
    bytes.try_into().ok()
}

/// Returns a frame for each query, from [`PORTS`] ports in turn.
pub(crate) fn frames(queries: &[Query], route: &Route, edns: Option<u16>) -> Result<Vec<Vec<u8>>> {
    let mut frames = Vec::with_capacity(queries.len());
    for (number, query) in queries.iter().enumerate() {
        let number = number as u16;
        let source = SocketAddrV4::new(route.source, FIRST_PORT + number % PORTS);
        let frame = frame(
            route.hardware,
            source,
            route.server,
            &query.message(number, edns),
        );
        if frame.len() > MAX_FRAME_LEN {
            bail!("{query}: too long; the generator sends frames of at most {MAX_FRAME_LEN} bytes");
        }
        frames.push(frame);
    }
    ensure!(!frames.is_empty(), "no queries");
    Ok(frames)
}

/// Builds an Ethernet frame with IPv4 (DF, TTL 64) and UDP; `hardware` is receiver and sender.
fn frame(hardware: [[u8; 6]; 2], from: SocketAddrV4, to: SocketAddrV4, message: &[u8]) -> Vec<u8> {
    const IP: usize = 14;
    const UDP: usize = IP + 20;
    // Shorter than MAX_FRAME_LEN, or refused above.
    let udp_len = (8 + message.len()) as u16;
    let mut frame = [&hardware.concat()[..], &[8, 0, 0x45, 0]].concat();
    frame.extend((20 + udp_len).to_be_bytes());
    frame.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
    frame.extend([from.ip().octets(), to.ip().octets()].concat());
    let sum = !folded(sum_of(&frame[IP..]));
    frame[IP + 10..IP + 12].copy_from_slice(&sum.to_be_bytes());
    frame.extend(
        [
            from.port().to_be_bytes(),
            to.port().to_be_bytes(),
            udp_len.to_be_bytes(),
            [0, 0],
        ]
        .concat(),
    );
    frame.extend_from_slice(message);
    // The pseudo-header has both addresses, the protocol and the length.
    let total = sum_of(&frame[IP + 12..UDP]) + 17 + u32::from(udp_len) + sum_of(&frame[UDP..]);
    // Zero would mean no checksum (RFC 768).
    let sum = match !folded(total) {
        0 => 0xffff,
        sum => sum,
    };
    frame[UDP + 6..UDP + 8].copy_from_slice(&sum.to_be_bytes());
    frame
}

/// Sums 16-bit words (RFC 1071).
fn sum_of(bytes: &[u8]) -> u32 {
    bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)))
        .sum()
}

fn folded(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    (sum + (sum >> 16)) as u16
}

/// A name and a type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Query {
    name: Name,
    /// The name in wire format with its letters as written: clients that randomize letters (0x20) are measured with
    /// what they send.
    wire: Vec<u8>,
    record_type: RecordType,
}

impl fmt::Display for Query {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.record_type)
    }
}

impl Query {
    /// Returns the message as stub resolvers send it, with an OPT of this size if there is one.
    pub(crate) fn message(&self, id: u16, edns: Option<u16>) -> Vec<u8> {
        let mut message = id.to_be_bytes().to_vec();
        // RD; one question.
        message.extend_from_slice(&[1, 0, 0, 1, 0, 0, 0, 0, 0, u8::from(edns.is_some())]);
        message.extend_from_slice(&self.wire);
        message.extend_from_slice(&u16::from(self.record_type).to_be_bytes());
        message.extend_from_slice(&CLASS_IN.to_be_bytes());
        if let Some(size) = edns {
            message.push(0);
            message.extend_from_slice(&TYPE_OPT.to_be_bytes());
            message.extend_from_slice(&size.to_be_bytes());
            message.extend_from_slice(&[0; 6]);
        }
        message
    }
}

/// Reads a query file: lines `name type`; empty lines and comments (`;`, `#`) are skipped.
pub(crate) fn of_file(path: &Path) -> Result<Vec<Query>> {
    let file = path.display();
    let text = fs::read_to_string(path).with_context(|| file.to_string())?;
    parse(&text).with_context(|| file.to_string())
}

fn parse(text: &str) -> Result<Vec<Query>> {
    let mut queries = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with([';', '#']) {
            continue;
        }
        let query = parse_line(line).with_context(|| format!("line {}: {line:?}", number + 1))?;
        queries.push(query);
    }
    ensure!(
        !queries.is_empty(),
        "no query; expected lines such as \"q-s0.q-g1.bosh. A\""
    );
    Ok(queries)
}

fn parse_line(line: &str) -> Result<Query> {
    let (name, record_type) = line
        .split_once(char::is_whitespace)
        .context("no type after the name")?;
    let wire =
        Name::wire_as_written(name).map_err(|problem| anyhow::anyhow!("no name: {problem}"))?;
    Ok(Query {
        name: Name::from_text(name)?,
        wire,
        record_type: parse_type(record_type)?,
    })
}

fn parse_type(text: &str) -> Result<RecordType> {
    let text = text.trim().to_ascii_uppercase();
    if let Some(Ok(number)) = text.strip_prefix("TYPE").map(str::parse::<u16>) {
        return Ok(number.into());
    }
    text.parse()
        .map_err(|_| anyhow::anyhow!("{text:?} is no type"))
}

/// Returns queries for the names of records.json, each name with all types.
pub(crate) fn of_records(path: &Path, types: &[String], most: Option<usize>) -> Result<Vec<Query>> {
    let file = path.display();
    let bytes = fs::read(path).with_context(|| file.to_string())?;
    let (records, _unusable_rows) = Records::parse(&bytes).with_context(|| file.to_string())?;
    let (snapshot, _unusable_aliases) = Snapshot::build(records, &AliasFiles::default());
    let types = types
        .iter()
        .map(|text| parse_type(text))
        .collect::<Result<Vec<_>>>()?;
    let names = published_names(&snapshot).take(most.unwrap_or(usize::MAX));
    let queries: Vec<Query> = names
        .flat_map(|name| {
            types.iter().map(move |&record_type| Query {
                wire: name.as_wire().to_vec(),
                name: name.clone(),
                record_type,
            })
        })
        .collect();
    ensure!(!queries.is_empty(), "{file}: no names");
    Ok(queries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_have_valid_checksums() {
        let (from, to) = (
            SocketAddrV4::new([10, 9, 0, 1].into(), 2048),
            SocketAddrV4::new([10, 9, 0, 2].into(), 53),
        );
        for message in [&b"\x12\x34\x01"[..], b"even", b""] {
            let frame = frame([[1; 6], [2; 6]], from, to, message);
            assert_eq!(frame.len(), 42 + message.len());
            assert_eq!(folded(sum_of(&frame[14..34])), 0xffff);
            let pseudo = sum_of(&frame[26..34]) + 17 + frame[34..].len() as u32;
            assert_eq!(folded(pseudo + sum_of(&frame[34..])), 0xffff);
        }
    }

    #[test]
    fn neighbours_are_found() {
        let table = "IP address       HW type     Flags       HW address            Mask     Device\n\
             10.9.0.2         0x1         0x2         02:00:00:00:00:0a     *        c0\n\
             10.9.0.3         0x1         0x0         00:00:00:00:00:00     *        c0\n";
        let find = |interface, last| of_table(table, interface, Ipv4Addr::new(10, 9, 0, last));
        assert_eq!(find("c0", 2), Some([2, 0, 0, 0, 0, 10]));
        assert_eq!(
            (find("c1", 2), find("c0", 3), find("c0", 4)),
            (None, None, None)
        );
        assert_eq!(parse_address("02:00:00"), None);
    }

    #[test]
    fn lines_become_queries() {
        let queries = parse("; a comment\nA.bOsH. a\n\n  b.bosh\tTYPE65  \n").unwrap();
        let shown: Vec<String> = queries.iter().map(ToString::to_string).collect();
        assert_eq!(shown[0], "a.bosh. A");
        assert_eq!(shown.len(), 2);
        let message = queries[0].message(0x1234, Some(1232));
        assert_eq!(
            message,
            b"\x12\x34\x01\0\0\x01\0\0\0\0\0\x01\x01A\x04bOsH\0\0\x01\0\x01\0\0\x29\x04\xd0\0\0\0\0\0\0"
        );
        for (text, expected) in [
            ("", "no query"),
            ("a.bosh.\n", "line 1"),
            ("a. A\na..b A", "line 2"),
            ("a. X9", "line 1"),
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }
}
