//! Registrations in the double, with the indexes that Consul would assign.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

pub(crate) const DATACENTER: &str = "dc1";

/// Registrations. All changes go through methods, which keep the indexes consistent.
#[derive(Clone, Debug, Default)]
pub(crate) struct World {
    /// Name of the datacenter; empty for [`DATACENTER`].
    pub(crate) datacenter: String,
    /// Index of the last change.
    pub(crate) index: u64,
    /// Nodes: name to address.
    pub(crate) nodes: BTreeMap<String, String>,
    /// Index of the last change of a node.
    pub(crate) nodes_index: u64,
    pub(crate) services: BTreeMap<String, Service>,
    /// Index of the last change of names or tags of services.
    pub(crate) services_index: u64,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Service {
    /// Index of the last change of one of its instances.
    pub(crate) index: u64,
    pub(crate) instances: Vec<Instance>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Instance {
    pub(crate) node: String,
    pub(crate) id: String,
    pub(crate) address: String,
    pub(crate) port: u32,
    pub(crate) tags: Vec<String>,
    pub(crate) status: &'static str,
}

impl World {
    /// Generates services with the same number of instances each, on as many nodes as a service has
    /// instances.
    pub(crate) fn generated(services: usize, instances: usize) -> Self {
        let mut world = Self {
            index: 10,
            nodes_index: 10,
            services_index: 10,
            ..Self::default()
        };
        for number in 0..instances {
            world
                .nodes
                .insert(format!("node-{number}"), address(200, number));
        }
        for service in 0..services {
            let instance = |number: usize| Instance {
                node: format!("node-{number}"),
                id: format!("service-{service}-{number}"),
                address: address(service % 200, number * 31 + service / 200),
                port: 8000,
                tags: vec!["v1".to_owned()],
                status: "passing",
            };
            let instances = (0..instances).map(instance).collect();
            world.services.insert(
                format!("service-{service}"),
                Service {
                    index: 10,
                    instances,
                },
            );
        }
        world
    }

    pub(crate) fn datacenter(&self) -> &str {
        if self.datacenter.is_empty() {
            DATACENTER
        } else {
            &self.datacenter
        }
    }

    /// Changes the health of an instance.
    pub(crate) fn set_status(&mut self, service: &str, number: usize, status: &'static str) {
        self.change(service, |service| {
            if let Some(instance) = service.instances.get_mut(number) {
                instance.status = status;
            }
        });
    }

    /// Registers another instance. The list of services does not change (no new name, no new tag).
    pub(crate) fn register(&mut self, service: &str, instance: Instance) {
        let is_new = !self.services.contains_key(service);
        let tags = |world: &Self| world.tags(service);
        let before = tags(self);
        self.change(service, |service| service.instances.push(instance));
        if is_new || before != tags(self) {
            self.services_index = self.index;
        }
    }

    /// Deregisters the last instance; with the last one, the service.
    pub(crate) fn deregister(&mut self, service: &str) {
        let before = self.tags(service);
        self.change(service, |service| drop(service.instances.pop()));
        if self
            .services
            .get(service)
            .is_some_and(|service| service.instances.is_empty())
        {
            self.services.remove(service);
        }
        if before != self.tags(service) {
            self.services_index = self.index;
        }
    }

    /// Changes the address of a node.
    pub(crate) fn move_node(&mut self, node: &str, address: &str) {
        self.index += 1;
        self.nodes_index = self.index;
        self.nodes.insert(node.to_owned(), address.to_owned());
        for service in self.services.values_mut() {
            if service
                .instances
                .iter()
                .any(|instance| instance.node == node)
            {
                service.index = self.index;
            }
        }
    }

    /// Resets all indexes, as after a restored snapshot.
    pub(crate) fn restore(&mut self) {
        let index = 5;
        (self.index, self.nodes_index, self.services_index) = (index, index, index);
        for service in self.services.values_mut() {
            service.index = index;
        }
    }

    /// Returns all registrations, for comparison: service, id, address, port, status; and nodes.
    pub(crate) fn all(&self) -> BTreeSet<String> {
        let instances = self.services.iter().flat_map(|(name, service)| {
            service.instances.iter().map(move |instance| {
                let Instance {
                    node,
                    id,
                    address,
                    port,
                    tags,
                    status,
                } = instance;
                format!("{name} {node} {id} {address} {port} {tags:?} {status}")
            })
        });
        instances
            .chain(
                self.nodes
                    .iter()
                    .map(|(name, address)| format!("{name} {address}")),
            )
            .collect()
    }

    /// Body of `/v1/catalog/services`.
    pub(crate) fn list_services(&self) -> Value {
        self.services
            .keys()
            .map(|name| (name.clone(), json!(self.tags(name))))
            .collect()
    }

    /// Body of `/v1/catalog/nodes`.
    pub(crate) fn list_nodes(&self) -> Value {
        let node = |(name, address): (&String, &String)| self.node(name, address);
        self.nodes.iter().map(node).collect()
    }

    /// Body of `/v1/health/service/:service`.
    pub(crate) fn list_health(&self, service: &str) -> Value {
        let instances = self
            .services
            .get(service)
            .map_or(&[][..], |service| &service.instances);
        let entry = |instance: &Instance| {
            let Instance {
                node,
                id,
                address,
                port,
                tags,
                status,
            } = instance;
            json!({
                "Node": self.node(node, self.nodes.get(node).map_or("", String::as_str)),
                "Service": {
                    "ID": id, "Service": service, "Tags": tags, "Address": address, "Port": port, "Meta": null,
                    "TaggedAddresses": null, "Weights": {"Passing": 1, "Warning": 1}, "Kind": "",
                    "EnableTagOverride": false, "Proxy": {"Mode": ""}, "Connect": {}, "CreateIndex": 1,
                },
                "Checks": [
                    {"Node": node, "CheckID": "serfHealth", "Status": "passing", "ServiceID": ""},
                    {"Node": node, "CheckID": "up", "Status": status, "ServiceID": id, "Output": "x"},
                ],
            })
        };
        instances.iter().map(entry).collect()
    }

    /// Tags of all instances of a service, sorted.
    fn tags(&self, service: &str) -> Vec<String> {
        let instances = self
            .services
            .get(service)
            .into_iter()
            .flat_map(|service| &service.instances);
        let tags: BTreeSet<String> = instances
            .flat_map(|instance| instance.tags.clone())
            .collect();
        tags.into_iter().collect()
    }

    fn node(&self, name: &str, address: &str) -> Value {
        json!({
            "ID": "", "Node": name, "Address": address, "Datacenter": self.datacenter(),
            "TaggedAddresses": {"lan": address}, "Meta": null,
        })
    }

    fn change(&mut self, service: &str, change: impl FnOnce(&mut Service)) {
        self.index += 1;
        let index = self.index;
        let service = self.services.entry(service.to_owned()).or_default();
        service.index = index;
        change(service);
    }
}

/// Returns an address derived from two numbers.
fn address(high: usize, low: usize) -> String {
    format!("10.{}.{}.{}", high % 256, low / 256 % 256, low % 256)
}
