//! Questions to the kernel about members of sets: only the kernel knows what an ipset, or a set of nftables
//! that packets or time change, holds at the moment.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt, io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use dns_common::scope::MAX_ENDPOINTS;
use dns_core::config::wildcard_receives;
use parking_lot::Mutex;

use crate::attach::netlink::{ACK, Attributes, Socket, octets, push_attribute, push_text, text};

/// Flag of an attribute that holds attributes.
const NESTED: u16 = libc::NLA_F_NESTED as u16;
/// Flag of an attribute in network order.
const NETWORK_ORDER: u16 = libc::NLA_F_NET_BYTEORDER as u16;
/// `NFNL_SUBSYS_IPSET`, in the upper byte of message types (`linux/netfilter/ipset/ip_set.h`).
const IPSET: u16 = 6 << 8;
const IPSET_TEST: u16 = IPSET | 11;
const IPSET_HEADER: u16 = IPSET | 12;
const IPSET_GET_BY_INDEX: u16 = IPSET | 15;
/// `IPSET_PROTOCOL`, since Linux 4.20.
const IPSET_PROTOCOL: u8 = 7;
/// `IPSET_ERR_EXIST`: the element is no member.
const IPSET_NO_MEMBER: i32 = 4103;
/// Request for an element of a set of nftables: `NFT_MSG_GETSETELEM`.
const NFT_GET_ELEMENT: u16 = 10 << 8 | 13;

/// Maximum number of kept answers.
const MAX_ANSWERS: usize = 16_384;

/// The kernel's answers so far. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Facts(Arc<Mutex<Answers>>);

#[derive(Default)]
struct Answers {
    /// Opened at the first question.
    socket: Option<Socket>,
    /// The ipsets by their index in rules; `None`: unknown.
    ipsets: HashMap<u16, Option<IpSet>>,
    /// The answers; `None`: the kernel gives none.
    known: BTreeMap<SetQuestion, Option<bool>>,
    /// Users that own the server's sockets, by endpoint. A server keeps its sockets.
    owners: BTreeMap<SocketAddr, u32>,
}

/// A set of the ipset subsystem.
#[derive(Clone, Debug)]
struct IpSet {
    name: String,
    /// Such as `hash:ip,port`.
    kind: String,
    /// `NFPROTO_*`; 0: the set holds no addresses.
    family: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum SetQuestion {
    /// Whether an ipset matches.
    IpSet { index: u16, parts: Vec<Part> },
    NftElement {
        family: u8,
        table: String,
        set: String,
        key: Vec<u8>,
    },
}

/// Source or destination of a packet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Part {
    pub(super) endpoint: SocketAddr,
    /// Name of the receiving or sending interface; empty without one.
    pub(super) device: String,
}

impl Facts {
    /// Returns whether a packet from `source` to `destination` is in an ipset. `flags` has the bit of each
    /// dimension that takes the packet's source (`struct xt_set_info`); `None`: unknown.
    pub(super) fn ipset(
        &self,
        index: u16,
        (dimensions, flags): (u8, u8),
        source: &Part,
        destination: &Part,
    ) -> Option<bool> {
        let mut parts = Vec::new();
        // `IPSET_DIM_MAX` is 6.
        for dimension in 1..=dimensions.min(6) {
            let is_source = flags & 1 << dimension != 0;
            let part = if is_source { source } else { destination };
            parts.push(part.clone());
        }
        self.0.lock().answer(SetQuestion::IpSet { index, parts })
    }

    /// Returns whether a set of nftables has an element with this key; `None`: unknown.
    pub(super) fn nft_element(
        &self,
        (family, table, set): &(u8, String, String),
        key: &[u8],
    ) -> Option<bool> {
        let table = table.clone();
        let set = set.clone();
        self.0.lock().answer(SetQuestion::NftElement {
            family: *family,
            table,
            set,
            key: key.to_vec(),
        })
    }

    /// Returns the user that owns the socket at an endpoint; `None`: unknown, or there are several.
    pub(super) fn owner(&self, endpoint: SocketAddr) -> Option<u32> {
        let mut answers = self.0.lock();
        if let Some(owner) = answers.owners.get(&endpoint) {
            return Some(*owner);
        }
        // An unknown owner is not kept: the server may not have opened its sockets yet.
        let owner = ask_owner(endpoint)
            .map_err(|error| unknown(&error))
            .ok()??;
        if answers.owners.len() >= MAX_ENDPOINTS {
            answers.owners.clear();
        }
        answers.owners.insert(endpoint, owner);
        Some(owner)
    }

