//! Objections of the packet filter, for the rule sets of `tests/gate-rules`: loaded into a
//! namespace by iptables (legacy and nft) and nft, and read back from the kernel.

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, SocketAddr, UdpSocket},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use dns_kit::metrics::names::FAST_PATH_INTERFACE_REPLIES_TOTAL;
use hickory_proto::{op::Message, rr::RecordType};
use serde::Deserialize;
use serde_json::json;
use socket2::{Domain, Socket, Type};
use whole_system_tests::{
    cell::feed, client, metrics::Metrics, namespace::Namespace, pair::v4, process::wait_until,
    requires,
};

use crate::gated::{Gated, NAME};

/// Environment variable with another folder of rule sets.
const FOLDER_VARIABLE: &str = "BOSH_DNS_GATE_RULES";

/// Expected objections to a rule set.
#[derive(Debug, Deserialize)]
struct Expected {
    /// `keep` or `off`, by interface.
    expect: BTreeMap<String, String>,
    /// The reason, for operators.
    why: String,
    /// Input of `ipset restore`.
    #[serde(default)]
    sets: String,
}

fn folder() -> PathBuf {
    match std::env::var_os(FOLDER_VARIABLE) {
        Some(folder) => folder.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("gate-rules"),
    }
}

/// Creates a host with the interfaces of the rule sets.
fn host() -> Result<Namespace> {
    let host = Namespace::new("rules")?;
    for (number, name) in ["s-010255010002", "s-010255010003", "eth0"]
        .into_iter()
        .enumerate()
    {
        host.ip(&format!("link add {name} type veth peer name far{number}"))?;
        host.ip(&format!("link set {name} up"))?;
    }
    host.ip("addr add 169.254.0.2/32 dev lo")?;
    host.ip("addr add 10.0.16.5/24 dev eth0")?;
    Ok(host)
}

/// Returns the address of a client behind an interface.
fn client_of(interface: &str) -> IpAddr {
    match interface {
        "s-010255010002" => [10, 255, 10, 2].into(),
        "s-010255010003" => [10, 255, 10, 3].into(),
        "lo" => v4().ip(),
        _ => [10, 0, 16, 77].into(),
    }
}

