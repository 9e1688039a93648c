//! Tests of the tracker without a watcher: they read its commands themselves.

use super::*;
use dns_core::resolve::{Existence, HealthState};

fn ip(n: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, n])
}

fn name(text: &str) -> Name {
    Name::from_text(text).unwrap()
}

/// Returns a resolution that needs these instances checked.
fn needs(instances: &[u8], synchronous: bool) -> Resolution {
    let instances = instances.iter().map(|n| ip(*n)).collect();
    Resolution {
        existence: Existence::Found,
        v4: Vec::new(),
        v6: Vec::new(),
        checks: Checks {
            instances,
            tracked: true,
            synchronous,
        },
    }
}

/// Returns a tracker with a limit of two names, its commands and its states.
fn tracker(
    ttl: Option<Duration>,
) -> (
    Tracker,
    mpsc::UnboundedReceiver<WatcherCommand>,
    Arc<HealthStates>,
) {
    let states = Arc::new(HealthStates::default());
    let limits = Limits {
        names: 2,
        first_checks: Duration::from_secs(60),
        ttl,
    };
    let (tracker, commands) = Tracker::new(limits, states.clone(), FastPathHandle::default());
    (tracker, commands, states)
}

fn running() -> InstanceHealth {
    InstanceHealth {
        state: HealthState::Running,
        groups: Box::default(),
    }
}

/// Returns the instances that the watcher would check now, in order.
fn checks(commands: &mut mpsc::UnboundedReceiver<WatcherCommand>) -> Vec<IpAddr> {
    std::iter::from_fn(|| commands.try_recv().ok())
        .filter_map(|command| {
            if let WatcherCommand::Check { ip, .. } = command {
                Some(ip)
            } else {
                None
            }
        })
        .collect()
}

/// Returns the names and instances that were dropped.
fn dropped(commands: &mut mpsc::UnboundedReceiver<WatcherCommand>) -> (Vec<Name>, Vec<IpAddr>) {
    let mut all = (Vec::new(), Vec::new());
    while let Ok(command) = commands.try_recv() {
        if let WatcherCommand::Dropped { names, instances } = command {
            all.0.extend(names);
            all.1.extend(instances);
        }
    }
    all
}

#[test]
fn oldest_name_is_dropped() {
    let (tracker, mut commands, states) = tracker(None);
    tracker.track(&name("a"), &needs(&[1, 2], false));
    tracker.track(&name("b"), &needs(&[2, 3], false));
    assert_eq!(checks(&mut commands), [ip(1), ip(2), ip(3)]);
    for n in 1..=3 {
        assert!(tracker.checked(ip(n), running()));
    }
    tracker.track(&name("a"), &needs(&[1, 2], false));
    tracker.track(&name("c"), &needs(&[4], false));
    assert_eq!(dropped(&mut commands), (vec![name("b")], vec![ip(3)]));
    assert!(tracker.is_tracked(&name("a")) && !tracker.is_tracked(&name("b")));
    // Shared with a, which stays.
    assert!(states.is_checked(ip(2)) && !states.is_checked(ip(3)));
    assert_eq!((tracker.name_count(), tracker.instance_count()), (2, 3));
    // The result of a check that was in progress changes nothing.
    assert!(!tracker.checked(ip(3), running()) && !states.is_checked(ip(3)));
}

#[test]
fn later_uses_elsewhere_count() {
    let (tracker, _commands, _) = tracker(None);
    tracker.track(&name("a"), &needs(&[1], false));
    tracker.track(&name("b"), &needs(&[2], false));
    // Simulates later use of the first name on the fast path.
    let last_use = |tracked: &Tracked| match tracked.name == name("a") {
        true => tracker.last_use(tracked) + 1_000_000_000,
        false => tracker.last_use(tracked),
    };
    assert_eq!(
        tracker
            .registry
            .lock()
            .pop_before(u64::MAX, last_use)
            .unwrap()
            .name,
        name("b")
    );
}

