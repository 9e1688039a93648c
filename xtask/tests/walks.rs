//! The walks of a query and of a new records.json in docs/architecture.md: numbered without a gap, short, and
//! through files that exist.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its input has failed")]

mod sources;

use std::{
    fs,
    path::{Path, PathBuf},
};

/// First words of each walk, number of the walk's first file, and the most files that it may visit.
const WALKS: [(&str, usize, usize); 4] = [
    ("A UDP query that no interface answered.", 1, 15),
    ("A local name:", 7, 15),
    ("A forwarded name, after 1 to 6:", 7, 20),
    ("New records.json:", 1, 24),
];

#[test]
fn walks_visit_few_existing_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text = fs::read_to_string(root.join("docs/architecture.md")).unwrap();
    let sources = sources::rust_files(&root.join("dns-user"));
    for (beginning, first, most) in WALKS {
        let (_, rest) = text.split_once(&format!("\n{beginning}")).unwrap_or_else(|| panic!("{beginning}"));
        let list = rest.split("\n\n").nth(1).unwrap();
        let files = numbered_files(list);
        let numbers: Vec<usize> = files.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers, (first..first + files.len()).collect::<Vec<_>>(), "{beginning} {list}");
        assert!(numbers.last() <= Some(&most), "{beginning} {} files", numbers.len());
        for (number, file) in files {
            let exists = sources.iter().any(|path| path.ends_with(file) || path.ends_with(in_crate(file)));
            assert!(exists, "{beginning} {number}. {file} does not exist");
        }
    }
}

/// Returns the files of a list with their numbers: `` 3. `core/wire/read.rs` ``.
fn numbered_files(list: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut parts = list.split('`');
    while let (Some(before), Some(file)) = (parts.next(), parts.next()) {
        let number = before
            .trim_end()
            .strip_suffix('.')
            .and_then(|text| text.rsplit(|c: char| !c.is_ascii_digit()).next().unwrap().parse().ok());
        if let Some(number) = number {
            found.push((number, file));
        }
    }
    found
}

/// Returns the path below `dns-user` of a file named by its crate: `core/wire/read.rs` is
/// `core/src/wire/read.rs`.
fn in_crate(file: &str) -> PathBuf {
    let (crate_name, rest) = file.split_once('/').unwrap_or(("", file));
    Path::new(crate_name).join("src").join(rest)
}
