//! Resolves a question to the records of its answer.

mod explain;
mod publish;
mod service;

pub use self::{explain::Explanation, publish::Publishable};
use std::net::IpAddr;

use hickory_proto::op::ResponseCode;

use self::service::SeenTargets;
use crate::{
    catalog::{Catalog, Place, Reach, registrations::CheckStatus},
    config::Config,
    encode::client_subnet,
    pending::{MAX_PLAIN_ANSWERS, PendingAnswer},
    question::{KINDS, Locality, Question, Relation, TYPE_SRV, labels_within},
    record::{
        Answers, Data, Failure, Found, Keep, MAX_FINAL, Record, TYPE_NS, TYPE_SOA, limit_chain,
    },
};
use dns_core::{
    name::Name,
    wire::{MIN_UDP_SIZE, Query, TYPE_ANY, Transport},
};

/// Query type AXFR (RFC 5936).
const TYPE_AXFR: u16 = 252;
/// Maximum number of host names inside our domains followed in a row.
const MAX_DEPTH: u32 = 3;
/// Maximum number of answers over TCP.
const MAX_TCP_ANSWERS: usize = 4096;
/// Maximum number of SRV records over TCP.
const MAX_TCP_SRV: usize = 1024;

/// Current configuration and catalog, from which queries in our domains are answered.
#[derive(Debug)]
pub struct Zone {
    /// Settings that affect answers.
    pub config: Config,
    /// Registrations that answers are built from.
    pub catalog: Catalog,
}

/// Inputs of an answer besides the query.
#[derive(Clone, Copy, Debug)]
pub struct Asker {
    /// Source address of the client.
    pub client: IpAddr,
    /// Whether recursors are configured; sets RA and allows host names to be resolved.
    pub recursion: bool,
    /// Serial of the SOA record: seconds since 1970.
    pub serial: u32,
}

/// Data that an answer needs and a source has not loaded yet.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lack {
    /// Place of the missing data.
    pub place: Place,
    /// Data to fetch before the query can be answered.
    pub missing: Missing,
}

impl Lack {
    fn lists(place: Place) -> Self {
        Self {
            place,
            missing: Missing::Lists,
        }
    }
}

/// Kind of data that a source has not loaded yet.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Missing {
    /// The lists of nodes and services.
    Lists,
    /// The instances of a service, by its lower-case name.
    Service(String),
    /// The prepared queries of the place.
    Queries,
}

/// A question while it is resolved.
#[derive(Clone, Copy)]
pub(crate) struct Search<'a> {
    pub(crate) name: &'a Name,
    /// Owner of the answer's records; `None` for the name as the client wrote it.
    pub(crate) owner: Option<&'a Name>,
    pub(crate) qtype: u16,
    pub(crate) domain: &'a Name,
    /// Client address, for `near: "_ip"`.
    pub(crate) client: Option<IpAddr>,
    pub(crate) recursion: bool,
    /// Maximum number of usable answers.
    pub(crate) most: usize,
    /// Number of host names inside our domains that may still be followed.
    pub(crate) depth: u32,
    /// Whether the caller enforces `a_record_limit` itself.
    pub(crate) unlimited: bool,
}

impl<'a> Search<'a> {
    /// Creates a search for every answer that any client may get.
    fn whole(name: &'a Name, qtype: u16, domain: &'a Name) -> Self {
        Self {
            name,
            owner: None,
            qtype,
            domain,
            client: None,
            recursion: true,
            most: usize::MAX,
            depth: MAX_DEPTH,
            unlimited: false,
        }
    }
}

impl Zone {
    /// Returns the answer to a query in our domains; `None` if the name is outside them.
    pub fn answer(
        &self,
        query: &Query<'_>,
        asker: &Asker,
        random: &mut fastrand::Rng,
    ) -> Option<PendingAnswer> {
        let name = query.question.name();
        let zone = self.config.domain_of(&name)?;
        let domain = self.response_domain(&name, zone, query.question.raw_name);
        let mut answer = PendingAnswer::authoritative(asker.recursion);
        match query.question.qtype {
            // Consul gives SOA and NS to any name of its domain, whether it exists or not.
            TYPE_SOA => {
                answer.answers = Answers::Records(vec![self.soa(domain, asker.serial)]);
                (answer.authority, answer.additional) = self.name_servers(zone, random);
            }
            TYPE_NS => {
                let (servers, addresses) = self.name_servers(zone, random);
                (answer.answers, answer.additional) = (Answers::Records(servers), addresses);
            }
            // Consul transfers no zones (tests/cases).
            TYPE_AXFR => answer.rcode = ResponseCode::NotImp,
            // Missing data may hold the answer.
            _ if self.lacks(query).is_some() => answer.rcode = ResponseCode::ServFail,
            qtype => {
                let subnet = client_subnet(query);
                let search = Search {
                    // For `near`: a resolver may state the network of the client for which it asks
                    // (RFC 7871).
                    client: Some(subnet.map_or(asker.client, |subnet| subnet.address)),
                    recursion: asker.recursion,
                    most: self.most_answers(query),
                    ..Search::whole(&name, qtype, domain)
                };
                answer.fill(self.find_or_empty(&search, random), || {
                    self.soa(domain, asker.serial)
                });
            }
        }
        Some(answer)
    }

