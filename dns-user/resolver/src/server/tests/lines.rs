//! Workers share no line of memory that they write for each query: what they share is made read-only while they
//! answer, and each write to it counts.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    net::UdpSocket,
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use super::*;
use crate::server::Arrivals;

/// Number of workers, each as if on a separate CPU.
const WORKERS: usize = 16;
/// Queries to each worker.
const QUERIES: usize = 25;

//----------- Shared memory ----------------------------------------------------

/// Room for everything that the workers share, in bytes.
const SHARED: usize = 64 << 20;
const PAGE: usize = 4096;

/// Takes from one area what a thread allocates while [`Shared::allocate`] runs.
struct Shared;

#[global_allocator]
static ALLOCATOR: Shared = Shared;

thread_local! {
    static IS_SHARING: Cell<bool> = const { Cell::new(false) };
}

static USED: AtomicUsize = AtomicUsize::new(0);
static WRITES: AtomicUsize = AtomicUsize::new(0);
static START: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the area hands out each byte once and never takes it back; the rest is the system's.
unsafe impl GlobalAlloc for Shared {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let start = START.load(Ordering::Relaxed);
        if !IS_SHARING.try_with(Cell::get).unwrap_or(false) {
            // SAFETY: the caller's layout.
            return unsafe { System.alloc(layout) };
        }
        let at = USED.fetch_add(layout.size() + layout.align(), Ordering::Relaxed);
        if at + layout.size() + layout.align() > SHARED {
            return ptr::null_mut();
        }
        ptr::with_exposed_provenance_mut((start + at).next_multiple_of(layout.align()))
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        if !is_shared(address.addr()) {
            // SAFETY: it came from there.
            unsafe { System.dealloc(address, layout) }
        }
    }

    // The other tests allocate as usual.
    unsafe fn realloc(&self, address: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !is_shared(address.addr()) {
            // SAFETY: it came from there.
            return unsafe { System.realloc(address, layout, size) };
        }
        // SAFETY: the caller's layout with another size, and no more bytes than both have.
        unsafe {
            let new = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
            if !new.is_null() {
                ptr::copy_nonoverlapping(address, new, layout.size().min(size));
            }
            new
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if IS_SHARING.try_with(Cell::get).unwrap_or(false) {
            // SAFETY: the caller's layout; the area is new, and so zero.
            unsafe { self.alloc(layout) }
        } else {
            // SAFETY: the caller's layout.
            unsafe { System.alloc_zeroed(layout) }
        }
    }
}

fn is_shared(address: usize) -> bool {
    let start = START.load(Ordering::Relaxed);
    start != 0 && (start..start + SHARED).contains(&address)
}

impl Shared {
    /// Maps the area, and counts writes to it while it is read-only.
    fn prepare() {
        static ONCE: OnceLock<()> = OnceLock::new();
        ONCE.get_or_init(|| {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            // SAFETY: a new mapping, and a handler that makes no allocation.
            unsafe {
                let area = libc::mmap(
                    ptr::null_mut(),
                    SHARED,
                    libc::PROT_READ | libc::PROT_WRITE,
                    flags,
                    -1,
                    0,
                );
                assert_ne!(area, libc::MAP_FAILED);
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = on_fault as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO;
                assert_eq!(
                    libc::sigaction(libc::SIGSEGV, &raw const action, ptr::null_mut()),
                    0
                );
                START.store(area.expose_provenance(), Ordering::SeqCst);
            }
        });
    }

    /// Calls a function whose allocations are shared by the workers.
    fn allocate<T>(build: impl FnOnce() -> T) -> T {
        IS_SHARING.set(true);
        let built = build();
        IS_SHARING.set(false);
        built
    }

    /// Makes the area read-only, or writable again.
    fn protect(protection: libc::c_int) {
        let start = ptr::with_exposed_provenance_mut(START.load(Ordering::SeqCst));
        // SAFETY: the area is mapped.
        assert_eq!(unsafe { libc::mprotect(start, SHARED, protection) }, 0);
    }

