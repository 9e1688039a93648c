//! Files that a kill in the middle of a change leaves behind: never read, and removed at the next start.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use dns_identity::folder::read_pair;
use test_support::free_address;

use crate::{
    authorities::TestAuthority,
    fleet::{converged, said},
    program::until,
    rotator::World,
    tools::text,
};

/// Returns the names below a folder that a change in progress uses.
pub(crate) fn unfinished(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.contains(".part-") || name.ends_with(".next") {
            found.push(path.clone());
        }
        let facts = fs::symlink_metadata(&path).unwrap();
        if facts.is_dir() {
            found.extend(unfinished(&path));
        }
    }
    found
}

#[test]
fn issuer_removes_what_kills_left() {
    let mut fleet = converged(&["i1"]);
    fleet.issuer.stop();
    let state = fleet.path("state");
    let authority = fs::read_dir(state.join("authorities"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .next()
        .unwrap();
    let trust = fs::read(state.join("trust.json")).unwrap();
    for (path, contents) in [
        (state.join(".trust.json.part-aaaaaa"), &b"{}"[..]),
        (state.join(".members.jsonl.part-bbbbbb"), b"{"),
        (state.join("tokens/.0.json.part-cccccc"), b"{}"),
        (
            authority.join(".ca.key.part-dddddd"),
            &fleet.authority.key(),
        ),
    ] {
        fs::write(path, contents).unwrap();
    }
    // An import that was killed after its first file.
    let import = state.join("authorities").join("0".repeat(64));
    fs::create_dir(&import).unwrap();
    fs::write(import.join("ca.key"), "key").unwrap();
    fleet.start_issuer(free_address());
    assert_eq!(unfinished(&state), [] as [PathBuf; 0]);
    assert_eq!(fs::read(state.join("trust.json")).unwrap(), trust);
    // The end of a rotation removes the keys that nothing needs, that of the import included.
    let next = TestAuthority::new("next");
    let (ca, key) = (next.certificate_path(), next.key_path());
    let output = fleet
        .rotate(&["--ca", text(&ca), "--ca-key", text(&key)])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert!(!import.join("ca.key").exists());
}

/// Plants what a kill leaves in the folder of an identity: a generation with a key, and links that were not renamed.
fn plant(folder: &Path) {
    let left = folder.join("..pair-Xa81k2");
    fs::create_dir(&left).unwrap();
    fs::write(left.join("instance.key"), "key").unwrap();
    symlink("..pair-Xa81k2", folder.join("....data.next")).unwrap();
    symlink("..data/instance.key", folder.join("..instance.key.next")).unwrap();
}

pub(crate) fn generations(folder: &Path) -> usize {
    let names = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with("..pair-")).count()
}

#[test]
fn agent_removes_what_kills_left() {
    let mut fleet = converged(&["i1"]);
    fleet.agents.clear();
    let (own, role, new) = (
        fleet.pair("i1", "instance"),
        fleet.pair("i1", "health.bosh-dns"),
        fleet.pair("i1", "api.bosh-dns"),
    );
    let before = read_pair(&own, "instance").unwrap().certificate;
    plant(&own);
    plant(&role);
    // The first pair of a role was never finished.
    fs::remove_dir_all(&new).unwrap();
    fs::create_dir(&new).unwrap();
    plant(&new);
    fleet.agent("i1", "", &[]);
    until("the pair of the role", || fleet.has_pairs("i1"));
    for folder in [&own, &role, &new] {
        assert_eq!(generations(folder), 1, "{}", folder.display());
    }
    assert_eq!(unfinished(&fleet.path("i1")), [] as [PathBuf; 0]);
    assert_eq!(read_pair(&own, "instance").unwrap().certificate, before);
}

#[test]
fn rotator_removes_what_kills_left() {
    let mut world = World::new();
    world.create("g1");
    let folder = world.path("g1");
    let before = read_pair(&folder, "instance").unwrap().certificate;
    plant(&folder);
    let former = world.folder.path().join("..former-cas.json.part-aaaaaa");
    fs::write(&former, "[]").unwrap();
    let rotator = crate::rotator::open(world.folder.path(), &world.authority, 2, world.now);
    assert_eq!(rotator.guids().len(), 1);
    assert_eq!(generations(&folder), 1);
    assert_eq!(unfinished(world.folder.path()), [] as [PathBuf; 0]);
    assert_eq!(read_pair(&folder, "instance").unwrap().certificate, before);
}