    /// Returns the data that this query needs and the source has not loaded yet.
    pub fn lacks(&self, query: &Query<'_>) -> Option<Lack> {
        let name = query.question.name();
        self.lacks_for(&name, query.question.qtype)
    }

    /// Returns the place and the lower-case service that a query is about.
    pub fn service_of(&self, query: &Query<'_>) -> Option<(Place, String)> {
        let name = query.question.name();
        match Question::read(&name, self.config.domain_of(&name)?, query.question.qtype) {
            Question::Service {
                relation: Relation::Own,
                service,
                locality,
                ..
            } => Some((self.place_of(&locality), service)),
            _ => None,
        }
    }

    /// Like [`Self::lacks`], for a name and a type.
    pub fn lacks_for(&self, name: &Name, qtype: u16) -> Option<Lack> {
        if matches!(qtype, TYPE_SOA | TYPE_NS | TYPE_AXFR) {
            return None;
        }
        match Question::read(name, self.config.domain_of(name)?, qtype) {
            // Nodes of a peer are loaded with the instances of its services.
            Question::Node {
                locality: Locality {
                    peer: Some(peer), ..
                },
                ..
            } => {
                let place = Place::Peer(peer.into());
                self.catalog
                    .is_incomplete(&place)
                    .then(|| Lack::lists(place))
            }
            Question::Node { locality, .. } => self.pending(self.place_of(&locality), None),
            Question::Service {
                relation: Relation::Own,
                service,
                locality,
                ..
            } => self.pending(self.place_of(&locality), Some(service)),
            // The instances are registered under other names.
            Question::Service { locality, .. } => {
                let place = self.place_of(&locality);
                let is_read_whole = place == self.own() || matches!(place, Place::Peer(_));
                let lacks = self.catalog.is_pending(&place, None)
                    || is_read_whole && self.catalog.is_incomplete(&place);
                lacks.then(|| Lack::lists(place))
            }
            Question::Query { name, datacenter } => {
                self.lacks_for_query(&name, datacenter.as_deref())
            }
            // The address is registered with the service's proxies, under another name.
            Question::Virtual { service, peer } => {
                let place = match &peer {
                    Some(peer) => Place::Peer(peer.as_str().into()),
                    None => self.own(),
                };
                match self.catalog.virtual_address(peer.as_deref(), &service) {
                    Ok(None) if self.catalog.is_incomplete(&place) => Some(Lack::lists(place)),
                    _ => self.pending(place, Some(service)),
                }
            }
            Question::Address(_) | Question::Empty | Question::Invalid => None,
        }
    }

    pub(crate) fn own(&self) -> Place {
        Place::Datacenter(self.config.datacenter.as_str().into())
    }

    /// Returns the lack of a service's instances, or of a place's lists, that are not loaded yet.
    fn pending(&self, place: Place, service: Option<String>) -> Option<Lack> {
        let is_pending = self.catalog.is_pending(&place, service.as_deref());
        is_pending.then(|| Lack {
            place,
            missing: service.map_or(Missing::Lists, Missing::Service),
        })
    }

    /// Like [`Self::find`], but with `empty_non_terminals` a name above others exists.
    fn find_or_empty(
        &self,
        search: &Search<'_>,
        random: &mut fastrand::Rng,
    ) -> Result<Found, Failure> {
        match self.find(search, random) {
            Err(Failure::NoSuchName)
                if self.config.empty_non_terminals && self.has_names_below(search.name) =>
            {
                Ok(Found {
                    soa: true,
                    ..Found::default()
                })
            }
            found => found,
        }
    }