    /// Returns how many pages were written while `run` ran.
    fn writes(run: impl FnOnce()) -> usize {
        let before = WRITES.load(Ordering::SeqCst);
        Self::protect(libc::PROT_READ);
        run();
        Self::protect(libc::PROT_READ | libc::PROT_WRITE);
        WRITES.load(Ordering::SeqCst) - before
    }
}

/// Counts a write to the shared area, and lets it and further ones to the same page happen.
extern "C" fn on_fault(
    _signal: libc::c_int,
    info: *const libc::siginfo_t,
    _context: *const libc::c_void,
) {
    // SAFETY: the kernel passes the address of the fault; these calls are safe in a signal handler.
    unsafe {
        let address = (*info).si_addr().addr();
        if is_shared(address) {
            WRITES.fetch_add(1, Ordering::SeqCst);
            let page = ptr::with_exposed_provenance_mut(address / PAGE * PAGE);
            libc::mprotect(page, PAGE, libc::PROT_READ | libc::PROT_WRITE);
        } else {
            // The instruction faults again, and the process ends.
            libc::signal(libc::SIGSEGV, libc::SIG_DFL);
        }
    }
}

//----------- Test -------------------------------------------------------------

/// Asks a worker, and returns the number of answers.
fn ask(client: &UdpSocket, worker: SocketAddr, query: &[u8]) -> usize {
    client.send_to(query, worker).unwrap();
    let mut reply = [0; 1500];
    let (length, from) = client.recv_from(&mut reply).unwrap();
    assert_eq!((from, length > 12), (worker, true));
    usize::from(u16::from_be_bytes([reply[6], reply[7]]))
}

/// Returns the number of ticks of the coarse clock since `begun`.
fn ticks_since(begun: Instant) -> usize {
    // SAFETY: all-zero bytes are a valid time, which the kernel replaces.
    let mut tick: libc::timespec = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    unsafe { libc::clock_getres(libc::CLOCK_MONOTONIC_COARSE, &raw mut tick) };
    let tick = Duration::new(tick.tv_sec as u64, tick.tv_nsec as u32);
    (begun.elapsed().as_nanos() / tick.as_nanos().max(1)) as usize + 2
}

