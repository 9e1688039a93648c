//! Changes made by command (`instance add|remove|move`), applied on top of the inventory's files.
//!
//! Each change records the instance's state in the files at the time of the command. It applies
//! until the files contain the change, or until the instance changes there: the later edit wins.

use std::{collections::BTreeMap, net::IpAddr};

use serde::{Deserialize, Serialize};

use super::{
    InventoryError,
    file::{RawDeployment, RawGroup, RawInstance, RawInventory},
};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "change", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Change {
    Add {
        deployment: String,
        group: String,
        instance: RawInstance,
    },
    Remove {
        id: String,
    },
    /// Gives an instance another address.
    Move {
        id: String,
        /// The network; optional if the instance has only one.
        #[serde(default)]
        network: Option<String>,
        /// Address that replaces the current one.
        ip: IpAddr,
    },
}

/// Outstanding changes by instance id.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Changes {
    #[serde(default)]
    pub outstanding: BTreeMap<String, Outstanding>,
}

/// A change that the files do not contain yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Outstanding {
    /// The instance after the command; `None` if removed.
    pub wanted: Option<Placed>,
    /// The instance in the files at the time of the command; `None` if it was missing.
    pub files: Option<Placed>,
}

/// Reasons why a change no longer applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Settled {
    /// The files contain the change.
    Adopted,
    /// The files changed after the command.
    Superseded,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Placed {
    pub deployment: String,
    pub group: String,
    pub instance: RawInstance,
}

impl Changes {
    /// Records a change, given the files' present content.
    pub(crate) fn make(
        &mut self,
        change: Change,
        files: &RawInventory,
    ) -> Result<(), InventoryError> {
        let (id, wanted) = match change {
            Change::Add {
                deployment,
                group,
                instance,
            } => {
                // `add` must not move a machine that has records already.
                if self.find(&instance.id, files).is_some() {
                    return Err(InventoryError::new(
                        instance.id,
                        "the instance already exists; move or remove it",
                    ));
                }
                (
                    instance.id.clone(),
                    Some(Placed {
                        deployment,
                        group,
                        instance,
                    }),
                )
            }
            Change::Remove { id } => {
                self.find(&id, files).ok_or_else(|| unknown(&id))?;
                (id, None)
            }
            Change::Move { id, network, ip } => {
                let mut placed = self.find(&id, files).ok_or_else(|| unknown(&id))?;
                let networks = &mut placed.instance.networks;
                let only = networks
                    .keys()
                    .next()
                    .filter(|_| networks.len() == 1)
                    .cloned();
                let network = network.or(only).ok_or_else(|| {
                    InventoryError::new(&id, "it has several networks; choose one")
                })?;
                let Some(addresses) = networks.get_mut(&network) else {
                    return Err(InventoryError::new(
                        id,
                        format!("it is not on network {network}"),
                    ));
                };
                addresses.replace(ip);
                (id, Some(placed))
            }
        };
        // Kept with the change: when the files differ from it, they were edited after the command.
        let files = in_files(&id, files);
        self.outstanding.insert(id, Outstanding { wanted, files });
        Ok(())
    }

