//! The interface gate with the real server: an interface answers only while the kernel delivers its
//! queries.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use hickory_proto::op::ResponseCode;
use serde_json::json;
use whole_system_tests::{
    bpffs::Bpffs,
    cell::feed,
    client,
    metrics::Metrics,
    namespace::{End, Namespace, join},
    pair::{Pair, addresses, v4},
    process::wait_until,
    requires,
    server::{self, Server},
};

use crate::gated::{Gated, NAME, State, child, deny_all, hits, outlast_stopped_attacher};

/// Timeout of a single query.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Sends `times` queries, ten per second; returns the number of replies.
fn ask(client: &Namespace, times: usize) -> Result<usize> {
    let mut answered = 0;
    for _ in 0..times {
        let begun = Instant::now();
        answered += usize::from(
            addresses(client, v4(), NAME, TIMEOUT)?.is_some_and(|found| found.len() == 3),
        );
        thread::sleep(Duration::from_millis(100).saturating_sub(begun.elapsed()));
    }
    Ok(answered)
}

/// Queries until interfaces answer.
fn wait_for_hits(host: &Namespace, client: &Namespace) -> Result<()> {
    let before = hits(host)?;
    wait_until("the interface to answer", Duration::from_secs(120), || {
        ask(client, 3).is_ok_and(|answered| answered == 3)
            && hits(host).is_ok_and(|now| now > before)
    })
}

/// Starts a server whose interface answers.
fn serving(label: &str) -> Result<(Pair, Gated)> {
    let pair = Pair::new(label)?;
    let gated = Gated::start(&pair.server)?;
    wait_for_hits(&pair.server, &pair.client).with_context(|| gated.server.log())?;
    Ok((pair, gated))
}

/// Queries until the interface is left to userspace for a reason. All queries are answered meanwhile.
fn wait_for_userspace(pair: &Pair, gated: &Gated, why: &str) -> Result<()> {
    wait_until(
        "the interface to be left to userspace",
        Duration::from_secs(120),
        || {
            let asked = ask(&pair.client, 3).is_ok_and(|answered| answered == 3);
            let states = gated.states(&pair.server).unwrap_or_default();
            asked && states.get("srv").is_some_and(|srv| srv.why.contains(why))
        },
    )
    .with_context(|| format!("{:?}\n{}", gated.states(&pair.server), gated.server.log()))
}

#[test]
fn queries_open_gate_rules_close() -> Result<()> {
    requires!(namespaces, bpf);
    let pair = Pair::new("gate")?;
    let gated = Gated::start(&pair.server)?;
    ensure!(hits(&pair.server)? == 0, "no query has arrived yet");
    wait_for_hits(&pair.server, &pair.client).with_context(|| gated.server.log())?;
    // Probes arrive, so the interface stays served.
    ensure!(ask(&pair.client, 40)? == 40);
    gated.wait_for_state(&pair.server, "srv", |srv| srv.state == "served")?;

    for (program, rule) in [
        ("iptables-legacy", "INPUT -p udp --dport 53 -j DROP"),
        ("iptables-nft", "INPUT -s 169.254.0.1 -j REJECT"),
        (
            "iptables-legacy",
            "INPUT -p udp --dport 53 -m limit --limit 1/hour -j DROP",
        ),
        ("iptables-nft", "OUTPUT -p udp --sport 53 -j DROP"),
    ] {
        pair.server.capture(&format!("{program} -w -A {rule}"))?;
        let begun = Instant::now();
        wait_until("the gate to close", Duration::from_secs(120), || {
            let before = hits(&pair.server);
            // Whether queries are answered meanwhile depends on the rule.
            let asked = ask(&pair.client, 2);
            matches!((before, asked, hits(&pair.server)), (Ok(before), Ok(_), Ok(after)) if before == after)
        })
        .with_context(|| format!("{rule}: {:?}", gated.states(&pair.server)))?;
        println!("{program} {rule}: closed after {:?}", begun.elapsed());
        pair.server.capture(&format!("{program} -w -D {rule}"))?;
        wait_for_hits(&pair.server, &pair.client).with_context(|| {
            format!(
                "after {rule}: {:?}\n{}",
                gated.states(&pair.server),
                gated.server.log()
            )
        })?;
    }
    Ok(())
}

/// Clients behind one interface; rules drop the second.
const CLIENTS: [&str; 2] = ["169.254.0.1", "169.254.0.3"];

/// Timeout of a query that must not be answered.
const SILENCE: Duration = Duration::from_millis(100);