#[test]
fn unused_names_expire() {
    let (tracker, mut commands, _) = tracker(Some(Duration::ZERO));
    tracker.track(&name("a"), &needs(&[1], false));
    std::thread::sleep(Duration::from_millis(1));
    tracker.expire();
    assert_eq!(dropped(&mut commands), (vec![name("a")], vec![ip(1)]));
    let (tracker, mut commands, _) = self::tracker(Some(Duration::from_secs(3600)));
    tracker.track(&name("a"), &needs(&[1], false));
    tracker.expire();
    assert_eq!(dropped(&mut commands).0, []);
}

#[test]
fn untracked_names_are_not_published() {
    let (tracker, _commands, _) = tracker(None);
    let (smart, synchronous) = (needs(&[1], false), needs(&[1, 2], true));
    assert!(!tracker.may_publish(&name("a"), &smart));
    tracker.track(&name("a"), &smart);
    assert!(tracker.may_publish(&name("a"), &smart));
    tracker.track(&name("b"), &synchronous);
    assert!(!tracker.may_publish(&name("b"), &synchronous));
    tracker.checked(ip(1), InstanceHealth::unknown());
    assert!(!tracker.may_publish(&name("b"), &synchronous));
    tracker.checked(ip(2), running());
    assert!(tracker.may_publish(&name("b"), &synchronous));
    let untracked = Resolution {
        checks: Checks::default(),
        ..smart
    };
    assert!(tracker.may_publish(&name("never.asked"), &untracked));
}

#[tokio::test]
async fn y1_waits_for_first_checks() {
    let (tracker, mut commands, _) = tracker(None);
    let tracker = Arc::new(tracker);
    tracker.track(&name("other"), &needs(&[2], false));
    tracker.checked(ip(2), running());
    let waits = tokio::spawn({
        let tracker = tracker.clone();
        async move {
            tracker
                .first_checks(&name("a"), &needs(&[1, 2], true))
                .await
        }
    });
    while !tracker.is_tracked(&name("a")) || checks(&mut commands).is_empty() {
        tokio::task::yield_now().await;
    }
    tokio::task::yield_now().await;
    assert!(!waits.is_finished());
    tracker.checked(ip(1), running());
    waits.await.unwrap();
    // All states are known, so there is no wait; no check would end it.
    tracker
        .first_checks(&name("a"), &needs(&[1, 2], true))
        .await;
}

#[tokio::test]
async fn y1_wait_is_bounded() {
    let limits = Limits {
        names: 2,
        first_checks: Duration::from_millis(50),
        ttl: None,
    };
    let (tracker, _commands) = Tracker::new(
        limits,
        Arc::new(HealthStates::default()),
        FastPathHandle::default(),
    );
    let started = std::time::Instant::now();
    tracker.first_checks(&name("a"), &needs(&[1], true)).await;
    assert!(started.elapsed() >= Duration::from_millis(50));
}

#[test]
fn new_records_keep_moved_instances() {
    let (tracker, mut commands, states) = tracker(None);
    tracker.track(&name("a"), &needs(&[1, 2], false));
    tracker.track(&name("b"), &needs(&[3], false));
    (1..=3).for_each(|n| assert!(tracker.checked(ip(n), running())));
    checks(&mut commands);
    // Instance 2 moves from a to b, 1 is gone, 4 is new.
    let checks_of = |asked: &Name| {
        let instances = if *asked == name("a") {
            vec![ip(4)]
        } else {
            vec![ip(2), ip(3)]
        };
        Some(Checks {
            instances,
            tracked: true,
            synchronous: false,
        })
    };
    let set = |tracked: &Arc<Tracked>| tracker.set_checks(tracked, checks_of(&tracked.name));
    let before: Vec<_> = tracker.all().iter().flat_map(set).collect();
    tracker.release(&before);
    assert!(!states.is_checked(ip(1)) && states.is_checked(ip(2)) && states.is_checked(ip(3)));
    assert_eq!(tracker.instance_count(), 3);
    let mut new = Vec::new();
    let mut gone = Vec::new();
    while let Ok(command) = commands.try_recv() {
        match command {
            WatcherCommand::Check { ip, .. } => new.push(ip),
            WatcherCommand::Dropped { instances, .. } => gone.extend(instances),
            WatcherCommand::Began(_) | WatcherCommand::Decide(_) => {}
        }
    }
    assert_eq!((new, gone), (vec![ip(4)], vec![ip(1)]));
    // A name without a meaning in the records stays tracked and needs no instances.
    let before: Vec<_> = tracker
        .all()
        .iter()
        .flat_map(|tracked| tracker.set_checks(tracked, None))
        .collect();
    tracker.release(&before);
    assert_eq!((tracker.name_count(), tracker.instance_count()), (2, 0));
}

