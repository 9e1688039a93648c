//! Empty non-terminals: names without addresses but with names below them (RFC 8020). A resolver
//! with QNAME minimisation (RFC 9156) queries them first and applies NXDOMAIN to the whole subtree.

use smallvec::SmallVec;

use crate::{
    catalog::Snapshot,
    name::Name,
    query::{AGENT_DOMAIN, Pattern, group_id},
};

/// Returns whether the fleet has a name below `name`: an instance's long or short form, a domain of
/// the records, an agent's name, or an alias.
pub(super) fn has_names_below(snapshot: &Snapshot, name: &Name) -> bool {
    let wire = name.as_wire();
    if wire == AGENT_DOMAIN {
        return snapshot.instance_index().agent_id.dictionary.len() > 0;
    }
    if snapshot.has_alias_below(wire) {
        return true;
    }
    let mut domains = snapshot.domains();
    if domains.any(|domain| domain.suffixes().any(|suffix| suffix == wire)) {
        return true;
    }
    let instances = snapshot.instance_index();
    let Some((domain, domain_labels)) = instances.domain_names.longest(name) else { return false };
    let labels: SmallVec<[&[u8]; 8]> = name.labels().collect();
    let above = &labels[..labels.len() - domain_labels];
    let is_place = |patterns: [Pattern<'_>; 3]| !instances.places.find(domain, &patterns).is_empty();
    match *above {
        [label] => {
            let group = group_id(label).and_then(|id| instances.groups.find(id));
            let in_domain = |group| {
                instances.by_group.rows(group).iter().any(|&row| instances.place_of(row).domain == domain)
            };
            group.is_some_and(in_domain) || is_place([Pattern::Any, Pattern::Any, Pattern::Exact(label)])
        }
        [network, deployment] => {
            is_place([Pattern::Any, Pattern::Exact(network), Pattern::Exact(deployment)])
        }
        [instance_group, network, deployment] => {
            is_place([instance_group, network, deployment].map(Pattern::Exact))
        }
        _ => false,
    }
}

/// Returns whether a name that is not local exists because of an alias or a domain of the records
/// below it; false for the root, and if empty non-terminals get NXDOMAIN.
pub fn is_above_local(snapshot: &Snapshot, name: &Name) -> bool {
    let mut domains = snapshot.domains();
    name.label_count() > 0
        && !snapshot.rules().nxdomain_for_empty_non_terminals
        && (snapshot.has_alias_below(name.as_wire()) || domains.any(|domain| domain.is_within(name)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        catalog::{AliasFiles, NameRules, Records},
        resolve::{AllRunning, Existence, resolve},
    };

    /// Builds two instances, one with a group, and aliases.
    fn snapshot(rules: NameRules) -> Snapshot {
        let records =
            br#"{"record_keys": ["id", "instance_group", "group_ids", "network", "deployment", "ip",
            "domain"], "record_infos": [["a", "web", ["1"], "net", "dep", "10.0.0.1", "bosh"],
            ["b", "db", ["2"], "net", "other", "10.0.0.2", "inner.my.tld"]]}"#;
        let aliases = br#"{"x.deep.alias.bosh": ["10.0.0.9"], "_.any.bosh": ["_.web.net.dep.bosh"],
            "db.alias.test": ["10.0.0.9"]}"#;
        let (records, _) = Records::parse(records).unwrap();
        let (aliases, _) = AliasFiles::parse([("aliases.json", &aliases[..])]).unwrap();
        Snapshot::build(records, &aliases).0.with_rules(rules)
    }

    /// Returns whether a name exists under `rules`.
    fn existence(rules: NameRules, name: &str) -> Existence {
        resolve(&snapshot(rules), &AllRunning, &Name::from_text(name).unwrap()).unwrap().existence
    }

    #[test]
    fn empty_non_terminals_exist() {
        let modern = NameRules { formerr_for_malformed: false, nxdomain_for_empty_non_terminals: false };
        for name in [
            "bosh",
            "dep.bosh",
            "net.dep.bosh",
            "web.net.dep.bosh",
            "q-g1.bosh",
            "alias.bosh",
            "deep.alias.bosh",
            "any.bosh",
            "a.web.net.dep.bosh",
            "q-s0.q-g1.bosh",
        ] {
            assert_eq!(existence(modern, name), Existence::Found, "{name}");
        }
        for name in [
            "nonsense.bosh",
            "other.bosh",
            "net.other.bosh",
            "db.net.dep.bosh",
            "q-g2.bosh",
            "q-g9.bosh",
            "www.nonsense.bosh",
            "x.web.net.dep.bosh",
            "y.deep.alias.bosh",
            "a.b.c.d.e.f.bosh",
        ] {
            assert_eq!(existence(modern, name), Existence::NoSuchName, "{name}");
        }
    }

    #[test]
    fn names_above_domains_and_aliases_exist() {
        let modern = NameRules { formerr_for_malformed: false, nxdomain_for_empty_non_terminals: false };
        let (modern, reference) = (snapshot(modern), snapshot(NameRules::default()));
        for (name, expected) in [
            ("my.tld", true),
            ("tld", true),
            ("alias.test", true),
            ("test", true),
            ("other.tld", false),
            (".", false),
        ] {
            let name = Name::from_text(name).unwrap();
            assert_eq!(is_above_local(&modern, &name), expected, "{name}");
            assert!(!is_above_local(&reference, &name), "{name}");
        }
    }

    #[test]
    fn default_rules_match_bosh_dns() {
        let reference = NameRules::default();
        for (name, expected) in [
            ("bosh", Existence::NoSuchName),
            ("net.dep.bosh", Existence::NoSuchName),
            ("dep.bosh", Existence::Malformed),
            ("nonsense.bosh", Existence::Malformed),
        ] {
            assert_eq!(existence(reference, name), expected, "{name}");
        }
    }
}
