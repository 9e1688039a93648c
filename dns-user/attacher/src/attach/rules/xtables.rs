//! Legacy tables of iptables and ip6tables, as dumped by the kernel (`linux/netfilter/x_tables.h`,
//! `linux/netfilter_ipv4/ip_tables.h`).
//!
//! Only existing tables are requested (`/proc/net/ip_tables_names`): a request for another one
//! would make the kernel load that table, and connection tracking with it.

use std::{
    collections::HashMap,
    fs::{self, File},
    io,
    net::{IpAddr, SocketAddr},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::fs::FileExt as _,
    },
    path::Path,
    sync::OnceLock,
};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use super::{
    matches::{self, Target, u16_at, u32_at},
    too_large,
    walk::{Action, Chains, Device, Ends, Meets, Nat, NatGoal, Open, Packet, walk},
};

const GET_INFO: libc::c_int = 64;
const GET_ENTRIES: libc::c_int = 65;
/// Netfilter hook, one of `NF_INET_*`.
pub(super) const PREROUTING: usize = 0;
pub(super) const INPUT: usize = 1;
pub(super) const OUTPUT: usize = 3;
pub(super) const POSTROUTING: usize = 4;
/// The tables in the order in which a packet passes through them.
const ORDER: [&str; 5] = ["raw", "mangle", "nat", "filter", "security"];
/// Bytes of `struct ipt_getinfo`.
const INFO_LEN: usize = 84;
/// Maximum size of a table in bytes: many times that of a large Kubernetes node.
const MAX_TABLE: u32 = 32 << 20;
/// Maximum number of attempts to read a table that is replaced meanwhile.
const MAX_TRIES: usize = 8;
/// Bytes before the entries in `struct ipt_get_entries`.
const ENTRIES_AT: usize = 40;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RuleTable {
    name: &'static str,
    v6: bool,
    /// Start of each hook's chain, in bytes; `None` if the table has no chain there.
    hooks: [Option<usize>; 5],
    /// The entries, with zeroed counters.
    entries: Vec<u8>,
}

/// Names of the lists of legacy packet filter tables, for IPv4 and IPv6.
pub(crate) const LISTS: [&str; 2] = ["ip_tables_names", "ip6_tables_names"];

/// Kernel modules of a family: the one on which its tables depend, and the prefix of the module of each table.
const MODULES: [(&str, &str); 2] = [("ip_tables", "iptable_"), ("ip6_tables", "ip6table_")];

/// The lists, opened with more privileges than the process keeps; `None`: the file did not exist, or was not
/// handed over.
static OPENED: OnceLock<[Option<File>; 2]> = OnceLock::new();

fn path(list: usize) -> String {
    format!("/proc/thread-self/net/{}", LISTS[list])
}

/// Opens the lists of the calling thread's network namespace, which only root may (mode 0440), for an
/// attacher that never is root. A missing one does not exist.
pub(crate) fn open_lists() -> [Option<File>; 2] {
    // An error means that this kernel has no legacy tables of the family, or that they cannot be
    // listed, which `read_list` finds out.
    [0, 1].map(|list| File::open(path(list)).ok())
}

/// Makes the attacher read these lists, otherwise the lists that it can open now, for the rest of its life.
/// Must be called before it changes its user.
pub(crate) fn use_lists(handed: [Option<File>; 2]) {
    OPENED.get_or_init(|| {
        let [v4, v6] = open_lists();
        let [handed_v4, handed_v6] = handed;
        [handed_v4.or(v4), handed_v6.or(v6)]
    });
}

/// Reads a list of tables; a kernel without legacy tables has none.
fn read_list(list: usize) -> io::Result<String> {
    /// Longer than the names of all tables.
    const MAX_LIST_BYTES: usize = 4096;
    let opened = OPENED.get().and_then(|opened| opened[list].as_ref());
    let Some(file) = opened else {
        return match fs::read_to_string(path(list)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                excluded_by_modules(Path::new("/sys/module"), list)
            }
            other => other,
        };
    };
    // From the start of the file in each round: procfs makes its text anew.
    let mut buffer = vec![0; MAX_LIST_BYTES];
    let length = file.read_at(&mut buffer, 0)?;
    Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
}

