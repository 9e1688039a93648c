//! Evaluates prepared queries on the catalog.

use std::{borrow::Cow, collections::BTreeMap, net::IpAddr};

use regex::Regex;

use crate::{
    answer::{Lack, Missing, Zone},
    catalog::{
        InstanceId, Place, Reach,
        registrations::{CheckStatus, Failover, FailoverTarget, PreparedQuery, Template},
    },
    record::Failure,
};

/// Result of a prepared query.
#[derive(Debug)]
pub(crate) struct Executed {
    /// Instances in answer order.
    pub(crate) instances: Vec<InstanceId>,
    pub(crate) ttl: u32,
}

impl Zone {
    /// Executes the prepared query selected by `name`: by id, by name, or the template with the
    /// longest prefix of `name`. `client` is the source address, for `near: "_ip"`.
    pub(crate) fn execute(
        &self,
        name: &str,
        datacenter: Option<&str>,
        client: Option<IpAddr>,
        random: &mut fastrand::Rng,
    ) -> Result<Executed, Failure> {
        let stored = datacenter.unwrap_or(&self.config.datacenter);
        self.check_reach(stored)?;
        let query = self.find_query(name, stored)?;
        let mut instances = Vec::new();
        for place in self.places_of(&query, stored) {
            instances = self.matching(&query, &place);
            if !instances.is_empty() {
                // Places are tried in order, and instances of several are never mixed.
                break;
            }
        }
        if instances.is_empty() {
            return Err(Failure::NoSuchName);
        }
        // Instances at an equal or unknown distance stay in random order.
        random.shuffle(&mut instances);
        self.sort_by_nearness(&query.near, client, &mut instances);
        let ttl = match query.ttl {
            Some(ttl) => ttl,
            None => self.config.dns.ttl_of(&query.service),
        };
        Ok(Executed { instances, ttl })
    }

    /// Returns the first part of the data that the query needs and no source has loaded yet.
    pub(crate) fn lacks_for_query(&self, name: &str, datacenter: Option<&str>) -> Option<Lack> {
        let stored = datacenter.unwrap_or(&self.config.datacenter);
        if self.catalog.reach(stored) != Reach::Reachable {
            return None;
        }
        if self.catalog.lacks_queries(stored) {
            return Some(Lack {
                place: Place::Datacenter(stored.into()),
                missing: Missing::Queries,
            });
        }
        let query = self.find_query(name, stored).ok()?;
        let service = query.service.to_ascii_lowercase();
        for place in self.places_of(&query, stored) {
            if self.catalog.is_pending(&place, Some(&service)) {
                return Some(Lack {
                    place,
                    missing: Missing::Service(service),
                });
            }
            // Mesh instances are registered under other names; in other datacenters only queried
            // services are loaded.
            if query.connect && place == self.own() && self.catalog.is_incomplete(&place) {
                return Some(Lack {
                    place,
                    missing: Missing::Lists,
                });
            }
            if !self.matching(&query, &place).is_empty() {
                return None;
            }
        }
        // Without their names no other datacenter is tried.
        let Failover { nearest, targets } = &query.failover;
        let needs_datacenters = *nearest > 0
            || targets
                .iter()
                .any(|target| matches!(target, FailoverTarget::Datacenter(_)));
        if !needs_datacenters || !self.catalog.lacks_datacenters() {
            return None;
        }
        Some(Lack {
            place: Place::Datacenter(stored.into()),
            missing: Missing::Lists,
        })
    }

    /// Returns the places that a query tries in order: the datacenter that stores it, the nearest
    /// ones, then its targets. Datacenters that are unknown or unreachable are skipped.
    fn places_of(&self, query: &PreparedQuery, stored: &str) -> Vec<Place> {
        let Failover { nearest, targets } = &query.failover;
        let mut places = vec![datacenter(stored)];
        if *nearest > 0 {
            let known = self.catalog.nearest_datacenters(stored);
            places.extend(known.into_iter().take(*nearest).map(datacenter));
        }
        for target in targets {
            places.push(match target {
                FailoverTarget::Datacenter(name) => datacenter(name),
                FailoverTarget::Peer(name) => Place::Peer(name.to_ascii_lowercase().into()),
            });
        }
        let mut seen = std::collections::BTreeSet::new();
        places.retain(|place| {
            let reachable = match place {
                Place::Datacenter(name) => self.catalog.reach(name) == Reach::Reachable,
                Place::Peer(_) => true,
            };
            reachable && seen.insert(place.clone())
        });
        places
    }

