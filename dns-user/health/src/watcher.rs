//! The watcher: runs the checks on a separate thread.
//!
//! A handshake costs a millisecond of CPU time; on a separate thread with a lower priority it
//! delays no query.

use std::{
    cell::RefCell,
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{
    sync::{Notify, mpsc, oneshot},
    task::AbortHandle,
};

use super::{
    check::{self, CheckError, Connection},
    metrics::{CheckFailures, CheckResult, HealthMetrics},
    schedule::{Ending, Lane, Lanes, Schedule, Ticket},
    states::{HealthStates, InstanceHealth},
    tracker::{Tracker, WatcherCommand},
};
use dns_core::catalog::Snapshot;
use dns_fastpath::FastPathHandle;
use dns_kit::{
    clock::{every, milliseconds},
    logs::LineLimit,
    tls::RotatingTls,
};

/// Time for which a check may stay in the fast lane. An instance in the same data centre answers
/// within a few milliseconds, including the handshake.
const FAST_TIMEOUT: Duration = Duration::from_millis(200);

/// Maximum pause of the loop, which bounds the age of the heartbeat.
pub(super) const BEAT: Duration = Duration::from_millis(500);

/// Maximum number of commands processed before checks are started again.
const COMMANDS_AT_ONCE: usize = 256;

/// State and settings that the service shares with its watcher.
pub(super) struct Checks {
    pub(super) states: Arc<HealthStates>,
    /// Determines which instances are checked.
    pub(super) tracker: Arc<Tracker>,
    /// The fast path, notified of every change of a state.
    pub(super) fast_path: FastPathHandle,
    pub(super) tls: Arc<RotatingTls>,
    pub(super) metrics: HealthMetrics,
    pub(super) heartbeat: Heartbeat,
    /// Results of the last checks.
    pub(super) failures: CheckFailures,
    /// Port of the health servers.
    pub(super) port: u16,
    /// Time between two checks of one instance.
    pub(super) interval: Duration,
    /// Time limit of one check (`request_timeout`).
    pub(super) timeout: Duration,
}

pub(super) struct Watcher {
    pub(super) checks: Arc<Checks>,
    /// Limits of running checks.
    pub(super) lanes: Lanes,
    /// Maximum number of connections kept between checks.
    pub(super) kept: usize,
}

/// The running watcher, shared by the tasks of its thread.
struct Work {
    watcher: Watcher,
    /// Determines when instances are checked.
    schedule: RefCell<Schedule>,
    /// Connections kept for the next check.
    connections: RefCell<HashMap<IpAddr, Connection>>,
    tasks: RefCell<HashMap<Ticket, AbortHandle>>,
    /// Wakes the loop when a slot is free or the next wake-up time has changed.
    room: Notify,
}

impl Watcher {
    /// Runs until `stop` is signalled or its sender is dropped. Must be polled inside a `LocalSet`.
    pub(super) async fn run(
        self,
        mut commands: mpsc::UnboundedReceiver<WatcherCommand>,
        mut stop: oneshot::Receiver<()>,
    ) {
        let Checks {
            interval, tracker, ..
        } = &*self.checks;
        let schedule = Schedule::new(*interval, self.lanes, Instant::now(), fastrand::u32(..));
        let expire_every = tracker.expire_interval();
        let work = Rc::new(Work {
            watcher: self,
            schedule: RefCell::new(schedule),
            connections: RefCell::default(),
            tasks: RefCell::default(),
            room: Notify::new(),
        });
        let mut records: Option<Arc<Snapshot>> = None;
        let mut batch = Vec::with_capacity(COMMANDS_AT_ONCE);
        let mut expiry = every(expire_every);
        let mut beats = every(BEAT);
        loop {
            work.watcher.checks.heartbeat.beat();
            work.start_checks();
            let wake = work.schedule.borrow().next_wake();
            let wake = async {
                match wake {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = &mut stop => return,
                count = commands.recv_many(&mut batch, COMMANDS_AT_ONCE) => {
                    // The tracker is gone.
                    if count == 0 {
                        return;
                    }
                    work.watcher.checks.tracker.taken(count);
                    for command in batch.drain(..) {
                        work.handle_command(command, &mut records);
                    }
                }
                () = wake => {}
                () = work.room.notified() => {}
                _ = beats.tick() => {}
                _ = expiry.tick() => work.watcher.checks.tracker.expire(),
            }
            work.count();
        }
    }
}

impl Work {
    /// Starts every check that is due and has a slot.
    fn start_checks(self: &Rc<Self>) {
        let now = Instant::now();
        loop {
            let Some((ticket, ip, lane)) = self.schedule.borrow_mut().start(now) else {
                return;
            };
            let running = Running {
                work: self.clone(),
                ticket,
                ending: Ending::Silent,
            };
            let task = tokio::task::spawn_local(running.check(ip, lane));
            self.tasks.borrow_mut().insert(ticket, task.abort_handle());
        }
    }

    fn handle_command(&self, command: WatcherCommand, records: &mut Option<Arc<Snapshot>>) {
        let Checks {
            tracker, fast_path, ..
        } = &*self.watcher.checks;
        match command {
            WatcherCommand::Check { ip, urgent } => self.schedule.borrow_mut().add(ip, urgent),
            WatcherCommand::Dropped { names, instances } => {
                // First, because interfaces must not answer from states that are no longer checked.
                fast_path.withdraw(&names);
                // An instance that is needed again in the meantime starts over: its command comes
                // after this one.
                instances.iter().for_each(|ip| self.drop_instance(*ip));
                fast_path.health_changed(&instances);
            }
            WatcherCommand::Began(tracked) => {
                // Without records yet, the first `Decide` includes this name.
                if let Some(records) = records {
                    tracker.release(&tracker.decide(&tracked, records));
                }
            }
            WatcherCommand::Decide(new) => {
                // Newly needed instances first, then those no longer needed, so that an instance
                // that moves between names is not lost.
                let before: Vec<_> = tracker
                    .all()
                    .iter()
                    .flat_map(|tracked| tracker.decide(tracked, &new))
                    .collect();
                tracker.release(&before);
                *records = Some(new);
            }
        }
    }

    fn drop_instance(&self, ip: IpAddr) {
        self.connections.borrow_mut().remove(&ip);
        // An outage is judged only by instances that are checked.
        self.watcher.checks.failures.forget(ip);
        let running = self.schedule.borrow_mut().remove(ip);
        let task = running.and_then(|ticket| self.tasks.borrow_mut().remove(&ticket));
        // Its `Running` is dropped with it, which frees the slot.
        if let Some(task) = task {
            task.abort();
        }
    }

    /// Updates the gauges of running checks and tracked names.
    fn count(&self) {
        let Checks {
            tracker, metrics, ..
        } = &*self.watcher.checks;
        metrics
            .in_flight
            .set(self.schedule.borrow().in_flight() as i64);
        metrics.tracked_names.set(tracker.name_count() as i64);
    }
}

/// A running check. Its slot in the lane is released however it ends.
struct Running {
    /// The watcher that runs the check.
    work: Rc<Work>,
    /// Identifies the check in the schedule.
    ticket: Ticket,
    ending: Ending,
}

impl Running {
    /// Runs the check and publishes its result.
    async fn check(mut self, ip: IpAddr, lane: Lane) {
        let work = self.work.clone();
        let Checks {
            port,
            timeout,
            tls,
            tracker,
            fast_path,
            metrics,
            failures,
            ..
        } = &*work.watcher.checks;
        let started = Instant::now();
        let kept = work.connections.borrow_mut().remove(&ip);
        let tls = tls.current();
        let check = check::check(SocketAddr::new(ip, *port), &tls, kept);
        let Some(done) = self.in_time(check, lane, *timeout).await else {
            // Cut off: the result is unknown, and nothing changes.
            return;
        };
        let (result, health) = match done {
            Some((Ok(health), connection)) => {
                self.ending = Ending::Answered;
                self.keep(ip, connection);
                (CheckResult::of(health.state), health)
            }
            Some((Err(error), connection)) => {
                // An instance that refuses at once holds no slot for long, so its checks may stay
                // in the fast lane.
                let quick = started.elapsed() < FAST_TIMEOUT;
                self.ending = if quick {
                    Ending::Answered
                } else {
                    Ending::Silent
                };
                self.keep(ip, connection);
                log_failure(ip, &error);
                let result = CheckResult::from(&error);
                failures.record_error(result, &error);
                (result, InstanceHealth::unknown())
            }
            None => {
                tracing::debug!(%ip, "health check timed out");
                (CheckResult::Timeout, InstanceHealth::unknown())
            }
        };
        metrics.observe(result, started.elapsed());
        failures.record(ip, result);
        if tracker.checked(ip, health) {
            fast_path.health_changed(&[ip]);
        }
    }

    /// Returns the check's outcome; `Some(None)` if its time limit was exceeded; `None` if it had
    /// to leave the fast lane while the slow one was full.
    async fn in_time<T>(
        &mut self,
        check: impl Future<Output = T>,
        lane: Lane,
        limit: Duration,
    ) -> Option<Option<T>> {
        let mut check = std::pin::pin!(check);
        let fast = FAST_TIMEOUT.min(limit);
        let mut left = limit;
        if lane == Lane::Fast {
            if let Ok(done) = tokio::time::timeout(fast, &mut check).await {
                return Some(Some(done));
            }
            if !self.work.schedule.borrow_mut().slow_down(self.ticket) {
                self.ending = Ending::CutOff;
                return None;
            }
            // The slot in the fast lane is free.
            self.work.room.notify_one();
            left -= fast;
        }
        Some(tokio::time::timeout(left, check).await.ok())
    }

    /// Keeps the connection for the next check, unless there will be none or the limit is reached.
    /// Connections already kept are never closed for it: closing the oldest would leave none for
    /// its next check if instances take turns.
    fn keep(&self, ip: IpAddr, connection: Option<Connection>) {
        let mut kept = self.work.connections.borrow_mut();
        if let Some(connection) = connection
            && self.work.schedule.borrow().holds(ip)
            && kept.len() < self.work.watcher.kept
        {
            kept.insert(ip, connection);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.work.tasks.borrow_mut().remove(&self.ticket);
        self.work
            .schedule
            .borrow_mut()
            .end(self.ticket, self.ending, Instant::now());
        self.work.room.notify_one();
    }
}

/// Logs a failed check: certificate errors need attention and are logged at info, others at debug.
fn log_failure(ip: IpAddr, error: &CheckError) {
    match error {
        CheckError::Tls(_) | CheckError::Refused(_) => {
            static LIMIT: LineLimit = LineLimit::new();
            if let Some(suppressed) = LIMIT.admit(ip) {
                tracing::info!(%ip, suppressed, "health check failed: {error}");
            }
        }
        _ => tracing::debug!(%ip, "health check failed: {error}"),
    }
}

//----------- Heartbeat ------------------------------------------------------

/// Time of the last round of the watcher's loop.
#[derive(Debug)]
pub(super) struct Heartbeat {
    epoch: Instant,
    /// Milliseconds from the epoch to the last heartbeat.
    last_ms: AtomicU64,
}

impl Heartbeat {
    /// Starts with a heartbeat.
    pub(super) fn new() -> Self {
        Self {
            epoch: Instant::now(),
            last_ms: AtomicU64::new(0),
        }
    }

    pub(super) fn beat(&self) {
        self.last_ms.store(self.elapsed_ms(), Ordering::Relaxed);
    }

    pub(super) fn silent_for(&self) -> Duration {
        Duration::from_millis(
            self.elapsed_ms()
                .saturating_sub(self.last_ms.load(Ordering::Relaxed)),
        )
    }

    fn elapsed_ms(&self) -> u64 {
        milliseconds(self.epoch.elapsed())
    }

    /// Creates a heartbeat that has been silent for this long.
    #[cfg(test)]
    pub(super) fn silent(length: Duration) -> Self {
        Self {
            epoch: Instant::now().checked_sub(length).unwrap(),
            last_ms: AtomicU64::new(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        HEALTH_NAME, Limits,
        tests::{Authority, Machine, name, needs, until},
    };
    use dns_core::{config::TlsFiles, resolve::HealthState};

    #[test]
    fn heartbeat_ends_silence() {
        let minute = Duration::from_secs(60);
        let heartbeat = Heartbeat {
            epoch: Instant::now() - minute,
            last_ms: AtomicU64::new(0),
        };
        assert!(heartbeat.silent_for() >= minute);
        heartbeat.beat();
        assert!(heartbeat.last_ms.load(Ordering::Relaxed) >= 60_000);
        // A clock that another CPU has read a little later than this one.
        heartbeat.last_ms.fetch_add(3_600_000, Ordering::Relaxed);
        assert_eq!(heartbeat.silent_for(), Duration::ZERO);
    }

    /// Returns a watcher's state with these limits of lanes and kept connections, and its tracker's commands.
    fn work(
        files: &TlsFiles,
        port: u16,
        lanes: [usize; 2],
        kept: usize,
    ) -> (Rc<Work>, mpsc::UnboundedReceiver<WatcherCommand>) {
        let states = Arc::<HealthStates>::default();
        let limits = Limits {
            names: 10,
            first_checks: Duration::from_secs(600),
            ttl: None,
        };
        let fast_path = FastPathHandle::default();
        let (tracker, commands) = Tracker::new(limits, Arc::clone(&states), fast_path.clone());
        let checks = Checks {
            states,
            tracker: Arc::new(tracker),
            fast_path,
            tls: RotatingTls::load("health_client", HEALTH_NAME, files).unwrap(),
            metrics: HealthMetrics::new().unwrap(),
            heartbeat: Heartbeat::new(),
            failures: CheckFailures::default(),
            port,
            interval: Duration::from_secs(600),
            timeout: Duration::from_secs(600),
        };
        let [fast, slow] = lanes;
        let lanes = Lanes {
            fast,
            slow,
            pace: Duration::ZERO,
        };
        let schedule = Schedule::new(checks.interval, lanes, Instant::now(), 0);
        let work = Work {
            watcher: Watcher {
                checks: Arc::new(checks),
                lanes,
                kept,
            },
            schedule: RefCell::new(schedule),
            connections: RefCell::default(),
            tasks: RefCell::default(),
            room: Notify::new(),
        };
        (Rc::new(work), commands)
    }

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([127, 0, 0, last])
    }

    /// Returns a folder with a client's certificate.
    fn client() -> (tempfile::TempDir, TlsFiles) {
        let folder = tempfile::tempdir().unwrap();
        let files = Authority::new().issue(&folder.path().join("client"), HEALTH_NAME);
        (folder, files)
    }

    /// Starts a check of the instance, which does nothing.
    fn running(work: &Rc<Work>, ip: IpAddr) -> Running {
        work.schedule.borrow_mut().add(ip, false);
        let now = Instant::now();
        let (ticket, ..) = work.schedule.borrow_mut().start(now).unwrap();
        Running {
            work: Rc::clone(work),
            ticket,
            ending: Ending::Silent,
        }
    }

    #[tokio::test]
    async fn checks_have_their_time() {
        let (_folder, files) = client();
        let short = Duration::from_millis(5);
        let long = Duration::from_secs(600);
        let never = std::future::pending::<u8>;
        let (room, _commands) = work(&files, 9, [1, 4], 0);
        let mut check = running(&room, ip(1));
        for lane in [Lane::Fast, Lane::Slow] {
            let done = check.in_time(async { 7 }, lane, long).await;
            assert_eq!(done, Some(Some(7)), "{lane:?}");
            let late = check.in_time(never(), lane, short).await;
            assert_eq!(late, Some(None), "{lane:?}");
            assert_eq!(check.ending, Ending::Silent);
        }
        drop(check);
        assert_eq!(room.schedule.borrow().in_flight(), 0);
        // Moved to the slow lane, it goes on, and makes room in the fast one.
        let mut check = running(&room, ip(2));
        let slow = async {
            tokio::time::sleep(FAST_TIMEOUT * 2).await;
            7
        };
        assert_eq!(check.in_time(slow, Lane::Fast, long).await, Some(Some(7)));
        let _another = running(&room, ip(3));
        room.room.notified().await;
        // Without a slow lane, it is cut off.
        let (full, _commands) = work(&files, 9, [1, 0], 0);
        let mut check = running(&full, ip(1));
        assert_eq!(check.in_time(never(), Lane::Fast, short).await, None);
        assert_eq!(check.ending, Ending::CutOff);
    }

    #[tokio::test]
    async fn commands_change_the_schedule() {
        let (_folder, files) = client();
        let (work, mut commands) = work(&files, 9, [4, 4], 0);
        let checks = &work.watcher.checks;
        let mut records = None;
        let mut carry_out = |records: &mut Option<Arc<Snapshot>>| {
            let mut count = 0;
            while let Ok(command) = commands.try_recv() {
                checks.tracker.taken(1);
                work.handle_command(command, records);
                count += 1;
            }
            count
        };
        checks.tracker.track(&name("a"), &needs(&[ip(1), ip(2)]));
        // Two instances and a name, about which nothing is decided without records.
        assert_eq!(carry_out(&mut records), 3);
        let holds = |last| work.schedule.borrow().holds(ip(last));
        assert!(holds(1) && holds(2) && !holds(3));
        assert_eq!(checks.tracker.instance_count(), 2);
        checks.failures.record(ip(1), CheckResult::Timeout);
        let outage = || {
            let tls = checks.tls.current();
            checks.failures.outage(&tls, std::time::SystemTime::now())
        };
        assert!(outage().is_some());
        // New records do not know the name.
        checks.tracker.install(Arc::new(Snapshot::empty()));
        assert_eq!(carry_out(&mut records), 2);
        assert!(records.is_some() && !holds(1) && !holds(2));
        assert!(outage().is_none(), "forgotten with the instance");
        assert_eq!(checks.tracker.instance_count(), 0);
        // Nor do they know another name.
        checks.tracker.track(&name("b"), &needs(&[ip(3)]));
        carry_out(&mut records);
        assert!(!holds(3) && checks.tracker.instance_count() == 0);
        work.count();
        assert_eq!(checks.metrics.tracked_names.get(), 2);
        assert_eq!(checks.metrics.in_flight.get(), 0);
        let _check = running(&work, ip(4));
        work.count();
        assert_eq!(checks.metrics.in_flight.get(), 1);
    }

    #[tokio::test]
    async fn refused_connections_keep_the_state() {
        let (_folder, files) = client();
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = closed.local_addr().unwrap().port();
        drop(closed);
        let (work, _commands) = work(&files, port, [4, 4], 4);
        let checks = &work.watcher.checks;
        let local = tokio::task::LocalSet::new();
        local
            .run_until(async {
                checks.tracker.track(&name("a"), &needs(&[ip(1)]));
                work.schedule.borrow_mut().add(ip(1), false);
                work.schedule.borrow_mut().add(ip(2), false);
                work.start_checks();
                assert_eq!(work.tasks.borrow().len(), 2);
                assert_eq!(work.schedule.borrow().in_flight(), 2);
                // One is not needed any more.
                work.drop_instance(ip(2));
                assert_eq!(work.tasks.borrow().len(), 1);
                until(|| work.schedule.borrow().in_flight() == 0).await;
            })
            .await;
        assert!(checks.states.is_checked(ip(1)) && !checks.states.is_checked(ip(2)));
        assert_eq!(checks.metrics.checks(), 1);
        assert!(work.tasks.borrow().is_empty() && work.connections.borrow().is_empty());
        assert!(work.schedule.borrow().holds(ip(1)) && !work.schedule.borrow().holds(ip(2)));
        // The next check of one that refuses at once is in the fast lane; `notified` returns at once.
        work.room.notified().await;
    }

    #[tokio::test]
    async fn scheduled_instances_keep_connections() {
        let authority = Authority::new();
        let machine = Machine::start(&authority).await;
        let files = authority.issue(&machine.folder.path().join("client"), HEALTH_NAME);
        let port = machine.address.port();
        let (work, _commands) = work(&files, port, [4, 4], 2);
        let local = tokio::task::LocalSet::new();
        local
            .run_until(async {
                let tls = work.watcher.checks.tls.current();
                let check = running(&work, ip(1));
                for last in [2, 3] {
                    work.schedule.borrow_mut().add(ip(last), false);
                }
                let kept = || {
                    let mut kept: Vec<IpAddr> = work.connections.borrow().keys().copied().collect();
                    kept.sort();
                    kept
                };
                check.keep(ip(1), None);
                assert_eq!(kept(), Vec::<IpAddr>::new());
                for (last, expected) in [
                    // Not in the schedule.
                    (9, &[][..]),
                    (1, &[1]),
                    (2, &[1, 2]),
                    (3, &[1, 2]),
                ] {
                    let (result, connection) = check::check(machine.address, &tls, None).await;
                    assert_eq!(result.unwrap().state, HealthState::Running);
                    check.keep(ip(last), connection);
                    let expected: Vec<IpAddr> = expected.iter().map(|last| ip(*last)).collect();
                    assert_eq!(kept(), expected, "{last}");
                }
                // The connection goes with its instance.
                work.drop_instance(ip(2));
                assert_eq!(kept(), [ip(1)]);
            })
            .await;
    }
}
