//! Cells and machines under faults for a while: `SOAK_SECONDS=3600 cargo nextest run -p dns-identity soak
//! --no-capture`. Readers that reread after a change never fail a handshake, and the alerts that should fire
//! do, from half an hour on no others: the length of the soak is 80 minutes of Prometheus' clock.

use std::{
    env, fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use dns_identity::folder::read_pair;
use tempfile::TempDir;
use test_support::free_address;

use crate::{
    authorities::TestAuthority,
    cells::handshake,
    fleet::{Fleet, converged},
    program::{Running, get, until},
    rotator::memory,
    tools::{History, clock, has_faketime, text},
};

/// Clocks of the cells and agents, in seconds ahead of the readers'.
const SKEWS: [i64; 3] = [-600, 0, 600];

const CONTAINERS: usize = 5;

/// Number of scrapes in the length of the soak.
const SCRAPES: u32 = 80;

/// Agents, by their instances.
const AGENTS: [&str; 3] = ["i1", "i2", "i3"];

/// The troubles of a phase, beside kills of cells and lost identities.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Kills of agents and of the issuer; a lost role.
    Usual,
    /// The issuer is down.
    WithoutIssuer,
    /// The last agent is down.
    WithoutAgent,
}

struct Soak {
    cells: Vec<Cell>,
    fleet: Fleet,
    agents: [SocketAddr; 3],
    issuer: SocketAddr,
    faults: u64,
}

impl Soak {
    fn start_agent(&mut self, at: usize) {
        self.fleet.environment = clock(SKEWS[at]);
        self.fleet
            .agent(AGENTS[at], "", &["--metrics", &self.agents[at].to_string()]);
        // The new process takes the place of the killed one.
        let started = self.fleet.agents.pop().unwrap();
        self.fleet.agents.insert(at, started);
    }

    fn kill_agent(&mut self, at: usize) {
        drop(self.fleet.agents.remove(at));
    }

    fn kill_issuer(&mut self) {
        self.fleet.issuer.0.kill().unwrap();
        self.fleet.issuer.0.wait().unwrap();
    }

    /// Causes the next trouble of a phase.
    fn disturb(&mut self, phase: Phase) {
        self.faults += 1;
        let at = usize::try_from(self.faults).unwrap();
        let cell = &mut self.cells[at % 3];
        match (self.faults % 6, phase) {
            // Every description of a cell changes, so its pairs are issued again.
            (0, _) => (0..CONTAINERS).for_each(|number| cell.describe(number, self.faults)),
            (1, _) => cell.kill(),
            (2 | 3, _) => fs::remove_dir_all(cell.identity(at % CONTAINERS)).unwrap_or_default(),
            (4, Phase::Usual | Phase::WithoutAgent) => {
                fs::remove_dir_all(self.fleet.pair("i2", "api.bosh-dns")).unwrap_or_default();
            }
            (_, Phase::Usual) if at % 4 == 1 => {
                self.kill_issuer();
                self.fleet.start_issuer(self.issuer);
            }
            (_, Phase::Usual) => {
                self.kill_agent(at % 3);
                self.start_agent(at % 3);
            }
            (_, Phase::WithoutIssuer | Phase::WithoutAgent) => {}
        }
    }
}

struct Cell {
    folder: TempDir,
    authority: TestAuthority,
    peers: PathBuf,
    skew: i64,
    metrics: SocketAddr,
    process: Running,
}

impl Cell {
    fn new(skew: i64, all: &Path) -> Self {
        let (folder, authority) = (memory(), TestAuthority::aged(&format!("cell {skew}")));
        fs::create_dir(folder.path().join("containers")).unwrap();
        let metrics = free_address();
        let process = Self::run(folder.path(), &authority, all, (skew, metrics));
        Self {
            folder,
            authority,
            peers: all.to_owned(),
            skew,
            metrics,
            process,
        }
    }

