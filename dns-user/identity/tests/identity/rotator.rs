//! The rotator on a simulated clock: a day takes seconds.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, SystemTime},
};

use dns_identity::{
    authority::{CaFiles, certificates, certifies, parse_all, validity},
    certificate::Validity,
    check,
    folder::{Pair, read_pair},
    keys::{KeyPool, KeyType, Priority, PrivateKey, thread_time},
    profile::{Container, Guid},
    rotator::{Next, Rotator, RotatorSettings},
    schedule::{RenewalWindow, Share},
};
use serde_json::json;
use tempfile::TempDir;

use crate::authorities::TestAuthority;

pub(crate) const HOUR: Duration = Duration::from_secs(3600);

/// A rotator in a new folder, on a tmpfs as in production.
pub(crate) struct World {
    pub(crate) authority: TestAuthority,
    pub(crate) folder: TempDir,
    pub(crate) rotator: Rotator,
    pub(crate) now: SystemTime,
}

pub(crate) fn files(authority: &TestAuthority) -> CaFiles {
    CaFiles {
        certificate: authority.certificate_path(),
        key: authority.key_path(),
    }
}

/// A temporary folder in memory.
pub(crate) fn memory() -> TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

pub(crate) fn open(
    folder: &Path,
    authority: &TestAuthority,
    pool: usize,
    now: SystemTime,
) -> Rotator {
    let pool = filled_pool(pool);
    Rotator::open(settings(folder), files(authority), pool, now).unwrap()
}

/// A full pool of keys. At idle priority, a busy machine would delay them for as long as it is busy.
pub(crate) fn filled_pool(size: usize) -> KeyPool {
    let pool = KeyPool::start(KeyType::P256, size, Priority::Normal).unwrap();
    wait_for_keys(&pool);
    pool
}

fn wait_for_keys(pool: &KeyPool) {
    assert!(
        pool.wait(pool.size(), Duration::from_secs(300)),
        "{} of {} keys",
        pool.ready(),
        pool.size()
    );
}

/// Settings for tests: certificates start now, and a replaced CA leaves the bundles with its last pair.
pub(crate) fn settings(folder: &Path) -> RotatorSettings {
    RotatorSettings {
        folder: folder.to_owned(),
        validity: 24 * HOUR,
        backdate: Duration::ZERO,
        envoy: true,
        also_trust: Vec::new(),
        keep_old_ca: Duration::ZERO,
    }
}

impl World {
    pub(crate) fn new() -> Self {
        let (authority, folder) = (TestAuthority::new("rotator"), memory());
        let now = SystemTime::now();
        let rotator = open(folder.path(), &authority, 8, now);
        Self {
            authority,
            folder,
            rotator,
            now,
        }
    }

    pub(crate) fn create(&mut self, guid: &str) {
        self.rotator
            .create(container(json!({ "guid": guid })), self.now)
            .unwrap();
    }

    pub(crate) fn path(&self, guid: &str) -> PathBuf {
        self.folder.path().join(guid)
    }

    pub(crate) fn validity(&self, guid: &str) -> Validity {
        validity_of(&read_pair(&self.path(guid), "instance").unwrap())
    }

    /// Does what is due. Keys are generated in real time, for which the simulated clock waits.
    pub(crate) fn step(&mut self) {
        wait_for_keys(&self.rotator.pool);
        while self.rotator.step(self.now) == Next::Key {
            wait_for_keys(&self.rotator.pool);
        }
    }

    /// Steps at the times requested by the rotator until a time is reached.
    pub(crate) fn run_until(&mut self, end: SystemTime) {
        while self.now < end {
            self.step();
            let next = self.rotator.next_renewal();
            let next = next.map_or(end, |next| next.min(end));
            self.now = next.max(self.now + Duration::from_millis(1));
        }
    }
}

pub(crate) fn container(value: serde_json::Value) -> Container {
    serde_json::from_value(value).unwrap()
}

pub(crate) fn guid(text: &str) -> Guid {
    Guid::try_from(text.to_owned()).unwrap()
}

pub(crate) fn validity_of(pair: &Pair) -> Validity {
    let ders = certificates(pair.certificate.as_bytes()).unwrap();
    validity(&parse_all(&ders).unwrap()[0])
}

/// Whether the key belongs to the certificate.
pub(crate) fn matches(pair: &Pair) -> bool {
    let ders = certificates(pair.certificate.as_bytes()).unwrap();
    let key = PrivateKey::from_pem(pair.key.as_bytes()).unwrap();
    certifies(&parse_all(&ders).unwrap()[0], &key)
}