    fn find_query(&self, name: &str, stored: &str) -> Result<Cow<'_, PreparedQuery>, Failure> {
        let here: Vec<&PreparedQuery> = self.catalog.queries(stored).collect();
        for query in &here {
            if query.id.eq_ignore_ascii_case(name) {
                // A template selected by its id has no name to fill in.
                return match query.template {
                    Some(_) => Err(Failure::Server),
                    None => Ok(Cow::Borrowed(query)),
                };
            }
        }
        // An exact name precedes every template, the one with the longest prefix the others.
        let mut longest: Option<(&PreparedQuery, &Template)> = None;
        for &query in &here {
            let Some(template) = &query.template else {
                if query.name.eq_ignore_ascii_case(name) {
                    return Ok(Cow::Borrowed(query));
                }
                continue;
            };
            if let Some((longest, _)) = longest
                && longest.name.len() > query.name.len()
            {
                continue;
            }
            if name.starts_with(&query.name.to_ascii_lowercase()) {
                longest = Some((query, template));
            }
        }
        let (query, template) = longest.ok_or(Failure::NoSuchName)?;
        let filled = fill_in(query, template, name).ok_or(Failure::Server)?;
        Ok(Cow::Owned(filled))
    }

    /// Returns the instances in one place that match the query.
    fn matching(&self, query: &PreparedQuery, place: &Place) -> Vec<InstanceId> {
        let service = query.service.to_ascii_lowercase();
        let mut instances = if query.connect {
            self.catalog.connect(place, &service)
        } else {
            self.catalog.service(place, &service)
        };
        instances.retain(|&id| self.fits(query, id));
        instances
    }

    fn fits(&self, query: &PreparedQuery, id: InstanceId) -> bool {
        let instance = self.catalog.instance(id);
        let node = self.catalog.node_of(id);
        // Prepared queries have a switch of their own and ignore that of `dns_config`
        // (tests/cases).
        let worst = if query.only_passing {
            CheckStatus::Passing
        } else {
            CheckStatus::Warning
        };
        let mut checks = instance.checks.iter().chain(&node.checks);
        let healthy = checks.all(|check| {
            let mut ignored = query.ignore_check_ids.iter();
            check.status <= worst || ignored.any(|ignored| **ignored == *check.id)
        });
        // All tags are required, and those with `!` forbidden (tests/cases).
        let tagged = query.tags.iter().all(|tag| match tag.strip_prefix('!') {
            Some(unwanted) => !instance.has_tag(unwanted),
            None => instance.has_tag(tag),
        });
        healthy
            && tagged
            && has_all(&node.meta, &query.node_meta)
            && has_all(&instance.meta, &query.service_meta)
    }

    /// Sorts by distance from the node that `near` selects, with that node first; instances at an
    /// unknown distance follow in their previous order.
    fn sort_by_nearness(&self, near: &str, client: Option<IpAddr>, instances: &mut [InstanceId]) {
        let from = match near {
            "" => return,
            "_agent" => self.config.node_name.as_str(),
            "_ip" => match client.and_then(|address| self.catalog.nodes.at(address)) {
                // Only a client that is a node itself is known by its address.
                Some(node) => node.name.as_str(),
                None => self.config.node_name.as_str(),
            },
            name => name,
        };
        let distance = self.catalog.distances(from);
        let mut sorted = Vec::with_capacity(instances.len());
        for &id in instances.iter() {
            let node = self.catalog.node_of(id);
            // Less than every distance, as these are not negative.
            let distance = if node.name.eq_ignore_ascii_case(from) {
                -1.0
            } else {
                distance(node).unwrap_or(f64::INFINITY)
            };
            sorted.push((distance, id));
        }
        sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (place, (_, id)) in instances.iter_mut().zip(sorted) {
            *place = id;
        }
    }
}

