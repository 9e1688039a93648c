//! Dependencies of the project, checked against `deny.toml`: licences, bans, sources, and unused
//! ones.
//!
//! The checks run over `cargo metadata`, because building cargo-deny takes longer than all other
//! checks together. Advisories are not checked: their database needs the network. Use `cargo deny
//! check` for them.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read its input has failed"
)]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;
use toml_edit::DocumentMut;

use crate::sources::root;

/// Returns cargo's metadata of a workspace for the build target.
fn metadata(folder: &Path) -> Value {
    let output = Command::new("cargo")
        .args([
            "metadata",
            "--format-version=1",
            "--locked",
            "--filter-platform=x86_64-unknown-linux-gnu",
        ])
        .current_dir(folder)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Returns the packages of all workspaces that are compiled for the target.
fn packages() -> Vec<Value> {
    let of_workspace = |folder: PathBuf| {
        let metadata = metadata(&folder);
        let resolved: BTreeSet<String> = items(&metadata["resolve"]["nodes"], "id");
        let packages = metadata["packages"].as_array().unwrap().clone();
        packages
            .into_iter()
            .filter(move |package| resolved.contains(package["id"].as_str().unwrap()))
    };
    workspaces().into_iter().flat_map(of_workspace).collect()
}

/// Returns a member of each item in a list.
fn items(list: &Value, member: &str) -> BTreeSet<String> {
    let items = list.as_array().unwrap().iter();
    items
        .map(|item| item[member].as_str().unwrap().to_owned())
        .collect()
}

/// Returns the folders of the server's workspace and of the BPF crates.
fn workspaces() -> [PathBuf; 4] {
    [
        root().to_owned(),
        root().join("dns-ebpf"),
        root().join("benches/programs/ebpf"),
        root().join("dns-user/load/ebpf"),
    ]
}

fn rules() -> DocumentMut {
    fs::read_to_string(root().join("deny.toml"))
        .unwrap()
        .parse()
        .unwrap()
}

/// Returns the strings of a list in the rules.
fn listed(rules: &DocumentMut, table: &str, list: &str) -> BTreeSet<String> {
    let list = rules[table][list].as_array().unwrap().iter();
    list.map(|item| item.as_str().unwrap().to_owned()).collect()
}

#[test]
fn every_licence_is_allowed() {
    let allowed = listed(&rules(), "licenses", "allow");
    let mut refused = Vec::new();
    for package in packages() {
        let expression = package["license"].as_str().unwrap_or("none stated");
        if !is_satisfied(expression, &allowed) {
            refused.push(format!(
                "{} {}: {expression}",
                package["name"], package["version"]
            ));
        }
    }
    assert!(
        refused.is_empty(),
        "licences that deny.toml does not allow:\n{}",
        refused.join("\n")
    );
}

#[test]
fn banned_crates_need_wrappers() {
    let rules = rules();
    let dependents = dependents();
    for entry in rules["bans"]["deny"].as_array().unwrap() {
        let entry = entry.as_inline_table().unwrap();
        let text = |member: &str| entry.get(member).unwrap().as_str().unwrap();
        let wrappers = entry.get("wrappers").and_then(toml_edit::Value::as_array);
        let wrappers: BTreeSet<&str> = wrappers
            .into_iter()
            .flatten()
            .filter_map(|name| name.as_str())
            .collect();
        for dependent in dependents.get(text("crate")).into_iter().flatten() {
            let (banned, reason) = (text("crate"), text("reason"));
            assert!(
                wrappers.contains(dependent.as_str()),
                "{banned} is banned, but {dependent} uses it: {reason}"
            );
        }
    }
}

/// Returns the crates that use each crate, with the built features.
fn dependents() -> BTreeMap<String, BTreeSet<String>> {
    let mut dependents: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for folder in workspaces() {
        let metadata = metadata(&folder);
        let names: BTreeMap<&str, &str> = metadata["packages"]
            .as_array()
            .unwrap()
            .iter()
            .map(|package| {
                (
                    package["id"].as_str().unwrap(),
                    package["name"].as_str().unwrap(),
                )
            })
            .collect();
        for node in metadata["resolve"]["nodes"].as_array().unwrap() {
            for used in node["deps"].as_array().unwrap() {
                let used = names[used["pkg"].as_str().unwrap()].to_owned();
                dependents
                    .entry(used)
                    .or_default()
                    .insert(names[node["id"].as_str().unwrap()].to_owned());
            }
        }
    }
    dependents
}

#[test]
fn daemon_needs_no_command_line() {
    // Of this package alone: cargo metadata, and cargo with this variable, join the features of all packages.
    let output = Command::new("cargo")
        .env_remove("CARGO_RESOLVER_FEATURE_UNIFICATION")
        .args([
            "tree",
            "--locked",
            "--package=dns-resolver",
            "--edges=normal,build,dev",
            "--prefix=none",
        ])
        .current_dir(root())
        .output()
        .unwrap();
    let tree = String::from_utf8(output.stdout).unwrap();
    assert!(
        tree.contains("dns-kit ") && tree.contains("test-support "),
        "{tree}"
    );
    for line in tree.lines() {
        let name = line.split(' ').next().unwrap_or_default();
        let is_of_commands = ["clap", "clap_complete", "clap_mangen", "ratatui"].contains(&name);
        assert!(
            !is_of_commands,
            "dns-resolver uses {name}: see `cargo tree --invert`"
        );
    }
}

#[test]
fn crate_registries_are_allowed() {
    let allowed = listed(&rules(), "sources", "allow-registry");
    for package in packages() {
        // Crates without a source are part of this project.
        let Some(source) = package["source"].as_str() else {
            continue;
        };
        let registry = source.strip_prefix("registry+").unwrap_or(source);
        assert!(
            allowed.contains(registry),
            "{} comes from {source}",
            package["name"]
        );
    }
}

#[test]
fn no_dependency_is_unused() {
    let mut unused = Vec::new();
    for folder in workspaces() {
        let metadata = metadata(&folder);
        let crates = crate_names(&metadata);
        let members = metadata["workspace_members"].as_array().unwrap();
        for package in metadata["packages"].as_array().unwrap() {
            if !members.contains(&package["id"]) {
                continue;
            }
            let manifest = Path::new(package["manifest_path"].as_str().unwrap());
            let own = manifest.parent().unwrap();
            let mut sources = String::new();
            read_sources(own, &mut sources);
            for target in package["targets"].as_array().unwrap() {
                let source = Path::new(target["src_path"].as_str().unwrap());
                let source = source.canonicalize().unwrap();
                // The bench's skeleton is the server's programs, compiled with another feature.
                if !source.starts_with(own) {
                    read_sources(source.parent().unwrap(), &mut sources);
                }
            }
            for dependency in package["dependencies"].as_array().unwrap() {
                let package_name = dependency["name"].as_str().unwrap();
                let name = dependency["rename"].as_str().unwrap_or(package_name);
                // Packages that are not compiled for the target have no entry.
                let crate_name = crates
                    .get(name)
                    .cloned()
                    .unwrap_or_else(|| name.replace('-', "_"));
                if !is_mentioned(&sources, &crate_name) {
                    unused.push(format!("{}: {name}", package["name"]));
                }
            }
        }
    }
    assert!(
        unused.is_empty(),
        "dependencies that no source file mentions:\n{}",
        unused.join("\n")
    );
}

/// Returns the library names of packages, which may differ from the package names.
fn crate_names(metadata: &Value) -> BTreeMap<String, String> {
    let mut names = BTreeMap::new();
    for package in metadata["packages"].as_array().unwrap() {
        for target in package["targets"].as_array().unwrap() {
            let kinds = target["kind"].as_array().unwrap();
            if kinds
                .iter()
                .any(|kind| ["lib", "proc-macro", "rlib"].contains(&kind.as_str().unwrap()))
            {
                let text = |value: &Value| value.as_str().unwrap().to_owned();
                names.insert(
                    text(&package["name"]),
                    text(&target["name"]).replace('-', "_"),
                );
            }
        }
    }
    names
}

/// Appends the source files below a folder, except for nested crates.
fn read_sources(folder: &Path, sources: &mut String) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            if path.file_name().unwrap() != "target" && !path.join("Cargo.toml").exists() {
                read_sources(&path, sources);
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            for module in modules_elsewhere(&text).map(|module| folder.join(module)) {
                // `mod.rs` represents its folder.
                match module.file_name() {
                    Some(name) if name == "mod.rs" => {
                        read_sources(module.parent().unwrap(), sources)
                    }
                    _ => sources.push_str(&fs::read_to_string(&module).unwrap()),
                }
            }
            sources.push_str(&text);
        }
    }
}

