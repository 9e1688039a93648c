//! The inventory: the operator's description of the fleet, validated.
//!
//! Raw files ([`mod@file`]) are parsed into [`Inventory`], which is always valid: names have
//! a canonical form, ids are unique, addresses are parsed, aliases are complete.

pub(crate) mod changes;
pub(crate) mod file;

use std::{
    collections::{HashMap, HashSet},
    net::IpAddr,
};

use serde::{Deserialize, Serialize};

use self::file::RawInventory;
use dns_core::link_address::canonical;

/// A validated inventory, in the order of the files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Inventory {
    /// Domain of all names; `bosh` by default.
    pub domain: String,
    /// Whether `/etc/hosts` also gets names with the index in place of the id.
    pub index_records: bool,
    pub instances: Vec<Instance>,
    pub links: Vec<Link>,
}

/// One instance with at least one address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Instance {
    /// Id of the instance; a director uses UUIDs.
    pub id: String,
    pub index: u64,
    pub deployment: String,
    pub group: String,
    pub zone: Option<String>,
    /// Id of the agent on the VM, if there is one.
    pub agent: Option<String>,
    /// Addresses with the name of their network; sorted by it. A network can have one of each family.
    pub networks: Vec<(String, IpAddr)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub deployment: String,
    pub group: String,
    pub name: String,
    pub kind: String,
    /// Aliases that resolve to the link's instances.
    pub aliases: Vec<Alias>,
}

impl Instance {
    /// Returns whether the instance has an address of the same family on a network.
    fn is_on(&self, network: &str, like: IpAddr) -> bool {
        self.networks
            .iter()
            .any(|(name, address)| name == network && address.is_ipv4() == like.is_ipv4())
    }
}

impl Link {
    /// Returns whether both are the same link, perhaps with other aliases.
    fn is_same(&self, other: &Self) -> bool {
        self.deployment == other.deployment
            && self.group == other.group
            && self.name == other.name
            && self.kind == other.kind
    }

    pub(crate) fn group_name(&self) -> String {
        format!("{}-{}", self.name, self.kind)
    }
}

/// An alias of a link; its values are passed through as in a director's manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Alias {
    /// Queried name; `_` is the placeholder.
    pub domain: String,
    /// Health filter: `smart`, `healthy`, `unhealthy`, `all`.
    #[serde(default)]
    pub health_filter: Option<String>,
    /// `asynchronous` (the default) or `synchronous`.
    #[serde(default)]
    pub initial_health_check: Option<String>,
    /// Meaning of `_`: `uuid`, `index`, `az` (`availability_zone`), `network`.
    #[serde(default)]
    pub placeholder_type: Option<String>,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{place}: {problem}")]
pub(crate) struct InventoryError {
    /// Path of the mistake: `deployment/group/...`.
    pub place: String,
    /// The mistake and its remedy.
    pub problem: String,
}

impl InventoryError {
    pub(crate) fn new(place: impl Into<String>, problem: impl Into<String>) -> Self {
        Self {
            place: place.into(),
            problem: problem.into(),
        }
    }
}

impl Inventory {
    /// Validates the merged content of the files.
    pub(crate) fn parse(raw: RawInventory) -> Result<Self, InventoryError> {
        let RawInventory {
            domain,
            index_records,
            deployments,
        } = raw;
        let domain = domain.unwrap_or_else(|| "bosh".to_owned());
        if dns_core::name::Name::from_text(&domain).is_err() || domain.is_empty() {
            return Err(InventoryError::new(
                "domain",
                format!("{domain:?} is not a domain name"),
            ));
        }
        let mut checked = Self {
            domain: domain.trim_end_matches('.').to_owned(),
            index_records: index_records.unwrap_or(false),
            instances: Vec::new(),
            links: Vec::new(),
        };
        for deployment in deployments {
            for group in deployment.instance_groups {
                checked.add_group(&deployment.name, group)?;
            }
        }
        // At the end: deployments share ids and addresses.
        checked.check_unique()?;
        Ok(checked)
    }

    /// Returns whether something of `before` is missing: an instance, one of its networks, a link or an
    /// alias. An incomplete file can be the cause.
    pub(crate) fn is_cut(&self, before: &Self) -> bool {
        let mut instances: HashMap<&str, &Instance> = HashMap::new();
        for instance in &self.instances {
            instances.insert(&instance.id, instance);
        }
        let lost = before.instances.iter().any(|old| {
            let new = instances.get(old.id.as_str());
            // Another address is a change; an address that is missing may be the end of a file.
            new.is_none_or(|new| {
                old.networks
                    .iter()
                    .any(|(network, at)| !new.is_on(network, *at))
            })
        });
        lost || before.links.iter().any(|old| {
            let new = self.links.iter().find(|new| new.is_same(old));
            new.is_none_or(|new| old.aliases.iter().any(|alias| !new.aliases.contains(alias)))
        })
    }

