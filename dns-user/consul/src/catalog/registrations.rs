//! Registrations as sources deliver them: nodes, instances, queries, gateways.
//!
//! Plain data in Consul's own terms. A definition file, the HTTP API and the
//! test cases all end up here; [`super::Catalog`] makes the indexes.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::Arc,
};

/// Everything that is registered, in no order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Registrations {
    /// Nodes of all datacenters and peers that are known.
    pub nodes: Vec<Arc<Node>>,
    /// Instances of services, each on one of `nodes`.
    pub instances: Vec<Arc<Instance>>,
    /// Prepared queries of the datacenter.
    pub queries: Vec<PreparedQuery>,
    /// Virtual addresses of services.
    pub virtual_addresses: Vec<VirtualAddress>,
    /// Ingress gateways and the services bound to them.
    pub gateways: Vec<Gateway>,
    /// All known datacenters; the local one is always included.
    pub datacenters: Vec<Datacenter>,
    /// Names of nodes by the name of a node, nearest first, for `near`.
    pub distances: HashMap<String, Vec<String>>,
}

/// A node of the catalog: an agent's machine, or an external one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Its name, which may hold dots.
    pub name: String,
    /// Its id, a UUID in text form; empty: none.
    pub id: String,
    /// Datacenter of the node, in lower case.
    pub datacenter: String,
    /// The peer that it was imported from.
    pub peer: Option<String>,
    /// An IP address or a host name.
    pub address: String,
    /// Further addresses: `lan`, `lan_ipv4`, `lan_ipv6`, `wan`, `wan_ipv4`, `wan_ipv6`.
    pub tagged_addresses: BTreeMap<String, String>,
    /// Metadata, given as TXT.
    pub meta: BTreeMap<String, String>,
    /// Checks of the whole node.
    pub checks: Vec<Check>,
}

/// An instance of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// Name of its node.
    pub node: String,
    /// Peer that the instance was imported from; equals its node's.
    pub peer: Option<String>,
    /// Its id on the node.
    pub id: String,
    /// Name of the service.
    pub service: String,
    /// An IP address or a host name; if empty, the node's address applies.
    pub address: String,
    /// Its port; 0 where it has named ones only.
    pub port: u16,
    /// Additional ports that have names.
    pub ports: Vec<NamedPort>,
    /// Tags as registered, in their case.
    pub tags: Vec<String>,
    /// Metadata, which prepared queries filter by.
    pub meta: BTreeMap<String, String>,
    /// Weights for SRV records, by status.
    pub weights: Weights,
    /// Further addresses, by the tags that nodes have, too.
    pub tagged_addresses: BTreeMap<String, TaggedAddress>,
    /// The service that this connect proxy stands for.
    pub proxy_for: Option<String>,
    /// Whether the service itself speaks the mesh's protocol.
    pub connect_native: bool,
    /// Checks of this instance.
    pub checks: Vec<Check>,
}

/// A port with a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedPort {
    /// Name of the port, as registered.
    pub name: String,
    /// Port number, TCP or UDP.
    pub port: u16,
    /// Whether it is meant where no name is given.
    pub default: bool,
}

/// An address of a service for some kind of client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaggedAddress {
    /// An IP address or a host name.
    pub address: String,
    /// Port; if 0, the service's port applies.
    pub port: u16,
}

/// Weights for SRV, by the state of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weights {
    /// All checks are passing.
    pub passing: u16,
    /// The worst check is a warning.
    pub warning: u16,
}

impl Default for Weights {
    fn default() -> Self {
        Self { passing: 1, warning: 1 }
    }
}

/// The last result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// Its id, which prepared queries can ignore.
    pub id: String,
    /// Last result of the check.
    pub status: Status,
}

/// State of a check, and of what it checks. Ordered from good to bad.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Status {
    /// All is well; also where there are no checks.
    #[default]
    Passing,
    /// Usable, unless `only_passing` is set.
    Warning,
    /// Not to be used. Maintenance mode is a critical check.
    Critical,
}

impl Status {
    /// Reads Consul's words; `maintenance` is what it calls a check of that mode.
    pub fn from_text(text: &str) -> Option<Self> {
        match text {
            "passing" => Some(Self::Passing),
            "warning" => Some(Self::Warning),
            "critical" | "maintenance" => Some(Self::Critical),
            _ => None,
        }
    }
}

/// A prepared query, as `/v1/query` stores it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PreparedQuery {
    /// Its id, a UUID in text form.
    pub id: String,
    /// Its name; of a template: the prefix of names that it matches.
    pub name: String,
    /// Datacenter that stores it; `None` for the local datacenter.
    pub datacenter: Option<String>,
    /// Service that the query looks for.
    pub service: String,
    /// Tags that an instance needs; with `!` in front: must not have.
    pub tags: Vec<String>,
    /// Whether warnings are left out. `dns_config.only_passing` does not count here.
    pub only_passing: bool,
    /// Ids of checks that do not count.
    pub ignore_check_ids: Vec<String>,
    /// Metadata that a node needs.
    pub node_meta: BTreeMap<String, String>,
    /// Metadata that an instance needs.
    pub service_meta: BTreeMap<String, String>,
    /// Whether instances of the mesh are sought.
    pub connect: bool,
    /// Node to sort by nearness to: a name, `_agent` or `_ip`; empty: none.
    pub near: String,
    /// TTL of answers in seconds; if `None`, the service's TTL applies.
    pub ttl: Option<u32>,
    /// Places to look in if the datacenter has no instance.
    pub failover: Failover,
    /// Whether, and how, it matches many names.
    pub template: Option<Template>,
}

/// Places in which a prepared query looks in turn, each once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Failover {
    /// Number of nearest datacenters, by network coordinates, before the others.
    pub nearest: usize,
    /// Datacenters and peers.
    pub targets: Vec<FailoverTarget>,
}

/// A place in which a prepared query looks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FailoverTarget {
    /// A datacenter by its name.
    Datacenter(String),
    /// A peer by its name.
    Peer(String),
}

/// Rules of a template: a prepared query that matches every name with its prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Template {
    /// Regular expression for `${match(n)}`; empty: none.
    pub regexp: String,
    /// Whether tags that come out empty are left out.
    pub remove_empty_tags: bool,
}

/// The virtual address of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualAddress {
    /// Service with the virtual address.
    pub service: String,
    /// The peer that it was imported from.
    pub peer: Option<String>,
    /// Virtual address of the service.
    pub address: IpAddr,
}

/// An ingress gateway and the services bound to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gateway {
    /// Name of the gateway's own service.
    pub gateway: String,
    /// Services bound to it; `*`: all.
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