#[test]
fn rule_sets_raise_expected_objections() -> Result<()> {
    requires!(namespaces);
    let folder = folder();
    let expected: BTreeMap<String, Expected> =
        serde_json::from_str(&fs::read_to_string(folder.join("expected.json"))?)?;
    ensure!(
        expected.len() >= 10,
        "{} rule sets in {}",
        expected.len(),
        folder.display()
    );
    let mut failures = Vec::new();
    for (
        file,
        Expected {
            expect,
            sets,
            why: _,
        },
    ) in &expected
    {
        let rules = fs::read_to_string(folder.join(file))?;
        let loaders: &[&[&str]] = if file.ends_with(".nft") {
            &[&["nft", "-f", "-"]]
        } else {
            &[
                &["iptables-legacy-restore", "--noflush"],
                &["iptables-nft-restore", "--noflush"],
            ]
        };
        for loader in loaders {
            let host = host()?;
            // In the server's place: rules may depend on the owner of its socket.
            let _socket = host.run(|| UdpSocket::bind(v4()))??;
            if !sets.is_empty() {
                feed(&host, &["ipset", "restore"], sets)?;
            }
            feed(&host, loader, &rules)?;
            for (interface, decision) in expect {
                let found = host.run(|| {
                    dns_attacher::filter_objection(interface, client_of(interface), v4())
                })??;
                if found.is_some() != (decision == "off") {
                    failures.push(format!(
                        "{file} by {}, {interface}: {found:?}, expected: {decision}",
                        loader[0]
                    ));
                }
            }
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

/// Checks that docs/capabilities.md has this text.
pub(crate) fn ensure_documented(text: &str) -> Result<()> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/capabilities.md");
    ensure!(
        fs::read_to_string(page)?.contains(text),
        "docs/capabilities.md does not contain this:\n{text}"
    );
    Ok(())
}

#[test]
fn documentation_lists_rule_sets() -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("gate-rules");
    let expected: BTreeMap<String, Expected> =
        serde_json::from_str(&fs::read_to_string(folder.join("expected.json"))?)?;
    let mut table = String::from("| Rule set | Left to userspace | Reason |\n|---|---|---|\n");
    for (
        file,
        Expected {
            expect,
            why,
            sets: _,
        },
    ) in &expected
    {
        let off = |interface: &&str| {
            expect
                .get(*interface)
                .is_some_and(|decision| decision == "off")
        };
        let name = |interface: &str| match interface {
            "s-010255010002" => "first container",
            "s-010255010003" => "second container",
            "eth0" => "uplink",
            _ => "`lo`",
        };
        let left = INTERFACES
            .iter()
            .copied()
            .filter(|interface| off(interface));
        let left: Vec<&str> = left.map(name).collect();
        let left = match left.len() {
            0 => "nothing".to_owned(),
            4 => "everything".to_owned(),
            _ => left.join(", "),
        };
        table += &format!("| {file} | {left} | {why} |\n");
    }
    ensure_documented(&table)
}

#[test]
fn inspection_creates_no_legacy_tables() -> Result<()> {
    requires!(namespaces);
    let host = Namespace::new("untouched")?;
    let names = || host.run(|| fs::read_to_string("/proc/thread-self/net/ip_tables_names"));
    let before = names()??;
    let endpoint: SocketAddr = v4();
    let found = host.run(|| dns_attacher::filter_objection("lo", endpoint.ip(), endpoint))??;
    ensure!(
        found.is_none() && names()?? == before,
        "{found:?}, {before:?}"
    );
    Ok(())
}

#[test]
fn nat_before_bridge_refuses_it() -> Result<()> {
    requires!(namespaces);
    let rules = [
        (
            &["iptables-legacy-restore", "--noflush"][..],
            "*nat\n-A PREROUTING -d 8.8.8.8 -p udp --dport 53 -j DNAT --to-destination 169.254.0.2\nCOMMIT\n",
        ),
        (
            &["nft", "-f", "-"],
            "table ip t {\n chain c {\n type nat hook prerouting priority dstnat;\n ip daddr 8.8.8.8 udp dport 53 dnat to 169.254.0.2\n }\n}\n",
        ),
    ];
    for (loader, rules) in rules {
        let host = host()?;
        host.ip("link add br0 type bridge")?;
        let found = |interface| {
            host.run(|| dns_attacher::filter_objection(interface, client_of(interface), v4()))?
                .map_err(anyhow::Error::from)
        };
        ensure!(found("br0")?.is_none(), "without rules");
        feed(&host, loader, rules)?;
        ensure!(found("br0")?.is_some(), "{}", loader[0]);
        ensure!(
            found("s-010255010002")?.is_none(),
            "a container's interface sees the original address"
        );
    }
    Ok(())
}

#[test]
fn redirect_before_bridge_refuses_its_address() -> Result<()> {
    requires!(namespaces);
    let rules = [
        (
            &["iptables-legacy-restore", "--noflush"][..],
            "*nat\n-A PREROUTING -d 8.8.8.8 -p udp --dport 53 -j REDIRECT\nCOMMIT\n",
        ),
        (
            &["nft", "-f", "-"],
            "table ip t {\n chain c {\n type nat hook prerouting priority dstnat;\n ip daddr 8.8.8.8 udp dport 53 redirect\n }\n}\n",
        ),
    ];
    let of_bridge = SocketAddr::from(([10, 9, 9, 1], 53));
    for (loader, rules) in rules {
        let host = host()?;
        host.ip("link add br0 type bridge")?;
        host.ip("addr add 10.9.9.1/24 dev br0")?;
        let found = |endpoint| {
            host.run(|| dns_attacher::filter_objection("br0", client_of("br0"), endpoint))?
                .map_err(anyhow::Error::from)
        };
        ensure!(found(of_bridge)?.is_none(), "without rules");
        feed(&host, loader, rules)?;
        ensure!(found(of_bridge)?.is_some(), "{}", loader[0]);
        ensure!(
            found(v4())?.is_none(),
            "REDIRECT leads to the receiving interface's own address"
        );
    }
    Ok(())
}

#[test]
fn local_redirect_refuses_lo() -> Result<()> {
    requires!(namespaces);
    let rules = [
        (
            &["iptables-legacy-restore", "--noflush"][..],
            "*nat\n-A OUTPUT -p udp --dport 53 -j REDIRECT --to-ports 53\nCOMMIT\n",
        ),
        (
            &["nft", "-f", "-"],
            "table ip t {\n chain c {\n type nat hook output priority -100;\n udp dport 53 redirect to :53\n }\n}\n",
        ),
    ];
    // Local packets are redirected to 127.0.0.1.
    let endpoint = SocketAddr::from(([127, 0, 0, 1], 53));
    for (loader, rules) in rules {
        let host = host()?;
        let found = || host.run(|| dns_attacher::filter_objection("lo", endpoint.ip(), endpoint));
        ensure!(found()??.is_none(), "without rules");
        feed(&host, loader, rules)?;
        ensure!(found()??.is_some(), "{}", loader[0]);
    }
    Ok(())
}

/// Interfaces of the rule sets.
const INTERFACES: [&str; 4] = ["s-010255010002", "s-010255010003", "eth0", "lo"];

/// Hosts that try rule sets at the same time: most of the time they wait.
const HOSTS: usize = 10;

/// Time limit for a decision: far beyond the two seconds after which rules are read again, and the
/// two seconds in which two probes are lost.
const DECIDED: Duration = Duration::from_secs(120);

/// How long a decision is watched: longer than the interval at which rules are read.
const HELD: Duration = Duration::from_millis(3500);

/// Longer than the interval of the server's reports, after which a client has been heard.
const HEARD: Duration = Duration::from_millis(700);

/// Pause before each look for a decision: rules are read every two seconds.
const BETWEEN: Duration = Duration::from_millis(200);

/// Queries of each client for the comparison with userspace.
const COMPARED: usize = 10;

/// How long replies to them may take; a slower machine repeats the comparison.
const REPLIES: Duration = Duration::from_millis(100);

/// A host with clients on all its interfaces.
struct Live {
    host: Namespace,
    clients: Namespace,
    gated: Gated,
    query: Vec<u8>,
}

/// Which of the queries of a client were answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answered {
    None,
    /// Limits let some of them pass.
    Some,
    All,
}