#[test]
fn lagging_watcher_stops_tracking() {
    let (tracker, mut commands, _) = tracker(None);
    let flood = |from: usize| {
        for number in from..from + 2 * MAX_QUEUED {
            tracker.track(&name(&format!("n{number}")), &needs(&[1, 2], false));
        }
    };
    flood(0);
    let queued = commands.len();
    // No commands are taken: the last name that was tracked may have exceeded the limit.
    assert!(
        (MAX_QUEUED..MAX_QUEUED + 8).contains(&queued),
        "{queued} commands wait"
    );
    while commands.try_recv().is_ok() {}
    tracker.taken(queued);
    flood(1_000_000);
    assert!(commands.len() >= MAX_QUEUED, "names are tracked again");
    assert_eq!(tracker.name_count(), 2);
}

#[test]
fn dropped_name_must_be_looked_up() {
    let (tracker, _commands, _) = tracker(None);
    assert!(tracker.is_on());
    tracker.track(&name("a"), &needs(&[1], false));
    let kept = tracker.tracked(&name("a")).unwrap();
    assert!(tracker.tracked(&name("b")).is_none() && tracker.touch(&kept));
    tracker.track(&name("b"), &needs(&[2], false));
    // The order of uses within a tick decides now.
    assert!(tracker.touch(&kept));
    tracker.track(&name("c"), &needs(&[3], false));
    assert!(tracker.is_tracked(&name("a")) && tracker.touch(&kept));
    for other in ["d", "e"] {
        tracker.track(&name(other), &needs(&[4], false));
    }
    assert!(!tracker.touch(&kept) && tracker.tracked(&name("a")).is_none());
    let off = Limits {
        names: 0,
        first_checks: Duration::ZERO,
        ttl: None,
    };
    let (off, mut commands) = Tracker::new(off, Arc::default(), FastPathHandle::default());
    off.track(&name("a"), &needs(&[1], false));
    assert!(!off.is_on() && off.name_count() == 0 && checks(&mut commands).is_empty());
}

#[test]
fn names_without_checks_are_not_tracked() {
    let (tracker, mut commands, _) = tracker(None);
    let mut unneeded = needs(&[1], false);
    unneeded.checks.tracked = false;
    tracker.track(&name("a"), &unneeded);
    assert_eq!((tracker.name_count(), checks(&mut commands)), (0, vec![]));
}

#[test]
fn time_of_use_never_goes_back() {
    let (tracker, _commands, _) = tracker(None);
    tracker.track(&name("a"), &needs(&[1], false));
    let tracked = tracker.tracked(&name("a")).unwrap();
    let used = tracker.last_use(&tracked);
    assert!(used > 0 && tracked.touch(used - 1));
    assert_eq!(tracker.last_use(&tracked), used);
    assert!(tracked.touch(used + 7));
    assert_eq!(tracker.last_use(&tracked), used + 7);
}

#[test]
fn precision_follows_the_oldest_use() {
    let (tracker, _commands, _) = tracker(None);
    tracker.track(&name("a"), &needs(&[1], false));
    let used = tracker.last_use(&tracker.tracked(&name("a")).unwrap());
    for (is_full, age, expected) in [
        (false, 0, false),
        (true, 0, true),
        (true, EXACT_WITHIN_NS - 1, true),
        (true, EXACT_WITHIN_NS, false),
        (false, EXACT_WITHIN_NS - 1, false),
    ] {
        tracker.set_precision(&mut tracker.registry.lock(), is_full, used + age);
        assert_eq!(
            tracker.is_exact.load(Ordering::Relaxed),
            expected,
            "{is_full} {age}"
        );
    }
}

