//! Set-ups in which a query's delivery depends on state that the programs do not see: an IPsec
//! tunnel, a VRF, a VLAN-aware bridge. With the fast path, as many queries are answered as without
//! it, and a tunnel's replies never leave in the clear.

use std::{io::ErrorKind, mem::MaybeUninit, net::SocketAddr, thread, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use hickory_proto::rr::RecordType;
use serde_json::{Value, json};
use socket2::{Domain, Protocol, Socket, Type};
use whole_system_tests::{
    client,
    metrics::{Metrics, wait_for_metrics},
    namespace::Namespace,
    pair::Pair,
    process::{run, wait_until},
    server::{self, Server},
};

use crate::modes::{TIMEOUT, status};

/// Address of the server, which belongs to no interface shared with the client.
const ADDRESS: [u8; 4] = [169, 254, 0, 2];

const QUERIES: usize = 5;

/// Timeout of a query, in the virtual time of the machine.
pub(crate) const REPLY: Duration = Duration::from_secs(1);

/// Environment variable that the kernel's command line sets if every set-up must work.
pub(crate) const REQUIRED_VARIABLE: &str = "BOSH_DNS_SET_UPS";

/// A set-up and its expectations.
struct SetUp {
    name: &'static str,
    /// Makes the set-up; fails first with a missing feature of the kernel.
    make: fn(&Pair) -> Result<()>,
    /// Queries that userspace receives and answers, of [`QUERIES`].
    answered: usize,
    /// Part of the reason why the interface is left to userspace.
    why: &'static str,
    /// Whether all replies must be encrypted.
    encrypted: bool,
    /// Changes the set-up so that the kernel delivers, to show that the path works otherwise.
    open: Option<fn(&Pair) -> Result<()>>,
}

const SET_UPS: [SetUp; 3] = [
    SetUp {
        name: "IPsec tunnel",
        make: ipsec,
        answered: QUERIES,
        why: "IPsec",
        encrypted: true,
        open: None,
    },
    SetUp {
        name: "VRF",
        make: vrf,
        answered: 0,
        why: "VRF",
        encrypted: false,
        open: Some(|pair| pair.server.ip("link set srv nomaster")),
    },
    SetUp {
        name: "VLAN-aware bridge",
        make: vlan_aware_bridge,
        answered: 0,
        why: "VLAN-aware",
        encrypted: false,
        open: Some(|pair| {
            bridge(
                pair,
                &["vlan", "add", "dev", "srv", "vid", "10", "pvid", "untagged"],
            )
        }),
    },
];

/// Tries all set-ups even after a failure and prints one line each.
pub(crate) fn try_all() -> Result<()> {
    let mut failed = Vec::new();
    for set_up in &SET_UPS {
        match try_one(set_up) {
            Ok(said) => println!("vm-init: {}: {said}", set_up.name),
            Err(problem) => {
                println!("vm-init: {}: FAILED: {problem:#}", set_up.name);
                failed.push(set_up.name);
            }
        }
    }
    ensure!(
        failed.is_empty(),
        "set-ups that failed: {}",
        failed.join(", ")
    );
    Ok(())
}

/// Tries one set-up with userspace alone and with the fast path; returns the observations.
fn try_one(set_up: &SetUp) -> Result<String> {
    let pair = join_pair()?;
    if let Err(problem) = (set_up.make)(&pair) {
        ensure!(std::env::var_os(REQUIRED_VARIABLE).is_none(), problem);
        return Ok(format!("skipped, the kernel lacks a feature: {problem:#}"));
    }
    let mut said = Vec::new();
    for mode in ["off", "auto"] {
        let server = start(&pair, mode)?;
        if mode != "off" {
            wait_for_refusal(&server, set_up.why)?;
        }
        let clear = Outgoing::on(&pair.server, "srv")?;
        let answered = ask(&pair)?;
        let (in_clear, encrypted) = clear.count()?;
        let hits = Metrics::read(&pair.server)?.fast_path_replies();
        said.push(format!(
            "{mode}: {answered} of {QUERIES} answered, {hits} at the interface"
        ));
        ensure!(
            answered == set_up.answered && hits == 0,
            "{}",
            said.join("; ")
        );
        if set_up.encrypted {
            ensure!(
                (in_clear, encrypted >= QUERIES) == (0, true),
                "{mode}: {in_clear} replies in the clear, {encrypted} encrypted packets"
            );
        }
    }
    if let Some(open) = set_up.open {
        let server = start(&pair, "off")?;
        open(&pair)?;
        let answered = ask(&pair)?;
        ensure!(
            answered == QUERIES,
            "{answered} answered once the kernel delivers\n{}",
            server.log()
        );
        said.push(format!("{answered} once the kernel delivers"));
    }
    Ok(said.join("; "))
}

/// Waits until the status says that `srv` is left to userspace for this reason.
fn wait_for_refusal(server: &Server, why: &str) -> Result<()> {
    let mut last = Value::Null;
    wait_until("the interface to be refused", TIMEOUT, || {
        thread::sleep(Duration::from_millis(200));
        let Ok(status) = status(server) else {
            return false;
        };
        last = status["fast_path"]["interfaces"].clone();
        let mut interfaces = last.as_array().into_iter().flatten();
        interfaces.any(|one| {
            one["name"] == "srv"
                && one["state"] == "refused"
                && one["why"].as_str().is_some_and(|said| said.contains(why))
        })
    })
    .with_context(|| last.to_string())
}

//----------- Lab --------------------------------------------------------------

/// Joins a server, 10.9.0.1, and a client, 10.9.0.2. The server listens on another address.
fn join_pair() -> Result<Pair> {
    let pair = Pair::joined("set", ("srv", &["10.9.0.1/24"]), ("cli", &["10.9.0.2/24"]))?;
    pair.server.forward()?;
    Ok(pair)
}

fn start(pair: &Pair, mode: &str) -> Result<Server> {
    let folder = server::folder(&server::records_of_groups(&[3]), None)?;
    let settings = json!({
        "metrics": {"enabled": true},
        "control": {"socket": folder.path().join("control.sock")},
        "xdp": {"mode": mode, "interfaces": ["lo", "srv", "br0", "br0.10"]},
    });
    let server = Server::start(Some(&pair.server), folder, (ADDRESS, 53).into(), &settings)?;
    wait_for_metrics(&pair.server)?;
    Ok(server)
}

/// Queries from the client; returns the number of replies.
fn ask(pair: &Pair) -> Result<usize> {
    let query = client::query("q-s0.q-g3.bosh.", RecordType::A, None)?.to_vec()?;
    let mut answered = 0;
    for _ in 0..QUERIES {
        let to = SocketAddr::from((ADDRESS, 53));
        match pair.client.run(|| client::ask_raw(to, &query, REPLY))? {
            Ok(_) => answered += 1,
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::ConnectionRefused
                ) => {}
            // As when the kernel has no route back.
            Err(error) if error.raw_os_error() == Some(libc::EHOSTUNREACH) => {}
            Err(error) => bail!(error),
        }
    }
    Ok(answered)
}

