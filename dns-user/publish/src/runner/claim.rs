//! Finds DNS Update Records that would delete each other's names.

use std::sync::Arc;

use super::launch::{LaunchOptions, environment, parameters, rules};
use crate::{
    plan::{PlanRules, Policy},
    provider::ProviderSettings,
    publication::Publication,
    record::Name,
    update_record::UpdateRecord,
};

/// The names that a publisher deletes unless documents want them: all of its owner in the zones that its settings
/// select.
struct Claim {
    settings: Box<dyn ProviderSettings>,
    /// Names of owner records: without the same ones, neither sees records of the other as its own.
    affixes: [String; 2],
    rules: PlanRules,
}

impl Claim {
    /// Returns `None` for a record that never deletes, or that cannot be launched.
    fn of(record: &UpdateRecord, name: &str, options: &LaunchOptions) -> Option<Self> {
        let parameters = parameters(record, name, options, environment);
        let rules = rules(&parameters, options).ok()?;
        if rules.owner.is_empty() {
            return None;
        }
        Some(Self {
            // `open` reports errors, and without settings nothing is deleted.
            settings: (record.provider.definition().configure)(&parameters).ok()?,
            affixes: ["txt-prefix", "txt-suffix"]
                .map(|name| parameters.text(name).unwrap_or_default().to_owned()),
            rules,
        })
    }

    /// Returns the zone, if any, in which both would delete the other's names.
    fn shared_zone(&self, other: &Self) -> Option<Name> {
        let deletes = self.rules.policy == Policy::Sync || other.rules.policy == Policy::Sync;
        let is_same_owner = self.rules.owner == other.rules.owner && self.affixes == other.affixes;
        if !deletes || !is_same_owner {
            return None;
        }
        let zones = self.settings.shared_zones(&*other.settings);
        zones.into_iter().find(|zone| {
            let shared = std::slice::from_ref(zone);
            self.rules.domains.overlaps(&other.rules.domains, shared)
        })
    }
}

/// Marks targets with the same owner in the same zone, each of which would delete the names of the
/// other: neither is published until one has another owner or other domains.
pub(super) fn mark_rivals(publication: &mut Publication, options: &LaunchOptions) {
    let mut claims: Vec<(String, Claim)> = Vec::new();
    for (name, target) in &publication.targets {
        if let Some(claim) = Claim::of(&target.record, name, options) {
            claims.push((name.clone(), claim));
        }
    }
    for (name, claim) in &claims {
        let Some((other, zone)) = rival(&claims, name, claim) else {
            continue;
        };
        let place = if zone.is_root() {
            "the same zones".to_owned()
        } else {
            format!("zone {zone}")
        };
        let problem = format!(
            "it has the same txt-owner-id {:?} in {place} as DNS Update Record {other}, so each would delete the \
             other's names; give each its own txt-owner-id, or a domain-filter that excludes the other's names",
            claim.rules.owner
        );
        if let Some(target) = publication.targets.get_mut(name) {
            Arc::make_mut(target).rival = Some(problem);
        }
    }
}

