//! Definition files, HCL or JSON: as read by Consul's agents, or whole catalogs.
//!
//! As for Consul, a file whose name ends in `.hcl` may hold either language; if its first character
//! is `{`, it is JSON. A file may contain at its top level:
//!
//! * `service`, `services`, `check`, `checks`: as in an agent's configuration. A service may name
//!   its `node`; the default is the local node.
//! * `nodes`, `queries`, `virtual_ips`, `ingress`, `datacenters`, `distance`: the rest of a
//!   catalog, as described in `docs/consul.md`.
//!
//! Other members are settings of Consul's agent: they are ignored and listed for the log. Checks are not run: a check without a
//! `status` counts as passing.

mod hcl;

use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    sync::Arc,
};

use crate::{
    catalog::registrations::{
        Check, CheckStatus, Datacenter, Failover, FailoverTarget, Gateway, Instance, NamedPort,
        Node, PreparedQuery, Registrations, TaggedAddress, Template, VirtualAddress, Weights,
    },
    config::{Config, seconds, texts},
};
use dns_core::config::{
    ConfigError, ParsedFiles,
    reader::{Json, ObjectReader},
};

/// Combined contents of the definition files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Definitions {
    /// Nodes, services and checks of all files.
    pub registrations: Registrations,
    /// Warnings about oddities that do not invalidate the files.
    pub warnings: Vec<String>,
    /// One line for each file with members that concern only Consul, for the log.
    pub ignored: Vec<String>,
    /// Number of sidecar proxies that were assigned a port.
    sidecars: u16,
}

/// Port of the first sidecar proxy without a configured port: Consul's `sidecar_min_port`.
const FIRST_SIDECAR_PORT: u16 = 21_000;

impl Definitions {
    /// Parses files given by name and content; names ending in `.hcl` are HCL, all others JSON.
    pub fn read<'a>(
        files: impl IntoIterator<Item = (&'a str, &'a [u8])>,
        config: &Config,
    ) -> ParsedFiles<Self> {
        let mut definitions = Self::default();
        let mut errors = Vec::new();
        let mut own = Node {
            name: config.node_name.clone(),
            datacenter: config.datacenter.clone(),
            address: config.advertise_addr.clone().unwrap_or_default(),
            ..Node::default()
        };
        let mut later = Vec::new();
        for (file, bytes) in files {
            match OneFile::read(file, bytes, config, definitions.sidecars) {
                Ok(file) => {
                    definitions.registrations.append(file.registrations);
                    definitions.sidecars = file.sidecars;
                    definitions.ignored.extend(file.ignored);
                    later.extend(file.later);
                }
                // The other files are read all the same, so that all mistakes are reported at once.
                Err(more) => errors.extend(more),
            }
        }
        // After all files: a check may belong to a service of a later one.
        for (service, check) in later {
            definitions.place(&mut own, service, check);
        }
        definitions.settle(own, config);
        ParsedFiles {
            valid: definitions,
            errors,
        }
    }

    /// Adds a check to its instance or node.
    fn place(&mut self, own: &mut Node, service: Option<String>, check: Check) {
        let Some(service) = service else {
            own.checks.push(check);
            return;
        };
        // As for an agent, which checks only its own services.
        let found = self
            .registrations
            .instances
            .iter_mut()
            .find(|instance| instance.node == own.name && instance.id == service);
        match found {
            Some(instance) => Arc::make_mut(instance).checks.push(check),
            None => self.warnings.push(format!(
                "a check belongs to service {service:?}, which no file defines: it has no effect"
            )),
        }
    }

    /// Adds the local node unless a file defines it, and warns about unreachable instances.
    fn settle(&mut self, own: Node, config: &Config) {
        let Registrations {
            nodes, instances, ..
        } = &mut self.registrations;
        // Without an address and without services, the node would only be a name without records.
        let wanted = config.advertise_addr.is_some()
            || instances.iter().any(|instance| instance.node == own.name);
        // Whether nodes have an address. By name, because a catalog has thousands of both.
        let mut addressed: HashMap<NodeKey, bool> = HashMap::new();
        for node in nodes.iter() {
            addressed.insert(node_key(&node.name, &node.peer), !node.address.is_empty());
        }
        if !own.name.is_empty()
            && wanted
            && let Entry::Vacant(missing) = addressed.entry(node_key(&own.name, &None))
        {
            missing.insert(!own.address.is_empty());
            nodes.push(own.into());
        }
        for instance in instances {
            let service = &instance.service;
            let id = &instance.id;
            let on = &instance.node;
            match addressed.get(&node_key(on, &instance.peer)) {
                _ if on.is_empty() => self.warnings.push(format!(
                    "service {service:?} (id {id:?}) has no node, and therefore no names: set \
                     consul.node_name, or the service's node"
                )),
                None => self.warnings.push(format!(
                    "service {service:?} (id {id:?}) is on node {on:?}, which no file defines: it has no \
                     names"
                )),
                Some(false) if instance.address.is_empty() => self.warnings.push(format!(
                    "neither service {service:?} (id {id:?}) nor its node has an address: set \
                     consul.advertise_addr"
                )),
                Some(_) => {}
            }
        }
    }
}

