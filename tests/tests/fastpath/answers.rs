//! Answers at every hook and over every kind of link.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr, UdpSocket},
    time::Duration,
};

use anyhow::{Context, Result};
use dns_common::counters::Outcome;
use dns_core::{
    catalog::{AliasFiles, Records, Snapshot},
    config::HookMode,
    resolve::{self, AllRunning},
};
use dns_fastpath::{FastPath, Hook, NameSource};
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::RecordType,
};
use socket2::Socket;
use whole_system_tests::{
    bpffs::{Bpffs, config},
    client,
    fleet::Fleet,
    namespace::{End, Namespace, join},
    pair::{Pair, SHORT, TIMEOUT, addresses, ask, v4, v6},
    process::{run, wait_until},
    requires,
};

use crate::lab::{self, List, handle_of, start, wait};

/// Address counts; the last one exceeds a 512-byte reply.
const COUNTS: [u16; 4] = [1, 10, 24, 60];

/// Types with addresses.
const TYPES: [RecordType; 3] = [RecordType::A, RecordType::AAAA, RecordType::ANY];

/// Returns a list with one name per entry of [`COUNTS`].
fn counted() -> List {
    COUNTS.into_iter().fold(List::default(), |list, count| {
        list.counted(&format!("n{count}.bosh"), count)
    })
}

/// Returns the hook of an interface; `None` if it is not served.
fn hook_of(fast_path: &FastPath, interface: &str) -> Option<Hook> {
    let status = fast_path.status();
    status
        .interfaces
        .interfaces
        .iter()
        .find(|found| found.name == interface)
        .and_then(|found| found.hook)
}

/// Queries each server for all of [`COUNTS`] over both families and checks that every answer is
/// correct, came from the interface and was counted once.
fn ask_counts(from: &Namespace, servers: &[SocketAddr], fast_path: &FastPath) -> Result<()> {
    let (before, large_before) = (
        fast_path.counters().hits(),
        fast_path.counters().outcome(Outcome::LargeReply),
    );
    let mut large = 0;
    for &server in servers {
        for (count, record_type) in COUNTS
            .into_iter()
            .flat_map(|count| TYPES.map(|record_type| (count, record_type)))
        {
            let name = format!("N{count}.bOsh.");
            // Sixty IPv6 addresses exceed an Ethernet frame.
            let may_be_large = count == 60 && record_type != RecordType::A;
            let patience = if may_be_large { SHORT } else { TIMEOUT };
            let reply = ask(from, server, &name, record_type, Some(4096), patience)?;
            if reply.is_none() && may_be_large {
                large += 1;
                continue;
            }
            let reply =
                reply.with_context(|| format!("no reply to {name} {record_type} from {server}"))?;
            assert!(
                !reply.metadata.truncation,
                "a reply is complete, or left to userspace"
            );
            let families = if record_type == RecordType::ANY { 2 } else { 1 };
            assert_eq!(
                client::addresses(&reply).len(),
                families * usize::from(count),
                "{name} {record_type}"
            );
            lab::see_own_addresses(&reply, count)?;
            assert_eq!(
                reply.queries[0].name().to_string(),
                name,
                "the letter case is kept"
            );
        }
        // A reply over 512 bytes is truncated with TC set.
        let cut =
            ask(from, server, "n60.bosh.", RecordType::A, None, TIMEOUT)?.context("no reply")?;
        assert!(cut.metadata.truncation && cut.to_vec()?.len() <= 512);
        assert!(
            client::addresses(&cut).len() > 20,
            "nevertheless a part of the answers"
        );
    }
    let counters = fast_path.counters();
    assert_eq!(
        counters.hits() - before + large,
        servers.len() as u64 * ((COUNTS.len() * TYPES.len()) as u64 + 1)
    );
    assert_eq!(counters.outcome(Outcome::LargeReply) - large_before, large);
    assert_eq!(counters.outcome(Outcome::NoRoom), 0);
    Ok(())
}

