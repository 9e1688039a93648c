//! Explains the answer to a name.

use std::fmt::Write as _;

use dns_core::{name::Name, wire::TYPE_ANY};

use super::{Lack, Missing, Search, Zone};
use crate::{
    catalog::{Place, Reach, registrations::CheckStatus},
    question::{Locality, Question, Relation, TYPE_SRV},
    record::Failure,
};

/// Maximum number of listed instances.
const MAX_LISTED: usize = 50;

/// Explanation of a name's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// Domain of the name.
    pub domain: String,
    /// Explanation as lines of text.
    pub text: String,
    /// RCODE of the answer: `NOERROR`, `NXDOMAIN` or `SERVFAIL`.
    pub rcode: &'static str,
}

impl Zone {
    /// Explains the answer to a name; `None` if it is outside our domains.
    pub fn explain(&self, name: &Name) -> Option<Explanation> {
        let domain = self.config.domain_of(name)?;
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name} is one of Consul's names (domain {domain})");
        let mut qtype = TYPE_ANY;
        let mut question = Question::read(name, domain, qtype);
        // For SRV alone, `service` may be missing behind `_service._tag` (RFC 2782).
        if question == Question::Invalid {
            qtype = TYPE_SRV;
            question = Question::read(name, domain, qtype);
        }
        let _ = writeln!(text, "  asks for: {}", self.in_words(&question));
        // An answer from the known part may be wrong once the rest arrives.
        if let Some(lack) = self.lacks_for(name, qtype) {
            let Lack { place, missing } = lack;
            let missing = match missing {
                Missing::Lists => "nodes and services".to_owned(),
                Missing::Service(service) => format!("instances of {service:?}"),
                Missing::Queries => "prepared queries".to_owned(),
            };
            let place = match place {
                Place::Datacenter(name) => format!("the datacenter {name:?}"),
                Place::Peer(name) => format!("the peer {name:?}"),
            };
            let _ = writeln!(
                text,
                "  {missing} of {place} not yet received from Consul: SERVFAIL"
            );
            return Some(Explanation {
                domain: domain.to_string(),
                text,
                rcode: "SERVFAIL",
            });
        }
        self.list_instances(&question, &mut text);
        let search = Search::whole(name, qtype, domain);
        let rcode = match self.find_or_empty(&search, &mut fastrand::Rng::new()) {
            Ok(found) => {
                let count = found.answers.len();
                let kind = if qtype == TYPE_SRV { "SRV" } else { "ANY" };
                let ttl = found.answers.ttl().unwrap_or(0);
                let _ = writeln!(text, "  {count} records for type {kind}, TTL {ttl}");
                "NOERROR"
            }
            Err(Failure::NoSuchName) => "NXDOMAIN",
            Err(Failure::Server) => "SERVFAIL",
        };
        let _ = writeln!(text, "  {rcode}");
        Some(Explanation {
            domain: domain.to_string(),
            text,
            rcode,
        })
    }

    fn in_words(&self, question: &Question) -> String {
        let (what, locality) = match question {
            Question::Node { name, locality } => (format!("the node {name:?}"), locality),
            Question::Service {
                relation,
                service,
                tag,
                locality,
            } => {
                let tag = tag
                    .as_ref()
                    .map_or_else(String::new, |tag| format!(" with the tag {tag:?}"));
                let what = match relation {
                    Relation::Own => format!("instances of the service {service:?}{tag}"),
                    Relation::Mesh => format!("mesh instances that represent {service:?}"),
                    Relation::Gateway => format!("gateways that {service:?} is bound to"),
                };
                (what, locality)
            }
            Question::Virtual { service, .. } => {
                return format!("the virtual address of {service:?}");
            }
            Question::Query { name, .. } => return format!("the prepared query {name:?}"),
            Question::Address(address) => return format!("the address {address} itself"),
            Question::Empty => return "nothing: an empty non-terminal".to_owned(),
            Question::Invalid => return "nothing: Consul does not have this name".to_owned(),
        };
        format!("{what} {}", self.place_in_words(locality))
    }

    /// Describes the datacenter or peer that is searched.
    fn place_in_words(&self, locality: &Locality) -> String {
        if let Some(peer) = &locality.peer {
            return format!("of the peer {peer:?}");
        }
        let datacenter = locality
            .datacenter
            .as_ref()
            .unwrap_or(&self.config.datacenter);
        let reach = match self.catalog.reach(datacenter) {
            Reach::Reachable => "",
            Reach::Unreachable => ", which is unreachable",
            Reach::Unknown => ", which Consul does not list",
        };
        format!("in the datacenter {datacenter:?}{reach}")
    }

    /// Lists the candidate instances, and the reason for each that is excluded.
    fn list_instances(&self, question: &Question, text: &mut String) {
        // Other names have no instances, and those of a prepared query depend on the client.
        let Question::Service {
            relation,
            service,
            tag,
            locality,
        } = question
        else {
            return;
        };
        let place = self.place_of(locality);
        let instances = self.catalog.related(*relation, &place, service);
        let worst = self.worst_status();
        for &id in instances.iter().take(MAX_LISTED) {
            let instance = self.catalog.instance(id);
            let node = self.catalog.node_of(id);
            // As registered: which tagged address an answer contains depends on its type.
            let address = if instance.address.is_empty() {
                &node.address
            } else {
                &instance.address
            };
            let status = self.catalog.status(id);
            let why = match (tag, status) {
                // Without the tag it is no candidate, whatever its health.
                (Some(tag), _) if !instance.has_tag(tag) => ": excluded, it does not have the tag",
                (_, status) if status > worst => ": left out",
                _ => "",
            };
            let status = match status {
                CheckStatus::Passing => "passing",
                CheckStatus::Warning => "warning",
                CheckStatus::Critical => "critical",
            };
            let id = &instance.id;
            let port = instance.port;
            let _ = writeln!(
                text,
                "    {id} on {}, {address} port {port}: {status}{why}",
                node.name
            );
        }
        if instances.len() > MAX_LISTED {
            let _ = writeln!(text, "    and {} more", instances.len() - MAX_LISTED);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::{catalog::Catalog, config::Config, definition::Definitions};

    fn zone(file: &str) -> Zone {
        let text = br#"{"consul": {"node_name": "here", "advertise_addr": "10.0.0.9"}}"#;
        let (config, _) = Config::of_document("test", text).whole().unwrap().unwrap();
        let definitions = Definitions::read([("file.json", file.as_bytes())], &config)
            .whole()
            .unwrap();
        let visibility = config.visibility.clone();
        let catalog = Catalog::build(definitions.registrations, &config, visibility);
        Zone { config, catalog }
    }

    fn explained(zone: &Zone, name: &str) -> String {
        let name = Name::from_text(name).unwrap();
        let explanation = zone.explain(&name).unwrap();
        assert_eq!(explanation.domain, "consul.");
        assert!(
            explanation
                .text
                .ends_with(&format!("  {}\n", explanation.rcode))
        );
        let mut lines = explanation.text.lines();
        let first = format!("{name} is one of Consul's names (domain consul.)");
        assert_eq!(lines.next(), Some(&*first));
        lines.collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn answers_are_explained() {
        let zone = zone(
            r#"{"nodes": [
                    {"node": "n1", "address": "10.0.0.1"},
                    {"node": "n2", "address": "10.0.0.2"},
                    {"node": "far", "address": "10.2.0.1", "datacenter": "dc2"},
                    {"node": "east", "address": "10.3.0.1", "peer": "east"}],
                "services": [
                    {"node": "n1", "name": "web", "port": 80, "tags": ["v1"]},
                    {"node": "n2", "name": "web", "id": "w2", "address": "10.9.0.2",
                     "check": {"id": "up", "status": "warning"}},
                    {"node": "n2", "name": "web", "id": "w3", "tags": ["v1"],
                     "check": {"id": "up", "status": "critical"}},
                    {"node": "east", "peer": "east", "name": "db", "port": 5432},
                    {"node": "n1", "kind": "connect-proxy", "name": "web-proxy", "port": 21000,
                     "proxy": {"destination_service_name": "web"}}],
                "queries": [{"id": "1", "name": "q", "service": "web"}],
                "datacenters": [{"name": "dc2", "reachable": false}]}"#,
        );
        for (name, expected) in EXPLAINED {
            assert_eq!(explained(&zone, name), *expected, "{name}");
        }
        assert_eq!(zone.explain(&Name::from_text("a.bosh.").unwrap()), None);
    }

    const EXPLAINED: &[(&str, &str)] = &[
        (
            "web.service.consul.",
            r#"  asks for: instances of the service "web" in the datacenter "dc1"
    web on n1, 10.0.0.1 port 80: passing
    w2 on n2, 10.9.0.2 port 0: warning
    w3 on n2, 10.0.0.2 port 0: critical: left out
  2 records for type ANY, TTL 0
  NOERROR"#,
        ),
        (
            "v1.web.service.consul.",
            r#"  asks for: instances of the service "web" with the tag "v1" in the datacenter "dc1"
    web on n1, 10.0.0.1 port 80: passing
    w2 on n2, 10.9.0.2 port 0: warning: excluded, it does not have the tag
    w3 on n2, 10.0.0.2 port 0: critical: left out
  1 records for type ANY, TTL 0
  NOERROR"#,
        ),
        (
            "_web._tcp.service.consul.",
            r#"  asks for: instances of the service "web" in the datacenter "dc1"
    web on n1, 10.0.0.1 port 80: passing
    w2 on n2, 10.9.0.2 port 0: warning
    w3 on n2, 10.0.0.2 port 0: critical: left out
  2 records for type ANY, TTL 0
  NOERROR"#,
        ),
        (
            "_web._tcp.consul.",
            r#"  asks for: instances of the service "web" in the datacenter "dc1"
    web on n1, 10.0.0.1 port 80: passing
    w2 on n2, 10.9.0.2 port 0: warning
    w3 on n2, 10.0.0.2 port 0: critical: left out
  2 records for type SRV, TTL 0
  NOERROR"#,
        ),
        (
            "web.connect.consul.",
            r#"  asks for: mesh instances that represent "web" in the datacenter "dc1"
    web-proxy on n1, 10.0.0.1 port 21000: passing
  1 records for type ANY, TTL 0
  NOERROR"#,
        ),
        (
            "web.ingress.consul.",
            r#"  asks for: gateways that "web" is bound to in the datacenter "dc1"
  NXDOMAIN"#,
        ),
        (
            "web.virtual.consul.",
            r#"  asks for: the virtual address of "web"
  0 records for type ANY, TTL 0
  NOERROR"#,
        ),
        (
            "db.service.east.peer.consul.",
            r#"  asks for: instances of the service "db" of the peer "east"
    db on east, 10.3.0.1 port 5432: passing
  1 records for type ANY, TTL 0
  NOERROR"#,
        ),
        (
            "n1.node.consul.",
            r#"  asks for: the node "n1" in the datacenter "dc1"
  1 records for type ANY, TTL 0
  NOERROR"#,
        ),
        (
            "far.node.dc2.consul.",
            r#"  asks for: the node "far" in the datacenter "dc2", which is unreachable
  SERVFAIL"#,
        ),
        (
            "far.node.dc3.consul.",
            r#"  asks for: the node "far" in the datacenter "dc3", which Consul does not list
  NXDOMAIN"#,
        ),
        (
            "none.service.consul.",
            r#"  asks for: instances of the service "none" in the datacenter "dc1"
  NXDOMAIN"#,
        ),
        (
            "q.query.consul.",
            r#"  asks for: the prepared query "q"
  2 records for type ANY, TTL 0
  NOERROR"#,
        ),
        (
            "0a000001.addr.consul.",
            r#"  asks for: the address 10.0.0.1 itself
  1 records for type ANY, TTL 0
  NOERROR"#,
        ),
        (
            "service.consul.",
            r#"  asks for: nothing: an empty non-terminal
  NXDOMAIN"#,
        ),
        (
            "a.b.consul.",
            r#"  asks for: nothing: Consul does not have this name
  NXDOMAIN"#,
        ),
        (
            "consul.",
            r#"  asks for: nothing: an empty non-terminal
  NXDOMAIN"#,
        ),
    ];

    #[test]
    fn fifty_instances_are_listed() {
        for count in [50, 51, 52] {
            let mut services = Vec::new();
            for number in 0..count {
                let address = Ipv4Addr::from_bits(0x0a01_0000 + number);
                services.push(format!(
                    r#"{{"name": "web", "id": "w{number}", "address": "{address}"}}"#
                ));
            }
            let zone = zone(&format!(r#"{{"services": [{}]}}"#, services.join(",")));
            let text = explained(&zone, "web.service.consul.");
            assert_eq!(text.matches(": passing").count(), 50);
            let more = format!("    and {} more\n", count - 50);
            assert_eq!(text.contains(&more), count > 50, "{text}");
            assert!(text.contains(&format!("  {count} records for type ANY, TTL 0")));
        }
    }
}
