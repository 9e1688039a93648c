//! Records of nodes, of single addresses, and of the zone itself.

use std::net::IpAddr;

use dns_core::{
    name,
    name::Name,
    wire::{Query, TYPE_A, TYPE_AAAA, TYPE_ANY, TYPE_TXT},
};
use hickory_proto::op::ResponseCode;

use super::{
    Asker, Search, Zone,
    service::{accept_of, answers},
};
use crate::{
    catalog::{
        Place,
        nodes::{Accept, Location},
    },
    pending::PendingAnswer,
    question::Locality,
    record::{Answers, Data, Failure, Found, Keep, Record, meta_texts, node_name, service_name},
};

/// Maximum number of name servers in an answer.
const MAX_SERVERS: usize = 3;
/// Service under which Consul's servers register.
const SERVERS: &str = "consul";

impl Zone {
    /// Returns the address and metadata of a node, regardless of its health. A type that the node
    /// lacks gives an empty answer without SOA; a type that no node has gives one for every name
    /// (observed).
    pub(super) fn find_node(
        &self,
        search: &Search<'_>,
        name: &str,
        locality: &Locality,
        random: &mut fastrand::Rng,
    ) -> Result<Found, Failure> {
        if !matches!(search.qtype, TYPE_A | TYPE_AAAA | TYPE_ANY | TYPE_TXT) {
            return Ok(Found::default());
        }
        let node = self.catalog.find_node(&self.place(locality)?, name).ok_or(Failure::NoSuchName)?;
        let ttl = self.config.dns.node_ttl;
        let owner = || search.owner.cloned();
        let (mut records, mut additional) = (Vec::new(), Vec::new());
        if search.qtype != TYPE_TXT {
            match node.location(&self.config, accept_of(search.qtype)) {
                Some(Location::Ip(address)) if answers(search.qtype, address) => {
                    records.push(Record::address(owner(), ttl, address));
                }
                Some(Location::Host(host)) => {
                    let chain = self.follow(search, &host, Keep::AsTheyAre, random);
                    records.push(Record { owner: owner(), ttl, data: Data::Cname(host) });
                    records.extend(chain);
                }
                _ => {}
            }
        }
        let texts = meta_texts(node).map(|text| Record { owner: owner(), ttl, data: Data::Txt(text) });
        match search.qtype {
            TYPE_TXT | TYPE_ANY => records.extend(texts),
            _ if self.config.dns.node_meta_txt => additional.extend(texts),
            _ => {}
        }
        Ok(Found { answers: Answers::Records(records), additional, ..Found::default() })
    }
}

impl Zone {
    /// Returns the record of one address: as an answer if its type is queried, else as an
    /// additional record.
    pub(super) fn one_address(&self, search: &Search<'_>, address: IpAddr) -> Found {
        let record = Record::address(search.owner.cloned(), self.config.dns.node_ttl, address);
        let mut found = Found::default();
        // Unlike for services, a TXT query is not answered with addresses here.
        let is_answer = search.qtype != TYPE_TXT && answers(search.qtype, address);
        if is_answer {
            found.answers = Answers::Records(vec![record]);
        } else {
            found.additional.push(record);
        }
        found
    }

    /// Returns the answer to a query below `arpa.`: the name of the node at an address, else of the
    /// service, for every type (observed); `None` if the address is unknown.
    pub fn reverse(&self, query: &Query<'_>, asker: &Asker) -> Option<PendingAnswer> {
        let address = name::address_of(query.question.raw_name)?;
        let domain = &self.config.domain;
        let target = match self.catalog.node_at(address) {
            Some(node) => node_name(node, domain)?,
            None => {
                let id = self.catalog.instance_at(address)?;
                let datacenter = &self.catalog.node_of(id).datacenter;
                service_name(&self.catalog.instance(id).service, datacenter, domain)?
            }
        };
        let mut answer = PendingAnswer::authoritative(asker.recursion);
        answer.answers = Answers::Records(vec![Record { owner: None, ttl: 0, data: Data::Ptr(target) }]);
        Some(answer)
    }

    /// Returns Consul's answer for an unknown address: NXDOMAIN with the SOA of its zone.
    pub fn no_such_address(&self, asker: &Asker) -> PendingAnswer {
        let mut answer = PendingAnswer::authoritative(asker.recursion);
        answer.rcode = ResponseCode::NXDomain;
        answer.authority.push(self.soa(&self.config.domain, asker.serial));
        answer
    }
}

impl Zone {
    /// Returns the SOA record of a domain.
    pub(super) fn soa(&self, domain: &Name, serial: u32) -> Record {
        let soa = self.config.dns.soa;
        let numbers = [serial, soa.refresh, soa.retry, soa.expire, soa.min_ttl];
        Record { owner: Some(domain.clone()), ttl: soa.min_ttl, data: Data::Soa(domain.clone(), numbers) }
    }

    /// Returns NS records of a domain and the addresses of their targets: a random selection of
    /// healthy Consul servers. Nodes whose names are not valid host names are skipped.
    pub(super) fn name_servers(
        &self,
        domain: &Name,
        random: &mut fastrand::Rng,
    ) -> (Vec<Record>, Vec<Record>) {
        let own = Place::Datacenter(self.config.datacenter.as_str().into());
        let worst = self.worst_status();
        let mut servers = self.catalog.service(&own, SERVERS);
        servers.retain(|&id| {
            let name = &self.catalog.node_of(id).name;
            let is_host = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
            self.catalog.status(id) <= worst && is_host
        });
        random.shuffle(&mut servers);
        let ttl = self.config.dns.node_ttl;
        let (mut records, mut addresses) = (Vec::new(), Vec::new());
        for &id in servers.iter().take(MAX_SERVERS) {
            let node = self.catalog.node_of(id);
            let Some(target) = node_name(node, domain) else { continue };
            if let Some(Location::Ip(address)) = node.location(&self.config, Accept::Any) {
                addresses.push(Record::address(Some(target.clone()), ttl, address));
            }
            records.push(Record { owner: Some(domain.clone()), ttl, data: Data::Ns(target) });
        }
        (records, addresses)
    }
}