#[test]
fn auto_answers_over_veth() -> Result<()> {
    requires!(namespaces, bpf);
    let (pair, bpffs) = (Pair::new("auto")?, Bpffs::new()?);
    let fast_path = start(
        &pair.server,
        &config(HookMode::Auto, &bpffs),
        &[v4(), v6()],
        counted(),
    )?;
    assert_eq!(hook_of(&fast_path, "srv"), Some(Hook::Tcx));
    assert_eq!(hook_of(&fast_path, "lo"), Some(Hook::Tcx));
    ask_counts(&pair.client, &[v4(), v6()], &fast_path)
}

/// Of a datagram that was written in pieces, programs at tc can read only the first one before they ask for more.
#[test]
fn queries_in_pieces_are_answered() -> Result<()> {
    requires!(namespaces, bpf);
    let (pair, bpffs) = (Pair::new("pieces")?, Bpffs::new()?);
    let fast_path = start(
        &pair.server,
        &config(HookMode::Auto, &bpffs),
        &[v4(), v6()],
        counted(),
    )?;
    let before = fast_path.counters().hits();
    let mut asked = 0;
    for (server, any) in [(v4(), "0.0.0.0:0"), (v6(), "[::]:0")] {
        let query = client::query("n10.bosh.", RecordType::A, Some(1232))?.to_vec()?;
        for first in 1..query.len() {
            let reply = pair.client.run(|| -> Result<Vec<u8>> {
                let socket = Socket::from(UdpSocket::bind(any)?);
                socket.connect(&server.into())?;
                socket.set_read_timeout(Some(TIMEOUT))?;
                socket.send_with_flags(&query[..first], libc::MSG_MORE)?;
                socket.send(&query[first..])?;
                let (socket, mut reply) = (UdpSocket::from(socket), vec![0; 1232]);
                let length = socket.recv(&mut reply)?;
                reply.truncate(length);
                Ok(reply)
            })?;
            let reply = reply.with_context(|| format!("{first} bytes first, to {server}"))?;
            assert_eq!(client::addresses(&Message::from_vec(&reply)?).len(), 10);
            asked += 1;
        }
    }
    assert_eq!(fast_path.counters().hits() - before, asked);
    Ok(())
}

#[test]
fn auto_answers_over_loopback() -> Result<()> {
    requires!(namespaces, bpf);
    let (alone, bpffs) = (Namespace::new("lo")?, Bpffs::new()?);
    alone.ip("addr add 169.254.0.2/32 dev lo")?;
    let servers = [v4(), "[::1]:53".parse()?];
    let fast_path = start(&alone, &config(HookMode::Auto, &bpffs), &servers, counted())?;
    ask_counts(&alone, &servers, &fast_path)
}

#[test]
fn native_mode_needs_client_napi() -> Result<()> {
    requires!(namespaces, bpf);
    let (pair, bpffs) = (Pair::new("native")?, Bpffs::new()?);
    let fast_path = start(
        &pair.server,
        &config(HookMode::Native, &bpffs),
        &[v4(), v6()],
        counted(),
    )?;
    assert_eq!(hook_of(&fast_path, "srv"), Some(Hook::Native));
    assert_eq!(
        hook_of(&fast_path, "lo"),
        Some(Hook::Tcx),
        "lo has no native XDP"
    );
    let _pass = lab::pass_program(&pair.client, "cli")?;
    // These always fit into the headroom.
    for (name, count) in [("n1.bosh.", 1), ("n10.bosh.", 10)] {
        let reply =
            ask(&pair.client, v4(), name, RecordType::A, None, TIMEOUT)?.context("no reply")?;
        assert_eq!(client::addresses(&reply).len(), count);
    }
    assert_eq!(fast_path.counters().outcome(Outcome::NoRoom), 0);
    let reply = ask(
        &pair.client,
        v4(),
        "n60.bosh.",
        RecordType::A,
        Some(4096),
        SHORT,
    )?;
    assert!(
        reply.is_none(),
        "a veth has no room for 60 addresses, and no server listens here"
    );
    assert_eq!(fast_path.counters().outcome(Outcome::NoRoom), 1);
    Ok(())
}