/// Sends `times` queries of each client in turn; returns the number of replies to each. `second` is the
/// timeout of the second client.
fn ask_in_turn(clients: &Namespace, times: usize, second: Duration) -> Result<[usize; 2]> {
    let query = client::query(NAME, hickory_proto::rr::RecordType::A, None)?.to_vec()?;
    let mut answered = [0; 2];
    for _ in 0..times {
        for ((client, timeout), answered) in CLIENTS
            .into_iter()
            .zip([TIMEOUT, second])
            .zip(&mut answered)
        {
            let client: IpAddr = client.parse()?;
            let reply = clients.run(|| client::ask_raw_as(Some(client), v4(), &query, timeout))?;
            *answered += usize::from(reply.is_ok());
        }
    }
    Ok(answered)
}

/// A rule that drops the second client.
struct Dropping {
    /// Command and input that load it.
    load: (&'static [&'static str], &'static str),
    remove: (&'static [&'static str], &'static str),
}

const DROPPING: [Dropping; 3] = [
    Dropping {
        load: (
            &["iptables-legacy-restore", "--noflush", "-w"],
            "*filter\n-A INPUT -s 169.254.0.3 -j DROP\nCOMMIT\n",
        ),
        remove: (
            &["iptables-legacy-restore", "--noflush", "-w"],
            "*filter\n-D INPUT -s 169.254.0.3 -j DROP\nCOMMIT\n",
        ),
    },
    Dropping {
        load: (
            &["nft", "-f", "-"],
            "table inet t { chain c { type filter hook input priority 0; ip saddr 169.254.0.3 drop; }; }\n",
        ),
        remove: (&["nft", "-f", "-"], "delete table inet t\n"),
    },
    // The kernel is asked for members of the set.
    Dropping {
        load: (
            &[
                "sh",
                "-c",
                "ipset restore && iptables-legacy -w -A INPUT -m set --match-set held src -j DROP",
            ],
            "create held hash:ip\nadd held 169.254.0.3\n",
        ),
        remove: (
            &[
                "sh",
                "-c",
                "iptables-legacy -w -D INPUT -m set --match-set held src -j DROP && ipset restore",
            ],
            "destroy held\n",
        ),
    },
];

#[test]
fn dropped_client_gets_no_answer() -> Result<()> {
    requires!(namespaces, bpf);
    let pair = Pair::new("clients")?;
    pair.client
        .ip(&format!("addr add {}/24 dev cli", CLIENTS[1]))?;
    let gated = Gated::start(&pair.server)?;
    for (number, Dropping { load, remove }) in DROPPING.iter().enumerate() {
        let state = || {
            format!(
                "rule {number}: {:?}\n{}",
                gated.states(&pair.server),
                gated.server.log()
            )
        };
        // First one rule that is there before its client, then two that take effect meanwhile.
        if number == 0 {
            feed(&pair.server, load.0, load.1)?;
        }
        wait_for_hits(&pair.server, &pair.client).with_context(state)?;
        if number > 0 {
            ensure!(
                ask_in_turn(&pair.client, 20, TIMEOUT)? == [20, 20],
                "{}",
                state()
            );
            feed(&pair.server, load.0, load.1)?;
        }
        // Of a client that has not been seen before, one query must be a probe.
        let (loaded, limit) = (Instant::now(), Duration::from_secs(120));
        wait_until("the interface to answer no dropped client", limit, || {
            ask_in_turn(&pair.client, 5, SILENCE).is_ok_and(|answered| answered == [5, 0])
        })
        .with_context(state)?;
        println!("rule {number}: no answer after {:?}", loaded.elapsed());
        let before = hits(&pair.server)?;
        ensure!(
            ask_in_turn(&pair.client, 30, SILENCE)? == [30, 0],
            "{}",
            state()
        );
        let by_interface = hits(&pair.server)? - before;
        ensure!(by_interface >= 15, "{by_interface} of 30: {}", state());
        gated.wait_for_state(&pair.server, "srv", is_for_heard_clients)?;
        feed(&pair.server, remove.0, remove.1)?;
        wait_until(
            "both clients to be answered",
            Duration::from_secs(120),
            || ask_in_turn(&pair.client, 5, TIMEOUT).is_ok_and(|answered| answered == [5, 5]),
        )
        .with_context(state)?;
    }
    Ok(())
}

/// Returns whether an interface answers only clients whose own queries arrive.
fn is_for_heard_clients(interface: &State) -> bool {
    interface.state == "served" && interface.why.contains("only clients whose own queries")
}