    fn run(folder: &Path, authority: &TestAuthority, all: &Path, at: (i64, SocketAddr)) -> Running {
        let (skew, metrics) = (at.0, at.1.to_string());
        let path = |name: &str| text(&folder.join(name)).to_owned();
        let (ca, key) = (authority.certificate_path(), authority.key_path());
        let words = [
            "run",
            "--ca",
            text(&ca),
            "--ca-key",
            text(&key),
            "--key-type",
            "p-256",
            "--validity",
            "1h",
        ];
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
            "--metrics",
            &metrics,
        ];
        Running::start_with(
            &[&words[..], &more[..]].concat(),
            &folder.join("log"),
            &clock(skew),
        )
    }

    fn kill(&mut self) {
        self.process.0.kill().unwrap();
        self.process.0.wait().unwrap();
        let at = (self.skew, self.metrics);
        self.process = Self::run(self.folder.path(), &self.authority, &self.peers, at);
    }

    fn describe(&self, number: usize, unit: u64) {
        let containers = self.folder.path().join("containers");
        let description = format!(r#"{{"guid":"g{number}","ous":["app:{unit}"]}}"#);
        fs::write(containers.join(".next"), description).unwrap();
        fs::rename(
            containers.join(".next"),
            containers.join(format!("g{number}.json")),
        )
        .unwrap();
    }

    fn identity(&self, number: usize) -> PathBuf {
        self.folder
            .path()
            .join("identities")
            .join(format!("g{number}"))
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
    if !has_faketime() {
        return;
    }
    let seconds = env::var("SOAK_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(20);
    let length = Duration::from_secs(seconds);
    let all = tempfile::NamedTempFile::new().unwrap();
    let first = TestAuthority::aged("placeholder");
    fs::write(all.path(), first.certificate()).unwrap();
    let cells: Vec<Cell> = SKEWS
        .iter()
        .map(|skew| Cell::new(*skew, all.path()))
        .collect();
    let bundle: String = cells
        .iter()
        .map(|cell| cell.authority.certificate())
        .collect();
    fs::write(all.path(), &bundle).unwrap();
    for cell in &cells {
        (0..CONTAINERS).for_each(|number| cell.describe(number, 0));
    }
    let folders: Vec<PathBuf> = cells
        .iter()
        .flat_map(|cell| (0..CONTAINERS).map(|number| cell.identity(number)))
        .collect();
    let trusts_all = |folder: &PathBuf| {
        fs::read_to_string(folder.join("ca.crt")).is_ok_and(|held| {
            cells
                .iter()
                .all(|cell| held.contains(&cell.authority.certificate()))
        })
    };
    until("identities of all cells", || folders.iter().all(trusts_all));

    let mut fleet = converged(&AGENTS);
    fleet.agents.clear();
    fleet.issuer.stop();
    let agents = [(); 3].map(|()| free_address());
    let mut soak = Soak {
        cells,
        fleet,
        agents,
        issuer: free_address(),
        faults: 0,
    };
    soak.fleet.start_issuer(soak.issuer);
    // The agents start again with other clocks.
    (0..AGENTS.len()).for_each(|at| soak.start_agent(at));
    let roles: Vec<PathBuf> = AGENTS
        .iter()
        .map(|instance| soak.fleet.pair(instance, "health.bosh-dns"))
        .collect();
    let mut scraped = vec![("issuer", soak.issuer)];
    scraped.extend(AGENTS.into_iter().zip(soak.agents));
    scraped.extend(
        ["cell 1", "cell 2", "cell 3"]
            .into_iter()
            .zip(soak.cells.iter().map(|cell| cell.metrics)),
    );

    let (stop, met, history) = (
        AtomicBool::new(false),
        AtomicU64::new(0),
        Mutex::new(History::default()),
    );
    let new = TestAuthority::new("new");
    let begun = Instant::now();
    thread::scope(|scope| {
        // Also if an assertion below fails.
        let _stopped = Stop(&stop);
        for folders in [&folders, &roles] {
            let (stop, met) = (&stop, &met);
            scope.spawn(move || {
                for round in 0_usize.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let (server, client) = (
                        &folders[round % folders.len()],
                        &folders[(round * 7 + 1) % folders.len()],
                    );
                    let done = meets(server, client);
                    stop.fetch_or(done.is_err(), Ordering::Relaxed);
                    assert!(
                        done.is_ok(),
                        "{} to {}: {done:?}",
                        client.display(),
                        server.display()
                    );
                    met.fetch_add(1, Ordering::Relaxed);
                    thread::sleep(Duration::from_millis(20));
                }
            });
        }
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let read: Vec<_> = scraped
                    .iter()
                    .map(|(name, at)| (*name, get(*at, "/metrics")))
                    .collect();
                history.lock().unwrap().add(&read);
                thread::sleep(length / SCRAPES);
            }
        });
        let goes_on = || !stop.load(Ordering::Relaxed);
        let held = |metric: &str, value, count| {
            let series = format!("bosh_dns_identity_{metric}\"}}");
            history.lock().unwrap().held(&series, value, count)
        };
        let disturb_until = |soak: &mut Soak, phase, done: &dyn Fn() -> bool| {
            let from = Instant::now();
            while goes_on() && !done() {
                assert!(
                    from.elapsed() < 2 * length + Duration::from_secs(120),
                    "a phase does not end"
                );
                soak.disturb(phase);
                thread::sleep(Duration::from_millis(700));
            }
        };
        disturb_until(&mut soak, Phase::Usual, &|| {
            history.lock().unwrap().len() >= 8
        });

        // Without the issuer, a lost role stays lost; a description without an identity.
        soak.kill_issuer();
        fs::remove_dir_all(soak.fleet.pair("i2", "api.bosh-dns")).unwrap_or_default();
        let broken = soak.cells[1].folder.path().join("containers/broken.json");
        fs::write(&broken, "{").unwrap();
        disturb_until(&mut soak, Phase::WithoutIssuer, &|| {
            AGENTS
                .iter()
                .all(|agent| held(&format!("issuer_reached{{instance=\"{agent}"), 0, 13))
                && held(
                    "expiry_timestamp_seconds{instance=\"i2\",guid=\"api.bosh-dns",
                    0,
                    13,
                )
                && held("pair_failing{instance=\"i2\",guid=\"api.bosh-dns", 1, 8)
        });
        soak.fleet.start_issuer(soak.issuer);
        disturb_until(&mut soak, Phase::WithoutAgent, &|| {
            AGENTS
                .iter()
                .all(|agent| held(&format!("issuer_reached{{instance=\"{agent}"), 1, 1))
        });
        fs::remove_file(&broken).unwrap();

        // A rotation of the CA waits for an agent that is down.
        soak.kill_agent(2);
        let (ca, key) = (new.certificate_path(), new.key_path());
        let mut command = soak
            .fleet
            .rotate(&["--ca", text(&ca), "--ca-key", text(&key)]);
        let mut rotation = Running(command.spawn().unwrap());
        disturb_until(&mut soak, Phase::WithoutAgent, &|| {
            held("lagging{instance=\"issuer", 1, 33)
        });
        soak.start_agent(2);
        let mut status = None;
        while goes_on() && status.is_none() {
            soak.disturb(Phase::Usual);
            thread::sleep(Duration::from_millis(700));
            status = rotation.0.try_wait().unwrap();
        }
        assert!(
            !goes_on() || status.is_some_and(|status| status.success()),
            "the rotation of the CA fails"
        );
        disturb_until(&mut soak, Phase::Usual, &|| begun.elapsed() >= length);
    });
    println!(
        "{} s: {} faults, {} handshakes, none failed",
        begun.elapsed().as_secs(),
        soak.faults,
        met.load(Ordering::Relaxed)
    );
    assert!(met.into_inner() > 0);
    until("all pairs of the new CA", || {
        AGENTS.iter().all(|instance| {
            soak.fleet.has_pairs(instance) && soak.fleet.follows(instance, &new, &[&new])
        })
    });
    let expected = [
        ("ClockSkew", "i1"),
        ("ClockSkew", "i3"),
        ("IssuerNotReached", "i1"),
        ("IssuerNotReached", "i2"),
        ("IssuerNotReached", "i3"),
        ("Failing", "i2"),
        ("NoCertificate", "i2"),
        ("WithoutIdentity", "cell 2"),
        ("RotationStalls", "issuer"),
    ];
    let history = history.into_inner().unwrap();
    history.assert_fired(&expected);
    // In a short soak the five minutes of a rule are about a second: a busy machine needs longer for a retry.
    if length >= Duration::from_secs(1800) {
        history.assert_nothing_else_fired(&expected);
    }
}

/// Ends the threads of the soak when it is dropped.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