#[test]
fn expiry_is_looked_for_in_time() {
    for (ttl, expected) in [
        (None, 60_000),
        (Some(Duration::from_secs(3600)), 60_000),
        (Some(Duration::from_secs(30)), 3_000),
        (Some(Duration::from_millis(10)), 100),
    ] {
        let (tracker, _commands, _) = tracker(ttl);
        assert_eq!(tracker.expire_interval(), Duration::from_millis(expected));
    }
}

#[test]
fn use_at_the_moment_is_kept() {
    let (tracker, _commands, _) = tracker(None);
    tracker.track(&name("a"), &needs(&[1], false));
    let used = tracker.last_use(&tracker.tracked(&name("a")).unwrap());
    let mut registry = tracker.registry.lock();
    let last_use = |tracked: &Tracked| tracker.last_use(tracked);
    assert!(registry.pop_before(used, last_use).is_none());
    assert!(registry.pop_before(used + 1, last_use).is_some());
    assert!(registry.pop_before(u64::MAX, last_use).is_none());
}

#[tokio::test]
async fn unneeded_instance_ends_waits() {
    let (tracker, mut commands, states) = tracker(None);
    let tracker = Arc::new(tracker);
    let waits = tokio::spawn({
        let tracker = tracker.clone();
        async move {
            tracker
                .first_checks(&name("a"), &needs(&[1, 2], true))
                .await
        }
    });
    let mut urgent = Vec::new();
    while urgent.len() < 4 {
        tokio::task::yield_now().await;
        while let Ok(command) = commands.try_recv() {
            if let WatcherCommand::Check { ip, urgent: true } = command {
                urgent.push(ip);
            }
        }
    }
    // Another query for the name waits for the same checks, and starts none.
    let shared = tracker.wait_for_first(&name("a")).unwrap();
    assert_eq!((*shared.borrow(), commands.len()), (2, 0));
    assert!(tracker.wait_for_first(&name("b")).is_none());
    tracker.checked(ip(2), running());
    assert_eq!(*shared.borrow(), 1);
    // The name loses its instance, so no check of it will end.
    tracker.release(&[ip(1)]);
    waits.await.unwrap();
    assert!(!states.is_checked(ip(1)) && *shared.borrow() == 0);
    assert!(!states.is_checked(ip(1)) && states.is_checked(ip(2)));
    // An instance that nobody needs is not released twice.
    tracker.release(&[ip(1)]);
    assert_eq!(dropped(&mut commands).1, [ip(1)]);
}

#[test]
fn instances_are_needed_once() {
    let checks = Checks {
        instances: [3, 1, 3, 2].map(ip).into(),
        tracked: true,
        synchronous: false,
    };
    assert_eq!(*needed(&checks), [1, 2, 3].map(ip));
    let use_at = |at| {
        let (tracker, _commands, _) = tracker(None);
        tracker.track(&name("a"), &needs(&[1], false));
        let tracked = tracker.tracked(&name("a")).unwrap();
        Use { at, tracked }
    };
    assert!(use_at(1) == use_at(1) && use_at(1) != use_at(2) && use_at(1) < use_at(2));
}

#[test]
fn commands_are_counted_before_they_can_be_taken() {
    const COMMANDS: usize = 100_000;
    let (tracker, mut commands, _) = tracker(None);
    let tracker = Arc::new(tracker);
    let taker = {
        let tracker = tracker.clone();
        std::thread::spawn(move || {
            let mut max_queued = 0;
            for _ in 0..COMMANDS {
                // Without sleeping, so that it takes a command as soon as it is there.
                while commands.try_recv().is_err() {
                    std::hint::spin_loop();
                }
                tracker.taken(1);
                max_queued = max_queued.max(tracker.queued.load(Ordering::Relaxed));
            }
            max_queued
        })
    };
    for number in 0..COMMANDS {
        tracker.send(WatcherCommand::Check {
            ip: ip((number % 250) as u8),
            urgent: false,
        });
    }
    let max_queued = taker.join().unwrap();
    assert!(max_queued <= COMMANDS, "{max_queued}");
    assert_eq!(tracker.queued.load(Ordering::Relaxed), 0);
}

