//! Scenarios as stored in their files.

use std::{collections::BTreeMap, fs, net::IpAddr, path::PathBuf};

use dns_consul::{
    catalog::registrations::{
        Check, CheckStatus, Datacenter, Failover, FailoverTarget, Gateway, Instance, NamedPort,
        Node, PreparedQuery, Registrations, TaggedAddress, Template, VirtualAddress, Weights,
    },
    config::Visibility,
};
use serde::Deserialize;
use serde_json::{Value, json};

/// Environment variable that names a folder of cases to replay instead of `tests/cases`. The cases of
/// `tests/own-cases`, which cover the gaps, are always replayed.
pub(crate) const CASES_VARIABLE: &str = "BOSH_DNS_CONSUL_CASES";

/// One configuration and one catalog with the questions to replay.
#[derive(Clone, Deserialize)]
pub(crate) struct Scenario {
    pub(crate) name: String,
    pub(crate) config: Value,
    pub(crate) catalog: CatalogOfCase,
    #[serde(default)]
    pub(crate) upstreams: BTreeMap<String, Vec<Rule>>,
    pub(crate) cases: Vec<Case>,
}

/// One reply of a recursor.
#[derive(Clone, Deserialize)]
pub(crate) struct Rule {
    #[serde(default)]
    pub(crate) silent: bool,
    #[serde(default)]
    pub(crate) q: String,
    #[serde(rename = "type", default)]
    pub(crate) kind: String,
    #[serde(default)]
    pub(crate) rcode: String,
    #[serde(default)]
    pub(crate) ra: bool,
    #[serde(default)]
    pub(crate) tc: bool,
    #[serde(default)]
    pub(crate) answers: Vec<Value>,
}

/// A question and the expected reply.
#[derive(Clone, Deserialize)]
pub(crate) struct Case {
    pub(crate) q: String,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) transport: String,
    pub(crate) edns: Option<u16>,
    pub(crate) ecs: Option<Ecs>,
    pub(crate) client: Option<IpAddr>,
    pub(crate) repeat: Option<Repeat>,
    pub(crate) expect: Value,
    pub(crate) why: String,
}

#[derive(Clone, Deserialize)]
pub(crate) struct Ecs {
    pub(crate) address: IpAddr,
    pub(crate) prefix: u8,
}

#[derive(Clone, Deserialize)]
pub(crate) struct Repeat {
    pub(crate) times: usize,
    pub(crate) distinct_min: usize,
}

/// The catalog of a scenario.
#[derive(Clone, Deserialize)]
pub(crate) struct CatalogOfCase {
    pub(crate) nodes: Vec<Value>,
    pub(crate) services: Vec<Value>,
    #[serde(default)]
    pub(crate) generate: Vec<Generate>,
    #[serde(default)]
    queries: Vec<Value>,
    #[serde(default)]
    virtual_ips: Vec<Value>,
    #[serde(default)]
    ingress: Vec<Value>,
    #[serde(default)]
    datacenters: Vec<Value>,
    #[serde(default)]
    distance: BTreeMap<String, Vec<String>>,
}

/// Many nodes with one instance each.
#[derive(Clone, Deserialize)]
pub(crate) struct Generate {
    pub(crate) count: u32,
    pub(crate) node: String,
    pub(crate) address_base: IpAddr,
    pub(crate) service: String,
    pub(crate) port: u16,
}

impl Generate {
    /// Names and addresses of the nodes.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = (String, IpAddr)> {
        (1..=self.count).map(|i| {
            let address: IpAddr = match self.address_base {
                IpAddr::V4(base) => std::net::Ipv4Addr::from(base.to_bits() + i).into(),
                IpAddr::V6(base) => std::net::Ipv6Addr::from(base.to_bits() + u128::from(i)).into(),
            };
            (self.node.replace("{i}", &i.to_string()), address)
        })
    }
}