#[test]
fn bridged_containers_are_answered() -> Result<()> {
    requires!(namespaces, bpf);
    let (host, bpffs) = (Namespace::new("host")?, Bpffs::new()?);
    host.forward()?;
    host.ip("link add br0 type bridge")?;
    host.ip("addr add 10.9.0.1/24 dev br0")?;
    host.ip("addr add 169.254.0.2/32 dev lo")?;
    host.ip("link set br0 up")?;
    let mut containers = Vec::new();
    for number in 0..3 {
        let container = Namespace::new(&format!("box{number}"))?;
        let (outside, address) = (format!("v{number}"), format!("10.9.0.{}/24", number + 10));
        join(
            End::new(&host, &outside, &[]),
            End::new(&container, "eth0", &[&address]),
        )?;
        host.ip(&format!("link set {outside} master br0"))?;
        container.ip("route add default via 10.9.0.1")?;
        containers.push(container);
    }
    let mut on_bridge = config(HookMode::Auto, &bpffs);
    for interfaces in [None, Some(vec!["lo".to_owned(), "br0".to_owned()])] {
        on_bridge.interfaces = interfaces;
        let fast_path = start(&host, &on_bridge, &[v4()], counted())?;
        if on_bridge.interfaces.is_none() {
            assert!(
                hook_of(&fast_path, "br0").is_none(),
                "no query has arrived yet"
            );
            lab::deliver(&fast_path, &host, "br0")?;
        }
        wait_until("the bridge to be served", TIMEOUT, || {
            hook_of(&fast_path, "br0").is_some()
        })?;
        // Until then, the server's last report allows probes, which no server answers here.
        std::thread::sleep(Duration::from_secs(1));
        for container in &containers {
            ask_counts(container, &[v4()], &fast_path)?;
        }
    }
    Ok(())
}

#[test]
fn checksum_offload_keeps_replies_valid() -> Result<()> {
    requires!(namespaces, bpf);
    let (client, between, server) = (
        Namespace::new("sum-c")?,
        Namespace::new("sum-b")?,
        Namespace::new("sum-s")?,
    );
    server.forward()?;
    join(
        End::new(&between, "to-cli", &[]),
        End::new(&client, "cli", &["169.254.0.1/24", "fd00::1/64"]),
    )?;
    join(
        End::new(&between, "to-srv", &[]),
        End::new(&server, "srv", &["169.254.0.2/24", "fd00::2/64"]),
    )?;
    between.ip("link add br0 type bridge")?;
    for interface in ["to-cli", "to-srv"] {
        between.ip(&format!("link set {interface} master br0"))?;
    }
    between.ip("link set br0 up")?;
    // The client offloads its checksums. The way back has no offload: `to-cli` would have to
    // complete a partial checksum itself, and the client verifies each reply.
    run(between
        .command("ethtool")?
        .args(["-K", "to-cli", "tx", "off"]))?;
    run(client.command("ethtool")?.args(["-K", "cli", "rx", "off"]))?;
    let _pass = lab::pass_program(&between, "to-srv")?;
    for offload in ["on", "off"] {
        // With offload off, the client's queries carry complete checksums.
        run(client
            .command("ethtool")?
            .args(["-K", "cli", "tx", offload]))?;
        for mode in [HookMode::Tc, HookMode::Native] {
            let bpffs = Bpffs::new()?;
            let fast_path = start(&server, &config(mode, &bpffs), &[v4(), v6()], counted())?;
            let asked = match mode {
                HookMode::Tc => ask_counts(&client, &[v4(), v6()], &fast_path)
                    .and_then(|()| ask_unclear(&client, &[v4(), v6()], &fast_path)),
                // Replies that do not fit at XDP, and queries with ambiguous checksums, are passed
                // up.
                _ => ask_short(&client, &[v4(), v6()], &fast_path),
            };
            asked.with_context(|| format!("{mode:?}, offload {offload}"))?;
        }
    }
    Ok(())
}