/// Returns the commands that wait, in short.
fn commands_in_short(commands: &mut mpsc::UnboundedReceiver<WatcherCommand>) -> Vec<String> {
    let mut all = Vec::new();
    while let Ok(command) = commands.try_recv() {
        all.push(match command {
            WatcherCommand::Check { ip, urgent: true } => format!("check {ip} now"),
            WatcherCommand::Check { ip, urgent: false } => format!("check {ip}"),
            WatcherCommand::Dropped { names, instances } => format!("drop {names:?} {instances:?}"),
            WatcherCommand::Began(tracked) => format!("began {}", tracked.name),
            WatcherCommand::Decide(_) => "decide".to_owned(),
        });
    }
    all
}

#[test]
fn watcher_gets_every_change_in_order() {
    let (tracker, mut commands, states) = tracker(None);
    assert!(std::ptr::eq(tracker.states(), &*states));
    assert!(format!("{tracker:?}").starts_with("Tracker { limits: Limits { names: 2, "));
    tracker.track(&name("a"), &needs(&[2, 1, 2], true));
    assert_eq!(
        commands_in_short(&mut commands),
        ["check 10.0.0.1 now", "check 10.0.0.2 now", "began a."]
    );
    tracker.track(&name("b"), &needs(&[2, 3], false));
    assert_eq!(
        commands_in_short(&mut commands),
        ["check 10.0.0.3", "began b."]
    );
    tracker.install(Arc::new(Snapshot::empty()));
    assert_eq!(commands_in_short(&mut commands), ["decide"]);
    tracker.track(&name("b"), &needs(&[4], false));
    assert!(commands_in_short(&mut commands).is_empty(), "known");
    tracker.track(&name("c"), &needs(&[], false));
    let dropped = format!("drop {:?} [10.0.0.1]", [name("a")]);
    assert_eq!(
        commands_in_short(&mut commands),
        ["began c.".to_owned(), dropped]
    );
    // Nothing changes, so nothing is sent.
    tracker.release(&[]);
    tracker.release(&[ip(9)]);
    assert!(commands_in_short(&mut commands).is_empty());
    assert_eq!(tracker.queued.load(Ordering::Relaxed), 8);
}

#[test]
fn ended_watcher_drops_commands() {
    let (tracker, commands, _) = tracker(None);
    drop(commands);
    tracker.track(&name("a"), &needs(&[1], false));
    assert_eq!(tracker.queued.load(Ordering::Relaxed), 0);
    assert!(tracker.is_tracked(&name("a")));
}

#[test]
fn last_name_keeps_instances_needed() {
    let mut registry = Registry::default();
    assert!(registry.acquire(ip(1)) && !registry.acquire(ip(1)) && !registry.acquire(ip(1)));
    assert_eq!(registry.instances[&ip(1)].by, 3);
    assert!(!registry.release(ip(1)) && !registry.release(ip(1)));
    let first_checks = FirstChecks::new(3);
    registry.wait(ip(1), first_checks.clone());
    registry.wait(ip(1), first_checks.clone());
    assert_eq!(*first_checks.borrow(), 3);
    // No check of an instance that is not tracked will end.
    registry.wait(ip(2), first_checks.clone());
    assert_eq!(*first_checks.borrow(), 2);
    assert!(registry.release(ip(1)));
    assert_eq!(*first_checks.borrow(), 0);
    assert!(!registry.release(ip(1)) && registry.instances.is_empty());
    assert!(registry.take_waiting(ip(1)).is_none());
    registry.acquire(ip(1));
    registry.wait(ip(1), first_checks);
    assert_eq!(
        registry.take_waiting(ip(1)).map(|waiting| waiting.len()),
        Some(1)
    );
    assert_eq!(
        registry.take_waiting(ip(1)).map(|waiting| waiting.len()),
        Some(0)
    );
}

