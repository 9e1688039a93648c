//! Health checks as one component that the daemon starts and stops.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, anyhow};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use super::{
    HEALTH_NAME, HealthMetrics, HealthStates, Tracker,
    check::check,
    schedule::Lanes,
    states::InstanceHealth,
    tracker::{Limits, WatcherCommand},
    watcher::{BEAT, Checks, Heartbeat, Watcher},
};
use crate::metrics::{CheckFailures, HealthOutage};
use dns_core::config::HealthConfig;
use dns_fastpath::FastPathHandle;
use dns_kit::{
    limits::raise_file_limit,
    priority,
    threads::{self, OnPanic},
    tls::RotatingTls,
};

/// Maximum number of checks in the fast lane. A few suffice for 50 instances per second; this many serve the
/// first checks of a big group, and their handshakes take less CPU time than the patience with one check.
const FAST_LANE: usize = 128;

/// Maximum number of checks in the slow lane, if the limit on open files allows.
const SLOW_LANE: usize = 1024;

/// Maximum number of connections kept between checks, if the limit on open files allows. Each takes
/// about 20 KiB.
const KEPT: usize = 2048;

/// Minimum interval between two checks, regardless of the configuration.
const MIN_INTERVAL: Duration = Duration::from_millis(10);

/// Health checks: states, tracker and the watcher's thread, started and stopped together.
pub struct HealthService {
    checks: Arc<Checks>,
    /// The watcher, before and while running.
    watch: Mutex<Watch>,
}

enum Watch {
    /// Not started; the tracker's commands wait here.
    Waiting(mpsc::UnboundedReceiver<WatcherCommand>),
    Running {
        /// Stops the thread, also when dropped.
        stop: oneshot::Sender<()>,
        thread: JoinHandle<()>,
    },
    Stopped,
}

impl HealthService {
    /// Loads the certificates; checks begin with [`Self::start`]. `request_timeout` is the time
    /// limit of a check (observed).
    pub fn new(
        config: &HealthConfig,
        request_timeout: Duration,
        fast_path: FastPathHandle,
    ) -> anyhow::Result<Self> {
        let files = config.tls.as_ref().context(
            "health: enabled, but certificate_file, private_key_file or ca_file is missing; name all three or \
             disable it",
        )?;
        let tls = RotatingTls::load("health_client", HEALTH_NAME, files)
            .map_err(|error| anyhow!("health: {error}"))?;
        let states = Arc::new(HealthStates::default());
        let limits = Limits {
            names: config.max_tracked_queries,
            first_checks: config.synchronous_check_timeout,
            ttl: config.tracked_query_ttl,
        };
        let (tracker, commands) = Tracker::new(limits, states.clone(), fast_path.clone());
        let metrics = HealthMetrics::new()?;
        let checks = Checks {
            states,
            tracker: Arc::new(tracker),
            fast_path,
            tls,
            metrics,
            heartbeat: Heartbeat::new(),
            failures: CheckFailures::default(),
            port: config.port,
            interval: config.check_interval.max(MIN_INTERVAL),
            timeout: request_timeout.max(MIN_INTERVAL),
        };
        Ok(Self {
            checks: Arc::new(checks),
            watch: Mutex::new(Watch::Waiting(commands)),
        })
    }

    /// Returns the states of the instances.
    pub fn states(&self) -> Arc<HealthStates> {
        self.checks.states.clone()
    }

    /// Returns the tracker of names and instances.
    pub fn tracker(&self) -> Arc<Tracker> {
        self.checks.tracker.clone()
    }

    /// Returns the metrics, for the daemon to register.
    pub fn metrics(&self) -> &HealthMetrics {
        &self.checks.metrics
    }

    /// Returns the client certificates.
    pub fn tls(&self) -> &Arc<RotatingTls> {
        &self.checks.tls
    }

