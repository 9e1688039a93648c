//! The crates linked into the programs and the BPF objects: the bill of materials (CycloneDX 1.5), and licence
//! texts and notices, as the licences require.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Release, archive};
use crate::{
    IDENTITY, LOAD, PUBLISHER, SERVER, SYNC,
    process::{cargo_metadata, root},
};

/// File names, in upper case, that hold licence texts or notices.
const NOTICES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE"];

/// Stands for the licence text of crates whose package has none.
const WITHOUT_TEXT: &str = "The packages of these crates contain no licence text. They are used under the \
                            licence stated above; its standard text is at https://spdx.org/licenses.";

/// Linked crates by package URL.
pub(super) type Crates = BTreeMap<String, Crate>;

pub(super) struct Crate {
    package: Value,
    programs: BTreeSet<&'static str>,
}

impl Crate {
    fn field(&self, name: &str) -> &str {
        text(&self.package[name])
    }
}

/// Writes `bosh-dns-xdp.cdx.json`.
pub(super) fn write_bill(release: &Release, crates: &Crates) -> Result<()> {
    let components: Vec<Value> = crates
        .iter()
        .map(|(reference, linked)| {
            let programs = linked
                .programs
                .iter()
                .copied()
                .collect::<Vec<_>>()
                .join(" ");
            let mut component = json!({
                "type": "library",
                "bom-ref": reference,
                "purl": reference,
                "name": linked.field("name"),
                "version": linked.field("version"),
                "properties": [{"name": "programs", "value": programs}],
            });
            if let Some(license) = linked.package["license"].as_str() {
                // Older crates separate alternatives by `/`, which is not valid SPDX.
                component["licenses"] = json!([{"expression": license.replace('/', " OR ")}]);
            }
            component
        })
        .collect();
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
        "components": components,
    });
    let text = serde_json::to_string_pretty(&bill)? + "\n";
    archive::put(&release.out.join("bosh-dns-xdp.cdx.json"), text, 0o644)
}

/// Returns all notices as one text. Crates with the same text share it.
pub(super) fn notices(crates: &Crates) -> Result<String> {
    let mut crates_by_text: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for linked in crates
        .values()
        // Crates of this workspace have no source; their licence is the project's.
        .filter(|linked| !linked.package["source"].is_null())
    {
        let title = format!(
            "{} {} ({})",
            linked.field("name"),
            linked.field("version"),
            linked.field("license")
        );
        let files = notice_files(Path::new(linked.field("manifest_path")))?;
        if files.is_empty() {
            crates_by_text
                .entry(WITHOUT_TEXT.to_owned())
                .or_default()
                .push(title.clone());
        }
        for file in files {
            let bytes = fs::read(&file).with_context(|| file.display().to_string())?;
            // The same licence of two crates may differ in final newlines only.
            let text = String::from_utf8_lossy(&bytes).trim().to_owned();
            crates_by_text.entry(text).or_default().push(title.clone());
        }
    }
    let mut all =
        "Licences and notices of the Rust crates linked into these programs.\n".to_owned();
    for (text, mut titles) in crates_by_text {
        // A crate may have one text under two names.
        titles.dedup();
        // Writing to a String cannot fail.
        let _ = write!(
            all,
            "\n{0}\n{1}\n{0}\n\n{text}\n",
            "=".repeat(80),
            titles.join("\n")
        );
    }
    Ok(all)
}

/// Returns the files beside a manifest that hold licences or notices, sorted.
fn notice_files(manifest: &Path) -> Result<Vec<PathBuf>> {
    let folder = manifest.parent().context("a manifest without a folder")?;
    let mut files = archive::files(folder)?;
    files.retain(|path| {
        let name = super::name(path).to_uppercase();
        // `LICENSE-MIT` and `LICENSE.md` are usual, and `LICENSES` may be a folder.
        path.is_file() && NOTICES.iter().any(|prefix| name.starts_with(prefix))
    });
    Ok(files)
}

/// Returns the crates linked into all programs and BPF objects.
pub(super) fn linked_crates() -> Result<Crates> {
    let mut crates = BTreeMap::new();
    let ours = cargo_metadata(root(), &["--filter-platform", "x86_64-unknown-linux-gnu"])?;
    for [package, program] in [SERVER, PUBLISHER, IDENTITY, SYNC, LOAD] {
        add_linked(&ours, package, program, &mut crates);
    }
    // The programs are a workspace of their own, and are embedded into the server.
    let bpf = cargo_metadata(&root().join("dns-ebpf"), &[])?;
    add_linked(&bpf, "dns-ebpf", SERVER[1], &mut crates);
    let bpf = cargo_metadata(&root().join("dns-user/load/ebpf"), &[])?;
    add_linked(&bpf, "load-ebpf", LOAD[1], &mut crates);
    Ok(crates)
}

/// Adds the crates linked into the package `of`: its normal dependencies, recursively.
fn add_linked(metadata: &Value, of: &str, program: &'static str, crates: &mut Crates) {
    let mut nodes = BTreeMap::new();
    for node in list(&metadata["resolve"]["nodes"]) {
        nodes.insert(text(&node["id"]), node);
    }
    let mut packages = BTreeMap::new();
    let mut left = Vec::new();
    for package in list(&metadata["packages"]) {
        packages.insert(text(&package["id"]), package);
        if package["name"] == of {
            left.push(text(&package["id"]));
        }
    }
    let mut found = BTreeSet::new();
    while let Some(id) = left.pop() {
        // Most crates are dependencies of several others.
        if !found.insert(id) {
            continue;
        }
        let dependencies = nodes.get(id).map_or(&[][..], |node| list(&node["deps"]));
        for dependency in dependencies {
            let mut kinds = list(&dependency["dep_kinds"]).iter();
            // Null is the kind of normal dependencies.
            if kinds.any(|kind| kind["kind"].is_null()) {
                left.push(text(&dependency["pkg"]));
            }
        }
    }
    for package in found.into_iter().filter_map(|id| packages.get(id)) {
        let reference = format!(
            "pkg:cargo/{}@{}",
            text(&package["name"]),
            text(&package["version"])
        );
        let linked = crates.entry(reference).or_insert_with(|| Crate {
            package: (*package).clone(),
            programs: BTreeSet::new(),
        });
        linked.programs.insert(program);
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Returns a string; empty if the value is not one.
fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notices_cover_linked_crates() {
        let text = notices(&linked_crates().unwrap()).unwrap();
        let has = |name: &str| text.lines().any(|line| line.starts_with(name));
        for name in ["tokio ", "aya ", "aya-ebpf ", "ring ", "async-nats "] {
            assert!(has(name), "{name} has no notice");
        }
        assert!(!has("proptest "), "only tests link it");
    }

    #[test]
    fn bill_names_programs_of_crates() {
        let crates = linked_crates().unwrap();
        let programs = |name: &str| {
            let linked = crates
                .values()
                .find(|linked| linked.field("name") == name)
                .unwrap();
            linked.programs.iter().copied().collect::<Vec<_>>()
        };
        assert_eq!(programs("async-nats"), ["bosh-dns-sync"]);
        assert!(programs("dns-core").contains(&"bosh-dns-xdp") && programs("dns-core").len() == 5);
    }
}
