//! Random set-ups of a host: how the client is connected, addresses, MTU, and packet filter rules.

use std::mem::MaybeUninit;

use anyhow::{Result, ensure};
use fastrand::Rng;
use socket2::{Domain, Protocol, Socket, Type};
use whole_system_tests::{cell::feed, namespace::Namespace};

/// Names of all interfaces that lead to clients.
pub(super) const INTERFACES: [&str; 4] = ["srv", "br0", "vx0", "v5"];

/// Ethernet address of the interface that clients query through.
pub(super) const SERVER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// Ethernet address of the client.
pub(super) const CLIENT_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];

/// A set-up of host and client.
#[derive(Clone, Debug)]
pub(super) struct SetUp {
    path: Path,
    /// MTU of the link.
    mtu: u16,
    /// MTU of the routes to clients.
    route_mtu: Option<u16>,
    forwards: bool,
    /// Whether the server's address has moved to another machine.
    moved: bool,
    pub(super) rule: Rule,
}

/// How the client is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Path {
    Plain,
    Bridge,
    /// A VXLAN tunnel with a fixed remote address.
    Tunnel,
    /// A VXLAN tunnel whose routes carry the key (collect_md).
    ExternalTunnel,
    Vlan,
    Vrf,
}

/// A rule, and the tool that loads it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rule {
    tool: Tool,
    text: &'static str,
    pub(super) effect: Effect,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// No rule concerns queries.
    None,
    /// Queries or replies are dropped or diverted, always alike.
    Decides,
    /// Some pass, depending on time and number.
    Limits,
}

#[derive(Clone, Copy, Debug)]
enum Tool {
    Legacy,
    Nft,
}

const PATHS: [Path; 6] = [
    Path::Plain,
    Path::Bridge,
    Path::Tunnel,
    Path::ExternalTunnel,
    Path::Vlan,
    Path::Vrf,
];

const fn legacy(text: &'static str, effect: Effect) -> Rule {
    Rule {
        tool: Tool::Legacy,
        text,
        effect,
    }
}

const fn nft(text: &'static str, effect: Effect) -> Rule {
    Rule {
        tool: Tool::Nft,
        text,
        effect,
    }
}

/// The rules; ineffective ones are drawn often.
const RULES: [Rule; 23] = [
    legacy("", Effect::None),
    legacy(
        "*filter\n-A INPUT -p udp --dport 53 -j DROP\nCOMMIT\n",
        Effect::Decides,
    ),
    legacy("", Effect::None),
    legacy(
        "*filter\n-A INPUT -s 10.9.0.3 -j DROP\nCOMMIT\n",
        Effect::Decides,
    ),
    legacy(
        "*filter\n-A INPUT -m state --state INVALID -j DROP\nCOMMIT\n",
        Effect::Decides,
    ),
    legacy(
        "*raw\n-A PREROUTING -p udp --dport 53 -j DROP\nCOMMIT\n",
        Effect::Decides,
    ),
    legacy("", Effect::None),
    legacy(
        "*nat\n-A PREROUTING -p udp --dport 53 -j REDIRECT --to-ports 5353\nCOMMIT\n",
        Effect::Decides,
    ),
    legacy(
        "*nat\n-A PREROUTING -d 8.8.8.8 -p udp --dport 53 -j DNAT --to-destination 10.9.0.1\nCOMMIT\n",
        Effect::Decides,
    ),
    legacy(
        "*filter\n-A OUTPUT -p udp --sport 53 -j DROP\nCOMMIT\n",
        Effect::Decides,
    ),
    legacy("", Effect::None),
    legacy(
        "*filter\n:INPUT DROP\n-A INPUT -i lo -j ACCEPT\n-A INPUT -m state --state RELATED,ESTABLISHED -j ACCEPT\n\
         -A INPUT -p udp --dport 53 -j ACCEPT\nCOMMIT\n",
        Effect::Decides,
    ),
    legacy(
        "*mangle\n-A PREROUTING -p udp -j MARK --set-mark 7\nCOMMIT\n",
        Effect::None,
    ),
    legacy(
        "*filter\n-A INPUT -p udp --dport 53 -m limit --limit 1/hour -j DROP\nCOMMIT\n",
        Effect::Limits,
    ),
    nft("", Effect::None),
    legacy(
        "*filter\n-A INPUT -p udp --dport 53 -m hashlimit --hashlimit-name q --hashlimit-above 1/sec \
         --hashlimit-mode srcip -j DROP\nCOMMIT\n",
        Effect::Limits,
    ),
    nft(
        "table inet t { chain c { type filter hook input priority 0; udp dport 53 drop; }; }\n",
        Effect::Decides,
    ),
    nft(
        "table inet t { chain c { type filter hook output priority 0; udp sport 53 drop; }; }\n",
        Effect::Decides,
    ),
    nft(
        "table inet t { chain c { type filter hook prerouting priority -300; udp dport 53 counter accept; }; }\n",
        Effect::None,
    ),
    nft(
        "table ip t { chain c { type nat hook prerouting priority -100; udp dport 53 redirect to :5353; }; }\n",
        Effect::Decides,
    ),
    nft(
        "table inet t { chain c { type filter hook input priority 0; ip saddr 10.9.0.3 drop; }; }\n",
        Effect::Decides,
    ),
    nft(
        "table inet t { chain c { type filter hook input priority 0; udp dport 53 limit rate over 1/second drop; }; }\n",
        Effect::Limits,
    ),
    legacy(
        "*filter\n-A INPUT -d 169.254.0.2 -p udp -j REJECT\nCOMMIT\n",
        Effect::Decides,
    ),
];