    /// Returns the files' content with all changes that still apply.
    pub(crate) fn over(&self, mut files: RawInventory) -> RawInventory {
        let mut open: BTreeMap<&str, Option<Placed>> = BTreeMap::new();
        for (id, change) in &self.outstanding {
            if change.settled(in_files(id, &files).as_ref()).is_none() {
                open.insert(id, change.wanted.clone());
            }
        }
        for deployment in &mut files.deployments {
            for group in &mut deployment.instance_groups {
                let mut position = 0;
                group.instances.retain_mut(|instance| {
                    // The index is the position in the file, removed instances included.
                    instance.index.get_or_insert(position);
                    position += 1;
                    match open.remove(instance.id.as_str()) {
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
        // The entries left in the map are in no file, so these are new instances.
        for placed in open.into_values().flatten() {
            group_of(&mut files, &placed)
                .instances
                .push(placed.instance);
        }
        files
    }

    /// Drops the changes that no longer apply and returns their ids with the reason.
    pub(crate) fn settle(&mut self, files: &RawInventory) -> Vec<(String, Settled)> {
        let mut settled = Vec::new();
        self.outstanding.retain(
            |id, change| match change.settled(in_files(id, files).as_ref()) {
                None => true,
                Some(reason) => {
                    settled.push((id.clone(), reason));
                    false
                }
            },
        );
        settled
    }

    /// Returns an instance with its change applied and its index filled in.
    fn find(&self, id: &str, files: &RawInventory) -> Option<Placed> {
        let now = in_files(id, files);
        match self.outstanding.get(id) {
            Some(change) if change.settled(now.as_ref()).is_none() => change.wanted.clone(),
            _ => {
                let mut placed = now?;
                placed.instance.index = placed.instance.index.or(position(id, files));
                Some(placed)
            }
        }
    }
}

impl Outstanding {
    /// Returns why the change no longer applies; `None` if it does. `now` is the instance in the files.
    fn settled(&self, now: Option<&Placed>) -> Option<Settled> {
        let same = match (&self.wanted, now) {
            (None, None) => true,
            (Some(wanted), Some(now)) => {
                // Not the whole instance: files may leave out the index, or name another agent.
                wanted.instance.networks == now.instance.networks
                    && wanted.instance.az == now.instance.az
                    && (&wanted.deployment, &wanted.group) == (&now.deployment, &now.group)
            }
            _ => false,
        };
        match (same, self.files.as_ref() == now) {
            (true, _) => Some(Settled::Adopted),
            (false, true) => None,
            (false, false) => Some(Settled::Superseded),
        }
    }
}

fn unknown(id: &str) -> InventoryError {
    InventoryError::new(id, "the instance does not exist")
}

fn in_files(id: &str, files: &RawInventory) -> Option<Placed> {
    files.deployments.iter().find_map(|deployment| {
        deployment.instance_groups.iter().find_map(|group| {
            let instance = group
                .instances
                .iter()
                .find(|instance| instance.id == id)?
                .clone();
            Some(Placed {
                deployment: deployment.name.clone(),
                group: group.name.clone(),
                instance,
            })
        })
    })
}

/// Returns an instance's position in its group: its index unless the file gives one.
fn position(id: &str, files: &RawInventory) -> Option<u64> {
    let mut groups = files
        .deployments
        .iter()
        .flat_map(|deployment| &deployment.instance_groups);
    let position = groups.find_map(|group| {
        group
            .instances
            .iter()
            .position(|instance| instance.id == id)
    });
    position.map(|position| position as u64)
}

/// Returns the instance group of a new instance; creates it if it is missing.
fn group_of<'a>(files: &'a mut RawInventory, placed: &Placed) -> &'a mut RawGroup {
    let deployments = &mut files.deployments;
    let at = deployments
        .iter()
        .position(|deployment| deployment.name == placed.deployment);
    let at = at.unwrap_or_else(|| {
        deployments.push(RawDeployment {
            name: placed.deployment.clone(),
            instance_groups: Vec::new(),
        });
        deployments.len() - 1
    });
    let groups = &mut deployments[at].instance_groups;
    let at = groups.iter().position(|group| group.name == placed.group);
    let at = at.unwrap_or_else(|| {
        groups.push(RawGroup {
            name: placed.group.clone(),
            links: Vec::new(),
            instances: Vec::new(),
        });
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

    fn change(text: &str) -> Change {
        serde_json::from_str(text).unwrap()
    }

    /// Returns the id, index and first address of each instance of the only group.
    fn rows(raw: &RawInventory) -> Vec<(String, Option<u64>, String)> {
        let instances = &raw.deployments[0].instance_groups[0].instances;
        instances
            .iter()
            .map(|one: &RawInstance| (one.id.clone(), one.index, one.networks["n"].to_string()))
            .collect()
    }

    #[test]
    fn files_adopt_changes() {
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
        let expected: Vec<_> = expected
            .map(|(id, index, ip)| (id.to_owned(), Some(index), ip.to_owned()))
            .to_vec();
        assert_eq!(rows(&now), expected);
        assert_eq!(changes.clone().settle(&files()), []);
        assert_eq!(changes.settle(&now).len(), 3);
        assert_eq!(changes, Changes::default());
    }

    #[test]
    fn later_file_change_wins() {
        let with = |text: &str| super::super::file::read(text.as_bytes()).unwrap();
        let group = |instances: &str| {
            with(&format!(
                "deployments: [{{name: d, instance_groups: [{{name: g, instances: [{instances}]}}]}}]"
            ))
        };
        let mut changes = Changes::default();
        changes
            .make(
                change(r#"{"change":"move","id":"b","ip":"10.0.0.9"}"#),
                &files(),
            )
            .unwrap();
        changes
            .make(change(r#"{"change":"remove","id":"a"}"#), &files())
            .unwrap();
        // Another instance in front moves the positions and does not affect b.
        let unrelated = group(
            "{id: z, networks: {n: 10.0.0.7}}, {id: a, networks: {n: 10.0.0.1}}, {id: b, networks: {n: 10.0.0.2}}",
        );
        assert_eq!(changes.clone().settle(&unrelated), []);
        // Both edits follow the commands.
        let later = group("{id: a, networks: {n: 10.0.0.8}}, {id: b, networks: {n: 10.0.0.3}}");
        let expected = [("a", 0, "10.0.0.8"), ("b", 1, "10.0.0.3")];
        let expected = expected
            .map(|(id, index, ip)| (id.to_owned(), Some(index), ip.to_owned()))
            .to_vec();
        assert_eq!(rows(&changes.over(later.clone())), expected);
        let superseded = ["a", "b"]
            .map(|id| (id.to_owned(), Settled::Superseded))
            .to_vec();
        assert_eq!(changes.settle(&later), superseded);
    }

    #[test]
    fn removed_instance_can_return() {
        let mut changes = Changes::default();
        changes
            .make(change(r#"{"change":"remove","id":"a"}"#), &files())
            .unwrap();
        let mut without = files();
        without.deployments[0].instance_groups[0]
            .instances
            .remove(0);
        assert_eq!(
            changes.settle(&without),
            [("a".to_owned(), Settled::Adopted)]
        );
        assert_eq!(
            changes.over(files()).deployments[0].instance_groups[0]
                .instances
                .len(),
            2
        );
    }

    #[test]
    fn unknown_instances_are_refused() {
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

    #[test]
    fn new_instances_create_their_groups() {
        let mut changes = Changes::default();
        for (id, deployment, group) in [
            ("c", "d", "g"),
            ("e", "d", "h"),
            ("f", "d2", "g"),
            ("h", "d2", "g"),
        ] {
            let text = format!(
                r#"{{"change":"add","deployment":"{deployment}","group":"{group}","instance":{{"id":"{id}","index":7,"networks":{{"n":"10.0.1.1"}}}}}}"#
            );
            changes.make(change(&text), &files()).unwrap();
        }
        let mut places = Vec::new();
        for deployment in changes.over(files()).deployments {
            for group in deployment.instance_groups {
                for instance in group.instances {
                    places.push(format!(
                        "{}/{}/{}",
                        deployment.name, group.name, instance.id
                    ));
                }
            }
        }
        assert_eq!(
            places,
            ["d/g/a", "d/g/b", "d/g/c", "d/h/e", "d2/g/f", "d2/g/h"]
        );
    }

    #[test]
    fn instance_moves_on_its_only_network() {
        let two = super::super::file::read(
            b"deployments: [{name: d, instance_groups: [{name: g, instances: [{id: a, networks: {m: 10.0.0.1, n: 10.1.0.1}}]}]}]",
        )
        .unwrap();
        let to = |network: &str| {
            change(&format!(
                r#"{{"change":"move","id":"a"{network},"ip":"10.1.0.9"}}"#
            ))
        };
        assert!(Changes::default().make(to(""), &two).is_err());
        let mut changes = Changes::default();
        changes.make(to(r#","network":"n""#), &two).unwrap();
        let networks = &changes.over(two).deployments[0].instance_groups[0].instances[0].networks;
        let [m, n] = [&networks["m"], &networks["n"]].map(|addresses| addresses.to_string());
        assert_eq!((&*m, &*n), ("10.0.0.1", "10.1.0.9"));
    }

    #[test]
    fn files_adopt_the_whole_change() {
        let added = change(
            r#"{"change":"add","deployment":"d","group":"g","instance":{"id":"c","az":"z1","networks":{"n":"10.0.0.3"}}}"#,
        );
        for (group, instance, reason) in [
            (
                "g",
                "{id: c, az: z1, networks: {n: 10.0.0.3}}",
                Settled::Adopted,
            ),
            ("g", "{id: c, networks: {n: 10.0.0.3}}", Settled::Superseded),
            (
                "g",
                "{id: c, az: z1, networks: {n: 10.0.0.4}}",
                Settled::Superseded,
            ),
            (
                "h",
                "{id: c, az: z1, networks: {n: 10.0.0.3}}",
                Settled::Superseded,
            ),
        ] {
            let mut changes = Changes::default();
            changes.make(added.clone(), &files()).unwrap();
            assert_eq!(changes.settle(&files()), []);
            let text = format!(
                "deployments: [{{name: d, instance_groups: [{{name: {group}, instances: [{instance}]}}]}}]"
            );
            let later = super::super::file::read(text.as_bytes()).unwrap();
            let settled = changes.settle(&later);
            assert_eq!(settled, [("c".to_owned(), reason)], "{group} {instance}");
            assert_eq!(changes.settle(&later), []);
        }
    }
}