    /// Resolves a name to the records that answer the question.
    fn find(&self, search: &Search<'_>, random: &mut fastrand::Rng) -> Result<Found, Failure> {
        let zone = self
            .config
            .domain_of(search.name)
            .ok_or(Failure::NoSuchName)?;
        match Question::read(search.name, zone, search.qtype) {
            Question::Node { name, locality } => self.find_node(search, &name, &locality, random),
            // For an ACL error Consul answers SERVFAIL here, not an empty answer.
            Question::Service {
                relation: Relation::Mesh,
                service,
                ..
            } if !self.catalog.is_readable(&service) => Err(Failure::Server),
            Question::Service {
                relation,
                service,
                tag,
                locality,
            } => {
                let place = self.place(&locality)?;
                let found = self.catalog.related(relation, &place, &service);
                self.find_healthy(
                    search,
                    &service,
                    found,
                    |id| {
                        tag.as_ref()
                            .is_none_or(|tag| self.catalog.instance(id).has_tag(tag))
                    },
                    &locality,
                    random,
                )
            }
            Question::Query { name, datacenter } => {
                let executed = self.execute(&name, datacenter.as_deref(), search.client, random)?;
                let seen = SeenTargets::new(&self.catalog, &executed.instances);
                let mut found =
                    self.records_of(search, executed.instances, seen, executed.ttl, None, random)?;
                // A query may sort its answers by their distance from the client.
                found.for_client = !found.answers.is_empty();
                Ok(found)
            }
            Question::Virtual { service, peer } => {
                // Without an address the name still exists, with an empty answer and no SOA
                // (tests/cases).
                let address = self.catalog.virtual_address(peer.as_deref(), &service);
                let address = address.map_err(|_| Failure::Server)?;
                Ok(
                    address
                        .map_or_else(Found::default, |address| self.one_address(search, address)),
                )
            }
            Question::Address(address) => Ok(self.one_address(search, address)),
            Question::Empty | Question::Invalid => Err(Failure::NoSuchName),
        }
    }

    /// Returns the place of a question, whether it can be reached or not.
    fn place_of(&self, locality: &Locality) -> Place {
        let Locality {
            datacenter, peer, ..
        } = locality;
        match peer {
            Some(peer) => Place::Peer(peer.as_str().into()),
            None => Place::Datacenter(
                datacenter
                    .as_ref()
                    .unwrap_or(&self.config.datacenter)
                    .as_str()
                    .into(),
            ),
        }
    }

    /// Returns the place in which a question is resolved.
    fn place(&self, locality: &Locality) -> Result<Place, Failure> {
        let place = self.place_of(locality);
        if let Place::Datacenter(datacenter) = &place {
            self.check_reach(datacenter)?;
        }
        Ok(place)
    }

    /// Fails unless a datacenter, in lower case, can be reached.
    pub(crate) fn check_reach(&self, datacenter: &str) -> Result<(), Failure> {
        match self.catalog.reach(datacenter) {
            Reach::Reachable => Ok(()),
            // Whether the name exists is unknown; in an unknown datacenter it does not
            // (tests/cases).
            Reach::Unreachable => Err(Failure::Server),
            Reach::Unknown => Err(Failure::NoSuchName),
        }
    }

    fn worst_status(&self) -> CheckStatus {
        if self.config.dns.only_passing {
            CheckStatus::Passing
        } else {
            CheckStatus::Warning
        }
    }

    /// Resolves a host name to records in our domains, or to a placeholder for a recursor's reply.
    fn follow(
        &self,
        search: &Search<'_>,
        host: &Name,
        keep: Keep,
        random: &mut fastrand::Rng,
    ) -> Vec<Record> {
        let Some(domain) = self.config.domain_of(host) else {
            let wanted = Record {
                owner: None,
                ttl: 0,
                data: Data::Follow(host.clone(), keep),
            };
            return if search.recursion {
                vec![wanted]
            } else {
                Vec::new()
            };
        };
        // Host names may lead in a circle.
        if search.depth == 0 {
            return Vec::new();
        }
        let inside = Search {
            name: host,
            owner: Some(host),
            qtype: TYPE_ANY,
            domain,
            most: MAX_FINAL,
            depth: search.depth - 1,
            unlimited: false,
            ..*search
        };
        let found = self.find(&inside, random).unwrap_or_default();
        let kept = found
            .answers
            .into_records(Some(host))
            .into_iter()
            .filter_map(|record| match record.data {
                // The placeholder takes the TTL of the answer that contains it.
                Data::Follow(name, _) => Some(Record {
                    data: Data::Follow(name, keep),
                    ..record
                }),
                _ => keep.apply(record),
            });
        limit_chain(kept)
    }

