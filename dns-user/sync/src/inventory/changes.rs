//! Changes by command: `instance add|remove|move`, laid over what the files say.
//!
//! A change wins over the files until they say the same; then it is dropped.

use std::{collections::BTreeMap, net::IpAddr};

use serde::{Deserialize, Serialize};

use super::{
    InventoryError,
    file::{RawDeployment, RawGroup, RawInstance, RawInventory},
};

/// A change to one instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "change", rename_all = "snake_case", deny_unknown_fields)]
pub enum Change {
    /// It is there.
    Add {
        /// Deployment.
        deployment: String,
        /// Instance group.
        group: String,
        /// The instance.
        instance: RawInstance,
    },
    /// It is gone.
    Remove {
        /// Its id.
        id: String,
    },
    /// It has another address.
    Move {
        /// Its id.
        id: String,
        /// Network; may be left out where it has but one.
        #[serde(default)]
        network: Option<String>,
        /// Its new address.
        ip: IpAddr,
    },
}

/// Outstanding changes by instance id: the last one of each kind that matters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changes {
    /// Instances that are there, or gone (`None`).
    #[serde(default)]
    pub instances: BTreeMap<String, Option<Placed>>,
}

/// An instance with its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placed {
    /// Deployment.
    pub deployment: String,
    /// Instance group.
    pub group: String,
    /// The instance.
    pub instance: RawInstance,
}

impl Changes {
    /// Takes in a change; `files` is what the files say.
    pub fn make(&mut self, change: Change, files: &RawInventory) -> Result<(), InventoryError> {
        match change {
            Change::Add { deployment, group, instance } => {
                if self.find(&instance.id, files).is_some() {
                    return Err(InventoryError::new(
                        instance.id,
                        "there is such an instance; move or remove it",
                    ));
                }
                let id = instance.id.clone();
                self.instances.insert(id, Some(Placed { deployment, group, instance }));
            }
            Change::Remove { id } => {
                self.find(&id, files).ok_or_else(|| unknown(&id))?;
                self.instances.insert(id, None);
            }
            Change::Move { id, network, ip } => {
                let mut placed = self.find(&id, files).ok_or_else(|| unknown(&id))?;
                let networks = &mut placed.instance.networks;
                let only = networks.keys().next().filter(|_| networks.len() == 1).cloned();
                let network = network
                    .or(only)
                    .ok_or_else(|| InventoryError::new(&id, "it has several networks; say which one"))?;
                let Some(address) = networks.get_mut(&network) else {
                    return Err(InventoryError::new(id, format!("it is not on network {network}")));
                };
                *address = ip;
                self.instances.insert(id, Some(placed));
            }
        }
        Ok(())
    }

    /// What the files say with the changes laid over.
    pub fn over(&self, mut files: RawInventory) -> RawInventory {
        let mut open = self.instances.clone();
        for deployment in &mut files.deployments {
            for group in &mut deployment.instance_groups {
                let mut position = 0;
                group.instances.retain_mut(|instance| {
                    // The index is that of the file, whoever is gone.
                    instance.index.get_or_insert(position);
                    position += 1;
                    match open.remove(&instance.id) {
                        None => true,
                        Some(None) => false,
                        Some(Some(placed)) => {
                            *instance = placed.instance;
                            true
                        }
                    }
                });
            }
        }
        for placed in open.into_values().flatten() {
            group_of(&mut files, &placed).instances.push(placed.instance);
        }
        files
    }

    /// Drops the changes that the files have by now; says how many.
    pub fn settle(&mut self, files: &RawInventory) -> usize {
        let before = self.instances.len();
        self.instances.retain(|id, change| {
            let said = in_files(id, files);
            match (change, said) {
                (None, None) => false,
                (Some(placed), Some(said)) => {
                    placed.instance.networks != said.instance.networks
                        || placed.instance.az != said.instance.az
                }
                _ => true,
            }
        });
        before - self.instances.len()
    }

