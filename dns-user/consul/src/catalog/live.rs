//! Registrations of a live Consul, in parts shared between copies.
//!
//! The source modifies its own copy and publishes further ones; [`super::Catalog::update`] compares
//! two of them by identity and indexes only the parts that differ.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::Arc,
};

use super::{
    Place,
    registrations::{Datacenter, Gateway, Instance, Node, PreparedQuery},
    shards::Shards,
};

/// All data loaded from a live Consul.
#[derive(Clone, Debug, Default)]
pub struct Live {
    /// The local datacenter, in lower case.
    pub own: String,
    /// Datacenters and peers queried so far.
    pub places: BTreeMap<Place, LivePlace>,
    /// Names of all datacenters.
    pub datacenters: Vec<Datacenter>,
    /// Ingress gateways of the local datacenter.
    pub gateways: Arc<Vec<Gateway>>,
    /// Prepared queries by the datacenter that stores them.
    pub queries: BTreeMap<String, Arc<Vec<PreparedQuery>>>,
    /// Network coordinates required by prepared queries.
    pub coordinates: Arc<Coordinates>,
}

/// A datacenter or a peer. Fields are `None` before the first reply.
#[derive(Clone, Debug, Default)]
pub struct LivePlace {
    /// All nodes; for a peer, only the nodes of known instances.
    pub nodes: Option<Arc<Vec<Arc<Node>>>>,
    /// Services by lower-case name.
    pub services: Option<Shards<Box<str>, Arc<LiveService>>>,
    /// Number of services whose instances are not loaded.
    pub untold: usize,
}

/// A service in a place.
#[derive(Clone, Debug)]
pub struct LiveService {
    /// Name in the letter case of its registration.
    pub name: String,
    /// Tags of all instances, sorted.
    pub tags: Vec<String>,
    /// Instances; `None` before the first reply.
    pub told: Option<Arc<ServiceInstances>>,
}

/// The instances of a service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceInstances {
    /// Instances; their checks include those of their nodes.
    pub instances: Vec<Arc<Instance>>,
    /// Virtual addresses by service. Consul tags a proxy with the address of its destination.
    pub virtual_addresses: Vec<(String, IpAddr)>,
    /// Nodes of imported instances, which no other endpoint lists; empty for a datacenter.
    pub nodes: Vec<Arc<Node>>,
}

/// Network coordinates: positions whose distances estimate round-trip times.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Coordinates {
    /// Coordinates of the local datacenter's nodes, by lower-case name.
    pub nodes: HashMap<String, Coordinate>,
    /// Coordinates of each datacenter's servers, by lower-case name of the datacenter; not
    /// comparable with `nodes`.
    pub servers: BTreeMap<String, Vec<Coordinate>>,
}

/// A network coordinate; all numbers are in seconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Coordinate {
    /// Position in Euclidean space.
    pub position: Vec<f64>,
    /// Height above that space: the cost of the node's own access link.
    pub height: f64,
    /// Correction from the node's own measurements.
    pub adjustment: f64,
}

impl Coordinate {
    /// Returns the estimated round-trip time in seconds, by the formula in Consul's documentation
    /// ("Network coordinates"); `None` if the coordinates have different dimensions.
    pub fn round_trip(&self, other: &Self) -> Option<f64> {
        if self.position.len() != other.position.len() {
            return None;
        }
        let squares = self.position.iter().zip(&other.position).map(|(a, b)| (a - b).powi(2));
        let distance = squares.sum::<f64>().sqrt() + self.height + other.height;
        let adjusted = distance + self.adjustment + other.adjustment;
        Some(if adjusted > 0.0 { adjusted } else { distance })
    }
}

impl Coordinates {
    /// Returns all other datacenters with coordinates, nearest first, by the median round-trip time
    /// between their servers and the servers of `from`.
    pub fn nearest_datacenters(&self, from: &str) -> Vec<&str> {
        let Some(own) = self.servers.get(from) else { return Vec::new() };
        let median = |servers: &[Coordinate]| {
            let mut times: Vec<f64> = own
                .iter()
                .flat_map(|from| servers.iter().filter_map(|to| from.round_trip(to)))
                .filter(|time| time.is_finite())
                .collect();
            times.sort_by(f64::total_cmp);
            times.get(times.len() / 2).copied()
        };
        let others = self.servers.iter().filter(|(name, _)| *name != from);
        let mut times: Vec<(f64, &str)> =
            others.filter_map(|(name, servers)| Some((median(servers)?, name.as_str()))).collect();
        times.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(b.1)));
        times.into_iter().map(|(_, name)| name).collect()
    }
}