    /// Starts the watcher's thread; does nothing if it was already started.
    pub fn start(&self) -> anyhow::Result<()> {
        let mut watch = self.watch.lock();
        // If a step below fails, the commands are lost, and the service can only be stopped.
        let commands = match std::mem::replace(&mut *watch, Watch::Stopped) {
            Watch::Waiting(commands) => commands,
            other => {
                *watch = other;
                return Ok(());
            }
        };
        let Budget { lanes, kept } = Budget::of(raise_file_limit(), self.checks.timeout);
        let watcher = Watcher {
            checks: self.checks.clone(),
            lanes,
            kept,
        };
        // The time before the start is no silence.
        self.checks.heartbeat.beat();
        let (stop, stopped) = oneshot::channel();
        let checks = self.checks.clone();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            // It only reads the files of certificates; a panic there loses one attempt.
            .max_blocking_threads(1)
            .on_thread_start(|| threads::adopt(OnPanic::Continue))
            .build()
            .map_err(no_thread)?;
        let thread = threads::spawn("health", OnPanic::EndProcess, move || {
            priority::lower("the health checks");
            let local = tokio::task::LocalSet::new();
            local.spawn_local(checks.tls.clone().watch(move |tls| {
                let Checks {
                    states,
                    metrics,
                    failures,
                    ..
                } = &*checks;
                metrics.count_instances(states);
                let mut is_blind = false;
                // Instances that are silent may be down. The alert is about certificates, which
                // make every check fail.
                if let Some(outage) = failures.outage(&tls.current(), SystemTime::now()) {
                    is_blind = outage.is_of_certificates();
                }
                metrics.blind.set(i64::from(is_blind));
            }));
            local.block_on(&runtime, watcher.run(commands, stopped));
        })
        .map_err(no_thread)?;
        *watch = Watch::Running { stop, thread };
        Ok(())
    }

    /// Returns the delay of the watcher's loop: the states may be outdated by this much. Zero while
    /// the watcher does not run.
    pub fn silent_for(&self) -> Duration {
        match *self.watch.lock() {
            // The loop may rest that long without being late.
            Watch::Running { .. } => self.checks.heartbeat.silent_for().saturating_sub(BEAT),
            Watch::Waiting(_) | Watch::Stopped => Duration::ZERO,
        }
    }

    /// Returns why checks tell the state of no instance; `None` while one does, or none is checked.
    pub fn outage(&self) -> Option<HealthOutage> {
        self.checks
            .failures
            .outage(&self.checks.tls.current(), SystemTime::now())
    }

    /// Checks one instance now, independently of the watcher, without storing the result. Returns
    /// `unknown` without a usable answer.
    pub async fn ask_once(&self, ip: IpAddr) -> InstanceHealth {
        let address = SocketAddr::new(ip, self.checks.port);
        let tls = self.checks.tls.current();
        let limit = self.checks.timeout;
        // A check needs a `LocalSet`, and so a single-threaded runtime.
        let asked = tokio::task::spawn_blocking(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .ok()?;
            let asking = async { tokio::time::timeout(limit, check(address, &tls, None)).await };
            tokio::task::LocalSet::new()
                .block_on(&runtime, asking)
                .ok()?
                .0
                .ok()
        });
        asked
            .await
            .ok()
            .flatten()
            .unwrap_or_else(InstanceHealth::unknown)
    }

    /// Stops the watcher's thread and waits for it to end. The states are kept.
    pub fn stop(&self) {
        let watch = {
            let mut watch = self.watch.lock();
            std::mem::replace(&mut *watch, Watch::Stopped)
        };
        if let Watch::Running { stop, thread } = watch {
            // Fails only if the thread has already ended.
            let _ = stop.send(());
            if thread.join().is_err() {
                tracing::error!("the health check thread panicked");
            }
        }
    }
}

fn no_thread(error: io::Error) -> anyhow::Error {
    anyhow!("health: cannot start a thread: {error}")
}

