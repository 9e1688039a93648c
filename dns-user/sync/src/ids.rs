//! Numeric ids, each allocated once and never reused.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Type of an instance group's id.
pub const INSTANCE_GROUP: &str = "instance-group";

/// Type of a link group's id.
pub const LINK: &str = "link";

/// All ids ever allocated. Each kind is counted separately from 1.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ids {
    /// Availability zones by name.
    zones: BTreeMap<String, u64>,
    networks: BTreeMap<String, u64>,
    /// Groups by deployment, type and name; instance groups and links share the numbers.
    groups: BTreeMap<String, BTreeMap<String, BTreeMap<String, u64>>>,
    instances: BTreeMap<String, u64>,
    /// Highest number among the groups.
    last_group: u64,
}

impl Ids {
    /// Returns the id of an availability zone; allocates it if missing.
    pub fn zone(&mut self, name: &str) -> u64 {
        allocate(&mut self.zones, name)
    }

    /// Returns the id of a network; allocates it if missing.
    pub fn network(&mut self, name: &str) -> u64 {
        allocate(&mut self.networks, name)
    }

    /// Returns the number of an instance; allocates it if missing.
    pub fn instance(&mut self, id: &str) -> u64 {
        allocate(&mut self.instances, id)
    }

    /// Returns the id of an availability zone, if allocated.
    pub fn find_zone(&self, name: &str) -> Option<u64> {
        self.zones.get(name).copied()
    }

    /// Returns the id of a network, if allocated.
    pub fn find_network(&self, name: &str) -> Option<u64> {
        self.networks.get(name).copied()
    }

    /// Returns the number of an instance, if allocated.
    pub fn find_instance(&self, id: &str) -> Option<u64> {
        self.instances.get(id).copied()
    }

    /// Returns the id of a group, if allocated.
    pub fn find_group(&self, deployment: &str, kind: &str, name: &str) -> Option<u64> {
        self.groups.get(deployment)?.get(kind)?.get(name).copied()
    }

    /// Returns the id of a group; allocates it if missing. `kind` is [`INSTANCE_GROUP`] or
    /// [`LINK`].
    pub fn group(&mut self, deployment: &str, kind: &str, name: &str) -> u64 {
        let of_kind =
            self.groups.entry(deployment.to_owned()).or_default().entry(kind.to_owned()).or_default();
        *of_kind.entry(name.to_owned()).or_insert_with(|| {
            self.last_group += 1;
            self.last_group
        })
    }
}

/// Returns the number of a name; allocates it if missing. Entries are never removed, so the number
/// of entries is the highest number.
fn allocate(numbers: &mut BTreeMap<String, u64>, name: &str) -> u64 {
    if let Some(number) = numbers.get(name) {
        return *number;
    }
    let number = numbers.len() as u64 + 1;
    numbers.insert(name.to_owned(), number);
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_given_once() {
        let mut ids = Ids::default();
        assert_eq!((ids.zone("z1"), ids.zone("z2"), ids.zone("z1")), (1, 2, 1));
        assert_eq!((ids.group("d", INSTANCE_GROUP, "g"), ids.group("d", LINK, "g")), (1, 2));
        assert_eq!((ids.group("e", INSTANCE_GROUP, "g"), ids.group("d", LINK, "g")), (3, 2));
        let text = serde_json::to_vec(&ids).unwrap();
        let mut again: Ids = serde_json::from_slice(&text).unwrap();
        assert_eq!((again.group("f", LINK, "x"), again.zone("z3"), again.network("n")), (4, 3, 1));
    }
}