impl LivePlace {
    /// Returns whether nodes and service names are loaded.
    pub fn is_told(&self) -> bool {
        self.nodes.is_some() && self.services.is_some()
    }

    /// Returns a service by its lower-case name.
    pub fn service(&self, name: &str) -> Option<&Arc<LiveService>> {
        self.services.as_ref()?.get(name)
    }
}

impl Live {
    /// Returns all other datacenters, nearest first; datacenters without coordinates follow in the
    /// order of `/v1/catalog/datacenters`, which lists the nearest first, too.
    pub fn nearest_datacenters(&self, from: &str) -> Vec<&str> {
        let mut names = self.coordinates.nearest_datacenters(from);
        for known in &self.datacenters {
            if known.name != from && !names.contains(&known.name.as_str()) {
                names.push(&known.name);
            }
        }
        names
    }

    /// Returns the state before anything of a datacenter is loaded.
    pub fn unknown(own: &str) -> Self {
        Self { own: own.to_owned(), ..Self::default() }
    }

    /// Returns whether the local datacenter is loaded completely.
    pub fn is_complete(&self) -> bool {
        let own = Place::Datacenter(self.own.as_str().into());
        self.places.get(&own).is_some_and(|place| place.is_told() && place.untold == 0)
    }

    /// Returns whether a service or, if `None`, the place's list of services has not been loaded
    /// yet. The name is in lower case. Nothing is pending for places that do not exist or are
    /// unreachable.
    pub fn is_pending(&self, place: &Place, service: Option<&str>) -> bool {
        let told = self.places.get(place).filter(|known| known.is_told());
        match (told, service) {
            (Some(known), Some(service)) => {
                known.service(service).is_some_and(|service| service.told.is_none())
            }
            (Some(_), None) => false,
            (None, _) => match place {
                Place::Datacenter(name) if **name == *self.own => true,
                Place::Datacenter(name) => {
                    self.datacenters.iter().any(|known| known.name == **name && known.reachable)
                }
                // Peers are known once their list is loaded.
                Place::Peer(_) => self.places.contains_key(place),
            },
        }
    }

    /// Returns whether any part of a place has not been loaded yet.
    pub fn is_incomplete(&self, place: &Place) -> bool {
        self.is_pending(place, None) || self.places.get(place).is_some_and(|known| known.untold > 0)
    }

    /// Returns whether the prepared queries of a datacenter have not been loaded yet.
    pub fn lacks_queries(&self, datacenter: &str) -> bool {
        let known = datacenter == self.own
            || self.datacenters.iter().any(|known| known.name == datacenter && known.reachable);
        known && !self.queries.contains_key(datacenter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_follow_the_formula() {
        let at = |x: f64, y: f64, height, adjustment| Coordinate { position: vec![x, y], height, adjustment };
        let (a, b) = (at(0.0, 0.0, 0.001, 0.0), at(0.003, 0.004, 0.002, 0.001));
        let close =
            |found: Option<f64>, wanted: f64| found.is_some_and(|found| (found - wanted).abs() < 1e-9);
        assert!(close(a.round_trip(&b), 0.009));
        // An adjustment that makes the time negative is ignored.
        assert!(close(a.round_trip(&at(0.003, 0.004, 0.002, -1.0)), 0.008));
        assert_eq!(a.round_trip(&Coordinate::default()), None);
    }

    #[test]
    fn nearest_datacenters_come_first() {
        let at = |x: f64| Coordinate { position: vec![x], ..Coordinate::default() };
        let servers =
            [("dc1", vec![at(0.0)]), ("far", vec![at(9.0)]), ("near", vec![at(1.0), at(2.0), at(99.0)])];
        let servers = servers.map(|(name, servers)| (name.to_owned(), servers)).into();
        let coordinates = Coordinates { servers, ..Coordinates::default() };
        assert_eq!(coordinates.nearest_datacenters("dc1"), ["near", "far"]);
        assert!(coordinates.nearest_datacenters("unknown").is_empty());
        let datacenter = |name: &str| Datacenter { name: name.to_owned(), reachable: true };
        let datacenters = ["b", "dc1", "a", "near"].map(datacenter).into();
        let live = Live { coordinates: Arc::new(coordinates), datacenters, ..Live::default() };
        assert_eq!(live.nearest_datacenters("dc1"), ["near", "far", "b", "a"]);
        assert_eq!(live.nearest_datacenters("b"), ["dc1", "a", "near"]);
    }
}
