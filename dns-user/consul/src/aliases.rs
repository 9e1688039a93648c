//! Converts a catalog to bosh-dns aliases for migration from Consul: Consul's names become aliases
//! of the BOSH instances with the same addresses.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
};

use dns_core::{
    catalog::{Instance as BoshInstance, Snapshot},
    link_address::{AddressGroup, Criteria, FirstLabel, LinkAddress, Status},
    name::Name,
};

use crate::{
    answer::Zone,
    catalog::{
        InstanceId, Place,
        address::{Accept, Location, Target},
    },
};

/// An alias file, and notes on the names it cannot express.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Aliases {
    /// Targets by alias, as written to the alias file.
    pub targets: BTreeMap<String, Vec<String>>,
    /// Notes for the operator, one line each.
    pub notes: Vec<String>,
}

/// Builds aliases for the services and nodes of the local datacenter. Consul's health is ignored;
/// bosh-dns applies the health of its own instances as selected by `health`.
pub fn aliases(zone: &Zone, snapshot: &Snapshot, health: Status) -> Aliases {
    let mut maker = Maker { zone, fleet: Fleet::new(snapshot), health, made: Aliases::default() };
    let place = Place::Datacenter(zone.config.datacenter.as_str().into());
    let mut services: Vec<&str> = zone.catalog.service_names(&place).collect();
    services.sort_unstable();
    for service in services {
        maker.add_service(service, &zone.catalog.service(&place, service));
    }
    for node in zone.catalog.node_names(&place) {
        maker.add_node(&place, node);
    }
    let queries = zone.catalog.query_count();
    if queries > 0 {
        maker.note(format!("{queries} prepared queries or templates: an alias cannot express them"));
    }
    maker.made
}

/// The part of a BOSH name that all instances of a group share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Group<'a> {
    deployment: &'a str,
    instance_group: &'a str,
    network: &'a str,
    domain: &'a str,
}

impl<'a> Group<'a> {
    fn of(instance: &BoshInstance<'a>) -> Self {
        let BoshInstance { deployment, instance_group, network, domain, .. } = *instance;
        Self { deployment, instance_group, network, domain }
    }

    /// Returns the name in this group with the given first label.
    fn name(&self, first: FirstLabel) -> String {
        let group = AddressGroup::Names {
            instance_group: self.instance_group.to_owned(),
            network: self.network.to_owned(),
            deployment: self.deployment.to_owned(),
        };
        LinkAddress { group, first, domain: self.domain.to_owned() }.to_string()
    }

    /// Returns whether names in this group are plain names, without meaning in the query language.
    fn is_nameable(&self) -> bool {
        let parts = [self.instance_group, self.network, self.deployment];
        !self.instance_group.starts_with("q-g")
            && parts.iter().all(|part| is_label(part))
            && Name::from_text(self.domain).is_ok()
    }
}

fn is_label(text: &str) -> bool {
    !text.contains('.') && Name::from_text(text).is_ok_and(|name| name.label_count() == 1)
}

#[derive(Clone, Copy, Debug)]
struct Member<'a> {
    id: &'a str,
    zone: &'a str,
    address: IpAddr,
}

/// The BOSH instances by group.
struct Fleet<'a> {
    /// All groups that can be named.
    groups: BTreeMap<Group<'a>, Vec<Member<'a>>>,
    /// Groups and ids by address, ordered by group.
    by_address: HashMap<IpAddr, Vec<(Group<'a>, &'a str)>>,
}

impl<'a> Fleet<'a> {
    /// Indexes the instances in the DNS records.
    fn new(snapshot: &'a Snapshot) -> Self {
        let mut groups: BTreeMap<Group<'a>, Vec<Member<'a>>> = BTreeMap::new();
        for instance in snapshot.instances() {
            let (group, id, zone) = (Group::of(&instance), instance.id, instance.az_id);
            if let Some(address) = instance.ip
                && group.is_nameable()
            {
                groups.entry(group).or_default().push(Member { id, zone, address });
            }
        }
        let mut by_address: HashMap<IpAddr, Vec<(Group<'a>, &'a str)>> = HashMap::new();
        for (group, member) in
            groups.iter().flat_map(|(group, members)| members.iter().map(move |m| (group, m)))
        {
            by_address.entry(member.address).or_default().push((*group, member.id));
        }
        Self { groups, by_address }
    }

    /// Returns the first instance at an address: its group, and its id if that can be used in a
    /// name.
    fn at(&self, address: IpAddr) -> Option<(Group<'a>, &'a str)> {
        self.by_address.get(&address)?.iter().copied().find(|(_, id)| is_id(id))
    }