#[tokio::test]
async fn no_line_is_written_per_query() {
    Shared::prepare();
    let listen: Vec<SocketAddr> = (1..=WORKERS)
        .map(|last| SocketAddr::from(([127, 0, 7, last as u8], 0)))
        .collect();
    // An instance of another group for each of the changes, so that few of them concern group 1.
    let rows: Vec<String> = (0..=255)
        .map(|last| {
            let group = if last < 3 { 1 } else { 2 };
            format!("[\"id-{last}\", \"web\", \"net\", \"dep\", \"10.0.1.{last}\", \"bosh\", [\"{group}\"]]")
        })
        .collect();
    let json = format!(
        "{{\"record_keys\": [\"id\", \"instance_group\", \"network\", \"deployment\", \"ip\", \"domain\", \
         \"group_ids\"], \"record_infos\": [{}], \"version\": 1}}",
        rows.join(", ")
    );
    let (group, other, alone) = ("q-s0.q-g1.bosh", "q-s0.q-g2.bosh", "id-5.web.net.dep.bosh");
    let limits = Limits {
        names: 100,
        first_checks: TIMEOUT,
        ttl: None,
    };
    let (tracker, state, handler_options) = Shared::allocate(|| {
        let (records, _) = Records::parse(json.as_bytes()).unwrap();
        let states = Arc::new(HealthStates::default());
        let (tracker, orders) = Tracker::new(limits, states.clone(), FastPathHandle::default());
        let tracker = Arc::new(tracker);
        // The watcher's end stays open.
        std::mem::forget(orders);
        let snapshot = Snapshot::build(records, &AliasFiles::default()).0;
        let state = ServerState::new(
            snapshot,
            states,
            FastPathHandle::default(),
            Some(tracker.clone()),
            None,
        );
        state.set_routes(upcheck_only());
        for name in [group, other] {
            state.look_up(&state.state(), &Name::from_text(name).unwrap(), None);
        }
        let options = Options {
            workers: NonZeroUsize::new(1),
            arrivals: Arrivals::on(),
            max_reply: Some(1232),
            ..Options::default()
        };
        (tracker, Arc::new(state), options)
    });
    let arrivals = handler_options.arrivals.clone();
    IS_SHARING.set(true);
    let metrics = ServerMetrics::new("dns://test".into());
    let identity = Arc::new(Identity::of_this_host(Setting::Always));
    let server = Server::bind(&listen, state, identity, metrics, handler_options)
        .await
        .unwrap();
    IS_SHARING.set(false);
    let workers = server.addresses();
    let (stop, stopped) = oneshot::channel::<()>();
    let ended = tokio::spawn(server.run(async {
        let _ = stopped.await;
    }));
    let asking = tokio::task::spawn_blocking(move || {
        let client = UdpSocket::bind("127.0.7.100:0").unwrap();
        client.set_read_timeout(Some(TIMEOUT)).unwrap();
        let queries = [group, alone].map(|name| query(1, name, TYPE_A, CLASS_IN));
        for worker in &workers {
            for _ in 0..2 {
                assert_eq!(
                    queries.each_ref().map(|query| ask(&client, *worker, query)),
                    [3, 1]
                );
            }
        }
        // The area is protected again for each query, so that the query's own writes count.
        let ask_all = |query: &[u8]| {
            let ask =
                |worker: &SocketAddr| Shared::writes(|| assert!(ask(&client, *worker, query) > 0));
            workers
                .iter()
                .cycle()
                .take(WORKERS * QUERIES)
                .map(ask)
                .sum::<usize>()
        };
        assert_eq!(
            ask_all(&queries[1]),
            0,
            "writes for a name without health checks"
        );
        let begun = Instant::now();
        let writes = ask_all(&queries[0]);
        assert!(
            writes <= ticks_since(begun),
            "{writes} writes for a tracked name"
        );

        // Changes of other instances void no answer that does not depend on them.
        let states = tracker.states();
        let ip = |last| IpAddr::from([10, 0, 1, last]);
        let ours = [ip(0), ip(1), ip(2)];
        let unrelated: Vec<IpAddr> = (3..=255)
            .map(ip)
            .filter(|ip| {
                ours.iter()
                    .all(|our| states.set_of(&[*our]) != states.set_of(&[*ip]))
            })
            .collect();
        let (begun, mut writes) = (Instant::now(), 0);
        for (round, worker) in workers.iter().cycle().take(WORKERS * QUERIES).enumerate() {
            let state = [HealthState::Failing, HealthState::Running][round / unrelated.len() % 2];
            let health = InstanceHealth {
                state,
                groups: Box::default(),
            };
            assert!(tracker.checked(unrelated[round % unrelated.len()], health));
            writes += Shared::writes(|| {
                assert_eq!(ask(&client, *worker, &queries[0]), 3);
            });
        }
        assert!(
            writes <= ticks_since(begun),
            "{writes} writes after changes of other instances"
        );
        // Every worker follows a change of the name's instance.
        for worker in &workers {
            assert_eq!(ask(&client, *worker, &queries[0]), 3);
        }
        assert!(tracker.checked(
            ip(0),
            InstanceHealth {
                state: HealthState::Failing,
                groups: Box::default()
            }
        ));
        assert!(
            workers
                .iter()
                .all(|worker| ask(&client, *worker, &queries[0]) == 2)
        );
        let arrived = arrivals.take();
        assert_eq!(
            arrived.len(),
            WORKERS,
            "each worker counts the arrivals at its address"
        );
    });
    timeout(6 * TIMEOUT, asking).await.unwrap().unwrap();
    stop.send(()).unwrap();
    timeout(TIMEOUT, ended).await.unwrap().unwrap();
}
