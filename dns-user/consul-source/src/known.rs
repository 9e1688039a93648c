//! All that was told so far.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use crate::api::Instances;
use dns_consul::catalog::registrations::{
    Datacenter, Gateway, Node, Pending, PreparedQuery, Registrations, VirtualAddress,
};

/// A service of a datacenter, both in lower case.
pub(crate) type Key = (String, String);

/// All that was told so far.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// The own datacenter; `None` before the agent named it.
    pub(crate) own: Option<String>,
    /// The agent's node.
    pub(crate) node_name: String,
    /// Names of all datacenters.
    pub(crate) datacenters: Vec<String>,
    /// Those that cannot be asked.
    pub(crate) unreachable: HashSet<String>,
    /// Gateways and what is bound to them.
    pub(crate) gateways: Vec<Gateway>,
    pub(crate) queries: Vec<PreparedQuery>,
    places: BTreeMap<String, Place>,
}

/// Registrations of one datacenter; `None` before the first answer.
#[derive(Debug, Default)]
struct Place {
    nodes: Option<Vec<Arc<Node>>>,
    /// Services by their names in lower case.
    services: Option<HashMap<String, Service>>,
}

#[derive(Debug)]
struct Service {
    /// Its name as it is registered.
    name: String,
    /// Tags of all its instances: other tags, other instances.
    tags: Vec<String>,
    /// Its instances; `None`: not told yet.
    instances: Option<Instances>,
}

/// The effect of a new list of services.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Difference {
    /// New services, and services with changed tags, whose instances must be fetched.
    pub(crate) to_ask: Vec<Key>,
    /// Services that are gone.
    pub(crate) gone: Vec<Key>,
}

impl Known {
    /// Takes in the nodes of a datacenter; whether that is news.
    pub(crate) fn set_nodes(&mut self, datacenter: &str, nodes: Vec<Arc<Node>>) -> bool {
        let place = self.place(datacenter);
        let is_news = place.nodes.as_ref() != Some(&nodes);
        if is_news {
            place.nodes = Some(nodes);
        }
        is_news
    }

    /// Takes in the services of a datacenter.
    pub(crate) fn set_services(
        &mut self,
        datacenter: &str,
        services: BTreeMap<String, Vec<String>>,
    ) -> Difference {
        let known = self.place(datacenter).services.get_or_insert_default();
        let key = |name: &str| (datacenter.to_owned(), name.to_owned());
        let mut difference = Difference::default();
        let mut named = HashSet::new();
        for (name, mut tags) in services {
            tags.sort();
            let lower = name.to_ascii_lowercase();
            named.insert(lower.clone());
            match known.get_mut(&lower) {
                Some(service) if service.tags == tags => {}
                Some(service) => {
                    service.tags = tags;
                    difference.to_ask.push(key(&lower));
                }
                None => {
                    difference.to_ask.push(key(&lower));
                    known.insert(lower, Service { name, tags, instances: None });
                }
            }
        }
        known.retain(|name, _| {
            let stays = named.contains(name);
            if !stays {
                difference.gone.push(key(name));
            }
            stays
        });
        difference
    }

    /// Takes in the instances of a service; whether that is news.
    pub(crate) fn set_instances(&mut self, key: &Key, instances: Instances) -> bool {
        // One that is gone meanwhile has none.
        let Some(service) = self.service_mut(key) else { return false };
        let is_news = service.instances.as_ref() != Some(&instances);
        if is_news {
            service.instances = Some(instances);
        }
        is_news
    }

    /// The name of a service as it is registered.
    pub(crate) fn name_of(&self, (datacenter, service): &Key) -> Option<&str> {
        let service = self.places.get(datacenter)?.services.as_ref()?.get(service)?;
        Some(service.name.as_str())
    }

    /// Whether nodes and services of a datacenter were told.
    pub(crate) fn is_told(&self, datacenter: &str) -> bool {
        self.places.get(datacenter).is_some_and(|place| place.nodes.is_some() && place.services.is_some())
    }

    /// Whether the instances of a service were told.
    pub(crate) fn has_instances(&self, (datacenter, service): &Key) -> bool {
        let service = || self.places.get(datacenter)?.services.as_ref()?.get(service);
        service().is_some_and(|service| service.instances.is_some())
    }