    /// Returns the groups with instances at these addresses, each with all its instances.
    fn groups_at(&self, addresses: &BTreeSet<IpAddr>) -> BTreeMap<Group<'a>, &[Member<'a>]> {
        let found = addresses.iter().filter_map(|address| self.by_address.get(address)).flatten();
        found.filter_map(|(group, _)| Some((*group, self.groups.get(group)?.as_slice()))).collect()
    }
}

/// Returns whether an id is valid as the first label of a name.
fn is_id(id: &str) -> bool {
    is_label(id) && !id.starts_with("q-")
}

/// Names and addresses that together cover a set of addresses.
#[derive(Debug, Default)]
struct Led {
    /// Names, and addresses without a BOSH instance.
    targets: BTreeSet<String>,
    /// Number of instances named individually because their group is only partly covered.
    alone: usize,
    /// Addresses without a BOSH instance.
    foreign: Vec<IpAddr>,
    /// Common parts of the names of fully covered groups.
    whole: Vec<String>,
}

struct Maker<'a> {
    zone: &'a Zone,
    /// The BOSH instances that targets refer to.
    fleet: Fleet<'a>,
    /// Health filter of the targets.
    health: Status,
    /// Aliases built so far.
    made: Aliases,
}

impl Maker<'_> {
    /// Adds the names of a service and its tags.
    fn add_service(&mut self, service: &str, instances: &[InstanceId]) {
        let addresses = self.addresses_of(service, instances);
        if addresses.is_empty() {
            return self.note(format!("{service}: no instance has an address: there is no alias"));
        }
        let led = self.lead(&addresses);
        for address in &led.foreign {
            self.note(format!(
                "{service}: {address} is not an instance in the records: the alias contains the plain \
                 address, regardless of its health"
            ));
        }
        if led.alone > 0 {
            self.note(format!(
                "{service}: {} instance(s) listed individually, because the rest of the group is not \
                 registered: regenerate the aliases when one is recreated",
                led.alone
            ));
        }
        let by_id = self.is_tagged_by_id(instances) && led.alone == 0 && led.foreign.is_empty();
        let below = by_id.then(|| led.whole.iter().map(|rest| format!("_.{rest}")).collect::<Vec<_>>());
        self.insert(&format!("{service}.service"), led.targets);
        if let Some(below) = below {
            self.insert(&format!("_.{service}.service"), below);
        }
        for (tag, tagged) in self.by_tag(instances) {
            if by_id && self.is_own_id(&tag, &tagged) {
                continue;
            }
            let addresses = self.addresses_of(service, &tagged);
            let led = self.lead(&addresses);
            self.insert(&format!("{tag}.{service}.service"), led.targets);
        }
    }

    fn add_node(&mut self, place: &Place, name: &str) {
        let Some(node) = self.zone.catalog.find_node(place, &name.to_ascii_lowercase()) else { return };
        let locations = [Accept::V4, Accept::V6].map(|accept| node.location(&self.zone.config, accept));
        let mut targets = BTreeSet::new();
        for location in locations.into_iter().flatten() {
            match location {
                Location::Ip(address) => {
                    let found = self.fleet.at(address);
                    let instance =
                        |(group, id): (Group<'_>, &str)| group.name(FirstLabel::Instance(id.to_owned()));
                    targets.insert(found.map_or_else(|| address.to_string(), instance));
                }
                Location::Host(host) => {
                    return self.note(format!(
                        "node {name}: its address is the host name {host}: there is no alias"
                    ));
                }
            }
        }
        self.insert(&format!("{}.node", name.to_ascii_lowercase()), targets);
    }

    /// Returns the distinct addresses of instances.
    fn addresses_of(&mut self, service: &str, instances: &[InstanceId]) -> BTreeSet<IpAddr> {
        let (catalog, config) = (&self.zone.catalog, &self.zone.config);
        let mut addresses = BTreeSet::new();
        let mut hosts = BTreeSet::new();
        for &id in instances {
            for accept in [Accept::V4, Accept::V6] {
                match catalog.instance(id).target(catalog.node_of(id), config, accept, None) {
                    Some(Target::Node(address) | Target::Address(address)) => drop(addresses.insert(address)),
                    Some(Target::Host(host)) => drop(hosts.insert(host)),
                    None => {}
                }
            }
        }
        for host in hosts {
            self.note(format!("{service}: the host name {host} cannot be the target of an alias: omitted"));
        }
        addresses
    }

    /// Covers the addresses with targets: whole groups, else whole availability zones of a group,
    /// else single instances.
    fn lead(&self, addresses: &BTreeSet<IpAddr>) -> Led {
        let mut led = Led::default();
        let mut left = addresses.clone();
        let is_meant = |member: &&Member<'_>| addresses.contains(&member.address);
        let query = |zones| FirstLabel::Query(Criteria { zones, status: self.health, ..Criteria::default() });
        for (group, members) in self.fleet.groups_at(addresses) {
            let meant: Vec<&Member<'_>> = members.iter().filter(is_meant).collect();
            // Members in groups processed earlier are already covered.
            if !meant.iter().any(|member| left.contains(&member.address)) {
                continue;
            }
            for member in &meant {
                left.remove(&member.address);
            }
            if meant.len() == members.len() {
                led.targets.insert(group.name(query(Vec::new())));
                led.whole.push(group.name(FirstLabel::Wildcard).trim_start_matches("*.").to_owned());
                continue;
            }
            let is_zone_whole = |zone: &str| {
                !zone.is_empty() && members.iter().all(|member| member.zone != zone || is_meant(&member))
            };
            let zones: BTreeSet<&str> = meant.iter().map(|member| member.zone).collect();
            let zones: BTreeSet<&str> = zones.into_iter().filter(|zone| is_zone_whole(zone)).collect();
            if !zones.is_empty() {
                led.targets.insert(group.name(query(zones.iter().map(|&zone| zone.to_owned()).collect())));
            }
            for member in meant.into_iter().filter(|member| !zones.contains(member.zone)) {
                led.alone += 1;
                // An id that is not a valid label is replaced by the address.
                let instance = || group.name(FirstLabel::Instance(member.id.to_owned()));
                led.targets.insert(if is_id(member.id) { instance() } else { member.address.to_string() });
            }
        }
        led.foreign.extend(left.iter().copied());
        led.targets.extend(left.iter().map(ToString::to_string));
        led
    }

    /// Returns the instances by lower-case tag.
    fn by_tag(&self, instances: &[InstanceId]) -> BTreeMap<String, Vec<InstanceId>> {
        let mut by_tag: BTreeMap<String, Vec<InstanceId>> = BTreeMap::new();
        for &id in instances {
            let tags = self.zone.catalog.instance(id).tags.iter().map(|tag| tag.to_ascii_lowercase());
            for tag in tags.collect::<BTreeSet<_>>() {
                by_tag.entry(tag).or_default().push(id);
            }
        }
        by_tag
    }

    /// Returns whether each instance is tagged with the id of its BOSH instance.
    fn is_tagged_by_id(&self, instances: &[InstanceId]) -> bool {
        let by_tag = self.by_tag(instances);
        let own = by_tag.iter().filter(|(tag, tagged)| self.is_own_id(tag, tagged));
        own.flat_map(|(_, tagged)| tagged).collect::<BTreeSet<_>>().len() == instances.len()
    }

    /// Returns whether a tag is the id of the only BOSH instance tagged with it.
    fn is_own_id(&self, tag: &str, tagged: &[InstanceId]) -> bool {
        let [id] = tagged else { return false };
        let (catalog, config) = (&self.zone.catalog, &self.zone.config);
        match catalog.instance(*id).target(catalog.node_of(*id), config, Accept::Any, None) {
            Some(Target::Node(address) | Target::Address(address)) => {
                self.fleet.at(address).is_some_and(|(_, id)| id.eq_ignore_ascii_case(tag))
            }
            _ => false,
        }
    }

    /// Adds an alias in each domain, with and without the datacenter.
    fn insert(&mut self, name: &str, targets: impl IntoIterator<Item = String>) {
        let targets: Vec<String> = targets.into_iter().collect();
        if targets.is_empty() {
            return;
        }
        let config = &self.zone.config;
        let domains: Vec<&Name> =
            [Some(&config.domain), config.alt_domain.as_ref()].into_iter().flatten().collect();
        for domain in domains {
            for datacenter in [String::new(), format!("{}.", config.datacenter)] {
                let alias = format!("{name}.{datacenter}{domain}");
                match Name::from_text(&alias) {
                    Ok(_) => {
                        let alias = alias.trim_end_matches('.').to_owned();
                        self.made.targets.insert(alias, targets.clone());
                    }
                    Err(problem) => {
                        return self.note(format!(
                            "{name} is not a valid domain name ({problem}): there is no alias"
                        ));
                    }
                }
            }
        }
    }

    fn note(&mut self, note: String) {
        if !self.made.notes.contains(&note) {
            self.made.notes.push(note);
        }
    }
}
