//! Consul's JSON as registrations. Members that are missing or null are empty, unknown
//! ones are passed over.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use serde::{Deserialize, Deserializer};

use dns_consul::catalog::registrations::{
    Check, Gateway, Instance, NamedPort, Node, PreparedQuery, Status, TaggedAddress, Template, Weights,
};

/// The name of the tagged address that is a service's virtual one.
const VIRTUAL: &str = "consul-virtual";

/// What the agent says of itself.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Myself {
    /// Its datacenter, in lower case.
    pub(crate) datacenter: String,
    /// Its node.
    pub(crate) node_name: String,
}

/// `/v1/agent/self`.
pub(crate) fn agent(body: &[u8]) -> serde_json::Result<Myself> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Whole {
        config: Config,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Config {
        datacenter: String,
        #[serde(default, deserialize_with = "or_default")]
        node_name: String,
    }
    let Whole { config: Config { datacenter, node_name } } = serde_json::from_slice(body)?;
    Ok(Myself { datacenter: datacenter.to_ascii_lowercase(), node_name })
}

/// `/v1/catalog/datacenters`.
pub(crate) fn datacenters(body: &[u8]) -> serde_json::Result<Vec<String>> {
    serde_json::from_slice(body)
}

/// `/v1/catalog/services`: names and tags.
pub(crate) fn services(body: &[u8]) -> serde_json::Result<BTreeMap<String, Vec<String>>> {
    let services: BTreeMap<String, Option<Vec<String>>> = serde_json::from_slice(body)?;
    Ok(services.into_iter().map(|(name, tags)| (name, tags.unwrap_or_default())).collect())
}

/// `/v1/catalog/nodes`.
pub(crate) fn nodes(body: &[u8]) -> serde_json::Result<Vec<Arc<Node>>> {
    let nodes: Vec<ApiNode> = serde_json::from_slice(body)?;
    Ok(nodes.into_iter().map(|node| Arc::new(node.into())).collect())
}

/// Instances of a service, and its virtual address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Instances {
    /// The instances. Checks of their nodes are among their own.
    pub(crate) instances: Vec<Arc<Instance>>,
    /// The virtual address.
    pub(crate) virtual_address: Option<IpAddr>,
}

/// `/v1/health/service/:service`.
pub(crate) fn health(body: &[u8]) -> serde_json::Result<Instances> {
    let entries: Vec<ApiEntry> = serde_json::from_slice(body)?;
    let virtual_address =
        entries.iter().find_map(|entry| entry.service.tagged_addresses.get(VIRTUAL)?.address.parse().ok());
    let instances = entries.into_iter().map(|entry| Arc::new(entry.into())).collect();
    Ok(Instances { instances, virtual_address })
}

/// `/v1/config/ingress-gateway`.
pub(crate) fn ingress(body: &[u8]) -> serde_json::Result<Vec<Gateway>> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Entry {
        name: String,
        #[serde(default, deserialize_with = "or_default")]
        listeners: Vec<Listener>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Listener {
        #[serde(default, deserialize_with = "or_default")]
        services: Vec<Bound>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Bound {
        name: String,
    }
    let entries: Vec<Entry> = serde_json::from_slice(body)?;
    let gateway = |Entry { name, listeners }| {
        let mut services: Vec<String> =
            listeners.into_iter().flat_map(|listener| listener.services).map(|bound| bound.name).collect();
        services.sort();
        services.dedup();
        Gateway { gateway: name, services }
    };
    Ok(entries.into_iter().map(gateway).collect())
}

/// `/v1/query`. Such that cannot be read as a whole are left out, with the reason.
pub(crate) fn queries(body: &[u8]) -> serde_json::Result<Vec<PreparedQuery>> {
    let queries: Vec<ApiQuery> = serde_json::from_slice(body)?;
    Ok(queries.into_iter().map(Into::into).collect())
}

/// A value that may be null, which Go writes for what is empty.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// A node.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ApiNode {
    #[serde(rename = "ID", default, deserialize_with = "or_default")]
    id: String,
    node: String,
    #[serde(default, deserialize_with = "or_default")]
    address: String,
    #[serde(default, deserialize_with = "or_default")]
    datacenter: String,
    #[serde(default, deserialize_with = "or_default")]
    tagged_addresses: BTreeMap<String, String>,
    #[serde(default, deserialize_with = "or_default")]
    meta: BTreeMap<String, String>,
}

impl From<ApiNode> for Node {
    fn from(node: ApiNode) -> Self {
        let ApiNode { id, node, address, datacenter, tagged_addresses, meta } = node;
        Self { name: node, id, datacenter, address, tagged_addresses, meta, ..Self::default() }
    }
}

