//! Registrations of a live Consul, in parts shared between copies.
//!
//! The source modifies its own copy and publishes further ones; [`super::Catalog::update`] compares
//! two of them by identity and indexes only the parts that differ.

use std::{
    borrow::Borrow,
    collections::{BTreeMap, HashMap},
    hash::{BuildHasher as _, Hash},
    net::IpAddr,
    sync::{Arc, LazyLock},
};

use foldhash::fast::RandomState;

use super::{
    Place,
    registrations::{Datacenter, Gateway, Instance, Node, PreparedQuery},
};

/// All data loaded from a live Consul.
#[derive(Clone, Debug, Default)]
pub struct Live {
    /// The local datacenter, in lower case; empty without a live Consul.
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
    pub unloaded: usize,
}

/// A service in a place.
#[derive(Clone, Debug)]
pub struct LiveService {
    /// Name in the letter case of its registration.
    pub name: String,
    /// Tags of all instances, sorted.
    pub tags: Vec<String>,
    /// Instances; `None` before the first reply.
    pub instances: Option<Arc<ServiceInstances>>,
}

/// The instances of a service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceInstances {
    /// Instances; their checks include their nodes' checks.
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
        let mut squares = 0.0;
        for (a, b) in self.position.iter().zip(&other.position) {
            squares += (a - b).powi(2);
        }
        // Each end adds the time of its own access link.
        let distance = squares.sqrt() + self.height + other.height;
        let adjusted = distance + self.adjustment + other.adjustment;
        Some(if adjusted > 0.0 { adjusted } else { distance })
    }
}

impl Coordinates {
    /// Returns all other datacenters with coordinates, nearest first, by the median round-trip time
    /// between their servers and the servers of `from`.
    pub fn nearest_datacenters(&self, from: &str) -> Vec<&str> {
        let Some(own) = self.servers.get(from) else {
            return Vec::new();
        };
        let mut times: Vec<(f64, &str)> = Vec::new();
        for (name, servers) in &self.servers {
            if name != from
                && let Some(time) = median_round_trip(own, servers)
            {
                times.push((time, name.as_str()));
            }
        }
        times.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(b.1)));
        let mut names = Vec::with_capacity(times.len());
        for (_, name) in times {
            names.push(name);
        }
        names
    }
}

fn median_round_trip(from: &[Coordinate], to: &[Coordinate]) -> Option<f64> {
    let mut times = Vec::new();
    for one in from {
        for other in to {
            // Coordinates that cannot be compared have no time.
            if let Some(time) = one.round_trip(other)
                && time.is_finite()
            {
                times.push(time);
            }
        }
    }
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied()
}

impl LivePlace {
    /// Returns whether nodes and service names are loaded.
    pub fn is_loaded(&self) -> bool {
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
        Self {
            own: own.to_owned(),
            ..Self::default()
        }
    }

    /// Returns whether the local datacenter is loaded completely.
    pub fn is_complete(&self) -> bool {
        let own = Place::Datacenter(self.own.as_str().into());
        match self.places.get(&own) {
            Some(place) => place.is_loaded() && place.unloaded == 0,
            None => false,
        }
    }

    /// Returns whether a service or, if `None`, the place's list of services has not been loaded yet. The
    /// name is in lower case. Nothing is pending for places that do not exist or are unreachable.
    pub fn is_pending(&self, place: &Place, service: Option<&str>) -> bool {
        // Only complete lists can deny a name.
        if let Some(known) = self.places.get(place)
            && known.is_loaded()
        {
            // A service that a complete list lacks does not exist.
            let Some(service) = service else {
                return false;
            };
            return known
                .service(service)
                .is_some_and(|service| service.instances.is_none());
        }
        match place {
            // Nothing will arrive from an unreachable datacenter.
            Place::Datacenter(name) => self.is_reachable(name),
            // Peers are known once their list is loaded.
            Place::Peer(_) => self.places.contains_key(place),
        }
    }

    /// Returns whether a datacenter is the local one, or one with an agent that answers.
    fn is_reachable(&self, datacenter: &str) -> bool {
        datacenter == self.own
            || self
                .datacenters
                .iter()
                .any(|known| known.name == datacenter && known.reachable)
    }