impl Scenario {
    /// All scenarios, sorted by name.
    pub(crate) fn all() -> Vec<Self> {
        // Relative to the pure crate, and to the whole-system tests.
        let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
        let candidates = [
            here.join("tests/cases"),
            here.join("../dns-user/consul/tests/cases"),
        ];
        let ours = candidates
            .into_iter()
            .find(|folder| folder.is_dir())
            .expect("the folder of the cases");
        let own = ours.with_file_name("own-cases");
        let folder = std::env::var_os(CASES_VARIABLE).map_or(ours, PathBuf::from);
        let entries =
            fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let own = fs::read_dir(own).expect("the folder of our own cases");
        let mut paths: Vec<PathBuf> = entries
            .chain(own)
            .map(|entry| entry.expect("an entry").path())
            .collect();
        paths.retain(|path| {
            path.extension()
                .is_some_and(|extension| extension == "json")
        });
        paths.sort();
        assert!(!paths.is_empty(), "{} holds no cases", folder.display());
        let read = |path: &PathBuf| {
            let text = fs::read(path).expect("a readable file");
            serde_json::from_slice(&text)
                .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        };
        paths.iter().map(read).collect()
    }

    /// The datacenter of the agent.
    pub(crate) fn datacenter(&self) -> &str {
        self.config["datacenter"].as_str().unwrap_or("dc1")
    }

    /// The domain, with the final dot, in lower case.
    pub(crate) fn domain(&self) -> String {
        let text = self.config["domain"]
            .as_str()
            .unwrap_or("consul.")
            .to_ascii_lowercase();
        if text.ends_with('.') {
            text
        } else {
            text + "."
        }
    }

    /// Returns the token's read permissions.
    pub(crate) fn visibility(&self) -> Visibility {
        match &self.config["acl"] {
            Value::Null => Visibility::all(),
            acl => Visibility {
                nodes: texts(&acl["nodes"]),
                services: texts(&acl["services"]),
            },
        }
    }

    /// The catalog as a definition file, generated parts written out.
    pub(crate) fn definitions(&self) -> Value {
        let catalog = &self.catalog;
        let (mut nodes, mut services) = (catalog.nodes.clone(), catalog.services.clone());
        for generate in &catalog.generate {
            for (name, address) in generate.nodes() {
                let (service, port) = (&generate.service, generate.port);
                services
                    .push(json!({"node": name, "id": service, "service": service, "port": port}));
                nodes.push(
                    json!({"node": name, "address": address, "datacenter": self.datacenter()}),
                );
            }
        }
        json!({
            "nodes": nodes, "services": services, "queries": catalog.queries,
            "virtual_ips": catalog.virtual_ips, "ingress": catalog.ingress,
            "datacenters": catalog.datacenters, "distance": catalog.distance,
        })
    }

    /// The catalog in the crate's own types.
    pub(crate) fn registrations(&self) -> Registrations {
        let catalog = &self.catalog;
        let mut registrations = Registrations {
            nodes: catalog.nodes.iter().map(node).map(Into::into).collect(),
            instances: catalog
                .services
                .iter()
                .map(instance)
                .map(Into::into)
                .collect(),
            queries: catalog.queries.iter().map(query).collect(),
            virtual_addresses: catalog.virtual_ips.iter().map(virtual_address).collect(),
            gateways: catalog.ingress.iter().map(gateway).collect(),
            datacenters: catalog.datacenters.iter().map(datacenter).collect(),
            distances: catalog.distance.clone().into_iter().collect(),
        };
        for generate in &catalog.generate {
            for (name, address) in generate.nodes() {
                let instance = Instance {
                    node: name.clone(),
                    id: generate.service.clone(),
                    service: generate.service.clone(),
                    port: generate.port,
                    ..Instance::default()
                };
                registrations.instances.push(instance.into());
                let node = Node {
                    name,
                    address: address.to_string(),
                    datacenter: self.datacenter().to_owned(),
                    ..Node::default()
                };
                registrations.nodes.push(node.into());
            }
        }
        registrations
    }
}

fn node(value: &Value) -> Node {
    Node {
        name: text(value, "node"),
        id: text(value, "id"),
        datacenter: text(value, "datacenter"),
        peer: value["peer"].as_str().map(str::to_owned),
        address: text(value, "address"),
        tagged_addresses: strings(&value["tagged_addresses"]),
        meta: strings(&value["meta"]),
        checks: checks(value),
    }
}