/// Packets that leave by an interface.
struct Outgoing(Socket);

impl Outgoing {
    fn on(namespace: &Namespace, interface: &str) -> Result<Self> {
        let index = namespace.interface_index(interface)?;
        let socket = namespace.run(|| -> Result<Socket> {
            let protocol = i32::from((libc::ETH_P_ALL as u16).to_be());
            let socket = Socket::new(Domain::PACKET, Type::DGRAM, Some(Protocol::from(protocol)))?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        })??;
        // The kernel names the interface of each packet; only `lo` differs here.
        ensure!(index != 1, "an interface that leads elsewhere");
        Ok(Self(socket))
    }

    /// Returns the numbers of DNS replies in the clear and of ESP packets.
    fn count(&self) -> Result<(usize, usize)> {
        let (mut in_clear, mut encrypted) = (0, 0);
        let mut buffer = [MaybeUninit::uninit(); 2048];
        loop {
            let (length, from) = match self.0.recv_from(&mut buffer) {
                Ok(received) => received,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    return Ok((in_clear, encrypted));
                }
                Err(error) => return Err(error.into()),
            };
            // SAFETY: the address of a packet socket is a sockaddr_ll, and all of its bytes are valid.
            let from = unsafe { &*from.as_ptr().cast::<libc::sockaddr_ll>() };
            if from.sll_pkttype != libc::PACKET_OUTGOING || from.sll_ifindex == 1 {
                continue;
            }
            // SAFETY: the kernel has written these bytes.
            let packet: Vec<u8> = buffer[..length]
                .iter()
                .map(|byte| unsafe { byte.assume_init() })
                .collect();
            match packet.get(9) {
                Some(17) if packet.get(20..22) == Some(&53u16.to_be_bytes()[..]) => in_clear += 1,
                Some(50) => encrypted += 1,
                _ => {}
            }
        }
    }
}