    /// Adds everything of `before` that is missing. An error if both together are no inventory.
    pub(crate) fn keeping(mut self, before: &Self) -> Result<Self, InventoryError> {
        let positions: HashMap<String, usize> = self
            .instances
            .iter()
            .enumerate()
            .map(|(at, instance)| (instance.id.clone(), at))
            .collect();
        for old in &before.instances {
            let Some(at) = positions.get(&old.id) else {
                self.instances.push(old.clone());
                continue;
            };
            let new = &mut self.instances[*at];
            for (network, address) in &old.networks {
                if !new.is_on(network, *address) {
                    new.networks.push((network.clone(), *address));
                }
            }
            new.networks.sort();
        }
        for old in &before.links {
            match self.links.iter_mut().find(|new| new.is_same(old)) {
                Some(new) => {
                    let missing = old
                        .aliases
                        .iter()
                        .filter(|alias| !new.aliases.contains(alias));
                    let missing: Vec<Alias> = missing.cloned().collect();
                    new.aliases.extend(missing);
                }
                None => self.links.push(old.clone()),
            }
        }
        self.check_unique()?;
        Ok(self)
    }

    /// Validates and adds an instance group.
    fn add_group(&mut self, deployment: &str, group: file::RawGroup) -> Result<(), InventoryError> {
        let place = format!("{deployment}/{}", group.name);
        named("deployment", deployment, &place)?;
        named("instance group", &group.name, &place)?;
        for raw in group.links {
            let place = format!("{place}/{}", raw.name);
            if raw.name.is_empty() || raw.kind.is_empty() {
                return Err(InventoryError::new(place, "a link needs a name and a type"));
            }
            for alias in &raw.aliases {
                check_alias(&place, alias)?;
            }
            self.links.push(Link {
                deployment: deployment.to_owned(),
                group: group.name.clone(),
                name: raw.name,
                kind: raw.kind,
                aliases: raw.aliases,
            });
        }
        for (position, raw) in group.instances.into_iter().enumerate() {
            let place = format!("{place}/{}", raw.id);
            // It becomes the first label of the instance's name.
            token("id", &raw.id, &place)?;
            if let Some(agent) = &raw.agent_id {
                // It becomes a token of a subject: a dot or a wildcard would address other agents.
                token("agent_id", agent, &place)?;
            }
            if raw.networks.is_empty() {
                let problem = "it has no address; add `networks: {NAME: ADDRESS}`";
                return Err(InventoryError::new(place, problem));
            }
            let mut networks = Vec::new();
            for (network, addresses) in raw.networks {
                named("network", &network, &place)?;
                for address in addresses.iter() {
                    networks.push((network.clone(), address));
                }
            }
            self.instances.push(Instance {
                // Queries are compared in lower case (RFC 4343).
                id: raw.id.to_ascii_lowercase(),
                index: raw.index.unwrap_or(position as u64),
                deployment: deployment.to_owned(),
                group: group.name.clone(),
                zone: raw.az,
                agent: raw.agent_id,
                networks,
            });
        }
        Ok(())
    }

    /// Checks that each id, agent and address belongs to a single instance.
    fn check_unique(&self) -> Result<(), InventoryError> {
        let mut ids = HashSet::new();
        let mut agents = HashSet::new();
        let mut addresses = HashSet::new();
        for instance in &self.instances {
            let place = format!("{}/{}/{}", instance.deployment, instance.group, instance.id);
            if !ids.insert(&instance.id) {
                return Err(InventoryError::new(place, "another instance has this id"));
            }
            if instance
                .agent
                .as_ref()
                .is_some_and(|agent| !agents.insert(agent))
            {
                return Err(InventoryError::new(
                    place,
                    "another instance has this agent_id",
                ));
            }
            for (network, address) in &instance.networks {
                // A stale name would resolve to an instance of another deployment: operators have
                // reported that.
                if !addresses.insert((network, address)) {
                    let problem =
                        format!("another instance has {address} on network {network}; remove one");
                    return Err(InventoryError::new(place, problem));
                }
            }
        }
        Ok(())
    }
}

/// Checks that a text is valid as a token of a NATS subject and as a label of a name.
fn token(what: &str, text: &str, place: &str) -> Result<(), InventoryError> {
    if (1..=63).contains(&text.len())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    {
        return Ok(());
    }
    let problem = format!("{what} {text:?} must have 1 to 63 letters, digits, `-` or `_`");
    Err(InventoryError::new(place, problem))
}