/// Prepares a host for all set-ups.
pub(super) fn prepare(server: &Namespace) -> Result<()> {
    server.ip("addr add 169.254.0.2/32 dev lo")?;
    server.ip("addr add fd00::2/128 dev lo nodad")
}

/// Returns the paths that this kernel supports, and the other ones.
pub(super) fn paths(namespace: &Namespace) -> Result<(Vec<Path>, Vec<Path>)> {
    let (mut supported, mut lacking) = (Vec::new(), Vec::new());
    for path in PATHS {
        let link = match path {
            Path::Vrf => "name try0 type vrf table 10",
            Path::Vlan => "link lo name try0 type vlan id 9",
            Path::Plain | Path::Bridge | Path::Tunnel | Path::ExternalTunnel => {
                supported.push(path);
                continue;
            }
        };
        match namespace.ip(&format!("link add {link}")) {
            Ok(()) => {
                namespace.ip("link del try0")?;
                supported.push(path);
            }
            Err(problem) if problem.to_string().contains("Unknown device type") => {
                lacking.push(path)
            }
            Err(problem) => return Err(problem),
        }
    }
    Ok((supported, lacking))
}

impl SetUp {
    /// Returns the set-up of this number. Paths and rules take turns, so that every pair of them
    /// is tried.
    pub(super) fn random(number: usize, paths: &[Path], rng: &mut Rng) -> Self {
        Self {
            path: paths[number % paths.len()],
            mtu: [1500, 1500, 1400, 9000][rng.usize(..4)],
            route_mtu: [None, None, Some(600), Some(1000), Some(1300)][rng.usize(..5)],
            forwards: rng.u8(..4) != 0,
            moved: rng.u8(..6) == 0,
            rule: RULES[number % RULES.len()],
        }
    }

    /// Returns the set-up without anything special.
    pub(super) fn plain() -> Self {
        Self {
            path: Path::Plain,
            mtu: 1500,
            route_mtu: None,
            forwards: true,
            moved: false,
            rule: RULES[0],
        }
    }