    /// Whether this is a datacenter that can be asked about.
    pub(crate) fn is_datacenter(&self, name: &str) -> bool {
        self.own.as_deref() == Some(name)
            || self.datacenters.iter().any(|known| known.eq_ignore_ascii_case(name))
    }

    /// Services, and how many of them have told their instances; nodes; instances.
    pub(crate) fn counts(&self) -> (usize, usize, usize, usize) {
        let (mut services, mut told, mut nodes, mut instances) = (0, 0, 0, 0);
        for place in self.places.values() {
            nodes += place.nodes.as_ref().map_or(0, Vec::len);
            for service in place.services.iter().flat_map(HashMap::values) {
                services += 1;
                if let Some(known) = &service.instances {
                    told += 1;
                    instances += known.instances.len();
                }
            }
        }
        (services, told, nodes, instances)
    }

    /// Returns all of it as registrations. `own` names the datacenter until the agent does.
    pub(crate) fn registrations(&self, own: &str) -> Registrations {
        let own = self.own.as_deref().unwrap_or(own);
        let mut registrations = Registrations {
            queries: self.queries.clone(),
            gateways: self.gateways.clone(),
            ..Registrations::default()
        };
        for name in &self.datacenters {
            let name = name.to_ascii_lowercase();
            let reachable = !self.unreachable.contains(&name);
            if name != own && reachable && !self.is_told(&name) {
                registrations.pending.datacenters.insert(name.clone());
            }
            registrations.datacenters.push(Datacenter { name, reachable });
        }
        if !self.is_told(own) {
            registrations.pending.datacenters.insert(own.to_owned());
        }
        for (datacenter, place) in &self.places {
            registrations.nodes.extend(place.nodes.iter().flatten().cloned());
            for (key, service) in place.services.iter().flatten() {
                let Some(Instances { instances, virtual_addresses }) = &service.instances else {
                    registrations.pending.services.insert((datacenter.clone(), key.clone()));
                    continue;
                };
                registrations.instances.extend(instances.iter().cloned());
                if datacenter == own {
                    for (service, address) in virtual_addresses.iter().cloned() {
                        registrations.virtual_addresses.push(VirtualAddress { service, peer: None, address });
                    }
                }
            }
        }
        registrations
    }

    /// Registrations of which nothing is known any more.
    pub(crate) fn nothing(&self, own: &str) -> Registrations {
        let own = self.own.as_deref().unwrap_or(own).to_owned();
        let pending = Pending { datacenters: HashSet::from([own]), services: HashSet::new() };
        Registrations { pending, ..Registrations::default() }
    }

    /// Returns the registrations of a datacenter.
    fn place(&mut self, datacenter: &str) -> &mut Place {
        self.places.entry(datacenter.to_owned()).or_default()
    }

    fn service_mut(&mut self, (datacenter, service): &Key) -> Option<&mut Service> {
        self.places.get_mut(datacenter)?.services.as_mut()?.get_mut(service)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_answers_are_pending() {
        let mut known = Known::default();
        assert!(known.registrations("dc1").pending.datacenters.contains("dc1"));
        known.own = Some("dc1".to_owned());
        known.set_nodes("dc1", Vec::new());
        let named = |tags: &[&str]| {
            let tags = tags.iter().map(|&tag| tag.to_owned()).collect();
            BTreeMap::from([("Web".to_owned(), tags)])
        };
        let key = ("dc1".to_owned(), "web".to_owned());
        assert_eq!(known.set_services("dc1", named(&["a"])).to_ask, std::slice::from_ref(&key));
        let pending = known.registrations("dc1").pending;
        assert!(pending.datacenters.is_empty() && pending.services.contains(&key));
        assert!(known.set_instances(&key, Instances::default()));
        assert!(!known.set_instances(&key, Instances::default()), "the same is no news");
        assert_eq!(known.registrations("dc1").pending, Pending::default());
        assert_eq!(known.set_services("dc1", named(&["b"])).to_ask, std::slice::from_ref(&key), "other tags");
        assert_eq!(known.set_services("dc1", BTreeMap::new()).gone, std::slice::from_ref(&key));
        assert!(!known.set_instances(&key, Instances::default()), "it is gone");
    }
}