//----------- Set-ups ----------------------------------------------------------

/// Gives the server its address on `lo`, and the client a route to it.
fn address_on_lo(pair: &Pair) -> Result<()> {
    pair.server.ip("addr add 169.254.0.2/32 dev lo")?;
    pair.client.ip("route add 169.254.0.2/32 via 10.9.0.1")
}

/// Encrypts all traffic between client and server address in a tunnel.
fn ipsec(pair: &Pair) -> Result<()> {
    const KEYS: &str = "auth hmac(sha1) 0x0123456789abcdef0123456789abcdef01234567 \
                        enc cbc(aes) 0x00112233445566778899aabbccddeeff";
    let (server, client) = ("10.9.0.1", "10.9.0.2");
    for namespace in [&pair.server, &pair.client] {
        for (from, to, spi) in [(client, server, "0x1000"), (server, client, "0x1001")] {
            namespace.ip(&format!(
                "xfrm state add src {from} dst {to} proto esp spi {spi} reqid 1 mode tunnel {KEYS}"
            ))?;
        }
        let [query, reply] = if namespace.name() == pair.server.name() {
            ["in", "out"]
        } else {
            ["out", "in"]
        };
        for (from, to, direction, near, far) in [
            ("10.9.0.2/32", "169.254.0.2/32", query, client, server),
            ("169.254.0.2/32", "10.9.0.2/32", reply, server, client),
        ] {
            namespace.ip(&format!(
                "xfrm policy add src {from} dst {to} dir {direction} \
                 tmpl src {near} dst {far} proto esp reqid 1 mode tunnel"
            ))?;
        }
    }
    address_on_lo(pair)
}

/// Puts the server's interface into a VRF; the server's address belongs to the main one.
fn vrf(pair: &Pair) -> Result<()> {
    pair.server.ip("link add vrf-a type vrf table 10")?;
    pair.server.ip("link set vrf-a up")?;
    address_on_lo(pair)?;
    pair.server.ip("link set srv master vrf-a")
}

/// Makes the server's interface a port of VLAN 20; the server's address belongs to VLAN 10.
fn vlan_aware_bridge(pair: &Pair) -> Result<()> {
    const MAC: &str = "02:00:00:00:00:10";
    pair.server.ip(&format!(
        "link add br0 address {MAC} type bridge vlan_filtering 1"
    ))?;
    pair.server.ip("link set br0 up")?;
    pair.server
        .ip("link add link br0 name br0.10 type vlan id 10")?;
    pair.server.ip("link set br0.10 up")?;
    pair.server.ip("addr add 169.254.0.2/24 dev br0.10")?;
    pair.server.ip("addr flush dev srv")?;
    pair.server.ip("link set srv master br0")?;
    bridge(pair, &["vlan", "add", "dev", "br0", "vid", "10", "self"])?;
    bridge(pair, &["vlan", "del", "dev", "srv", "vid", "1"])?;
    bridge(
        pair,
        &["vlan", "add", "dev", "srv", "vid", "20", "pvid", "untagged"],
    )?;
    pair.client.ip("addr add 169.254.0.1/24 dev cli")?;
    pair.client.ip(&format!(
        "neigh replace 169.254.0.2 lladdr {MAC} dev cli nud permanent"
    ))
}

fn bridge(pair: &Pair, arguments: &[&str]) -> Result<()> {
    run(pair.server.command("bridge")?.args(arguments))
}