    /// Returns the interface that the kernel reports to the server.
    pub(super) fn interface(&self) -> &'static str {
        match self.path {
            Path::Plain | Path::Vrf => "srv",
            Path::Bridge => "br0",
            Path::Tunnel | Path::ExternalTunnel => "vx0",
            Path::Vlan => "v5",
        }
    }

    /// Returns the interface of the client.
    pub(super) fn client_interface(&self) -> &'static str {
        match self.path {
            Path::Plain | Path::Vrf | Path::Bridge => "cli",
            Path::Tunnel | Path::ExternalTunnel => "vx0",
            Path::Vlan => "v5",
        }
    }

    /// Returns whether replies can be compared: packets that pass a limit differ between hosts.
    pub(super) fn is_comparable(&self) -> bool {
        self.rule.effect != Effect::Limits
    }

    /// Applies the set-up.
    pub(super) fn make(&self, server: &Namespace, client: &Namespace) -> Result<()> {
        match self.rule.tool {
            _ if self.rule.text.is_empty() => {}
            Tool::Legacy => feed(server, &["iptables-legacy-restore", "-w"], self.rule.text)?,
            Tool::Nft => feed(server, &["nft", "-f", "-"], self.rule.text)?,
        }
        let forwards = if self.forwards { "1" } else { "0" };
        server.run(|| {
            std::fs::write("/proc/sys/net/ipv4/conf/all/forwarding", forwards)?;
            std::fs::write("/proc/sys/net/ipv6/conf/all/forwarding", forwards)
        })??;
        let mtu = self.mtu;
        let (near, far) = (mac(SERVER_MAC), mac(CLIENT_MAC));
        let mut lines = if self.moved {
            "addr del 169.254.0.2/32 dev lo\n".to_owned()
        } else {
            String::new()
        };
        // With another interface on top, the link has different addresses.
        let is_below = self.interface() != "srv";
        let (link, link_far) = if is_below {
            ("02:00:00:00:01:01", "02:00:00:00:01:02")
        } else {
            (&*near, &*far)
        };
        // A bridge's port takes any address; the client's end is the client itself.
        let link_far = if self.path == Path::Bridge {
            &*far
        } else {
            link_far
        };
        let pair = format!(
            "link add srv mtu {mtu} address {link} type veth peer name cli mtu {mtu} address {link_far} netns {}\n",
            client.name()
        );
        let mut client_lines = String::from("link set lo up\n");
        match self.path {
            Path::Plain => {}
            Path::Bridge => {
                lines +=
                    &format!("link add br0 address {near} type bridge\nlink set srv master br0\n");
            }
            Path::Tunnel | Path::ExternalTunnel => {
                let ends = [
                    "local 10.8.0.1 remote 10.8.0.2",
                    "local 10.8.0.2 remote 10.8.0.1",
                ];
                let server_end = if self.path == Path::Tunnel {
                    format!("id 7 dstport 4789 {} dev srv", ends[0])
                } else {
                    "external dstport 4789".to_owned()
                };
                lines += &format!(
                    "addr add 10.8.0.1/24 dev srv\nlink add vx0 address {near} type vxlan {server_end}\n"
                );
                client_lines += &format!(
                    "addr add 10.8.0.2/24 dev cli\nlink add vx0 address {far} type vxlan id 7 dstport 4789 {} dev cli\n",
                    ends[1]
                );
            }
            Path::Vlan => {
                lines += &format!("link add link srv name v5 address {near} type vlan id 5\n");
                client_lines +=
                    &format!("link add link cli name v5 address {far} type vlan id 5\n");
            }
            Path::Vrf => {
                lines += "link add vrf-a type vrf table 10\nlink set vrf-a up\nlink set srv master vrf-a\n"
            }
        }
        let (device, client_device) = (self.interface(), self.client_interface());
        for below in ["srv", device] {
            lines += &format!("link set {below} up\n");
        }
        for below in ["cli", client_device] {
            client_lines += &format!("link set {below} up\n");
        }
        lines +=
            &format!("addr add 10.9.0.1/24 dev {device}\naddr add fd09::1/64 dev {device} nodad\n");
        for client in ["10.9.0.2", "10.9.0.3", "10.9.0.4", "fd09::2", "fd09::3"] {
            lines += &format!("neigh replace {client} lladdr {far} dev {device} nud permanent\n");
        }
        let table = if self.path == Path::Vrf {
            " table 10"
        } else {
            ""
        };
        let mtu = self
            .route_mtu
            .map(|mtu| format!(" mtu {mtu}"))
            .unwrap_or_default();
        // IPv6 allows no less than 1280.
        let mtu6 = self
            .route_mtu
            .map(|mtu| format!(" mtu {}", mtu.max(1280)))
            .unwrap_or_default();
        let key = if self.path == Path::ExternalTunnel {
            " encap ip id 7 dst 10.8.0.2"
        } else {
            ""
        };
        lines += &format!(
            "route replace 10.9.0.0/24{key} dev {device} src 10.9.0.1{mtu}{table}\n\
             route replace default{key} via 10.9.0.2 dev {device} onlink{mtu}{table}\n"
        );
        if self.path != Path::ExternalTunnel {
            lines += &format!("route replace ::/0 via fd09::2 dev {device} onlink{mtu6}{table}\n");
        }
        feed(server, &["ip", "-batch", "-"], &pair)?;
        feed(client, &["ip", "-batch", "-"], &client_lines)?;
        feed(server, &["ip", "-batch", "-"], &lines)
    }

    pub(super) fn remove(&self, server: &Namespace) -> Result<()> {
        let mut lines = String::from("link del srv\n");
        match self.path {
            Path::Bridge => lines += "link del br0\n",
            Path::ExternalTunnel | Path::Tunnel => lines.insert_str(0, "link del vx0\n"),
            Path::Vrf => lines += "link del vrf-a\n",
            Path::Plain | Path::Vlan => {}
        }
        if self.moved {
            lines += "addr add 169.254.0.2/32 dev lo\n";
        }
        feed(server, &["ip", "-batch", "-"], &lines)?;
        match self.rule.tool {
            _ if self.rule.text.is_empty() => {}
            Tool::Legacy => {
                let tables = ["filter", "nat", "raw", "mangle"];
                let empty: String = tables
                    .iter()
                    .map(|table| format!("*{table}\nCOMMIT\n"))
                    .collect();
                // The policy is the only thing that an empty table does not reset.
                let empty = empty.replacen("*filter\n", "*filter\n:INPUT ACCEPT\n", 1);
                feed(server, &["iptables-legacy-restore", "-w"], &empty)?;
            }
            Tool::Nft => feed(server, &["nft", "-f", "-"], "flush ruleset\n")?,
        }
        forget_flows(server)
    }
}

