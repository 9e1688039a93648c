//! Maps instances to the names whose answers depend on their health.
//!
//! Names queried in many spellings (`q-s0`, `q-s0y0`, `q-a1s0`...) mostly depend on the same
//! instances. Each distinct set of instances is stored once for all names that share it, so a flood
//! of spellings costs only a few bytes per name.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    num::NonZeroU32,
    sync::Arc,
};

use hashbrown::{HashMap, HashSet};

/// Identifies a set of instances; reused once no name depends on the set.
pub(crate) type SetNumber = NonZeroU32;

/// Bytes per instance of a set: the address and its position in [`Dependents::by_instance`], including
/// the unused space of the B-tree.
const BYTES_PER_MEMBER: usize = size_of::<IpAddr>() + 3 * size_of::<(IpAddr, SetNumber)>() / 2;

/// Sets of instances, the names that share them, and the reverse index by instance.
#[derive(Debug, Default)]
pub(crate) struct Dependents {
    sets: BTreeMap<SetNumber, AddressSet>,
    /// The set with exactly these instances.
    by_members: HashMap<Arc<[IpAddr]>, SetNumber>,
    /// The sets that contain an instance.
    by_instance: BTreeSet<(IpAddr, SetNumber)>,
    /// Numbers below the highest one that identify no set.
    unused: Vec<SetNumber>,
    /// Number of members in all sets.
    members: usize,
}

#[derive(Debug)]
struct AddressSet {
    members: Arc<[IpAddr]>,
    /// Keys of the names whose answers depend on this set.
    keys: HashSet<u64>,
}

impl Dependents {
    /// Makes the answer of `key` depend on `instances` instead of on the set `old`. Returns `None`
    /// if there are no instances.
    pub(crate) fn assign(
        &mut self,
        key: u64,
        old: Option<SetNumber>,
        instances: &[IpAddr],
    ) -> Option<SetNumber> {
        if let Some(old) = old {
            // A change of health alone leaves the set as it is.
            if self
                .sets
                .get(&old)
                .is_some_and(|set| *set.members == *instances)
            {
                return Some(old);
            }
            self.release(key, old);
        }
        if instances.is_empty() {
            return None;
        }
        let number = match self.by_members.get(instances) {
            Some(&number) => number,
            None => self.insert(instances),
        };
        if let Some(set) = self.sets.get_mut(&number) {
            set.keys.insert(key);
        }
        Some(number)
    }

    /// Removes the dependency of `key` on a set, and the set if no name depends on it any more.
    pub(crate) fn release(&mut self, key: u64, number: SetNumber) {
        let Some(set) = self.sets.get_mut(&number) else {
            return;
        };
        set.keys.remove(&key);
        if !set.keys.is_empty() {
            return;
        }
        // A set without names is never looked for.
        if let Some(AddressSet { members, keys: _ }) = self.sets.remove(&number) {
            for &ip in &*members {
                self.by_instance.remove(&(ip, number));
            }
            self.by_members.remove(&members);
            self.members -= members.len();
            self.unused.push(number);
        }
    }

    pub(crate) fn keys(&self, instances: &[IpAddr]) -> BTreeSet<u64> {
        // A set with several of the instances is visited once.
        let mut numbers = BTreeSet::new();
        for &ip in instances {
            let of_instance = (ip, SetNumber::MIN)..=(ip, SetNumber::MAX);
            numbers.extend(
                self.by_instance
                    .range(of_instance)
                    .map(|&(_, number)| number),
            );
        }
        let mut keys = BTreeSet::new();
        for number in &numbers {
            if let Some(set) = self.sets.get(number) {
                keys.extend(set.keys.iter().copied());
            }
        }
        keys
    }

    /// Returns the size of all sets in bytes, including a set of `instances` even if it does not exist yet.
    pub(crate) fn weight_with(&self, instances: &[IpAddr]) -> usize {
        let new = if self.by_members.contains_key(instances) {
            0
        } else {
            instances.len()
        };
        (self.members + new) * BYTES_PER_MEMBER
    }

    /// Adds a set without names.
    fn insert(&mut self, instances: &[IpAddr]) -> SetNumber {
        // Reused ones first: numbers then never exceed the number of sets, and four bytes per name
        // suffice.
        let number = self.unused.pop().unwrap_or_else(|| {
            let number = u32::try_from(self.sets.len() + 1)
                .ok()
                .and_then(SetNumber::new);
            number.expect("the memory of sets is bounded")
        });
        let members: Arc<[IpAddr]> = instances.into();
        self.by_instance
            .extend(members.iter().map(|&ip| (ip, number)));
        self.members += members.len();
        self.by_members.insert(members.clone(), number);
        self.sets.insert(
            number,
            AddressSet {
                members,
                keys: HashSet::new(),
            },
        );
        number
    }
}

/// For [`super::table::fuzz`] and tests.
impl Dependents {
    /// Returns whether a name depends on a set, and the index leads from each of its instances to the set.
    pub(crate) fn depends(&self, key: u64, number: SetNumber) -> bool {
        let set = &self.sets[&number];
        set.keys.contains(&key)
            && set
                .members
                .iter()
                .all(|&ip| self.by_instance.contains(&(ip, number)))
    }

    pub(crate) fn names(&self) -> usize {
        self.sets.values().map(|set| set.keys.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns addresses with these last bytes.
    fn instances(ends: &[u8]) -> Vec<IpAddr> {
        ends.iter()
            .map(|&end| IpAddr::from([10, 0, 0, end]))
            .collect()
    }

    #[test]
    fn names_with_the_same_instances_share_a_set() {
        let mut dependents = Dependents::default();
        let all = instances(&[1, 2, 3]);
        let first = dependents.assign(7, None, &all);
        let alone = dependents.weight_with(&[]);
        assert_eq!(dependents.assign(8, None, &all), first);
        assert_eq!(dependents.weight_with(&[]), alone);
        assert_eq!(
            dependents.weight_with(&all),
            alone,
            "a set that is known adds nothing"
        );
        assert!(dependents.weight_with(&instances(&[1])) > alone);
        assert_eq!(dependents.keys(&instances(&[2])), BTreeSet::from([7, 8]));
    }

    #[test]
    fn set_leaves_with_last_name() {
        let mut dependents = Dependents::default();
        let set = dependents.assign(7, None, &instances(&[1, 2]));
        dependents.assign(8, None, &instances(&[2]));
        assert_eq!(
            dependents.assign(7, set, &instances(&[1, 2])),
            set,
            "nothing changes"
        );
        let set = dependents.assign(7, set, &instances(&[3]));
        assert_eq!(dependents.keys(&instances(&[1, 2])), BTreeSet::from([8]));
        assert_eq!(dependents.keys(&instances(&[3])), BTreeSet::from([7]));
        assert_eq!(dependents.assign(7, set, &[]), None);
        assert_eq!(dependents.keys(&instances(&[1, 2, 3])), BTreeSet::from([8]));
        assert_eq!(dependents.names(), 1);
    }
}
