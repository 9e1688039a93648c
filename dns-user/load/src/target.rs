//! The target of a measurement: options that all measurements share, and the generator that they describe.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    ops::{Range, RangeInclusive},
    path::PathBuf,
    process::Command,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use nix::sys::socket::{setsockopt, sockopt};
use serde_json::Value;

use crate::{
    consent::{self, Expected},
    frames::Route,
    generator::{Generator, Settings},
    interface::Interface,
    orders::MAX_FRAME_LEN,
    queries::{self, Order, Query, Workload},
};

/// Port of a server without one.
const PORT: u16 = 53;

/// Maximum number of source addresses: the last 16 bits of one vary.
const MAX_ADDRESSES: u32 = 1 << 16;

/// Options of all measurements.
#[derive(Debug, Args)]
pub(crate) struct Target {
    /// Allows a server with a public address beyond the link, which its operator and those of the way to it agree to.
    #[arg(long)]
    public: bool,
    /// RCODE of the answer to the first query; with another one, or none, the load does not start.
    #[arg(long, value_enum, default_value_t = Expected::Noerror)]
    expect: Expected,
    /// Interface that queries leave by; with `--sockets` by default the one that the kernel's routes name.
    #[arg(long, required_unless_present = "sockets")]
    interface: Option<String>,
    /// Sends and receives through UDP sockets: latencies are those of an application, and neither root nor BPF is
    /// needed. At full speed each CPU has 100 queries on their way, as dnsperf by default.
    #[arg(long)]
    sockets: bool,
    /// Query file: lines `name type [flags]` as for dnsperf and kxdpgun, or a capture (pcap), of which names, types and
    /// options are used.
    #[arg(long, required_unless_present = "records", conflicts_with = "records")]
    queries: Option<PathBuf>,
    /// records.json, whose names are queried for A and AAAA.
    #[arg(long)]
    records: Option<PathBuf>,
    /// Order of the queries: `file`, `random`, `zipf` (the first line is asked for most) or `zipf:EXPONENT`.
    #[arg(long, default_value_t = Order::File)]
    order: Order,
    /// CPUs that generate queries, separated by commas; by default the last one.
    #[arg(long, value_delimiter = ',')]
    cpu: Vec<usize>,
    /// Source addresses, ADDRESS or ADDRESS/PREFIX with at most 65,536 addresses, to which the server needs a route; by
    /// default the interface's own. With `--sockets` this machine has all of them, and there are as many ports.
    #[arg(long, value_name = "ADDRESS[/PREFIX]")]
    local: Option<Local>,
    /// Source ports, FIRST-LAST, in equal parts for the CPUs. Other programs must not use them. With `--sockets` a CPU has
    /// at most 64.
    #[arg(long, default_value = "2048-2063", value_parser = port_range)]
    ports: RangeInclusive<u16>,
    /// Hardware address of the server, or of the router to it; by default that of the neighbour.
    #[arg(long, conflicts_with = "sockets")]
    mac: Option<String>,
    /// UDP size of an OPT in each query of a query file; without it, queries have the one that the file asks for, if any.
    #[arg(long, value_parser = clap::value_parser!(u16).range(512..))]
    edns: Option<u16>,
}

/// Parses the endpoint of a server: an address, or address and port.
pub(crate) fn endpoint(text: &str) -> Result<SocketAddr> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok((address, PORT).into());
    }
    text.parse()
        .map_err(|_| anyhow::anyhow!("expected ADDRESS, ADDRESS:PORT or [ADDRESS]:PORT"))
}

fn port_range(text: &str) -> Result<RangeInclusive<u16>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let [first, last] = [first.parse()?, last.parse()?];
    ensure!(first > 0 && first <= last, "expected FIRST-LAST");
    Ok(first..=last)
}

/// Source addresses.
#[derive(Clone, Copy, Debug)]
struct Local {
    first: IpAddr,
    count: u32,
}

impl std::str::FromStr for Local {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let Some((address, prefix)) = text.split_once('/') else {
            let first = text.parse()?;
            return Ok(Self { first, count: 1 });
        };
        let address: IpAddr = address.parse()?;
        let bits: u32 = if address.is_ipv6() { 128 } else { 32 };
        let prefix: u32 = prefix.parse()?;
        let host_bits = bits.checked_sub(prefix).context("the prefix is too long")?;
        ensure!(
            host_bits <= MAX_ADDRESSES.ilog2(),
            "more than {MAX_ADDRESSES} addresses"
        );
        let count = 1 << host_bits;
        // The range is that of the prefix, whichever of its addresses is named.
        let first = match address {
            IpAddr::V4(address) => Ipv4Addr::from_bits(address.to_bits() & !(count - 1)).into(),
            IpAddr::V6(address) => {
                Ipv6Addr::from_bits(address.to_bits() & !u128::from(count - 1)).into()
            }
        };
        Ok(Self { first, count })
    }
}

