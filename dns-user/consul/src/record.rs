//! Resource records, the names that Consul generates for them, and the result of a search.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use dns_core::name::Name;

use crate::catalog::registrations::Node;

/// NS (RFC 1035, section 3.2.2).
pub const TYPE_NS: u16 = 2;
/// CNAME (RFC 1035, section 3.2.2).
pub const TYPE_CNAME: u16 = 5;
/// SOA (RFC 1035, section 3.2.2).
pub const TYPE_SOA: u16 = 6;

/// A record of class IN.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Record {
    /// Owner; `None` for the question's name, in the letter case of the query.
    pub owner: Option<Name>,
    /// Time to live in seconds.
    pub ttl: u32,
    /// Type and data of the record.
    pub data: Data,
}

/// Type and data of a record.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Data {
    /// IPv4 address (RFC 1035, section 3.4.1).
    A(Ipv4Addr),
    /// IPv6 address (RFC 3596).
    Aaaa(Ipv6Addr),
    /// Canonical name of an alias.
    Cname(Name),
    /// Name of an authoritative server.
    Ns(Name),
    /// Name that an address maps back to.
    Ptr(Name),
    /// SRV (RFC 2782); the priority is always 1.
    Srv {
        /// Weight among the records.
        weight: u16,
        /// Port of the service instance.
        port: u16,
        /// Host name of the instance.
        target: Name,
    },
    /// TXT; split into strings of 255 bytes when encoded.
    Txt(Box<[u8]>),
    /// SOA of this domain, with `ns.` and `hostmaster.` below it; the numbers are serial, refresh,
    /// retry, expire and minimum.
    Soa(Name, [u32; 5]),
    /// Placeholder for a recursor's answer to this host name, see [`crate::PendingAnswer`].
    Follow(Name, Keep),
}

/// Records of a recursor's reply that are passed on to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Keep {
    /// CNAME, A and AAAA with this TTL instead of the recursor's, for services.
    WithTtl(u32),
    /// Also TXT, and with the recursor's TTLs, for nodes.
    AsTheyAre,
}

/// Length of TYPE, CLASS, TTL and RDLENGTH of a record.
pub(crate) const FIXED_LEN: usize = 10;
/// Maximum number of aliases followed from one host name.
pub const MAX_CHAIN: usize = 16;
/// Maximum number of records passed on for one host name, besides the aliases that lead to them.
pub const MAX_FINAL: usize = 5;

/// Returns the records of a host name within the limits, aliases first; none if there are too many
/// aliases, because then no address is known.
pub(crate) fn limit_chain(records: impl IntoIterator<Item = Record>) -> Vec<Record> {
    let (mut chain, mut last): (Vec<Record>, Vec<Record>) = records
        .into_iter()
        .partition(|record| matches!(record.data, Data::Cname(_)));
    if chain.len() > MAX_CHAIN {
        return Vec::new();
    }
    last.truncate(MAX_FINAL);
    chain.append(&mut last);
    chain
}

impl Record {
    /// Builds an A or AAAA record.
    pub fn address(owner: Option<Name>, ttl: u32, address: IpAddr) -> Self {
        let data = match address {
            IpAddr::V4(address) => Data::A(address),
            IpAddr::V6(address) => Data::Aaaa(address),
        };
        Self { owner, ttl, data }
    }

    /// Returns the name that this record refers to.
    pub fn leads_to(&self) -> Option<&Name> {
        match &self.data {
            Data::Srv { target, .. } => Some(target),
            Data::Cname(name) | Data::Ns(name) => Some(name),
            _ => None,
        }
    }
}

impl Keep {
    /// Returns the record as passed on to the client; `None` if it is dropped.
    pub fn apply(self, mut record: Record) -> Option<Record> {
        match (self, &record.data) {
            (_, Data::A(_) | Data::Aaaa(_) | Data::Cname(_)) | (Self::AsTheyAre, Data::Txt(_)) => {}
            _ => return None,
        }
        if let Self::WithTtl(ttl) = self {
            record.ttl = ttl;
        }
        Some(record)
    }
}

/// Returns `<node>.node.<datacenter>.<domain>`, or `<node>.node.<peer>.peer.<domain>`; `None` if
/// that is not a valid domain name.
pub fn node_name(node: &Node, domain: &Name) -> Option<Name> {
    let labels = node.name.split('.');
    match &node.peer {
        Some(peer) => below(labels.chain(["node", peer, "peer"]), domain),
        None => below(labels.chain(["node", &node.datacenter]), domain),
    }
}