/// Rules that accept the first client alone, as on an uplink that is shared with strangers.
const ACCEPTING: [(&[&str], &str); 3] = [
    (
        &["iptables-legacy-restore", "-w"],
        "*filter\n:INPUT DROP\n-A INPUT -i lo -j ACCEPT\n-A INPUT -s 169.254.0.1 -p udp --dport 53 -j ACCEPT\nCOMMIT\n",
    ),
    (
        &["nft", "-f", "-"],
        "table inet t { set allowed { type ipv4_addr; elements = { 169.254.0.1 }; }; chain c { type filter hook input priority 0; policy drop; iif lo accept; ip saddr @allowed udp dport 53 accept; }; }\n",
    ),
    // The replies decide.
    (
        &["nft", "-f", "-"],
        "table inet t { chain c { type filter hook output priority 0; ip daddr 169.254.0.3 drop; }; }\n",
    ),
];

#[test]
fn stranger_is_not_answered_where_rules_name_clients() -> Result<()> {
    requires!(namespaces, bpf);
    for (load, rules) in ACCEPTING {
        let pair = Pair::new("strangers")?;
        pair.client
            .ip(&format!("addr add {}/24 dev cli", CLIENTS[1]))?;
        feed(&pair.server, load, rules)?;
        let gated = Gated::start(&pair.server)?;
        let state = || format!("{rules}: {:?}", gated.states(&pair.server));
        wait_for_hits(&pair.server, &pair.client).with_context(state)?;
        let before = hits(&pair.server)?;
        // The stranger has never asked before.
        ensure!(
            ask_in_turn(&pair.client, 26, SILENCE)? == [26, 0],
            "{}",
            state()
        );
        let by_interface = hits(&pair.server)? - before;
        ensure!(by_interface >= 13, "{by_interface} of 26: {}", state());
        gated.wait_for_state(&pair.server, "srv", is_for_heard_clients)?;
    }
    Ok(())
}

#[test]
fn forged_senders_turn_nothing_off() -> Result<()> {
    requires!(namespaces, bpf);
    let pair = Pair::new("forged")?;
    // Strict validation of the reverse path: there is no route to the forged senders.
    let strict =
        |path: &str| std::fs::write(format!("/proc/sys/net/ipv4/conf/{path}/rp_filter"), "1");
    pair.server
        .run(|| strict("all").and_then(|()| strict("srv")))??;
    pair.client.ip("route add local 10.9.0.0/16 dev lo")?;
    let gated = Gated::start(&pair.server)?;
    wait_for_hits(&pair.server, &pair.client).with_context(|| gated.server.log())?;
    let query = client::query(NAME, hickory_proto::rr::RecordType::A, None)?.to_vec()?;
    let forge = |number: u16| -> Result<bool> {
        let [high, low] = number.to_be_bytes();
        let sender = IpAddr::from([10, 9, high, low]);
        let patience = Duration::from_millis(10);
        let reply = pair
            .client
            .run(|| client::ask_raw_as(Some(sender), v4(), &query, patience))?;
        Ok(reply.is_ok())
    };
    // Until two of their probes are lost.
    let mut forged = 1;
    wait_until("the gate to notice", Duration::from_secs(120), || {
        let answered = (0..20).filter(|number| forge(forged + number).unwrap_or(true));
        let answered = answered.count();
        forged += 20;
        answered == 0
    })
    .with_context(|| gated.server.log())?;
    for _ in 0..10 {
        for number in 0..20 {
            ensure!(!forge(forged + number)?, "a forged sender was answered");
        }
        forged += 20;
        let before = hits(&pair.server)?;
        ensure!(ask(&pair.client, 10)? == 10);
        let by_interface = hits(&pair.server)? - before;
        ensure!(
            by_interface >= 5,
            "{by_interface} of 10 after {forged} forged ones: {:?}",
            gated.states(&pair.server)?
        );
    }
    gated.wait_for_state(&pair.server, "srv", is_for_heard_clients)
}

#[test]
fn diverted_local_queries_are_answered() -> Result<()> {
    requires!(namespaces, bpf);
    let host = Namespace::new("diverted")?;
    host.ip("addr add 169.254.0.2/32 dev lo")?;
    host.ip("route add default dev lo")?;
    let gated = Gated::start(&host)?;
    wait_for_hits(&host, &host).with_context(|| gated.server.log())?;
    host.capture(
        "iptables-legacy -w -t nat -A OUTPUT -d 8.8.8.8 -p udp --dport 53 -j DNAT --to 169.254.0.2:53",
    )?;
    gated.wait_for_state(&host, "lo", |lo| lo.state == "refused")?;
    let other = "8.8.8.8:53".parse()?;
    for _ in 0..5 {
        let found = addresses(&host, other, NAME, TIMEOUT)?;
        ensure!(
            found.is_some_and(|found| found.len() == 3),
            "{:?}",
            gated.states(&host)?
        );
    }
    Ok(())
}