/// A generator that is ready to load the servers.
pub(crate) struct Prepared {
    pub(crate) generator: Generator,
    pub(crate) interface: Interface,
    /// Queries of each server; the frames of the second one follow those of the first.
    pub(crate) queries: Vec<Query>,
    /// Part of the generator's sequence for each server.
    pub(crate) parts: Vec<Range<u64>>,
}

impl Target {
    /// Prepares to load these servers, once they may be loaded and answer as expected, and to record loads up to this
    /// length.
    pub(crate) fn prepare(&self, servers: &[SocketAddr], recorded: Duration) -> Result<Prepared> {
        let workload = self.workload()?;
        let first = *servers.first().context("no server")?;
        let mut frames = Vec::new();
        let mut sequence = Vec::new();
        let mut parts = Vec::new();
        let mut routes = Vec::new();
        for &server in servers {
            let route = self.route(server, &workload)?;
            routes.push(route);
            let first_frame = u32::try_from(frames.len())?;
            for query in &workload.queries {
                let frame = route.frame(&query.message)?;
                frames.push(frame.with_context(|| {
                    format!("{query}: too long; the generator sends frames of at most {MAX_FRAME_LEN} bytes")
                })?);
            }
            let begin = sequence.len() as u64;
            // Each server has frames of its own, with its addresses and its counters.
            sequence.extend(workload.sequence.iter().map(|index| first_frame + index));
            parts.push(begin..sequence.len() as u64);
        }
        let last_cpu = thread::available_parallelism().map_or(0, |number| number.get() - 1);
        let cpus = if self.cpu.is_empty() {
            vec![last_cpu]
        } else {
            self.cpu.clone()
        };
        let interface = self.interface_to(first)?;
        let settings = Settings {
            interface: &interface,
            cpus: &cpus,
            ports: self.ports.clone(),
            addresses: self.local.map_or(1, |local| local.count),
            servers: [first.port(), servers.last().unwrap_or(&first).port()],
            frames: &frames,
            sequence: &sequence,
        };
        let generator = if self.sockets {
            let named = self.interface.as_deref();
            Generator::through_sockets(&settings, &routes, named, recorded)?
        } else {
            Generator::recording(&settings, recorded)?
        };
        Ok(Prepared {
            generator,
            interface: Interface::open(&interface)?,
            queries: workload.queries,
            parts,
        })
    }

    fn workload(&self) -> Result<Workload> {
        let queries = match (&self.queries, &self.records) {
            (Some(file), _) => queries::of_file(file, self.edns)?,
            (None, Some(file)) => {
                let types = ["A", "AAAA"].map(str::to_owned);
                queries::of_records(file, &types, None, self.edns)?
            }
            (None, None) => bail!("name a query file (--queries) or records.json (--records)"),
        };
        let mut workload = Workload::of(queries)?;
        workload.arrange(self.order);
        Ok(workload)
    }

    /// Asks the first query, which also makes the kernel look for the neighbour, and returns the way of the load.
    fn route(&self, server: SocketAddr, workload: &Workload) -> Result<Route> {
        let interface = self.interface_to(server)?;
        if !self.public {
            consent::refuse_strangers(server.ip(), &interface)?;
        }
        let first = workload.queries.first().context("no query")?;
        // The load bypasses the kernel's routes: only an answer at this interface tells that it arrives.
        let socket = probe_socket(server, self.interface.as_deref())?;
        let answer = consent::ask(&socket, &first.message).with_context(|| {
            format!("{server} does not answer at {interface}; the load was not started")
        })?;
        self.expect
            .verify(&first.message, &answer)
            .with_context(|| {
                format!("{server} does not answer as expected; the load was not started")
            })?;
        let source = match self.local {
            Some(local) => local.first,
            None => socket.local_addr()?.ip(),
        };
        let hardware = if self.sockets {
            // The kernel knows them.
            [[0; 6]; 2]
        } else {
            [self.receiver(server, &interface)?, own_address(&interface)?]
        };
        Ok(Route {
            hardware,
            source,
            server,
        })
    }

