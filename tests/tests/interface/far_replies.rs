//! Replies to clients in other networks: interfaces give them at most 1,232 bytes, and `max_reply` holds for
//! replies of every kind on both paths.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use hickory_proto::{op::Message, rr::RecordType};
use serde_json::{Value, json};
use whole_system_tests::{
    bpffs::Bpffs,
    client,
    metrics::{Metrics, wait_for_fast_path},
    pair::{Pair, v4},
    process::wait_until,
    requires,
    server::{self, Server},
};

/// The server's address on a macvlan, which other machines may share.
const FAR: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(10, 9, 0, 2)), 53);

/// Ethernet address of the interface with [`FAR`].
const FAR_MAC: &str = "02:00:00:00:09:02";

/// The addresses, and whether their clients are on this machine: a veth counts as a container's.
fn addresses() -> [(SocketAddr, bool); 2] {
    [(FAR, false), (v4(), true)]
}

/// Maximum reply size in bytes.
const MOST: usize = 600;

/// Time limit for a reply to reach the interface, many times what a busy machine needs.
const EVENTUALLY: Duration = Duration::from_secs(120);

/// A server with a far and a near address.
struct Lab {
    /// Ended before its namespace is removed.
    server: Server,
    pair: Pair,
    _bpffs: Bpffs,
}

impl Lab {
    /// Starts the server for groups of these sizes; `extra` is merged into its configuration.
    fn start(label: &str, groups: &[u16], extra: &Value) -> Result<Self> {
        let (pair, bpffs) = (Pair::new(label)?, Bpffs::new()?);
        pair.server.ip(&format!(
            "link add link srv name mac0 address {FAR_MAC} type macvlan mode bridge"
        ))?;
        pair.server.ip("addr add 10.9.0.2/24 dev mac0")?;
        pair.server.ip("link set mac0 up")?;
        pair.client.ip("addr add 10.9.0.1/24 dev cli")?;
        // The veth would answer ARP for this address itself.
        pair.client
            .ip(&format!("neigh add 10.9.0.2 lladdr {FAR_MAC} dev cli"))?;
        let folder = server::folder(&server::records_of_groups(groups), None)?;
        let mut settings = json!({
            "address": "0.0.0.0",
            "metrics": {"enabled": true},
            "xdp": {"bpffs": bpffs.path(), "interfaces": ["lo", "srv", "mac0"]},
        });
        server::merge(&mut settings, extra);
        // The test polls this address for readiness; the configuration determines the listen addresses.
        let server = Server::start(Some(&pair.server), folder, v4(), &settings)?;
        wait_for_fast_path(&pair.server).with_context(|| server.log())?;
        Ok(Self {
            server,
            pair,
            _bpffs: bpffs,
        })
    }

    /// Queries by UDP with EDNS large enough for any reply.
    fn ask(&self, server: SocketAddr, name: &str, kind: RecordType) -> Result<Message> {
        let query = client::query(name, kind, Some(4096))?;
        self.pair.client.run(|| client::ask(server, &query))?
    }

    /// Sends ten queries; returns how many of them the interface answered, and how many were probes.
    fn hits(&self, server: SocketAddr, name: &str, kind: RecordType) -> Result<(u64, u64)> {
        let before = Metrics::read(&self.pair.server)?;
        for _ in 0..10 {
            self.ask(server, name, kind)?;
        }
        let after = Metrics::read(&self.pair.server)?;
        Ok((
            after.fast_path_replies() - before.fast_path_replies(),
            after.probes() - before.probes(),
        ))
    }
}

/// Size of the largest group whose reply has at most 1,232 bytes.
const FITTING: u16 = 74;