/// An instance with its node and all checks.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ApiEntry {
    node: ApiNode,
    service: ApiService,
    #[serde(default, deserialize_with = "or_default")]
    checks: Vec<ApiCheck>,
}

/// An instance.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ApiService {
    #[serde(rename = "ID", default, deserialize_with = "or_default")]
    id: String,
    service: String,
    #[serde(default, deserialize_with = "or_default")]
    tags: Vec<String>,
    #[serde(default, deserialize_with = "or_default")]
    address: String,
    #[serde(default, deserialize_with = "or_default")]
    tagged_addresses: BTreeMap<String, ApiAddress>,
    #[serde(default, deserialize_with = "or_default")]
    meta: BTreeMap<String, String>,
    #[serde(default, deserialize_with = "or_default")]
    port: u16,
    #[serde(default, deserialize_with = "or_default")]
    ports: Vec<ApiPort>,
    #[serde(default, deserialize_with = "or_default")]
    weights: ApiWeights,
    #[serde(default, deserialize_with = "or_default")]
    proxy: ApiProxy,
    #[serde(default, deserialize_with = "or_default")]
    connect: ApiConnect,
    #[serde(default, deserialize_with = "or_default")]
    kind: String,
}

/// A tagged address.
#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ApiAddress {
    #[serde(default, deserialize_with = "or_default")]
    address: String,
    #[serde(default, deserialize_with = "or_default")]
    port: u16,
}

/// A port with a name.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ApiPort {
    name: String,
    port: u16,
    #[serde(default, deserialize_with = "or_default")]
    default: bool,
}

/// Weights; 0 is what Consul has for "not said".
#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ApiWeights {
    #[serde(default, deserialize_with = "or_default")]
    passing: i64,
    #[serde(default, deserialize_with = "or_default")]
    warning: i64,
}

/// What a connect proxy stands for.
#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ApiProxy {
    #[serde(default, deserialize_with = "or_default")]
    destination_service_name: String,
}

/// Whether a service speaks the mesh's protocol.
#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ApiConnect {
    #[serde(default, deserialize_with = "or_default")]
    native: bool,
}

/// A check.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ApiCheck {
    #[serde(rename = "CheckID", default, deserialize_with = "or_default")]
    id: String,
    #[serde(default, deserialize_with = "or_default")]
    status: String,
}

impl From<ApiEntry> for Instance {
    fn from(entry: ApiEntry) -> Self {
        let ApiEntry { node, service, checks } = entry;
        let weight = |weight: i64| weight.clamp(0, u16::MAX.into()) as u16;
        let weights = match service.weights {
            ApiWeights { passing: 0, warning: 0 } => Weights::default(),
            ApiWeights { passing, warning } => Weights { passing: weight(passing), warning: weight(warning) },
        };
        let check = |ApiCheck { id, status }| {
            // A state that nobody knows is none to send clients to.
            Check { id, status: Status::from_text(&status).unwrap_or(Status::Critical) }
        };
        let proxy_for = Some(service.proxy.destination_service_name)
            .filter(|name| service.kind == "connect-proxy" && !name.is_empty());
        let tagged = service.tagged_addresses.into_iter();
        let ports = service.ports.into_iter();
        Self {
            node: node.node,
            peer: None,
            id: service.id,
            service: service.service,
            address: service.address,
            port: service.port,
            ports: ports.map(|ApiPort { name, port, default }| NamedPort { name, port, default }).collect(),
            tags: service.tags,
            meta: service.meta,
            weights,
            tagged_addresses: tagged
                .map(|(tag, ApiAddress { address, port })| (tag, TaggedAddress { address, port }))
                .collect(),
            proxy_for,
            connect_native: service.connect.native,
            checks: checks.into_iter().map(check).collect(),
        }
    }
}

/// A prepared query.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ApiQuery {
    #[serde(rename = "ID")]
    id: String,
    #[serde(default, deserialize_with = "or_default")]
    name: String,
    service: ApiQueryService,
    #[serde(default, deserialize_with = "or_default")]
    template: ApiTemplate,
    #[serde(rename = "DNS", default, deserialize_with = "or_default")]
    dns: ApiQueryDns,
}

