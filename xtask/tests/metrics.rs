//! Every declared metric family is exposed.

use std::{collections::BTreeSet, fs, path::PathBuf};

use crate::sources;

#[test]
fn every_family_is_exposed() {
    let root = sources::root().join("dns-user");
    let code: Vec<(PathBuf, String)> = sources::rust_files(&root)
        .into_iter()
        .map(|path| {
            let text = fs::read_to_string(&path).unwrap();
            (path, text)
        })
        .collect();
    let names = root.join("kit/src/metrics/names.rs");
    let (_, declarations) = code.iter().find(|(path, _)| *path == names).unwrap();
    let declared = declarations.lines().filter_map(|line| {
        let (family, rest) = line.trim().split_once(": ")?;
        let is_family = ["Counter", "Gauge", "Histogram"]
            .iter()
            .any(|kind| rest.starts_with(kind));
        (is_family && family.chars().all(|c| c.is_ascii_uppercase() || c == '_')).then_some(family)
    });
    let declared: BTreeSet<&str> = declared.collect();
    assert!(declared.len() > 50, "{declared:?}");
    let used: String = code
        .iter()
        .filter(|(path, _)| *path != names)
        .map(|(_, text)| text.as_str())
        .collect();
    let exposed: BTreeSet<&str> = used
        .split("families::")
        .skip(1)
        .map(|rest| {
            rest.split(|c: char| !c.is_ascii_uppercase() && c != '_')
                .next()
                .unwrap()
        })
        .collect();
    let forgotten: Vec<_> = declared.difference(&exposed).collect();
    assert!(
        forgotten.is_empty(),
        "declared and exposed by no crate: {forgotten:?}"
    );
}
