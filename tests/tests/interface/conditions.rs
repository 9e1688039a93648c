//! Every condition and every target that this kernel and its tools offer in rules: each ends at a decision or at
//! an objection, none at "served" by a guess.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::{SocketAddr, UdpSocket},
};

use anyhow::{Context, Result, ensure};
use whole_system_tests::{cell::feed, namespace::Namespace, pair::v4, process::run, requires};

use crate::gate_rules::ensure_documented;

/// Effect of a rule on queries of the client, as the gate sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Effect {
    /// They arrive and are answered.
    Passes,
    /// They, or the replies, are dropped, diverted or changed.
    Holds,
    /// Earlier packets decide.
    Limits,
    /// Only the kernel can say.
    Undecided,
}

use Effect::{Holds, Limits, Passes, Undecided};

/// Rules that drop what a match selects: match, rule, effect.
const MATCHES: [(&str, &str, Effect); 56] = [
    (
        "addrtype",
        "-A INPUT -m addrtype --dst-type LOCAL -j DROP",
        Holds,
    ),
    ("ah", "-A INPUT -p ah -m ah --ahspi 1 -j DROP", Passes),
    (
        "bpf",
        "-A INPUT -m bpf --bytecode '1,6 0 0 0' -j DROP",
        Undecided,
    ),
    ("cgroup", "-A INPUT -m cgroup --cgroup 5 -j DROP", Undecided),
    (
        "cluster",
        "-A INPUT -m cluster --cluster-total-nodes 2 --cluster-local-node 1 --cluster-hash-seed 7 -j DROP",
        Undecided,
    ),
    (
        "comment",
        "-A INPUT -m comment --comment all -j DROP",
        Holds,
    ),
    (
        "connbytes",
        "-A INPUT -m connbytes --connbytes 9 --connbytes-mode packets --connbytes-dir both -j DROP",
        Limits,
    ),
    (
        "connlimit",
        "-A INPUT -p udp -m connlimit --connlimit-above 9 -j DROP",
        Limits,
    ),
    ("connmark", "-A INPUT -m connmark --mark 1 -j DROP", Passes),
    (
        "conntrack",
        "-A INPUT -m conntrack --ctstate NEW -j DROP",
        Holds,
    ),
    ("cpu", "-A INPUT -m cpu --cpu 0 -j DROP", Undecided),
    (
        "dccp",
        "-A INPUT -p dccp -m dccp --dport 53 -j DROP",
        Passes,
    ),
    (
        "devgroup",
        "-A INPUT -m devgroup --src-group 3 -j DROP",
        Undecided,
    ),
    ("dscp", "-A INPUT -m dscp --dscp 0 -j DROP", Holds),
    ("ecn", "-A INPUT -m ecn --ecn-ip-ect 0 -j DROP", Undecided),
    ("esp", "-A INPUT -p esp -m esp --espspi 1 -j DROP", Passes),
    (
        "hashlimit",
        "-A INPUT -m hashlimit --hashlimit-above 9/sec --hashlimit-name x --hashlimit-mode srcip -j DROP",
        Limits,
    ),
    ("helper", "-A INPUT -m helper --helper ftp -j DROP", Passes),
    (
        "icmp",
        "-A INPUT -p icmp -m icmp --icmp-type 8 -j DROP",
        Passes,
    ),
    (
        "ipcomp",
        "-A INPUT -p ipcomp -m ipcomp --ipcompspi 1 -j DROP",
        Passes,
    ),
    (
        "iprange",
        "-A INPUT -m iprange --src-range 10.255.10.2-10.255.10.2 -j DROP",
        Holds,
    ),
    (
        "length",
        "-A INPUT -m length --length 0:70 -j DROP",
        Undecided,
    ),
    ("length", "-A INPUT -m length --length 0:600 -j DROP", Holds),
    (
        "length",
        "-A INPUT -m length --length 600:65535 -j DROP",
        Passes,
    ),
    ("limit", "-A INPUT -m limit --limit 9/sec -j DROP", Limits),
    (
        "mac",
        "-A INPUT -m mac --mac-source 02:00:00:00:00:01 -j DROP",
        Undecided,
    ),
    ("mark", "-A INPUT -m mark ! --mark 1 -j DROP", Holds),
    (
        "multiport",
        "-A INPUT -p udp -m multiport --dports 52,53 -j DROP",
        Holds,
    ),
    (
        "osf",
        "-A INPUT -p tcp -m osf --genre Linux -j DROP",
        Passes,
    ),
    ("owner", "-A OUTPUT -m owner --uid-owner 5 -j DROP", Passes),
    ("owner", "-A OUTPUT -m owner --uid-owner 0-5 -j DROP", Holds),
    ("owner", "-A OUTPUT -m owner ! --uid-owner 5 -j DROP", Holds),
    (
        "owner",
        "-A OUTPUT -m owner --gid-owner 0 -j DROP",
        Undecided,
    ),
    (
        "owner",
        "-A OUTPUT -m owner ! --socket-exists -j DROP",
        Passes,
    ),
    (
        "physdev",
        "-A INPUT -m physdev --physdev-in eth9 -j DROP",
        Passes,
    ),
    (
        "pkttype",
        "-A INPUT -m pkttype --pkt-type unicast -j DROP",
        Holds,
    ),
    (
        "policy",
        "-A INPUT -m policy --dir in --pol none -j DROP",
        Holds,
    ),
    ("quota", "-A INPUT -m quota --quota 9999 -j DROP", Limits),
    (
        "rateest",
        "-t mangle -A INPUT -j RATEEST --rateest-name x --rateest-interval 250ms --rateest-ewmalog 500ms && \
         iptables-legacy -A INPUT -m rateest --rateest x --rateest-gt --rateest-bps 9 -j DROP",
        Limits,
    ),
    ("realm", "-A INPUT -m realm --realm 1 -j DROP", Undecided),
    (
        "recent",
        "-A INPUT -m recent --set --name x -j DROP",
        Limits,
    ),
    (
        "rpfilter",
        "-t raw -A PREROUTING -m rpfilter --invert -j DROP",
        Passes,
    ),
    (
        "sctp",
        "-A INPUT -p sctp -m sctp --dport 53 -j DROP",
        Passes,
    ),
    (
        "set",
        "-A INPUT -m set --match-set clients src -j DROP",
        Holds,
    ),
    (
        "set",
        "-A INPUT -m set ! --match-set others src -j DROP",
        Holds,
    ),
    (
        "set",
        "-A INPUT -m set --match-set others dst,dst -j DROP",
        Passes,
    ),
    (
        "socket",
        "-t mangle -A PREROUTING -m socket -j DROP",
        Undecided,
    ),
    ("state", "-A INPUT -m state --state INVALID -j DROP", Passes),
    (
        "statistic",
        "-A INPUT -m statistic --mode random --probability 0.5 -j DROP",
        Limits,
    ),
    (
        "string",
        "-A INPUT -m string --algo bm --string x -j DROP",
        Undecided,
    ),
    ("tcp", "-A INPUT -p tcp -m tcp --dport 53 -j DROP", Passes),
    (
        "tcpmss",
        "-A INPUT -p tcp --syn -m tcpmss --mss 1:500 -j DROP",
        Passes,
    ),
    (
        "time",
        "-A INPUT -m time --timestart 03:00 --timestop 03:01 -j DROP",
        Undecided,
    ),
    ("tos", "-A INPUT -m tos --tos 0x10/0xff -j DROP", Passes),
    ("ttl", "-A INPUT -m ttl --ttl-eq 1 -j DROP", Undecided),
    ("u32", "-A INPUT -m u32 --u32 '28=1' -j DROP", Undecided),
];