/// Returns an empty list if the kernel's modules show that no table can exist, which are readable without privileges.
///
/// A table exists only while its module is loaded. Asking the kernel for a table instead would create it in
/// this network namespace, and load its module. Modules that are part of the kernel are not all listed, but a
/// table's cannot be if the family's is loadable: only that has a state.
fn excluded_by_modules(modules: &Path, list: usize) -> io::Result<String> {
    let (family, prefix) = MODULES[list];
    let reason = match ORDER
        .iter()
        .find(|table: &&&str| modules.join(format!("{prefix}{table}")).exists())
    {
        None if modules.join(family).join("initstate").exists() => return Ok(String::new()),
        None => format!("{family} is part of this kernel"),
        Some(table) => format!("{prefix}{table} is loaded"),
    };
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!(
            "legacy iptables may have rules ({reason}), and only root may list them; restart the attacher's \
             service (bosh-dns-xdp-attach), or start the attacher as root"
        ),
    ))
}

pub(super) fn read() -> io::Result<Vec<RuleTable>> {
    let mut tables = Vec::new();
    for (number, v6) in [false, true].into_iter().enumerate() {
        let names = read_list(number)?;
        for name in ORDER {
            // The kernel's list has an order of its own.
            if names.lines().any(|line| line == name) {
                tables.extend(RuleTable::read(name, v6)?);
            }
        }
    }
    Ok(tables)
}

pub(super) fn pass(tables: &[RuleTable], hook: usize, packet: &mut Packet, nat: Nat) -> Ends {
    let v6 = packet.is_v6();
    let mut ends = Ends::DELIVERED;
    for table in tables.iter().filter(|table| table.v6 == v6) {
        // Packets exempted from connection tracking pass no NAT.
        let passes_nat = nat == Nat::Applies && !packet.untracked;
        if table.name == "nat" && !passes_nat {
            continue;
        }
        if let Some(start) = table.hooks[hook] {
            // The same packet goes through all tables: marks and NOTRACK of one count in the next.
            let mut way = TablePath {
                table,
                packet,
                rules: HashMap::new(),
            };
            ends = ends.then(walk(&mut way, start, Action::Accept));
        }
    }
    ends
}

/// Returns whether a nat rule at `hook` may redirect queries for other addresses to an endpoint; NAT does
/// not apply to queries for those that are `is_exempt`.
pub(super) fn leads_to(
    tables: &[RuleTable],
    hook: usize,
    goal: NatGoal,
    is_exempt: impl Fn(SocketAddr) -> bool,
) -> bool {
    for table in tables {
        if table.name != "nat" || table.v6 != goal.endpoint.is_ipv6() {
            continue;
        }
        let mut chains: Vec<usize> = table.hooks[hook].into_iter().collect();
        let mut next = 0;
        while let Some(&chain) = chains.get(next) {
            next += 1;
            for at in table.chain(chain) {
                let Some(entry) = table.entry(at) else { break };
                if entry.only_destination().is_some_and(&is_exempt) {
                    continue;
                }
                if entry.may_be_udp() && entry.target().leads_to(goal) {
                    return true;
                }
                if let Some(to) = entry.jump()
                    && !chains.contains(&to)
                {
                    chains.push(to);
                }
            }
        }
    }
    false
}

