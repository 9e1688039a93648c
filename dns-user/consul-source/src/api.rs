//! Parses Consul's JSON to registrations. Missing and null members are empty, unknown members are ignored.
//! Lists are parsed entry by entry: an invalid entry is dropped and counted, the others are used.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use serde::{Deserialize, Deserializer, de::DeserializeOwned};
use serde_json::Value;
use tokio::{sync::Mutex, time::Instant};

use dns_consul::catalog::{
    live::{Coordinate, ServiceInstances},
    registrations::{
        Check, CheckStatus, Failover, FailoverTarget, Gateway, Instance, NamedPort, Node,
        PreparedQuery, TaggedAddress, Template, Weights,
    },
};
use dns_kit::files::{Reading, bounded};

/// Tag of a service's virtual address.
const VIRTUAL: &str = "consul-virtual";

/// Declares objects of Consul's JSON. Members in parentheses are mandatory; the others may be missing or
/// null.
macro_rules! lenient {
    ($(
        $(#[$of_object:meta])*
        struct $name:ident $(($($(#[$of_required:meta])* $required:ident: $required_type:ty),*))? {
            $($(#[$of_member:meta])* $member:ident: $member_type:ty,)*
        }
    )*) => {$(
        $(#[$of_object])*
        #[derive(Default, Deserialize)]
        #[serde(rename_all = "PascalCase")]
        struct $name {
            $($($(#[$of_required])* $required: $required_type,)*)?
            $(
                #[serde(default, deserialize_with = "or_default")]
                $(#[$of_member])*
                $member: $member_type,
            )*
        }
    )*};
}

/// Parses a value that may be null, as Go encodes nil slices and maps.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    from: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// Invalid entries of a response, by cause: their number, and the first one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Invalid(pub(crate) BTreeMap<String, (usize, String)>);

impl Invalid {
    /// Records that `entry` is invalid. `cause` includes the consequence.
    fn note(&mut self, entry: impl FnOnce() -> String, cause: String) {
        self.0.entry(cause).or_insert_with(|| (0, entry())).0 += 1;
    }

    pub(crate) fn count(&self) -> usize {
        self.0.values().map(|(count, _)| count).sum()
    }

    pub(crate) fn lines(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(|(cause, (count, first))| match count {
            1 => format!("{first}: {cause}"),
            _ => format!("{first} and {} more: {cause}", count - 1),
        })
    }
}

/// Returns the name of an entry, for the log.
fn name_of(entry: &Value) -> String {
    let service = text_at(entry, "/Service/ID").or(text_at(entry, "/Service/Service"));
    let node = text_at(entry, "/Node/Node");
    if let (Some(service), Some(node)) = (service, node) {
        return format!("{service} on {node}");
    }
    let mut known = service.or(node);
    for path in ["/Name", "/Node", "/ID", "/Datacenter"] {
        known = known.or(text_at(entry, path));
    }
    known.unwrap_or("an entry without a name").to_owned()
}

fn text_at<'a>(entry: &'a Value, path: &str) -> Option<&'a str> {
    let text = entry.pointer(path)?.as_str()?;
    if text.is_empty() { None } else { Some(text) }
}

/// Parses a list. Only a list with an invalid entry is parsed again, entry by entry.
fn list<T: DeserializeOwned>(body: &[u8], invalid: &mut Invalid) -> serde_json::Result<Vec<T>> {
    // The usual case, without the detour of generic values: lists have thousands of entries.
    if let Ok(entries) = serde_json::from_slice(body) {
        return Ok(entries);
    }
    let entries: Vec<Value> = serde_json::from_slice(body)?;
    let mut valid = Vec::new();
    for entry in entries {
        match T::deserialize(&entry) {
            Ok(parsed) => valid.push(parsed),
            Err(error) => {
                let cause = format!("{error}; the entry is not used");
                invalid.note(|| name_of(&entry), cause);
            }
        }
    }
    Ok(valid)
}

/// Data of the agent itself.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct AgentInfo {
    /// Datacenter in lower case.
    pub(crate) datacenter: String,
    pub(crate) node_name: String,
}

pub(crate) fn agent(body: &[u8]) -> serde_json::Result<AgentInfo> {
    lenient! {
        struct Whole(config: Config) {}

        struct Config(datacenter: String) {
            node_name: String,
        }
    }
    let Whole {
        config: Config {
            datacenter,
            node_name,
        },
    } = serde_json::from_slice(body)?;
    Ok(AgentInfo {
        // Names of datacenters are compared in lower case, as they are in queries.
        datacenter: datacenter.to_ascii_lowercase(),
        node_name,
    })
}

/// Parses `/v1/catalog/services`: names and tags.
pub(crate) fn services(
    body: &[u8],
    invalid: &mut Invalid,
) -> serde_json::Result<BTreeMap<String, Vec<String>>> {
    let mut all = BTreeMap::new();
    let services: BTreeMap<String, Value> = serde_json::from_slice(body)?;
    for (name, value) in services {
        let tags = match serde_json::from_value::<Option<Vec<String>>>(value) {
            // Go may write an empty list as null.
            Ok(tags) => tags.unwrap_or_default(),
            // The service exists; only changes of its tags go unnoticed.
            Err(error) => {
                let problem = format!("{error}; its tags are not used");
                invalid.note(|| name.clone(), problem);
                Vec::new()
            }
        };
        all.insert(name, tags);
    }
    Ok(all)
}

/// Parses `/v1/catalog/nodes` of a datacenter, whose name is in lower case.
pub(crate) fn nodes(
    body: &[u8],
    datacenter: &str,
    invalid: &mut Invalid,
) -> serde_json::Result<Vec<Arc<Node>>> {
    let mut nodes = Vec::new();
    for node in list::<ApiNode>(body, invalid)? {
        // JSON permits the empty text, but no name leads to such a node.
        if node.node.is_empty() {
            let cause = "it has no name; the entry is not used".to_owned();
            invalid.note(|| format!("the node at {:?}", node.address), cause);
            continue;
        }
        nodes.push(Arc::new(Node {
            // In the spelling that names are compared with.
            datacenter: datacenter.to_owned(),
            ..node.into()
        }));
    }
    Ok(nodes)
}

/// Parses `/v1/health/service/:service`; with `peer`, the instances imported from this peer.
pub(crate) fn health(
    body: &[u8],
    peer: Option<&str>,
    invalid: &mut Invalid,
) -> serde_json::Result<ServiceInstances> {
    let entries: Vec<ApiEntry> = list(body, invalid)?;
    let mut virtual_addresses: Vec<(String, IpAddr)> = Vec::new();
    let mut instances: Vec<Arc<Instance>> = Vec::with_capacity(entries.len());
    let mut nodes: Vec<Arc<Node>> = Vec::new();
    for mut entry in entries {
        let address = entry
            .service
            .tagged_addresses
            .get(VIRTUAL)
            .and_then(|tagged| tagged.address.parse().ok());
        if let Some(peer) = peer {
            // No endpoint lists the nodes of a peer.
            let name = entry.node.node.clone();
            let node = Node {
                peer: Some(peer.to_owned()),
                ..Node::from(std::mem::take(&mut entry.node))
            };
            // The instance still needs the name.
            entry.node.node = name;
            nodes.push(Arc::new(node));
        }
        let instance = Instance {
            peer: peer.map(str::to_owned),
            ..Instance::from(entry)
        };
        if let Some(port) = instance.impossible_port {
            invalid.note(
                || format!("{} on {}", instance.id, instance.node),
                format!("port {port} is not from 0 to 65535; the instance has no SRV record"),
            );
        }
        if let Some(address) = address {
            let service = instance.proxy_for.as_ref().unwrap_or(&instance.service);
            // All proxies of a service have the same virtual address.
            if virtual_addresses.iter().all(|(known, _)| known != service) {
                virtual_addresses.push((service.clone(), address));
            }
        }
        instances.push(Arc::new(instance));
    }
    Ok(ServiceInstances {
        instances,
        virtual_addresses,
        nodes,
    })
}

/// Parses `/v1/peerings`: peers and the services that each exports to us. Peerings being deleted are skipped.
pub(crate) fn peerings(
    body: &[u8],
    invalid: &mut Invalid,
) -> serde_json::Result<BTreeMap<String, Vec<String>>> {
    lenient! {
        struct Entry(name: String) {
            state: String,
            stream_status: Stream,
        }

        struct Stream {
            imported_services: Vec<String>,
        }
    }
    let mut peers = BTreeMap::new();
    for entry in list::<Entry>(body, invalid)? {
        if !matches!(&*entry.state, "DELETING" | "TERMINATED") {
            peers.insert(entry.name, entry.stream_status.imported_services);
        }
    }
    Ok(peers)
}

lenient! {
    struct ApiCoordinate(node: String, coord: ApiPosition) {}

    struct ApiPosition {
        adjustment: f64,
        height: f64,
        vec: Vec<f64>,
    }
}

impl From<ApiPosition> for Coordinate {
    fn from(
        ApiPosition {
            adjustment,
            height,
            vec,
        }: ApiPosition,
    ) -> Self {
        Self {
            position: vec,
            height,
            adjustment,
        }
    }
}

/// Parses `/v1/coordinate/nodes`: coordinates by lower-case node name.
pub(crate) fn node_coordinates(
    body: &[u8],
    invalid: &mut Invalid,
) -> serde_json::Result<HashMap<String, Coordinate>> {
    let mut coordinates = HashMap::new();
    for entry in list::<ApiCoordinate>(body, invalid)? {
        coordinates.insert(entry.node.to_ascii_lowercase(), entry.coord.into());
    }
    Ok(coordinates)
}

/// Parses `/v1/coordinate/datacenters`: coordinates of the servers in the WAN gossip pool.
pub(crate) fn server_coordinates(
    body: &[u8],
    invalid: &mut Invalid,
) -> serde_json::Result<BTreeMap<String, Vec<Coordinate>>> {
    lenient! {
        struct Entry(datacenter: String) {
            #[serde(rename = "AreaID")]
            area: String,
            coordinates: Vec<ApiCoordinate>,
        }
    }
    let mut coordinates = BTreeMap::new();
    for entry in list::<Entry>(body, invalid)? {
        // Coordinates of other areas are not comparable.
        if !matches!(&*entry.area, "" | "wan" | "WAN") {
            continue;
        }
        let mut servers = Vec::with_capacity(entry.coordinates.len());
        for server in entry.coordinates {
            servers.push(server.coord.into());
        }
        coordinates.insert(entry.datacenter.to_ascii_lowercase(), servers);
    }
    Ok(coordinates)
}

/// Parses `/v1/config/ingress-gateway`.
pub(crate) fn ingress(body: &[u8], invalid: &mut Invalid) -> serde_json::Result<Vec<Gateway>> {
    lenient! {
        struct Entry(name: String) {
            listeners: Vec<Listener>,
        }

        struct Listener {
            services: Vec<Bound>,
        }

        struct Bound(name: String) {}
    }
    let mut gateways = Vec::new();
    for Entry { name, listeners } in list(body, invalid)? {
        let mut services = Vec::new();
        for listener in listeners {
            for Bound { name } in listener.services {
                services.push(name);
            }
        }
        // Several listeners may serve the same service.
        services.sort();
        services.dedup();
        gateways.push(Gateway {
            gateway: name,
            services,
        });
    }
    Ok(gateways)
}

pub(crate) fn queries(
    body: &[u8],
    invalid: &mut Invalid,
) -> serde_json::Result<Vec<PreparedQuery>> {
    let queries: Vec<ApiQuery> = list(body, invalid)?;
    Ok(queries.into_iter().map(Into::into).collect())
}

lenient! {
    struct ApiNode(node: String) {
        #[serde(rename = "ID")]
        id: String,
        address: String,
        datacenter: String,
        tagged_addresses: BTreeMap<String, String>,
        meta: BTreeMap<String, String>,
    }
}

impl From<ApiNode> for Node {
    fn from(node: ApiNode) -> Self {
        let ApiNode {
            id,
            node,
            address,
            datacenter,
            tagged_addresses,
            meta,
        } = node;
        Self {
            name: node,
            id,
            datacenter,
            address,
            tagged_addresses,
            meta,
            ..Self::default()
        }
    }
}

lenient! {
    /// An instance with its node and all checks.
    struct ApiEntry(node: ApiNode, service: ApiService) {
        checks: Vec<ApiCheck>,
    }

    struct ApiService(service: String) {
        #[serde(rename = "ID")]
        id: String,
        tags: Vec<String>,
        address: String,
        tagged_addresses: BTreeMap<String, ApiAddress>,
        meta: BTreeMap<String, String>,
        port: i64,
        ports: Vec<ApiPort>,
        weights: ApiWeights,
        proxy: ApiProxy,
        connect: ApiConnect,
        kind: String,
    }

    struct ApiAddress {
        address: String,
        port: i64,
    }

    struct ApiPort(name: String, port: i64) {
        default: bool,
    }

    /// Weights; Consul uses 0 for unset.
    struct ApiWeights {
        passing: i64,
        warning: i64,
    }

    /// Destination of a Connect proxy.
    struct ApiProxy {
        destination_service_name: String,
    }

    /// Whether a service speaks the mesh protocol.
    struct ApiConnect {
        native: bool,
    }

    struct ApiCheck {
        #[serde(rename = "CheckID")]
        id: String,
        status: String,
    }
}

impl From<ApiWeights> for Weights {
    fn from(ApiWeights { passing, warning }: ApiWeights) -> Self {
        // Both unset, as in answers without the member.
        if passing == 0 && warning == 0 {
            return Self::default();
        }
        // SRV records have 16 bits for a weight (RFC 2782).
        Self {
            passing: passing.clamp(0, u16::MAX.into()) as u16,
            warning: warning.clamp(0, u16::MAX.into()) as u16,
        }
    }
}

impl From<ApiCheck> for Check {
    fn from(ApiCheck { id, status }: ApiCheck) -> Self {
        // An unknown status counts as critical, so clients are not sent to the instance.
        let status = CheckStatus::from_text(&status).unwrap_or(CheckStatus::Critical);
        Self { id, status }
    }
}

impl From<ApiEntry> for Instance {
    fn from(entry: ApiEntry) -> Self {
        let ApiEntry {
            node,
            service,
            checks,
        } = entry;
        let mut tagged_addresses = BTreeMap::new();
        for (tag, ApiAddress { address, port }) in service.tagged_addresses {
            // 0 makes the service's own port apply.
            let port = u16::try_from(port).unwrap_or(0);
            tagged_addresses.insert(tag, TaggedAddress { address, port });
        }
        let destination = service.proxy.destination_service_name;
        // Gateways have a `Proxy` as well, but represent no service.
        let is_proxy = service.kind == "connect-proxy" && !destination.is_empty();
        let proxy_for = if is_proxy { Some(destination) } else { None };
        let mut ports = Vec::new();
        for ApiPort {
            name,
            port,
            default,
        } in service.ports
        {
            // Named ports above 65535 are dropped.
            if let Ok(port) = u16::try_from(port) {
                ports.push(NamedPort {
                    name,
                    port,
                    default,
                });
            }
        }
        let port = u16::try_from(service.port);
        Self {
            node: node.node,
            peer: None,
            id: service.id,
            service: service.service,
            address: service.address,
            port: port.unwrap_or(0),
            impossible_port: port.is_err().then_some(service.port),
            ports,
            tags: service.tags,
            meta: service.meta,
            weights: service.weights.into(),
            tagged_addresses,
            proxy_for,
            connect_native: service.connect.native,
            checks: checks.into_iter().map(Check::from).collect(),
        }
    }
}

lenient! {
    struct ApiQuery(#[serde(rename = "ID")] id: String, service: ApiQueryService) {
        name: String,
        template: ApiTemplate,
        #[serde(rename = "DNS")]
        dns: ApiQueryDns,
    }

    /// The service of a prepared query, with filters.
    struct ApiQueryService(service: String) {
        failover: ApiFailover,
        only_passing: bool,
        #[serde(rename = "IgnoreCheckIDs")]
        ignore_check_ids: Vec<String>,
        near: String,
        tags: Vec<String>,
        node_meta: BTreeMap<String, String>,
        service_meta: BTreeMap<String, String>,
        connect: bool,
    }

    /// Further places, tried if the datacenter has no instance.
    struct ApiFailover {
        #[serde(rename = "NearestN")]
        nearest: usize,
        datacenters: Vec<String>,
        targets: Vec<ApiTarget>,
    }

    /// A failover target: a datacenter or a peer.
    struct ApiTarget {
        datacenter: String,
        /// The documentation calls it `PeerName`.
        #[serde(alias = "PeerName")]
        peer: String,
    }
}

impl From<ApiFailover> for Failover {
    /// Preserves the order in which Consul tries the places; targets exclude the other members.
    fn from(
        ApiFailover {
            nearest,
            datacenters,
            targets,
        }: ApiFailover,
    ) -> Self {
        let mut places = Vec::new();
        // By Consul's documentation, targets exclude the other members.
        if targets.is_empty() {
            for datacenter in datacenters {
                places.push(FailoverTarget::Datacenter(datacenter));
            }
            return Self {
                nearest,
                targets: places,
            };
        }
        for ApiTarget { datacenter, peer } in targets {
            // Members that are not set are empty texts here.
            if !peer.is_empty() {
                places.push(FailoverTarget::Peer(peer));
            } else if !datacenter.is_empty() {
                places.push(FailoverTarget::Datacenter(datacenter));
            }
        }
        Self {
            nearest: 0,
            targets: places,
        }
    }
}

lenient! {
    /// Template settings; without a type the query is no template.
    struct ApiTemplate {
        #[serde(rename = "Type")]
        kind: String,
        regexp: String,
        remove_empty_tags: bool,
    }

    /// TTL, such as `10s`.
    struct ApiQueryDns {
        #[serde(rename = "TTL")]
        ttl: String,
    }
}

impl From<ApiQuery> for PreparedQuery {
    fn from(query: ApiQuery) -> Self {
        let ApiQuery {
            id,
            name,
            service,
            template,
            dns,
        } = query;
        let ApiTemplate {
            kind,
            regexp,
            remove_empty_tags,
        } = template;
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
            // An empty text leaves the TTL to the service.
            ttl: dns_consul::config::ttl_from_text(&dns.ttl),
            failover: service.failover.into(),
            template: if kind.is_empty() {
                None
            } else {
                Some(Template {
                    regexp,
                    remove_empty_tags,
                })
            },
        }
    }
}

//----------- Token --------------------------------------------------------
//
// The ACL token, read from a file that may change at any time.

/// Time between two checks of the file.
pub(crate) const TOKEN_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum size of the file in bytes.
const MAX_TOKEN_FILE: u64 = 64 << 10;

#[derive(Debug)]
pub(crate) struct Token {
    /// The file; `None` to send requests without a token.
    path: Option<PathBuf>,
    /// Result of the last read.
    last: Mutex<TokenState>,
}

#[derive(Debug, Default)]
struct TokenState {
    /// The token; kept while the file is unreadable.
    token: Option<String>,
    /// Time of the last check of the file.
    at: Option<Instant>,
    /// Reason why the last read failed; logged once.
    problem: Option<String>,
    reading: Reading<io::Result<Vec<u8>>>,
}

impl Token {
    pub(crate) fn new(path: Option<PathBuf>) -> Self {
        Self {
            path,
            last: Mutex::default(),
        }
    }

    /// Returns the token, `None` if there is no file. The error says why no token was ever read.
    pub(crate) async fn now(&self) -> Result<Option<String>, String> {
        let Some(path) = self.path.as_deref() else {
            return Ok(None);
        };
        let mut last = self.last.lock().await;
        if last
            .at
            .is_none_or(|at| at.elapsed() >= TOKEN_CHECK_INTERVAL)
        {
            last.read(path).await;
            // Also after a failure, so that an unreadable file is not tried with every request.
            last.at = Some(Instant::now());
        }
        match (&last.token, &last.problem) {
            (None, Some(problem)) => Err(problem.clone()),
            (token, _) => Ok(token.clone()),
        }
    }
}

impl TokenState {
    async fn read(&mut self, path: &Path) {
        let file = path.to_owned();
        let read = self
            .reading
            .result(move || bounded::read_at_most(&file, MAX_TOKEN_FILE))
            .await
            .flatten();
        let problem = match read.as_deref().map(<[u8]>::trim_ascii) {
            // Other characters are invalid in a header.
            Ok(token) if !token.is_empty() && token.iter().all(u8::is_ascii_graphic) => {
                if self.problem.take().is_some() {
                    tracing::info!("consul.token_file: {}: readable again", path.display());
                }
                self.token = Some(String::from_utf8_lossy(token).into_owned());
                return;
            }
            Ok(_) => "holds no token: one line of printable ASCII is needed".to_owned(),
            Err(error) => format!("cannot be read: {error}"),
        };
        let problem = format!("consul.token_file: {}: {problem}", path.display());
        if self.problem.is_none() {
            let consequence = if self.token.is_some() {
                "the last token stays in use"
            } else {
                "Consul is not asked until it can be read"
            };
            tracing::warn!("{problem}; {consequence}");
        }
        self.problem = Some(problem);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_entries_become_instances() {
        let body =
            br#"[{"Node": {"ID": "a-b", "Node": "n1", "Address": "10.0.0.1", "Datacenter": "dc1",
            "TaggedAddresses": null, "Meta": {"rack": "r1"}, "CreateIndex": 7},
          "Service": {"ID": "web-1", "Service": "web", "Tags": null, "Address": "", "Port": 80,
            "TaggedAddresses": {"consul-virtual": {"Address": "240.0.0.5", "Port": 80}},
            "Weights": {"Passing": 3, "Warning": 1}, "Proxy": {"Mode": ""}, "Connect": {}},
          "Checks": [{"CheckID": "serfHealth", "Status": "passing", "ServiceID": ""},
            {"CheckID": "up", "Status": "warning", "ServiceID": "web-1"}]}]"#;
        let parsed = health(body, None, &mut Invalid::default()).expect("read");
        let ServiceInstances {
            instances,
            virtual_addresses,
            ..
        } = parsed;
        let [instance] = &instances[..] else {
            panic!("one instance")
        };
        assert_eq!(
            (instance.id.as_str(), instance.node.as_str(), instance.port),
            ("web-1", "n1", 80)
        );
        assert_eq!(
            instance.weights,
            Weights {
                passing: 3,
                warning: 1
            }
        );
        assert_eq!(instance.checks[1].status, CheckStatus::Warning);
        assert_eq!(
            virtual_addresses,
            [("web".to_owned(), IpAddr::from([240, 0, 0, 5]))]
        );
    }

    #[test]
    fn each_service_has_one_virtual_address() {
        let entry = |id: &str, service: &str, address: &str| {
            format!(
                r#"{{"Node": {{"Node": "n"}}, "Service": {{"ID": "{id}", "Service": "{service}",
                "TaggedAddresses": {{"consul-virtual": {{"Address": "{address}", "Port": 80}}}}}}}}"#
            )
        };
        let entries = [
            entry("1", "web", "240.0.0.1"),
            entry("2", "db", "240.0.0.2"),
            entry("3", "web", "240.0.0.3"),
        ];
        let body = format!("[{}]", entries.join(","));
        let read = health(body.as_bytes(), None, &mut Invalid::default()).unwrap();
        let expected = [("web", [240, 0, 0, 1]), ("db", [240, 0, 0, 2])]
            .map(|(service, address)| (service.to_owned(), IpAddr::from(address)));
        assert_eq!(read.virtual_addresses, expected);
    }

    #[test]
    fn nodes_keep_their_metadata() {
        let body = br#"[{"ID": "a-b", "Node": "n1", "Address": "10.0.0.1", "Datacenter": "dc1",
            "TaggedAddresses": {"wan": "192.0.2.1"}, "Meta": {"rack": "r1"}}]"#;
        let read = nodes(body, "dc1", &mut Invalid::default()).unwrap();
        assert_eq!(read.len(), 1);
        let Node {
            id,
            name,
            meta,
            tagged_addresses,
            ..
        } = &*read[0];
        assert_eq!((id.as_str(), name.as_str()), ("a-b", "n1"));
        assert_eq!(meta["rack"], "r1");
        assert_eq!(tagged_addresses["wan"], "192.0.2.1");
    }

    #[test]
    fn proxies_carry_the_virtual_address() {
        let body =
            br#"[{"Node": {"Node": "n1"}, "Service": {"ID": "p", "Service": "web-sidecar-proxy",
            "Kind": "connect-proxy", "Proxy": {"DestinationServiceName": "web"},
            "TaggedAddresses": {"consul-virtual": {"Address": "240.0.0.6", "Port": 20000}}}}]"#;
        let read = health(body, None, &mut Invalid::default()).expect("read");
        assert_eq!(
            read.virtual_addresses,
            [("web".to_owned(), IpAddr::from([240, 0, 0, 6]))]
        );
    }

    #[test]
    fn invalid_entries_are_dropped() {
        let entry = |port: &str| {
            format!(
                r#"{{"Node": {{"Node": "n"}}, "Service": {{"Service": "web", "Port": {port}}}}}"#
            )
        };
        let mut invalid = Invalid::default();
        let body = format!(
            "[{}, {}, {}, {}]",
            entry("80"),
            entry("\"x\""),
            entry("81"),
            entry("\"x\"")
        );
        let ports: Vec<u16> = health(body.as_bytes(), None, &mut invalid)
            .expect("read")
            .instances
            .iter()
            .map(|one| one.port)
            .collect();
        assert_eq!((ports, invalid.count()), (vec![80, 81], 2));
        let lines: Vec<String> = invalid.lines().collect();
        assert!(
            lines[0].starts_with("web on n and 1 more: invalid type: string"),
            "{lines:?}"
        );
        let mut invalid = Invalid::default();
        let body =
            br#"[{"Address": "10.0.0.1"}, {"Node": "", "Address": "10.0.0.2"}, {"Node": "n"}]"#;
        assert_eq!(
            (
                nodes(body, "dc1", &mut invalid).expect("read").len(),
                invalid.count()
            ),
            (1, 2)
        );
        let mut invalid = Invalid::default();
        let read = services(br#"{"a": 7, "b": ["t"]}"#, &mut invalid).expect("read");
        assert_eq!((read.len(), invalid.count()), (2, 1));
        assert!(nodes(b"{", "dc1", &mut invalid).is_err());
    }

    #[test]
    fn impossible_ports_keep_addresses() {
        for port in [-1, 70_000] {
            let mut invalid = Invalid::default();
            let body = format!(
                r#"[{{"Node": {{"Node": "n"}}, "Service": {{"ID": "w", "Service": "web", "Port": {port},
                "Ports": [{{"Name": "a", "Port": {port}}}, {{"Name": "b", "Port": 7}}]}}}}]"#
            );
            let read = health(body.as_bytes(), None, &mut invalid).expect("read");
            let instance = &read.instances[0];
            assert_eq!(
                (
                    instance.port,
                    instance.impossible_port,
                    instance.ports.len()
                ),
                (0, Some(port), 1)
            );
            let expected = format!(
                "w on n: port {port} is not from 0 to 65535; the instance has no SRV record"
            );
            assert_eq!(invalid.lines().collect::<Vec<_>>(), [expected]);
        }
    }

    #[test]
    fn prepared_queries_are_read() {
        let body = br#"[{"ID": "x", "Name": "geo-", "Session": "", "Token": "",
            "Template": {"Type": "name_prefix_match", "Regexp": "^geo-(.*)$"},
            "Service": {"Service": "${match(1)}", "Failover": {"NearestN": 2, "Datacenters": ["dc2"]},
              "OnlyPassing": true, "Tags": ["!old"]}, "DNS": {"TTL": "10s"}}]"#;
        let mut invalid = Invalid::default();
        let query = &queries(body, &mut invalid).expect("read")[0];
        assert_eq!((query.ttl, query.only_passing), (Some(10), true));
        let datacenter = |name: &str| FailoverTarget::Datacenter(name.to_owned());
        assert_eq!(
            query.failover,
            Failover {
                nearest: 2,
                targets: vec![datacenter("dc2")]
            }
        );
        assert!(query.template.is_some());
        assert!(queries(b"{", &mut invalid).is_err());
        let targets = br#"[{"ID": "x", "Service": {"Service": "web", "Failover": {"Targets": [
            {"Peer": "p"}, {"Datacenter": "dc3"}, {"PeerName": "q"}]}}}]"#;
        let peer = |name: &str| FailoverTarget::Peer(name.to_owned());
        let targets = queries(targets, &mut invalid).expect("read")[0]
            .failover
            .targets
            .clone();
        assert_eq!(targets, [peer("p"), datacenter("dc3"), peer("q")]);
        assert_eq!(
            services(br#"{"a": ["x"], "b": null}"#, &mut invalid).expect("read")["b"],
            Vec::<String>::new()
        );
        assert_eq!(
            ingress(
                br#"[{"Name": "gw", "Listeners": [{"Services": [{"Name": "web"}]}]}]"#,
                &mut invalid
            )
            .expect("read")[0]
                .services,
            ["web"]
        );
        assert_eq!(
            agent(br#"{"Config": {"Datacenter": "DC1", "NodeName": "n"}}"#)
                .expect("read")
                .datacenter,
            "dc1"
        );
    }

    #[test]
    fn peers_and_coordinates_are_read() {
        let mut invalid = Invalid::default();
        let body =
            br#"[{"Name": "east", "State": "ACTIVE", "StreamStatus": {"ImportedServices": ["web", "db"]}},
            {"Name": "new", "State": "PENDING", "StreamStatus": {"ImportedServices": null}},
            {"Name": "old", "State": "TERMINATED"}]"#;
        let peers = peerings(body, &mut invalid).expect("read");
        let peers: Vec<(&str, usize)> = peers
            .iter()
            .map(|(name, services)| (&**name, services.len()))
            .collect();
        assert_eq!(peers, [("east", 2), ("new", 0)]);
        let coordinate = r#"{"Node": "N1", "Coord": {"Adjustment": 0.1, "Error": 1.5, "Height": 0.2, "Vec": [1, 2]}}"#;
        let found =
            node_coordinates(format!("[{coordinate}]").as_bytes(), &mut invalid).expect("read");
        assert_eq!(
            found["n1"],
            Coordinate {
                position: vec![1.0, 2.0],
                height: 0.2,
                adjustment: 0.1
            }
        );
        let body = format!(
            r#"[{{"Datacenter": "DC1", "AreaID": "WAN", "Coordinates": [{coordinate}]}},
                {{"Datacenter": "dc1", "AreaID": "other", "Coordinates": []}}]"#
        );
        assert_eq!(
            server_coordinates(body.as_bytes(), &mut invalid).expect("read")["dc1"].len(),
            1
        );
        assert_eq!(invalid, Invalid::default());
    }

    #[test]
    fn imported_instances_carry_nodes() {
        let body = br#"[{"Node": {"Node": "n1", "Address": "10.0.0.1", "Datacenter": "dc9"},
            "Service": {"ID": "w", "Service": "web"}}]"#;
        let read = health(body, Some("east"), &mut Invalid::default()).expect("read");
        let node = &read.nodes[0];
        let instance = &read.instances[0];
        assert_eq!(
            (node.name.as_str(), node.peer.as_deref()),
            ("n1", Some("east"))
        );
        assert_eq!(
            (instance.node.as_str(), instance.peer.as_deref()),
            ("n1", Some("east"))
        );
    }

    fn text(text: &str) -> String {
        text.to_owned()
    }

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        let owned = |&(key, value): &(&str, &str)| (text(key), text(value));
        pairs.iter().map(owned).collect()
    }

    #[test]
    fn instance_members_are_read() {
        let body = br#"[{
            "Node": {"ID": "11-22", "Node": "n1", "Address": "10.0.0.1", "Datacenter": "DC1",
                "TaggedAddresses": {"wan": "192.0.2.1"}, "Meta": {"rack": "r1"}},
            "Service": {"ID": "web-1", "Service": "web", "Tags": ["v1", "V2"], "Address": "10.0.0.2",
                "TaggedAddresses": {"wan": {"Address": "192.0.2.2", "Port": 8080}, "lan": {"Address": "a", "Port": 70000}},
                "Meta": {"tier": "gold"}, "Port": 80,
                "Ports": [{"Name": "http", "Port": 8081, "Default": true}, {"Name": "big", "Port": 65536},
                    {"Name": "admin", "Port": 65535}],
                "Weights": {"Passing": 3, "Warning": 0}, "Kind": "connect-proxy",
                "Proxy": {"DestinationServiceName": "db"}, "Connect": {"Native": true}},
            "Checks": [{"CheckID": "serfHealth", "Status": "passing"}, {"CheckID": "a", "Status": "maintenance"},
                {"CheckID": "b", "Status": "odd"}, {"Status": "warning"}]},
          {"Node": {"Node": "n2"}, "Service": {"Service": "gw", "Kind": "mesh-gateway",
            "Proxy": {"DestinationServiceName": "db"}}},
          {"Node": {"Node": "n3"}, "Service": {"Service": "p", "Kind": "connect-proxy"}, "Checks": null}]"#;
        let mut invalid = Invalid::default();
        let read = health(body, None, &mut invalid).unwrap();
        let check = |id: &str, status| Check {
            id: text(id),
            status,
        };
        let tagged = |address: &str, port| TaggedAddress {
            address: text(address),
            port,
        };
        let port = |name: &str, port, default| NamedPort {
            name: text(name),
            port,
            default,
        };
        let web = Instance {
            node: text("n1"),
            peer: None,
            id: text("web-1"),
            service: text("web"),
            address: text("10.0.0.2"),
            port: 80,
            impossible_port: None,
            ports: vec![port("http", 8081, true), port("admin", 65_535, false)],
            tags: vec![text("v1"), text("V2")],
            meta: map(&[("tier", "gold")]),
            weights: Weights {
                passing: 3,
                warning: 0,
            },
            tagged_addresses: [
                (text("wan"), tagged("192.0.2.2", 8080)),
                (text("lan"), tagged("a", 0)),
            ]
            .into(),
            proxy_for: Some(text("db")),
            connect_native: true,
            checks: vec![
                check("serfHealth", CheckStatus::Passing),
                check("a", CheckStatus::Critical),
                check("b", CheckStatus::Critical),
                check("", CheckStatus::Warning),
            ],
        };
        let bare = |node: &str, service: &str| Instance {
            node: text(node),
            service: text(service),
            ..Instance::default()
        };
        let expected = ServiceInstances {
            instances: [web, bare("n2", "gw"), bare("n3", "p")]
                .map(Arc::new)
                .into(),
            virtual_addresses: Vec::new(),
            nodes: Vec::new(),
        };
        assert_eq!(read, expected);
        assert_eq!(invalid, Invalid::default());
    }

    #[test]
    fn peer_instances_bring_nodes() {
        let body =
            br#"[{"Node": {"ID": "11", "Node": "n1", "Address": "10.0.0.1", "Datacenter": "dc9",
                "TaggedAddresses": {"lan": "10.0.0.3"}, "Meta": {"a": "b"}},
            "Service": {"ID": "w1", "Service": "web",
                "TaggedAddresses": {"consul-virtual": {"Address": "240.0.0.1"}}}},
          {"Node": {"Node": "n2", "Address": "10.0.0.2"}, "Service": {"ID": "w2", "Service": "web",
                "TaggedAddresses": {"consul-virtual": {"Address": "none"}}}}]"#;
        let mut invalid = Invalid::default();
        let read = health(body, Some("east"), &mut invalid).unwrap();
        let n1 = Node {
            name: text("n1"),
            id: text("11"),
            datacenter: text("dc9"),
            peer: Some(text("east")),
            address: text("10.0.0.1"),
            tagged_addresses: map(&[("lan", "10.0.0.3")]),
            meta: map(&[("a", "b")]),
            checks: Vec::new(),
        };
        let n2 = Node {
            name: text("n2"),
            peer: Some(text("east")),
            address: text("10.0.0.2"),
            ..Node::default()
        };
        assert_eq!(read.nodes, [n1, n2].map(Arc::new));
        let addresses = [(text("web"), IpAddr::from([240, 0, 0, 1]))];
        assert_eq!(read.virtual_addresses, addresses);
        let found: Vec<_> = read
            .instances
            .iter()
            .map(|one| (&*one.node, one.peer.as_deref()))
            .collect();
        assert_eq!(found, [("n1", Some("east")), ("n2", Some("east"))]);
    }

    #[test]
    fn nodes_without_a_name_are_reported() {
        let body = br#"[{"ID": "11", "Node": "n1", "Address": "10.0.0.1", "Datacenter": "DC1",
            "TaggedAddresses": {"wan": "192.0.2.1"}, "Meta": null}, {"Node": "", "Address": "10.0.0.2"}]"#;
        let mut invalid = Invalid::default();
        let n1 = Node {
            name: text("n1"),
            id: text("11"),
            datacenter: text("dc1"),
            address: text("10.0.0.1"),
            tagged_addresses: map(&[("wan", "192.0.2.1")]),
            ..Node::default()
        };
        assert_eq!(nodes(body, "dc1", &mut invalid).unwrap(), [Arc::new(n1)]);
        let lines: Vec<String> = invalid.lines().collect();
        assert_eq!(
            lines,
            ["the node at \"10.0.0.2\": it has no name; the entry is not used"]
        );
    }

    #[test]
    fn query_members_are_read() {
        let body = br#"[{"ID": "1", "Name": "geo-", "Template": {"Type": "name_prefix_match", "Regexp": "^geo-(.*)$",
                "RemoveEmptyTags": true},
            "Service": {"Service": "web", "Failover": {"NearestN": 3, "Datacenters": ["dc2"], "Targets": null},
                "OnlyPassing": true, "IgnoreCheckIDs": ["up"], "Near": "_ip", "Tags": ["a", "!b"],
                "NodeMeta": {"rack": "r1"}, "ServiceMeta": {"tier": "gold"}, "Connect": true},
            "DNS": {"TTL": "90s"}},
          {"ID": "2", "Service": {"Service": "db"}, "Template": {"Type": "", "Regexp": "x"}, "DNS": {"TTL": ""}}]"#;
        let mut invalid = Invalid::default();
        let geo = PreparedQuery {
            id: text("1"),
            name: text("geo-"),
            datacenter: None,
            service: text("web"),
            tags: vec![text("a"), text("!b")],
            only_passing: true,
            ignore_check_ids: vec![text("up")],
            node_meta: map(&[("rack", "r1")]),
            service_meta: map(&[("tier", "gold")]),
            connect: true,
            near: text("_ip"),
            ttl: Some(90),
            failover: Failover {
                nearest: 3,
                targets: vec![FailoverTarget::Datacenter(text("dc2"))],
            },
            template: Some(Template {
                regexp: text("^geo-(.*)$"),
                remove_empty_tags: true,
            }),
        };
        let db = PreparedQuery {
            id: text("2"),
            service: text("db"),
            ..PreparedQuery::default()
        };
        assert_eq!(queries(body, &mut invalid).unwrap(), [geo, db]);
        let wrong = br#"[{"ID": "1", "Service": {"Service": 7}}]"#;
        assert_eq!(queries(wrong, &mut invalid).unwrap(), []);
        let lines: Vec<String> = invalid.lines().collect();
        assert_eq!(
            lines,
            ["1: invalid type: integer `7`, expected a string; the entry is not used"]
        );
    }

    #[test]
    fn lists_of_places_are_read() {
        let mut invalid = Invalid::default();
        let peers =
            br#"[{"Name": "a", "State": "ACTIVE", "StreamStatus": {"ImportedServices": ["web"]}},
            {"Name": "b", "State": "DELETING", "StreamStatus": {"ImportedServices": ["web"]}},
            {"Name": "c", "State": "TERMINATED"}, {"Name": "d", "StreamStatus": null}]"#;
        let expected = BTreeMap::from([(text("a"), vec![text("web")]), (text("d"), Vec::new())]);
        assert_eq!(peerings(peers, &mut invalid).unwrap(), expected);

        let gateways = br#"[{"Name": "gw", "Listeners": [{"Services": [{"Name": "web"}, {"Name": "db"}]},
            {"Services": [{"Name": "web"}, {"Name": "*"}]}, {"Services": null}]}, {"Name": "none"}]"#;
        let gateway = |name: &str, services: &[&str]| Gateway {
            gateway: text(name),
            services: services.iter().map(|&service| text(service)).collect(),
        };
        assert_eq!(
            ingress(gateways, &mut invalid).unwrap(),
            [gateway("gw", &["*", "db", "web"]), gateway("none", &[])]
        );

        let servers = br#"[{"Datacenter": "DC1", "AreaID": "wan", "Coordinates": [{"Node": "a.dc1", "Coord": {"Vec": [1]}}]},
            {"Datacenter": "dc2", "Coordinates": null}, {"Datacenter": "dc3", "AreaID": "Wan"},
            {"Datacenter": "dc4", "AreaID": "11-22"}]"#;
        let coordinate = Coordinate {
            position: vec![1.0],
            ..Coordinate::default()
        };
        let expected = BTreeMap::from([(text("dc1"), vec![coordinate]), (text("dc2"), Vec::new())]);
        assert_eq!(server_coordinates(servers, &mut invalid).unwrap(), expected);

        let tags = |tags: &[&str]| tags.iter().map(|&tag| text(tag)).collect::<Vec<_>>();
        let expected = BTreeMap::from([(text("Web"), tags(&["a", "B"])), (text("db"), tags(&[]))]);
        assert_eq!(
            services(br#"{"Web": ["a", "B"], "db": null}"#, &mut invalid).unwrap(),
            expected
        );
        assert_eq!(invalid, Invalid::default());
        // Also if the tags of one service are wrong.
        let read = services(br#"{"Web": ["a", "B"], "db": [1]}"#, &mut invalid).unwrap();
        assert_eq!(read, expected);
        let lines: Vec<String> = invalid.lines().collect();
        assert_eq!(
            lines,
            ["db: invalid type: integer `1`, expected a string; its tags are not used"]
        );

        let info =
            agent(br#"{"Config": {"Datacenter": "DC1", "NodeName": "Node-1"}, "Member": null}"#)
                .unwrap();
        let expected = AgentInfo {
            datacenter: text("dc1"),
            node_name: text("Node-1"),
        };
        assert_eq!(info, expected);
        assert!(agent(br#"{"Config": {"NodeName": "Node-1"}}"#).is_err());
    }

    #[tokio::test]
    async fn tokens_are_a_printable_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        for (content, expected) in [
            (Some(&b" a-b_c\r\n"[..]), Some("a-b_c")),
            (Some(b" \n"), None),
            (Some(b"a b"), None),
            (Some(b"a\nb"), None),
            (Some("é".as_bytes()), None),
            (Some(b"\xff"), None),
            (None, None),
        ] {
            if let Some(content) = content {
                std::fs::write(&path, content).unwrap();
            } else {
                std::fs::remove_file(&path).unwrap();
            }
            let token = Token::new(Some(path.clone()));
            let found = token.now().await.ok().flatten();
            assert_eq!(found.as_deref(), expected, "{content:?}");
            // Until the next check the file is not read again.
            std::fs::write(&path, "next").unwrap();
            let mut state = token.last.lock().await;
            assert_eq!(state.problem.is_some(), expected.is_none());
            state.read(&path).await;
            assert_eq!(
                (state.token.as_deref(), &state.problem),
                (Some("next"), &None)
            );
            std::fs::write(&path, "").unwrap();
            state.read(&path).await;
            assert_eq!(state.token.as_deref(), Some("next"));
            assert!(state.problem.is_some());
        }
    }
}

#[cfg(test)]
mod token_tests {
    use super::*;

    #[tokio::test]
    async fn last_good_token_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("token");
        let token = Token::new(Some(path.clone()));
        let missing = format!(
            "consul.token_file: {}: cannot be read: No such file or directory (os error 2)",
            path.display()
        );
        assert_eq!(token.now().await, Err(missing));
        for (text, expected) in [("first\n", "first"), ("", "first"), ("second", "second")] {
            std::fs::write(&path, text).expect("written");
            tokio::time::sleep(TOKEN_CHECK_INTERVAL).await;
            assert_eq!(token.now().await, Ok(Some(expected.to_owned())));
        }
        assert_eq!(Token::new(None).now().await, Ok(None));
    }

    #[tokio::test]
    async fn fifo_does_not_hold_requests_up() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("token");
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(made.expect("mkfifo runs").success());
        let token = Token::new(Some(path));
        assert!(token.now().await.is_err());
    }

    #[test]
    fn invalid_entries_are_named_and_counted() {
        let mut invalid = Invalid::default();
        for (entry, cause) in [("a", "odd"), ("b", "odd"), ("c", "odd"), ("d", "other")] {
            invalid.note(|| entry.to_owned(), cause.to_owned());
        }
        assert_eq!(invalid.count(), 4);
        assert_eq!(
            invalid.lines().collect::<Vec<_>>(),
            ["a and 2 more: odd", "d: other"]
        );
        for (entry, name) in [
            (
                r#"{"Service":{"ID":"s1","Service":"s"},"Node":{"Node":"n"}}"#,
                "s1 on n",
            ),
            (
                r#"{"Service":{"ID":"","Service":"s"},"Node":{"Node":"n"}}"#,
                "s on n",
            ),
            (r#"{"Service":{"ID":"s1"}}"#, "s1"),
            (r#"{"Node":{"Node":"n"},"Name":"x"}"#, "n"),
            (r#"{"Name":"x","ID":"y"}"#, "x"),
            (r#"{"Node":"n"}"#, "n"),
            (r#"{"ID":"y"}"#, "y"),
            (r#"{"Datacenter":"dc1"}"#, "dc1"),
            ("7", "an entry without a name"),
        ] {
            assert_eq!(
                name_of(&serde_json::from_str(entry).unwrap()),
                name,
                "{entry}"
            );
        }
    }

    #[test]
    fn weights_and_targets_have_rules() {
        let weights = |passing, warning| Weights::from(ApiWeights { passing, warning });
        assert_eq!(weights(0, 0), Weights::default());
        for (passing, warning, expected) in [
            (0, 3, (0, 3)),
            (3, 0, (3, 0)),
            (-1, 70_000, (0, u16::MAX)),
            (70_000, -1, (u16::MAX, 0)),
        ] {
            let found = weights(passing, warning);
            assert_eq!((found.passing, found.warning), expected);
        }
        let target = |datacenter: &str, peer: &str| ApiTarget {
            datacenter: datacenter.to_owned(),
            peer: peer.to_owned(),
        };
        let failover = |targets: Vec<ApiTarget>| {
            Failover::from(ApiFailover {
                nearest: 2,
                datacenters: vec!["dc2".to_owned()],
                targets,
            })
        };
        let of_datacenter = |name: &str| FailoverTarget::Datacenter(name.to_owned());
        let found = failover(Vec::new());
        assert_eq!(
            (found.nearest, found.targets),
            (2, vec![of_datacenter("dc2")])
        );
        let found = failover(vec![target("dc3", "p"), target("dc3", ""), target("", "")]);
        let expected = vec![FailoverTarget::Peer("p".to_owned()), of_datacenter("dc3")];
        assert_eq!((found.nearest, found.targets), (0, expected));
    }
}
