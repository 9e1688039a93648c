//! Builds the records of services: A, AAAA, ANY, TXT and SRV from instances; and the records of nodes, of single
//! addresses, and of the zone itself.

use std::{borrow::Cow, net::IpAddr};

use hashbrown::HashSet;
use hickory_proto::op::ResponseCode;

use super::{Asker, Search, Zone};
use crate::{
    catalog::{
        Catalog, InstanceId,
        nodes::{Accept, Location, Member, Target},
        registrations::Node,
    },
    pending::PendingAnswer,
    question::{Locality, TYPE_SRV},
    record::{
        Answers, Data, Failure, Found, Keep, Record, address_name, meta_records, node_name,
        service_name,
    },
};
use dns_core::{
    name::{self, Name},
    wire::{Query, TYPE_A, TYPE_AAAA, TYPE_ANY, TYPE_TXT},
};

/// Targets that the answer already contains.
pub(super) enum SeenTargets {
    /// By number within the group of all instances, which is far cheaper than hashing.
    Numbers(Vec<bool>),
    Values(Seen<Identity>),
}

impl Default for SeenTargets {
    fn default() -> Self {
        Self::Values(Seen::default())
    }
}

impl SeenTargets {
    /// Prepares for many of these instances.
    pub(super) fn new(catalog: &Catalog, instances: &[InstanceId]) -> Self {
        match catalog.common_group(instances) {
            Some(group) if group.has_only_addresses => {
                Self::Numbers(vec![false; group.members.len()])
            }
            _ => Self::default(),
        }
    }

    /// Returns the maximum number of targets, as far as it is known.
    fn capacity(&self) -> usize {
        match self {
            Self::Numbers(seen) => seen.len(),
            Self::Values(_) => 0,
        }
    }

    /// Adds the target of an instance; returns whether it is new.
    fn insert(&mut self, member: &Member, target: &Target) -> bool {
        match self {
            Self::Numbers(seen) => {
                !std::mem::replace(&mut seen[member.first_with_target as usize], true)
            }
            Self::Values(seen) => seen.insert(target.identity()),
        }
    }
}

/// Set of values that the answer already contains.
type Seen<T> = HashSet<T, foldhash::fast::RandomState>;

impl Zone {
    /// Returns the records of the healthy instances for which `is_match` holds, in random order.
    ///
    /// Instances are drawn one by one until the answer is full, so the cost of a small answer does
    /// not depend on the size of the service.
    pub(super) fn find_healthy(
        &self,
        search: &Search<'_>,
        service: &str,
        mut instances: Vec<InstanceId>,
        is_match: impl Fn(InstanceId) -> bool,
        locality: &Locality,
        random: &mut fastrand::Rng,
    ) -> Result<Found, Failure> {
        let worst = self.worst_status();
        let ttl = self.config.dns.ttl_of(service);
        // Preparing for all instances only pays if the answer takes many of them.
        let takes_most =
            search.qtype != TYPE_SRV && instances.len() / 2 < self.max_addresses(search);
        if search.qtype == TYPE_A
            && takes_most
            && let Some(group) = self.catalog.common_group(&instances)
            && group.has_only_addresses
            && group.has_distinct_targets
        {
            instances.retain(|&id| self.catalog.status(id) <= worst && is_match(id));
            return self.shuffled_addresses(search, &instances, ttl, random);
        }
        let seen = if takes_most {
            SeenTargets::new(&self.catalog, &instances)
        } else {
            SeenTargets::default()
        };
        // A generator of its own: the other one is in use while instances are drawn.
        let mut draws = random.fork();
        let mut drawn = 0;
        let shuffled = std::iter::from_fn(move || {
            let left = drawn..instances.len();
            if left.is_empty() {
                return None;
            }
            // One step of a Fisher-Yates shuffle, made only when the instance is needed.
            instances.swap(drawn, draws.usize(left));
            drawn += 1;
            Some(instances[drawn - 1])
        });
        let healthy = shuffled.filter(|&id| self.catalog.status(id) <= worst && is_match(id));
        self.records_of(search, healthy, seen, ttl, locality.port.as_deref(), random)
    }

    pub(super) fn records_of(
        &self,
        search: &Search<'_>,
        instances: impl IntoIterator<Item = InstanceId>,
        seen: SeenTargets,
        ttl: u32,
        port: Option<&str>,
        random: &mut fastrand::Rng,
    ) -> Result<Found, Failure> {
        let mut instances = instances.into_iter().peekable();
        // If all instances are excluded, the name does not exist (tests/cases).
        if instances.peek().is_none() {
            return Err(Failure::NoSuchName);
        }
        match search.qtype {
            TYPE_SRV => self.srv_records(search, instances, ttl, port, random),
            _ => Ok(self.address_records(search, instances, seen, ttl, random)),
        }
    }

