//! Names of the recorded conformance cases, resolved in-process: parsing, indexes and the query
//! language are compared with bosh-dns' answers.
//!
//! The recordings are in `tests/conformance`, or in the folder given by `BOSH_DNS_CONFORMANCE`,
//! which contains `scenarios` or is that folder.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read its cases has failed"
)]

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use dns_core::catalog::{AliasFiles, Records, Snapshot};
use dns_core::name::Name;
use dns_core::resolve::{AllRunning, Existence, Resolution, resolve};
use serde_json::Value;

/// Scenarios whose answers depend on records and aliases alone.
const SCENARIOS: [&str; 4] = ["01_", "02", "03_", "04_"];

/// Returns the folder of the recordings.
fn scenarios() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/conformance");
    let folder = std::env::var_os("BOSH_DNS_CONFORMANCE").map_or(own, PathBuf::from);
    let below = folder.join("scenarios");
    if below.is_dir() { below } else { folder }
}

/// Loads a scenario's files like the daemon does: a rejected file counts as empty.
fn snapshot(folder: &Path) -> Snapshot {
    let mut files: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    if let Ok(entries) = std::fs::read_dir(folder.join("aliases")) {
        for entry in entries {
            let path = entry.unwrap().path();
            if path
                .extension()
                .is_some_and(|extension| extension == "json")
            {
                files.insert(path.display().to_string(), std::fs::read(&path).unwrap());
            }
        }
    }
    let files = files
        .iter()
        .map(|(name, bytes)| (name.as_str(), bytes.as_slice()));
    let (aliases, _) = AliasFiles::parse(files).expect("the recorded alias files are good");
    let records = match Records::parse(&std::fs::read(folder.join("records.json")).unwrap()) {
        Ok((records, _)) => records,
        Err(error) => {
            assert!(
                folder.display().to_string().contains("02g"),
                "{}: {error}",
                folder.display()
            );
            Records::default()
        }
    };
    Snapshot::build(records, &aliases).0
}

/// Returns RCODE and sorted addresses of a resolution, as the server would reply.
fn reply(resolution: Option<Resolution>, qtype: &str) -> (&'static str, Vec<String>) {
    let Some(Resolution {
        existence, v4, v6, ..
    }) = resolution
    else {
        return ("REFUSED", Vec::new());
    };
    let has_data = ["A", "AAAA", "ANY"].contains(&qtype);
    let rcode = match existence {
        Existence::Found => "NOERROR",
        Existence::NoSuchName => "NXDOMAIN",
        Existence::Malformed if has_data => "FORMERR",
        Existence::Malformed => "NOERROR",
    };
    let v4 = v4
        .into_iter()
        .map(IpAddr::V4)
        .filter(|_| ["A", "ANY"].contains(&qtype));
    let v6 = v6
        .into_iter()
        .map(IpAddr::V6)
        .filter(|_| ["AAAA", "ANY"].contains(&qtype));
    let mut addresses: Vec<String> = v4.chain(v6).map(|address| address.to_string()).collect();
    addresses.sort();
    (rcode, addresses)
}

/// Returns whether a reply equals the recorded one.
fn is_expected(expected: &Value, folder: &Path, (rcode, addresses): &(&str, Vec<String>)) -> bool {
    if expected["rcode"] != *rcode {
        return false;
    }
    let listed = match expected["answers_ref"].as_str() {
        Some(file) => serde_json::from_slice(&std::fs::read(folder.join(file)).unwrap()).unwrap(),
        None => expected["answers"].clone(),
    };
    let listed = listed.as_array().cloned().unwrap_or_default();
    // IPv6 addresses are compared as addresses: the recordings may use another spelling.
    let text = |answer: &Value| {
        let text = answer[3].as_str().unwrap();
        text.parse::<IpAddr>()
            .map_or(text.to_owned(), |address| address.to_string())
    };
    let mut listed: Vec<String> = listed.iter().map(text).collect();
    listed.sort();
    listed == *addresses
}

#[test]
fn names_resolve_as_recorded() {
    let (mut asked, mut quirks, mut wrong) = (0, Vec::new(), Vec::new());
    let mut folders: Vec<PathBuf> = std::fs::read_dir(scenarios())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    folders.sort();
    for folder in folders {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        if !SCENARIOS.iter().any(|prefix| name.starts_with(prefix)) {
            continue;
        }
        let snapshot = snapshot(&folder);
        for line in std::fs::read_to_string(folder.join("cases.jsonl"))
            .unwrap()
            .lines()
        {
            let case: Value = serde_json::from_str(line).unwrap();
            let query = &case["q"];
            let (Some(text), Some(qtype)) = (query["name"].as_str(), query["type"].as_str()) else {
                continue;
            };
            if query["opcode"].as_u64().unwrap_or(0) != 0
                || text.starts_with("upcheck.")
                || qtype == "DS"
            {
                continue;
            }
            let expected: Vec<&Value> = match case["expect_any"].as_array() {
                Some(any) => any.iter().collect(),
                None => vec![&case["expect"]],
            };
            if expected
                .iter()
                .any(|expected| expected["rcode"] == "NOTIMP" || expected["no_response"] == true)
            {
                continue;
            }
            let got = reply(
                resolve(&snapshot, &AllRunning, &Name::from_text(text).unwrap()),
                qtype,
            );
            asked += 1;
            if !expected
                .iter()
                .any(|expected| is_expected(expected, &folder, &got))
            {
                let line = format!(
                    "{}: {text} {qtype}: {got:?}, recorded {:?}",
                    case["id"], expected
                );
                if case["quirk"].is_null() {
                    wrong.push(line)
                } else {
                    quirks.push(line)
                }
            }
        }
    }
    println!(
        "{asked} names, {} answered otherwise where the reference has a quirk",
        quirks.len()
    );
    for line in &quirks {
        println!("  {}", &line[..line.len().min(160)]);
    }
    let least = if std::env::var_os("BOSH_DNS_CONFORMANCE").is_some() {
        1
    } else {
        400
    };
    assert!(asked >= least, "only {asked} cases found");
    assert!(
        wrong.is_empty(),
        "{} wrong:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}