struct OneFile {
    registrations: Registrations,
    /// Checks beside services, with the id of their service.
    later: Vec<(Option<String>, Check)>,
    /// The members that concern only Consul, as a line for the log; `None` without any.
    ignored: Option<String>,
    /// Number of sidecar proxies that were assigned a port, in this file and those before it.
    sidecars: u16,
}

impl OneFile {
    /// Parses one file and returns every error, not just the first.
    fn read(
        file: &str,
        bytes: &[u8],
        config: &Config,
        sidecars: u16,
    ) -> Result<Self, Vec<ConfigError>> {
        let mut json = document(file, bytes).map_err(|error| vec![error])?;
        // First, because what follows knows a single form of each member.
        normalize(&mut json);
        let ignored = ignored(file, &json);
        let root = ObjectReader::document(file, &json).map_err(|error| vec![error])?;
        let mut errors = Vec::new();
        let mut own = Registrations::default();
        let mut sidecars = sidecars;
        own.instances = services(&root, config, &mut sidecars, &mut errors);
        let mut later = Vec::new();
        for name in ["check", "checks"] {
            later.extend(objects(
                &root,
                name,
                |reader: &ObjectReader<'_>| {
                    let service = reader.filled("service_id")?;
                    Ok((service.map(str::to_owned), check(reader)?))
                },
                &mut errors,
            ));
        }
        read_places(&root, config, &mut own, &mut errors);
        match distances(&root) {
            Ok(distances) => own.distances = distances,
            Err(error) => errors.push(error),
        }
        if !errors.is_empty() {
            // Not even the valid part: a service without one of its checks would seem healthier
            // than it is.
            return Err(errors);
        }
        Ok(Self {
            registrations: own,
            later,
            ignored,
            sidecars,
        })
    }
}

/// Lower-case name and peer of a node.
type NodeKey = (String, Option<String>);

fn node_key(name: &str, peer: &Option<String>) -> NodeKey {
    (name.to_ascii_lowercase(), peer.clone())
}

/// Reads services, with their sidecars; `sidecars` counts sidecars without a configured port.
fn services(
    root: &ObjectReader<'_>,
    config: &Config,
    sidecars: &mut u16,
    errors: &mut Vec<ConfigError>,
) -> Vec<Arc<Instance>> {
    let mut services = Vec::new();
    for name in ["service", "services"] {
        services.extend(objects(
            root,
            name,
            |reader: &ObjectReader<'_>| {
                let instance = instance(reader, config)?;
                let sidecar = sidecar(reader, &instance)?;
                Ok((instance, sidecar))
            },
            errors,
        ));
    }
    let mut instances = Vec::new();
    for (instance, sidecar) in services {
        instances.push(instance.into());
        if let Some(mut sidecar) = sidecar {
            if sidecar.port == 0 {
                // Beyond the last port, sidecars share it.
                sidecar.port = FIRST_SIDECAR_PORT.saturating_add(*sidecars);
                *sidecars = sidecars.saturating_add(1);
            }
            instances.push(sidecar.into());
        }
    }
    instances
}

