//! Which names depend on the health of which instances.
//!
//! Names that were asked for in many spellings (`q-s0`, `q-s0y0`, `q-a1s0`...) mostly
//! depend on the same instances. Each distinct set of instances is kept once, however
//! many names share it, so that a flood of spellings costs a few bytes a name.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    num::NonZeroU64,
    sync::Arc,
};

use hashbrown::{HashMap, HashSet};

/// Number of a set of instances.
pub(crate) type SetNumber = NonZeroU64;

/// Bytes that one instance of a set costs: the address itself and its place in
/// [`Dependents::by_instance`], with what a B-tree leaves free.
const BYTES_PER_MEMBER: usize = size_of::<IpAddr>() + 3 * size_of::<(IpAddr, SetNumber)>() / 2;

/// Sets of instances, the names that share them, and the way back from an instance.
#[derive(Debug, Default)]
pub(crate) struct Dependents {
    /// All sets.
    sets: BTreeMap<SetNumber, Set>,
    /// The set with exactly these instances.
    by_members: HashMap<Arc<[IpAddr]>, SetNumber>,
    /// Which sets an instance is in.
    by_instance: BTreeSet<(IpAddr, SetNumber)>,
    /// How many there ever were.
    made: u64,
    /// Members of all sets together.
    members: usize,
}

/// One set.
#[derive(Debug)]
struct Set {
    /// The instances.
    members: Arc<[IpAddr]>,
    /// Keys of the names whose answers depend on them.
    keys: HashSet<u64>,
}

impl Dependents {
    /// Makes the answer of `key` depend on `instances`, and no longer on the set
    /// `old`. `None`: it depends on no instance.
    pub(crate) fn assign(
        &mut self,
        key: u64,
        old: Option<SetNumber>,
        instances: &[IpAddr],
    ) -> Option<SetNumber> {
        if let Some(old) = old {
            if self.sets.get(&old).is_some_and(|set| *set.members == *instances) {
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

    /// Ends the dependency of `key` on a set; a set that nothing depends on goes.
    pub(crate) fn release(&mut self, key: u64, number: SetNumber) {
        let Some(set) = self.sets.get_mut(&number) else { return };
        set.keys.remove(&key);
        if !set.keys.is_empty() {
            return;
        }
        if let Some(Set { members, keys: _ }) = self.sets.remove(&number) {
            for &ip in &*members {
                self.by_instance.remove(&(ip, number));
            }
            self.by_members.remove(&members);
            self.members -= members.len();
        }
    }

    /// Keys of the names that depend on any of these instances, each once.
    pub(crate) fn keys(&self, instances: &[IpAddr]) -> BTreeSet<u64> {
        let numbers: BTreeSet<SetNumber> = instances
            .iter()
            .flat_map(|&ip| {
                self.by_instance.range((ip, SetNumber::MIN)..=(ip, SetNumber::MAX)).map(|&(_, number)| number)
            })
            .collect();
        let sets = numbers.iter().filter_map(|number| self.sets.get(number));
        sets.flat_map(|set| set.keys.iter().copied()).collect()
    }

    /// Bytes that the sets take up, and what one more would add: nothing, if it is known.
    pub(crate) fn weight_with(&self, instances: &[IpAddr]) -> usize {
        let new = if self.by_members.contains_key(instances) { 0 } else { instances.len() };
        (self.members + new) * BYTES_PER_MEMBER
    }

    /// Adds a set without names.
    fn insert(&mut self, instances: &[IpAddr]) -> SetNumber {
        self.made += 1;
        let number = SetNumber::new(self.made).expect("no process lives for so many sets");
        let members: Arc<[IpAddr]> = instances.into();
        self.by_instance.extend(members.iter().map(|&ip| (ip, number)));
        self.members += members.len();
        self.by_members.insert(members.clone(), number);
        self.sets.insert(number, Set { members, keys: HashSet::new() });
        number
    }
}

/// For [`super::table::fuzzing`] and tests.
impl Dependents {
    /// Whether a name depends on a set, and each of its instances leads back to the set.
    pub(crate) fn depends(&self, key: u64, number: SetNumber) -> bool {
        let set = &self.sets[&number];
        set.keys.contains(&key) && set.members.iter().all(|&ip| self.by_instance.contains(&(ip, number)))
    }

    /// How many names depend on something.
    pub(crate) fn names(&self) -> usize {
        self.sets.values().map(|set| set.keys.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Addresses that end so.
    fn instances(ends: &[u8]) -> Vec<IpAddr> {
        ends.iter().map(|&end| IpAddr::from([10, 0, 0, end])).collect()
    }

    #[test]
    fn names_with_the_same_instances_share_a_set() {
        let mut dependents = Dependents::default();
        let all = instances(&[1, 2, 3]);
        let first = dependents.assign(7, None, &all);
        let alone = dependents.weight_with(&[]);
        assert_eq!(dependents.assign(8, None, &all), first);
        assert_eq!(dependents.weight_with(&[]), alone);
        assert_eq!(dependents.weight_with(&all), alone, "a set that is known adds nothing");
        assert!(dependents.weight_with(&instances(&[1])) > alone);
        assert_eq!(dependents.keys(&instances(&[2])), BTreeSet::from([7, 8]));
    }

    #[test]
    fn a_set_goes_with_its_last_name() {
        let mut dependents = Dependents::default();
        let set = dependents.assign(7, None, &instances(&[1, 2]));
        dependents.assign(8, None, &instances(&[2]));
        assert_eq!(dependents.assign(7, set, &instances(&[1, 2])), set, "nothing changes");
        let set = dependents.assign(7, set, &instances(&[3]));
        assert_eq!(dependents.keys(&instances(&[1, 2])), BTreeSet::from([8]));
        assert_eq!(dependents.keys(&instances(&[3])), BTreeSet::from([7]));
        assert_eq!(dependents.assign(7, set, &[]), None);
        assert_eq!(dependents.keys(&instances(&[1, 2, 3])), BTreeSet::from([8]));
        assert_eq!(dependents.names(), 1);
    }
}