/// Matches without a rule above: `udp` is in the rules of `tests/gate-rules`, the others have no command line
/// option here (`connlabel` needs a file of names, `nfacct` an object).
const MATCHES_LEFT_OUT: [&str; 5] = ["udp", "udplite", "l2tp", "connlabel", "nfacct"];

/// Rules with a target that all queries reach: target, rule, effect.
const TARGETS: [(&str, &str, Effect); 32] = [
    ("AUDIT", "-A INPUT -j AUDIT --type accept", Passes),
    (
        "CHECKSUM",
        "-t mangle -A PREROUTING -p udp -j CHECKSUM --checksum-fill",
        Passes,
    ),
    (
        "CLASSIFY",
        "-t mangle -A POSTROUTING -j CLASSIFY --set-class 1:1",
        Passes,
    ),
    (
        "CONNMARK",
        "-t mangle -A PREROUTING -j CONNMARK --set-mark 1",
        Passes,
    ),
    ("CT", "-t raw -A PREROUTING -j CT --notrack", Passes),
    (
        "DNAT",
        "-t nat -A PREROUTING -p udp -j DNAT --to-destination 10.1.1.1",
        Holds,
    ),
    (
        "DNAT",
        "-t nat -A PREROUTING -p udp -j DNAT --to-destination 169.254.0.2:53",
        Passes,
    ),
    (
        "DSCP",
        "-t mangle -A PREROUTING -j DSCP --set-dscp 1",
        Passes,
    ),
    (
        "ECN",
        "-t mangle -A PREROUTING -p tcp -j ECN --ecn-tcp-remove",
        Passes,
    ),
    (
        "HMARK",
        "-t mangle -A PREROUTING -j HMARK --hmark-tuple src --hmark-mod 2 --hmark-offset 1 --hmark-rnd 7 && \
      iptables-legacy -A INPUT -m mark --mark 1 -j DROP",
        Undecided,
    ),
    (
        "IDLETIMER",
        "-A INPUT -j IDLETIMER --timeout 600 --label gate",
        Passes,
    ),
    ("LOG", "-A INPUT -j LOG", Passes),
    (
        "MARK",
        "-t mangle -A PREROUTING -j MARK --set-xmark 4/4 && iptables-legacy -A INPUT -m mark --mark 4/4 -j DROP",
        Holds,
    ),
    ("MASQUERADE", "-t nat -A POSTROUTING -j MASQUERADE", Passes),
    (
        "NETMAP",
        "-t nat -A PREROUTING -j NETMAP --to 10.1.1.0/24",
        Holds,
    ),
    ("NFLOG", "-A INPUT -j NFLOG", Passes),
    ("NFQUEUE", "-A INPUT -j NFQUEUE", Undecided),
    (
        "NOTRACK",
        "-t raw -A PREROUTING -j NOTRACK && iptables-legacy -A INPUT -m state --state UNTRACKED -j DROP",
        Holds,
    ),
    (
        "RATEEST",
        "-A INPUT -j RATEEST --rateest-name y --rateest-interval 250ms --rateest-ewmalog 500ms",
        Passes,
    ),
    (
        "REDIRECT",
        "-t nat -A PREROUTING -p udp -j REDIRECT --to-ports 5353",
        Holds,
    ),
    ("REJECT", "-A INPUT -j REJECT", Holds),
    ("SET", "-A INPUT -j SET --add-set others src", Passes),
    (
        "SET",
        "-t mangle -A PREROUTING -j SET --map-set marks src --map-mark && \
      iptables-legacy -A INPUT -m mark --mark 1 -j DROP",
        Undecided,
    ),
    (
        "SNAT",
        "-t nat -A INPUT -j SNAT --to-source 10.0.16.5",
        Holds,
    ),
    (
        "SYNPROXY",
        "-A INPUT -p tcp -m state --state INVALID -j SYNPROXY --mss 1400",
        Passes,
    ),
    (
        "TCPMSS",
        "-t mangle -A POSTROUTING -p tcp --syn -j TCPMSS --set-mss 900",
        Passes,
    ),
    (
        "TCPOPTSTRIP",
        "-t mangle -A PREROUTING -p tcp -j TCPOPTSTRIP --strip-options timestamp",
        Passes,
    ),
    (
        "TEE",
        "-t mangle -A PREROUTING -j TEE --gateway 10.0.16.9",
        Passes,
    ),
    (
        "TOS",
        "-t mangle -A PREROUTING -j TOS --set-tos 0x10",
        Passes,
    ),
    (
        "TPROXY",
        "-t mangle -A PREROUTING -p udp -j TPROXY --on-port 99",
        Holds,
    ),
    ("TRACE", "-t raw -A PREROUTING -j TRACE", Passes),
    ("TTL", "-t mangle -A PREROUTING -j TTL --ttl-set 64", Passes),
];