    /// Returns the interface of the load: the one that is named, or else that of the route.
    fn interface_to(&self, server: SocketAddr) -> Result<String> {
        if let Some(name) = &self.interface {
            return Ok(name.clone());
        }
        // Nothing is sent by it.
        let socket = probe_socket(server, None)?;
        consent::interface_of(socket.local_addr()?.ip())
    }

    /// Returns the hardware address that queries are sent to.
    fn receiver(&self, server: SocketAddr, interface: &str) -> Result<[u8; 6]> {
        // Behind a router the server is no neighbour, and only the user knows which router may carry
        // the load.
        if let Some(text) = &self.mac {
            return hardware_address(text)
                .with_context(|| format!("--mac: {text:?} is no hardware address"));
        }
        let mut ip = Command::new("ip");
        ip.args(["-json", "neighbour", "show", "to", &server.ip().to_string()]);
        let output = ip
            .args(["dev", interface])
            .output()
            .context("cannot run `ip neighbour`")?;
        // Without neighbours the output is empty.
        let neighbours: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let found = neighbours.pointer("/0/lladdr").and_then(Value::as_str);
        found.and_then(hardware_address).with_context(|| {
            format!(
                "{} is no neighbour at {interface}: name the router's hardware address with --mac, if the server and every \
                 link up to it are yours to load",
                server.ip()
            )
        })
    }
}

/// Returns a socket on a port of the kernel's choice, whose query leaves by the load's interface, if one is named: an
/// answer by another way would not be that of the server that gets the load.
fn probe_socket(server: SocketAddr, interface: Option<&str>) -> Result<UdpSocket> {
    let any: IpAddr = if server.is_ipv6() {
        Ipv6Addr::UNSPECIFIED.into()
    } else {
        Ipv4Addr::UNSPECIFIED.into()
    };
    let socket = UdpSocket::bind((any, 0))?;
    if let Some(interface) = interface {
        setsockopt(&socket, sockopt::BindToDevice, &interface.into())
            .with_context(|| format!("cannot send by the interface {interface:?}"))?;
    }
    socket
        .connect(server)
        .with_context(|| format!("no route to {server}"))?;
    socket.set_read_timeout(Some(consent::MAX_WAIT))?;
    Ok(socket)
}

/// Returns the hardware address of an interface of this machine.
fn own_address(interface: &str) -> Result<[u8; 6]> {
    for found in nix::ifaddrs::getifaddrs()? {
        if found.interface_name != interface {
            continue;
        }
        if let Some(address) = found
            .address
            .and_then(|address| address.as_link_addr()?.addr())
        {
            return Ok(address);
        }
    }
    bail!("{interface:?} is no interface with an Ethernet address")
}