    /// Returns whether any part of a place has not been loaded yet.
    pub fn is_incomplete(&self, place: &Place) -> bool {
        match self.places.get(place) {
            Some(known) if known.unloaded > 0 => true,
            _ => self.is_pending(place, None),
        }
    }

    /// Returns whether the prepared queries of a datacenter have not been loaded yet.
    pub fn lacks_queries(&self, datacenter: &str) -> bool {
        self.is_reachable(datacenter) && !self.queries.contains_key(datacenter)
    }
}

//----------- Shards -------------------------------------------------------
//
// A map whose copies share unchanged parts.

/// Number of shards; a power of two. A change copies one shard, and copying the map copies one
/// pointer per shard.
const SHARDS: usize = 256;

type Shard<K, V> = hashbrown::HashMap<K, V, RandomState>;

/// Hasher that assigns keys to shards, the same in all maps, so that any two can be compared shard by shard.
static ASSIGNMENT: LazyLock<RandomState> = LazyLock::new(RandomState::default);

/// A sharded hash map. Copies share all shards in which they do not differ.
#[derive(Debug)]
pub struct Shards<K, V> {
    shards: Vec<Arc<Shard<K, V>>>,
}

impl<K, V> Clone for Shards<K, V> {
    fn clone(&self) -> Self {
        Self {
            shards: self.shards.clone(),
        }
    }
}

impl<K, V> Default for Shards<K, V> {
    fn default() -> Self {
        let empty = Arc::new(Shard::default());
        Self {
            shards: vec![empty; SHARDS],
        }
    }
}

impl<K: Eq + Hash, V> Shards<K, V> {
    /// Returns the value of a key.
    pub fn get<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.shards[shard_of(key)].get(key)
    }

    /// Returns all entries, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.shards.iter().flat_map(|shard| shard.iter())
    }
}

impl<K: Eq + Hash + Clone, V: Clone> Shards<K, V> {
    /// Sets the value of a key and returns the previous one.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        Arc::make_mut(&mut self.shards[shard_of(&key)]).insert(key, value)
    }

    /// Removes a key and returns its value.
    pub fn remove<Q: Eq + Hash + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let shard = &mut self.shards[shard_of(key)];
        // Removing a missing key must not copy the shard.
        if shard.contains_key(key) {
            Arc::make_mut(shard).remove(key)
        } else {
            None
        }
    }
}

impl<K: Eq + Hash + Clone, V: Clone> Shards<K, Vec<V>> {
    /// Appends a value to the list of a key, and returns the list.
    pub fn push(&mut self, key: K, value: V) -> &mut Vec<V> {
        let list = Arc::make_mut(&mut self.shards[shard_of(&key)])
            .entry(key)
            .or_default();
        list.push(value);
        list
    }

    /// Removes these values from the list of a key, and the key with its last value.
    pub fn discard(&mut self, key: &K, is_gone: impl Fn(&V) -> bool) {
        let shard = &mut self.shards[shard_of(key)];
        // A list without these values must not copy the shard.
        if !shard.get(key).is_some_and(|list| list.iter().any(&is_gone)) {
            return;
        }
        let shard = Arc::make_mut(shard);
        if let Some(list) = shard.get_mut(key) {
            list.retain(|value| !is_gone(value));
            if list.is_empty() {
                shard.remove(key);
            }
        }
    }
}

impl<K: Eq + Hash, T> Shards<K, Arc<T>> {
    /// Returns the keys whose values are not the same object in both maps, with their value in `self`.
    pub fn changes<'a>(
        &'a self,
        before: &'a Self,
    ) -> impl Iterator<Item = (&'a K, Option<&'a Arc<T>>)> {
        let mut changes = Vec::new();
        for (now, before) in self.shards.iter().zip(&before.shards) {
            // A shard that no change has copied needs no look at its entries.
            if Arc::ptr_eq(now, before) {
                continue;
            }
            for (key, value) in now.iter() {
                match before.get(key) {
                    Some(before) if Arc::ptr_eq(before, value) => {}
                    _ => changes.push((key, Some(value))),
                }
            }
            for key in before.keys() {
                if !now.contains_key(key) {
                    changes.push((key, None));
                }
            }
        }
        changes.into_iter()
    }
}