fn datacenter(name: &str) -> Place {
    Place::Datacenter(name.to_ascii_lowercase().into())
}

/// Returns the template as a query for `name`; `None` if its regular expression is invalid.
fn fill_in(query: &PreparedQuery, template: &Template, name: &str) -> Option<PreparedQuery> {
    let mut groups: Vec<String> = Vec::new();
    if !template.regexp.is_empty() {
        // The crate matches in linear time: no name makes a query slow, whatever the expression.
        let expression = Regex::new(&template.regexp).ok()?;
        if let Some(found) = expression.captures(name) {
            for group in found.iter() {
                let text = group.map_or("", |group| group.as_str());
                groups.push(text.to_owned());
            }
        }
    }
    let filling = Filling {
        query_name: &query.name,
        name,
        groups: &groups,
    };
    let mut tags = Vec::new();
    for tag in &query.tags {
        let tag = filling.fill(tag);
        // A forbidden tag without a name is empty, too.
        let is_empty = tag.is_empty() || tag == "!";
        if !(template.remove_empty_tags && is_empty) {
            tags.push(tag);
        }
    }
    let mut targets = Vec::new();
    for target in &query.failover.targets {
        targets.push(match target {
            FailoverTarget::Datacenter(name) => FailoverTarget::Datacenter(filling.fill(name)),
            FailoverTarget::Peer(name) => FailoverTarget::Peer(filling.fill(name)),
        });
    }
    Some(PreparedQuery {
        service: filling.fill(&query.service),
        tags,
        near: filling.fill(&query.near),
        failover: Failover {
            nearest: query.failover.nearest,
            targets,
        },
        node_meta: filling.fill_values(&query.node_meta),
        service_meta: filling.fill_values(&query.service_meta),
        template: None,
        ..query.clone()
    })
}

/// The values of a template's variables.
struct Filling<'a> {
    query_name: &'a str,
    name: &'a str,
    groups: &'a [String],
}

impl Filling<'_> {
    /// Replaces `${name.full}`, `${name.prefix}`, `${name.suffix}` and `${match(n)}`; other expressions in braces are
    /// replaced by nothing.
    fn fill(&self, text: &str) -> String {
        let Self {
            query_name: prefix,
            name,
            groups,
        } = *self;
        let mut filled = String::with_capacity(text.len());
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("${") {
            filled.push_str(before);
            let Some((expression, tail)) = after.split_once('}') else {
                filled.push_str("${");
                rest = after;
                continue;
            };
            filled.push_str(match expression.trim() {
                "name.full" => name,
                "name.prefix" => prefix,
                // The name begins with the prefix, which has the same length in lower case.
                "name.suffix" => name.get(prefix.len()..).unwrap_or_default(),
                other => group_of(other, groups).unwrap_or_default(),
            });
            rest = tail;
        }
        filled.push_str(rest);
        filled
    }

    fn fill_values(&self, meta: &BTreeMap<String, String>) -> BTreeMap<String, String> {
        let mut filled = BTreeMap::new();
        for (key, value) in meta {
            filled.insert(key.clone(), self.fill(value));
        }
        filled
    }
}

fn has_all(meta: &BTreeMap<String, String>, wanted: &BTreeMap<String, String>) -> bool {
    wanted
        .iter()
        .all(|(key, value)| meta.get(key) == Some(value))
}

