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
    // First checks that took 200 ms, on a slow machine, were cut off where the slow lane was full, and then opened
    // another connection. Instances that have answered are never cut off: the lane has a place for each of them.
    let connections = fleet.connections();
    // The fleet has noticed by then which checks were cut off. How evenly checks are spread is tested with the
    // schedule, whose clock does not depend on the machine.
    std::thread::sleep(interval * 3 / 2);
    let from = Instant::now();
    until("three checks of each instance", || {
        let hits = hits_since(fleet, from);
        hits.len() == COUNT as usize && hits.values().all(|&hits| hits >= 3)
    });
    assert_one_check_per_interval(fleet, from, interval);
    assert_eq!(fleet.connections(), connections, "connections are kept");
}

/// Returns the number of checks of each instance.
fn hits_since(fleet: &Fleet, from: Instant) -> BTreeMap<IpAddr, u32> {
    let mut hits = BTreeMap::new();
    for hit in fleet.hits().into_iter().filter(|hit| hit.at >= from) {
        *hits.entry(hit.ip).or_default() += 1;
    }
    hits
}

/// Asserts how often instances were checked, of which none was cut off.
fn assert_one_check_per_interval(fleet: &Fleet, from: Instant, interval: Duration) {
    let hits = hits_since(fleet, from);
    // Read after the checks, of which there may be more meanwhile. The first one may be late, from the interval before.
    let intervals = (from.elapsed().as_secs_f64() / interval.as_secs_f64()).ceil() as u32;
    for (ip, count) in hits {
        assert!(
            count <= intervals + 1,
            "{ip}: {count} checks in {intervals} intervals"
        );
    }
    let since = fleet.hits().into_iter().filter(|hit| hit.at >= from);
    assert_eq!(since.filter(|hit| hit.overlaps).count(), 0);
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
    // More than the fast lane holds; with the live ones fewer than the slow lane holds of instances that never answered
    // (192 with 4,096 files): however slow this machine is, no check of a live instance is cut off.
    const FEW: u32 = 140;
    const SILENT: u32 = 3000;
    const LIVE: u32 = 50;
    let interval = Duration::from_secs(2);
    let mut checking = Checking::new(interval);
    checking.settings.synchronous_check_timeout = LIMIT;
    let fleet = &checking.fleet;
    for number in 0..SILENT {
        fleet.says(instance(number), Says::Nothing);
    }
    // A check of a silent instance takes longer than this test.
    let service = checking.service(LIMIT * 2);
    let (states, tracker) = (service.states(), service.tracker());
    tracker.track(&name("few"), &needs((0..FEW).map(instance), false));
    // Queued behind the silent ones.
    let live = || (SILENT..SILENT + LIVE).map(instance);
    tracker.track(&name("live"), &needs(live(), false));
    until("the live ones", || {
        live().all(|ip| states.state(ip, None) == HealthState::Running)
    });
    // A y1 query waits for the check of its instance, not for the silent ones.
    let first = instance(SILENT + LIVE);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(tracker.first_checks(&name("y1"), &needs([first], true)));
    assert_eq!(states.state(first, None), HealthState::Running);
    // The responsive instances are still checked in every interval when thousands fill the slow lane.
    let silent = needs((0..SILENT).map(instance), false);
    tracker.track(&name("silent"), &silent);
    until("a check of each silent instance", || {
        fleet.connections() > (SILENT + LIVE) as usize
    });
    let from = Instant::now();
    until("three checks of each live instance", || {
        let hits = hits_since(fleet, from);
        live().all(|ip| hits.get(&ip).is_some_and(|&hits| hits >= 3))
    });
    assert_one_check_per_interval(fleet, from, interval);
    assert_eq!(states.counts()[2], 0, "the silent ones are still checked");
    drop(service);
    // All of them become unknown in time.
    let service = checking.service(interval);
    service.tracker().track(&name("silent"), &silent);
    until("the silent ones", || {
        service.states().counts()[2] == SILENT as usize
    });
}
