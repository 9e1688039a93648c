//! Registrations as delivered by sources: nodes, instances, queries, gateways.
//!
//! Plain data in Consul's own terms, produced from definition files, the HTTP API and the test
//! cases; [`super::Catalog`] indexes it.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::Arc,
};

/// All registrations, in no particular order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Registrations {
    /// Known nodes of all datacenters and peers.
    pub nodes: Vec<Arc<Node>>,
    /// Instances of services, each on one of `nodes`.
    pub instances: Vec<Arc<Instance>>,
    /// Prepared queries of all datacenters.
    pub queries: Vec<PreparedQuery>,
    /// Virtual addresses of services.
    pub virtual_addresses: Vec<VirtualAddress>,
    /// Ingress gateways and the services bound to them.
    pub gateways: Vec<Gateway>,
    /// All known datacenters; the local one is always included.
    pub datacenters: Vec<Datacenter>,
    /// Nodes nearest first, by the node they are measured from; used by `near`.
    pub distances: HashMap<String, Vec<String>>,
}

impl Registrations {
    pub(crate) fn append(&mut self, other: Self) {
        let Self {
            // Taken apart completely, so that a new kind of registration cannot be forgotten here.
            nodes,
            instances,
            queries,
            virtual_addresses,
            gateways,
            datacenters,
            distances,
        } = other;
        self.nodes.extend(nodes);
        self.instances.extend(instances);
        self.queries.extend(queries);
        self.virtual_addresses.extend(virtual_addresses);
        self.gateways.extend(gateways);
        self.datacenters.extend(datacenters);
        self.distances.extend(distances);
    }
}

/// A node of the catalog: the machine of an agent, or an external node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Name of the node; may contain dots.
    pub name: String,
    /// Id, a UUID in text form; empty if there is none.
    pub id: String,
    /// Datacenter of the node, in lower case.
    pub datacenter: String,
    /// Peer that the node was imported from.
    pub peer: Option<String>,
    /// IP address or host name.
    pub address: String,
    /// Further addresses: `lan`, `lan_ipv4`, `lan_ipv6`, `wan`, `wan_ipv4`, `wan_ipv6`.
    pub tagged_addresses: BTreeMap<String, String>,
    /// Metadata, published as TXT records.
    pub meta: BTreeMap<String, String>,
    /// Checks that apply to the whole node.
    pub checks: Vec<Check>,
}

/// An instance of a service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Instance {
    /// Name of its node.
    pub node: String,
    /// Peer that the instance was imported from; equals its node's.
    pub peer: Option<String>,
    /// Id, unique on the node.
    pub id: String,
    /// Name of the service.
    pub service: String,
    /// IP address or host name; if empty, the node's address applies.
    pub address: String,
    /// Port; 0 if the instance has only named ports.
    pub port: u16,
    /// Port as registered, if it is none: the instance has addresses, but no SRV record.
    pub impossible_port: Option<i64>,
    /// Named ports besides the service's main port.
    pub ports: Vec<NamedPort>,
    /// Tags as registered, in their case.
    pub tags: Vec<String>,
    /// Metadata that prepared queries filter by.
    pub meta: BTreeMap<String, String>,
    /// Weights for SRV records, by status.
    pub weights: Weights,
    /// Further addresses, tagged like addresses of nodes.
    pub tagged_addresses: BTreeMap<String, TaggedAddress>,
    /// Service that this Connect proxy represents.
    pub proxy_for: Option<String>,
    /// Whether the service itself speaks the mesh protocol.
    pub connect_native: bool,
    /// Checks of this instance.
    pub checks: Vec<Check>,
}

impl Instance {
    /// Returns whether the instance has a tag, in any letter case.
    pub(crate) fn has_tag(&self, tag: &str) -> bool {
        self.tags
            .iter()
            .any(|known| known.eq_ignore_ascii_case(tag))
    }
}

/// A port besides the service's main port, with its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedPort {
    /// Name of the port, as registered.
    pub name: String,
    /// Port number, TCP or UDP.
    pub port: u16,
    /// Whether this port applies if a query names none.
    pub default: bool,
}