    /// Returns the distinct addresses; if there are only host names, the chain of the first one,
    /// because a name can have only one CNAME.
    fn address_records(
        &self,
        search: &Search<'_>,
        instances: impl Iterator<Item = InstanceId>,
        mut seen: SeenTargets,
        ttl: u32,
        random: &mut fastrand::Rng,
    ) -> Found {
        let accept = accept_of(search.qtype);
        let limit = self.max_addresses(search);
        let mut addresses = Vec::with_capacity(seen.capacity().min(limit));
        let mut host = None;
        for id in instances {
            let member = self.catalog.member(id);
            // Duplicates are recognised before the family is chosen: instances at one place count
            // once.
            let Some(any) = self.catalog.target(member, Accept::Any, search.name) else {
                continue;
            };
            if !seen.insert(member, &any) {
                continue;
            }
            match self.catalog.target(member, accept, search.name).as_deref() {
                Some(&(Target::Node(address) | Target::Address(address)))
                    if answers(search.qtype, address) =>
                {
                    addresses.push(address);
                }
                Some(Target::Host(name)) => {
                    host.get_or_insert_with(|| name.clone());
                }
                _ => {}
            }
            // The rest would be cut off anyway.
            if addresses.len() >= limit {
                break;
            }
        }
        let answers = match host {
            Some(host) if addresses.is_empty() => {
                Answers::Records(self.chain(search, &host, ttl, random))
            }
            _ => Answers::Mixed(ttl, addresses),
        };
        Found {
            answers,
            soa: true,
            ..Found::default()
        }
    }

    fn max_addresses(&self, search: &Search<'_>) -> usize {
        match self.config.dns.a_record_limit {
            _ if search.unlimited => search.most,
            0 => search.most,
            // As in Consul: for UDP and TCP, and without TC.
            limit => limit.min(search.most),
        }
    }

    /// Returns the IPv4 addresses of instances with distinct targets, in random order. Does the same
    /// as [`Self::address_records`], at a fraction of the cost: it reads the instances one after the
    /// other, and shuffles their addresses alone, which fit the L1 cache.
    fn shuffled_addresses(
        &self,
        search: &Search<'_>,
        instances: &[InstanceId],
        ttl: u32,
        random: &mut fastrand::Rng,
    ) -> Result<Found, Failure> {
        if instances.is_empty() {
            return Err(Failure::NoSuchName);
        }
        let mut addresses = Vec::with_capacity(instances.len());
        for &id in instances {
            if let Some(Target::Node(IpAddr::V4(address)) | Target::Address(IpAddr::V4(address))) =
                self.catalog.member(id).targets.get(Accept::V4)
            {
                addresses.push(*address);
            }
        }
        let drawn = addresses.len().min(self.max_addresses(search));
        // A Fisher-Yates shuffle that stops once the answer is full.
        for place in 0..drawn {
            let other = random.usize(place..addresses.len());
            addresses.swap(place, other);
        }
        addresses.truncate(drawn);
        Ok(Found {
            answers: Answers::V4(ttl, addresses),
            soa: true,
            ..Found::default()
        })
    }

    fn chain(
        &self,
        search: &Search<'_>,
        host: &Name,
        ttl: u32,
        random: &mut fastrand::Rng,
    ) -> Vec<Record> {
        let mut records = vec![Record {
            owner: search.owner.cloned(),
            ttl,
            data: Data::Cname(host.clone()),
        }];
        records.extend(self.follow(search, host, Keep::WithTtl(ttl), random));
        records
    }