impl Drop for HealthService {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Limits of the health checks: a quarter of the permitted open files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Budget {
    lanes: Lanes,
    /// Number of connections kept between checks; checks of other instances open one each time.
    kept: usize,
}

impl Budget {
    fn of(files: u64, timeout: Duration) -> Self {
        let share = usize::try_from(files / 4).unwrap_or(usize::MAX);
        // Checks go on even if hardly any descriptors are permitted.
        let fast = (share / 4).clamp(4, FAST_LANE);
        let slow = (share / 4).clamp(4, SLOW_LANE);
        // If all instances are silent, checks start twice as fast as they end, so the lane is full.
        let lanes = Lanes {
            fast,
            slow,
            pace: timeout / 2 / slow as u32,
        };
        Self {
            lanes,
            kept: (share / 2).min(KEPT),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{Authority, Machine, health_config, name, needs, until};
    use dns_core::{
        config::TlsFiles,
        resolve::{Health as _, HealthState},
    };

    #[test]
    fn checks_respect_file_limit() {
        for files in [64, 256, 1024, 2048, 65_536, 1 << 20] {
            let Budget {
                lanes: Lanes { fast, slow, .. },
                kept,
            } = Budget::of(files, Duration::from_secs(1));
            let most = (fast + slow + kept) as u64;
            assert!(
                most <= files / 4 && fast > 0 && slow > 0,
                "{files} files: {fast} + {slow} + {kept}"
            );
        }
    }

    #[test]
    fn lanes_grow_to_their_limits() {
        let second = Duration::from_secs(1);
        for (files, fast, slow, kept) in [
            (0, 4, 4, 0),
            (64, 4, 4, 8),
            (1024, 64, 64, 128),
            (4096, FAST_LANE, 256, 512),
            (1 << 20, FAST_LANE, SLOW_LANE, KEPT),
            (u64::MAX, FAST_LANE, SLOW_LANE, KEPT),
        ] {
            // All checks of a full lane start within half of their time limit.
            let pace = second / (2 * slow as u32);
            let lanes = Lanes { fast, slow, pace };
            assert_eq!(Budget::of(files, second), Budget { lanes, kept }, "{files}");
        }
    }

    /// Returns a service with this client certificate, whose checks have 10 minutes.
    fn service(tls: TlsFiles, port: u16) -> HealthService {
        let config = health_config(tls, port);
        let limit = Duration::from_secs(600);
        HealthService::new(&config, limit, FastPathHandle::default()).unwrap()
    }

    #[tokio::test]
    async fn needed_instances_are_checked() {
        let authority = Authority::new();
        let machine = Machine::start(&authority).await;
        let tls = authority.issue(&machine.folder.path().join("client"), HEALTH_NAME);
        let service = service(tls, machine.address.port());
        assert!(
            service
                .tls()
                .current()
                .certificate
                .is_issued_to(HEALTH_NAME)
        );
        let tracker = service.tracker();
        let states = service.states();
        let here = machine.ip();
        let nowhere = IpAddr::from([127, 0, 0, 2]);
        tracker.track(&name("a"), &needs(&[here]));
        assert_eq!(service.metrics().checks(), 0);
        service.start().unwrap();
        service.start().unwrap();
        until(|| states.state(here, None) == HealthState::Running).await;
        assert_eq!(service.outage(), None);
        until(|| service.metrics().tracked_names.get() == 1).await;
        machine.say("failing now");
        until(|| states.state(here, None) == HealthState::Failing).await;
        assert!(service.metrics().checks() >= 2);
        assert_eq!(service.ask_once(here).await.state, HealthState::Failing);
        let unknown = InstanceHealth::unknown();
        assert_eq!(service.ask_once(nowhere).await, unknown);
        // A query waits for the first checks.
        let both = needs(&[here, nowhere]);
        tracker.first_checks(&name("b"), &both).await;
        assert!(states.is_checked(nowhere));
        assert_eq!(states.state(nowhere, None), HealthState::Unknown);
        // The oldest names go, and with them an instance.
        for number in 0..10 {
            tracker.track(&name(&format!("n{number}")), &needs(&[nowhere]));
        }
        until(|| service.outage().is_some()).await;
        assert!(!states.is_checked(here) && tracker.instance_count() == 1);
        assert_eq!(
            service.outage().unwrap().to_string(),
            "no checked instance answers its health check (1 are checked)"
        );
        service.stop();
        assert_eq!(
            Arc::strong_count(&service.checks),
            1,
            "its thread has ended"
        );
        assert_eq!(states.state(nowhere, None), HealthState::Unknown, "kept");
        service.start().unwrap();
        assert!(matches!(*service.watch.lock(), Watch::Stopped));
    }

    #[tokio::test]
    async fn unaccepted_certificates_are_an_outage() {
        let authority = Authority::new();
        let machine = Machine::start(&authority).await;
        let folder = machine.folder.path();
        let stranger = Authority::new();
        let refused = stranger.issue(&folder.join("refused"), HEALTH_NAME);
        std::fs::write(&refused.ca, &authority.pem).unwrap();
        let untrusting = authority.issue(&folder.join("untrusting"), HEALTH_NAME);
        std::fs::write(&untrusting.ca, &stranger.pem).unwrap();
        let misnamed = authority.issue(&folder.join("misnamed"), "other.bosh-dns");
        for (tls, is_of_certificates, expected) in [
            (
                refused,
                true,
                "no checked instance accepts this machine's certificate (1 of 1 refuse it: ",
            ),
            (
                untrusting,
                true,
                "no checked instance can be reached (1 of 1 because of TLS: TLS: ",
            ),
            (
                misnamed,
                false,
                "no checked instance gives a usable answer (1 of 1 answer: status 400 Bad Request)",
            ),
        ] {
            let service = service(tls, machine.address.port());
            service.start().unwrap();
            let tracker = service.tracker();
            let resolution = needs(&[machine.ip()]);
            tracker.first_checks(&name("a"), &resolution).await;
            let outage = service.outage().unwrap();
            assert!(outage.to_string().starts_with(expected), "{outage}");
            assert_eq!(outage.is_of_certificates(), is_of_certificates);
            let state = service.states().state(machine.ip(), None);
            assert_eq!(state, HealthState::Unknown);
            let checks = Arc::downgrade(&service.checks);
            drop((service, tracker));
            assert!(checks.upgrade().is_none(), "its thread has ended");
        }
    }

    #[test]
    fn missing_certificates_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let tls = Authority::new().issue(&folder.path().join("client"), HEALTH_NAME);
        let mut config = health_config(tls, 8853);
        let error = |config: &HealthConfig| {
            let made = HealthService::new(config, Duration::ZERO, FastPathHandle::default());
            made.err().unwrap().to_string()
        };
        std::fs::remove_file(folder.path().join("client/key.pem")).unwrap();
        let unreadable = error(&config);
        assert!(unreadable.starts_with("health: "), "{unreadable}");
        assert!(unreadable.contains("client/key.pem"), "{unreadable}");
        config.tls = None;
        assert_eq!(
            error(&config),
            "health: enabled, but certificate_file, private_key_file or ca_file is missing; name all three or \
             disable it"
        );
        let cause = no_thread(io::Error::other("no memory"));
        assert_eq!(
            cause.to_string(),
            "health: cannot start a thread: no memory"
        );
    }

    #[test]
    fn silence_counts_from_a_late_beat() {
        let folder = tempfile::tempdir().unwrap();
        let tls = Authority::new().issue(&folder.path().join("client"), HEALTH_NAME);
        let mut service = service(tls, 8853);
        let checks = Arc::get_mut(&mut service.checks).unwrap();
        assert_eq!(checks.interval, Duration::from_millis(20));
        assert_eq!(checks.timeout, Duration::from_secs(600));
        checks.heartbeat = Heartbeat::silent(Duration::from_secs(100));
        assert_eq!(service.silent_for(), Duration::ZERO, "it does not run");
        let (stop, _) = oneshot::channel();
        let thread = std::thread::spawn(|| ());
        *service.watch.lock() = Watch::Running { stop, thread };
        let silent = service.silent_for().as_millis();
        assert!((99_500..3_600_000).contains(&silent), "{silent}");
        service.stop();
        assert_eq!(service.silent_for(), Duration::ZERO, "it is stopped");
    }
}