impl Live {
    /// Starts a server with this `mode` of the fast path.
    fn start(number: usize, mode: &str) -> Result<Self> {
        let host = host()?;
        host.forward()?;
        let clients = Namespace::new(&format!("clients{number}-{mode}"))?;
        for (number, name) in INTERFACES.into_iter().take(3).enumerate() {
            let (far, address) = (format!("far{number}"), client_of(name).to_string());
            host.ip(&format!("link set {far} netns {}", clients.name()))?;
            clients.ip(&format!("addr add {address}/32 dev {far}"))?;
            clients.ip(&format!("link set {far} up"))?;
            clients.ip(&format!(
                "route add 169.254.0.2/32 dev {far} metric {}",
                number + 1
            ))?;
            if name != "eth0" {
                host.ip(&format!("route add {address}/32 dev {name}"))?;
            }
        }
        let gated = Gated::start_prepared(&host, &json!({"mode": mode}), |_| {})?;
        let query = client::query(NAME, RecordType::A, None)?.to_vec()?;
        Ok(Self {
            host,
            clients,
            gated,
            query,
        })
    }

    /// Calls `work` with a socket of the client behind each interface.
    fn by_interface<T: Send>(&self, work: impl Fn(&Socket) -> Result<T> + Sync) -> Result<Vec<T>> {
        let each = INTERFACES.into_iter().enumerate().map(|(number, name)| {
            let namespace = if name == "lo" {
                &self.host
            } else {
                &self.clients
            };
            namespace.run(|| -> Result<T> {
                let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
                let device = if name == "lo" {
                    name.to_owned()
                } else {
                    format!("far{number}")
                };
                socket.bind_device(Some(device.as_bytes()))?;
                socket.connect(&v4().into())?;
                work(&socket)
            })?
        });
        each.collect()
    }