/// Returns the group that `match(n)` selects.
fn group_of<'a>(expression: &str, groups: &'a [String]) -> Option<&'a str> {
    let number = expression.strip_prefix("match(")?.strip_suffix(')')?;
    let number: usize = number.trim().parse().ok()?;
    groups.get(number).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dns_core::{name::Name, wire::TYPE_A};

    use super::*;
    use crate::{
        catalog::{
            Catalog,
            live::{Live, LiveService, ServiceInstances},
            registrations::{Datacenter, Instance, Node, Registrations},
        },
        config::Config,
        config::Visibility,
    };

    /// Returns a zone whose service `web` exists in `dc2` only, with a query that takes the nearest
    /// datacenter; `names` are the known datacenters, without coordinates.
    fn zone(names: &[&str]) -> Zone {
        zone_of(live(names))
    }

    fn zone_of(live: Live) -> Zone {
        let (config, _) = Config::of_document("test", br#"{"consul": {}}"#)
            .whole()
            .unwrap()
            .unwrap();
        let mut catalog = Catalog::build(Registrations::default(), &config, Visibility::all());
        catalog.update(Some(live));
        Zone { config, catalog }
    }

    fn live(names: &[&str]) -> Live {
        let mut live = Live::unknown("dc1");
        for datacenter in ["dc1", "dc2"] {
            let node = Node {
                name: "n".to_owned(),
                datacenter: datacenter.to_owned(),
                address: "10.2.0.1".to_owned(),
                ..Node::default()
            };
            let place = live
                .places
                .entry(Place::Datacenter(datacenter.into()))
                .or_default();
            place.nodes = Some(Arc::new(vec![Arc::new(node)]));
            let services = place.services.get_or_insert_default();
            if datacenter == "dc2" {
                let text = |text: &str| text.to_owned();
                let web = Instance {
                    node: text("n"),
                    id: text("w"),
                    service: text("web"),
                    ..Instance::default()
                };
                let loaded = ServiceInstances {
                    instances: vec![Arc::new(web)],
                    ..Default::default()
                };
                let web = LiveService {
                    name: text("web"),
                    tags: Vec::new(),
                    instances: Some(Arc::new(loaded)),
                };
                services.insert("web".into(), Arc::new(web));
            }
        }
        let query = PreparedQuery {
            id: "1".to_owned(),
            name: "near".to_owned(),
            service: "web".to_owned(),
            failover: Failover {
                nearest: 1,
                targets: Vec::new(),
            },
            ..PreparedQuery::default()
        };
        live.queries.insert("dc1".to_owned(), Arc::new(vec![query]));
        live.datacenters = names
            .iter()
            .map(|name: &&str| Datacenter {
                name: (*name).to_owned(),
                reachable: true,
            })
            .collect();
        live
    }

    #[test]
    fn failover_needs_no_coordinates() {
        let name = Name::from_text("near.query.consul").unwrap();
        let random = || fastrand::Rng::with_seed(1);
        let known = zone(&["dc1", "dc2"]);
        assert_eq!(known.lacks_for(&name, TYPE_A), None);
        assert_eq!(
            known
                .execute("near", None, None, &mut random())
                .unwrap()
                .instances
                .len(),
            1
        );
        // The nearest one has no instance.
        assert!(
            zone(&["dc3", "dc2"])
                .execute("near", None, None, &mut random())
                .is_err()
        );
        let place = Place::Datacenter("dc1".into());
        assert_eq!(
            zone(&[]).lacks_for(&name, TYPE_A),
            Some(Lack {
                place,
                missing: Missing::Lists
            })
        );
    }

    #[test]
    fn mesh_queries_need_all_of_the_own_datacenter() {
        let name = Name::from_text("near.query.consul").unwrap();
        for (connect, unloaded, is_lacking) in [
            (true, "dc1", true),
            (true, "dc2", false),
            (false, "dc1", false),
        ] {
            let mut live = live(&["dc1", "dc2"]);
            let queries = live.queries.get_mut("dc1").unwrap();
            Arc::make_mut(queries)[0].connect = connect;
            let place = Place::Datacenter(unloaded.into());
            live.places.get_mut(&place).unwrap().unloaded = 1;
            let lack = zone_of(live).lacks_for(&name, TYPE_A);
            let expected = is_lacking.then_some(Lack {
                place,
                missing: Missing::Lists,
            });
            assert_eq!(lack, expected, "{connect} {unloaded}");
        }
    }

    #[test]
    fn templates_are_filled_in() {
        let groups = ["geo-db-eu".to_owned(), "db".to_owned()];
        let filling = Filling {
            query_name: "geo-",
            name: "geo-db-eu",
            groups: &groups,
        };
        for (text, expected) in [
            ("${name.suffix}-${match(1)}", "db-eu-db"),
            ("${match(7)}x${name.prefix}${name.full}", "xgeo-geo-db-eu"),
            ("open ${match(1", "open ${match(1"),
        ] {
            assert_eq!(filling.fill(text), expected);
        }
    }

    const CATALOG: &str = r#"{
        "nodes": [
            {"node": "n1", "address": "10.0.0.1", "meta": {"rack": "r1", "x": "y"}},
            {"node": "n2", "address": "10.0.0.2", "meta": {"rack": "r1"}},
            {"node": "n3", "address": "10.0.0.3", "meta": {"rack": "r1"}},
            {"node": "n4", "address": "10.0.0.4", "meta": {"rack": "r2"}},
            {"node": "n5", "address": "10.0.0.5", "checks": [{"id": "disk", "status": "critical"}]}],
        "services": [
            {"node": "n1", "name": "web", "id": "a", "tags": ["v1", "old"], "meta": {"tier": "gold"}},
            {"node": "n2", "name": "web", "id": "b", "tags": ["V1"], "check": {"id": "up", "status": "warning"}},
            {"node": "n3", "name": "web", "id": "c", "tags": ["v1"], "check": {"id": "up", "status": "critical"}},
            {"node": "n4", "name": "web", "id": "d"},
            {"node": "n5", "name": "web", "id": "e"},
            {"node": "n1", "name": "db", "id": "x"},
            {"node": "n1", "name": "proxy", "id": "p", "proxy": {"destination_service": "web"}}],
        "queries": [
            {"id": "id-1", "name": "All", "service": "WEB"},
            {"id": "id-2", "name": "passing", "service": "web", "only_passing": true, "dns_ttl": "11s"},
            {"id": "id-3", "name": "ignored", "service": "web", "only_passing": true, "ignore_check_ids": ["x", "up"]},
            {"id": "id-4", "name": "disk", "service": "web", "ignore_check_ids": ["disk"]},
            {"id": "id-5", "name": "tag", "service": "web", "tags": ["v1"]},
            {"id": "id-6", "name": "no-tag", "service": "web", "tags": ["!old"]},
            {"id": "id-7", "name": "tags", "service": "web", "tags": ["v1", "!OLD"]},
            {"id": "id-8", "name": "node-meta", "service": "web", "node_meta": {"rack": "r1", "x": "y"}},
            {"id": "id-9", "name": "meta", "service": "web", "service_meta": {"tier": "gold"}},
            {"id": "id-10", "name": "mesh", "service": "web", "connect": true},
            {"id": "id-11", "name": "Geo-", "service": "${match(1)}", "template": {"regexp": "^geo-(.*)$"}},
            {"id": "id-12", "name": "geo-x-", "service": "web", "tags": ["v1"], "template": {}},
            {"id": "id-13", "name": "geo-x-exact", "service": "web", "node_meta": {"rack": "r2"}},
            {"id": "id-14", "name": "bad-", "service": "web", "template": {"regexp": "("}},
            {"id": "id-15", "name": "there", "service": "web", "datacenter": "dc2"},
            {"id": "id-16", "name": "sick", "service": "web", "node_meta": {"rack": "r3"}}],
        "datacenters": [{"name": "dc2"}, {"name": "dc3", "reachable": false}],
        "distance": {"n1": ["n1", "n4", "N2"], "n2": ["n4"]}}"#;

    fn zone_of_file(catalog: &str) -> Zone {
        let text = br#"{"consul": {"node_name": "n1", "dns_config": {"service_ttl": {"web": "7s", "*": "3s"}}}}"#;
        let (config, _) = Config::of_document("test", text).whole().unwrap().unwrap();
        let definitions =
            crate::definition::Definitions::read([("a.json", catalog.as_bytes())], &config);
        let registrations = definitions.whole().unwrap().registrations;
        let catalog = Catalog::build(registrations, &config, Visibility::all());
        Zone { config, catalog }
    }

    /// Returns the ids of the instances in this order, and the TTL.
    fn executed(
        zone: &Zone,
        name: &str,
        datacenter: Option<&str>,
        client: Option<IpAddr>,
    ) -> Result<(String, u32), Failure> {
        let random = &mut fastrand::Rng::with_seed(3);
        let Executed { instances, ttl } = zone.execute(name, datacenter, client, random)?;
        let ids = instances
            .iter()
            .map(|&id| zone.catalog.instance(id).id.as_str());
        Ok((ids.collect::<Vec<_>>().join(""), ttl))
    }

    #[test]
    fn queries_filter_instances() {
        // The last template with the longest prefix is found in any order.
        let mut reversed: serde_json::Value = serde_json::from_str(CATALOG).unwrap();
        reversed["queries"].as_array_mut().unwrap().reverse();
        for zone in [zone_of_file(CATALOG), zone_of_file(&reversed.to_string())] {
            for (name, datacenter, expected) in [
                // Keys of `service_ttl` are compared with the service as the query writes it.
                ("all", None, Ok(("abd", 3))),
                ("ID-1", Some("dc1"), Ok(("abd", 3))),
                ("passing", None, Ok(("ad", 11))),
                ("ignored", None, Ok(("abcd", 7))),
                ("disk", None, Ok(("abde", 7))),
                ("tag", None, Ok(("ab", 7))),
                ("no-tag", None, Ok(("bd", 7))),
                ("tags", None, Ok(("b", 7))),
                ("node-meta", None, Ok(("a", 7))),
                ("meta", None, Ok(("a", 7))),
                ("mesh", None, Ok(("p", 7))),
                ("geo-db", None, Ok(("x", 3))),
                ("geo-none", None, Err(Failure::NoSuchName)),
                ("geo-x-1", None, Ok(("ab", 7))),
                ("geo-x-exact", None, Ok(("d", 7))),
                ("id-11", None, Err(Failure::Server)),
                ("bad-1", None, Err(Failure::Server)),
                ("sick", None, Err(Failure::NoSuchName)),
                ("none", None, Err(Failure::NoSuchName)),
                ("there", None, Err(Failure::NoSuchName)),
                ("all", Some("dc2"), Err(Failure::NoSuchName)),
                ("all", Some("dc3"), Err(Failure::Server)),
                ("all", Some("dc4"), Err(Failure::NoSuchName)),
            ] {
                let found = executed(&zone, name, datacenter, None).map(|(ids, ttl)| {
                    let mut sorted: Vec<char> = ids.chars().collect();
                    sorted.sort_unstable();
                    (sorted.into_iter().collect::<String>(), ttl)
                });
                let expected = expected.map(|(ids, ttl)| (ids.to_owned(), ttl));
                assert_eq!(found, expected, "{name}");
            }
        }
    }

    #[test]
    fn nearest_instances_come_first() {
        let near = |near: &str, client: Option<&str>| {
            let mut catalog: serde_json::Value = serde_json::from_str(CATALOG).unwrap();
            catalog["queries"] =
                serde_json::json!([{"id": "1", "name": "q", "service": "web", "near": near}]);
            let zone = zone_of_file(&catalog.to_string());
            let client = client.map(|client| client.parse().unwrap());
            executed(&zone, "q", None, client).unwrap().0
        };
        for (from, client, expected) in [
            ("n1", None, "adb"),
            ("N1", None, "adb"),
            ("_agent", Some("10.0.0.2"), "adb"),
            // The node itself is first, though its own list lacks it; a is at an unknown distance.
            ("n2", None, "bda"),
            ("_ip", Some("10.0.0.2"), "bda"),
            ("_ip", Some("10.9.0.1"), "adb"),
            ("_ip", None, "adb"),
        ] {
            assert_eq!(near(from, client), expected, "{from} {client:?}");
        }
        // Without a node to measure from, or distances from it, the order is random.
        assert_eq!(near("", None).len(), 3);
    }

    #[test]
    fn templates_fill_every_member() {
        let text = |text: &str| text.to_owned();
        let meta = |value: &str| BTreeMap::from([(text("${name.full}"), text(value))]);
        let targets = |datacenter: &str, peer: &str| Failover {
            nearest: 2,
            targets: vec![
                FailoverTarget::Datacenter(text(datacenter)),
                FailoverTarget::Peer(text(peer)),
            ],
        };
        let mut template = Template {
            regexp: text("^geo-([a-z]+)-?([a-z]+)?$"),
            remove_empty_tags: true,
        };
        let query = PreparedQuery {
            id: text("1"),
            name: text("geo-"),
            datacenter: Some(text("dc2")),
            service: text("${ match( 1 ) }"),
            tags: [
                "${match(2)}",
                "!${match(2)}",
                "${x}",
                "!${x}",
                "a-${name.suffix}",
            ]
            .map(text)
            .into(),
            only_passing: true,
            ignore_check_ids: vec![text("${match(1)}")],
            node_meta: meta("${match(0)}"),
            service_meta: meta("${match(2)}!"),
            connect: true,
            near: text("${match(2)}"),
            ttl: Some(9),
            failover: targets("dc-${match(2)}", "p-${match(1)}"),
            template: Some(template.clone()),
        };
        let filled = |tags: &[&str], [service, near, all]: [&str; 3]| PreparedQuery {
            service: text(service),
            tags: tags.iter().map(|tag| text(tag)).collect(),
            node_meta: meta(all),
            service_meta: meta(&format!("{near}!")),
            near: text(near),
            failover: targets(&format!("dc-{near}"), &format!("p-{service}")),
            template: None,
            ..query.clone()
        };
        let found = fill_in(&query, &template, "geo-db-eu");
        let tags = ["eu", "!eu", "a-db-eu"];
        assert_eq!(found, Some(filled(&tags, ["db", "eu", "geo-db-eu"])));
        // A group that took no part is empty, like one that does not exist.
        let found = fill_in(&query, &template, "geo-db");
        assert_eq!(found, Some(filled(&["a-db"], ["db", "", "geo-db"])));
        template.remove_empty_tags = false;
        let found = fill_in(&query, &template, "geo-db");
        let tags = ["", "!", "", "!", "a-db"];
        assert_eq!(found, Some(filled(&tags, ["db", "", "geo-db"])));
        // The expression does not match.
        let found = fill_in(&query, &template, "geo-1");
        let tags = ["", "!", "", "!", "a-1"];
        assert_eq!(found, Some(filled(&tags, ["", "", ""])));
        template.regexp.clear();
        let found = fill_in(&query, &template, "geo-2");
        let tags = ["", "!", "", "!", "a-2"];
        assert_eq!(found, Some(filled(&tags, ["", "", ""])));
        template.regexp = text("(");
        assert_eq!(fill_in(&query, &template, "geo-2"), None);
    }

    #[test]
    fn failover_tries_places_once() {
        let zone = zone(&["dc1", "dc2", "dc5"]);
        let datacenter_target = |name: &str| FailoverTarget::Datacenter(name.to_owned());
        let places = |nearest, targets: &[FailoverTarget]| {
            let query = PreparedQuery {
                failover: Failover {
                    nearest,
                    targets: targets.to_vec(),
                },
                ..PreparedQuery::default()
            };
            let mut names = Vec::new();
            for place in zone.places_of(&query, "dc1") {
                names.push(match place {
                    Place::Datacenter(name) => name.to_string(),
                    Place::Peer(name) => format!("peer {name}"),
                });
            }
            names.join(", ")
        };
        let peer = FailoverTarget::Peer("East".to_owned());
        let dc2 = datacenter_target("DC2");
        assert_eq!(places(0, &[]), "dc1");
        assert_eq!(places(1, &[]), "dc1, dc2");
        assert_eq!(places(9, &[]), "dc1, dc2, dc5");
        assert_eq!(
            places(0, &[dc2.clone(), peer.clone(), dc2.clone(), peer.clone()]),
            "dc1, dc2, peer east"
        );
        assert_eq!(
            places(
                1,
                &[dc2, datacenter_target("dc1"), datacenter_target("dc9")]
            ),
            "dc1, dc2"
        );
    }
}