    /// Returns one SRV record for each distinct node, address and port, and the records of the targets.
    fn srv_records(
        &self,
        search: &Search<'_>,
        instances: impl Iterator<Item = InstanceId>,
        ttl: u32,
        port: Option<&str>,
        random: &mut fastrand::Rng,
    ) -> Result<Found, Failure> {
        let mut answers = Vec::new();
        let mut additional = Vec::new();
        let mut seen = Seen::default();
        let mut has_port = false;
        for id in instances {
            let instance = self.catalog.instance(id);
            let node = self.catalog.node_of(id);
            let is_main_port = port.is_none();
            // Only SRV looks at the label of the port; types of addresses ignore it (tests/cases).
            let Some(port) = instance.port(node, &self.config, port) else {
                // The name exists, because it has addresses.
                has_port |= is_main_port;
                continue;
            };
            has_port = true;
            let member = self.catalog.member(id);
            let target = self.catalog.target(member, Accept::Any, search.name);
            let Some(target) = target.map(Cow::into_owned) else {
                continue;
            };
            // Not collapsed over nodes: one address on two nodes gives two records (tests/cases).
            if !seen.insert((node.name.as_str(), target.identity(), port)) {
                continue;
            }
            let about = self.srv_target(search, node, target, ttl, random);
            // A node's name may be invalid in DNS.
            let Some((name, records)) = about else {
                continue;
            };
            additional.extend(records);
            let data = Data::Srv {
                weight: self.catalog.weight(id),
                port,
                target: name,
            };
            answers.push(Record {
                owner: search.owner.cloned(),
                ttl,
                data,
            });
            if answers.len() >= search.most {
                break;
            }
        }
        if !has_port {
            return Err(Failure::NoSuchName);
        }
        Ok(Found {
            answers: Answers::Records(answers),
            additional,
            soa: true,
            ..Found::default()
        })
    }

    /// Returns the name of a target for SRV records, and what clients need of it.
    fn srv_target(
        &self,
        search: &Search<'_>,
        node: &Node,
        target: Target,
        ttl: u32,
        random: &mut fastrand::Rng,
    ) -> Option<(Name, Vec<Record>)> {
        let (name, address) = match target {
            // Generated names are below the domain that was asked for (tests/cases).
            Target::Node(address) => (node_name(node, search.domain)?, Some(address)),
            Target::Address(address) => {
                let name = address_name(address, node, search.domain)?;
                (name, Some(address))
            }
            Target::Host(host) => (host, None),
        };
        let mut records = match address {
            Some(address) => vec![Record::address(Some(name.clone()), ttl, address)],
            None => self.follow(search, &name, Keep::WithTtl(ttl), random),
        };
        if self.config.dns.node_meta_txt
            && !node.meta.is_empty()
            && let Some(owner) = node_name(node, search.domain)
        {
            records.extend(meta_records(node, Some(&owner), ttl));
        }
        Some((name, records))
    }
}

impl Target {
    /// Returns the address that identifies duplicate instances.
    fn identity(&self) -> Identity {
        match self {
            Self::Node(address) | Self::Address(address) => Identity::Ip(*address),
            Self::Host(name) => Identity::Host(name.clone()),
        }
    }
}

#[derive(PartialEq, Eq, Hash)]
pub(super) enum Identity {
    Ip(IpAddr),
    Host(Name),
}

fn accept_of(qtype: u16) -> Accept {
    match qtype {
        TYPE_A => Accept::V4,
        TYPE_AAAA => Accept::V6,
        _ => Accept::Any,
    }
}

/// Returns whether an address record answers a query of this type.
pub(super) fn answers(qtype: u16, address: IpAddr) -> bool {
    match qtype {
        TYPE_A => address.is_ipv4(),
        TYPE_AAAA => address.is_ipv6(),
        // TXT queries also get addresses (tests/cases).
        TYPE_ANY | TYPE_TXT => true,
        _ => false,
    }
}

//----------- Nodes ----------------------------------------------------------

/// Maximum number of name servers in an answer.
const MAX_SERVERS: usize = 3;
/// Service under which Consul's servers register.
const SERVERS: &str = "consul";

impl Zone {
    /// Returns the address and metadata of a node, regardless of its health.
    pub(super) fn find_node(
        &self,
        search: &Search<'_>,
        name: &str,
        locality: &Locality,
        random: &mut fastrand::Rng,
    ) -> Result<Found, Failure> {
        // A type that no node has gives an empty answer for every name, also one of no node (tests/cases).
        if !matches!(search.qtype, TYPE_A | TYPE_AAAA | TYPE_ANY | TYPE_TXT) {
            return Ok(Found::default());
        }
        let node = self
            .catalog
            .nodes
            .find(&self.place(locality)?, name)
            .ok_or(Failure::NoSuchName)?;
        let ttl = self.config.dns.node_ttl;
        let mut records = Vec::new();
        let mut additional = Vec::new();
        if search.qtype != TYPE_TXT {
            match node.location(&self.config, accept_of(search.qtype)) {
                Some(Location::Ip(address)) if answers(search.qtype, address) => {
                    records.push(Record::address(search.owner.cloned(), ttl, address));
                }
                Some(Location::Host(host)) => {
                    let chain = self.follow(search, &host, Keep::AsTheyAre, random);
                    records.push(Record {
                        owner: search.owner.cloned(),
                        ttl,
                        data: Data::Cname(host),
                    });
                    records.extend(chain);
                }
                _ => {}
            }
        }
        let texts = meta_records(node, search.owner, ttl);
        match search.qtype {
            // Text that was asked for is the answer; otherwise it is additional (tests/cases).
            TYPE_TXT | TYPE_ANY => records.extend(texts),
            _ if self.config.dns.node_meta_txt => additional.extend(texts),
            _ => {}
        }
        // A type that the node lacks gives an empty answer without SOA (tests/cases).
        Ok(Found {
            answers: Answers::Records(records),
            additional,
            ..Found::default()
        })
    }
}