impl RuleTable {
    /// Reads a table; `None` if it does not exist any more. A table that changes during each attempt is an error: taken
    /// for no table, it would let every query pass.
    fn read(name: &'static str, v6: bool) -> io::Result<Option<Self>> {
        let mut tries = 0;
        loop {
            tries += 1;
            match Self::read_once(name, v6) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && tries < MAX_TRIES => {}
                other => return other,
            }
        }
    }

    fn read_once(name: &'static str, v6: bool) -> io::Result<Option<Self>> {
        let (family, level) = if v6 {
            (AddressFamily::Inet6, libc::IPPROTO_IPV6)
        } else {
            (AddressFamily::Inet, libc::IPPROTO_IP)
        };
        // Any socket type will do; a raw socket would need CAP_NET_RAW.
        let socket = socket(family, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
        // `IPT_SO_GET_INFO`: which hooks the table has, and its size.
        let Some(info) = get(&socket, level, GET_INFO, named(name, INFO_LEN))? else {
            return Ok(None);
        };
        let valid = u32_at(&info, 32).unwrap_or(0);
        let size = u32_at(&info, 80).unwrap_or(0);
        // Before the buffer is allocated, since the kernel names the size.
        if size > MAX_TABLE {
            return Err(too_large(name));
        }
        let mut wanted = named(name, ENTRIES_AT + size as usize);
        wanted[32..36].copy_from_slice(&size.to_ne_bytes());
        // EAGAIN if the size has changed since then (`get_entries`).
        let Some(found) = get(&socket, level, GET_ENTRIES, wanted)? else {
            return Ok(None);
        };
        let mut hooks = [None; 5];
        for (hook, start) in hooks.iter_mut().enumerate() {
            if valid & 1 << hook != 0 {
                *start = u32_at(&info, 36 + hook * 4).map(|start| start as usize);
            }
        }
        let mut table = Self {
            name,
            v6,
            hooks,
            entries: found[ENTRIES_AT..].to_vec(),
        };
        table.forget_counters();
        Ok(Some(table))
    }

    /// Zeroes the packet counters, so that two readings can be compared.
    fn forget_counters(&mut self) {
        let counters = self.layout().counters;
        let mut at = 0;
        while let Some(length) = self.entry(at).map(|entry| entry.length) {
            self.entries[at + counters..at + counters + 16].fill(0);
            at += length;
        }
    }

    fn layout(&self) -> &'static Layout {
        if self.v6 { &Layout::V6 } else { &Layout::V4 }
    }

    /// Returns the entry at an offset; `None` if there is none, or it is malformed.
    fn entry(&self, at: usize) -> Option<Entry<'_>> {
        let layout = self.layout();
        let bytes = self.entries.get(at..)?;
        let target = usize::from(u16_at(bytes, layout.target)?);
        let length = usize::from(u16_at(bytes, layout.target + 2)?);
        // Every entry ends with a target of at least 32 bytes; what follows indexes by these
        // numbers.
        if length < layout.matches + 32 || target < layout.matches || target + 32 > length {
            return None;
        }
        Some(Entry {
            at,
            layout,
            bytes: bytes.get(..length)?,
            target,
            length,
        })
    }

    /// Returns the offsets of the entries from `start` to the end of its chain.
    fn chain(&self, start: usize) -> Vec<usize> {
        let mut offsets = Vec::new();
        let mut at = start;
        while let Some(entry) = self.entry(at) {
            // The kernel names user chains by an entry with the target ERROR at their head.
            let is_next_chain =
                at != start && (entry.target_name() == "ERROR" || self.hooks.contains(&Some(at)));
            if is_next_chain {
                break;
            }
            offsets.push(at);
            at += entry.length;
        }
        offsets
    }
}

/// Returns a buffer of this length for a structure that begins with the name of a table.
fn named(table: &str, length: usize) -> Vec<u8> {
    let mut buffer = vec![0; length];
    // Far shorter than `XT_TABLE_MAXNAMELEN`, 32 bytes, so that a NUL follows.
    buffer[..table.len()].copy_from_slice(table.as_bytes());
    buffer
}