/// Interfaces that may have the server's address, with the kinds of link to try in turn; local queries for it travel over
/// `lo` all the same. The first is that of the job on Ubuntu Noble; where the kernel has no dummies, another link
/// without a peer takes its place.
const LAYOUTS: [(&str, &[&str]); 4] = [
    ("bosh-dns", &["dummy", "ifb"]),
    ("eth0", &["veth peer name outside"]),
    ("br0", &["bridge"]),
    ("lo", &[]),
];

#[test]
fn local_queries_are_answered_wherever_the_address_is() -> Result<()> {
    requires!(namespaces, bpf);
    for (interface, kinds) in LAYOUTS {
        let host = Namespace::new("noble")?;
        let mut added = Ok(());
        for kind in kinds {
            added = host.ip(&format!("link add {interface} type {kind}"));
            if added.is_ok() {
                break;
            }
        }
        added?;
        host.ip(&format!("addr add 169.254.0.2/32 dev {interface}"))?;
        host.ip(&format!("link set {interface} up"))?;
        let gated = Gated::start(&host)?;
        wait_for_hits(&host, &host)
            .with_context(|| format!("{interface}: {:?}", gated.states(&host)))?;
        // Probes arrive, so `lo` stays served.
        ensure!(ask(&host, 40)? == 40, "{interface}");
        let before = hits(&host)?;
        ensure!(ask(&host, 20)? == 20, "{interface}");
        let by_interface = hits(&host)? - before;
        ensure!(by_interface >= 10, "{interface}: {by_interface} of 20");
        gated.wait_for_state(&host, "lo", |lo| lo.state == "served")?;
    }
    Ok(())
}

#[test]
fn local_queries_keep_interface_served() -> Result<()> {
    requires!(namespaces, bpf);
    let pair = Pair::new("locals")?;
    let gated = Gated::start(&pair.server)?;
    wait_for_hits(&pair.server, &pair.client).with_context(|| gated.server.log())?;
    let done = AtomicBool::new(false);
    thread::scope(|scope| -> Result<()> {
        let asking = scope.spawn(|| -> Result<()> {
            while !done.load(Ordering::Relaxed) {
                // Each report of the server then has a local sender.
                ask(&pair.server, 1)?;
            }
            Ok(())
        });
        // Several times as long as two lost probes need to close the gate.
        let asked = (0..8).try_for_each(|round| -> Result<()> {
            let before = hits(&pair.server)?;
            ensure!(ask(&pair.client, 20)? == 20);
            let by_interface = hits(&pair.server)? - before;
            ensure!(
                by_interface >= 10,
                "round {round}: {by_interface} of 20: {:?}",
                gated.states(&pair.server)?
            );
            Ok(())
        });
        done.store(true, Ordering::Relaxed);
        asking.join().expect("no panic")?;
        asked
    })
    .with_context(|| gated.server.log())
}

#[test]
fn refused_route_ends_answers() -> Result<()> {
    requires!(namespaces, bpf);
    let pair = Pair::new("routes")?;
    let gated = Gated::start(&pair.server)?;
    for refusal in [
        "route add blackhole 169.254.0.1/32",
        "route add prohibit 169.254.0.1/32",
        "rule add prohibit to 169.254.0.1/32 pref 5",
        "rule add blackhole to 169.254.0.1/32 pref 5",
    ] {
        wait_for_hits(&pair.server, &pair.client).with_context(|| gated.server.log())?;
        pair.server.ip(refusal)?;
        let is_silent =
            || addresses(&pair.client, v4(), NAME, SILENCE).is_ok_and(|found| found.is_none());
        wait_until(
            "the interface to answer no more",
            Duration::from_secs(120),
            || (0..5).all(|_| is_silent()),
        )
        .with_context(|| format!("{refusal:?}: {:?}", gated.states(&pair.server)))?;
        let before = hits(&pair.server)?;
        ensure!(
            (0..10).all(|_| is_silent()) && hits(&pair.server)? == before,
            "{refusal:?}"
        );
        // Where the kernel validates senders (`rp_filter`), the queries do not arrive either.
        gated
            .wait_for_state(&pair.server, "srv", is_for_heard_clients)
            .with_context(|| format!("{refusal:?}"))?;
        pair.server.ip(&refusal.replace(" add ", " del "))?;
    }
    wait_for_hits(&pair.server, &pair.client).with_context(|| gated.server.log())
}