/// Reads everything but services and checks.
fn read_places(
    root: &ObjectReader<'_>,
    config: &Config,
    own: &mut Registrations,
    errors: &mut Vec<ConfigError>,
) {
    own.nodes = objects(
        root,
        "nodes",
        |reader| Ok(node(reader, config)?.into()),
        errors,
    );
    own.queries = objects(root, "queries", query, errors);
    own.virtual_addresses = objects(root, "virtual_ips", virtual_address, errors);
    own.gateways = objects(root, "ingress", gateway, errors);
    own.datacenters = objects(root, "datacenters", datacenter, errors);
}

fn gateway(reader: &ObjectReader<'_>) -> Result<Gateway, ConfigError> {
    Ok(Gateway {
        gateway: needed(reader, "gateway")?,
        services: texts(reader, "services")?,
    })
}

fn datacenter(reader: &ObjectReader<'_>) -> Result<Datacenter, ConfigError> {
    let reachable = reader.boolean("reachable")?.unwrap_or(true);
    Ok(Datacenter {
        name: needed(reader, "name")?,
        reachable,
    })
}

/// Parses each object in the list `name`; adds every error to `errors`.
fn objects<'a, T>(
    root: &ObjectReader<'a>,
    name: &'static str,
    parse: impl Fn(&ObjectReader<'a>) -> Result<T, ConfigError>,
    errors: &mut Vec<ConfigError>,
) -> Vec<T> {
    match root.parse_objects(name, |reader| parse(reader).map_err(|error| vec![error])) {
        Ok(parsed) => parsed,
        Err(more) => {
            errors.extend(more);
            Vec::new()
        }
    }
}

/// Parses `distance`: nodes nearest first, by the node they are measured from.
fn distances(root: &ObjectReader<'_>) -> Result<HashMap<String, Vec<String>>, ConfigError> {
    let distance = root.object("distance")?;
    let mut distances = HashMap::new();
    for (from, nearest) in distance.entries() {
        let Json::List(nearest) = nearest else {
            return Err(distance.error(from, "is not a list of nodes"));
        };
        let mut names = Vec::new();
        for name in nearest {
            if let Json::Text(name) = name {
                names.push(name.clone());
            }
        }
        distances.insert(from.to_owned(), names);
    }
    Ok(distances)
}

fn document(file: &str, bytes: &[u8]) -> Result<Json, ConfigError> {
    let is_json = bytes.trim_ascii_start().first() == Some(&b'{');
    let parsed = if !file.ends_with(".hcl") || is_json {
        Json::parse(bytes).map_err(|error| format!("is not JSON: {error}"))
    } else {
        match std::str::from_utf8(bytes) {
            Ok(text) => hcl::parse(text).map_err(|error| format!("is not HCL: {error}")),
            Err(error) => Err(format!("is not UTF-8: {error}")),
        }
    };
    parsed.map_err(|problem| ConfigError::of_file(file, problem))
}

/// Parses an instance's sidecar proxy (`connect.sidecar_service`). It inherits the instance's
/// checks, and its tags and metadata unless it defines its own.
fn sidecar(reader: &ObjectReader<'_>, parent: &Instance) -> Result<Option<Instance>, ConfigError> {
    let connect = reader.object("connect")?;
    // The empty object, which is its usual form, defines a sidecar as well.
    if !connect.has("sidecar_service") {
        return Ok(None);
    }
    let own = connect.object("sidecar_service")?;
    let tags = texts(&own, "tags")?;
    let meta = strings(&own.object("meta")?)?;
    Ok(Some(Instance {
        id: text(&own, "id")?.unwrap_or_else(|| format!("{}-sidecar-proxy", parent.id)),
        service: text(&own, "name")?.unwrap_or_else(|| format!("{}-sidecar-proxy", parent.service)),
        address: text(&own, "address")?.unwrap_or_default(),
        port: port(&own, "port")?,
        ports: Vec::new(),
        tags: if tags.is_empty() {
            parent.tags.clone()
        } else {
            tags
        },
        meta: if meta.is_empty() {
            parent.meta.clone()
        } else {
            meta
        },
        weights: Weights::default(),
        tagged_addresses: BTreeMap::new(),
        proxy_for: Some(parent.service.clone()),
        connect_native: false,
        ..parent.clone()
    }))
}

