//! Health checks against real TLS servers on loopback.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    time::{Duration, Instant},
};

use dns_core::{
    config::HealthConfig,
    name::Name,
    resolve::{Health, HealthState},
};
use dns_fastpath::FastPathHandle;
use dns_health::{HEALTH_NAME, HealthService};
use whole_system_tests::{
    health::{Fleet, Says, config, instance, write_files},
    pki::{Authority, Identity},
    process::wait_until,
};

use crate::{LIMIT, Pki, needs};

/// A service that checks instances, with the certificates of both.
struct Checking {
    pki: Pki,
    fleet: Fleet,
    settings: HealthConfig,
}

impl Checking {
    /// Starts the instances.
    fn new(interval: Duration) -> Self {
        let pki = Pki::new();
        let fleet = Fleet::start(&pki.files[0]).unwrap();
        let settings = config(fleet.port, pki.files[1].clone(), interval);
        Self {
            pki,
            fleet,
            settings,
        }
    }

    /// Starts the service with a time limit of each check.
    fn service(&self, timeout: Duration) -> HealthService {
        let service =
            HealthService::new(&self.settings, timeout, FastPathHandle::default()).unwrap();
        service.start().unwrap();
        service
    }
}

fn name(text: &str) -> Name {
    Name::from_text(text).unwrap()
}

fn until(what: &str, ready: impl FnMut() -> bool) {
    wait_until(what, LIMIT, ready).unwrap();
}

#[test]
fn thousand_instances_are_checked_once_per_interval() {
    const COUNT: u32 = 1000;
    let interval = Duration::from_secs(4);
    let checking = Checking::new(interval);
    let (fleet, service) = (&checking.fleet, checking.service(LIMIT));
    service
        .tracker()
        .track(&name("all"), &needs((0..COUNT).map(instance), false));
    until("first checks", || {
        service.states().counts()[0] == COUNT as usize
    });
    // Every instance has settled into its slot one and a half intervals after its first check. How evenly the slots
    // are spread is tested with the schedule, whose clock does not depend on the machine.
    std::thread::sleep(interval * 3 / 2);
    let from = Instant::now();
    let hits = || {
        let mut hits = BTreeMap::<IpAddr, u32>::new();
        for hit in fleet.hits().into_iter().filter(|hit| hit.at >= from) {
            *hits.entry(hit.ip).or_default() += 1;
        }
        hits
    };
    until("three checks of each instance", || {
        let hits = hits();
        hits.len() == COUNT as usize && hits.values().all(|&hits| hits >= 3)
    });
    let intervals = (from.elapsed().as_secs_f64() / interval.as_secs_f64()).ceil() as u32;
    let most = hits().into_values().max().unwrap_or_default();
    assert!(
        most <= intervals + 1,
        "{most} checks of an instance in {intervals} intervals"
    );
    assert!(!fleet.overlapped());
    assert_eq!(fleet.connections(), COUNT as usize, "connections are kept");
}