/// A service address for one kind of client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaggedAddress {
    /// IP address or host name.
    pub address: String,
    /// Port; if 0, the service's port applies.
    pub port: u16,
}

/// Weights for SRV records, by the status of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weights {
    /// All checks are passing.
    pub passing: u16,
    /// The worst check is a warning.
    pub warning: u16,
}

impl Default for Weights {
    fn default() -> Self {
        Self {
            passing: 1,
            warning: 1,
        }
    }
}

/// Latest result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// Id, which prepared queries can list to ignore the check.
    pub id: String,
    /// Status that the check reported last.
    pub status: CheckStatus,
}

/// Status of a check or an instance, ordered from healthy to critical.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CheckStatus {
    /// Healthy; also if there are no checks.
    #[default]
    Passing,
    /// Usable, unless `only_passing` is set.
    Warning,
    /// Unusable. Maintenance mode is a critical check.
    Critical,
}

impl CheckStatus {
    /// Parses Consul's status words; `maintenance` is Consul's word for a check of maintenance mode.
    pub fn from_text(text: &str) -> Option<Self> {
        match text {
            "passing" => Some(Self::Passing),
            "warning" => Some(Self::Warning),
            // Maintenance takes out an instance, or all of a node, like a critical check
            // (tests/cases).
            "critical" | "maintenance" => Some(Self::Critical),
            _ => None,
        }
    }
}

/// A prepared query, as `/v1/query` stores it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PreparedQuery {
    /// Id, a UUID in text form.
    pub id: String,
    /// Name; for a template, the prefix of the names that it matches.
    pub name: String,
    /// Datacenter that stores it; `None` for the local datacenter.
    pub datacenter: Option<String>,
    /// Service that the query looks for.
    pub service: String,
    /// Tags that an instance must have or, with a leading `!`, must not have.
    pub tags: Vec<String>,
    /// Whether instances with warnings are skipped. `dns_config.only_passing` has no effect here.
    pub only_passing: bool,
    /// Ids of ignored checks.
    pub ignore_check_ids: Vec<String>,
    /// Metadata that a node must have.
    pub node_meta: BTreeMap<String, String>,
    /// Metadata that an instance must have.
    pub service_meta: BTreeMap<String, String>,
    /// Whether the query looks for mesh instances.
    pub connect: bool,
    /// Node whose nearest instances come first: a name, `_agent` or `_ip`; empty if unsorted.
    pub near: String,
    /// TTL of answers in seconds; if `None`, the service's TTL applies.
    pub ttl: Option<u32>,
    /// Further places, tried in order if the datacenter has no instance.
    pub failover: Failover,
    /// Template rules if the query matches a range of names.
    pub template: Option<Template>,
}

/// Further places tried by a prepared query, in order, each once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Failover {
    /// Number of nearest datacenters, by network coordinates, tried before `targets`.
    pub nearest: usize,
    /// Datacenters and peers, in order.
    pub targets: Vec<FailoverTarget>,
}

/// A place tried by a prepared query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FailoverTarget {
    /// A datacenter, by name.
    Datacenter(String),
    /// A peer, by name.
    Peer(String),
}

/// Rules of a template, a prepared query that matches every name with its prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Template {
    /// Regular expression for `${match(n)}`; empty if there is none.
    pub regexp: String,
    /// Whether tags that are empty after substitution are removed.
    pub remove_empty_tags: bool,
}

/// Virtual address of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualAddress {
    /// Service with the virtual address.
    pub service: String,
    /// Peer that the service was imported from.
    pub peer: Option<String>,
    /// Virtual address of the service.
    pub address: IpAddr,
}

/// An ingress gateway and the services bound to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gateway {
    /// Name of the gateway's own service.
    pub gateway: String,
    /// Services bound to the gateway; `*` for all.
    pub services: Vec<String>,
}

/// A datacenter of the federation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Datacenter {
    /// Name of the datacenter, in lower case.
    pub name: String,
    /// Whether an agent there answers queries.
    pub reachable: bool,
}