/// Targets without a rule above: the end of a chain, and labels of SELinux.
const TARGETS_LEFT_OUT: [&str; 3] = ["ERROR", "SECMARK", "CONNSECMARK"];

/// Conditions of nftables in a rule `udp dport 53 CONDITION drop` at INPUT.
const NFT_CONDITIONS: [(&str, Effect); 37] = [
    ("meta hour \"03:00\"-\"03:01\"", Undecided),
    ("meta day \"Sunday\"", Undecided),
    ("meta cpu 0", Undecided),
    ("meta cgroup 5", Undecided),
    ("meta iifgroup 3", Undecided),
    ("meta length < 70", Undecided),
    ("meta skuid 5", Passes),
    ("meta mark 1", Passes),
    ("meta mark & 4 == 0", Holds),
    ("meta pkttype host", Holds),
    ("meta ipsec exists", Passes),
    ("meta nfproto ipv6", Passes),
    ("iifname \"s-*\"", Holds),
    ("iif lo", Passes),
    ("ether saddr 02:00:00:00:00:01", Undecided),
    ("ip ttl 1", Undecided),
    ("ip dscp 10", Passes),
    ("ip id 1", Undecided),
    ("ip saddr 10.255.10.0/24", Holds),
    ("ip option rr exists", Passes),
    ("udp length < 50", Undecided),
    ("@th,64,8 1", Undecided),
    ("ct state established", Passes),
    ("ct state new", Holds),
    ("ct mark 1", Passes),
    ("ct bytes > 999", Undecided),
    ("ct zone 7", Undecided),
    ("ct status dnat", Passes),
    ("ct status confirmed", Undecided),
    ("ct direction original", Holds),
    ("jhash ip saddr mod 2 == 0", Undecided),
    ("symhash mod 2 == 0", Undecided),
    ("numgen random mod 2 == 0", Limits),
    ("limit rate 9/second", Limits),
    ("quota over 9 mbytes", Limits),
    ("rt classid 1", Undecided),
    ("fib saddr type local", Passes),
];