    /// Returns which queries through each interface are answered, on any path.
    fn delivered(&self) -> Result<Vec<Answered>> {
        self.by_interface(|socket| {
            socket.set_read_timeout(Some(REPLIES))?;
            for _ in 0..COMPARED {
                // A rule that rejects makes a send or a receive fail.
                let _ = socket.send(&self.query);
            }
            let (mut replies, mut begun) = (0, Instant::now());
            while replies < COMPARED && begun.elapsed() < REPLIES {
                let mut buffer = [std::mem::MaybeUninit::<u8>::uninit(); 512];
                let Ok(length) = socket.recv(&mut buffer) else {
                    continue;
                };
                // SAFETY: the kernel has written so many bytes.
                let bytes =
                    unsafe { std::slice::from_raw_parts(buffer.as_ptr().cast::<u8>(), length) };
                ensure!(
                    client::addresses(&Message::from_vec(bytes)?).len() == 3,
                    "a wrong answer"
                );
                (replies, begun) = (replies + 1, Instant::now());
            }
            Ok(match replies {
                0 => Answered::None,
                COMPARED => Answered::All,
                _ => Answered::Some,
            })
        })
    }

    /// Queries through each interface; returns the interfaces that answered.
    fn answering(&self) -> Result<Vec<&'static str>> {
        let replies = || -> Result<[u64; 4]> {
            let metrics = Metrics::read(&self.host)?;
            Ok(INTERFACES.map(|name| {
                let label = format!("interface=\"{name}\"");
                metrics.sum(FAST_PATH_INTERFACE_REPLIES_TOTAL, &label)
            }))
        };
        let before = replies()?;
        self.by_interface(|socket| {
            for _ in 0..6 {
                // A rule that rejects makes a send fail.
                let _ = socket.send(&self.query);
                thread::sleep(Duration::from_millis(2));
            }
            Ok(())
        })?;
        thread::sleep(Duration::from_millis(20));
        let after = replies()?;
        let answered = INTERFACES.into_iter().zip(before.into_iter().zip(after));
        Ok(answered
            .filter(|(_, (before, after))| after > before)
            .map(|(name, _)| name)
            .collect())
    }

    /// Queries until exactly these interfaces answer; returns how long that takes.
    fn wait_for(&self, wanted: &[&str]) -> Result<Duration> {
        let (begun, mut answering) = (Instant::now(), Vec::new());
        wait_until("the decision", DECIDED, || {
            thread::sleep(BETWEEN);
            let Ok(found) = self.answering() else {
                return false;
            };
            answering = found;
            answering == wanted
        })
        .with_context(|| {
            format!(
                "{answering:?} answer, not {wanted:?}: {:?}",
                self.gated.states(&self.host)
            )
        })?;
        Ok(begun.elapsed())
    }

    /// Loads a rule set.
    fn load(&self, rules: &str, is_nft: bool, expected: &Expected) -> Result<()> {
        if !expected.sets.is_empty() {
            feed(&self.host, &["ipset", "restore"], &expected.sets)?;
        }
        let loader: &[&str] = if is_nft {
            &["nft", "-f", "-"]
        } else {
            &["iptables-legacy-restore", "--noflush"]
        };
        feed(&self.host, loader, rules)
    }

    /// Removes all rules.
    fn unload(&self, expected: &Expected) -> Result<()> {
        let tables = ["filter", "nat", "raw", "mangle"];
        let empty: String = tables
            .iter()
            .map(|table| format!("*{table}\nCOMMIT\n"))
            .collect();
        let empty = empty.replacen(
            "*filter\n",
            "*filter\n:INPUT ACCEPT\n:FORWARD ACCEPT\n:OUTPUT ACCEPT\n",
            1,
        );
        feed(&self.host, &["iptables-legacy-restore"], &empty)?;
        feed(&self.host, &["nft", "-f", "-"], "flush ruleset\n")?;
        if !expected.sets.is_empty() {
            feed(&self.host, &["ipset", "restore"], "destroy\n")?;
        }
        Ok(())
    }

    /// Waits for the decision about the rules just loaded, which no later reading changes; returns how long it
    /// takes.
    fn decide(&self, expected: &Expected) -> Result<Duration> {
        let is_kept = |name: &&str| {
            expected
                .expect
                .get(*name)
                .is_none_or(|decision| decision == "keep")
        };
        let kept: Vec<&str> = INTERFACES.into_iter().filter(is_kept).collect();
        let loaded = Instant::now();
        let closed = self.wait_for(&kept)?;
        while loaded.elapsed() < HELD {
            thread::sleep(HELD / 10);
            let mut answering = self.answering()?;
            if answering != kept {
                // The first queries of a client pass up where only heard clients are answered; and on a busy
                // machine, replies may be counted later than they are read.
                thread::sleep(HEARD);
                answering = self.answering()?;
            }
            ensure!(
                answering.iter().all(|name| kept.contains(name)),
                "first {kept:?}, then {answering:?}: {:?}",
                self.gated.states(&self.host)
            );
            if answering != kept {
                // A busy attacher walks the rules for a few clients in each round.
                self.wait_for(&kept)?;
            }
        }
        Ok(closed)
    }
}

