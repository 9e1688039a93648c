//! Parses and indexes a records file, then lists and resolves its names.

use dns_core::catalog::{AliasFiles, Records, Snapshot};
use dns_core::resolve::{AllRunning, explain, resolve};

pub(crate) fn run(bytes: &[u8]) {
    let Ok((records, warnings)) = Records::parse(bytes) else {
        return;
    };
    assert!(warnings.iter().all(|warning| !warning.is_empty()));
    let (snapshot, _) = Snapshot::build(records, &AliasFiles::default());
    for instance in snapshot.instances() {
        let _ = instance.group_ids().count();
        if let Some(ip) = instance.ip {
            let _ = snapshot.reverse(ip);
        }
    }
    for name in dns_core::listing::published_names(&snapshot).take(100) {
        assert!(
            resolve(&snapshot, &AllRunning, &name).is_some(),
            "{name} is published but not ours"
        );
        let _ = explain(&snapshot, &AllRunning, &name).to_string();
    }
}
