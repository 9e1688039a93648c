//! The bill of materials: CycloneDX 1.5, with the crates linked into the binary and the BPF object.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use anyhow::Result;
use serde_json::{Value, json};

use super::{Release, archive};
use crate::process::{cargo_metadata, root};

/// Writes `bosh-dns-xdp.cdx.json`.
pub(super) fn write(release: &Release) -> Result<()> {
    let mut components = BTreeMap::new();
    crates(&root(), "dns-resolver", &["--filter-platform", "x86_64-unknown-linux-gnu"], &mut components)?;
    crates(&root().join("dns-ebpf"), "dns-ebpf", &[], &mut components)?;
    let bill = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": "bosh-dns-xdp",
                "name": "bosh-dns-xdp",
                "version": release.version,
                "licenses": [{"expression": "Apache-2.0"}],
                "properties": [{"name": "commit", "value": release.commit}],
            },
        },
        "components": components.into_values().collect::<Vec<_>>(),
    });
    let text = serde_json::to_string_pretty(&bill)? + "\n";
    archive::put(&release.out.join("bosh-dns-xdp.cdx.json"), text, 0o644)
}

/// Adds the crates linked into crate `of` of a workspace, by name and version.
fn crates(
    workspace: &Path,
    of: &str,
    arguments: &[&str],
    components: &mut BTreeMap<String, Value>,
) -> Result<()> {
    let metadata = cargo_metadata(workspace, arguments)?;
    let linked = linked(&metadata, of);
    for package in list(&metadata["packages"]) {
        if !package["id"].as_str().is_some_and(|id| linked.contains(id)) {
            continue;
        }
        let (name, version) = (text(&package["name"]), text(&package["version"]));
        let reference = format!("pkg:cargo/{name}@{version}");
        let mut component = json!({
            "type": "library", "bom-ref": reference, "purl": reference, "name": name, "version": version,
        });
        if let Some(license) = package["license"].as_str() {
            // Older crates separate alternatives by `/`, which is not valid SPDX.
            component["licenses"] = json!([{"expression": license.replace('/', " OR ")}]);
        }
        components.insert(reference, component);
    }
    Ok(())
}

/// Returns the ids of the packages linked into `of`: its normal dependencies, recursively.
fn linked<'a>(metadata: &'a Value, of: &str) -> BTreeSet<&'a str> {
    let nodes: BTreeMap<&str, &Value> =
        list(&metadata["resolve"]["nodes"]).iter().map(|node| (text(&node["id"]), node)).collect();
    let first = list(&metadata["packages"]).iter().find(|package| package["name"] == of);
    let mut found = BTreeSet::new();
    let mut left: Vec<&str> = first.map(|package| text(&package["id"])).into_iter().collect();
    while let Some(id) = left.pop() {
        if !found.insert(id) {
            continue;
        }
        let dependencies = nodes.get(id).map_or(&[][..], |node| list(&node["deps"]));
        let normal =
            |dependency: &&Value| list(&dependency["dep_kinds"]).iter().any(|kind| kind["kind"].is_null());
        left.extend(dependencies.iter().filter(normal).map(|dependency| text(&dependency["pkg"])));
    }
    found
}

/// Returns a list; empty if the value is not one.
fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Returns a string; empty if the value is not one.
fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
