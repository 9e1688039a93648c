//! Empty non-terminals: names without records, but with names below them (RFC 8020). A resolver with
//! QNAME minimisation (RFC 9156) queries them first and applies NXDOMAIN to the whole subtree.

use dns_core::name::Name;

use super::Zone;
use crate::{
    catalog::{Place, Reach},
    question::{KINDS, Locality, Question, TYPE_SRV, labels_within},
};

impl Zone {
    /// Returns whether a name without records has names below it: SRV targets and names of all kinds
    /// with a datacenter, peer or port, nodes, tags and queries with dots, and the forms of RFC 2782.
    ///
    /// Any label passes for the name of a port, and any `_label` for a tag or protocol, because only
    /// a scan of all instances could tell.
    pub(super) fn has_names_below(&self, name: &Name) -> bool {
        let Some(domain) = self.config.domain_of(name) else { return false };
        let labels = labels_within(name, domain);
        if let Some(at) = labels.iter().rposition(|label| KINDS.contains(&label.as_str())) {
            return self.has_names_of_kind(&labels[at], &labels[..at], &labels[at + 1..]);
        }
        match labels.iter().rposition(|label| label.starts_with('_')) {
            // In SRV queries `_service._tag` may omit `service`.
            Some(0) => self.is_place(&labels[1..]),
            Some(_) => match Question::read(name, domain, TYPE_SRV) {
                Question::Service { service, locality, .. } => {
                    let instances = self.catalog.service(&self.place_of(&locality), &service);
                    instances.iter().any(|&id| self.catalog.status(id) <= self.worst_status())
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
        let Some(last) = before.last() else { return true };
        let locality = Locality::read(after).unwrap_or_default();
        let joined = before.join(".");
        let is_below = |name: &str| {
            let name = name.to_ascii_lowercase();
            name.strip_suffix(&joined).is_some_and(|rest| rest.ends_with('.'))
        };
        match kind {
            "node" => self.catalog.has_node_below(&self.place_of(&locality), &joined),
            "query" | "service" if before.len() == 1 && last.starts_with('_') => true,
            "query" => {
                let stored = locality.datacenter.as_ref().unwrap_or(&self.config.datacenter);
                self.catalog.queries(stored).any(|query| is_below(&query.name))
            }
            "service" => {
                let joined = before[..before.len() - 1].join(".");
                let is_below = |tag: &String| {
                    let tag = tag.to_ascii_lowercase();
                    tag.strip_suffix(&joined).is_some_and(|rest| rest.ends_with('.'))
                };
                let instances = self.catalog.service(&self.place_of(&locality), last);
                let mut healthy =
                    instances.iter().filter(|&&id| self.catalog.status(id) <= self.worst_status());
                !joined.is_empty() && healthy.any(|&id| self.catalog.instance(id).tags.iter().any(is_below))
            }
            // Of the other kinds only one label counts.
            _ => false,
        }
    }

    /// Returns whether labels to the right of a kind lead to a known place.
    fn is_place(&self, after: &[String]) -> bool {
        let Some(locality) = Locality::read(after) else { return false };
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
        let (mut rest, mut has_datacenter, mut has_peer) = (labels, false, false);
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
        !(has_datacenter && has_peer)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{catalog::Catalog, config::Config, definition::Definitions};

    #[test]
    fn names_above_others_exist() {
        let (config, _) =
            Config::of_document("test", br#"{"consul": {"node_name": "a"}}"#).whole().unwrap().unwrap();
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
        let definitions = Definitions::read([("catalog.json", text.as_bytes())], &config).whole().unwrap();
        let catalog = Catalog::build(definitions.registrations, &config, config.visibility.clone());
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