    /// Returns the domain for generated names and the SOA of an answer: the question's domain.
    fn response_domain<'a>(&'a self, name: &Name, zone: &'a Name, raw_name: &[u8]) -> &'a Name {
        // The primary domain replaces the alternative one at its apex, and where it is not written in lower case
        // (tests/cases).
        if *zone != self.config.domain && name != zone && raw_name.ends_with(zone.as_wire()) {
            zone
        } else {
            &self.config.domain
        }
    }

    /// Returns the number of answers worth building: one more than fits UDP, which reveals truncation.
    fn most_answers(&self, query: &Query<'_>) -> usize {
        /// Size of the smallest record: a pointer, its fixed fields, an IPv4 address.
        const MIN_SIZE: usize = 2 + 10 + 4;
        match query.transport {
            Transport::Tcp if query.question.qtype == TYPE_SRV => MAX_TCP_SRV,
            Transport::Tcp => MAX_TCP_ANSWERS,
            Transport::Udp if query.limit() <= MIN_UDP_SIZE => {
                self.config.dns.udp_answer_limit.min(MAX_PLAIN_ANSWERS) + 1
            }
            Transport::Udp => query.limit() / MIN_SIZE + 1,
        }
    }
}

//----------- Non terminal -------------------------------------------------
//
// Empty non-terminals: names without records, but with names below them (RFC 8020). A resolver with
// QNAME minimisation (RFC 9156) queries them first and applies NXDOMAIN to the whole subtree.

impl Zone {
    /// Returns whether a name without records has names below it: SRV targets and names of all kinds
    /// with a datacenter, peer or port, nodes, tags and queries with dots, and the forms of RFC 2782.
    ///
    /// Any label passes for the name of a port, and any `_label` for a tag or protocol, because only
    /// a scan of all instances could tell.
    fn has_names_below(&self, name: &Name) -> bool {
        let Some(domain) = self.config.domain_of(name) else {
            return false;
        };
        let labels = labels_within(name, domain);
        if let Some(at) = labels
            .iter()
            .rposition(|label| KINDS.contains(&label.as_str()))
        {
            return self.has_names_of_kind(&labels[at], &labels[..at], &labels[at + 1..]);
        }
        match labels.iter().rposition(|label| label.starts_with('_')) {
            // In SRV queries `_service._tag` may omit `service`.
            Some(0) => self.is_place(&labels[1..]),
            Some(_) => match Question::read(name, domain, TYPE_SRV) {
                Question::Service {
                    service, locality, ..
                } => {
                    let instances = self.catalog.service(&self.place_of(&locality), &service);
                    instances
                        .iter()
                        .any(|&id| self.catalog.status(id) <= self.worst_status())
                }
                _ => false,
            },
            None => labels.as_slice() == ["ns"] || self.is_part_of_place(&labels),
        }
    }

    /// Does the same for a name whose labels around the kind are these.
    fn has_names_of_kind(&self, kind: &str, before: &[String], after: &[String]) -> bool {
        let is_place = self.is_place(after)
            || matches!((kind, after), ("virtual", [peer]) if self.catalog.is_peer(peer));
        if !is_place {
            return false;
        }
        let Some(last) = before.last() else {
            return true;
        };
        let locality = Locality::read(after).unwrap_or_default();
        let joined = before.join(".");
        match kind {
            "node" => self
                .catalog
                .nodes
                .has_below(&self.place_of(&locality), &joined),
            // The form of RFC 2782 has another label in front.
            "query" | "service" if before.len() == 1 && last.starts_with('_') => true,
            "query" => {
                let stored = locality
                    .datacenter
                    .as_ref()
                    .unwrap_or(&self.config.datacenter);
                self.catalog
                    .queries(stored)
                    .any(|query| is_below(&query.name, &joined))
            }
            "service" => {
                let joined = before[..before.len() - 1].join(".");
                if joined.is_empty() {
                    return false;
                }
                for &id in self.catalog.service(&self.place_of(&locality), last).iter() {
                    let mut tags = self.catalog.instance(id).tags.iter();
                    if self.catalog.status(id) <= self.worst_status()
                        && tags.any(|tag| is_below(tag, &joined))
                    {
                        return true;
                    }
                }
                false
            }
            // Of the other kinds only one label counts.
            _ => false,
        }
    }