#[test]
fn stopped_attacher_ends_answers() -> Result<()> {
    requires!(namespaces, bpf);
    let pair = Pair::new("stopped")?;
    let gated = Gated::start_prepared(&pair.server, &json!({"lease": "60s"}), |_| {})?;
    let attacher = child(gated.server.pid())?;
    outlast_stopped_attacher(&pair, &gated.server, attacher)
}

/// Rules that no reading of the tables decides.
const UNDECIDED: [(&str, &str); 3] = [
    (
        "-A INPUT -p udp --dport 53 -m time --timestart 03:00 --timestop 03:01 -j DROP",
        "decides by \"time\", which only the kernel can evaluate",
    ),
    (
        "-A INPUT -p udp --dport 53 -m string --algo bm --string x.y -j DROP",
        "decides by \"string\"",
    ),
    (
        "-A OUTPUT -p udp -m owner --gid-owner 64999 -j DROP",
        "decides by \"owner\"",
    ),
];

#[test]
fn renamed_interface_meets_its_rules() -> Result<()> {
    requires!(namespaces, bpf);
    let pair = Pair::new("rename")?;
    for rule in [
        "-m limit --limit 1000/second --limit-burst 1000 -j ACCEPT",
        "-j DROP",
    ] {
        let command = format!("iptables-legacy -w -A INPUT -i slow -p udp --dport 53 {rule}");
        pair.server.capture(&command)?;
    }
    let gated = Gated::start(&pair.server)?;
    wait_for_hits(&pair.server, &pair.client).with_context(|| gated.server.log())?;
    // The index stays, as that of a device which comes back from a container.
    for change in ["down", "name slow", "up"] {
        let name = if change == "up" { "slow" } else { "srv" };
        pair.server
            .capture(&format!("ip link set {name} {change}"))?;
    }
    gated.wait_for_state(&pair.server, "slow", |slow| {
        slow.why.contains("the packet filter limits its queries")
    })?;
    ensure!(ask(&pair.client, 3)? == 3);
    Ok(())
}

#[test]
fn undecided_rules_leave_interface_to_userspace() -> Result<()> {
    requires!(namespaces, bpf);
    let pair = Pair::new("undecided")?;
    let gated = Gated::start(&pair.server)?;
    for (rule, why) in UNDECIDED {
        wait_for_hits(&pair.server, &pair.client).with_context(|| gated.server.log())?;
        pair.server.capture(&format!("iptables-legacy -w {rule}"))?;
        // The rule drops none of the queries.
        wait_for_userspace(&pair, &gated, why).context(rule)?;
        let before = hits(&pair.server)?;
        ensure!(
            ask(&pair.client, 20)? == 20 && hits(&pair.server)? == before,
            "{rule}"
        );
        pair.server.capture("iptables-legacy -w -F")?;
    }
    Ok(())
}

#[test]
fn ipset_member_is_noticed_without_rule_change() -> Result<()> {
    requires!(namespaces, bpf);
    let pair = Pair::new("members")?;
    pair.server.capture("ipset create held hash:net")?;
    pair.server
        .capture("iptables-legacy -w -A INPUT -m set --match-set held src -j REJECT")?;
    let gated = Gated::start(&pair.server)?;
    for _ in 0..2 {
        wait_for_hits(&pair.server, &pair.client).with_context(|| gated.server.log())?;
        pair.server.capture("ipset add held 169.254.0.1")?;
        let is_silent =
            || addresses(&pair.client, v4(), NAME, SILENCE).is_ok_and(|found| found.is_none());
        wait_until(
            "the member to get no answer",
            Duration::from_secs(120),
            || (0..5).all(|_| is_silent()),
        )?;
        wait_until("the reason in status", Duration::from_secs(120), || {
            let states = gated.states(&pair.server).unwrap_or_default();
            is_silent()
                && states
                    .get("srv")
                    .is_some_and(|srv| srv.why.contains("packet filter"))
        })
        .with_context(|| format!("{:?}", gated.states(&pair.server)))?;
        pair.server.capture("ipset del held 169.254.0.1")?;
    }
    wait_for_hits(&pair.server, &pair.client).with_context(|| gated.server.log())
}

