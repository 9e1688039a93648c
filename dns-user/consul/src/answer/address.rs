//! Answers for single addresses and reverse lookups.

use std::net::IpAddr;

use dns_core::{reverse, wire::Query};
use hickory_proto::op::ResponseCode;

use super::{Asker, Search, Zone, service::answers};
use crate::{
    draft::Draft,
    found::{Answers, Found},
    record::{Data, Record, node_name, service_name},
};

impl Zone {
    /// Returns the record of one address: as an answer if its type is queried, else as an
    /// additional record.
    pub(super) fn one_address(&self, search: &Search<'_>, address: IpAddr) -> Found {
        let record = Record::address(search.owner.cloned(), self.config.dns.node_ttl, address);
        let mut found = Found::default();
        // Unlike for services, a TXT query is not answered with addresses here.
        let is_answer = search.qtype != dns_core::wire::TYPE_TXT && answers(search.qtype, address);
        if is_answer {
            found.answers = Answers::Records(vec![record]);
        } else {
            found.additional.push(record);
        }
        found
    }

    /// Returns the answer to a query below `arpa.`: the name of the node at an address, else of the
    /// service, for every type (observed); `None` if the address is unknown.
    pub fn reverse(&self, query: &Query<'_>, asker: &Asker) -> Option<Draft> {
        let address = reverse::address_of(query.question.raw_name)?;
        let domain = &self.config.domain;
        let target = match self.catalog.node_at(address) {
            Some(node) => node_name(node, domain)?,
            None => {
                let id = self.catalog.instance_at(address)?;
                let datacenter = &self.catalog.node_of(id).datacenter;
                service_name(&self.catalog.instance(id).service, datacenter, domain)?
            }
        };
        let mut draft = Draft::authoritative(asker.recursion);
        draft.answers = Answers::Records(vec![Record { owner: None, ttl: 0, data: Data::Ptr(target) }]);
        Some(draft)
    }

    /// Returns Consul's answer for an unknown address: NXDOMAIN with the SOA of its zone.
    pub fn no_such_address(&self, asker: &Asker) -> Draft {
        let mut draft = Draft::authoritative(asker.recursion);
        draft.rcode = ResponseCode::NXDomain;
        draft.authority.push(self.soa(&self.config.domain, asker.serial));
        draft
    }
}