/// Returns `<hex>.addr.<datacenter>.<domain>`, without the datacenter for nodes imported from a peer.
pub fn address_name(address: IpAddr, node: &Node, domain: &Name) -> Option<Name> {
    let hex = match address {
        IpAddr::V4(address) => format!("{:08x}", address.to_bits()),
        IpAddr::V6(address) => format!("{:032x}", address.to_bits()),
    };
    match node.peer {
        Some(_) => below([&hex, "addr"], domain),
        None => below([&hex, "addr", &node.datacenter], domain),
    }
}

/// Returns `<service>.service.<datacenter>.<domain>`.
pub fn service_name(service: &str, datacenter: &str, domain: &Name) -> Option<Name> {
    // Each part is a label: a dot within a label would have to be escaped.
    below(service.split('.').chain(["service", datacenter]), domain)
}

/// Returns the name with these labels below `domain`; `None` if a label is empty or too long.
pub fn below<'a>(labels: impl IntoIterator<Item = &'a str>, domain: &Name) -> Option<Name> {
    let mut wire = Vec::with_capacity(64);
    for label in labels {
        // RFC 1035, section 2.3.4.
        if !(1..=63).contains(&label.len()) {
            return None;
        }
        wire.push(label.len() as u8);
        wire.extend_from_slice(label.as_bytes());
    }
    wire.extend_from_slice(domain.as_wire());
    // Fails if the whole name exceeds 255 octets.
    let (name, _) = Name::from_wire(&wire).ok()?;
    Some(name)
}

/// Returns a node's metadata as TXT records: `key=value` (RFC 1464), or the value alone if the key begins with
/// `rfc1035-`.
pub(crate) fn meta_records(node: &Node, owner: Option<&Name>, ttl: u32) -> Vec<Record> {
    let mut records = Vec::with_capacity(node.meta.len());
    for (key, value) in &node.meta {
        // `get`, because the eighth octet may be inside a character.
        let text = match key.get(..8) {
            Some(start) if start.eq_ignore_ascii_case("rfc1035-") => value.clone(),
            _ => rfc1464(key, value),
        };
        records.push(Record {
            owner: owner.cloned(),
            ttl,
            data: Data::Txt(text.into_bytes().into()),
        });
    }
    records
}

/// Encodes an attribute as in RFC 1464, section 2: quotes `` ` ``, `=` in the name, and spaces at
/// either end of the name with `` ` ``.
fn rfc1464(key: &str, value: &str) -> String {
    let mut text = String::with_capacity(key.len() + value.len() + 1);
    let inner_start = key.len() - key.trim_start_matches(' ').len();
    let inner_end = key.trim_end_matches(' ').len();
    for (at, letter) in key.char_indices() {
        let outer_space = letter == ' ' && (at < inner_start || at >= inner_end);
        if outer_space || letter == '=' || letter == '`' {
            text.push('`');
        }
        text.push(letter);
    }
    text.push('=');
    text.push_str(&value.replace('`', "``"));
    text
}

//----------- Search results -------------------------------------------------

/// Records that answer a question.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) answers: Answers,
    /// Records that save the client a further query.
    pub(crate) additional: Vec<Record>,
    /// Whether the SOA is included if there are no answers.
    pub(crate) soa: bool,
    /// Whether the answer depends on the client's location in the network.
    pub(crate) for_client: bool,
}

/// Records of an answer section. The addresses are of the question's name and have this TTL in seconds; no other
/// section has records then. A service has thousands of them, and records would be sixteen times as large.
#[derive(Clone, Debug)]
pub(crate) enum Answers {
    Records(Vec<Record>),
    V4(u32, Vec<Ipv4Addr>),
    /// Addresses of any family.
    Mixed(u32, Vec<IpAddr>),
}

impl Default for Answers {
    fn default() -> Self {
        Self::Records(Vec::new())
    }
}