/// Queries names whose replies fit at every hook; the queries have unambiguous checksums.
fn ask_short(from: &Namespace, servers: &[SocketAddr], fast_path: &FastPath) -> Result<()> {
    let before = fast_path.counters().hits();
    for &server in servers {
        for name in ["n1.bosh.", "n10.bosh."] {
            let reply = ask(from, server, name, RecordType::A, Some(1232), TIMEOUT)?;
            assert!(
                !client::addresses(&reply.with_context(|| name.to_owned())?).is_empty(),
                "{name}"
            );
        }
    }
    assert_eq!(
        fast_path.counters().hits() - before,
        2 * servers.len() as u64
    );
    Ok(())
}

/// Sends queries whose checksum field is equally valid as a complete and as a partial checksum; the
/// interface must give the correct reply.
fn ask_unclear(from: &Namespace, servers: &[SocketAddr], fast_path: &FastPath) -> Result<()> {
    let before = fast_path.counters().hits();
    for &server in servers {
        let reply = lab::ask_unclear(from, server, "n10.bosh.", RecordType::A, TIMEOUT)?;
        lab::see_own_addresses(&reply.context("no reply")?, 10)?;
    }
    assert_eq!(fast_path.counters().hits() - before, servers.len() as u64);
    Ok(())
}

#[test]
fn unknown_names_are_learned() -> Result<()> {
    requires!(namespaces, bpf);
    let (pair, bpffs) = (Pair::new("learn")?, Bpffs::new()?);
    let answers = List::default()
        .with("a.bosh", [IpAddr::from([10, 0, 0, 1])])
        .unlisted("later.bosh", [10, 0, 0, 2].into())
        .without("none.bosh");
    let fast_path = start(
        &pair.server,
        &config(HookMode::Auto, &bpffs),
        &[v4()],
        answers,
    )?;
    let asked = |name: &str, record_type| ask(&pair.client, v4(), name, record_type, None, TIMEOUT);

    let empty = asked("a.bosh.", RecordType::AAAA)?.context("no reply to AAAA")?;
    assert_eq!(
        (lab::code(&empty), empty.answers.len()),
        (ResponseCode::NoError, 0)
    );
    let empty = asked("a.bosh.", RecordType::TXT)?.context("no reply to TXT")?;
    assert_eq!(
        (lab::code(&empty), empty.answers.len()),
        (ResponseCode::NoError, 0)
    );
    let any = asked("a.bosh.", RecordType::ANY)?.context("no reply to ANY")?;
    assert_eq!(client::addresses(&any), [IpAddr::from([10, 0, 0, 1])]);

    let handle = handle_of(&fast_path);
    for name in ["later.bosh", "none.bosh"] {
        assert!(
            asked(&format!("{name}."), RecordType::A)?.is_none(),
            "{name} was not queried yet"
        );
        handle.learn(&lab::name_of(name));
    }
    wait(handle.flushed());
    assert_eq!(
        client::addresses(&asked("later.bosh.", RecordType::A)?.context("no reply")?).len(),
        1
    );
    let nothing = asked("none.bosh.", RecordType::SRV)?.context("no reply")?;
    assert_eq!(lab::code(&nothing), ResponseCode::NXDomain);
    let status = fast_path.status().names;
    assert_eq!(
        (status.published, status.learned, status.negative),
        (1, 1, 1)
    );

    assert!(
        handle
            .last_used_ns(&lab::name_of("later.bosh"))
            .is_some_and(|at| at > 0)
    );
    assert_eq!(handle.last_used_ns(&lab::name_of("never.bosh")), None);
    handle.withdraw(&[lab::name_of("later.bosh")]);
    wait(handle.flushed());
    assert!(asked("later.bosh.", RecordType::A)?.is_none());
    let counters = fast_path.counters();
    assert_eq!(counters.hits(), 5);
    let status = fast_path.status().interfaces;
    let slot = status
        .interfaces
        .iter()
        .find(|found| found.name == "srv")
        .and_then(|found| found.slot);
    assert_eq!(counters.interface(slot.context("srv is served")?), 5);
    Ok(())
}