impl Zone {
    /// Returns the record of one address: as an answer if its type is queried, else as an additional record.
    pub(super) fn one_address(&self, search: &Search<'_>, address: IpAddr) -> Found {
        let record = Record::address(search.owner.cloned(), self.config.dns.node_ttl, address);
        let mut found = Found::default();
        // Unlike for services, a TXT query is not answered with addresses here.
        let is_answer = search.qtype != TYPE_TXT && answers(search.qtype, address);
        // Consul returns the address of the other family as an additional record (tests/cases).
        if is_answer {
            found.answers = Answers::Records(vec![record]);
        } else {
            found.additional.push(record);
        }
        found
    }

    /// Returns the answer to a query below `arpa.`: the name of the node at an address, else of the
    /// service; `None` if the address is unknown.
    pub fn reverse(&self, query: &Query<'_>, asker: &Asker) -> Option<PendingAnswer> {
        let address = name::address_of(query.question.raw_name)?;
        // The primary domain even for clients of the alternative one (tests/cases): an address does
        // not tell.
        let domain = &self.config.domain;
        let target = match self.catalog.nodes.at(address) {
            Some(node) => node_name(node, domain)?,
            None => {
                let id = self.catalog.instance_at(address)?;
                let datacenter = &self.catalog.node_of(id).datacenter;
                service_name(&self.catalog.instance(id).service, datacenter, domain)?
            }
        };
        // For every type of query (tests/cases).
        let mut answer = PendingAnswer::authoritative(asker.recursion);
        answer.answers = Answers::Records(vec![Record {
            owner: None,
            ttl: 0,
            data: Data::Ptr(target),
        }]);
        Some(answer)
    }

    /// Returns Consul's answer for an unknown address: NXDOMAIN with the SOA of its zone.
    pub fn no_such_address(&self, asker: &Asker) -> PendingAnswer {
        let mut answer = PendingAnswer::authoritative(asker.recursion);
        answer.rcode = ResponseCode::NXDomain;
        answer
            .authority
            .push(self.soa(&self.config.domain, asker.serial));
        answer
    }
}

impl Zone {
    pub(super) fn soa(&self, domain: &Name, serial: u32) -> Record {
        let soa = self.config.dns.soa;
        let numbers = [serial, soa.refresh, soa.retry, soa.expire, soa.min_ttl];
        Record {
            owner: Some(domain.clone()),
            ttl: soa.min_ttl,
            data: Data::Soa(domain.clone(), numbers),
        }
    }

    /// Returns NS records of a domain and the addresses of their targets: a random selection of
    /// healthy Consul servers. Nodes whose names are not valid host names are skipped.
    pub(super) fn name_servers(
        &self,
        domain: &Name,
        random: &mut fastrand::Rng,
    ) -> (Vec<Record>, Vec<Record>) {
        let worst = self.worst_status();
        let mut servers = self.catalog.service(&self.own(), SERVERS);
        servers.retain(|&id| {
            let name = &self.catalog.node_of(id).name;
            // Names that are no DNS names are left out (tests/cases).
            let is_host = name
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
            self.catalog.status(id) <= worst && is_host
        });
        random.shuffle(&mut servers);
        let ttl = self.config.dns.node_ttl;
        let mut records = Vec::new();
        let mut addresses = Vec::new();
        for &id in servers.iter().take(MAX_SERVERS) {
            let node = self.catalog.node_of(id);
            let Some(target) = node_name(node, domain) else {
                continue;
            };
            // The addresses spare resolvers a query; a host name's address would first have to be
            // looked up.
            if let Some(Location::Ip(address)) = node.location(&self.config, Accept::Any) {
                addresses.push(Record::address(Some(target.clone()), ttl, address));
            }
            records.push(Record {
                owner: Some(domain.clone()),
                ttl,
                data: Data::Ns(target),
            });
        }
        (records, addresses)
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, net::Ipv4Addr};