impl Answers {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Records(records) => records.len(),
            Self::V4(_, addresses) => addresses.len(),
            Self::Mixed(_, addresses) => addresses.len(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the records; none of a list of addresses.
    pub(crate) fn records(&self) -> &[Record] {
        match self {
            Self::Records(records) => records,
            Self::V4(..) | Self::Mixed(..) => &[],
        }
    }

    pub(crate) fn ttl(&self) -> Option<u32> {
        match self {
            Self::Records(records) => records.first().map(|record| record.ttl),
            Self::V4(ttl, _) | Self::Mixed(ttl, _) => (!self.is_empty()).then_some(*ttl),
        }
    }

    pub(crate) fn into_records(self, owner: Option<&Name>) -> Vec<Record> {
        let mut records = Vec::new();
        match self {
            Self::Records(found) => return found,
            Self::V4(ttl, addresses) => {
                for address in addresses {
                    records.push(Record::address(owner.cloned(), ttl, address.into()));
                }
            }
            Self::Mixed(ttl, addresses) => {
                for address in addresses {
                    records.push(Record::address(owner.cloned(), ttl, address));
                }
            }
        }
        records
    }

    /// Returns the number of aliases before the first final record.
    pub(crate) fn leading_aliases(&self) -> usize {
        self.records()
            .iter()
            .take_while(|record| matches!(record.data, Data::Cname(_)))
            .count()
    }

    /// Returns the encoded size of the first `count` addresses with an owner of `owner` bytes; `None` for
    /// records.
    pub(crate) fn size_of_addresses(&self, count: usize, owner: usize) -> Option<usize> {
        let v4 = owner + FIXED_LEN + size_of::<Ipv4Addr>();
        let v6 = match self {
            Self::Records(_) => return None,
            Self::V4(..) => 0,
            Self::Mixed(_, addresses) => addresses[..count]
                .iter()
                .filter(|address| address.is_ipv6())
                .count(),
        };
        Some(count * v4 + v6 * (size_of::<Ipv6Addr>() - size_of::<Ipv4Addr>()))
    }
}

/// Reason for the lack of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    NoSuchName,
    /// SERVFAIL without records: the authoritative agent is unreachable or the token lacks permission.
    Server,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_quoted_as_in_rfc_1464() {
        assert_eq!(rfc1464("color", "blue"), "color=blue");
        assert_eq!(rfc1464("equation", "a=4"), "equation=a=4");
        assert_eq!(rfc1464("a=a", "true"), "a`=a=true");
        assert_eq!(rfc1464("a\\=a", "false"), "a\\`=a=false");
        assert_eq!(rfc1464("=", "\\="), "`==\\=");
        assert_eq!(rfc1464("string", "\"Cat\""), "string=\"Cat\"");
        assert_eq!(rfc1464("string2", "`abc`"), "string2=``abc``");
        assert_eq!(rfc1464(" s ", ""), "` s` =");
    }

