//! The systemd units: their sandboxes, and the exposure that docs/security.md states.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read the units has failed"
)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use whole_system_tests::{process::capture, requirements};

/// Returns the units of all packages.
fn units() -> Vec<PathBuf> {
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy");
    let mut units = Vec::new();
    for folder in ["systemd", "identity/systemd"] {
        for file in fs::read_dir(deploy.join(folder)).unwrap() {
            let path = file.unwrap().path();
            assert!(
                path.extension().is_some_and(|end| end == "service"),
                "{path:?}"
            );
            units.push(path);
        }
    }
    units.sort();
    assert_eq!(units.len(), 8);
    units
}

#[test]
fn units_are_confined() {
    for path in units() {
        let unit = fs::read_to_string(&path).unwrap();
        for line in [
            "NoNewPrivileges=yes",
            "ProtectSystem=strict",
            "ProtectHome=yes",
            "ProtectProc=invisible",
            "PrivateTmp=yes",
            "PrivateDevices=yes",
            "RestrictRealtime=yes",
            "RestrictSUIDSGID=yes",
            "MemoryDenyWriteExecute=yes",
            "SystemCallArchitectures=native",
            // A call that a newer C library makes fails; it does not end the service.
            "SystemCallErrorNumber=EPERM",
        ] {
            assert!(unit.lines().any(|found| found == line), "{path:?}: {line}");
        }
        // Servers of HTTP ask the kernel which user a local client is; refused, they take all for one.
        let families = unit
            .lines()
            .find(|line| line.starts_with("RestrictAddressFamilies="));
        assert!(families.unwrap().contains("AF_NETLINK"), "{path:?}");
        // The attacher holds no key.
        let is_attacher = path.ends_with("bosh-dns-xdp-attach.service");
        assert!(is_attacher || unit.contains("\nLimitCORE=0\n"), "{path:?}");
        for key in [
            "UMask=",
            "CapabilityBoundingSet=",
            "SystemCallFilter=",
            "RestrictAddressFamilies=",
        ] {
            assert!(
                unit.lines().any(|found| found.starts_with(key)),
                "{path:?}: {key}"
            );
        }
    }
}

#[test]
fn privileges_are_documented() {
    let page = include_str!("../../../docs/security.md");
    let is_separator = |letter: char| !letter.is_ascii_alphanumeric() && !"_-".contains(letter);
    for path in units() {
        let unit = fs::read_to_string(&path).unwrap();
        let value = |key: &str| unit.lines().find_map(|line| line.strip_prefix(key));
        let begin = format!("| `{}` |", path.file_name().unwrap().display());
        let row = page.lines().find(|line| line.starts_with(&begin)).unwrap();
        let runs_as = row.trim_end_matches(" |").rsplit(" | ").next().unwrap();
        let mut words = runs_as.split(is_separator);
        assert_eq!(
            words.next(),
            Some(value("User=").unwrap_or("root")),
            "{row}"
        );
        let mut documented: Vec<&str> = words.filter(|word| word.starts_with("CAP_")).collect();
        let granted = value("CapabilityBoundingSet=").unwrap();
        let mut granted: Vec<&str> = granted.split_whitespace().collect();
        documented.sort_unstable();
        granted.sort_unstable();
        assert_eq!(documented, granted, "{row}");
    }
}

/// As `systemd-analyze` of the Debian machine computes it from the unit files alone.
#[test]
fn exposure_is_documented() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.toolchain/debian");
    let there = fs::metadata(&root).map(drop);
    let there = there.map_err(|_| "`cargo xtask test` creates its root");
    if !requirements::namespaces() || !requirements::met("a Debian machine", there) {
        return;
    }
    let page = include_str!("../../../docs/security.md");
    let script = "mount --bind \"$2\" \"$1/mnt\" && exec chroot \"$1\" systemd-analyze security --offline=true \
                  --no-pager \"/mnt/$3\"";
    for path in units() {
        let name = path.file_name().unwrap();
        let mut analyze = Command::new("unshare");
        analyze.args([
            "--mount",
            "--propagation=private",
            "sh",
            "-euc",
            script,
            "sh",
        ]);
        analyze.arg(&root).arg(path.parent().unwrap()).arg(name);
        let said = capture(&mut analyze).unwrap();
        let last = said.lines().last().unwrap();
        let mut words = last.split_whitespace();
        let exposure = words.find(|word| word.parse::<f64>().is_ok()).unwrap();
        let row = format!("| `{}` | {exposure} |", name.display());
        assert!(
            page.lines().any(|line| line.starts_with(&row)),
            "docs/security.md lacks: {row}"
        );
    }
}
