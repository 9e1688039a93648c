//! Clients in other networks than the server's address: `max_reply` limits UDP replies on both paths, and an
//! address on another interface is served.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, Result, ensure};
use hickory_proto::{op::Message, rr::RecordType};
use serde_json::json;
use whole_system_tests::{
    bpffs::Bpffs,
    client,
    metrics::{Metrics, wait_for_fast_path},
    namespace::{End, Namespace, join},
    pair::{Pair, TIMEOUT, addresses, v4},
    process::wait_until,
    requires,
    server::{self, Server},
};

use crate::gated::{self, Gated, NAME};

/// Ethernet address of the interface with [`FAR`].
const FAR_MAC: &str = "02:00:00:00:09:02";

/// The server's address on a macvlan: not link-local, and not on an interface of a container.
const FAR: SocketAddr = SocketAddr::new(
    std::net::IpAddr::V4(std::net::Ipv4Addr::new(10, 9, 0, 2)),
    53,
);

/// The server's address on a bridge that has, beside a veth, a port as an uplink is one.
const BRIDGED: SocketAddr = SocketAddr::new(
    std::net::IpAddr::V4(std::net::Ipv4Addr::new(10, 7, 0, 2)),
    53,
);

/// The server's second address on the veth, which counts as a container's interface.
const NEAR: SocketAddr = SocketAddr::new(
    std::net::IpAddr::V4(std::net::Ipv4Addr::new(10, 8, 0, 2)),
    53,
);

/// Queries by UDP with EDNS large enough for any reply.
fn ask(from: &Namespace, server: SocketAddr, name: &str) -> Result<Message> {
    let query = client::query(name, RecordType::A, Some(4096))?;
    from.run(|| client::ask(server, &query))?
}

/// Sends ten queries; returns how many of them the interface answered, and how many were probes.
fn hits(pair: &Pair, server: SocketAddr, name: &str) -> Result<(u64, u64)> {
    let before = Metrics::read(&pair.server)?;
    for _ in 0..10 {
        ask(&pair.client, server, name)?;
    }
    let after = Metrics::read(&pair.server)?;
    Ok((
        after.fast_path_replies() - before.fast_path_replies(),
        after.probes() - before.probes(),
    ))
}

/// Connects the pair by a second veth, whose end is a port of a bridge with [`BRIDGED`].
fn bridge_with_uplink(pair: &Pair) -> Result<()> {
    join(
        End::new(&pair.server, "port", &[]),
        End::new(&pair.client, "cli2", &["10.7.0.1/24"]),
    )?;
    pair.server.ip("link add br0 type bridge")?;
    pair.server
        .ip("link add uplink type vxlan id 9 dstport 4789 dev srv")?;
    for port in ["port", "uplink"] {
        pair.server.ip(&format!("link set {port} master br0 up"))?;
    }
    pair.server.ip("addr add 10.7.0.2/24 dev br0")?;
    pair.server.ip("link set br0 up")
}

#[test]
fn long_replies_need_tcp() -> Result<()> {
    replies_are_limited("far", Some(600), 600, 60)
}

#[test]
fn replies_are_limited_by_default() -> Result<()> {
    replies_are_limited("usual", None, 1232, 100)
}

/// Checks that UDP replies to far clients have at most `most` bytes, and others all addresses of a group of `size`.
fn replies_are_limited(label: &str, max_reply: Option<u16>, most: usize, size: u16) -> Result<()> {
    requires!(namespaces, bpf);
    let (pair, bpffs) = (Pair::new(label)?, Bpffs::new()?);
    for (namespace, interface, last) in [(&pair.server, "srv", 2), (&pair.client, "cli", 1)] {
        namespace.ip(&format!("addr add 10.8.0.{last}/24 dev {interface}"))?;
    }
    pair.client.ip("addr add 10.9.0.1/24 dev cli")?;
    pair.server.ip(&format!(
        "link add link srv name mac0 address {FAR_MAC} type macvlan mode bridge"
    ))?;
    pair.server.ip("addr add 10.9.0.2/24 dev mac0")?;
    pair.server.ip("link set mac0 up")?;
    // The veth would answer ARP for this address itself.
    pair.client
        .ip(&format!("neigh add 10.9.0.2 lladdr {FAR_MAC} dev cli"))?;
    bridge_with_uplink(&pair)?;
    let folder = server::folder(&server::records_of_groups(&[10, size]), None)?;
    let settings = json!({
        "address": "0.0.0.0",
        "max_reply": max_reply,
        "metrics": {"enabled": true},
        "xdp": {"bpffs": bpffs.path(), "interfaces": ["lo", "srv", "mac0", "br0"]},
    });
    // The test polls this address for readiness; the configuration determines the listen addresses.
    let server = Server::start(Some(&pair.server), folder, v4(), &settings)?;
    wait_for_fast_path(&pair.server).with_context(|| server.log())?;
    let (short, long) = ("q-s0.q-g10.bosh.", &*format!("q-s0.q-g{size}.bosh."));

    // A short reply comes from the interface, in any network.
    for address in [FAR, BRIDGED, NEAR, v4()] {
        ensure!(client::addresses(&ask(&pair.client, address, short)?).len() == 10);
        let (hits, probes) = hits(&pair, address, short)?;
        ensure!(
            hits + probes == 10,
            "{address}: {hits} answers and {probes} probes"
        );
    }
    // A long reply comes from userspace, complete only for near clients.
    for (address, whole) in [(FAR, false), (BRIDGED, false), (NEAR, true), (v4(), true)] {
        let reply = ask(&pair.client, address, long)?;
        let (length, count) = (reply.to_vec()?.len(), client::addresses(&reply).len());
        ensure!(
            reply.metadata.truncation != whole,
            "{address}: {length} bytes"
        );
        ensure!(
            if whole {
                count == usize::from(size)
            } else {
                length <= most && count > most / 30
            },
            "{address}: {count}"
        );
        // Near clients get long replies at the interface only if no limit is configured.
        ensure!(
            hits(&pair, address, long)?.0 == 0 || whole && max_reply.is_none(),
            "{address}: the interface gave a long reply"
        );
    }
    let query = client::query(long, RecordType::A, None)?;
    let by_tcp = pair.client.run(|| client::ask_tcp(FAR, &query))??;
    ensure!(
        client::addresses(&by_tcp).len() == usize::from(size),
        "the complete answer arrives over TCP"
    );
    Ok(())
}

