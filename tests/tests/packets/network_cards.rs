//! Runs the server in a virtual machine with network cards: virtio-net-pci and vmxnet3, whose
//! drivers have native XDP, and e1000e, whose driver does not. Queries come from a namespace on this
//! machine through tap devices. Each reply over UDP is compared with the reply over TCP.

use std::{
    collections::BTreeSet,
    fs,
    io::Read as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use hickory_proto::{op::Message, rr::RecordType};
use serde_json::Value;
use whole_system_tests::{
    cards::{CARDS, Card, GROUPS, MODES, NEXT_MODE},
    client,
    namespace::Namespace,
    process::{Kept, wait_until},
};

use crate::other_kernel::{ALL_WELL, Kernel, LIMIT};

/// Modules needed unless they are built in, in order of loading.
const MODULES: [&str; 15] = [
    "virtio_ring",
    "virtio",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "failover",
    "net_failover",
    "dimlib",
    "virtio_net",
    "vmxnet3",
    "pps_core",
    "ptp",
    "e1000e",
    "sch_ingress",
    "cls_bpf",
];

/// Time limit for one reply: the machine is emulated, and the host may be busy.
const TIMEOUT: Duration = Duration::from_secs(120);

/// EDNS sizes of the queries.
const SIZES: [u16; 3] = [512, 1232, 4096];

#[test]
fn network_cards_on_6_12() -> Result<()> {
    Kernel::of_debian("backports").map_or(Ok(()), |kernel| {
        try_cards(&kernel, &["virtio-net-pci", "vmxnet3"])
    })
}

/// The driver vmxnet3 has native XDP since Linux 6.6.
#[test]
fn network_cards_on_6_1() -> Result<()> {
    Kernel::of_debian("bookworm-rt")
        .map_or(Ok(()), |kernel| try_cards(&kernel, &["virtio-net-pci"]))
}

/// `native` lists the cards whose driver has native XDP.
fn try_cards(kernel: &Kernel, native: &[&str]) -> Result<()> {
    let client = Namespace::new("vm")?;
    for (number, _) in CARDS.iter().enumerate() {
        let tap = format!("tap{number}");
        client.ip(&format!("tuntap add {tap} mode tap"))?;
        client.ip(&format!("address add {}/24 dev {tap}", peer(number).0))?;
        client.ip(&format!(
            "address add {}/64 dev {tap} nodad",
            peer(number).1
        ))?;
        client.ip(&format!("link set {tap} up"))?;
    }
    let folder = tempfile::TempDir::with_prefix("bdx-vm-")?;
    let archive = kernel.archive(folder.path(), &MODULES)?;
    let qemu = kernel.machine(&archive, "CARDS=1")?;
    // The process enters the namespace, where the tap devices are.
    let mut command = client.command(qemu.get_program())?;
    command.args(qemu.get_args());
    for (number, card) in CARDS.iter().enumerate() {
        command
            .arg("-netdev")
            .arg(format!(
                "tap,id=net{number},ifname=tap{number},script=no,downscript=no"
            ))
            .arg("-device")
            .arg(format!(
                "{},netdev=net{number},mac=52:54:00:00:00:{number:02x},romfile=",
                card.device
            ));
    }
    let console = folder.path().join("console");
    let mut machine = Kept::spawn(
        command
            .stdin(Stdio::null())
            .stdout(fs::File::create(&console)?)
            .stderr(Stdio::null()),
    )?;
    let said = || String::from_utf8_lossy(&fs::read(&console).unwrap_or_default()).into_owned();
    let mut tried = || -> Result<()> {
        for mode in MODES {
            let ready = format!("vm-init: cards: {mode}: ready");
            wait_until(&ready, LIMIT, || {
                said().contains(&ready) || machine.ended().is_ok_and(|end| end.is_some())
            })?;
            ensure!(said().contains(&ready), "the machine ended before {mode}");
            let compared: Result<()> = CARDS.iter().enumerate().try_for_each(|(number, card)| {
                compare_replies(&client, card, number)
                    .with_context(|| format!("{mode}: {}", card.device))
            });
            let report = client.run(report)??;
            compared.with_context(|| format!("counters by card: {report}"))?;
            for (number, card) in CARDS.iter().enumerate() {
                let seen = &report[number];
                println!("{mode}: {}: {seen}", card.device);
                let expected = if mode == "native" && native.contains(&card.device) {
                    "native"
                } else {
                    "tc"
                };
                let hook = seen["hook"].as_str().context("a hook")?;
                let is_expected = match expected {
                    "native" => hook == "native",
                    _ => ["tcx", "clsact"].contains(&hook),
                };
                ensure!(
                    is_expected,
                    "{mode}: {} is served by {hook}, not {expected}",
                    card.device
                );
                let answered = seen["fast_path_replies"].as_u64().context("replies")?;
                ensure!(
                    answered > 0,
                    "{mode}: {} answered nothing at the interface",
                    card.device
                );
                let lost = seen["lost"].as_object().context("counters of the driver")?;
                // Not rx_errors: e1000e counts a short frame of another protocol there.
                let is_loss = |name: &str| name.contains("drop") || name == "tx_errors";
                let none_lost = lost
                    .iter()
                    .all(|(name, count)| !is_loss(name) || count == 0);
                ensure!(none_lost, "{mode}: {} lost packets: {seen}", card.device);
            }
        }
        machine.wait(LIMIT)?;
        ensure!(said().contains(ALL_WELL), "the machine failed");
        Ok(())
    };
    let outcome = tried();
    outcome.with_context(|| format!("output of the virtual machine:\n{}", said()))
}

/// Returns the addresses of this machine on the network of a card.
fn peer(number: usize) -> (Ipv4Addr, Ipv6Addr) {
    let number = u8::try_from(number).expect("a few cards");
    (
        Ipv4Addr::new(198, 18, number, 1),
        Ipv6Addr::new(0xfd00, number.into(), 0, 0, 0, 0, 0, 1),
    )
}

/// Compares the replies over UDP with those over TCP: each name, size and address family.
fn compare_replies(client: &Namespace, card: &Card, number: usize) -> Result<()> {
    for address in [IpAddr::V4(card.v4(number)), IpAddr::V6(card.v6(number))] {
        let server = SocketAddr::new(address, 53);
        for instances in GROUPS {
            let name = format!("q-s0.q-g{instances}.bosh.");
            let query = client::query(&name, RecordType::A, None)?;
            let mut whole = BTreeSet::new();
            wait_until("the reply by TCP", TIMEOUT, || {
                let reply = client
                    .run(|| client::ask_tcp(server, &query))
                    .and_then(|reply| reply);
                whole = reply.iter().flat_map(client::addresses).collect();
                reply.is_ok()
            })?;
            ensure!(
                whole.len() == usize::from(instances),
                "{name} at {server} by TCP: {whole:?}"
            );
            for size in SIZES {
                let query = client::query(&name, RecordType::A, Some(size))?.to_vec()?;
                let reply = client.run(|| client::ask_raw(server, &query, TIMEOUT))?;
                let reply = reply.with_context(|| format!("{name} at {server}, EDNS {size}"))?;
                ensure!(
                    reply.len() <= usize::from(size),
                    "{name} at {server}: {} bytes",
                    reply.len()
                );
                let message = Message::from_vec(&reply)?;
                let found = client::addresses(&message);
                let distinct: BTreeSet<IpAddr> = found.iter().copied().collect();
                ensure!(
                    distinct.len() == found.len(),
                    "{name} at {server}: an address twice"
                );
                let is_equal = if message.metadata.truncation {
                    !distinct.is_empty() && distinct.is_subset(&whole)
                } else {
                    distinct == whole
                };
                ensure!(is_equal, "{name} at {server}, EDNS {size}: {message}");
            }
        }
    }
    Ok(())
}

/// Fetches the machine's report on a mode, after which the machine starts the next one.
fn report() -> Result<Value> {
    let mut connection = TcpStream::connect((CARDS[0].v4(0), NEXT_MODE))?;
    connection.set_read_timeout(Some(TIMEOUT))?;
    let mut text = String::new();
    connection.read_to_string(&mut text)?;
    Ok(serde_json::from_str(&text)?)
}