    /// Asks every question again; returns whether an answer has changed.
    pub(crate) fn ask_again(&self) -> bool {
        let mut answers = self.0.lock();
        // Rules name sets by a number, which may mean another set by now.
        answers.ipsets.clear();
        let questions: Vec<(SetQuestion, Option<bool>)> = answers
            .known
            .iter()
            .map(|(question, answer)| (question.clone(), *answer))
            .collect();
        let changed: Vec<SetQuestion> = questions
            .into_iter()
            .filter_map(|(question, before)| (answers.ask(&question) != before).then_some(question))
            .collect();
        for question in &changed {
            // Asked again when a walk needs it: most clients do not come back.
            answers.known.remove(question);
        }
        !changed.is_empty()
    }

    /// Forgets all answers: the rules have changed.
    pub(crate) fn forget(&self) {
        let mut answers = self.0.lock();
        answers.known.clear();
        answers.ipsets.clear();
    }
}

impl fmt::Debug for Facts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Facts").finish_non_exhaustive()
    }
}

impl Answers {
    /// Returns the known answer, or asks the kernel.
    fn answer(&mut self, question: SetQuestion) -> Option<bool> {
        if let Some(answer) = self.known.get(&question) {
            return *answer;
        }
        // A flood of forged senders would fill any order of use, so all make room at once.
        if self.known.len() >= MAX_ANSWERS {
            self.known.clear();
        }
        let answer = self.ask(&question);
        self.known.insert(question, answer);
        answer
    }

    fn ask(&mut self, question: &SetQuestion) -> Option<bool> {
        match question {
            SetQuestion::IpSet { index, parts } => self.ask_ipset(*index, parts),
            SetQuestion::NftElement {
                family,
                table,
                set,
                key,
            } => {
                let mut body = vec![*family, 0, 0, 0];
                push_text(&mut body, 1, table);
                push_text(&mut body, 2, set);
                // `NFTA_SET_ELEM_LIST_ELEMENTS`, `NFTA_LIST_ELEM`, `NFTA_SET_ELEM_KEY`, `NFTA_DATA_VALUE`.
                let element = nested(1, &nested(1, &attribute(1, key)));
                push_attribute(&mut body, 3 | NESTED, &element);
                match self
                    .socket()?
                    .request(NFT_GET_ELEMENT, ACK, &body, |_, _| {})
                {
                    Ok(()) => Some(true),
                    // Also if table or set are gone, which the next reading of the rules shows.
                    Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Some(false),
                    Err(error) => unknown(&error),
                }
            }
        }
    }

    fn ask_ipset(&mut self, index: u16, parts: &[Part]) -> Option<bool> {
        let IpSet { name, kind, family } = self.ipset(index)?;
        let first = parts.first()?;
        let of_packet = if first.endpoint.is_ipv4() {
            libc::AF_INET
        } else {
            libc::AF_INET6
        };
        // The kernel considers no member of a set of the other family (`ip_set_test`).
        if family != 0 && i32::from(family) != of_packet {
            return Some(false);
        }
        // A packet that offers fewer dimensions than the set has is no member either.
        if kind.split_once(':')?.1.split(',').count() > parts.len() {
            return Some(false);
        }
        let data = members(&kind, parts)?;
        let mut body = ipset_body(&name);
        push_attribute(&mut body, 7 | NESTED, &data);
        match self.socket()?.request(IPSET_TEST, ACK, &body, |_, _| {}) {
            Ok(()) => Some(true),
            Err(error) if error.raw_os_error() == Some(IPSET_NO_MEMBER) => Some(false),
            Err(error) => unknown(&error),
        }
    }

    fn ipset(&mut self, index: u16) -> Option<IpSet> {
        if let Some(known) = self.ipsets.get(&index) {
            return known.clone();
        }
        let found = self.read_ipset(index);
        self.ipsets.insert(index, found.clone());
        found
    }

    fn read_ipset(&mut self, index: u16) -> Option<IpSet> {
        let mut body = vec![0; 4];
        push_attribute(&mut body, 1, &[IPSET_PROTOCOL]);
        push_attribute(&mut body, 11 | NETWORK_ORDER, &index.to_be_bytes());
        // The number yields the name, which every other request needs.
        let mut name = None;
        let mut kind = None;
        let mut family = 0;
        let socket = self.socket()?;
        let asked = socket.request(IPSET_GET_BY_INDEX, ACK, &body, |message, body| {
            if message == IPSET_GET_BY_INDEX {
                name = Attributes(body.get(4..).unwrap_or_default())
                    .find(|(attribute, _)| *attribute == 2)
                    .map(|(_, value)| text(value));
            }
        });
        asked.map_err(|error| unknown(&error)).ok()?;
        let name = name?;
        let asked = socket.request(IPSET_HEADER, ACK, &ipset_body(&name), |message, body| {
            if message != IPSET_HEADER {
                return;
            }
            for (attribute, value) in Attributes(body.get(4..).unwrap_or_default()) {
                match attribute {
                    3 => kind = Some(text(value)),
                    5 => family = value.first().copied().unwrap_or(0),
                    _ => {}
                }
            }
        });
        asked.map_err(|error| unknown(&error)).ok()?;
        Some(IpSet {
            name,
            kind: kind?,
            family,
        })
    }

