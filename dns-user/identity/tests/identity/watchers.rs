//! Programs that watch the documented names learn of every change, and never load a mismatched pair.

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, SystemTime},
};

use dns_identity::{
    authority::Authority,
    certificate::Validity,
    folder::{IdentityFolder, Pair, read_pair},
    keys::{KeyType, PrivateKey},
};
use inotify::{EventMask, Inotify, WatchMask};

use crate::{
    authorities::TestAuthority,
    program::Running,
    rotator::{HOUR, container, joined, matches, memory},
};

const CHANGES: usize = 3;

/// A watch of inotify(7), as Envoy and Go's fsnotify use it.
struct Watch(Inotify);

impl Watch {
    fn new(path: &Path, mask: WatchMask) -> Self {
        let watch = Inotify::init().unwrap();
        watch.watches().add(path, mask).unwrap();
        Self(watch)
    }

    /// Waits for events: their kinds and names.
    fn read(&mut self) -> Vec<(EventMask, String)> {
        let mut buffer = [0; 4096];
        let events = self.0.read_events_blocking(&mut buffer).unwrap();
        let name =
            |name: Option<&std::ffi::OsStr>| name.unwrap_or_default().to_str().unwrap().to_owned();
        events.map(|event| (event.mask, name(event.name))).collect()
    }
}

fn authority() -> Authority {
    let made = TestAuthority::new("watched");
    Authority::parse(
        made.certificate().as_bytes(),
        &made.key(),
        SystemTime::now(),
    )
    .unwrap()
}

fn renew(folder: &IdentityFolder, authority: &Authority) {
    let profile = container(serde_json::json!({ "guid": "g1" }))
        .identity()
        .unwrap();
    let key = PrivateKey::generate(KeyType::P256).unwrap();
    let wanted = Validity::starting(SystemTime::now(), HOUR);
    let issued = authority
        .issue(&profile, key.public_key_info(), wanted)
        .unwrap();
    let pair = Pair {
        certificate: issued.pem,
        key: key.to_pem().unwrap(),
    };
    folder
        .replace_pair(&pair, &authority.chain_pem(), None)
        .unwrap();
}

/// A pair as a naive program reads it: one name after the other.
fn by_names(folder: &Path) -> Pair {
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
    Pair {
        certificate: read("instance.crt"),
        key: read("instance.key").into(),
    }
}

/// Envoy and fsnotify watch the folder and compare names; the pair is whole from the first event on.
#[test]
fn watched_names_report_each_change() {
    let (place, authority) = (memory(), authority());
    let folder = IdentityFolder::new(place.path().join("g1"));
    renew(&folder, &authority);
    let mut watch = Watch::new(
        &folder.path,
        WatchMask::MOVED_TO | WatchMask::CREATE | WatchMask::MODIFY,
    );
    for change in 0..CHANGES {
        let before = by_names(&folder.path).certificate;
        thread::scope(|scope| {
            let changed = scope.spawn(|| renew(&folder, &authority));
            let mut seen = Vec::new();
            while !seen.iter().any(|name| name == "ca.crt") {
                for (mask, name) in watch.read() {
                    if mask.contains(EventMask::MOVED_TO) && !name.starts_with("..") {
                        let pair = by_names(&folder.path);
                        assert!(
                            matches(&pair) && pair.certificate != before,
                            "change {change}: {name}"
                        );
                        seen.push(name);
                    }
                }
            }
            assert_eq!(
                seen[..2],
                ["instance.key", "instance.crt"],
                "the key comes first"
            );
            changed.join().unwrap();
        });
        assert!(matches(&read_pair(&folder.path, "instance").unwrap()));
        assert!(matches(&joined(&folder.path).unwrap()));
    }
}

/// A watch on a file itself follows the links; it ends as after a rename over the file.
#[test]
fn watched_file_ends_with_its_generation() {
    let (place, authority) = (memory(), authority());
    let folder = IdentityFolder::new(place.path().join("g1"));
    renew(&folder, &authority);
    for name in ["instance.crt", "instance.key", "instance.pem"] {
        let mut watch = Watch::new(&folder.path.join(name), WatchMask::DELETE_SELF);
        let resolved = folder.current().unwrap();
        renew(&folder, &authority);
        let events = watch.read();
        assert!(
            events[0].0.contains(EventMask::DELETE_SELF),
            "{name}: {events:?}"
        );
        // A reader that resolved the previous generation still finds a whole pair.
        let read = |name: &str| std::fs::read_to_string(resolved.join(name)).unwrap();
        let pair = Pair {
            certificate: read("instance.crt"),
            key: read("instance.key").into(),
        };
        assert!(matches(&pair), "{name}");
    }
}

/// The Java buildpack's security provider and Spring Boot use Java's WatchService.
#[test]
fn java_watch_service_reloads_each_pair() {
    let (place, authority) = (memory(), authority());
    let folder = IdentityFolder::new(place.path().join("g1"));
    renew(&folder, &authority);
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/identity/Watch.java");
    let mut java = Command::new("java");
    java.arg("-Xshare:auto")
        .arg("-XX:TieredStopAtLevel=1")
        .arg(program)
        .arg(&folder.path);
    let mut java = Running(
        java.stdout(Stdio::piped())
            .spawn()
            .expect("openjdk-17-jdk-headless is installed"),
    );
    let mut lines = BufReader::new(java.0.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    for change in 0..CHANGES {
        renew(&folder, &authority);
        assert_eq!(
            lines.next().unwrap().unwrap(),
            "reloaded",
            "change {change}"
        );
        // The service may deliver the events of one change in two parts.
        thread::sleep(Duration::from_millis(50));
    }
}

/// A kill between the switch and the names: the next process renews them.
#[test]
fn interrupted_change_is_announced() {
    let (place, authority) = (memory(), authority());
    let folder = IdentityFolder::new(place.path().join("g1"));
    renew(&folder, &authority);
    let path = &folder.path;
    let target = std::fs::read_link(path.join("..data")).unwrap();
    // Time stamps have the resolution of a tick.
    thread::sleep(Duration::from_millis(20));
    std::os::unix::fs::symlink(&target, path.join("..next")).unwrap();
    std::fs::rename(path.join("..next"), path.join("..data")).unwrap();
    let mut watch = Watch::new(path, WatchMask::MOVED_TO);
    folder.complete_change().unwrap();
    let names: Vec<String> = watch.read().into_iter().map(|(_, name)| name).collect();
    assert_eq!(names[0], "instance.key", "{names:?}");
    assert!(names.iter().any(|name| name == "instance.crt"), "{names:?}");
    let mut watch = Watch::new(path, WatchMask::CREATE | WatchMask::MOVED_TO);
    folder.complete_change().unwrap();
    std::fs::write(path.join("end"), "").unwrap();
    assert_eq!(
        watch.read()[0].1,
        "end",
        "a complete change is not announced again"
    );
}