/// Deletes all entries of connection tracking. NAT goes on diverting a flow that it has diverted
/// before, even without its rule, and a later packet may have the same addresses and ports.
fn forget_flows(server: &Namespace) -> Result<()> {
    /// `IPCTNL_MSG_CT_DELETE` of `NFNL_SUBSYS_CTNETLINK`.
    const DELETE: u16 = 1 << 8 | 2;
    const FLAGS: u16 = (libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16;
    // `struct nlmsghdr`: length, type, flags, sequence and port; then `struct nfgenmsg` for all families.
    let length = 20u32.to_ne_bytes();
    let request = [
        &length[..],
        &DELETE.to_ne_bytes(),
        &FLAGS.to_ne_bytes(),
        &[0; 12],
    ]
    .concat();
    let mut reply = vec![MaybeUninit::uninit(); 64];
    let length = server.run(|| -> std::io::Result<usize> {
        let protocol = Some(Protocol::from(libc::NETLINK_NETFILTER));
        let socket = Socket::new(Domain::from(libc::AF_NETLINK), Type::RAW, protocol)?;
        socket.send(&request)?;
        socket.recv(&mut reply)
    })??;
    // SAFETY: the kernel has written these bytes.
    let reply: Vec<u8> = reply[..length]
        .iter()
        .map(|byte| unsafe { byte.assume_init() })
        .collect();
    // The error code follows the header.
    let error = reply
        .get(16..)
        .and_then(|rest| rest.first_chunk())
        .map(|code| i32::from_ne_bytes(*code));
    ensure!(
        error == Some(0),
        "connection tracking keeps its entries: {error:?}"
    );
    Ok(())
}

fn mac(address: [u8; 6]) -> String {
    address.map(|byte| format!("{byte:02x}")).join(":")
}