fn instance(value: &Value) -> Instance {
    let weight = |name| {
        value["weights"][name]
            .as_u64()
            .map_or(1, |weight| weight as u16)
    };
    let port = |value: &Value| value["port"].as_u64().unwrap_or(0) as u16;
    let tagged = value["tagged_addresses"].as_object().into_iter().flatten();
    Instance {
        node: text(value, "node"),
        peer: value["peer"].as_str().map(str::to_owned),
        id: text(value, "id"),
        service: text(value, "service"),
        address: text(value, "address"),
        port: port(value),
        impossible_port: None,
        ports: list(&value["ports"])
            .map(|named| NamedPort {
                name: text(named, "name"),
                port: port(named),
                default: named["default"] == true,
            })
            .collect(),
        tags: texts(&value["tags"]),
        meta: strings(&value["meta"]),
        weights: Weights {
            passing: weight("passing"),
            warning: weight("warning"),
        },
        tagged_addresses: tagged
            .map(|(tag, value)| {
                (
                    tag.clone(),
                    TaggedAddress {
                        address: text(value, "address"),
                        port: port(value),
                    },
                )
            })
            .collect(),
        proxy_for: value["proxy"]["destination_service"]
            .as_str()
            .map(str::to_owned),
        connect_native: value["connect"]["native"] == true,
        checks: checks(value),
    }
}

fn query(value: &Value) -> PreparedQuery {
    let seconds = |text: &str| {
        dns_core::config::values::parse_duration(text)
            .expect("a duration")
            .as_secs() as u32
    };
    let template = &value["template"];
    PreparedQuery {
        id: text(value, "id"),
        name: text(value, "name"),
        datacenter: value["datacenter"].as_str().map(str::to_owned),
        service: text(value, "service"),
        tags: texts(&value["tags"]),
        only_passing: value["only_passing"] == true,
        ignore_check_ids: texts(&value["ignore_check_ids"]),
        node_meta: strings(&value["node_meta"]),
        service_meta: strings(&value["service_meta"]),
        connect: value["connect"] == true,
        near: text(value, "near"),
        ttl: value["dns_ttl"].as_str().map(seconds),
        failover: Failover {
            nearest: 0,
            targets: texts(&value["failover"]["datacenters"])
                .into_iter()
                .map(FailoverTarget::Datacenter)
                .chain(
                    value["failover"]["targets"]
                        .as_array()
                        .into_iter()
                        .flatten()
                        .map(|target| match target["peer"].as_str() {
                            Some(peer) => FailoverTarget::Peer(peer.to_owned()),
                            None => FailoverTarget::Datacenter(text(target, "datacenter")),
                        }),
                )
                .collect(),
        },
        template: template.is_object().then(|| Template {
            regexp: text(template, "regexp"),
            remove_empty_tags: false,
        }),
    }
}

fn virtual_address(value: &Value) -> VirtualAddress {
    VirtualAddress {
        service: text(value, "service"),
        peer: value["peer"].as_str().map(str::to_owned),
        address: text(value, "ip").parse().expect("an address"),
    }
}

fn gateway(value: &Value) -> Gateway {
    Gateway {
        gateway: text(value, "gateway"),
        services: texts(&value["services"]),
    }
}

fn datacenter(value: &Value) -> Datacenter {
    Datacenter {
        name: text(value, "name"),
        reachable: value["reachable"] != false,
    }
}

fn checks(value: &Value) -> Vec<Check> {
    let check = |check: &Value| Check {
        id: text(check, "id"),
        status: CheckStatus::from_text(&text(check, "status")).expect("a state"),
    };
    list(&value["checks"]).map(check).collect()
}

fn text(value: &Value, member: &str) -> String {
    value[member].as_str().unwrap_or_default().to_owned()
}

fn texts(value: &Value) -> Vec<String> {
    list(value)
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect()
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn strings(value: &Value) -> BTreeMap<String, String> {
    let members = value.as_object().into_iter().flatten();
    members
        .map(|(key, value)| (key.clone(), value.as_str().expect("a string").to_owned()))
        .collect()
}
