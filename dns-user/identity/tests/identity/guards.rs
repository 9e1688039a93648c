//! Mass removals wait, lost files are restored, and everything without an identity is visible.

use std::{
    fs,
    path::Path,
    time::{Duration, SystemTime},
};

use dns_identity::{
    descriptions::Descriptions,
    folder::read_pair,
    keys::{KeyPool, KeyType, Priority},
    rotator::{Next, Rotator},
};
use tempfile::TempDir;

use crate::rotator::{HOUR, World, container, files, filled_pool, matches, memory, settings};

/// A rotator that follows a folder of descriptions.
struct Cell {
    world: World,
    place: TempDir,
    descriptions: Descriptions,
}

impl Cell {
    fn new(count: usize) -> Self {
        let (world, place) = (World::new(), memory());
        let folder = place.path().join("containers");
        fs::create_dir(&folder).unwrap();
        let mut cell = Self {
            world,
            place,
            descriptions: Descriptions::new(folder),
        };
        for number in 0..count {
            cell.describe(&format!("g{number}"));
        }
        cell.reconcile();
        assert_eq!(cell.world.rotator.guids().len(), count);
        cell
    }

    fn folder(&self) -> std::path::PathBuf {
        self.place.path().join("containers")
    }

    fn describe(&self, guid: &str) {
        fs::write(
            self.folder().join(format!("{guid}.json")),
            format!(r#"{{"guid":"{guid}"}}"#),
        )
        .unwrap();
    }

    fn reconcile(&mut self) {
        self.descriptions
            .reconcile(&mut self.world.rotator, self.world.now);
    }

    fn count(&self) -> usize {
        self.world.rotator.guids().len()
    }
}

#[test]
fn emptied_folder_keeps_identities() {
    let mut cell = Cell::new(15);
    fs::rename(cell.folder(), cell.place.path().join("aside")).unwrap();
    fs::create_dir(cell.folder()).unwrap();
    for seconds in [0, 10, 60, 590] {
        let start = cell.world.now;
        cell.world.now += Duration::from_secs(seconds);
        cell.reconcile();
        assert_eq!(cell.count(), 15, "after {seconds} s");
        cell.world.now = start;
    }
    let problem = cell.descriptions.problems().next().unwrap();
    assert!(
        problem.message.contains("15 of 15 disappeared") && problem.path == cell.folder(),
        "{problem:?}"
    );
    // The folder returns.
    fs::remove_dir(cell.folder()).unwrap();
    fs::rename(cell.place.path().join("aside"), cell.folder()).unwrap();
    cell.reconcile();
    assert_eq!(
        (cell.count(), cell.descriptions.problems().count()),
        (15, 0)
    );
    // Few removals take effect at once, many after ten minutes.
    for number in 0..10 {
        fs::remove_file(cell.folder().join(format!("g{number}.json"))).unwrap();
    }
    cell.reconcile();
    assert_eq!(cell.count(), 5);
}

#[test]
fn confirmed_removal_takes_effect() {
    let mut cell = Cell::new(12);
    for entry in fs::read_dir(cell.folder()).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
    }
    cell.reconcile();
    assert_eq!(cell.count(), 12);
    cell.descriptions.confirm_removals(12);
    cell.reconcile();
    assert_eq!(cell.count(), 0);
}