/// Calls getsockopt; `None` if the table does not exist any more.
fn get(
    socket: &OwnedFd,
    level: libc::c_int,
    option: libc::c_int,
    mut buffer: Vec<u8>,
) -> io::Result<Option<Vec<u8>>> {
    let mut length = libc::socklen_t::try_from(buffer.len()).map_err(io::Error::other)?;
    // SAFETY: the length passed is the buffer's, and the buffer outlives the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            level,
            option,
            buffer.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if result == 0 {
        return Ok(Some(buffer));
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        // It was unloaded since it was listed.
        Some(libc::ENOENT) => Ok(None),
        _ => Err(error),
    }
}

/// Offsets within an entry (`struct ipt_entry`, `struct ip6t_entry`).
#[derive(Debug)]
struct Layout {
    /// Length of an address.
    address: usize,
    /// Offset of the interface names: in, out, and a mask for each.
    devices: usize,
    /// Offset of the protocol; two bytes.
    protocol: usize,
    /// Offset of the flags, followed by the inversion flags.
    flags: usize,
    /// Flag that means "goto".
    goto: u8,
    /// Inversion flag of the fragment match; 0 for IPv6.
    fragments: u8,
    /// Offset of the target's offset, followed by the offset of the next entry.
    target: usize,
    counters: usize,
    matches: usize,
}

impl Layout {
    const V4: Self = Self {
        address: 4,
        devices: 16,
        protocol: 80,
        flags: 82,
        goto: 2,
        fragments: 1,
        target: 88,
        counters: 96,
        matches: 112,
    };
    const V6: Self = Self {
        address: 16,
        devices: 64,
        protocol: 128,
        flags: 131,
        goto: 4,
        fragments: 0,
        target: 140,
        counters: 152,
        matches: 168,
    };
}

/// `IPT_INV_*` and `IP6T_INV_*`: the conditions of an entry's header that are inverted.
const INVERTED_INPUT: u8 = 1;
const INVERTED_OUTPUT: u8 = 2;
const INVERTED_SOURCE: u8 = 8;
const INVERTED_DESTINATION: u8 = 0x10;
const INVERTED_FRAGMENT: u8 = 0x20;
const INVERTED_PROTOCOL: u8 = 0x40;

struct Entry<'a> {
    /// Offset in the table.
    at: usize,
    layout: &'static Layout,
    bytes: &'a [u8],
    /// Offset of the target within the entry.
    target: usize,
    length: usize,
}