/// A pair from `instance.pem`, read in a single call.
pub(crate) fn joined(folder: &Path) -> std::io::Result<Pair> {
    let text = fs::read_to_string(folder.join("instance.pem"))?;
    let at = text
        .find("-----BEGIN PRIVATE")
        .or_else(|| text.find("-----BEGIN RSA"))
        .unwrap();
    let (certificate, key) = text.split_at(at);
    Ok(Pair {
        certificate: certificate.to_owned(),
        key: key.to_owned().into(),
    })
}

#[test]
fn thousand_identities_renew_in_windows() {
    let mut world = World::new();
    let names: Vec<String> = (0..1000)
        .map(|number| format!("container-{number:04}"))
        .collect();
    let used = thread_time();
    for name in &names {
        world.create(name);
    }
    let created = thread_time() - used;
    let start = world.now;
    let first: Vec<Validity> = names.iter().map(|name| world.validity(name)).collect();

    let (stop, read, mismatched) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let folder = world.folder.path().to_owned();
    let end = start + 24 * HOUR;
    let mut seen: Vec<Validity> = first.clone();
    thread::scope(|scope| {
        for reader in 0..2 {
            let (stop, read, mismatched, names, folder) =
                (&stop, &read, &mismatched, &names, &folder);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    for name in names.iter().skip(reader).step_by(7) {
                        let path = folder.join(name);
                        for pair in [
                            read_pair(&path, "instance").unwrap(),
                            joined(&path).unwrap(),
                        ] {
                            read.fetch_add(1, Ordering::Relaxed);
                            mismatched.fetch_add(u64::from(!matches(&pair)), Ordering::Relaxed);
                        }
                    }
                }
            });
        }
        let used = thread_time();
        world.run_until(end);
        stop.store(true, Ordering::Relaxed);
        println!(
            "1,000 identities: CPU {created:.2?} to create, {:.2?} for a day with one renewal of each",
            thread_time() - used
        );
    });
    let (read, mismatched) = (read.into_inner(), mismatched.into_inner());
    println!("{read} pairs read, {mismatched} mismatched");
    assert!(read > 0);
    assert_eq!(mismatched, 0);
    let window = RenewalWindow::of(24 * HOUR);
    let mut moments = BTreeSet::new();
    for (name, seen) in names.iter().zip(&mut seen) {
        let renewed = world.validity(name).not_before;
        let offset = renewed.duration_since(seen.not_before).unwrap();
        // X.509 truncates times to seconds.
        assert!(
            offset + Duration::from_secs(1) > window.start && offset <= window.end,
            "{name}: {offset:?}"
        );
        let due = seen.not_before + window.moment(Share::of(name));
        assert!(
            renewed + Duration::from_secs(1) >= due,
            "{name} was renewed before its moment"
        );
        moments.insert(renewed);
    }
    assert!(
        moments.len() > 600,
        "{} renewal seconds: not spread",
        moments.len()
    );
    assert_eq!(world.rotator.status(world.now).renewals, 1000);
}

#[test]
fn restart_keeps_renewal_times() {
    let mut world = World::new();
    for name in ["g1", "g2", "g3"] {
        world.create(name);
    }
    let times = |rotator: &Rotator, now| -> Vec<SystemTime> {
        rotator
            .status(now)
            .identities
            .iter()
            .map(|identity| identity.renews_at)
            .collect()
    };
    let before = times(&world.rotator, world.now);
    world.rotator = open(world.folder.path(), &world.authority, 8, world.now + HOUR);
    assert_eq!(times(&world.rotator, world.now + HOUR), before);
    assert_eq!(world.rotator.guids().len(), 3);
}

#[test]
fn routes_renew_second_pair_only() {
    let mut world = World::new();
    let with = |routes: &[&str]| container(json!({ "guid": "g1", "internal_routes": routes }));
    world
        .rotator
        .create(with(&["a.apps.internal"]), world.now)
        .unwrap();
    let path = world.path("g1");
    let read = |name: &str| read_pair(&path, name).unwrap().certificate;
    let (identity, second) = (read("instance"), read("c2c"));
    let renews_at = world.rotator.status(world.now).identities[0].renews_at;

    world.now += HOUR;
    world
        .rotator
        .update(with(&["b.apps.internal"]), world.now)
        .unwrap();
    assert_eq!(read("instance"), identity);
    assert_ne!(read("c2c"), second);
    assert!(matches(&read_pair(&path, "c2c").unwrap()));
    assert_eq!(
        world.rotator.status(world.now).identities[0].renews_at,
        renews_at
    );

    // Removing the routes removes the second pair; another address renews the first.
    world
        .rotator
        .update(container(json!({ "guid": "g1" })), world.now)
        .unwrap();
    assert!(!path.join("c2c.crt").is_symlink() && !path.join("..data/c2c.crt").exists());
    let moved = container(json!({ "guid": "g1", "internal_ip": "10.0.0.9" }));
    world.rotator.update(moved, world.now).unwrap();
    assert_ne!(read("instance"), identity);
}

