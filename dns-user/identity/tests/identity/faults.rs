//! Faults: the old pair stays valid, and the message names path and remedy.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use dns_identity::{
    check,
    folder::read_pair,
    rotator::{IdentityStatus, Rotator},
};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
};
use parking_lot::Mutex;
use serde_json::json;
use test_support::requirements::met;

use crate::{
    authorities::{CaKey, SOUND, TestAuthority},
    rotator::{HOUR, World, container, joined, matches, memory, open, replace, validity_of},
};

/// A small tmpfs, mounted in a mount namespace of the test's thread.
struct SmallDisk {
    at: PathBuf,
}

impl SmallDisk {
    fn mount(at: &Path, pages: usize) -> Option<Self> {
        if !met("mount namespaces", unshare(CloneFlags::CLONE_NEWNS)) {
            return None;
        }
        mount(
            None::<&str>,
            "/",
            None::<&str>,
            MsFlags::MS_REC | MsFlags::MS_PRIVATE,
            None::<&str>,
        )
        .unwrap();
        let disk = Self { at: at.to_owned() };
        let size = format!("size={}k,mode=755", pages * 4);
        mount(
            Some("tmpfs"),
            at,
            Some("tmpfs"),
            MsFlags::empty(),
            Some(size.as_str()),
        )
        .unwrap();
        Some(disk)
    }

    fn remount(&self, flags: MsFlags, pages: usize) {
        let size = format!("size={}k", pages * 4);
        let flags = flags | MsFlags::MS_REMOUNT;
        mount(
            None::<&str>,
            &self.at,
            None::<&str>,
            flags,
            Some(size.as_str()),
        )
        .unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // The namespace ends with the thread, and the mount with it.
        let _ = umount2(&self.at, MntFlags::MNT_DETACH);
    }
}

fn only(rotator: &Rotator, now: SystemTime) -> IdentityStatus {
    let mut identities = rotator.status(now).identities;
    assert_eq!(identities.len(), 1);
    identities.remove(0)
}

/// Returns the log lines of `work` on this thread.
fn logged(work: impl FnOnce()) -> String {
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);
    impl Write for Log {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            self.0.lock().write(line)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, work);
    String::from_utf8(std::mem::take(&mut *log.0.lock())).unwrap()
}

/// The folder contains one complete generation and no remains of a failed one.
fn assert_intact(folder: &Path) {
    assert!(matches(&read_pair(folder, "instance").unwrap()));
    assert!(matches(&joined(folder).unwrap()));
    let generations: BTreeSet<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("..pair-"))
        .collect();
    assert_eq!(generations.len(), 1, "{generations:?}");
}

#[test]
fn full_and_read_only_disks_keep_pair() {
    let (authority, place) = (TestAuthority::new("rotator"), memory());
    let Some(disk) = SmallDisk::mount(place.path(), 64) else {
        return;
    };
    let mut now = SystemTime::now();
    let mut rotator = open(place.path(), &authority, 4, now);
    rotator
        .create(container(json!({ "guid": "g1" })), now)
        .unwrap();
    let folder = place.path().join("g1");
    let first = read_pair(&folder, "instance").unwrap().certificate;

    // Full: no page is left.
    let filler = place.path().join("filler");
    let mut size = 64 * 4096;
    while fs::write(&filler, vec![0; size]).is_err() {
        size -= 4096;
    }
    now += 24 * HOUR - Duration::from_secs(1000);
    let mut log = logged(|| {
        rotator.step(now);
    });
    let failure = only(&rotator, now).failure.unwrap();
    let message = &failure.message;
    assert!(message.contains(folder.to_str().unwrap()), "{message}");
    assert!(
        message.contains("No space left") && message.contains("free space"),
        "{message}"
    );
    assert_eq!(read_pair(&folder, "instance").unwrap().certificate, first);
    assert_intact(&folder);
    // Retries back off and are counted, but reported as one failure.
    for _ in 0..5 {
        now = only(&rotator, now).renews_at;
        log += &logged(|| {
            rotator.step(now);
        });
    }
    assert_eq!(only(&rotator, now).failure.unwrap().attempts, 6);
    assert_eq!(rotator.status(now).failures["storage"], 1);
    let lines: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("certificate not renewed"))
        .collect();
    assert!(
        matches!(lines[..], [line] if line.contains("ERROR") && line.contains(message)),
        "{log}"
    );

    fs::remove_file(&filler).unwrap();
    disk.remount(MsFlags::MS_RDONLY, 64);
    now = only(&rotator, now).renews_at;
    rotator.step(now);
    let message = only(&rotator, now).failure.unwrap().message;
    assert!(
        message.contains("mount the file system writable"),
        "{message}"
    );
    assert_eq!(rotator.status(now).failures["storage"], 2);
    assert_intact(&folder);

    disk.remount(MsFlags::empty(), 64);
    now = only(&rotator, now).renews_at;
    rotator.step(now);
    assert!(only(&rotator, now).failure.is_none());
    assert_ne!(read_pair(&folder, "instance").unwrap().certificate, first);
}

