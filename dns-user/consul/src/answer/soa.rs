//! SOA and NS of our domains.

use dns_core::name::Name;

use super::Zone;
use crate::{
    catalog::{
        Place,
        address::{Accept, Location},
    },
    record::{Data, Record, node_name},
};

/// Maximum number of name servers in an answer.
const MAX_SERVERS: usize = 3;
/// Service under which Consul's servers register.
const SERVERS: &str = "consul";

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