fn instance(reader: &ObjectReader<'_>, config: &Config) -> Result<Instance, ConfigError> {
    let service =
        // Files of Consul's agents say `name`, its HTTP API `Service`.
        either(reader, ["name", "service"])?.ok_or_else(|| reader.error("name", "is missing"))?;
    let weights = reader.object("weights")?;
    let weights = Weights {
        passing: weight(&weights, "passing")?,
        warning: weight(&weights, "warning")?,
    };
    let mut ports = Vec::new();
    for named in reader.objects("ports")? {
        let default = named.boolean("default")?.unwrap_or(false);
        ports.push(NamedPort {
            name: needed(&named, "name")?,
            port: port(&named, "port")?,
            default,
        });
    }
    let mut checks = Vec::new();
    for name in ["check", "checks"] {
        for one in reader.objects(name)? {
            checks.push(check(&one)?);
        }
    }
    let proxy = reader.object("proxy")?;
    Ok(Instance {
        node: text(reader, "node")?.unwrap_or_else(|| config.node_name.clone()),
        peer: text(reader, "peer")?,
        id: text(reader, "id")?.unwrap_or_else(|| service.clone()),
        address: text(reader, "address")?.unwrap_or_default(),
        port: port(reader, "port")?,
        impossible_port: None,
        ports,
        tags: texts(reader, "tags")?,
        meta: strings(&reader.object("meta")?)?,
        weights,
        tagged_addresses: tagged_addresses(reader)?,
        proxy_for: either(&proxy, ["destination_service", "destination_service_name"])?,
        connect_native: reader
            .object("connect")?
            .boolean("native")?
            .unwrap_or(false),
        checks,
        service,
    })
}

fn weight(weights: &ObjectReader<'_>, name: &'static str) -> Result<u16, ConfigError> {
    let weight = weights.number(name, 0, u16::MAX.into())?;
    Ok(weight.unwrap_or(1) as u16)
}

fn tagged_addresses(
    reader: &ObjectReader<'_>,
) -> Result<BTreeMap<String, TaggedAddress>, ConfigError> {
    let tagged = reader.object("tagged_addresses")?;
    let mut addresses = BTreeMap::new();
    for (tag, value) in tagged.entries() {
        let address = match value {
            Json::Text(address) => TaggedAddress {
                address: address.clone(),
                port: 0,
            },
            Json::Object(_) => {
                let one = tagged.entry(tag, value)?;
                TaggedAddress {
                    address: text(&one, "address")?.unwrap_or_default(),
                    port: port(&one, "port")?,
                }
            }
            _ => return Err(tagged.error(tag, "is not an object with an address")),
        };
        addresses.insert(tag.to_owned(), address);
    }
    Ok(addresses)
}

fn node(reader: &ObjectReader<'_>, config: &Config) -> Result<Node, ConfigError> {
    let checks = reader.objects("checks")?;
    Ok(Node {
        name: needed(reader, "node")?,
        id: text(reader, "id")?.unwrap_or_default(),
        datacenter: text(reader, "datacenter")?.unwrap_or_else(|| config.datacenter.clone()),
        peer: text(reader, "peer")?,
        address: needed(reader, "address")?,
        tagged_addresses: strings(&reader.object("tagged_addresses")?)?,
        meta: strings(&reader.object("meta")?)?,
        checks: checks.iter().map(check).collect::<Result<_, _>>()?,
    })
}

fn query(reader: &ObjectReader<'_>) -> Result<PreparedQuery, ConfigError> {
    let template = reader.object("template")?;
    // An empty template matches all names that begin with the query's.
    let is_template = reader.has("template");
    Ok(PreparedQuery {
        id: needed(reader, "id")?,
        name: text(reader, "name")?.unwrap_or_default(),
        datacenter: text(reader, "datacenter")?,
        service: needed(reader, "service")?,
        tags: texts(reader, "tags")?,
        only_passing: reader.boolean("only_passing")?.unwrap_or(false),
        ignore_check_ids: texts(reader, "ignore_check_ids")?,
        node_meta: strings(&reader.object("node_meta")?)?,
        service_meta: strings(&reader.object("service_meta")?)?,
        connect: reader.boolean("connect")?.unwrap_or(false),
        near: text(reader, "near")?.unwrap_or_default(),
        ttl: reader.duration("dns_ttl")?.map(seconds),
        failover: failover(&reader.object("failover")?)?,
        template: if is_template {
            Some(Template {
                regexp: text(&template, "regexp")?.unwrap_or_default(),
                remove_empty_tags: template.boolean("remove_empty_tags")?.unwrap_or(false),
            })
        } else {
            None
        },
    })
}

