//! Resolves a name in wire format against a small fleet: filters, globs, every name form, aliases.

use std::sync::LazyLock;

use dns_core::catalog::{AliasFiles, Records, Snapshot};
use dns_core::name::Name;
use dns_core::resolve::{AllRunning, explain, instances, resolve};

/// A fleet with aliases of every kind.
static SNAPSHOT: LazyLock<Snapshot> = LazyLock::new(|| {
    let records = include_str!("../corpus/records/small.json").as_bytes();
    let aliases = include_str!("../corpus/aliases/every_kind.json").as_bytes();
    let (records, _) = Records::parse(records).expect("the records of the corpus are good");
    let (aliases, _) =
        AliasFiles::parse([("a.json", aliases)]).expect("the aliases of the corpus are good");
    Snapshot::build(records, &aliases).0
});

pub(crate) fn run(bytes: &[u8]) {
    let Ok((name, _)) = Name::from_wire(bytes) else {
        return;
    };
    let ours = resolve(&SNAPSHOT, &AllRunning, &name);
    assert_eq!(ours.is_some(), SNAPSHOT.local_zone(&name).is_some());
    let _ = instances(&SNAPSHOT, &AllRunning, &name);
    let _ = explain(&SNAPSHOT, &AllRunning, &name).to_string();
}