#[test]
fn publication_needs_awaited_checks() {
    for (tracked, synchronous, is_known, checked, expected) in [
        (false, false, false, 0, true),
        (false, true, false, 0, true),
        (true, false, false, 2, false),
        (true, false, true, 0, true),
        (true, true, true, 0, false),
        (true, true, true, 1, false),
        (true, true, true, 2, true),
        (true, true, false, 2, false),
    ] {
        let (tracker, _commands, _) = tracker(None);
        let mut resolution = needs(&[1, 2], synchronous);
        tracker.track(&name("other"), &resolution);
        if is_known {
            tracker.track(&name("a"), &resolution);
        }
        for last in 1..=checked {
            tracker.checked(ip(last), running());
        }
        resolution.checks.tracked = tracked;
        assert_eq!(
            tracker.may_publish(&name("a"), &resolution),
            expected,
            "{tracked} {synchronous} {is_known} {checked}"
        );
    }
}

#[tokio::test]
async fn checked_and_untracked_names_never_wait() {
    let (tracker, mut commands, _) = tracker(None);
    let mut untracked = needs(&[1], true);
    untracked.checks.tracked = false;
    tracker.first_checks(&name("a"), &untracked).await;
    assert!(!tracker.is_tracked(&name("a")) && commands.try_recv().is_err());
    tracker.track(&name("a"), &needs(&[1, 2], true));
    tracker.checked(ip(1), running());
    tracker.checked(ip(2), running());
    while commands.try_recv().is_ok() {}
    tracker
        .first_checks(&name("a"), &needs(&[1, 2], true))
        .await;
    assert!(tracker.wait_for_first(&name("a")).is_none());
    assert!(commands.try_recv().is_err(), "nothing is checked again");
}

#[test]
fn dropped_names_need_no_instances() {
    let (tracker, mut commands, _) = tracker(None);
    tracker.track(&name("a"), &needs(&[1], false));
    let dropped = tracker.tracked(&name("a")).unwrap();
    tracker.track(&name("b"), &needs(&[2], false));
    let current = tracker.tracked(&name("b")).unwrap();
    tracker.track(&name("c"), &needs(&[2], false));
    commands_in_short(&mut commands);
    let checks = |instances: &[u8]| Some(needs(instances, false).checks);
    assert!(tracker.set_checks(&dropped, checks(&[3])).is_empty());
    // Tracked again, it is another one.
    tracker.track(&name("a"), &needs(&[1], false));
    commands_in_short(&mut commands);
    assert!(tracker.set_checks(&dropped, checks(&[3])).is_empty());
    let other = tracker.tracked(&name("c")).unwrap();
    assert!(
        tracker.set_checks(&other, checks(&[2, 2])).is_empty(),
        "the same"
    );
    assert!(
        tracker.set_checks(&current, checks(&[4])).is_empty(),
        "dropped"
    );
    assert!(commands_in_short(&mut commands).is_empty());
    assert_eq!(tracker.instance_count(), 2);
    assert_eq!(*tracker.set_checks(&other, checks(&[2, 4])), [ip(2)]);
    assert_eq!(commands_in_short(&mut commands), ["check 10.0.0.4"]);
}

#[test]
fn ended_first_checks_never_delay() {
    let (tracker, mut commands, _) = tracker(None);
    tracker.track(&name("a"), &needs(&[1], true));
    let first = tracker.wait_for_first(&name("a")).unwrap();
    assert_eq!(*first.borrow(), 1);
    tracker.checked(ip(1), running());
    assert_eq!(*first.borrow(), 0);
    assert!(tracker.wait_for_first(&name("a")).is_none());
    // A new instance begins new ones.
    let tracked = tracker.tracked(&name("a")).unwrap();
    let checks = Some(needs(&[1, 2], true).checks);
    tracker.set_checks(&tracked, checks);
    commands_in_short(&mut commands);
    let second = tracker.wait_for_first(&name("a")).unwrap();
    assert_eq!((*first.borrow(), *second.borrow()), (0, 1));
    assert_eq!(commands_in_short(&mut commands), ["check 10.0.0.2 now"]);
}
