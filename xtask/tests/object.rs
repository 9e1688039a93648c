//! The BPF object is reproducible: builds in two folders are identical.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read its input has failed"
)]

use std::{fs, os::unix::fs::symlink, path::Path, process::Command};

use crate::sources::root;

#[path = "../../dns-user/attacher/build/object.rs"]
mod build;

#[test]
fn build_folder_does_not_matter() {
    let root = root();
    let settings =
        fs::read_to_string(root.join(".toolchain/env")).expect("run `cargo xtask build` first");
    // Registry crates come from the workspace's own build, if there is one; this project's crates are built in each
    // folder.
    fs::create_dir_all(root.join("target")).unwrap();
    let scratch = tempfile::tempdir_in(root.join("target")).unwrap();
    let target = scratch.path().join("target");
    let built = root.join("dns-ebpf/target");
    if built.is_dir() {
        assert!(
            Command::new("cp")
                .arg("-a")
                .arg(built)
                .arg(&target)
                .status()
                .unwrap()
                .success()
        );
    }
    let objects = ["one", "another/deeper"].map(|place| {
        forget_ours(&target.join("bpfel-unknown-none/release/.fingerprint"));
        let folder = scratch.path().join(place);
        fs::create_dir_all(&folder).unwrap();
        fs::copy(root.join("Cargo.toml"), folder.join("Cargo.toml")).unwrap();
        for part in ["dns-common", "dns-ebpf"] {
            copy(&root.join(part), &folder.join(part));
        }
        let built = build::run_cargo(&folder.join("dns-ebpf"), &settings, &target).unwrap();
        fs::read(built.join("dns-ebpf")).unwrap()
    });
    assert!(objects[0].len() > 10_000);
    assert!(objects[0] == objects[1], "the two objects differ");
}

/// Forces cargo to rebuild this project's crates.
fn forget_ours(fingerprints: &Path) {
    for entry in fs::read_dir(fingerprints).into_iter().flatten() {
        let entry = entry.unwrap();
        if entry.file_name().to_string_lossy().starts_with("dns-") {
            fs::remove_dir_all(entry.path()).unwrap();
        }
    }
}

/// Copies a folder without its build output.
fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        let kind = entry.file_type().unwrap();
        if kind.is_symlink() {
            symlink(fs::read_link(from).unwrap(), to).unwrap();
        } else if kind.is_file() {
            fs::copy(from, to).unwrap();
        } else if entry.file_name() != "target" {
            copy(&from, &to);
        }
    }
}