/// What a prepared query seeks.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ApiQueryService {
    service: String,
    #[serde(default, deserialize_with = "or_default")]
    failover: ApiFailover,
    #[serde(default, deserialize_with = "or_default")]
    only_passing: bool,
    #[serde(rename = "IgnoreCheckIDs", default, deserialize_with = "or_default")]
    ignore_check_ids: Vec<String>,
    #[serde(default, deserialize_with = "or_default")]
    near: String,
    #[serde(default, deserialize_with = "or_default")]
    tags: Vec<String>,
    #[serde(default, deserialize_with = "or_default")]
    node_meta: BTreeMap<String, String>,
    #[serde(default, deserialize_with = "or_default")]
    service_meta: BTreeMap<String, String>,
    #[serde(default, deserialize_with = "or_default")]
    connect: bool,
}

/// Where else it is looked.
#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ApiFailover {
    #[serde(default, deserialize_with = "or_default")]
    datacenters: Vec<String>,
}

/// Whether it is a template; without a type it is none.
#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ApiTemplate {
    #[serde(rename = "Type", default, deserialize_with = "or_default")]
    kind: String,
    #[serde(default, deserialize_with = "or_default")]
    regexp: String,
    #[serde(default, deserialize_with = "or_default")]
    remove_empty_tags: bool,
}

/// Its TTL, such as `10s`.
#[derive(Default, Deserialize)]
struct ApiQueryDns {
    #[serde(rename = "TTL", default, deserialize_with = "or_default")]
    ttl: String,
}

impl From<ApiQuery> for PreparedQuery {
    fn from(query: ApiQuery) -> Self {
        let ApiQuery { id, name, service, template, dns } = query;
        let ApiTemplate { kind, regexp, remove_empty_tags } = template;
        Self {
            id,
            name,
            datacenter: None,
            service: service.service,
            tags: service.tags,
            only_passing: service.only_passing,
            ignore_check_ids: service.ignore_check_ids,
            node_meta: service.node_meta,
            service_meta: service.service_meta,
            connect: service.connect,
            near: service.near,
            ttl: dns_consul::config::ttl_from_text(&dns.ttl),
            failover: service.failover.datacenters,
            template: (!kind.is_empty()).then_some(Template { regexp, remove_empty_tags }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_of_health_becomes_an_instance() {
        let body = br#"[{"Node": {"ID": "a-b", "Node": "n1", "Address": "10.0.0.1", "Datacenter": "dc1",
            "TaggedAddresses": null, "Meta": {"rack": "r1"}, "CreateIndex": 7},
          "Service": {"ID": "web-1", "Service": "web", "Tags": null, "Address": "", "Port": 80,
            "TaggedAddresses": {"consul-virtual": {"Address": "240.0.0.5", "Port": 80}},
            "Weights": {"Passing": 3, "Warning": 1}, "Proxy": {"Mode": ""}, "Connect": {}},
          "Checks": [{"CheckID": "serfHealth", "Status": "passing", "ServiceID": ""},
            {"CheckID": "up", "Status": "warning", "ServiceID": "web-1"}]}]"#;
        let Instances { instances, virtual_address } = health(body).expect("read");
        let [instance] = &instances[..] else { panic!("one instance") };
        assert_eq!((instance.id.as_str(), instance.node.as_str(), instance.port), ("web-1", "n1", 80));
        assert_eq!(instance.weights, Weights { passing: 3, warning: 1 });
        assert_eq!(instance.checks[1].status, Status::Warning);
        assert_eq!(virtual_address, Some(IpAddr::from([240, 0, 0, 5])));
    }

    #[test]
    fn a_prepared_query_is_read() {
        let body = br#"[{"ID": "x", "Name": "geo-", "Session": "", "Token": "",
            "Template": {"Type": "name_prefix_match", "Regexp": "^geo-(.*)$"},
            "Service": {"Service": "${match(1)}", "Failover": {"NearestN": 0, "Datacenters": ["dc2"]},
              "OnlyPassing": true, "Tags": ["!old"]}, "DNS": {"TTL": "10s"}}]"#;
        let query = &queries(body).expect("read")[0];
        assert_eq!((query.ttl, query.only_passing), (Some(10), true));
        assert_eq!(query.failover, ["dc2"]);
        assert!(query.template.is_some());
        assert!(queries(b"{").is_err());
        assert_eq!(services(br#"{"a": ["x"], "b": null}"#).expect("read")["b"], Vec::<String>::new());
        assert_eq!(
            ingress(br#"[{"Name": "gw", "Listeners": [{"Services": [{"Name": "web"}]}]}]"#).expect("read")[0]
                .services,
            ["web"]
        );
        assert_eq!(
            agent(br#"{"Config": {"Datacenter": "DC1", "NodeName": "n"}}"#).expect("read").datacenter,
            "dc1"
        );
    }
}