impl<'a> Entry<'a> {
    /// Returns the target's name; empty for a verdict.
    fn target_name(&self) -> &'a str {
        name(&self.bytes[self.target + 2..self.target + 31])
    }

    fn target_info(&self) -> &'a [u8] {
        &self.bytes[self.target + 32..]
    }

    /// Returns the offset of the chain to which a verdict jumps.
    fn jump(&self) -> Option<usize> {
        let verdict = i32::from_ne_bytes(*self.target_info().first_chunk()?);
        let to = usize::try_from(verdict).ok()?;
        // A rule without a target continues with the next rule.
        (self.target_name().is_empty() && to != self.at + self.length).then_some(to)
    }

    /// Returns whether a condition of the header is inverted (`IPT_INV_*`).
    fn is_inverted(&self, condition: u8) -> bool {
        self.bytes[self.layout.flags + 1] & condition != 0
    }

    fn may_be_udp(&self) -> bool {
        let inverted = self.is_inverted(INVERTED_PROTOCOL);
        match u16_at(self.bytes, self.layout.protocol) {
            // Protocol 0 is any.
            Some(0) | None => true,
            Some(protocol) => (protocol == 17) != inverted,
        }
    }

    /// Returns the only destination address and UDP port that the rule matches.
    fn only_destination(&self) -> Option<SocketAddr> {
        let address = self.layout.address;
        let [wanted, mask] = [address, 3 * address].map(|at| &self.bytes[at..at + address]);
        if self.is_inverted(INVERTED_DESTINATION) || mask.iter().any(|byte| *byte != 0xff) {
            return None;
        }
        let ip = match wanted {
            [a, b, c, d] => IpAddr::from([*a, *b, *c, *d]),
            wanted => IpAddr::from(*wanted.first_chunk::<16>()?),
        };
        let mut at = self.layout.matches;
        while at < self.target {
            let found = self.match_at(at)?;
            if name(&found[2..31]) == "udp" {
                return Some(SocketAddr::new(ip, matches::only_udp_port(&found[32..])?));
            }
            at += found.len();
        }
        None
    }

    /// Returns the match at an offset: its header of 32 bytes, with size, name and revision, and its parameters.
    fn match_at(&self, at: usize) -> Option<&'a [u8]> {
        let size = usize::from(u16_at(self.bytes, at)?);
        let found = self.bytes.get(at..at + size)?;
        (size >= 32).then_some(found)
    }

    /// Returns whether addresses, interfaces and protocol match the packet.
    fn meets_header(&self, packet: &Packet) -> Meets {
        let destination_at = self.layout.address;
        let is_sender = self.is_address(packet.from.ip(), 0, INVERTED_SOURCE);
        let is_receiver = self.is_address(packet.to.ip(), destination_at, INVERTED_DESTINATION);
        // Conditions on the client's address, if it is left open.
        let (sender, receiver) = match packet.open {
            Open::Sender if self.names_address(0) => (Meets::Client, is_receiver),
            Open::Receiver if self.names_address(destination_at) => (Meets::Client, is_sender),
            Open::Neither | Open::Sender | Open::Receiver => (Meets::known(is_sender), is_receiver),
        };
        let others = receiver
            && self.is_device(packet.input.as_ref(), 0, INVERTED_INPUT)
            && self.is_device(packet.output.as_ref(), 1, INVERTED_OUTPUT)
            && self.may_be_udp()
            && !self.is_for_fragments();
        sender.and(Meets::known(others))
    }

    /// Returns whether an address fulfils the condition at this offset.
    fn is_address(&self, ip: IpAddr, at: usize, inverted: u8) -> bool {
        // A cell has thousands of these rules, so no address is copied for them.
        let is_same = match ip {
            IpAddr::V4(ip) => self.is_within(&ip.octets(), at),
            IpAddr::V6(ip) => self.is_within(&ip.octets(), at),
        };
        is_same != self.is_inverted(inverted)
    }

    fn is_within(&self, octets: &[u8], at: usize) -> bool {
        let wanted = &self.bytes[at..];
        let mut bytes = octets.iter().zip(wanted).zip(self.mask_of(at));
        bytes.all(|((octet, wanted), mask)| octet & mask == *wanted)
    }

    /// Returns whether there is a condition on the address at this offset.
    fn names_address(&self, at: usize) -> bool {
        self.mask_of(at).iter().any(|byte| *byte != 0)
    }

    /// Returns the mask of an address, which follows both addresses.
    fn mask_of(&self, at: usize) -> &'a [u8] {
        let length = self.layout.address;
        &self.bytes[at + 2 * length..][..length]
    }

    /// Returns whether an interface fulfils the condition on the receiving one (0) or the sending one (1).
    fn is_device(&self, device: Option<&Device>, number: usize, inverted: u8) -> bool {
        let at = self.layout.devices + number * 16;
        let wanted = &self.bytes[at..at + 16];
        let mask = &self.bytes[at + 32..][..16];
        // Without a name the condition holds, and nothing depends on the interface's.
        if mask.iter().all(|byte| *byte == 0) {
            return !self.is_inverted(inverted);
        }
        let name = device.map_or(&[][..], |device| device.name().as_bytes());
        let mut is_same = true;
        for (index, (wanted, mask)) in wanted.iter().zip(mask).enumerate() {
            // The mask ends before `+`, and includes the NUL of a whole name.
            is_same &= (name.get(index).unwrap_or(&0) ^ wanted) & mask == 0;
        }
        is_same != self.is_inverted(inverted)
    }

    /// Returns whether the rule is for second and further fragments (`IPT_F_FRAG`), which plain queries do not have.
    fn is_for_fragments(&self) -> bool {
        let fragments = self.layout.fragments;
        fragments != 0
            && self.bytes[self.layout.flags] & fragments != 0
            && !self.is_inverted(INVERTED_FRAGMENT)
    }

    fn meets(&self, packet: &Packet) -> Meets {
        let mut meets = self.meets_header(packet);
        let mut at = self.layout.matches;
        while at < self.target && meets != Meets::No {
            let Some(found) = self.match_at(at) else {
                return Meets::Maybe("a malformed match");
            };
            meets = meets.and(matches::meets(
                name(&found[2..31]),
                found[31],
                &found[32..],
                packet,
            ));
            at += found.len();
        }
        meets
    }

    fn action(&self, packet: &Packet) -> Action {
        match self.target_name() {
            "" => match u32_at(self.target_info(), 0).map(u32::cast_signed) {
                // -NF_DROP - 1, -NF_ACCEPT - 1, XT_RETURN, XT_CONTINUE.
                Some(-1) => Action::Drop,
                Some(-2) => Action::Accept,
                Some(-5) => Action::Return,
                Some(0..) => match self.jump() {
                    Some(to) if self.bytes[self.layout.flags] & self.layout.goto != 0 => {
                        Action::Goto(to)
                    }
                    Some(to) => Action::Jump(to),
                    None => Action::Continue,
                },
                _ => Action::Unknown("an unknown verdict"),
            },
            // The end of a user chain, or of the table.
            "ERROR" => Action::Return,
            _ => self.target().action(Some(packet.to)),
        }
    }

    fn target(&self) -> Target<'_> {
        Target {
            name: self.target_name(),
            revision: self.bytes[self.target + 31],
            info: self.target_info(),
            v6: self.layout.address == 16,
        }
    }
}

