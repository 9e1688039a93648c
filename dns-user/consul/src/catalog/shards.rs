//! A map whose copies share unchanged parts.

use std::{
    borrow::Borrow,
    hash::{BuildHasher as _, Hash},
    sync::{Arc, LazyLock},
};

use foldhash::fast::RandomState;
use hashbrown::HashMap;

/// Number of shards; a power of two. A change copies one shard, and copying the map copies one
/// pointer per shard.
const SHARDS: usize = 256;

type Shard<K, V> = HashMap<K, V, RandomState>;

/// Hasher that assigns keys to shards, the same in all maps, so that any two can be compared shard
/// by shard.
static ASSIGNMENT: LazyLock<RandomState> = LazyLock::new(RandomState::default);

/// A sharded hash map. Copies share all shards in which they do not differ.
#[derive(Debug)]
pub struct Shards<K, V> {
    shards: Vec<Arc<Shard<K, V>>>,
}

impl<K, V> Clone for Shards<K, V> {
    fn clone(&self) -> Self {
        Self { shards: self.shards.clone() }
    }
}

impl<K, V> Default for Shards<K, V> {
    fn default() -> Self {
        let empty = Arc::new(Shard::default());
        Self { shards: vec![empty; SHARDS] }
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

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.len()).sum()
    }

    /// Returns whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.shards.iter().all(|shard| shard.is_empty())
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
        if shard.contains_key(key) { Arc::make_mut(shard).remove(key) } else { None }
    }
}

impl<K: Eq + Hash + Clone, V: Clone> Shards<K, Vec<V>> {
    /// Appends a value to the list of a key, and returns the list.
    pub fn push(&mut self, key: K, value: V) -> &mut Vec<V> {
        let list = Arc::make_mut(&mut self.shards[shard_of(&key)]).entry(key).or_default();
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
    /// Returns the keys whose values are not the same object in both maps, with their value in
    /// `self`.
    pub fn changes<'a>(&'a self, before: &'a Self) -> impl Iterator<Item = (&'a K, Option<&'a Arc<T>>)> {
        let pairs = self.shards.iter().zip(&before.shards).filter(|(now, before)| !Arc::ptr_eq(now, before));
        pairs.flat_map(|(now, before)| {
            let changed = now
                .iter()
                .filter(|(key, value)| before.get(*key).is_none_or(|before| !Arc::ptr_eq(before, value)));
            let removed = before.keys().filter(|key| !now.contains_key(*key));
            changed.map(|(key, value)| (key, Some(value))).chain(removed.map(|key| (key, None)))
        })
    }
}

fn shard_of<Q: Hash + ?Sized>(key: &Q) -> usize {
    ASSIGNMENT.hash_one(key) as usize % SHARDS
}

#[cfg(test)]
mod tests {
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
        let mut changes: Vec<_> =
            map.changes(&before).map(|(key, value)| (*key, value.map(|value| **value))).collect();
        changes.sort_unstable();
        assert_eq!(changes, [(7, Some(70)), (8, None), (9000, Some(1))]);
        let shared = map.shards.iter().zip(&before.shards).filter(|(now, before)| Arc::ptr_eq(now, before));
        assert!(shared.count() >= SHARDS - 3);
        assert_eq!((map.len(), before.get(&8).map(|value| **value)), (5000, Some(8)));
    }

    #[test]
    fn empty_lists_are_removed() {
        let mut map: Shards<u32, Vec<u32>> = Shards::default();
        map.push(7, 1);
        assert_eq!(*map.push(7, 2), [1, 2]);
        let before = map.clone();
        map.discard(&7, |value| *value == 3);
        assert!(map.shards.iter().zip(&before.shards).all(|(now, before)| Arc::ptr_eq(now, before)));
        map.discard(&7, |value| *value == 1);
        assert_eq!((map.get(&7), before.get(&7)), (Some(&vec![2]), Some(&vec![1, 2])));
        map.discard(&7, |value| *value == 2);
        assert!(map.is_empty());
    }
}
