//! The size of each crate: lines that are neither tests nor blank, comments included. A crate that grows past
//! its budget needs a smaller solution, or a reviewer's consent to a larger number.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read its input has failed"
)]

mod sources;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// The most lines of each crate. Numbers only fall: a change that removes code lowers them.
const BUDGETS: [(&str, usize); 20] = [
    // The echo behind a socket, the floor of userspace; hot and cold names, CPU and PSS of reloads.
    // 64 names in turn in the bench of the programs; IPv6, EDNS and changing records; targets beside figures.
    ("benches", 3_690),
    ("benches/demo", 380),
    ("benches/programs", 120),
    ("benches/programs/ebpf", 540),
    ("dns-common", 930),
    ("dns-ebpf", 3_280),
    ("dns-user/consul", 5_220),
    ("dns-user/consul-source", 2_650),
    // Reading only the rows of records.json that changed: outline, edits, indexes that share the rest; addresses for
    // the publisher, formerly in dns-publish.
    ("dns-user/core", 8_000),
    ("dns-user/dnstap", 720),
    // The list of local replies, each client's allowance, the wait for a slow server, programs loaded early, and
    // attaches that wait for other network configuration.
    ("dns-user/fastpath", 13_600),
    ("dns-user/health", 2_440),
    // The queue of due identities and the file of appended changes of members.
    ("dns-user/identity", 6_310),
    // Tasks that resume where their reply is read, formerly part of dns-resolver; memory after the start.
    ("dns-user/kit", 4_640),
    ("dns-user/load", 640),
    ("dns-user/publish", 12_670),
    ("dns-user/resolver", 14_730),
    ("dns-user/sync", 5_800),
    ("dns-user/upstream", 5_970),
    ("xtask", 1_940),
];

/// The most lines of a file.
const LONGEST_FILE: usize = 710;

/// Folders whose files are tests, support of tests, or not sources.
const SKIPPED: [&str; 8] = [
    "target",
    ".toolchain",
    "tests",
    "fuzz",
    "support",
    "dist",
    "report",
    ".git",
];

#[test]
fn crates_stay_within_budget() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .canonicalize()
        .unwrap();
    let mut sizes: BTreeMap<String, usize> = BTreeMap::new();
    let mut problems = Vec::new();
    for file in files(&root) {
        let size = lines(&fs::read_to_string(&file).unwrap());
        if size > LONGEST_FILE {
            problems.push(format!(
                "{}: {size} lines, more than {LONGEST_FILE}",
                file.display()
            ));
        }
        *sizes.entry(crate_of(&root, &file)).or_default() += size;
    }
    let budgets = BTreeMap::from(BUDGETS);
    for (name, size) in &sizes {
        match budgets.get(name.as_str()) {
            None => problems.push(format!("{name}: {size} lines, and no budget")),
            Some(budget) if size > budget => {
                problems.push(format!("{name}: {size} lines, budget {budget}"));
            }
            Some(_) => {}
        }
    }
    problems.extend(
        budgets
            .keys()
            .filter(|name| !sizes.contains_key(**name))
            .map(|name| format!("{name}: gone")),
    );
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Returns the Rust files of the product.
fn files(root: &Path) -> Vec<PathBuf> {
    let is_counted = |file: &PathBuf| {
        let below = file.strip_prefix(root).unwrap();
        let name = file.file_name().unwrap().to_str().unwrap();
        let is_skipped = below
            .parent()
            .unwrap()
            .iter()
            .any(|part| SKIPPED.contains(&part.to_str().unwrap()));
        // A linked folder belongs to another crate.
        let is_linked = file.canonicalize().unwrap() != *file;
        !is_skipped && !is_linked && name != "tests.rs" && !name.ends_with("_tests.rs")
    };
    let tops = fs::read_dir(root)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let tops = tops.filter(|top| {
        !SKIPPED.contains(&top.file_name().unwrap().to_str().unwrap()) && top.is_dir()
    });
    tops.flat_map(|top| sources::rust_files(&top))
        .filter(is_counted)
        .collect()
}

/// Returns the folder of a file's crate.
fn crate_of(root: &Path, file: &Path) -> String {
    let folder = file
        .ancestors()
        .skip(1)
        .find(|folder| folder.join("Cargo.toml").exists())
        .unwrap();
    folder.strip_prefix(root).unwrap().display().to_string()
}

/// Counts the lines of a file without blank lines and items under `#[cfg(test)]`.
fn lines(text: &str) -> usize {
    let mut count = 0;
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let is_test = line.trim_start().starts_with("#[cfg(")
            && line.contains("test")
            && !line.contains("not(test)");
        if !is_test {
            count += usize::from(!line.trim().is_empty());
            continue;
        }
        while lines
            .next_if(|line| line.trim_start().starts_with("#["))
            .is_some()
        {}
        let (mut depth, mut has_begun) = (0, false);
        for line in lines.by_ref() {
            depth += line.matches('{').count() as isize - line.matches('}').count() as isize;
            has_begun |= line.contains('{');
            if (has_begun && depth <= 0) || (!has_begun && line.trim_end().ends_with(';')) {
                break;
            }
        }
    }
    count
}

#[test]
fn tests_and_blank_lines_do_not_count() {
    let text = "//! A.\n\nfn a() {\n    b();\n}\n\n#[cfg(test)]\nmod tests {\n    fn c() {\n    }\n}\nfn d() {}\n";
    assert_eq!(lines(text), 5);
    assert_eq!(lines("#[cfg(test)]\nmod tests;\nfn a() {}\n"), 1);
    assert_eq!(lines("#[cfg(not(test))]\nfn a() {}\n"), 2);
}
