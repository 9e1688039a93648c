//! The forms in which files state the same: one block or several, an object or a list, names as in
//! files or as in the HTTP API.

use dns_core::config::json::Json;

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
pub(super) fn ignored(file: &str, json: &Json) -> Option<String> {
    let Json::Object(members) = json else { return None };
    let is_read = |name: &str| MEMBERS.iter().any(|known| known.eq_ignore_ascii_case(name));
    let mut others: Vec<&str> =
        members.iter().map(|(name, _)| name.as_str()).filter(|name| !is_read(name)).collect();
    others.dedup();
    (!others.is_empty())
        .then(|| format!("{file}: settings of Consul's agent, ignored: {}", others.join(", ")))
}

/// Gives members one form: a list wherever several objects are possible, underscores in names.
pub(super) fn normalize(json: &mut Json) {
    for name in MEMBERS.into_iter().filter(|name| *name != "distance") {
        gather(json, name);
    }
    each(json, "nodes", |node| gather(node, "checks"));
    each(json, "queries", |query| each(query, "failover", |failover| gather(failover, "targets")));
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
    let is_named = |(member, _): &(String, Json)| member.eq_ignore_ascii_case(name);
    let named = || members.iter().filter(|member| is_named(member)).map(|(_, value)| value);
    if named().next().is_none() || named().any(|value| !matches!(value, Json::Object(_) | Json::List(_))) {
        return;
    }
    let mut items = Vec::new();
    members.retain_mut(|member| {
        if !is_named(member) {
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
    for (_, value) in members.iter_mut().filter(|(member, _)| member.eq_ignore_ascii_case(name)) {
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
        let squeezed = |name: &str| name.replace('_', "").to_ascii_lowercase();
        if let Some(known) = COMPOUND_NAMES.iter().find(|known| squeezed(known) == squeezed(member)) {
            *member = (*known).to_owned();
        }
    }
}