#[test]
fn moved_interface_is_left_alone() -> Result<()> {
    requires!(namespaces, bpf);
    let (pair, gated) = serving("leaving")?;
    let other = Namespace::new("leaving-other")?;
    pair.server
        .ip(&format!("link set srv netns {}", other.name()))?;
    other.ip("addr add 169.254.0.2/24 dev srv")?;
    other.ip("link set srv up")?;
    wait_until(
        "the interface to leave the status",
        Duration::from_secs(120),
        || {
            gated
                .states(&pair.server)
                .is_ok_and(|states| !states.contains_key("srv"))
        },
    )
    .with_context(|| format!("{:?}", gated.states(&pair.server)))?;
    let before = hits(&pair.server)?;
    for _ in 0..5 {
        let found = addresses(&pair.client, v4(), NAME, SILENCE)?;
        ensure!(
            found.is_none(),
            "an answer from a namespace in which the server does not listen: {found:?}"
        );
    }
    ensure!(hits(&pair.server)? == before);
    wait_until("its pin to go", Duration::from_secs(120), || {
        gated.bpffs.links().is_empty()
    })
}

/// Length of the count of probes: several intervals of a proven admission (`attach/gate.rs`).
const PROVEN_WATCHED: Duration = Duration::from_secs(31);

#[test]
fn proven_interface_is_probed_rarely() -> Result<()> {
    requires!(namespaces, bpf);
    let (pair, gated) = serving("proven")?;
    let probes = || -> Result<u64> { Ok(Metrics::read(&pair.server)?.probes()) };
    // Nothing reports that an admission is proven; each probe of a young one follows the one before after a second.
    wait_until("probes to become rare", Duration::from_secs(240), || {
        let (before, begun, mut asked) = (probes(), Instant::now(), 0);
        while begun.elapsed() < PROVEN_WATCHED {
            asked += ask(&pair.client, 10).unwrap_or(0);
        }
        let most = begun.elapsed().as_secs() / 10 + 1;
        let (Ok(before), Ok(after)) = (before, probes()) else {
            return false;
        };
        println!(
            "{} probes in {:?}, {asked} answers",
            after - before,
            begun.elapsed()
        );
        after <= before + most && asked > most as usize
    })
    .with_context(|| gated.server.log())?;
    // A change of the machine's network makes them frequent again.
    pair.server.ip("link add late type veth peer name etal")?;
    wait_until("probes to become frequent", Duration::from_secs(120), || {
        let (before, begun) = (probes(), Instant::now());
        let asked = ask(&pair.client, 30).is_ok_and(|answered| answered == 30);
        let least = begun.elapsed().as_secs().saturating_sub(2).min(2);
        asked && matches!((before, probes()), (Ok(before), Ok(after)) if after >= before + least.max(2))
    })
    .with_context(|| gated.server.log())
}

#[test]
fn unprivileged_attacher_reads_legacy_rules() -> Result<()> {
    requires!(namespaces, bpf);
    let pair = Pair::new("nobody")?;
    // The tables exist before the attacher starts.
    pair.server.capture("iptables-legacy -w -L INPUT")?;
    let gated = Gated::start_prepared(&pair.server, &json!({"attach_user": "nobody"}), |_| {})?;
    wait_for_hits(&pair.server, &pair.client).with_context(|| gated.server.log())?;
    // So high a limit holds back no probe: only reading it shows that it is there.
    pair.server.capture(
        "iptables-legacy -w -A INPUT -p udp --dport 53 -m hashlimit --hashlimit-above 5000/sec \
         --hashlimit-mode srcip --hashlimit-name dns -j DROP",
    )?;
    wait_for_userspace(&pair, &gated, "limits its queries")
}