fn hardware_address(text: &str) -> Option<[u8; 6]> {
    let mut bytes = Vec::new();
    for part in text.split(':') {
        bytes.push(u8::from_str_radix(part, 16).ok()?);
    }
    bytes.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_have_limits() {
        let local = |text: &str| {
            let local = text.parse::<Local>().ok()?;
            Some((local.first.to_string(), local.count))
        };
        assert_eq!(local("10.9.1.7"), Some(("10.9.1.7".to_owned(), 1)));
        assert_eq!(local("10.9.1.7/24"), Some(("10.9.1.0".to_owned(), 256)));
        assert_eq!(local("fd00::7/112"), Some(("fd00::".to_owned(), 1 << 16)));
        assert_eq!(local("10.9.1.7/15"), None);
        assert_eq!(local("10.9.1.7/33"), None);
        assert_eq!(port_range("2048-65535").unwrap(), 2048..=65535);
        assert_eq!(port_range("53").unwrap(), 53..=53);
        for bad in ["0-3", "4-3", "1-65536", "x"] {
            assert!(port_range(bad).is_err(), "{bad}");
        }
        assert_eq!(
            hardware_address("02:00:00:00:00:0a"),
            Some([2, 0, 0, 0, 0, 10])
        );
        assert_eq!(hardware_address("02:00:00"), None);
    }

    #[test]
    fn servers_may_have_ports() {
        for (text, expected) in [
            ("10.9.0.2", "10.9.0.2:53"),
            ("10.9.0.2:5353", "10.9.0.2:5353"),
            ("fd00::2", "[fd00::2]:53"),
            ("[fd00::2]:5353", "[fd00::2]:5353"),
        ] {
            assert_eq!(endpoint(text).unwrap().to_string(), expected);
        }
        assert!(endpoint("a.bosh").is_err());
    }

    #[test]
    fn interfaces_have_addresses() {
        // Loopback has the hardware address 0.
        assert_eq!(own_address("lo").unwrap(), [0; 6]);
        assert!(own_address("no-interface").is_err());
        for (text, expected) in [
            ("10.9.1.7/32", Some(("10.9.1.7", 1))),
            ("10.9.255.7/16", Some(("10.9.0.0", 65_536))),
            ("fd00::1:7/111", None),
            ("fd00::7/128", Some(("fd00::7", 1))),
            ("fd00::7/129", None),
            ("fd00::7/127", Some(("fd00::6", 2))),
            ("x", None),
            ("x/8", None),
            ("10.0.0.1/x", None),
        ] {
            let found = text.parse::<Local>().ok();
            let found = found.map(|local| (local.first.to_string(), local.count));
            assert_eq!(
                found,
                expected.map(|(first, count)| (first.to_owned(), count)),
                "{text}"
            );
        }
        assert_eq!(port_range("1-1").unwrap(), 1..=1);
        for bad in [
            "",
            "02:00:00:00:00:0g",
            "02:00:00:00:00:0a:0b",
            "0200:00:00:00:00:0a",
        ] {
            assert_eq!(hardware_address(bad), None, "{bad}");
        }
    }

    #[test]
    fn first_query_leaves_by_the_interface() {
        let server: SocketAddr = "127.0.0.1:9".parse().unwrap();
        let socket = probe_socket(server, Some("lo")).unwrap();
        assert_eq!(socket.peer_addr().unwrap(), server);
        assert_eq!(socket.read_timeout().unwrap(), Some(consent::MAX_WAIT));
        let server: SocketAddr = "[::1]:9".parse().unwrap();
        assert_eq!(
            probe_socket(server, Some("lo"))
                .unwrap()
                .peer_addr()
                .unwrap(),
            server
        );
        let error = probe_socket(server, Some("no-interface"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("cannot send by the interface"), "{error}");
    }

    fn target(arguments: &[&str]) -> Target {
        #[derive(clap::Parser)]
        struct Only {
            #[command(flatten)]
            target: Target,
        }
        let usual = ["target", "--interface", "one"];
        <Only as clap::Parser>::parse_from(usual.iter().chain(arguments)).target
    }

    /// A program at the other end of a veth pair answers both ports.
    #[test]
    fn each_server_has_its_frames() {
        use crate::generator::{Load, Responder, pair, sequence};

        if !test_support::requirements::root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("queries");
        std::fs::write(&file, "a.bosh. A\nb.bosh. AAAA\na.bosh. A\n").unwrap();
        let queries = ["--queries", file.to_str().unwrap()];
        let test = || {
            pair();
            let _responder = Responder::new("other", [53, 5353], true).unwrap();
            let servers = [53, 5353].map(|port| ([10, 9, 0, 2], port).into());
            let prepare = |arguments: &[&str], servers: &[SocketAddr]| {
                let arguments = [&queries, arguments].concat();
                target(&arguments).prepare(servers, Duration::ZERO)
            };
            let mut prepared = prepare(&[], &servers).unwrap();
            assert_eq!(prepared.parts, [0..3, 3..6]);
            assert_eq!(prepared.queries.len(), 2);
            assert_eq!(sequence(&mut prepared.generator), [0, 1, 0, 2, 3, 2]);
            let frames = prepared.generator.frames().unwrap();
            assert_eq!(frames.len(), 4);
            for (frame, port) in frames.iter().zip([53, 53, 5353, 5353_u16]) {
                let bytes = zerocopy::IntoBytes::as_bytes(&frame.bytes);
                assert_eq!(bytes[..12], [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1]);
                assert_eq!(bytes[36..38], port.to_be_bytes());
            }
            // The last CPU exists.
            prepared.generator.order(Load::Saturate, 0..1).unwrap();
            drop(prepared);

            let stranger = ([9, 9, 9, 9], 53).into();
            for (arguments, server, expected) in [
                (&[][..], stranger, "name --public if its operator"),
                (
                    &["--mac", "x"],
                    servers[0],
                    "--mac: \"x\" is no hardware address",
                ),
                (
                    &["--expect", "nxdomain"],
                    servers[0],
                    "10.9.0.2:53 does not answer as expected; the load was not started: its RCODE is ",
                ),
            ] {
                let problem = prepare(arguments, &[server]).err().unwrap();
                let text = format!("{problem:#}");
                assert!(text.contains(expected), "{text}");
            }
        };
        thread::scope(|scope| scope.spawn(test).join().unwrap());
    }
}