    use hickory_proto::{op::Message, rr::RData};
    use serde_json::{Value, json};

    use super::*;
    use crate::{Asker, config::Config, definition::Definitions};
    use dns_core::wire::{Parsed, Transport, parse_by};

    /// Returns a zone with these instances of `web`, and node `n<number>` at `10.0.x.y` for each number.
    fn zone(nodes: u32, instances: impl Iterator<Item = Value>) -> Zone {
        let (config, _) = Config::of_document("test", br#"{"consul": {}}"#)
            .whole()
            .unwrap()
            .unwrap();
        let node =
            |number| json!({"node": format!("n{number}"), "address": address(number).to_string()});
        let nodes: Vec<Value> = (0..nodes).map(node).collect();
        let text = json!({"nodes": nodes, "services": instances.collect::<Vec<_>>()}).to_string();
        let definitions = Definitions::read([("catalog.json", text.as_bytes())], &config)
            .whole()
            .unwrap();
        let catalog = Catalog::build(
            definitions.registrations,
            &config,
            config.visibility.clone(),
        );
        Zone { config, catalog }
    }

    fn address(number: u32) -> Ipv4Addr {
        Ipv4Addr::from_bits(0x0a00_0000 + number)
    }

    fn instance(number: u32) -> Value {
        json!({"node": format!("n{number}"), "service": "web", "port": 80})
    }

    /// Returns the size of the reply by TCP, and its addresses.
    fn addresses(zone: &Zone, random: &mut fastrand::Rng) -> (usize, Vec<IpAddr>) {
        let message = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x03wEb\x07service\x06consul\0\0\x01\0\x01";
        let Parsed::Query(query) = parse_by(Transport::Tcp, message) else {
            panic!("a query")
        };
        let client = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let asker = Asker {
            client,
            recursion: false,
            serial: 1,
        };
        let answer = zone.answer(&query, &asker, random).unwrap();
        assert!(answer.is_only_addresses());
        let reply = answer.finish(&query, &zone.config.dns, &Default::default());
        let records = Message::from_vec(&reply).unwrap().answers.into_iter();
        let found = records.map(|record| match record.data {
            RData::A(address) if record.name.to_ascii() == "wEb.service.consul." => {
                address.0.into()
            }
            other => panic!("{}: {other}", record.name),
        });
        (reply.len(), found.collect())
    }

    #[test]
    fn large_answers_hold_every_address() {
        const SIZE: u32 = 1300;
        let healthy: BTreeSet<IpAddr> = (0..SIZE)
            .filter(|number| number % 10 != 3)
            .map(|number| address(number).into())
            .collect();
        let with_health = |number: u32| {
            let mut instance = instance(number);
            if number % 10 == 3 {
                instance["check"] = json!({"id": "up", "status": "critical"});
            }
            instance
        };
        let distinct = zone(SIZE, (0..SIZE).map(with_health));
        // Two instances with one address, and one whose address is a host name, are no case for `shuffled_addresses`.
        let mut twice = instance(0);
        twice["id"] = json!("second");
        let mut named = instance(1);
        (named["id"], named["address"]) = (json!("named"), json!("web.example"));
        let repeated = zone(SIZE, (0..SIZE).map(with_health).chain([twice.clone()]));
        let mixed = zone(SIZE, (0..SIZE).map(with_health).chain([twice, named]));
        let mut random = fastrand::Rng::with_seed(1);
        let mut first = BTreeSet::new();
        for zone in [&distinct, &repeated, &mixed] {
            for _ in 0..5 {
                let (size, found) = addresses(zone, &mut random);
                assert_eq!(
                    (found.len(), size),
                    (healthy.len(), 36 + 16 * healthy.len())
                );
                first.insert(found[0]);
                assert_eq!(found.into_iter().collect::<BTreeSet<_>>(), healthy);
            }
        }
        assert!(first.len() > 10, "{first:?}");
    }

    #[test]
    fn oversized_answers_are_cut() {
        const SIZE: u32 = 5000;
        let zone = zone(SIZE, (0..SIZE).map(instance));
        let (size, found) = addresses(&zone, &mut fastrand::Rng::with_seed(2));
        // 64 KiB less what Consul keeps free.
        assert_eq!((size, found.len()), (36 + 16 * 4092, 4092));
        let distinct: BTreeSet<IpAddr> = found.into_iter().collect();
        assert_eq!(distinct.len(), 4092);
    }
}
