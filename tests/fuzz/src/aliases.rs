//! Parses two alias files, merges them with records and resolves every alias.

use dns_core::catalog::{AliasFiles, Records, Snapshot};
use dns_core::resolve::{AllRunning, resolve};

/// Records with the targets of the aliases.
const RECORDS: &str = include_str!("../corpus/records/small.json");

pub(crate) fn run(bytes: &[u8]) {
    // A zero byte never occurs in JSON, so it separates the two files.
    let middle = bytes
        .iter()
        .position(|&byte| byte == 0)
        .unwrap_or(bytes.len());
    let (first, second) = (&bytes[..middle], bytes.get(middle + 1..).unwrap_or(b"{}"));
    let Ok((files, _)) = AliasFiles::parse([("a.json", first), ("b.json", second)]) else {
        return;
    };
    let (records, _) =
        Records::parse(RECORDS.as_bytes()).expect("the records of the corpus are good");
    let (snapshot, _) = Snapshot::build(records, &files);
    for name in dns_core::listing::published_names(&snapshot).take(200) {
        assert!(
            resolve(&snapshot, &AllRunning, &name).is_some(),
            "{name} is published but not ours"
        );
    }
}