fn shard_of<Q: Hash + ?Sized>(key: &Q) -> usize {
    ASSIGNMENT.hash_one(key) as usize % SHARDS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_follow_the_formula() {
        let at = |x: f64, y: f64, height, adjustment| Coordinate {
            position: vec![x, y],
            height,
            adjustment,
        };
        let a = at(0.0, 0.0, 0.001, 0.0);
        let b = at(0.003, 0.004, 0.002, 0.001);
        let close = |found: Option<f64>, wanted: f64| {
            found.is_some_and(|found| (found - wanted).abs() < 1e-9)
        };
        assert!(close(a.round_trip(&b), 0.009));
        // An adjustment that makes the time negative is ignored.
        assert!(close(a.round_trip(&at(0.003, 0.004, 0.002, -1.0)), 0.008));
        // So is one that makes it zero.
        let one = at(0.0, 0.0, 1.0, 0.0);
        assert_eq!(one.round_trip(&at(0.0, 0.0, 2.0, -3.0)), Some(3.0));
        assert_eq!(a.round_trip(&Coordinate::default()), None);
        // Both sides count, and each dimension.
        let far = at(3.0, -4.0, 0.25, 0.5);
        assert_eq!(far.round_trip(&at(0.0, 0.0, 0.5, 0.25)), Some(6.5));
        assert_eq!(at(0.0, 0.0, 0.5, 0.25).round_trip(&far), Some(6.5));
        assert_eq!(
            at(6.0, 4.0, 0.0, 0.0).round_trip(&far),
            Some(8.0_f64.hypot(3.0) + 0.75)
        );
    }

    #[test]
    fn nearest_datacenters_come_first() {
        let at = |x: f64| Coordinate {
            position: vec![x],
            ..Coordinate::default()
        };
        let servers = [
            ("dc1", vec![at(0.0)]),
            ("far", vec![at(9.0)]),
            ("near", vec![at(1.0), at(2.0), at(99.0)]),
        ];
        let servers = servers
            .map(|(name, servers)| (name.to_owned(), servers))
            .into();
        let coordinates = Coordinates {
            servers,
            ..Coordinates::default()
        };
        assert_eq!(coordinates.nearest_datacenters("dc1"), ["near", "far"]);
        assert!(coordinates.nearest_datacenters("unknown").is_empty());
        let datacenters = ["b", "dc1", "a", "near"]
            .map(|name: &str| Datacenter {
                name: name.to_owned(),
                reachable: true,
            })
            .into();
        let live = Live {
            coordinates: Arc::new(coordinates),
            datacenters,
            ..Live::default()
        };
        assert_eq!(live.nearest_datacenters("dc1"), ["near", "far", "b", "a"]);
        assert_eq!(live.nearest_datacenters("b"), ["dc1", "a", "near"]);
    }

    #[test]
    fn own_datacenter_is_complete_once_nothing_is_missing() {
        let mut live = Live::unknown("dc1");
        assert!(!live.is_complete());
        for (datacenter, nodes, services, unloaded, expected) in [
            ("dc1", true, true, 0, true),
            ("dc1", true, true, 1, false),
            ("dc1", false, true, 0, false),
            ("dc1", true, false, 0, false),
            ("dc2", true, true, 0, false),
        ] {
            let place = LivePlace {
                nodes: nodes.then(Default::default),
                services: services.then(Default::default),
                unloaded,
            };
            live.places = [(Place::Datacenter(datacenter.into()), place)]
                .into_iter()
                .collect();
            assert_eq!(live.is_complete(), expected, "{datacenter} {unloaded}");
        }
    }

    #[test]
    fn median_of_the_round_trips_counts() {
        let at = |xs: &[f64]| {
            let at = |&x: &f64| Coordinate {
                position: vec![x],
                ..Coordinate::default()
            };
            xs.iter().map(at).collect::<Vec<_>>()
        };
        let servers = [
            ("dc1", at(&[0.0])),
            ("four", at(&[1.0, 1.0, 8.0, 8.0])),
            ("five", at(&[1.0, 1.0, 7.0, 8.0, 8.0])),
            ("middle", at(&[6.0])),
            ("same", at(&[6.0])),
            ("none", at(&[])),
            ("odd", at(&[f64::NAN])),
            ("infinite", at(&[f64::INFINITY])),
            ("flat", vec![Coordinate::default()]),
        ];
        let coordinates = Coordinates {
            servers: servers
                .map(|(name, servers)| (name.to_owned(), servers))
                .into(),
            ..Coordinates::default()
        };
        let nearest = coordinates.nearest_datacenters("dc1");
        assert_eq!(nearest, ["middle", "same", "five", "four"]);
    }

    #[test]
    fn unloaded_lists_deny_nothing() {
        let [dc1, dc2, dc3, dc4] =
            ["dc1", "dc2", "dc3", "dc4"].map(|name| Place::Datacenter(name.into()));
        let [east, west] = ["east", "west"].map(|name| Place::Peer(name.into()));
        let mut live = Live::unknown("dc1");
        for (name, reachable) in [("dc2", true), ("dc3", false)] {
            let name = name.to_owned();
            live.datacenters.push(Datacenter { name, reachable });
        }
        live.places.insert(east.clone(), LivePlace::default());
        for (place, expected) in [
            (&dc1, true),
            (&dc2, true),
            (&dc3, false),
            (&dc4, false),
            (&east, true),
            (&west, false),
        ] {
            let found = [
                live.is_pending(place, None),
                live.is_pending(place, Some("web")),
                live.is_incomplete(place),
            ];
            assert_eq!(found, [expected; 3], "{place:?}");
        }
        let lacks = ["dc1", "dc2", "dc3", "dc4"].map(|name| live.lacks_queries(name));
        assert_eq!(lacks, [true, true, false, false]);
        live.queries.insert("dc2".to_owned(), Arc::default());
        assert!(!live.lacks_queries("dc2"));
    }
}