#[test]
fn failed_create_leaves_no_identity() {
    let mut world = World::new();
    fs::write(world.path("g1"), "a file in place of the folder").unwrap();
    let error = world
        .rotator
        .create(container(json!({ "guid": "g1" })), world.now)
        .unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with(world.path("g1").to_str().unwrap()),
        "{error}"
    );
    let shown = format!("{:#}", anyhow::Error::from(error));
    assert_eq!(
        shown.matches("os error").count(),
        1,
        "the cause is shown once: {shown}"
    );
    assert!(world.rotator.guids().is_empty());
    let routes = json!({ "guid": "g2", "internal_routes": ["not a name"] });
    let error = world
        .rotator
        .create(container(routes), world.now)
        .unwrap_err();
    assert!(error.to_string().contains("not a DNS name"), "{error}");
    assert!(!world.path("g2").exists());
}

#[test]
fn unusable_authority_keeps_last() {
    let mut world = World::new();
    world.create("g1");
    let before = fs::read_to_string(world.authority.certificate_path()).unwrap();
    // The certificate of another CA beside the old key.
    let other = TestAuthority::new("other").certificate();
    fs::write(world.authority.certificate_path(), other).unwrap();
    // The other CA is valid from the real time on.
    world.now = SystemTime::now();
    world.step();
    let problem = world.rotator.status(world.now).authority.problem.unwrap();
    assert!(
        problem.contains("does not match") && problem.contains("ca.key"),
        "{problem}"
    );
    world.now += 24 * HOUR - Duration::from_secs(1200);
    world.step();
    world.step();
    let status = world.rotator.status(world.now);
    assert_eq!(
        (status.renewals, status.failures["authority"]),
        (1, 1),
        "renewed by the last good CA"
    );
    assert!(
        read_pair(&world.path("g1"), "instance")
            .unwrap()
            .certificate
            .ends_with(&before)
    );
}

#[test]
fn expired_authority_keeps_pair() {
    let (authority, folder) = (
        TestAuthority::with("short", SOUND, CaKey::P256, 1),
        memory(),
    );
    let mut now = SystemTime::now();
    let mut rotator = open(folder.path(), &authority, 4, now);
    now += Duration::from_secs(60);
    rotator
        .create(container(json!({ "guid": "g1" })), now)
        .unwrap();
    let first = read_pair(&folder.path().join("g1"), "instance").unwrap();
    let end = validity_of(&first).not_after;
    assert!(end < now + 24 * HOUR, "the leaf ends with its CA");
    now = end + Duration::from_secs(1);
    rotator.step(now);
    let message = only(&rotator, now).failure.unwrap().message;
    assert!(
        message.contains("ca.crt") && message.contains("replace the CA"),
        "{message}"
    );
    assert_eq!(
        read_pair(&folder.path().join("g1"), "instance")
            .unwrap()
            .certificate,
        first.certificate
    );
    // A new CA ends the failure at the next attempt.
    let next = TestAuthority::new("next");
    replace(&authority, &next);
    now += Duration::from_secs(300);
    for _ in 0..700 {
        now += Duration::from_secs(1);
        rotator.step(now);
    }
    assert!(
        only(&rotator, now).failure.is_none(),
        "{:?}",
        only(&rotator, now)
    );
}

#[test]
fn clock_jumps_renew_at_once() {
    let mut world = World::new();
    for name in ["g1", "g2", "g3"] {
        world.create(name);
    }
    // Forward, past the end of every pair.
    world.now += 100 * HOUR;
    world.step();
    for name in ["g1", "g2", "g3"] {
        let validity = world.validity(name);
        assert!(validity.not_before <= world.now && world.now < validity.not_after);
        assert_eq!(
            check::folder(&world.path(name), world.now).errors,
            Vec::<String>::new()
        );
    }
    // Backward: pairs from the future are not valid yet.
    world.now -= 99 * HOUR;
    world.step();
    for name in ["g1", "g2", "g3"] {
        let validity = world.validity(name);
        assert!(
            validity.not_before <= world.now && world.now < validity.not_after,
            "{validity:?}"
        );
    }
}