fn named(what: &str, text: &str, place: &str) -> Result<String, InventoryError> {
    canonical(text)
        .map_err(|problem| InventoryError::new(place, format!("{what} {text:?}: {problem}")))
}

/// Checks an alias as a director does.
fn check_alias(place: &str, alias: &Alias) -> Result<(), InventoryError> {
    let Alias {
        domain,
        health_filter,
        initial_health_check,
        placeholder_type,
    } = alias;
    let place = format!("{place}/alias {domain}");
    let filters = ["smart", "healthy", "unhealthy", "all"];
    let checks = ["asynchronous", "synchronous"];
    let placeholders = ["uuid", "index", "az", "availability_zone", "network"];
    for (what, value, allowed) in [
        ("health_filter", health_filter, &filters[..]),
        ("initial_health_check", initial_health_check, &checks),
        ("placeholder_type", placeholder_type, &placeholders),
    ] {
        if let Some(value) = value
            && !allowed.contains(&value.as_str())
        {
            let problem = format!("{what} is {value:?}; expected {}", allowed.join(", "));
            return Err(InventoryError::new(place, problem));
        }
    }
    if dns_core::name::Name::from_text(domain).is_err() || domain.is_empty() {
        return Err(InventoryError::new(
            place,
            "the domain is not a domain name",
        ));
    }
    let has_placeholder = domain.split('.').any(|label| label == "_");
    // Without a type the server cannot expand `_`, and without `_` it expands nothing.
    match (has_placeholder, placeholder_type) {
        (true, None) => Err(InventoryError::new(place, "`_` needs a placeholder_type")),
        (false, Some(_)) => Err(InventoryError::new(
            place,
            "a placeholder_type needs `_` in the domain",
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(yaml: &str) -> String {
        let raw = file::read(yaml.as_bytes()).unwrap_or_else(|error| panic!("{error}"));
        Inventory::parse(raw).unwrap_err().to_string()
    }

    /// Returns an inventory with one instance group of this body.
    fn group(body: &str) -> String {
        format!("deployments: [{{name: d, instance_groups: [{{name: g, {body}}}]}}]")
    }

    #[test]
    fn invalid_inventories_are_refused() {
        for (body, expected) in [
            ("instances: [{id: a}]", "d/g/a: it has no address"),
            (
                "instances: [{id: a.b, networks: {n: 10.0.0.1}}]",
                "id \"a.b\"",
            ),
            (
                "instances: [{id: a, agent_id: '>', networks: {n: 10.0.0.1}}]",
                "agent_id \">\"",
            ),
            (
                "instances: [{id: a, networks: {n-: 10.0.0.1}}]",
                "network \"n-\"",
            ),
            (
                "instances: [{id: a, networks: {n: 10.0.0.1}}, {id: b, networks: {n: 10.0.0.1}}]",
                "another instance has 10.0.0.1",
            ),
            (
                "instances: [{id: a, networks: {n: 10.0.0.1}}, {id: a, networks: {n: 10.0.0.2}}]",
                "another instance has this id",
            ),
            (
                "links: [{name: l, type: t, aliases: [{domain: _.x}]}]",
                "`_` needs a placeholder_type",
            ),
            (
                "links: [{name: l, type: t, aliases: [{domain: x, placeholder_type: uuid}]}]",
                "a placeholder_type needs",
            ),
            (
                "links: [{name: l, type: t, aliases: [{domain: x, health_filter: good}]}]",
                "health_filter is",
            ),
        ] {
            let said = problem(&group(body));
            assert!(said.contains(expected), "{body}: {said}");
        }
    }

    fn inventory(yaml: &str) -> Inventory {
        Inventory::parse(file::read(yaml.as_bytes()).unwrap()).unwrap()
    }

    #[test]
    fn names_have_limits() {
        let longest = "a".repeat(63);
        for (id, is_good) in [
            (longest.as_str(), true),
            (&(longest.clone() + "a"), false),
            ("A_b-9", true),
            ("''", false),
            ("a.b", false),
        ] {
            let text = group(&format!(
                "instances: [{{id: {id}, networks: {{n: 10.0.0.1}}}}]"
            ));
            let raw = file::read(text.as_bytes()).unwrap();
            assert_eq!(Inventory::parse(raw).is_ok(), is_good, "{id}");
        }
        let text = group("instances: [{id: A_b, networks: {n: 10.0.0.1}}]");
        let found = inventory(&format!("domain: Fleet.\n{text}"));
        assert_eq!((&*found.domain, &*found.instances[0].id), ("Fleet", "a_b"));
        assert_eq!(inventory(&text).domain, "bosh");
        for domain in ["''", "a..b"] {
            assert!(problem(&format!("domain: {domain}\n{text}")).contains("is not a domain name"));
        }
        for (link, expected) in [
            ("{name: '', type: t}", "a link needs a name and a type"),
            ("{name: l, type: ''}", "a link needs a name and a type"),
            (
                "{name: l, type: t, aliases: [{domain: ''}]}",
                "the domain is not a domain name",
            ),
            (
                "{name: l, type: t, aliases: [{domain: a..b}]}",
                "the domain is not a domain name",
            ),
            (
                "{name: l, type: t, aliases: [{domain: x, initial_health_check: x}]}",
                "initial_health_check is",
            ),
            (
                "{name: l, type: t, aliases: [{domain: _.x, placeholder_type: x}]}",
                "placeholder_type is",
            ),
        ] {
            let said = problem(&group(&format!("links: [{link}]")));
            assert!(said.contains(expected), "{link}: {said}");
        }
        let same_agent = "instances: [{id: a, agent_id: x, networks: {n: 10.0.0.1}}, {id: b, agent_id: x, networks: {n: 10.0.0.2}}]";
        assert!(problem(&group(same_agent)).contains("another instance has this agent_id"));
    }

    #[test]
    fn index_is_the_position_unless_stated() {
        let text = group(
            "instances: [{id: a, networks: {n: 10.0.0.1}}, {id: b, index: 7, networks: {n: 10.0.0.2}}, {id: c, networks: {m: 10.0.0.1}}]",
        );
        let indexes: Vec<u64> = inventory(&text)
            .instances
            .iter()
            .map(|of| of.index)
            .collect();
        assert_eq!(indexes, [0, 7, 2]);
    }

    #[test]
    fn what_is_missing_cuts_an_inventory() {
        let fleet = |instances: &str, aliases: &str| {
            inventory(&group(&format!(
                "instances: [{instances}], links: [{{name: l, type: t, aliases: [{aliases}]}}]"
            )))
        };
        let (one, other) = (
            "{id: a, networks: {n: [10.0.0.1, 'fd00::1']}}",
            "{id: b, networks: {n: 10.0.0.2}}",
        );
        let (alias, more) = ("{domain: x}", "{domain: y}");
        let before = fleet(&format!("{one}, {other}"), &format!("{alias}, {more}"));
        for (instances, aliases, is_cut) in [
            (format!("{one}, {other}"), format!("{more}, {alias}"), false),
            (
                format!("{one}, {other}, {{id: c, networks: {{n: 10.0.0.3}}}}"),
                format!("{alias}, {more}, {{domain: z}}"),
                false,
            ),
            (one.to_owned(), format!("{alias}, {more}"), true),
            (format!("{one}, {other}"), alias.to_owned(), true),
            // Another address of the same family is a move; a family less is a loss.
            (
                format!("{{id: a, networks: {{n: [10.0.0.9, 'fd00::1']}}}}, {other}"),
                format!("{alias}, {more}"),
                false,
            ),
            (
                format!("{{id: a, networks: {{n: 10.0.0.1}}}}, {other}"),
                format!("{alias}, {more}"),
                true,
            ),
            (
                format!("{{id: a, networks: {{m: [10.0.0.1, 'fd00::1']}}}}, {other}"),
                format!("{alias}, {more}"),
                true,
            ),
        ] {
            let after = fleet(&instances, &aliases);
            assert_eq!(after.is_cut(&before), is_cut, "{instances} {aliases}");
            let kept = after.clone().keeping(&before).unwrap();
            assert!(
                !kept.is_cut(&before) && !kept.is_cut(&after),
                "{instances} {aliases}"
            );
            let again = kept.clone().keeping(&before).unwrap();
            assert_eq!(again, kept, "{instances} {aliases}");
        }
        let no_link = inventory(&group(&format!("instances: [{one}, {other}]")));
        assert!(no_link.is_cut(&before) && !before.is_cut(&no_link));
        assert_eq!(no_link.keeping(&before).unwrap().links, before.links);
        // Links differ in each of their parts.
        let link = before.links[0].clone();
        for change in [
            |link: &mut Link| link.deployment.push('x'),
            |link: &mut Link| link.group.push('x'),
            |link: &mut Link| link.name.push('x'),
            |link: &mut Link| link.kind.push('x'),
        ] {
            let mut other = link.clone();
            change(&mut other);
            assert!(!link.is_same(&other) && link.is_same(&link.clone()));
        }
        assert_eq!(link.group_name(), "l-t");
        // An address that has moved to another instance cannot be kept.
        let taken = fleet("{id: c, networks: {n: 10.0.0.2}}", alias);
        assert!(taken.keeping(&before).is_err());
    }
}