#[test]
fn far_clients_get_1232_bytes_by_interface() -> Result<()> {
    requires!(namespaces, bpf);
    // A larger limit is the server's, not the interface's.
    let lab = Lab::start(
        "far-1232",
        &[FITTING, FITTING + 1],
        &json!({"max_reply": 4096}),
    )?;
    for (address, is_near) in addresses() {
        for (count, by_interface) in [(FITTING, true), (FITTING + 1, is_near)] {
            let name = format!("q-s0.q-g{count}.bosh.");
            let reply = lab.ask(address, &name, RecordType::A)?;
            let len = reply.to_vec()?.len();
            ensure!(
                client::addresses(&reply).len() == usize::from(count)
                    && (len <= 1232) == (count == FITTING),
                "{address}: {len} bytes"
            );
            let (hits, probes) = lab.hits(address, &name, RecordType::A)?;
            ensure!(
                hits + probes == if by_interface { 10 } else { 0 },
                "{address}, {len} bytes: {hits} answers and {probes} probes\n{}",
                lab.server.log()
            );
        }
    }
    Ok(())
}

/// Answers every query at `socket` with a text, which is longer than [`MOST`] for names below `long.`.
fn answer_with_text(socket: &UdpSocket) -> io::Result<()> {
    let mut query = [0; 512];
    loop {
        let (length, from) = socket.recv_from(&mut query)?;
        let name_len = query[12..length].iter().position(|&byte| byte == 0);
        let Some(name_len) = name_len else { continue };
        let strings = if query[12..].starts_with(b"\x04long") {
            8
        } else {
            1
        };
        let text = [&[100][..], &[b'x'; 100]].concat().repeat(strings);
        let question = &query[12..12 + name_len + 5];
        let header = [&query[..2], &[0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]].concat();
        let mut reply = [&header, question].concat();
        reply.extend([0xc0, 12, 0, 16, 0, 1, 0, 0, 1, 44]);
        reply.extend((text.len() as u16).to_be_bytes());
        reply.extend(text);
        socket.send_to(&reply, from)?;
    }
}

/// Returns the definition of a service with one instance and of one whose SRV records exceed [`MOST`].
fn services() -> String {
    let instance = |name: &str, last: u32| {
        let address = Ipv4Addr::from_bits(0x0a07_0000 + last).to_string();
        json!({"name": name, "id": format!("{name}{last}"), "address": address, "port": 80})
    };
    let mut services: Vec<Value> = (0..30).map(|last| instance("long", last)).collect();
    services.push(instance("short", 100));
    json!({"services": services}).to_string()
}

#[test]
fn limit_holds_for_replies_of_every_kind() -> Result<()> {
    requires!(namespaces, bpf);
    let folder = tempfile::TempDir::with_prefix("bdx-")?;
    let definitions = folder.path().join("services.json");
    std::fs::write(&definitions, services())?;
    let extra = json!({
        "max_reply": MOST,
        "disable_recursors": false,
        "recursors": ["127.0.0.1:5300"],
        "cache": {"enabled": true},
        "consul": {"node_name": "here", "advertise_addr": "10.9.0.9", "sources": {"files": [definitions]}},
    });
    let lab = Lab::start("far-kinds", &[10], &extra)?;
    let socket = lab
        .pair
        .server
        .run(|| UdpSocket::bind("127.0.0.1:5300"))??;
    // Ends with the test's process.
    thread::spawn(move || answer_with_text(&socket));
    for (short, long, kind) in [
        (
            "_short._tcp.service.consul.",
            "_long._tcp.service.consul.",
            RecordType::SRV,
        ),
        ("short.example.", "long.example.", RecordType::TXT),
    ] {
        for (address, is_near) in addresses() {
            wait_until("a short reply by the interface", EVENTUALLY, || {
                lab.hits(address, short, kind)
                    .is_ok_and(|(hits, _)| hits > 0)
            })
            .with_context(|| format!("{address}, {short}: {}", lab.server.log()))?;
            let (hits, _) = lab.hits(address, long, kind)?;
            ensure!(hits == 0, "{address}: the interface gave {long}");
            let reply = lab.ask(address, long, kind)?;
            let length = reply.to_vec()?.len();
            // Consul sets no TC by default.
            ensure!(
                (length > MOST) == is_near,
                "{address}: {length} bytes of {long}"
            );
        }
    }
    Ok(())
}