#[test]
fn repeated_failures_count_once() {
    let mut cell = Cell::new(1);
    let path = cell.folder().join("g9.json");
    fs::write(&path, r#"{"guid":"g9","internal_routes":["not a name"]}"#).unwrap();
    for _ in 0..4 {
        cell.reconcile();
        cell.world.now += Duration::from_secs(11);
    }
    assert_eq!(
        cell.world.rotator.status(cell.world.now).failures["profile"],
        1
    );
    let problem = cell.descriptions.problems().next().unwrap();
    assert!(
        problem.path == path && problem.message.contains("not a DNS name"),
        "{problem:?}"
    );
    cell.describe("g9");
    cell.reconcile();
    assert_eq!((cell.count(), cell.descriptions.problems().count()), (2, 0));
    // A file in place of a folder is not ours to remove.
    fs::write(cell.world.path("g8"), "precious").unwrap();
    cell.describe("g8");
    cell.reconcile();
    assert_eq!(
        fs::read_to_string(cell.world.path("g8")).unwrap(),
        "precious"
    );
}

#[test]
fn lost_folder_is_restored() {
    let mut world = World::new();
    for name in ["g1", "g2", "g3"] {
        world.create(name);
    }
    fs::remove_dir_all(world.path("g2")).unwrap();
    fs::remove_file(world.path("g3").join("..data/instance.key")).unwrap();
    for _ in 0..12 {
        world.now += Duration::from_secs(1);
        world.step();
    }
    for name in ["g1", "g2", "g3"] {
        assert!(
            matches(&read_pair(&world.path(name), "instance").unwrap()),
            "{name}"
        );
    }
    assert_eq!(world.rotator.status(world.now).renewals, 2);
}

#[test]
fn unusable_folder_is_in_status() {
    let mut world = World::new();
    world.create("g1");
    fs::write(world.path("g1").join("..data/container.json"), "{").unwrap();
    let rotator = crate::rotator::open(world.folder.path(), &world.authority, 2, world.now);
    let status = rotator.status(world.now);
    assert!(status.identities.is_empty());
    assert!(
        status.problems[0].path.ends_with("g1"),
        "{:?}",
        status.problems
    );
    // A creation that was killed leaves nothing.
    fs::create_dir_all(world.path("g7").join("..pair-Xa81k2")).unwrap();
    crate::rotator::open(world.folder.path(), &world.authority, 2, world.now);
    assert!(!world.path("g7").exists());
}

#[test]
fn waiting_for_keys_costs_no_steps() {
    let mut world = World::new();
    for number in 0..5 {
        world.create(&format!("g{number}"));
    }
    // RSA keys take longer than a step.
    let pool = KeyPool::start(KeyType::Rsa2048, 1, Priority::Idle).unwrap();
    let now = world.now + 24 * HOUR - Duration::from_secs(2400);
    let mut rotator = Rotator::open(
        settings(world.folder.path()),
        files(&world.authority),
        pool,
        now,
    )
    .unwrap();
    let (ready, key) = std::sync::mpsc::channel();
    rotator.pool.on_key(move || ready.send(()).unwrap());
    let due = now + Duration::from_secs(1000);
    let mut steps = 0;
    while rotator.status(due).renewals < 2 {
        steps += 1;
        assert!(steps < 10, "{steps} steps for two renewals");
        if rotator.step(due) == Next::Key {
            key.recv_timeout(Duration::from_secs(600)).unwrap();
        }
    }
}

#[test]
fn slow_peers_accept_new_pairs() {
    let world = World::new();
    let backdated = dns_identity::rotator::RotatorSettings {
        backdate: Duration::from_secs(300),
        ..settings(&world.folder.path().join("identities"))
    };
    let pool = filled_pool(1);
    let mut rotator = Rotator::open(backdated, files(&world.authority), pool, world.now).unwrap();
    rotator
        .create(container(serde_json::json!({ "guid": "g1" })), world.now)
        .unwrap();
    let pair = read_pair(&world.folder.path().join("identities/g1"), "instance").unwrap();
    let validity = crate::rotator::validity_of(&pair);
    let seconds = |at: SystemTime| at.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    assert_eq!(seconds(validity.not_before), seconds(world.now) - 300);
    assert_eq!(seconds(validity.not_after), seconds(world.now) + 24 * 3600);
}

#[test]
fn control_socket_replaces_no_file() {
    let place = memory();
    let path = place.path().join("control");
    fs::write(&path, "precious").unwrap();
    let error = dns_identity::run::bind_control(&path)
        .unwrap_err()
        .to_string();
    assert!(error.contains("is not a socket"), "{error}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    assert!(Path::new(&path).is_file());
}