    /// An instance as it is with the changes.
    fn find(&self, id: &str, files: &RawInventory) -> Option<Placed> {
        match self.instances.get(id) {
            Some(change) => change.clone(),
            None => in_files(id, files),
        }
    }
}

/// The error about an instance that is not there.
fn unknown(id: &str) -> InventoryError {
    InventoryError::new(id, "there is no such instance")
}

/// An instance as the files have it.
fn in_files(id: &str, files: &RawInventory) -> Option<Placed> {
    files.deployments.iter().find_map(|deployment| {
        deployment.instance_groups.iter().find_map(|group| {
            let position = group.instances.iter().position(|instance| instance.id == id)?;
            let mut instance = group.instances[position].clone();
            instance.index.get_or_insert(position as u64);
            Some(Placed { deployment: deployment.name.clone(), group: group.name.clone(), instance })
        })
    })
}

/// The instance group of a new instance, made where there is none.
fn group_of<'a>(files: &'a mut RawInventory, placed: &Placed) -> &'a mut RawGroup {
    let deployments = &mut files.deployments;
    let at = deployments.iter().position(|deployment| deployment.name == placed.deployment);
    let at = at.unwrap_or_else(|| {
        deployments.push(RawDeployment { name: placed.deployment.clone(), instance_groups: Vec::new() });
        deployments.len() - 1
    });
    let groups = &mut deployments[at].instance_groups;
    let at = groups.iter().position(|group| group.name == placed.group);
    let at = at.unwrap_or_else(|| {
        groups.push(RawGroup { name: placed.group.clone(), links: Vec::new(), instances: Vec::new() });
        groups.len() - 1
    });
    &mut groups[at]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two instances, `a` and `b`.
    fn files() -> RawInventory {
        super::super::file::read(
            b"deployments: [{name: d, instance_groups: [{name: g, instances: [{id: a, networks: {n: 10.0.0.1}}, {id: b, networks: {n: 10.0.0.2}}]}]}]",
        )
        .unwrap()
    }

    /// A change from its JSON.
    fn change(text: &str) -> Change {
        serde_json::from_str(text).unwrap()
    }

    /// Ids, indexes and first addresses of the only group.
    fn told(raw: &RawInventory) -> Vec<(String, Option<u64>, String)> {
        let instances = &raw.deployments[0].instance_groups[0].instances;
        let told = |one: &RawInstance| (one.id.clone(), one.index, one.networks["n"].to_string());
        instances.iter().map(told).collect()
    }

    #[test]
    fn changes_win_until_the_files_say_the_same() {
        let mut changes = Changes::default();
        for text in [
            r#"{"change":"remove","id":"a"}"#,
            r#"{"change":"move","id":"b","ip":"10.0.0.9"}"#,
            r#"{"change":"add","deployment":"d","group":"g","instance":{"id":"c","index":7,"networks":{"n":"10.0.0.3"}}}"#,
        ] {
            changes.make(change(text), &files()).unwrap();
        }
        let now = changes.over(files());
        let expected = [("b", 1, "10.0.0.9"), ("c", 7, "10.0.0.3")];
        let expected: Vec<_> =
            expected.map(|(id, index, ip)| (id.to_owned(), Some(index), ip.to_owned())).to_vec();
        assert_eq!(told(&now), expected);
        assert_eq!(changes.clone().settle(&files()), 0);
        assert_eq!(changes.settle(&now), 3);
        assert_eq!(changes, Changes::default());
    }

    #[test]
    fn what_is_not_there_cannot_be_changed() {
        let mut changes = Changes::default();
        for text in [
            r#"{"change":"remove","id":"x"}"#,
            r#"{"change":"move","id":"x","ip":"10.0.0.9"}"#,
            r#"{"change":"move","id":"a","network":"m","ip":"10.0.0.9"}"#,
            r#"{"change":"add","deployment":"d","group":"g","instance":{"id":"a"}}"#,
        ] {
            assert!(changes.make(change(text), &files()).is_err(), "{text}");
        }
    }
}