/// Parses the failover of a query: `datacenters`, or `targets` that each name a `datacenter` or a `peer`.
fn failover(reader: &ObjectReader<'_>) -> Result<Failover, ConfigError> {
    let datacenters = texts(reader, "datacenters")?;
    let targets = reader.objects("targets")?;
    if !datacenters.is_empty() && !targets.is_empty() {
        return Err(reader.error(
            "targets",
            "cannot be combined with datacenters; list them as targets",
        ));
    }
    let mut places = Vec::new();
    for datacenter in datacenters {
        places.push(FailoverTarget::Datacenter(datacenter));
    }
    for target in targets {
        places.push(
            match (text(&target, "datacenter")?, text(&target, "peer")?) {
                (Some(datacenter), None) => FailoverTarget::Datacenter(datacenter),
                (None, Some(peer)) => FailoverTarget::Peer(peer),
                _ => return Err(target.error("peer", "set either datacenter or peer")),
            },
        );
    }
    Ok(Failover {
        // Needs coordinates, which files do not have.
        nearest: 0,
        targets: places,
    })
}

fn check(reader: &ObjectReader<'_>) -> Result<Check, ConfigError> {
    let states = [
        // Nothing runs the check; in Consul it would be critical until its first run.
        ("", CheckStatus::default()),
        ("passing", CheckStatus::Passing),
        ("warning", CheckStatus::Warning),
        ("critical", CheckStatus::Critical),
    ];
    Ok(Check {
        id: either(reader, ["id", "check_id"])?.unwrap_or_default(),
        status: reader.choice("status", &states)?.unwrap_or_default(),
    })
}

/// Parses a port, a number or its digits; 0 if missing.
fn port(reader: &ObjectReader<'_>, name: &'static str) -> Result<u16, ConfigError> {
    if let Ok(Some(text)) = reader.text(name)
        && let Ok(port) = text.parse()
    {
        return Ok(port);
    }
    Ok(reader.number(name, 0, u16::MAX.into())?.unwrap_or(0) as u16)
}

/// Parses a mandatory text.
fn needed(reader: &ObjectReader<'_>, name: &'static str) -> Result<String, ConfigError> {
    text(reader, name)?.ok_or_else(|| reader.error(name, "is missing"))
}

/// Parses a text; `None` if missing or empty.
fn text(reader: &ObjectReader<'_>, name: &'static str) -> Result<Option<String>, ConfigError> {
    Ok(reader.filled(name)?.map(str::to_owned))
}

