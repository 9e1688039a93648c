//! Every key of config.json has a property of the BOSH job, or a stated reason for its absence; the other packages'
//! configurations, `check` and the reference know the same keys.

use std::collections::BTreeMap;

use dns_core::config::{Config, keys::ConfigKey};
use serde_json::{Value, json};
use whole_system_tests::server::merge;

use crate::job;

const SPEC: &str = include_str!("../../../deploy/bosh/jobs/bosh-dns/spec");
const REFERENCE: &str = include_str!("../../../docs/reference/configuration.md");

/// Returns the keys of the server and of the object `consul`.
fn keys() -> impl Iterator<Item = &'static ConfigKey> {
    dns_core::config::keys::KEYS
        .iter()
        .chain(dns_consul::config::KEYS)
}

/// Returns the names of the job's properties.
fn properties() -> Vec<&'static str> {
    let mut found = Vec::new();
    for line in SPEC.lines() {
        let name = line
            .strip_prefix("  ")
            .and_then(|line| line.strip_suffix(':'));
        if let Some(name) = name.filter(|name| !name.starts_with([' ', '#'])) {
            found.push(name);
        }
    }
    found
}

/// Returns the keys that the job's comment lists as set by the job itself, with the reasons.
fn absent() -> BTreeMap<&'static str, &'static str> {
    let mut found = BTreeMap::new();
    for line in SPEC.lines() {
        if let Some((key, reason)) = line
            .strip_prefix("  # * ")
            .and_then(|line| line.split_once(": "))
        {
            assert!(
                !reason.is_empty() && found.insert(key, reason).is_none(),
                "{line}"
            );
        }
    }
    found
}

/// Returns whether the property is the key or an object or list around it.
fn contains(property: &str, key: &str) -> bool {
    key.strip_prefix(property)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

#[test]
fn every_key_has_a_property_or_a_reason() {
    let (properties, mut absent) = (properties(), absent());
    for ConfigKey { path, .. } in keys() {
        let has_property = properties.iter().any(|property| contains(property, path));
        let has_reason = absent.remove(path).is_some();
        assert!(
            has_property || has_reason,
            "{path}: the director drops it, without a word"
        );
        assert!(!(has_property && has_reason), "{path}: has a property");
    }
    assert!(absent.is_empty(), "no such keys: {absent:?}");
}

#[test]
fn every_key_is_in_the_reference() {
    for ConfigKey { path, .. } in keys() {
        assert!(REFERENCE.contains(&format!("| `{path}` |")), "{path}");
    }
}

/// Returns an object with this value at a path.
fn at(path: &str, value: Value) -> Value {
    path.rsplit('.')
        .fold(value, |value, name| json!({name: value}))
}

/// Sets every property to the key's example; config.json must have it there.
#[test]
fn properties_reach_the_configuration() {
    let properties = properties();
    // One of several outputs, at a time.
    for output in ["dnstap.socket", "dnstap.file", "dnstap.tcp"] {
        let mut manifest = job::certificates("api", "CERT");
        // Its opposite is among the examples.
        merge(&mut manifest, &json!({"override_nameserver": false}));
        let mut expected = json!({});
        for ConfigKey { path, example, .. } in keys() {
            let is_other_output =
                matches!(*path, "dnstap.socket" | "dnstap.file" | "dnstap.tcp") && *path != output;
            if is_other_output
                || path.contains("[]")
                || !properties.iter().any(|name| contains(name, path))
            {
                continue;
            }
            let value: Value = serde_json::from_str(example).unwrap();
            // Health checks would need certificates.
            let value = if *path == "health.enabled" {
                json!(false)
            } else {
                value
            };
            merge(&mut manifest, &at(path, value.clone()));
            merge(&mut expected, &at(path, value));
        }
        let rendered = job::render(&[json!({"properties": manifest})])
            .unwrap()
            .remove(0);
        let files = rendered.unwrap();
        let found: Value = serde_json::from_str(&files["config/config.json"]).unwrap();
        let mut merged = found.clone();
        merge(&mut merged, &expected);
        for (key, value) in merged.as_object().unwrap() {
            assert_eq!(&found[key], value, "{output}: {key}");
        }
        assert_no_unknown_keys("the job", &found.to_string());
    }
}

/// Requires that the server knows every member.
fn assert_no_unknown_keys(place: &str, text: &str) {
    let (errors, loaded) = Config::check(place, text.as_bytes());
    let loaded = loaded.unwrap_or_else(|| panic!("{errors:?}"));
    let warnings: Vec<String> = loaded.warnings.iter().map(ToString::to_string).collect();
    assert!(
        !warnings.iter().any(|warning| warning.contains("unknown")),
        "{place}: {warnings:?}"
    );
    let consul = dns_consul::config::Config::of_document(place, text.as_bytes());
    if let Some((_, warnings)) = consul.valid {
        assert!(
            !warnings.iter().any(|warning| warning.contains("unknown")),
            "{place}: {warnings:?}"
        );
    }
}

#[test]
fn packaged_configurations_have_known_keys() {
    assert_no_unknown_keys("debian", include_str!("../../../deploy/debian/config.json"));
    assert_no_unknown_keys(
        "container",
        include_str!("../../../deploy/container/config.json"),
    );
    let manifest = include_str!("../../../deploy/kubernetes/node-local-dns.yml");
    let (_, text) = manifest.split_once("  config.json: |\n").unwrap();
    let (text, _) = text.split_once("\n  handlers.json:").unwrap();
    assert_no_unknown_keys("kubernetes", text);
}
