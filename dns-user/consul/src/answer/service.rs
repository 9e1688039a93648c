//! Builds the records of services: A, AAAA, ANY, TXT and SRV from instances.

use std::net::IpAddr;

use dns_core::{
    name::Name,
    wire::{TYPE_A, TYPE_AAAA, TYPE_ANY, TYPE_TXT},
};
use hashbrown::HashSet;

use super::{Search, Zone};
use crate::{
    catalog::{
        InstanceId,
        address::{Accept, Target},
        registrations::Status,
    },
    found::{Failure, Found},
    question::{Locality, TYPE_SRV},
    record::{Data, Keep, Record, address_name, meta_texts, node_name},
};

/// Set of values that the answer already contains.
type Seen<T> = HashSet<T, foldhash::fast::RandomState>;

impl Zone {
    /// Returns the records of the healthy instances that `fit`, in random order.
    ///
    /// Instances are drawn one by one until the answer is full, so the cost does not depend on the
    /// size of the service.
    pub(super) fn find_healthy(
        &self,
        search: &Search<'_>,
        service: &str,
        mut instances: Vec<InstanceId>,
        fit: impl Fn(InstanceId) -> bool,
        locality: &Locality,
        random: &mut fastrand::Rng,
    ) -> Result<Found, Failure> {
        let worst = if self.config.dns.only_passing { Status::Passing } else { Status::Warning };
        let mut lots = random.fork();
        let mut drawn = 0;
        let shuffled = std::iter::from_fn(move || {
            let left = drawn..instances.len();
            if left.is_empty() {
                return None;
            }
            instances.swap(drawn, lots.usize(left));
            drawn += 1;
            Some(instances[drawn - 1])
        });
        let healthy = shuffled.filter(|&id| self.catalog.status(id) <= worst && fit(id));
        let ttl = self.config.dns.ttl_of(service);
        self.records_of(search, healthy, ttl, locality.port.as_deref(), random)
    }

    /// Returns the records of these instances, in their order.
    pub(super) fn records_of(
        &self,
        search: &Search<'_>,
        instances: impl IntoIterator<Item = InstanceId>,
        ttl: u32,
        port: Option<&str>,
        random: &mut fastrand::Rng,
    ) -> Result<Found, Failure> {
        let mut instances = instances.into_iter().peekable();
        if instances.peek().is_none() {
            return Err(Failure::NoSuchName);
        }
        match search.qtype {
            TYPE_SRV => self.srv_records(search, instances, ttl, port, random),
            _ => Ok(self.address_records(search, instances, ttl, random)),
        }
    }

    /// Returns the distinct addresses; if there are only host names, the chain of the first one,
    /// because a name can have only one CNAME.
    fn address_records(
        &self,
        search: &Search<'_>,
        instances: impl Iterator<Item = InstanceId>,
        ttl: u32,
        random: &mut fastrand::Rng,
    ) -> Found {
        let accept = accept_of(search.qtype);
        let limit = match self.config.dns.a_record_limit {
            _ if search.unlimited => search.most,
            0 => search.most,
            limit => limit.min(search.most),
        };
        let mut found = Found { soa: true, ..Found::default() };
        let mut seen = Seen::default();
        let mut host = None;
        for id in instances {
            let (instance, node) = (self.catalog.instance(id), self.catalog.node_of(id));
            let target = |accept| instance.target(node, &self.config, accept, Some(search.name));
            let Some(any) = target(Accept::Any) else { continue };
            if !seen.insert(any.identity()) {
                continue;
            }
            // Parsing every address twice would be the largest cost of a large answer.
            let wanted = match any {
                Target::Node(_) | Target::Address(_)
                    if instance.has_one_address(node, &self.config, accept) =>
                {
                    Some(any)
                }
                _ => target(accept),
            };
            match wanted {
                Some(Target::Node(address) | Target::Address(address)) if answers(search.qtype, address) => {
                    found.answers.push(Record::address(search.owner.cloned(), ttl, address));
                }
                Some(Target::Host(name)) => {
                    host.get_or_insert(name);
                }
                _ => {}
            }
            if found.answers.len() >= limit {
                break;
            }
        }
        if found.answers.is_empty()
            && let Some(host) = host
        {
            found.answers = self.chain(search, &host, ttl, random);
        }
        found
    }

    /// Returns a CNAME to `host`, followed by the records of `host`.
    fn chain(&self, search: &Search<'_>, host: &Name, ttl: u32, random: &mut fastrand::Rng) -> Vec<Record> {
        let mut records = vec![Record { owner: search.owner.cloned(), ttl, data: Data::Cname(host.clone()) }];
        records.extend(self.follow(search, host, Keep::WithTtl(ttl), random));
        records
    }

    /// Returns one SRV record for each distinct node, address and port, and the records of the
    /// targets.
    fn srv_records(
        &self,
        search: &Search<'_>,
        instances: impl Iterator<Item = InstanceId>,
        ttl: u32,
        port: Option<&str>,
        random: &mut fastrand::Rng,
    ) -> Result<Found, Failure> {
        let mut found = Found { soa: true, ..Found::default() };
        let mut seen = Seen::default();
        let mut has_port = false;
        for id in instances {
            let (instance, node) = (self.catalog.instance(id), self.catalog.node_of(id));
            let Some(port) = instance.port(node, &self.config, port) else { continue };
            has_port = true;
            let Some(target) = instance.target(node, &self.config, Accept::Any, Some(search.name)) else {
                continue;
            };
            if !seen.insert((node.name.as_str(), target.identity(), port)) {
                continue;
            }
            let (name, address) = match target {
                Target::Node(address) => (node_name(node, search.domain), Some(address)),
                Target::Address(address) => (address_name(address, node, search.domain), Some(address)),
                Target::Host(host) => (Some(host), None),
            };
            // A node's name may be invalid in DNS.
            let Some(name) = name else { continue };
            match address {
                Some(address) => found.additional.push(Record::address(Some(name.clone()), ttl, address)),
                None => found.additional.extend(self.follow(search, &name, Keep::WithTtl(ttl), random)),
            }
            if self.config.dns.node_meta_txt
                && !node.meta.is_empty()
                && let Some(owner) = node_name(node, search.domain)
            {
                let texts = meta_texts(node);
                found.additional.extend(texts.map(|text| Record {
                    owner: Some(owner.clone()),
                    ttl,
                    data: Data::Txt(text),
                }));
            }
            let data = Data::Srv { weight: self.catalog.weight(id), port, target: name };
            found.answers.push(Record { owner: search.owner.cloned(), ttl, data });
            if found.answers.len() >= search.most {
                break;
            }
        }
        if has_port { Ok(found) } else { Err(Failure::NoSuchName) }
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
enum Identity {
    Ip(IpAddr),
    Host(Name),
}

/// Returns the address family of a query type.
pub(super) fn accept_of(qtype: u16) -> Accept {
    match qtype {
        TYPE_A => Accept::V4,
        TYPE_AAAA => Accept::V6,
        _ => Accept::Any,
    }
}

/// Returns whether an address record answers a query of this type; TXT queries also get addresses (observed).
pub(super) fn answers(qtype: u16, address: IpAddr) -> bool {
    match qtype {
        TYPE_A => address.is_ipv4(),
        TYPE_AAAA => address.is_ipv6(),
        TYPE_ANY | TYPE_TXT => true,
        _ => false,
    }
}