    fn socket(&mut self) -> Option<&mut Socket> {
        if self.socket.is_none() {
            self.socket = Socket::netfilter().map_err(|error| unknown(&error)).ok();
        }
        self.socket.as_mut()
    }
}

/// Asks the kernel for the user that owns the sockets which receive datagrams for an endpoint (`linux/inet_diag.h`);
/// `None`: there are none, or they have several owners.
fn ask_owner(endpoint: SocketAddr) -> io::Result<Option<u32>> {
    // `SOCK_DIAG_BY_FAMILY`, of requests and of answers.
    const BY_FAMILY: u16 = 20;
    let mut socket = Socket::diagnosis()?;
    let mut owners = BTreeSet::new();
    // A socket of IPv6 may receive IPv4 as well.
    for family in [libc::AF_INET, libc::AF_INET6] {
        // `struct inet_diag_req_v2`: family, protocol, extensions, states, and the ports of the socket.
        let mut request = vec![0; 56];
        request[0] = u8::try_from(family).map_err(io::Error::other)?;
        request[1] = libc::IPPROTO_UDP as u8;
        // Every state: an unconnected UDP socket counts as closed.
        request[4..8].fill(0xff);
        request[8..10].copy_from_slice(&endpoint.port().to_be_bytes());
        owners.extend(
            socket.dump((BY_FAMILY, BY_FAMILY), &request, |message: &[u8]| {
                owner_in(message, endpoint.ip())
            })?,
        );
    }
    let owner = owners.pop_first();
    Ok(owner.filter(|_| owners.is_empty()))
}

/// Reads `struct inet_diag_msg`: the owner of a socket that may receive datagrams for an address.
fn owner_in(message: &[u8], address: IpAddr) -> Option<u32> {
    let bound = match i32::from(*message.first()?) {
        libc::AF_INET => IpAddr::from(*message.get(8..)?.first_chunk::<4>()?),
        // A socket of IPv6 that receives IPv4 is bound to a mapped address, or to ::.
        _ => IpAddr::from(*message.get(8..)?.first_chunk::<16>()?).to_canonical(),
    };
    // As if IPV6_V6ONLY were not set: an owner too many makes the answer unknown, never wrong.
    let receives = bound == address || wildcard_receives(SocketAddr::new(bound, 0), address, &[]);
    receives.then_some(u32::from_ne_bytes(*message.get(64..)?.first_chunk()?))
}

/// Notes a question that the kernel does not answer.
fn unknown(error: &io::Error) -> Option<bool> {
    tracing::debug!(%error, "the kernel does not say whether a set has a member");
    None
}

/// Returns what to test for membership in an ipset of this type; `None` for a type that depends on more than
/// addresses, ports and interfaces (`hash:mac`), or holds other sets (`list:set`).
fn members(kind: &str, parts: &[Part]) -> Option<Vec<u8>> {
    let (_, fields) = kind.split_once(':')?;
    let mut data = Vec::new();
    let mut is_second_address = false;
    for (field, part) in fields.split(',').zip(parts) {
        match field {
            "ip" | "net" => {
                let ip = part.endpoint.ip();
                // `IPSET_ATTR_IPADDR_IPV4`, `IPSET_ATTR_IPADDR_IPV6`.
                let address = attribute(
                    NETWORK_ORDER | if ip.is_ipv4() { 1 } else { 2 },
                    &octets(ip),
                );
                // `IPSET_ATTR_IP`, `IPSET_ATTR_IP2`.
                let number = if std::mem::replace(&mut is_second_address, true) {
                    20
                } else {
                    1
                };
                push_attribute(&mut data, number | NESTED, &address);
            }
            "port" => {
                push_attribute(
                    &mut data,
                    4 | NETWORK_ORDER,
                    &part.endpoint.port().to_be_bytes(),
                );
                if fields.contains("ip") || fields.contains("net") {
                    push_attribute(&mut data, 7, &[libc::IPPROTO_UDP as u8]);
                }
            }
            "iface" => push_text(&mut data, 23, &part.device),
            _ => return None,
        }
    }
    Some(data)
}

fn ipset_body(name: &str) -> Vec<u8> {
    let mut body = vec![0; 4];
    push_attribute(&mut body, 1, &[IPSET_PROTOCOL]);
    push_text(&mut body, 2, name);
    body
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    push_attribute(&mut bytes, kind, value);
    bytes
}

fn nested(kind: u16, value: &[u8]) -> Vec<u8> {
    attribute(kind | NESTED, value)
}