/// Returns the modules of other crates included in a source file by `#[path = "../.."]`.
fn modules_elsewhere(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .filter_map(|line| {
            line.trim_start()
                .strip_prefix("#[path = \"")?
                .split_once('"')
        })
        .map(|(path, _)| path)
        .filter(|path| path.starts_with("../"))
}

/// Returns whether a name occurs as a word in a text, outside comments.
fn is_mentioned(sources: &str, name: &str) -> bool {
    let is_word = |character: char| character.is_alphanumeric() || character == '_';
    let code = sources
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    code.into_iter().any(|line| {
        line.match_indices(name).any(|(at, _)| {
            let before = line[..at].chars().next_back();
            let after = line[at + name.len()..].chars().next();
            !before.is_some_and(is_word) && !after.is_some_and(is_word)
        })
    })
}

//----------- Licence expressions (SPDX) -------------------------------------

/// Evaluates a licence expression: `OR` (or `/` in older crates) needs one side, `AND` both; an
/// exception (`WITH`) only permits more.
fn is_satisfied(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = expression
        .replace('(', " ( ")
        .replace(')', " ) ")
        .replace('/', " OR ");
    let mut words = spaced.split_whitespace().peekable();
    let holds = any_of(&mut words, allowed);
    holds && words.next().is_none()
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn any_of(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> bool {
    let mut holds = all_of(words, allowed);
    while words.next_if_eq(&"OR").is_some() {
        holds |= all_of(words, allowed);
    }
    holds
}

fn all_of(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> bool {
    let mut holds = one(words, allowed);
    while words.next_if_eq(&"AND").is_some() {
        holds &= one(words, allowed);
    }
    holds
}

/// Evaluates a licence, or an expression in parentheses.
fn one(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> bool {
    let Some(word) = words.next() else {
        return false;
    };
    if word == "(" {
        let holds = any_of(words, allowed);
        return words.next() == Some(")") && holds;
    }
    if words.next_if_eq(&"WITH").is_some() {
        words.next();
    }
    allowed.contains(word)
}

#[test]
fn licence_expressions_are_understood() {
    let allowed = BTreeSet::from(["MIT".to_owned(), "ISC".to_owned()]);
    for good in [
        "MIT",
        "GPL-3.0 OR MIT",
        "GPL-3.0/MIT",
        "MIT AND ISC",
        "(GPL-3.0 OR MIT) AND ISC",
        "MIT WITH x",
    ] {
        assert!(is_satisfied(good, &allowed), "{good}");
    }
    for bad in [
        "GPL-3.0",
        "MIT AND GPL-3.0",
        "(MIT OR ISC) AND GPL-3.0",
        "none stated",
        "",
        "(MIT",
    ] {
        assert!(!is_satisfied(bad, &allowed), "{bad}");
    }
}