/// Returns the effect that the gate expects of the rules on queries of the client.
fn effect(host: &Namespace) -> Result<Effect> {
    let (client, endpoint): (_, SocketAddr) = ([10, 255, 10, 2].into(), v4());
    let found =
        host.run(|| dns_attacher::filter_objection("s-010255010002", client, endpoint))??;
    Ok(match found.as_deref() {
        None => Passes,
        Some(why) if why.contains("only the kernel can evaluate") => Undecided,
        Some(why) if why.contains("limits its queries") => Limits,
        Some(_) => Holds,
    })
}

fn host() -> Result<Namespace> {
    let host = Namespace::new("conditions")?;
    host.ip("link add s-010255010002 type veth peer name far")?;
    host.ip("addr add 169.254.0.2/32 dev lo")?;
    Ok(host)
}

/// Returns the names in lists of the kernel.
fn names(list: &str) -> Result<BTreeSet<String>> {
    let text = fs::read_to_string(list).with_context(|| list.to_owned())?;
    Ok(text.lines().map(str::to_owned).collect())
}

#[test]
fn no_legacy_rule_is_guessed() -> Result<()> {
    requires!(namespaces);
    let host = host()?;
    // Of this process, as the server's would be: root's.
    let _socket = host.run(|| UdpSocket::bind(v4()))??;
    feed(
        &host,
        &["ipset", "restore"],
        "create clients hash:ip\nadd clients 10.255.10.2\ncreate others hash:ip,port\ncreate marks hash:ip skbinfo\n",
    )?;
    let mut failures = Vec::new();
    for (name, rule, expected) in MATCHES.into_iter().chain(TARGETS) {
        let mut command = host.command("sh")?;
        run(command.args(["-c", &format!("iptables-legacy {rule}")])).context(rule)?;
        let found = effect(&host)?;
        if found != expected {
            failures.push(format!("{name}: {found:?} instead of {expected:?}: {rule}"));
        }
        let mut command = host.command("sh")?;
        let empty = "for table in filter mangle nat raw; do iptables-legacy -t $table -F; done";
        run(command.args(["-c", empty]))?;
    }
    for (list, tried, left_out) in [
        (
            "/proc/net/ip_tables_matches",
            MATCHES.map(|(name, ..)| name).to_vec(),
            &MATCHES_LEFT_OUT[..],
        ),
        (
            "/proc/net/ip_tables_targets",
            TARGETS.map(|(name, ..)| name).to_vec(),
            &TARGETS_LEFT_OUT,
        ),
    ] {
        let untried = names(list)?
            .into_iter()
            .filter(|name| !tried.contains(&name.as_str()) && !left_out.contains(&name.as_str()));
        failures.extend(untried.map(|name| format!("{name}: in {list}, but without a rule here")));
    }
    ensure!(
        failures.is_empty(),
        "{} failures:\n{}",
        failures.len(),
        failures.join("\n")
    );
    Ok(())
}