/// Parses the first of these texts that is neither missing nor empty.
fn either(
    reader: &ObjectReader<'_>,
    [first, second]: [&'static str; 2],
) -> Result<Option<String>, ConfigError> {
    match text(reader, first)? {
        None => text(reader, second),
        found => Ok(found),
    }
}

fn strings(reader: &ObjectReader<'_>) -> Result<BTreeMap<String, String>, ConfigError> {
    let mut strings = BTreeMap::new();
    for (key, value) in reader.entries() {
        let text = match value {
            Json::Text(text) => text.clone(),
            // Metadata is text, but HCL is often written without the quotes.
            Json::Number(_) | Json::Bool(_) => value.to_string(),
            _ => return Err(reader.error(key, "is not text")),
        };
        strings.insert(key.to_owned(), text);
    }
    Ok(strings)
}

//----------- Forms --------------------------------------------------------
//
// The forms in which files state the same: one block or several, an object or a list, names as in
// files or as in the HTTP API.

/// Members of a file that are read.
const MEMBERS: [&str; 10] = [
    "service",
    "services",
    "check",
    "checks",
    "nodes",
    "queries",
    "virtual_ips",
    "ingress",
    "datacenters",
    "distance",
];

/// Names that the HTTP API writes without underscores (`TaggedAddresses`), as generators of files do.
const COMPOUND_NAMES: [&str; 6] = [
    "tagged_addresses",
    "sidecar_service",
    "destination_service",
    "destination_service_name",
    "service_id",
    "check_id",
];

/// Returns a line about the members that concern only Consul; `None` without any.
fn ignored(file: &str, json: &Json) -> Option<String> {
    let Json::Object(members) = json else {
        return None;
    };
    let mut others: Vec<&str> = Vec::new();
    for (name, _) in members {
        let is_read = MEMBERS.iter().any(|known| known.eq_ignore_ascii_case(name));
        // Repeated blocks of one name usually follow each other.
        if !is_read && others.last() != Some(&name.as_str()) {
            others.push(name);
        }
    }
    if others.is_empty() {
        return None;
    }
    let others = others.join(", ");
    Some(format!(
        "{file}: settings of Consul's agent, ignored: {others}"
    ))
}

fn virtual_address(reader: &ObjectReader<'_>) -> Result<VirtualAddress, ConfigError> {
    let address = reader
        .address("ip")?
        .ok_or_else(|| reader.error("ip", "is missing"))?;
    Ok(VirtualAddress {
        service: needed(reader, "service")?,
        peer: text(reader, "peer")?,
        address,
    })
}

/// Gives members one form: a list wherever several objects are possible, underscores in names.
fn normalize(json: &mut Json) {
    // The members of `distance` are names, not objects of a known form.
    for name in MEMBERS.into_iter().filter(|name| *name != "distance") {
        gather(json, name);
    }
    each(json, "nodes", |node| gather(node, "checks"));
    each(json, "queries", |query| {
        each(query, "failover", |failover| gather(failover, "targets"))
    });
    for name in ["check", "checks"] {
        each(json, name, join_words);
    }
    for name in ["service", "services"] {
        each(json, name, |service| {
            join_words(service);
            for name in ["check", "checks", "ports"] {
                gather(service, name);
                each(service, name, join_words);
            }
            each(service, "proxy", join_words);
            each(service, "connect", |connect| {
                join_words(connect);
                each(connect, "sidecar_service", join_words);
            });
        });
    }
}

/// Collects repeated blocks, single objects and lists of this name in one list. Other values stay,
/// as errors for the reader.
fn gather(json: &mut Json, name: &str) {
    let Json::Object(members) = json else { return };
    let mut is_found = false;
    for (member, value) in members.iter() {
        if member.eq_ignore_ascii_case(name) {
            is_found = true;
            if !matches!(value, Json::Object(_) | Json::List(_)) {
                return;
            }
        }
    }
    if !is_found {
        return;
    }
    let mut items = Vec::new();
    members.retain_mut(|member| {
        if !member.0.eq_ignore_ascii_case(name) {
            return true;
        }
        match std::mem::replace(&mut member.1, Json::Null) {
            Json::List(list) => items.extend(list),
            object => items.push(object),
        }
        false
    });
    members.push((name.to_owned(), Json::List(items)));
}

/// Changes each object of this name, in a list or alone.
fn each(json: &mut Json, name: &str, change: impl Fn(&mut Json)) {
    let Json::Object(members) = json else { return };
    for (member, value) in members {
        if !member.eq_ignore_ascii_case(name) {
            continue;
        }
        match value {
            Json::List(items) => items.iter_mut().for_each(&change),
            object => change(object),
        }
    }
}

/// Writes known names of an object with underscores.
fn join_words(json: &mut Json) {
    let Json::Object(members) = json else { return };
    for (member, _) in members {
        for known in COMPOUND_NAMES {
            // Members are read in any letter case, so only the underscores matter.
            if squeezed(known) == squeezed(member) {
                *member = known.to_owned();
                break;
            }
        }
    }
}

fn squeezed(name: &str) -> String {
    name.replace('_', "").to_ascii_lowercase()
}

#[cfg(test)]
mod tests;
