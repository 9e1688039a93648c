//! Explains the answer to a name.

use std::fmt::Write as _;

use dns_core::{name::Name, wire::TYPE_ANY};

use super::{Lack, Missing, Search, Zone};
use crate::{
    catalog::{InstanceId, Place, Reach, registrations::CheckStatus},
    question::{Locality, Question},
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
        let question = Question::read(name, domain, TYPE_ANY);
        let _ = writeln!(text, "  asks for: {}", self.in_words(&question));
        if let Some(lack) = self.lacks_for(name, TYPE_ANY) {
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
        let search = Search::whole(name, TYPE_ANY, domain);
        let rcode = match self.find_or_empty(&search, &mut fastrand::Rng::new()) {
            Ok(found) => {
                let ttl = found.answers.ttl().unwrap_or(0);
                let _ = writeln!(
                    text,
                    "  {} records for type ANY, TTL {ttl}",
                    found.answers.len()
                );
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
                service,
                tag,
                locality,
            } => {
                let tag = tag
                    .as_ref()
                    .map_or_else(String::new, |tag| format!(" with the tag {tag:?}"));
                (
                    format!("instances of the service {service:?}{tag}"),
                    locality,
                )
            }
            Question::Connect { service, locality } => (
                format!("mesh instances that represent {service:?}"),
                locality,
            ),
            Question::Ingress { service, locality } => {
                (format!("gateways that {service:?} is bound to"), locality)
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
            Reach::Unknown => ", which nobody knows",
        };
        format!("in the datacenter {datacenter:?}{reach}")
    }

    /// Lists the candidate instances, and the reason for each that is excluded.
    fn list_instances(&self, question: &Question, text: &mut String) {
        let (instances, tag): (Vec<InstanceId>, _) = match question {
            Question::Service {
                service,
                tag,
                locality,
            } => (
                self.catalog.service(&self.place_of(locality), service),
                tag.as_deref(),
            ),
            Question::Connect { service, locality } => (
                self.catalog.connect(&self.place_of(locality), service),
                None,
            ),
            Question::Ingress { service, locality } => (
                self.catalog.ingress(&self.place_of(locality), service),
                None,
            ),
            _ => return,
        };
        let worst = self.worst_status();
        for &id in instances.iter().take(MAX_LISTED) {
            let instance = self.catalog.instance(id);
            let node = self.catalog.node_of(id);
            let address = if instance.address.is_empty() {
                &node.address
            } else {
                &instance.address
            };
            let status = self.catalog.status(id);
            let why = match (tag, status) {
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