#[test]
fn health_changes_are_counted_once() {
    let checking = Checking::new(Duration::from_millis(100));
    let (fleet, service) = (&checking.fleet, checking.service(LIMIT));
    let (states, tracker) = (service.states(), service.tracker());
    let (one, two) = (instance(0), instance(1));
    fleet.says(
        two,
        Says::Body(r#"{"state":"running","group_state":{"7":"failing"}}"#.to_owned()),
    );
    tracker.track(&name("both"), &needs([one, two], false));
    until("first checks", || states.changes() == 2);
    assert_eq!(states.state(two, Some("7")), HealthState::Failing);

    let before = fleet.hits().len();
    until("more checks", || fleet.hits().len() > before + 6);
    assert_eq!(states.changes(), 2, "nothing has changed");

    fleet.says(one, Says::state("failing"));
    until("the change", || states.changes() == 3);
    assert_eq!(states.state(one, None), HealthState::Failing);

    fleet.says(one, Says::Body("nonsense".to_owned()));
    until("the change", || states.changes() == 4);
    assert_eq!(states.state(one, None), HealthState::Unknown);
    service.stop();
    // The fleet records the last request some time after it was sent.
    until("several intervals without a check", || {
        let before = fleet.hits().len();
        std::thread::sleep(Duration::from_millis(500));
        fleet.hits().len() == before
    });
}

#[test]
fn unneeded_instance_is_not_checked() {
    let mut checking = Checking::new(Duration::from_millis(50));
    checking.settings.max_tracked_queries = 1;
    let (fleet, service) = (&checking.fleet, checking.service(LIMIT));
    let (states, tracker) = (service.states(), service.tracker());
    tracker.track(&name("a"), &needs([instance(0)], false));
    until("the first check", || states.is_checked(instance(0)));
    tracker.track(&name("b"), &needs([instance(1)], false));
    assert!(!states.is_checked(instance(0)));
    until("the first check", || states.is_checked(instance(1)));
    std::thread::sleep(Duration::from_millis(200));
    assert!(!states.is_checked(instance(0)));
    let hits = |ip| fleet.hits().iter().filter(|hit| hit.ip == ip).count();
    // The fleet records the last request some time after it was sent.
    until(
        "several intervals without a check of the first instance",
        || {
            let (before, other) = (hits(instance(0)), hits(instance(1)));
            until("more checks", || hits(instance(1)) > other + 3);
            hits(instance(0)) == before
        },
    );
    // After a new query it is checked immediately.
    tracker.track(&name("a"), &needs([instance(0)], false));
    until("the first check", || states.is_checked(instance(0)));
}

#[test]
fn certificate_rotation_loses_no_check() {
    const COUNT: u32 = 200;
    let checking = Checking::new(Duration::from_millis(500));
    let (pki, fleet) = (&checking.pki, &checking.fleet);
    let service = checking.service(LIMIT);
    service
        .tracker()
        .track(&name("all"), &needs((0..COUNT).map(instance), false));
    until("first checks", || {
        service.states().counts()[0] == COUNT as usize
    });
    let changes = service.states().changes();

    let new = Authority::new("ca").unwrap();
    let old_pairs = [0, 1].map(|end| Identity {
        certificate: std::fs::read_to_string(&pki.files[end].certificate).unwrap(),
        key: std::fs::read_to_string(&pki.files[end].private_key).unwrap(),
    });
    let new_pairs = [
        new.issue(HEALTH_NAME).unwrap(),
        new.issue(HEALTH_NAME).unwrap(),
    ];
    let both = format!("{}{}", pki.authority.certificate, new.certificate);
    let steps = [
        (&old_pairs, &both),
        (&new_pairs, &both),
        (&new_pairs, &new.certificate),
    ];
    for (step, (pairs, authorities)) in steps.into_iter().enumerate() {
        // Server and client never rotate at the same moment.
        for end in if step % 2 == 0 { [0, 1] } else { [1, 0] } {
            let (before, connections) = (
                [
                    fleet.tls().current().generation,
                    service.tls().current().generation,
                ],
                fleet.connections(),
            );
            write_files(pki.folders[end].path(), &pairs[end], authorities).unwrap();
            let generation = || {
                [
                    fleet.tls().current().generation,
                    service.tls().current().generation,
                ][end]
            };
            // Files arrive one by one; the client retries until they match.
            until("the new files", || {
                let (tls, done) = if end == 0 {
                    (fleet.tls(), 0)
                } else {
                    (&**service.tls(), 1)
                };
                let material = tls.current();
                generation() > before[done]
                    && tls.last_error().is_none()
                    && material.authorities.len() == authorities.matches("BEGIN").count()
            });
            // The client reconnects with its new certificates; each instance is checked at least
            // once in between.
            let hits = fleet.hits().len();
            until("checks", || fleet.hits().len() >= hits + 2 * COUNT as usize);
            if end == 1 {
                assert!(
                    fleet.connections() >= connections + COUNT as usize,
                    "new connections"
                );
            }
        }
    }
    assert_eq!(service.states().changes(), changes, "no check was lost");
    assert_eq!(fleet.failed_handshakes(), 0);
    assert_eq!(service.states().counts(), [COUNT as usize, 0, 0, 0]);
    assert_eq!(service.tls().current().authorities.len(), 1);
}

#[test]
fn redirects_and_slow_bodies_fail_checks() {
    let checking = Checking::new(Duration::from_millis(300));
    let fleet = &checking.fleet;
    let [redirected, target, slow, good] = [0, 1, 2, 3].map(instance);
    fleet.says(
        redirected,
        Says::Redirect(format!("https://{target}:{}/health", fleet.port)),
    );
    fleet.says(slow, Says::Drip);
    let service = checking.service(Duration::from_secs(1));
    let states = service.states();
    service
        .tracker()
        .track(&name("all"), &needs([redirected, slow, good], false));
    until("the checks", || states.counts() == [1, 0, 2, 0]);
    assert_eq!(states.state(good, None), HealthState::Running);
    // The others are still checked, and no redirect is followed.
    let before = fleet.hits().iter().filter(|hit| hit.ip == good).count();
    until("further checks", || {
        fleet.hits().iter().filter(|hit| hit.ip == good).count() > before + 3
    });
    assert!(
        fleet.hits().iter().all(|hit| hit.ip != target),
        "a redirect was followed"
    );
    assert!(fleet.hits().iter().any(|hit| hit.ip == redirected));
}

/// A report of 64 KiB is read, and one more byte makes the instance's state unknown.
#[test]
fn longest_report_is_read() {
    const LONGEST: usize = 64 << 10;
    let checking = Checking::new(Duration::from_millis(300));
    let fleet = &checking.fleet;
    let of_length = |len: usize| {
        let mut body = r#"{"state":"running"}"#.to_owned();
        body.extend(std::iter::repeat_n(' ', len - body.len()));
        Says::Body(body)
    };
    let [longest, longer] = [0, 1].map(instance);
    fleet.says(longest, of_length(LONGEST));
    fleet.says(longer, of_length(LONGEST + 1));
    let service = checking.service(Duration::from_secs(20));
    let states = service.states();
    service
        .tracker()
        .track(&name("reports"), &needs([longest, longer], false));
    until("the checks", || states.counts() == [1, 0, 1, 0]);
    assert_eq!(states.state(longest, None), HealthState::Running);
    assert_eq!(states.state(longer, None), HealthState::Unknown);
}

#[test]
fn silent_instances_delay_no_check() {
    const SILENT: u32 = 3000;
    const LIVE: u32 = 50;
    let interval = Duration::from_secs(2);
    let mut checking = Checking::new(interval);
    let timeout = Duration::from_secs(2);
    let alone = timeout * SILENT / 64;
    checking.settings.synchronous_check_timeout = alone / 3;
    let fleet = &checking.fleet;
    for number in 0..SILENT {
        fleet.says(instance(number), Says::Nothing);
    }
    let service = checking.service(timeout);
    let (states, tracker) = (service.states(), service.tracker());
    tracker.track(&name("silent"), &needs((0..SILENT).map(instance), false));
    // Queued behind three thousand silent instances.
    let live = || (SILENT..SILENT + LIVE).map(instance);
    tracker.track(&name("live"), &needs(live(), false));
    until("the live ones", || {
        live().all(|ip| states.state(ip, None) == HealthState::Running)
    });
    // The service checks 64 instances at a time.
    let checked = (0..SILENT).filter(|&n| states.is_checked(instance(n)));
    let checked = checked.count();
    println!("{checked} of {SILENT} silent instances were checked before the last live one");
    assert!(
        checked < SILENT as usize / 3,
        "{checked}: the live ones waited for the silent ones"
    );
    // A y1 query waits for the check of its instance, not for the silent ones.
    let first = instance(SILENT + LIVE);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(tracker.first_checks(&name("y1"), &needs([first], true)));
    assert_eq!(states.state(first, None), HealthState::Running);
    // The responsive instances are still checked in every interval.
    std::thread::sleep(interval * 2);
    let from = Instant::now();
    let hits = |ip| {
        let hits = fleet.hits();
        hits.iter()
            .filter(|hit| hit.ip == ip && hit.at >= from)
            .count()
    };
    until("three checks of each live instance", || {
        live().all(|ip| hits(ip) >= 3)
    });
    let intervals = (from.elapsed().as_secs_f64() / interval.as_secs_f64()).ceil() as usize;
    for ip in live() {
        let count = hits(ip);
        assert!(
            count <= intervals + 1,
            "{ip}: {count} checks in {intervals} intervals"
        );
    }
    assert!(!fleet.overlapped());
    until("the silent ones", || states.counts()[2] == SILENT as usize);
}