/// Returns the first other claim on the same names, and the zone.
fn rival<'a>(claims: &'a [(String, Claim)], name: &str, claim: &Claim) -> Option<(&'a str, Name)> {
    for (other, rival) in claims {
        if other != name
            && let Some(zone) = claim.shared_zone(rival)
        {
            return Some((other, zone));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        config::Config,
        text::{Problems, Reader, documents, parse},
    };

    /// Returns whether two records with the same owner are rivals.
    fn are_rivals(provider: &str, one: &Value, other: &Value) -> bool {
        let mut config = Config::default();
        let claim = |name: &str, parameters: &Value, config: &mut Config| {
            let mut document = serde_json::Map::new();
            let mut settings = std::collections::BTreeMap::new();
            for (parameter, value) in parameters.as_object().unwrap() {
                if crate::provider::Parameter::named(parameter).is_some() {
                    document.insert(parameter.clone(), value.clone());
                } else {
                    settings.insert(parameter.clone(), value.as_str().unwrap().to_owned());
                }
            }
            document.insert("txt-owner-id".to_owned(), "me".into());
            config.provider_settings.insert(name.to_owned(), settings);
            let spec = json!({"provider": provider, "external-dns-parameters": document});
            let body = json!({"metadata": {"name": "r"}, "spec": spec}).to_string();
            let problems = Problems::of("body");
            let node = parse(documents(&body)[0], &problems).unwrap();
            let record = UpdateRecord::read(&mut Reader::root(&node, &problems).fields().unwrap());
            record.unwrap_or_else(|| panic!("{body}: {:?}", problems.into_vec()))
        };
        let records = [("shop/a", one), ("shop/b", other)]
            .map(|(name, parameters)| (name, claim(name, parameters, &mut config)));
        let options = LaunchOptions::of(&config).unwrap();
        let [one, other] = records.map(|(name, record)| {
            Claim::of(&record, name, &options).unwrap_or_else(|| panic!("{name} has no claim"))
        });
        let found = one.shared_zone(&other).is_some();
        assert_eq!(other.shared_zone(&one).is_some(), found, "it is mutual");
        found
    }

    #[test]
    fn zones_that_settings_tell_apart_are_not_claimed_twice() {
        let role = |account: &str, name: &str| json!({"aws-assume-role": format!("arn:aws:iam::{account}:role/{name}")});
        let here = "111111111111";
        let there = "222222222222";
        for (one, other, expected) in [
            (json!({}), json!({}), true),
            // The commonest split horizon: a public and a private zone of one domain.
            (
                json!({"aws-zone-type": "public"}),
                json!({"aws-zone-type": "private"}),
                false,
            ),
            (json!({"aws-zone-type": "public"}), json!({}), true),
            (
                json!({"zone-id-filter": "Z1,Z2"}),
                json!({"zone-id-filter": "Z3"}),
                false,
            ),
            (
                json!({"zone-id-filter": "Z1,Z2"}),
                json!({"zone-id-filter": "/hostedzone/Z2"}),
                true,
            ),
            (
                json!({"zone-id-filter": "XZ1"}),
                json!({"zone-id-filter": "Z1"}),
                true,
            ),
            (
                json!({"aws-profile": "blue"}),
                json!({"aws-profile": "green"}),
                false,
            ),
            (
                json!({"aws-profile": "blue"}),
                json!({"aws-profile": "blue"}),
                true,
            ),
            (
                json!({"aws-zone-tags": "env=a"}),
                json!({"aws-zone-tags": "env=b"}),
                false,
            ),
            (
                json!({"aws-zone-tags": "env=a,x"}),
                json!({"aws-zone-tags": "env,team=b"}),
                true,
            ),
            (role(here, "dns"), role(there, "dns"), false),
            (role(here, "dns"), role(here, "other"), true),
            (role(here, "dns"), json!({}), false),
            (
                json!({"aws-region": "eu-west-1"}),
                json!({"aws-region": "cn-north-1"}),
                false,
            ),
            (
                json!({"aws-region": "eu-west-1"}),
                json!({"aws-region": "us-east-1"}),
                true,
            ),
            (
                json!({"domain-filter": "a.org"}),
                json!({"domain-filter": "b.org"}),
                false,
            ),
            (
                json!({"txt-prefix": "a-"}),
                json!({"txt-prefix": "b-"}),
                false,
            ),
            (
                json!({"policy": "upsert-only"}),
                json!({"policy": "upsert-only"}),
                false,
            ),
        ] {
            assert_eq!(are_rivals("aws", &one, &other), expected, "{one} {other}");
        }
    }

    #[test]
    fn every_provider_knows_its_zones() {
        let bind = |host: &str, zone: &str| json!({"rfc2136-host": host, "rfc2136-zone": zone, "rfc2136-insecure": true});
        for (one, other, expected) in [
            (bind("a", "x.org,y.org"), bind("a:53", "y.org,z.org"), true),
            (bind("a", "x.org"), bind("a", "y.org"), false),
            (bind("a", "x.org"), bind("a:54", "x.org"), false),
            (bind("a,b", "x.org"), bind("B", "X.org."), true),
        ] {
            assert_eq!(
                are_rivals("rfc2136", &one, &other),
                expected,
                "{one} {other}"
            );
        }
        for (one, other, expected) in [
            (json!({}), json!({}), true),
            (
                json!({"coredns-prefix": "/a"}),
                json!({"coredns-prefix": "a/"}),
                true,
            ),
            (
                json!({"coredns-prefix": "a"}),
                json!({"coredns-prefix": "b"}),
                false,
            ),
            (
                json!({"etcd-urls": "http://a:1,http://b:1"}),
                json!({"etcd-urls": "http://b:1/"}),
                true,
            ),
            (
                json!({"etcd-urls": "http://a:1"}),
                json!({"etcd-urls": "http://b:1"}),
                false,
            ),
        ] {
            assert_eq!(
                are_rivals("coredns", &one, &other),
                expected,
                "{one} {other}"
            );
        }
        for provider in ["webhook", "azure-private-dns", "aws-sd"] {
            for (one, other, expected) in [
                (json!({}), json!({}), true),
                (
                    json!({"webhook-provider-url": "http://localhost:8888/"}),
                    json!({}),
                    true,
                ),
                (
                    json!({"webhook-provider-url": "http://localhost:8889"}),
                    json!({}),
                    false,
                ),
            ] {
                assert_eq!(
                    are_rivals(provider, &one, &other),
                    expected,
                    "{provider} {one} {other}"
                );
            }
        }
    }
}