    /// Returns whether labels to the right of a kind lead to a known place.
    fn is_place(&self, after: &[String]) -> bool {
        let Some(locality) = Locality::read(after) else {
            return false;
        };
        match self.place_of(&locality) {
            Place::Datacenter(name) => self.catalog.reach(&name) != Reach::Unknown,
            Place::Peer(name) => self.catalog.is_peer(&name),
        }
    }

    /// Returns whether labels are the right part of the labels after a kind: of a datacenter, or of
    /// pairs of a value and `dc`, `peer` or `port`.
    fn is_part_of_place(&self, labels: &[String]) -> bool {
        if let [name] = labels
            && (self.catalog.reach(name) != Reach::Unknown || self.catalog.is_peer(name))
        {
            return true;
        }
        let mut rest = labels;
        let mut has_datacenter = false;
        let mut has_peer = false;
        while let [before @ .., kind] = rest {
            let Some((value, further)) = before.split_last() else {
                return matches!(kind.as_str(), "dc" | "peer" | "port");
            };
            match kind.as_str() {
                "dc" if self.catalog.reach(value) != Reach::Unknown => has_datacenter = true,
                "peer" if self.catalog.is_peer(value) => has_peer = true,
                "port" => {}
                _ => return false,
            }
            rest = further;
        }
        // A service of a peer has no datacenter of ours, so both together name nothing
        // (tests/cases).
        !(has_datacenter && has_peer)
    }
}

fn is_below(name: &str, joined: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let rest = name.strip_suffix(joined);
    rest.is_some_and(|rest| rest.ends_with('.'))
}

#[cfg(test)]
mod non_terminal_tests {
    use serde_json::json;

    use super::*;
    use crate::{catalog::Catalog, config::Config, definition::Definitions};

    #[test]
    fn names_above_others_exist() {
        let (config, _) = Config::of_document("test", br#"{"consul": {"node_name": "a"}}"#)
            .whole()
            .unwrap()
            .unwrap();
        let text = json!({
            "nodes": [
                {"node": "a", "address": "10.0.0.1"},
                {"node": "b.rack.row", "address": "10.0.0.2"},
                {"node": "p", "address": "10.0.0.3", "peer": "east"},
            ],
            "services": [
                {"name": "web", "tags": ["v1.blue", "plain"]},
                {"name": "sick", "tags": ["v1.blue"], "check": {"id": "up", "status": "critical"}},
            ],
            "queries": [{"id": "1", "name": "one.two", "service": "web"}],
            "datacenters": [{"name": "dc2"}],
        })
        .to_string();
        let definitions = Definitions::read([("catalog.json", text.as_bytes())], &config)
            .whole()
            .unwrap();
        let catalog = Catalog::build(
            definitions.registrations,
            &config,
            config.visibility.clone(),
        );
        let zone = Zone { config, catalog };
        let has = |name: &str| zone.has_names_below(&Name::from_text(name).unwrap());
        for name in [
            "consul",
            "ns.consul",
            "dc1.consul",
            "dc2.consul",
            "east.consul",
            "service.consul",
            "node.dc1.consul",
            "addr.dc1.consul",
            "service.dc2.consul",
            "dc.consul",
            "dc1.dc.consul",
            "node.dc1.dc.consul",
            "peer.consul",
            "east.peer.consul",
            "node.east.peer.consul",
            "virtual.east.consul",
            "query.dc1.consul",
            "port.consul",
            "http.port.consul",
            "dc.http.port.consul",
            "service.http.port.consul",
            "rack.row.node.consul",
            "row.node.dc1.consul",
            "blue.web.service.consul",
            "blue.web.service.dc1.consul",
            "two.query.consul",
            "_tcp.service.consul",
            "_tcp.query.consul",
            "_tcp.consul",
            "_web._tcp.dc1.consul",
        ] {
            assert!(has(name), "{name}");
        }
        for name in [
            "nothing.consul",
            "dc3.consul",
            "node.dc3.consul",
            "west.peer.consul",
            "dc3.dc.consul",
            "service.east.consul",
            "ow.node.consul",
            "row.node.dc2.consul",
            "plain.web.service.consul",
            "lue.web.service.consul",
            "blue.sick.service.consul",
            "web.service.consul",
            "wo.query.consul",
            "x.connect.consul",
            "dc1.dc.east.peer.consul",
            "ns.ns.consul",
            "_a._b._c.consul",
            "_gone._tcp.consul",
            "other.example",
        ] {
            assert!(!has(name), "{name}");
        }
    }
}

#[cfg(test)]
mod tests;