#[cfg(test)]
mod shards_tests {
    use super::*;

    #[test]
    fn copies_share_unchanged_shards() {
        let mut map: Shards<u32, Arc<u32>> = Shards::default();
        for key in 0..5000 {
            map.insert(key, Arc::new(key));
        }
        let before = map.clone();
        assert_eq!(map.changes(&before).count(), 0);
        map.insert(7, Arc::new(70));
        map.insert(9000, Arc::new(1));
        map.remove(&8);
        map.remove(&9001);
        let mut changes: Vec<_> = map
            .changes(&before)
            .map(|(key, value)| (*key, value.map(|value| **value)))
            .collect();
        changes.sort_unstable();
        assert_eq!(changes, [(7, Some(70)), (8, None), (9000, Some(1))]);
        let shared = map
            .shards
            .iter()
            .zip(&before.shards)
            .filter(|(now, before)| Arc::ptr_eq(now, before));
        assert!(shared.count() >= SHARDS - 3);
        assert_eq!(
            (map.iter().count(), before.get(&8).map(|value| **value)),
            (5000, Some(8))
        );
    }

    #[test]
    fn empty_lists_are_removed() {
        let mut map: Shards<u32, Vec<u32>> = Shards::default();
        map.push(7, 1);
        assert_eq!(*map.push(7, 2), [1, 2]);
        let before = map.clone();
        map.discard(&7, |value| *value == 3);
        assert!(
            map.shards
                .iter()
                .zip(&before.shards)
                .all(|(now, before)| Arc::ptr_eq(now, before))
        );
        map.discard(&7, |value| *value == 1);
        assert_eq!(
            (map.get(&7), before.get(&7)),
            (Some(&vec![2]), Some(&vec![1, 2]))
        );
        map.discard(&7, |value| *value == 2);
        assert_eq!(map.iter().count(), 0);
    }

    #[test]
    fn keys_are_spread_over_the_shards() {
        let mut map: Shards<u32, Arc<u32>> = Shards::default();
        assert_eq!(map.iter().count(), 0);
        for key in 0..5000 {
            assert!(map.insert(key, Arc::new(key)).is_none());
        }
        assert_eq!(
            map.iter().map(|(key, _)| u64::from(*key)).sum::<u64>(),
            12_497_500
        );
        // About 20 in each, so that a change copies few.
        let largest = map.shards.iter().map(|shard| shard.len()).max();
        assert!(largest < Some(500), "{largest:?}");
        assert_eq!(map.insert(7, Arc::new(8)).as_deref(), Some(&7));
        assert_eq!(map.remove(&7).as_deref(), Some(&8));
        assert_eq!(map.remove(&7), None);
    }
}