    #[test]
    fn sizes_of_addresses_add_up() {
        let v4 = IpAddr::from([192, 0, 2, 1]);
        let v6 = IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1]);
        let mixed = Answers::Mixed(7, vec![v4, v6, v6, v4]);
        for (count, expected) in [(0, 0), (1, 16), (2, 44), (3, 72), (4, 88)] {
            assert_eq!(mixed.size_of_addresses(count, 2), Some(expected));
        }
        let only_v4 = Answers::V4(7, vec![Ipv4Addr::LOCALHOST; 2]);
        assert_eq!(only_v4.size_of_addresses(2, 20), Some(68));
        assert_eq!(Answers::default().size_of_addresses(0, 2), None);
    }

    #[test]
    fn time_to_live_is_of_the_first_answer() {
        let address = IpAddr::from([192, 0, 2, 1]);
        let records = [5, 9].map(|ttl| Record::address(None, ttl, address));
        for (answers, ttl) in [
            (Answers::V4(7, vec![Ipv4Addr::LOCALHOST]), Some(7)),
            (Answers::Mixed(8, vec![address]), Some(8)),
            (Answers::Records(records.to_vec()), Some(5)),
            (Answers::V4(7, Vec::new()), None),
            (Answers::default(), None),
        ] {
            assert_eq!(answers.ttl(), ttl, "{answers:?}");
        }
    }

    fn name(text: &str) -> Name {
        Name::from_text(text).unwrap()
    }

    fn node(name: &str, peer: Option<&str>) -> Node {
        Node {
            name: name.to_owned(),
            datacenter: "dc1".to_owned(),
            peer: peer.map(str::to_owned),
            ..Node::default()
        }
    }

    #[test]
    fn generated_names_have_a_place() {
        let domain = name("consul");
        let v6 = IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1]);
        let v4 = IpAddr::from([10, 0, 0, 1]);
        let own = node("n1.rack", None);
        let imported = node("n1", Some("east"));
        for (found, expected) in [
            (node_name(&own, &domain), Some("n1.rack.node.dc1.consul")),
            (
                node_name(&imported, &domain),
                Some("n1.node.east.peer.consul"),
            ),
            (node_name(&node("a..b", None), &domain), None),
            (node_name(&node("", None), &domain), None),
            (
                address_name(v4, &own, &domain),
                Some("0a000001.addr.dc1.consul"),
            ),
            (
                address_name(v6, &own, &domain),
                Some("20010db8000000000000000000000001.addr.dc1.consul"),
            ),
            (
                address_name(v4, &imported, &domain),
                Some("0a000001.addr.consul"),
            ),
            (
                service_name("a.b", "dc2", &domain),
                Some("a.b.service.dc2.consul"),
            ),
            (service_name("", "dc2", &domain), None),
        ] {
            assert_eq!(found, expected.map(name));
        }
        let long = "a".repeat(63);
        assert_eq!(
            below([&*long], &domain),
            Some(name(&format!("{long}.consul")))
        );
        assert_eq!(below([&*format!("{long}a")], &domain), None);
        assert_eq!(below([], &domain), Some(name("consul")));
        // 255 octets are the maximum of a name: three labels of 64, one of 55, eight of the domain.
        let short = "a".repeat(54);
        let fits = below([&*long, &*long, &*long, &*short], &domain);
        assert_eq!(fits.map(|name| name.as_wire().len()), Some(255));
        assert_eq!(
            below([&*long, &*long, &*long, &*format!("{short}a")], &domain),
            None
        );
    }

    #[test]
    fn metadata_becomes_text() {
        let mut node = node("n", None);
        for (key, value) in [
            ("RFC1035-a", "b=c"),
            ("a", "b"),
            ("rfc1035-", "v=spf1"),
            ("rfc1035", "x"),
            ("rfc103é", "y"),
            ("  a b ", "z"),
        ] {
            node.meta.insert(key.to_owned(), value.to_owned());
        }
        let mut texts = Vec::new();
        for record in meta_records(&node, None, 7) {
            assert_eq!((record.owner, record.ttl), (None, 7));
            let Data::Txt(text) = record.data else {
                panic!("not TXT")
            };
            texts.push(String::from_utf8(text.into()).unwrap());
        }
        assert_eq!(
            texts,
            [
                "` ` a b` =z",
                "b=c",
                "a=b",
                "rfc1035=x",
                "v=spf1",
                "rfc103é=y"
            ]
        );
    }

    #[test]
    fn records_are_passed_on_by_type() {
        let of = |data: Data| Record {
            owner: Some(name("a")),
            ttl: 9,
            data,
        };
        let v4 = Data::A([10, 0, 0, 1].into());
        let v6 = Data::Aaaa(Ipv6Addr::LOCALHOST);
        let text = Data::Txt(b"x".as_slice().into());
        let srv = Data::Srv {
            weight: 1,
            port: 2,
            target: name("c"),
        };
        for (data, for_services, for_nodes, leads_to) in [
            (v4, true, true, None),
            (v6, true, true, None),
            (Data::Cname(name("b")), true, true, Some("b")),
            (text, false, true, None),
            (Data::Ns(name("b")), false, false, Some("b")),
            (Data::Ptr(name("b")), false, false, None),
            (srv, false, false, Some("c")),
        ] {
            let record = of(data);
            assert_eq!(record.leads_to(), leads_to.map(name).as_ref());
            let with_ttl = Record {
                ttl: 5,
                ..record.clone()
            };
            let expected = for_services.then_some(with_ttl);
            assert_eq!(Keep::WithTtl(5).apply(record.clone()), expected);
            let expected = for_nodes.then(|| record.clone());
            assert_eq!(Keep::AsTheyAre.apply(record), expected);
        }
    }

    #[test]
    fn addresses_become_records() {
        let owner = name("a");
        let v4 = IpAddr::from([192, 0, 2, 1]);
        let v6 = IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1]);
        let record = |owner: Option<&Name>, data| Record {
            owner: owner.cloned(),
            ttl: 7,
            data,
        };
        let a = || Data::A([192, 0, 2, 1].into());
        let aaaa = || Data::Aaaa("2001:db8::1".parse().unwrap());
        let mixed = || Answers::Mixed(7, vec![v4, v6]);
        let only_v4 = || Answers::V4(7, vec![[192, 0, 2, 1].into()]);
        let alias = record(None, Data::Cname(name("b")));
        let records = || {
            Answers::Records(vec![
                alias.clone(),
                alias.clone(),
                record(None, a()),
                alias.clone(),
            ])
        };
        assert_eq!(
            mixed().into_records(Some(&owner)),
            [record(Some(&owner), a()), record(Some(&owner), aaaa())]
        );
        assert_eq!(only_v4().into_records(None), [record(None, a())]);
        assert_eq!(records().into_records(Some(&owner)).len(), 4);
        for (answers, length, aliases) in [
            (mixed(), 2, 0),
            (only_v4(), 1, 0),
            (records(), 4, 2),
            (Answers::default(), 0, 0),
        ] {
            assert_eq!((answers.len(), answers.is_empty()), (length, length == 0));
            assert_eq!(answers.leading_aliases(), aliases);
        }
        assert_eq!(Answers::Mixed(7, Vec::new()).ttl(), None);
    }
}
