//! Records of nodes.

use dns_core::wire::{TYPE_A, TYPE_AAAA, TYPE_ANY, TYPE_TXT};

use super::{
    Search, Zone,
    service::{accept_of, answers},
};
use crate::{
    catalog::address::Location,
    found::{Answers, Failure, Found},
    question::Locality,
    record::{Data, Keep, Record, meta_texts},
};

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