#[test]
fn check_reports_long_replies() -> Result<()> {
    let folder = server::folder(&server::records_of_groups(&[1]), None)?;
    let file = folder.path().join("config.json");
    let warns = |address: &str, max_reply: Option<u16>| -> Result<bool> {
        let mut config = server::config(folder.path(), SocketAddr::new(address.parse()?, 53));
        server::merge(&mut config, &json!({"max_reply": max_reply}));
        std::fs::write(&file, config.to_string())?;
        let mut command = std::process::Command::new(server::program()?);
        // The exit status depends on the addresses of this machine.
        let output = command
            .args(["check", "--json", "--config"])
            .arg(&file)
            .output()?;
        Ok(String::from_utf8_lossy(&output.stdout).contains("max_reply is "))
    };
    for (address, max_reply, expected) in [
        ("0.0.0.0", Some(4096), true),
        ("10.0.0.1", Some(65_507), true),
        ("10.0.0.1", Some(1232), false),
        ("10.0.0.1", None, false),
        ("127.0.0.2", Some(4096), false),
        ("169.254.0.2", Some(4096), false),
    ] {
        ensure!(
            warns(address, max_reply)? == expected,
            "{address}, {max_reply:?}"
        );
    }
    Ok(())
}

/// The link-local address of a node's cache, on an interface of its own.
const NODE_LOCAL: SocketAddr = SocketAddr::new(
    std::net::IpAddr::V4(std::net::Ipv4Addr::new(169, 254, 20, 10)),
    53,
);

#[test]
fn address_on_other_interface_is_served() -> Result<()> {
    requires!(namespaces, bpf);
    let pair = Pair::joined(
        "node",
        ("pod0", &["10.42.0.1/24"]),
        ("eth0", &["10.42.0.7/24"]),
    )?;
    let (node, pod) = (&pair.server, &pair.client);
    node.forward()?;
    // Like the dummy device of a node-local cache, whose driver not every kernel has.
    node.ip("link add nodelocaldns type bridge")?;
    node.ip("link set nodelocaldns up")?;
    node.ip("addr add 169.254.20.10/32 dev nodelocaldns")?;
    pod.ip("route add default via 10.42.0.1")?;
    let bpffs = Bpffs::new()?;
    let folder = server::folder(&server::records_of_groups(&[3]), None)?;
    let settings = json!({
        "metrics": {"enabled": true},
        "control": {"socket": folder.path().join("control.sock")},
        // Every interface, by default.
        "xdp": {"bpffs": bpffs.path(), "interfaces": null},
    });
    let server = Server::start(Some(node), folder, NODE_LOCAL, &settings)?;
    let gated = Gated { server, bpffs };
    let ask = || addresses(pod, NODE_LOCAL, NAME, TIMEOUT);
    // One query shows the interface, a few more serve it.
    wait_until(
        "the interface to be shown",
        Duration::from_secs(120),
        || {
            let answered = ask().is_ok_and(|found| found.is_some_and(|found| found.len() == 3));
            answered
                && gated
                    .states(node)
                    .is_ok_and(|states| states.contains_key("pod0"))
        },
    )
    .with_context(|| format!("{:?}\n{}", gated.states(node), gated.server.log()))?;
    let before = gated::hits(node)?;
    wait_until("the interface to answer", Duration::from_secs(120), || {
        (0..3).all(|_| ask().is_ok_and(|found| found.is_some()))
            && gated::hits(node).is_ok_and(|now| now > before)
    })
    .with_context(|| format!("{:?}\n{}", gated.states(node), gated.server.log()))?;
    gated.wait_for_state(node, "pod0", |pod0| pod0.state == "served")
}