#[test]
fn foreign_program_in_our_place_is_noticed() -> Result<()> {
    requires!(namespaces, bpf);
    let pair = Pair::new("place")?;
    let named = json!({"interfaces": ["srv"]});
    let gated = Gated::start_prepared(
        &pair.server,
        &named,
        whole_system_tests::old_kernel::refuse_tcx,
    )?;
    wait_for_hits(&pair.server, &pair.client).with_context(|| gated.server.log())?;
    let filters = || pair.server.capture("tc filter show dev srv ingress");
    let ours = filters()?;
    let priority = ours
        .split("pref ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next())
        .context("no filter")?;
    let removal = format!("tc filter del dev srv ingress pref {priority}");
    pair.server.capture(&removal)?;
    pair.server.capture(&format!(
        "tc filter add dev srv ingress pref {priority} protocol all u32 match u32 0 0 flowid :1"
    ))?;
    // At the latest after a full check of all attachments.
    wait_until(
        "the server to use another priority",
        Duration::from_secs(120),
        || filters().is_ok_and(|shown| shown.contains("dns_tc")),
    )
    .with_context(|| format!("{:?}\n{}", gated.states(&pair.server), gated.server.log()))?;
    let shown = filters()?;
    ensure!(shown.contains("u32"), "the foreign filter stays: {shown}");
    pair.server.capture(&removal)?;
    wait_for_hits(&pair.server, &pair.client).with_context(|| gated.server.log())
}

#[test]
fn disabled_fast_path_ends_earlier_answers() -> Result<()> {
    requires!(namespaces, bpf);
    for (label, prepare) in [
        ("off-tcx", None),
        (
            "off-clsact",
            Some(whole_system_tests::old_kernel::refuse_tcx as fn(&mut Command)),
        ),
    ] {
        let pair = Pair::new(label)?;
        let kept = json!({"interfaces": ["srv"], "on_stop": "keep", "lease": "1h"});
        let mut gated = Gated::start_prepared(&pair.server, &kept, |command| {
            if let Some(prepare) = prepare {
                prepare(command);
            }
        })?;
        wait_for_hits(&pair.server, &pair.client).with_context(|| gated.server.log())?;
        gated.server.process().stop(Duration::from_secs(120))?;
        ensure!(ask(&pair.client, 1)? == 1, "the programs stay");
        gated
            .server
            .change_settings(|settings| settings["xdp"]["enabled"] = json!(false))?;
        let records = gated.server.folder.path().join("records.json");
        std::fs::write(records, server::records_of_groups(&[2]))?;
        gated.server.restart(Some(&pair.server))?;
        let found = addresses(&pair.client, v4(), NAME, TIMEOUT)?;
        ensure!(
            found.is_none_or(|found| found.is_empty()),
            "an answer from the old records"
        );
        ensure!(gated.bpffs.links().is_empty(), "{:?}", gated.bpffs.links());
        let shown = pair.server.capture("tc filter show dev srv ingress")?;
        ensure!(!shown.contains("dns_tc"), "{shown}");
    }
    Ok(())
}

#[test]
fn removed_address_is_not_answered() -> Result<()> {
    requires!(namespaces, bpf);
    let (pair, _gated) = serving("moved")?;
    pair.server.ip("addr del 169.254.0.2/24 dev srv")?;
    // The client's neighbour entry stays cached, so frames still arrive.
    let is_silent =
        || addresses(&pair.client, v4(), NAME, SILENCE).is_ok_and(|found| found.is_none());
    wait_until(
        "the address to be left",
        Duration::from_secs(120),
        is_silent,
    )?;
    let before = hits(&pair.server)?;
    for _ in 0..3 {
        ensure!(is_silent(), "a query to the removed address was answered");
    }
    ensure!(
        hits(&pair.server)? == before,
        "the interface answered for the removed address"
    );
    Ok(())
}

/// Starts the server at `listens` with its fast path.
fn start(host: &Namespace, bpffs: &Bpffs, listens: SocketAddr) -> Result<Server> {
    let folder = server::folder(&server::records_of_groups(&[3, 60]), None)?;
    let settings = json!({"metrics": {"enabled": true}, "xdp": {"bpffs": bpffs.path()}});
    let server = Server::start(Some(host), folder, listens, &settings)?;
    whole_system_tests::metrics::wait_for_fast_path(host).with_context(|| server.log())?;
    Ok(server)
}

/// Two machines joined by a router, which is their default gateway.
struct Routed {
    /// Interface `srv`, 10.7.0.2.
    near: Namespace,
    /// Interfaces `srv`, 10.7.0.1, and `far`, 10.8.0.1.
    router: Namespace,
    /// Interface `end`, 10.8.0.2.
    far: Namespace,
}

impl Routed {
    fn new(label: &str) -> Result<Self> {
        let [near, router, far] =
            ["near", "router", "far"].map(|part| Namespace::new(&format!("{label}-{part}")));
        let routed = Self {
            near: near?,
            router: router?,
            far: far?,
        };
        routed.router.forward()?;
        join(
            End::new(&routed.near, "srv", &["10.7.0.2/24"]),
            End::new(&routed.router, "srv", &["10.7.0.1/24"]),
        )?;
        join(
            End::new(&routed.router, "far", &["10.8.0.1/24"]),
            End::new(&routed.far, "end", &["10.8.0.2/24"]),
        )?;
        routed.near.ip("route add default via 10.7.0.1")?;
        routed.far.ip("route add default via 10.8.0.1")?;
        Ok(routed)
    }
}

#[test]
fn moved_address_belongs_to_new_owner() -> Result<()> {
    requires!(namespaces, bpf);
    let moved = SocketAddr::from(([10, 99, 0, 53], 53));
    let Routed {
        near: client,
        router: gateway,
        far: owner,
    } = Routed::new("vip")?;
    gateway.ip("addr add 10.99.0.53/32 dev lo")?;
    let bpffs = Bpffs::new()?;
    let _server = start(&gateway, &bpffs, moved)?;
    let query = client::query(NAME, hickory_proto::rr::RecordType::A, None)?;
    let ask = || client.run(|| client::ask(moved, &query))?;
    for _ in 0..8 {
        ensure!(client::addresses(&ask()?).len() == 3);
    }
    ensure!(hits(&gateway)? > 0, "the gateway's interface answers");

    gateway.ip("addr del 10.99.0.53/32 dev lo")?;
    owner.ip("addr add 10.99.0.53/32 dev lo")?;
    gateway.ip("route add 10.99.0.53/32 via 10.8.0.2")?;
    let socket = owner.run(|| UdpSocket::bind(moved))??;
    let is_of_owner =
        || ask().is_ok_and(|reply| reply.metadata.response_code == ResponseCode::Refused);
    let done = AtomicBool::new(false);
    thread::scope(|scope| -> Result<()> {
        let refusing = scope.spawn(|| deny_all(&socket, 5, &done));
        let asking = || -> Result<()> {
            // Twice, because one query a second is a probe, which the interface passes on.
            wait_until("the owner's reply", Duration::from_secs(120), || {
                is_of_owner() && is_of_owner()
            })?;
            let before = hits(&gateway)?;
            for number in 0..20 {
                ensure!(is_of_owner(), "query {number}: not the owner's reply");
            }
            ensure!(hits(&gateway)? == before, "a forwarded query was answered");
            Ok(())
        };
        let asked = asking();
        done.store(true, Ordering::Relaxed);
        refusing.join().expect("no panic")?;
        asked
    })
}

#[test]
fn auto_mode_permits_jumbo_frames() -> Result<()> {
    requires!(namespaces, bpf);
    let (pair, bpffs) = (Pair::new("jumbo")?, Bpffs::new()?);
    let _server = start(&pair.server, &bpffs, v4())?;
    // Native XDP on a veth would refuse that at both ends.
    pair.client.ip("link set cli mtu 9000")?;
    pair.server.ip("link set srv mtu 9000")?;
    let before = hits(&pair.server)?;
    wait_until("the interface to answer", Duration::from_secs(120), || {
        ask(&pair.client, 3).is_ok_and(|answered| answered == 3)
            && hits(&pair.server).is_ok_and(|hits| hits > before)
    })
}

#[test]
fn path_mtu_limits_replies() -> Result<()> {
    requires!(namespaces, bpf);
    let pair = Pair::new("path")?;
    pair.server.ip("route add 169.254.0.1/32 dev srv mtu 600")?;
    let bpffs = Bpffs::new()?;
    let _server = start(&pair.server, &bpffs, v4())?;
    for _ in 0..8 {
        let query = client::query(
            "q-s0.q-g60.bosh.",
            hickory_proto::rr::RecordType::A,
            Some(1232),
        )?;
        let reply = pair.client.run(|| client::ask(v4(), &query))??;
        ensure!(client::addresses(&reply).len() == 60);
    }
    let large = Metrics::read(&pair.server)?.sum(
        dns_kit::metrics::names::FAST_PATH_PACKETS_TOTAL,
        "outcome=\"large_reply\"",
    );
    ensure!(large >= 7, "{large} of 8 left to userspace");
    Ok(())
}

#[test]
fn learned_path_mtu_takes_effect() -> Result<()> {
    requires!(namespaces, bpf);
    let Routed {
        near: server,
        router,
        far: client,
    } = Routed::new("hop")?;
    server.forward()?;
    for (namespace, interface) in [(&router, "far"), (&client, "end")] {
        namespace.ip(&format!("link set {interface} mtu 1000"))?;
    }
    server.ip("addr add 169.254.0.2/32 dev lo")?;
    router.ip("route add 169.254.0.2/32 via 10.7.0.2")?;
    let bpffs = Bpffs::new()?;
    let _process = start(&server, &bpffs, v4())?;
    let mut answered = 0;
    for _ in 0..8 {
        let query = client::query(
            "q-s0.q-g60.bosh.",
            hickory_proto::rr::RecordType::A,
            Some(1232),
        )?;
        let bytes = query.to_vec()?;
        answered += usize::from(
            client
                .run(|| client::ask_raw(v4(), &bytes, TIMEOUT))?
                .is_ok(),
        );
    }
    // The first reply is too long for the hop, which says so.
    ensure!(answered >= 7, "{answered} of 8");
    Ok(())
}