#[test]
fn wildcard_listeners_answer_new_addresses() -> Result<()> {
    requires!(namespaces, bpf);
    let (pair, bpffs) = (Pair::new("any")?, Bpffs::new()?);
    let any = SocketAddr::from(([0, 0, 0, 0], 53));
    let fast_path = start(
        &pair.server,
        &config(HookMode::Auto, &bpffs),
        &[any],
        counted(),
    )?;
    assert!(addresses(&pair.client, v4(), "n1.bosh", TIMEOUT)?.is_some());
    pair.client.ip("route add 10.7.0.1/32 dev cli")?;
    pair.server.ip("addr add 10.7.0.1/32 dev srv")?;
    let later = SocketAddr::from(([10, 7, 0, 1], 53));
    wait_until("the new address", TIMEOUT, || {
        addresses(&pair.client, later, "n1.bosh", SHORT).is_ok_and(|found| found.is_some())
    })?;
    pair.server.ip("addr del 10.7.0.1/32 dev srv")?;
    wait_until("the end of the address", TIMEOUT, || {
        !fast_path.status().interfaces.endpoints.contains(&later)
    })
}

#[test]
fn published_names_match_resolver() -> Result<()> {
    requires!(namespaces, bpf);
    let fleet = Fleet::generate(900, 3);
    let (records, _) = Records::parse(&fleet.records_json())?;
    let aliases = [
        ("a.json", fleet.aliases_json()),
        ("b.json", fleet.cell_aliases_json()),
    ];
    let (aliases, _) = AliasFiles::parse(aliases.iter().map(|(name, file)| (*name, &file[..])))?;
    let (snapshot, _) = Snapshot::build(records, &aliases);
    let (pair, bpffs) = (Pair::new("prod")?, Bpffs::new()?);
    let mut large = config(HookMode::Auto, &bpffs);
    large.max_names = 65_536;
    let names: Vec<_> = NameSource::published_names(&snapshot).collect();
    let expected: Vec<_> = names
        .iter()
        .map(|name| resolve::resolve(&snapshot, &AllRunning, name))
        .collect();
    let fast_path = start(&pair.server, &large, &[v4()], snapshot)?;
    let status = fast_path.status().names;
    println!("{status:?}");
    assert_eq!(status.unfitting.total(), 0);
    let mut answered = 0;
    pair.client.run(|| -> Result<()> {
        for (name, expected) in names.iter().zip(&expected) {
            let Some(expected) = expected
                .as_ref()
                .filter(|found| found.existence == resolve::Existence::Found)
            else {
                continue;
            };
            for (record_type, addresses) in [
                (
                    RecordType::A,
                    expected
                        .v4
                        .iter()
                        .map(|&ip| ip.into())
                        .collect::<BTreeSet<IpAddr>>(),
                ),
                (
                    RecordType::AAAA,
                    expected.v6.iter().map(|&ip| ip.into()).collect(),
                ),
            ] {
                let query = client::query(&name.to_string(), record_type, Some(4096))?;
                let whole = 64 + 28 * addresses.len() + name.to_string().len();
                if whole > 1232 {
                    // Exceeds the limit of some hook, so it is left to userspace, which is absent
                    // here.
                    continue;
                }
                let reply = client::ask(v4(), &query).with_context(|| name.to_string())?;
                let found: BTreeSet<IpAddr> = client::addresses(&reply).into_iter().collect();
                if reply.metadata.truncation {
                    assert!(found.is_subset(&addresses), "{name} {record_type}");
                } else {
                    assert_eq!(found, addresses, "{name} {record_type}");
                }
                answered += 1;
            }
        }
        Ok(())
    })??;
    assert_eq!(
        fast_path.counters().hits(),
        answered,
        "all of them from the interface"
    );
    assert!(answered > 100);
    Ok(())
}