/// Returns a NUL-terminated name.
fn name(bytes: &[u8]) -> &str {
    let end = bytes
        .iter()
        .position(|&byte| byte == 0)
        .unwrap_or(bytes.len());
    std::str::from_utf8(&bytes[..end]).unwrap_or_default()
}

/// The path of one packet through a table.
struct TablePath<'a, 'p> {
    table: &'a RuleTable,
    packet: &'p mut Packet,
    /// Offsets of the entries of the chains visited.
    rules: HashMap<usize, Vec<usize>>,
}

impl Chains for TablePath<'_, '_> {
    fn decide(&mut self, chain: usize, rule: usize) -> Vec<(Meets, Action)> {
        let Some(&at) = self.rules.get(&chain).and_then(|rules| rules.get(rule)) else {
            return Vec::new();
        };
        let Some(entry) = self.table.entry(at) else {
            return Vec::new();
        };
        let meets = entry.meets(self.packet);
        let action = entry.action(self.packet);
        // A rule that may apply changes the packet at least perhaps: its marks become unknown then.
        if meets != Meets::No {
            entry.target().change(meets, self.packet);
        }
        vec![(meets, action)]
    }

    fn rules(&mut self, chain: usize) -> usize {
        let table = self.table;
        self.rules
            .entry(chain)
            .or_insert_with(|| table.chain(chain))
            .len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_show_whether_tables_can_exist() {
        let modules = tempfile::tempdir().unwrap();
        let decide =
            |list| excluded_by_modules(modules.path(), list).map_err(|error| error.to_string());
        let add = |path: &str| fs::create_dir_all(modules.path().join(path)).unwrap();
        // Part of the kernel: tables may be as well, without a trace.
        add("ip_tables");
        assert!(
            decide(0)
                .unwrap_err()
                .contains("ip_tables is part of this kernel")
        );
        add("ip_tables/initstate");
        assert_eq!(decide(0), Ok(String::new()));
        add("ip6table_nat");
        assert_eq!(decide(0), Ok(String::new()), "a table of the other family");
        assert!(decide(1).unwrap_err().contains("ip6table_nat is loaded"));
        add("iptable_filter");
        assert!(decide(0).unwrap_err().contains("iptable_filter is loaded"));
    }
}