#[test]
fn no_nft_condition_is_guessed() -> Result<()> {
    requires!(namespaces);
    let host = host()?;
    let mut failures = Vec::new();
    for (condition, expected) in NFT_CONDITIONS {
        let rules = format!(
            "flush ruleset\ntable inet t {{\n chain c {{\n type filter hook input priority 0\n udp dport 53 {condition} drop\n }}\n}}\n"
        );
        feed(&host, &["nft", "-f", "-"], &rules).context(condition)?;
        let found = effect(&host)?;
        if found != expected {
            failures.push(format!("{found:?} instead of {expected:?}: {condition}"));
        }
    }
    ensure!(
        failures.is_empty(),
        "{} failures:\n{}",
        failures.len(),
        failures.join("\n")
    );
    Ok(())
}

#[test]
fn marks_outlive_failed_conditions() -> Result<()> {
    requires!(namespaces);
    let host = host()?;
    for (rule, expected) in [
        ("meta mark set 1 udp dport 54", Holds),
        ("udp dport 54 meta mark set 1", Passes),
        ("meta mark set 1 udp dport 53", Holds),
        ("meta mark set 1 udp dport 54 accept", Holds),
    ] {
        let rules = format!(
            "flush ruleset\ntable inet t {{\n chain c {{\n type filter hook input priority 0\n {rule}\n \
             udp dport 53 meta mark 1 drop\n }}\n}}\n"
        );
        feed(&host, &["nft", "-f", "-"], &rules).context(rule)?;
        let found = effect(&host)?;
        ensure!(
            found == expected,
            "{found:?} instead of {expected:?}: {rule}"
        );
    }
    Ok(())
}

/// Joins the names whose rules have effects for which `is_meant` holds.
fn joined<'a>(
    rules: impl Iterator<Item = (&'a str, Effect)>,
    is_meant: impl Fn(&BTreeSet<Effect>) -> bool,
) -> String {
    let mut effects: BTreeMap<&str, BTreeSet<Effect>> = BTreeMap::new();
    for (name, effect) in rules {
        effects.entry(name).or_default().insert(effect);
    }
    let meant = effects.into_iter().filter(|(_, effects)| is_meant(effects));
    meant
        .map(|(name, _)| format!("`{name}`"))
        .collect::<Vec<_>>()
        .join(", ")
}

#[test]
fn documentation_lists_conditions() -> Result<()> {
    let mut table = String::from("| Decision | Conditions and targets |\n|---|---|\n");
    let is_decided =
        |effects: &BTreeSet<Effect>| effects.is_subset(&BTreeSet::from([Passes, Holds]));
    let limits = |effects: &BTreeSet<Effect>| effects.contains(&Limits);
    let is_undecided =
        |effects: &BTreeSet<Effect>| effects.contains(&Undecided) && !effects.contains(&Passes);
    let is_partly =
        |effects: &BTreeSet<Effect>| effects.contains(&Undecided) && effects.contains(&Passes);
    let kinds = [
        (
            "evaluated",
            &is_decided as &dyn Fn(&BTreeSet<Effect>) -> bool,
        ),
        ("a limit: left to userspace if it matters", &limits),
        ("undecided: left to userspace if it matters", &is_undecided),
        ("evaluated for some parameters, else undecided", &is_partly),
    ];
    for (decision, is_meant) in kinds {
        let matches = MATCHES.iter().map(|(name, _, effect)| (*name, *effect));
        let targets = TARGETS.iter().map(|(name, _, effect)| (*name, *effect));
        let conditions = NFT_CONDITIONS
            .iter()
            .map(|(condition, effect)| (*condition, *effect));
        let lists = [
            ("matches", joined(matches, is_meant)),
            ("targets", joined(targets, is_meant)),
            ("nftables", joined(conditions, is_meant)),
        ];
        for (kind, list) in lists.into_iter().filter(|(_, list)| !list.is_empty()) {
            table += &format!("| {decision} | {kind}: {list} |\n");
        }
    }
    ensure_documented(&table)
}