#[test]
fn files_match_the_reference() {
    // A umask of 0 would show a key that is created with more than 0600.
    nix::sys::stat::umask(nix::sys::stat::Mode::empty());
    let mut world = World::new();
    world.create("g1");
    let path = world.path("g1");
    for (name, mode) in [
        ("instance.crt", 0o644),
        ("instance.key", 0o600),
        ("instance.pem", 0o600),
    ] {
        let held = fs::metadata(path.join(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!(held, mode, "{name}");
    }
    assert_eq!(
        fs::metadata(path.join("..data/"))
            .unwrap()
            .permissions()
            .mode()
            & 0o777,
        0o755
    );
    // A single rename suffices, because all names lead through one link.
    assert_eq!(
        fs::read_link(path.join("instance.key")).unwrap(),
        Path::new("..data/instance.key")
    );
    assert_eq!(check::folder(&path, world.now), check::Findings::default());
    // Envoy reads certificate and key from one file.
    let secret: serde_json::Value =
        serde_json::from_slice(&fs::read(path.join("sds-id-cert-and-key.json")).unwrap()).unwrap();
    let held = &secret["resources"][0]["tls_certificate"];
    let pair = read_pair(&path, "instance").unwrap();
    assert_eq!(held["certificate_chain"]["inline_string"], pair.certificate);
    assert_eq!(held["private_key"]["inline_string"], pair.key.as_str());
}

#[test]
fn destroy_removes_files() {
    let mut world = World::new();
    world.create("g1");
    world.rotator.destroy(&guid("g1")).unwrap();
    assert_eq!(fs::read_dir(world.folder.path()).unwrap().count(), 0);
    let error = world.rotator.destroy(&guid("g1")).unwrap_err();
    assert_eq!(error.to_string(), "no identity g1; `status` lists them");
    // The folder was lost earlier: nothing to remove, and no error.
    world.create("g2");
    fs::remove_dir_all(world.path("g2")).unwrap();
    world.rotator.destroy(&guid("g2")).unwrap();
}

#[test]
fn replaced_authority_spreads_in_steps() {
    let mut world = World::new();
    let names: Vec<String> = (0..20).map(|number| format!("g{number}")).collect();
    for name in &names {
        world.create(name);
    }
    let old = world.authority.certificate();
    let new = TestAuthority::new("next");
    // The new CA is valid from the real time on.
    world.now = SystemTime::now();
    replace(&world.authority, &new);
    let bundle =
        |world: &World, name: &str| fs::read_to_string(world.path(name).join("ca.crt")).unwrap();
    let issuer_is_new = |world: &World, name: &str| {
        read_pair(&world.path(name), "instance")
            .unwrap()
            .certificate
            .ends_with(&new.certificate())
    };
    // The first step spreads trust; pairs change only afterwards.
    let mut mixed = 0;
    world.step();
    let begun = world.now;
    while !names.iter().all(|name| issuer_is_new(&world, name)) {
        assert!(world.now < begun + HOUR, "not converged within an hour");
        for name in &names {
            let bundle = bundle(&world, name);
            assert!(
                bundle.contains(&old) && bundle.contains(&new.certificate()),
                "{name}"
            );
        }
        mixed += 1;
        world.now += Duration::from_secs(5);
        world.step();
    }
    assert!(mixed > 5, "reissues are spread");
    world.step();
    for name in &names {
        assert_eq!(bundle(&world, name), new.certificate(), "{name}");
        assert_eq!(
            check::folder(&world.path(name), world.now),
            check::Findings::default()
        );
    }
}

/// Overwrites the files in use with another CA.
pub(crate) fn replace(in_use: &TestAuthority, new: &TestAuthority) {
    fs::write(in_use.key_path(), new.key()).unwrap();
    fs::write(in_use.certificate_path(), new.certificate()).unwrap();
}

#[test]
fn lost_files_are_looked_for_once_a_second() {
    let mut world = World::new();
    world.create("g1");
    world.step();
    fs::remove_dir_all(world.path("g1")).unwrap();
    // The check after the last identity finds none, and the next begins with the first again.
    for expected in [false, false, false, true] {
        world.now += Duration::from_millis(500);
        world.step();
        assert_eq!(world.path("g1").exists(), expected);
    }
}

#[test]
fn as_many_as_are_listed_at_once_are_renewed() {
    let mut world = World::new();
    for number in 0..256 {
        world.create(&format!("g{number}"));
    }
    world.now += 25 * HOUR;
    world.step();
    assert!(world.rotator.status(world.now).renewals > 0);
}
