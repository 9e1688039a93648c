//! Cells and machines under faults for a while: `SOAK_SECONDS=3600 cargo nextest run -p dns-identity soak
//! --no-capture`. Readers that reread after a change never fail a handshake.

use std::{
    env, fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use dns_identity::folder::read_pair;
use tempfile::TempDir;
use test_support::free_address;

use crate::{
    authorities::TestAuthority,
    cells::handshake,
    fleet::converged,
    machines::metric,
    program::{Running, get, until},
    rotator::memory,
    tools::{FAKETIME, clock, fires, not_run, text},
};

/// Clocks of the cells and machines, in seconds ahead of the readers'.
const SKEWS: [i64; 3] = [-600, 0, 600];

/// Containers per cell.
const CONTAINERS: usize = 5;

struct Cell {
    folder: TempDir,
    authority: TestAuthority,
    peers: PathBuf,
    skew: i64,
    process: Running,
}

impl Cell {
    fn new(skew: i64, all: &Path) -> Self {
        let (folder, authority) = (memory(), TestAuthority::aged(&format!("cell {skew}")));
        fs::create_dir(folder.path().join("containers")).unwrap();
        let process = Self::run(folder.path(), &authority, all, skew);
        Self { folder, authority, peers: all.to_owned(), skew, process }
    }

    fn run(folder: &Path, authority: &TestAuthority, all: &Path, skew: i64) -> Running {
        let path = |name: &str| text(&folder.join(name)).to_owned();
        let (ca, key) = (authority.certificate_path(), authority.key_path());
        let words =
            ["run", "--ca", text(&ca), "--ca-key", text(&key), "--key-type", "p-256", "--validity", "1h"];
        let (identities, containers) = (path("identities"), path("containers"));
        let more = [
            "--backdate",
            "15m",
            "--also-trust",
            text(all),
            "--folder",
            &identities,
            "--containers",
            &containers,
        ];
        Running::start_with(&[&words[..], &more[..]].concat(), &folder.join("log"), &clock(skew))
    }

    fn kill(&mut self) {
        self.process.0.kill().unwrap();
        self.process.0.wait().unwrap();
        self.process = Self::run(self.folder.path(), &self.authority, &self.peers, self.skew);
    }

    fn describe(&self, number: usize, unit: u64) {
        let containers = self.folder.path().join("containers");
        let description = format!(r#"{{"guid":"g{number}","ous":["app:{unit}"]}}"#);
        fs::write(containers.join(".next"), description).unwrap();
        fs::rename(containers.join(".next"), containers.join(format!("g{number}.json"))).unwrap();
    }

    fn identity(&self, number: usize) -> PathBuf {
        self.folder.path().join("identities").join(format!("g{number}"))
    }
}

/// Reads both ends again if a handshake fails, as a program that rereads after a change.
fn meets(server: &Path, client: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let present = |folder: &Path| read_pair(folder, "instance").is_ok();
    let mut last = Ok(());
    for _ in 0..5 {
        if present(server) && present(client) {
            last = handshake(server, client);
            let missing = |error: &(dyn std::error::Error + 'static)| {
                let found = error.downcast_ref::<std::io::Error>();
                found.is_some_and(|error| error.kind() == std::io::ErrorKind::NotFound)
            };
            match &last {
                Ok(()) => return last,
                // The folder was lost since it was seen.
                Err(error) if missing(&**error) => last = Ok(()),
                Err(_) => {}
            }
        }
        thread::sleep(Duration::from_millis(100));
    }
    last
}

#[test]
fn soak_of_cells_and_machines() {
    if !Path::new(FAKETIME).exists() {
        return not_run("libfaketime is not installed");
    }
    let seconds = env::var("SOAK_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(15);
    let all = tempfile::NamedTempFile::new().unwrap();
    let first = TestAuthority::aged("placeholder");
    fs::write(all.path(), first.certificate()).unwrap();
    let mut cells: Vec<Cell> = SKEWS.iter().map(|skew| Cell::new(*skew, all.path())).collect();
    let bundle: String = cells.iter().map(|cell| cell.authority.certificate()).collect();
    fs::write(all.path(), &bundle).unwrap();
    for cell in &cells {
        (0..CONTAINERS).for_each(|number| cell.describe(number, 0));
    }
    let folders: Vec<PathBuf> =
        cells.iter().flat_map(|cell| (0..CONTAINERS).map(|number| cell.identity(number))).collect();
    let trusts_all = |folder: &PathBuf| {
        fs::read_to_string(folder.join("ca.crt"))
            .is_ok_and(|held| cells.iter().all(|cell| held.contains(&cell.authority.certificate())))
    };
    until("identities of all cells", || folders.iter().all(trusts_all));

    let mut fleet = converged(&["i1", "i2", "i3"]);
    // The agents start again with other clocks.
    let metrics: Vec<_> = SKEWS.iter().map(|_| free_address()).collect();
    fleet.agents.clear();
    for (at, skew) in SKEWS.iter().enumerate() {
        fleet.environment = clock(*skew);
        fleet.agent(&format!("i{}", at + 1), "", &["--metrics", &metrics[at].to_string()]);
    }
    let roles: Vec<PathBuf> =
        ["i1", "i2", "i3"].iter().map(|instance| fleet.pair(instance, "health.bosh-dns")).collect();

    let (stop, met) = (AtomicBool::new(false), AtomicU64::new(0));
    let new = TestAuthority::new("new");
    thread::scope(|scope| {
        for folders in [&folders, &roles] {
            let (stop, met) = (&stop, &met);
            scope.spawn(move || {
                for round in 0_usize.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let (server, client) =
                        (&folders[round % folders.len()], &folders[(round * 7 + 1) % folders.len()]);
                    let done = meets(server, client);
                    stop.fetch_or(done.is_err(), Ordering::Relaxed);
                    assert!(done.is_ok(), "{} to {}: {done:?}", client.display(), server.display());
                    met.fetch_add(1, Ordering::Relaxed);
                    thread::sleep(Duration::from_millis(20));
                }
            });
        }
        let begun = Instant::now();
        let (mut faults, mut rotation) = (0_u64, None);
        while begun.elapsed() < Duration::from_secs(seconds) && !stop.load(Ordering::Relaxed) {
            faults += 1;
            let at = usize::try_from(faults).unwrap();
            match faults % 5 {
                // Every description of a cell changes, so its pairs are issued again.
                0 => (0..CONTAINERS).for_each(|number| cells[at % 3].describe(number, faults)),
                1 => cells[at % 3].kill(),
                2 => fs::remove_dir_all(cells[at % 3].identity(at % CONTAINERS)).unwrap_or_default(),
                3 => fs::remove_dir_all(fleet.pair("i2", "api.bosh-dns")).unwrap_or_default(),
                _ if rotation.is_none() => {
                    let (ca, key) = (new.certificate_path(), new.key_path());
                    let mut command = fleet.rotate(&["--ca", text(&ca), "--ca-key", text(&key)]);
                    rotation = Some(Running(command.spawn().unwrap()));
                }
                _ => {}
            }
            thread::sleep(Duration::from_millis(700));
        }
        if let Some(mut rotation) = rotation
            && !stop.load(Ordering::Relaxed)
        {
            assert!(rotation.0.wait().unwrap().success(), "the rotation of the CA fails");
        }
        stop.store(true, Ordering::Relaxed);
        println!(
            "{} s: {faults} faults, {} handshakes, none failed",
            begun.elapsed().as_secs(),
            met.load(Ordering::Relaxed)
        );
    });
    assert!(met.into_inner() > 0);
    until("all pairs of the new CA", || {
        ["i1", "i2", "i3"]
            .iter()
            .all(|instance| fleet.has_pairs(instance) && fleet.follows(instance, &new, &[&new]))
    });
    for (skew, address) in SKEWS.iter().zip(metrics) {
        until("the report", || metric(address, "bosh_dns_identity_issuer_reached") == Some(1.0));
        let scraped = get(address, "/metrics").unwrap();
        assert_eq!(fires(&scraped, "BoshDnsIdentityClockSkew"), *skew != 0, "{scraped}");
    }
}
