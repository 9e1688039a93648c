//! Conversion of catalogs to bosh-dns aliases: each case of `tests/aliases` contains a catalog, records, and
//! the expected aliases and notes.

use std::{collections::BTreeSet, fs, net::IpAddr, path::Path};

use dns_consul::{
    Zone,
    aliases::{Aliases, aliases},
    catalog::Catalog,
    config::Config,
    definition::Definitions,
};
use dns_core::{
    catalog::{AliasFiles, Records, Snapshot},
    config::{json::Json, reader::Reader},
    link_address::Status,
    name::Name,
    resolve::{AllRunning, resolve},
};
use serde::Deserialize;
use serde_json::{Value, json};

/// If set, the test rewrites the expected files, for review as a diff.
const WRITE_VARIABLE: &str = "BOSH_DNS_WRITE_GOLDEN";

#[derive(Deserialize)]
struct Case {
    config: Value,
    catalog: Value,
    records: Value,
    /// Instances to include, by health.
    status: String,
    #[serde(default)]
    aliases: Value,
    #[serde(default)]
    notes: Vec<String>,
}

/// All cases with their files.
fn cases() -> Vec<(std::path::PathBuf, Case)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/aliases");
    let files =
        fs::read_dir(folder).expect("the folder of the cases").map(|entry| entry.expect("an entry").path());
    let read = |path: std::path::PathBuf| {
        let case = serde_json::from_slice(&fs::read(&path).expect("a file")).expect("a case");
        (path, case)
    };
    let cases: Vec<_> = files.map(read).collect();
    assert!(cases.len() >= 3, "cases are missing");
    cases
}

/// Configuration and catalog of a case.
fn zone_of(case: &Case) -> Zone {
    let json = Json::parse(case.config.to_string().as_bytes()).expect("JSON");
    let config = Config::read(&Reader::document("case", &json).expect("an object")).expect("a configuration");
    let text = case.catalog.to_string();
    let definitions =
        Definitions::read([("case.json", text.as_bytes())], &config).whole().expect("definitions");
    assert_eq!(definitions.warnings, [""; 0]);
    let catalog = Catalog::build(definitions.registrations, &config, config.visibility.clone());
    Zone { config, catalog }
}

/// The records of a case with these aliases.
fn snapshot_of(case: &Case, aliases: &AliasFiles) -> Snapshot {
    let (records, warnings) = Records::parse(case.records.to_string().as_bytes()).expect("records");
    assert!(warnings.is_empty(), "{warnings:?}");
    let (snapshot, warnings) = Snapshot::build(records, aliases);
    assert!(warnings.is_empty(), "{warnings:?}");
    snapshot
}

fn made_of(case: &Case) -> Aliases {
    let health = if case.status == "healthy" { Status::Healthy } else { Status::Smart };
    aliases(&zone_of(case), &snapshot_of(case, &AliasFiles::default()), health)
}

#[test]
fn catalogs_become_the_expected_aliases() {
    for (path, case) in cases() {
        let Aliases { targets, notes } = made_of(&case);
        let targets = serde_json::to_value(&targets).expect("texts");
        if std::env::var_os(WRITE_VARIABLE).is_some() {
            let mut value: Value = serde_json::from_slice(&fs::read(&path).expect("a file")).expect("JSON");
            (value["aliases"], value["notes"]) = (targets, json!(notes));
            let text = serde_json::to_string_pretty(&value).expect("JSON") + "\n";
            fs::write(&path, text).expect("a folder that can be written");
            continue;
        }
        assert_eq!(targets, case.aliases, "{}", path.display());
        assert_eq!(notes, case.notes, "{}", path.display());
    }
}

#[test]
fn aliases_match_consul() {
    let mut compared = 0;
    for (path, case) in cases() {
        let zone = zone_of(&case);
        let made = serde_json::to_vec(&made_of(&case).targets).expect("texts");
        let (files, warnings) = AliasFiles::parse([("made.json", made.as_slice())]).expect("an alias file");
        assert!(warnings.is_empty(), "{warnings:?}");
        let snapshot = snapshot_of(&case, &files);
        let names =
            case.aliases.as_object().expect("aliases").keys().filter(|alias| !alias.starts_with("_."));
        for alias in names {
            let name = Name::from_text(alias).expect("a name");
            // Instances failing in Consul stay included, because BOSH decides about health from now on.
            let Some(consul) = zone.publishable(&name) else { continue };
            let ours = resolve(&snapshot, &AllRunning, &name).expect("a name of ours");
            let all = |v4: Vec<_>, v6: Vec<_>| -> BTreeSet<IpAddr> {
                v4.into_iter().map(IpAddr::V4).chain(v6.into_iter().map(IpAddr::V6)).collect()
            };
            assert_eq!(all(ours.v4, ours.v6), all(consul.v4, consul.v6), "{}: {alias}", path.display());
            compared += 1;
        }
    }
    assert!(compared >= 40, "only {compared} names were compared");
}

#[test]
fn placeholders_cover_every_cell() {
    let (_, case) =
        cases().into_iter().find(|(path, _)| path.ends_with("groups-and-cells.json")).expect("the case");
    let made = serde_json::to_vec(&made_of(&case).targets).expect("texts");
    let (files, _) = AliasFiles::parse([("made.json", made.as_slice())]).expect("an alias file");
    let snapshot = snapshot_of(&case, &files);
    let name =
        Name::from_text("00000032-1111-4000-8000-000000000000.cell.service.cf.internal").expect("a name");
    let found = resolve(&snapshot, &AllRunning, &name).expect("a name of ours");
    assert_eq!(found.v4, [std::net::Ipv4Addr::new(10, 0, 3, 2)]);
}