/// Two hosts with the same rules: one with the fast path, the other with userspace only.
struct Twins {
    fast: Live,
    userspace: Live,
}

impl Twins {
    fn start(number: usize) -> Result<Self> {
        Ok(Self {
            fast: Live::start(number, "auto")?,
            userspace: Live::start(number, "off")?,
        })
    }

    /// Loads a rule set and removes it; returns how long the decisions take.
    fn try_rules(&self, rules: &str, is_nft: bool, expected: &Expected) -> Result<[Duration; 2]> {
        let Self { fast, userspace } = self;
        fast.wait_for(&INTERFACES)?;
        let tried = || -> Result<Duration> {
            userspace.load(rules, is_nft, expected)?;
            fast.load(rules, is_nft, expected)?;
            let closed = fast.decide(expected)?;
            self.compare(expected)?;
            Ok(closed)
        };
        let tried = tried();
        [fast, userspace]
            .into_iter()
            .try_for_each(|live| live.unload(expected))?;
        Ok([tried?, fast.wait_for(&INTERFACES)?])
    }

    /// Compares the answers with userspace's: none more and none less, and none by an interface whose
    /// queries are limited.
    fn compare(&self, expected: &Expected) -> Result<()> {
        let is_kept = |name: &str| {
            expected
                .expect
                .get(name)
                .is_none_or(|decision| decision == "keep")
        };
        let mut found = [Vec::new(), Vec::new()];
        // A busy machine loses or delays replies on either side.
        wait_until("the same answers as from userspace", DECIDED, || {
            let Ok(by_userspace) = self.userspace.delivered() else {
                return false;
            };
            let Ok(with_interfaces) = self.fast.delivered() else {
                return false;
            };
            found = [with_interfaces, by_userspace];
            let [with_interfaces, by_userspace] = &found;
            INTERFACES
                .iter()
                .zip(with_interfaces.iter().zip(by_userspace))
                .all(|(name, (fast, userspace))| match userspace {
                    Answered::Some => !is_kept(name),
                    whole => fast == whole,
                })
        })
        .with_context(|| {
            format!(
                "{INTERFACES:?}: {found:?} (first with the fast path): {:?}",
                self.fast.gated.states(&self.fast.host)
            )
        })
    }
}

#[test]
fn rule_sets_answer_as_userspace() -> Result<()> {
    requires!(namespaces, bpf);
    let folder = folder();
    let expected: BTreeMap<String, Expected> =
        serde_json::from_str(&fs::read_to_string(folder.join("expected.json"))?)?;
    let all: Vec<(&String, &Expected)> = expected.iter().collect();
    let failures: Vec<Result<Vec<String>>> = thread::scope(|scope| {
        let (all, folder) = (&all, &folder);
        let run = |number: usize| {
            scope.spawn(move || -> Result<Vec<String>> {
                let (twins, mut failures) = (Twins::start(number)?, Vec::new());
                for (file, expected) in all.iter().skip(number).step_by(HOSTS) {
                    let rules = fs::read_to_string(folder.join(file))?;
                    match twins.try_rules(&rules, file.ends_with(".nft"), expected) {
                        Ok([closed, opened]) => {
                            println!(
                                "{file}: decided after {closed:?}, answered again after {opened:?}"
                            );
                        }
                        Err(problem) => failures.push(format!(
                            "{file}: {problem:#}\n{}",
                            twins.fast.gated.server.log()
                        )),
                    }
                }
                Ok(failures)
            })
        };
        let running: Vec<_> = (0..HOSTS).map(run).collect();
        running
            .into_iter()
            .map(|host| host.join().expect("no panic"))
            .collect()
    });
    let failures = failures.into_iter().collect::<Result<Vec<_>>>()?.concat();
    ensure!(
        failures.is_empty(),
        "{} failures:\n{}",
        failures.len(),
        failures.join("\n")
    );
    Ok(())
}
