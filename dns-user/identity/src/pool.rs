//! Keys generated in advance by a thread of the lowest priority.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use crate::keys::{KeyError, KeyType, PrivateKey};

/// Pause after contention, as a multiple of the CPU time used before it: the thread then uses at
/// most about 2 % of a core that other threads need.
const PAUSE_FACTOR: u32 = 50;

const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Longest time over which contention is measured.
const LONGEST_WINDOW: Duration = Duration::from_secs(1);

/// Keys of one type, at most `size` of them.
pub struct KeyPool {
    kind: KeyType,
    shared: Arc<Shared>,
}

/// Priority of the thread that generates keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// Behind all other threads of the machine.
    Idle,
    /// That of the process, for measurements beside other programs.
    Normal,
}

struct Shared {
    size: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    ready: Vec<PrivateKey>,
    stopped: bool,
    /// CPU time of the thread that generates keys.
    used: Duration,
    /// Number of keys that [`KeyPool::on_key`]'s function waits for.
    wanted: Option<usize>,
    on_key: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl KeyPool {
    /// Starts filling a pool, at idle priority.
    ///
    /// `SCHED_IDLE` ranks the thread below other threads of its scheduling group only: the kernel
    /// divides a core equally between sessions (autogroup) and between control groups. The thread
    /// therefore also pauses whenever it had to wait for its core.
    pub fn start(kind: KeyType, size: usize) -> std::io::Result<Self> {
        Self::start_with(kind, size, Priority::Idle)
    }

    /// Starts filling a pool with this priority.
    pub fn start_with(kind: KeyType, size: usize, priority: Priority) -> std::io::Result<Self> {
        let shared = Arc::new(Shared { size, state: Mutex::default(), changed: Condvar::new() });
        let of_thread = shared.clone();
        thread::Builder::new().name("key-pool".to_owned()).spawn(move || of_thread.fill(kind, priority))?;
        Ok(Self { kind, shared })
    }

    /// Returns the type of the keys.
    pub fn kind(&self) -> KeyType {
        self.kind
    }

    /// Takes a key if one is ready.
    pub fn try_take(&self) -> Option<PrivateKey> {
        let key = self.shared.state.lock().ready.pop();
        self.shared.changed.notify_all();
        key
    }

    /// Takes a key, or generates one on this thread if none is ready.
    pub fn take(&self) -> Result<PrivateKey, KeyError> {
        match self.try_take() {
            Some(key) => Ok(key),
            None => PrivateKey::generate(self.kind),
        }
    }

    /// Sets the function that is called when a wanted key is ready.
    pub fn on_key(&self, ready: impl Fn() + Send + Sync + 'static) {
        self.shared.state.lock().on_key = Some(Arc::new(ready));
    }

    /// Returns whether `count` keys are ready; if not, the function of [`Self::on_key`] is called once
    /// they are.
    pub fn call_when(&self, count: usize) -> bool {
        let mut state = self.shared.state.lock();
        let ready = state.ready.len() >= count;
        state.wanted = (!ready).then_some(count);
        ready
    }

    /// Returns the CPU time that the generation of keys took so far.
    pub fn used(&self) -> Duration {
        self.shared.state.lock().used
    }

    /// Returns the number of keys that are ready.
    pub fn ready(&self) -> usize {
        self.shared.state.lock().ready.len()
    }

    /// Returns the number of keys that the pool keeps ready.
    pub fn size(&self) -> usize {
        self.shared.size
    }

    /// Waits until `count` keys are ready; returns whether they are.
    pub fn wait(&self, count: usize, timeout: Duration) -> bool {
        let mut state = self.shared.state.lock();
        let missing = |state: &mut State| state.ready.len() < count;
        !self.shared.changed.wait_while_for(&mut state, missing, timeout).timed_out()
    }
}

impl Drop for KeyPool {
    fn drop(&mut self) {
        self.shared.state.lock().stopped = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn fill(&self, kind: KeyType, priority: Priority) {
        if priority == Priority::Idle
            && let Err(error) = be_idle()
        {
            tracing::warn!(%error, "key pool runs at normal priority: SCHED_IDLE is not permitted");
        }
        let mut window = Window::begin();
        loop {
            {
                let mut state = self.state.lock();
                let full = |state: &mut State| !state.stopped && state.ready.len() >= self.size;
                if full(&mut state) {
                    self.changed.wait_while(&mut state, full);
                    window = Window::begin();
                }
                if state.stopped {
                    return;
                }
            }
            let generated = PrivateKey::generate(kind);
            let pause = match &generated {
                Ok(_) => window.pause().filter(|_| priority == Priority::Idle),
                Err(error) => {
                    tracing::error!(%error, "key pool cannot generate a key; retrying in 10 s");
                    Some(Duration::from_secs(10))
                }
            };
            let call = {
                let mut state = self.state.lock();
                state.ready.extend(generated);
                state.used = thread_time();
                let ready = state.ready.len();
                let wanted = state.wanted.take_if(|wanted| *wanted <= ready);
                wanted.and(state.on_key.clone())
            };
            self.changed.notify_all();
            if let Some(call) = call {
                call();
            }
            if let Some(pause) = pause {
                let mut state = self.state.lock();
                self.changed.wait_while_for(&mut state, |state| !state.stopped, pause);
                window = Window::begin();
            }
        }
    }
}

/// Time spent generating without sleeping. Wall time in excess of CPU time went to other threads.
struct Window {
    begun: Instant,
    used: Duration,
}

impl Window {
    fn begin() -> Self {
        Self { begun: Instant::now(), used: thread_time() }
    }

    /// Returns the pause that is due if other threads needed the core; a long window is reset.
    fn pause(&mut self) -> Option<Duration> {
        let (passed, used) = (self.begun.elapsed(), thread_time().saturating_sub(self.used));
        if passed > used + used / 4 {
            return Some((used * PAUSE_FACTOR).min(LONGEST_PAUSE));
        }
        if passed > LONGEST_WINDOW {
            *self = Self::begin();
        }
        None
    }
}

/// Returns the CPU time used by the calling thread; zero if the kernel does not provide it.
pub fn thread_time() -> Duration {
    let clock = nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID;
    clock.now().map(Duration::from).unwrap_or_default()
}

/// Sets the calling thread's scheduling policy to `SCHED_IDLE` (Linux 2.6.23).
fn be_idle() -> std::io::Result<()> {
    // SAFETY: the structure is plain data, for which zero is valid; musl has more members than glibc.
    let parameters: libc::sched_param = unsafe { std::mem::zeroed() };
    // SAFETY: 0 is the calling thread; the pointer is valid for the call.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}
