//! The key pool: pauses next to a busy process, and the start of a container.

use std::{
    fs,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Command, Stdio},
    time::{Duration, SystemTime},
};

use dns_identity::{
    folder::read_pair,
    keys::{KeyPool, KeyType, Priority},
    rotator::Rotator,
};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::{Pid, setsid},
};
use serde_json::json;

use crate::{
    authorities::TestAuthority,
    program::{Running, until},
    rotator::{container, files, matches, memory, settings},
};

/// Returns the thread `key-pool` of this process once it has the policy SCHED_IDLE.
fn pool_thread() -> Pid {
    let mut found = None;
    until("a thread key-pool with SCHED_IDLE", || {
        found = idle_pool_thread();
        found.is_some()
    });
    found.unwrap()
}

fn idle_pool_thread() -> Option<Pid> {
    for task in fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap();
        // A thread may end meanwhile.
        let stat = fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        // Field 41, `policy` (proc(5)); the name in field 2 has no space. 5 is SCHED_IDLE.
        if stat.contains("(key-pool)") && stat.split_whitespace().nth(40) == Some("5") {
            return Some(Pid::from_raw(task.file_name().to_str()?.parse().ok()?));
        }
    }
    None
}

/// Returns how often a thread of this process gave up its core by itself.
fn sleeps(thread: Pid) -> u64 {
    let status = fs::read_to_string(format!("/proc/self/task/{thread}/status")).unwrap();
    let count = status
        .lines()
        .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    count.unwrap().trim().parse().unwrap()
}

/// Starts a process that never sleeps, in the session of this process or in its own.
fn busy(has_own_session: bool, cpus: &CpuSet) -> Running {
    let mut command = Command::new("sh");
    command
        .args(["-c", "while :; do :; done"])
        .stdin(Stdio::null());
    if has_own_session {
        // SAFETY: setsid is async-signal-safe, and the closure touches no memory of the parent.
        unsafe { command.pre_exec(|| Ok(setsid().map(drop)?)) };
    }
    let process = Running(command.spawn().unwrap());
    sched_setaffinity(Pid::from_raw(process.0.id().cast_signed()), cpus).unwrap();
    process
}

#[test]
fn pool_yields_to_busy_process() {
    // One CPU for both.
    let allowed = sched_getaffinity(Pid::from_raw(0)).unwrap();
    let cpu = (0..CpuSet::count())
        .find(|cpu| allowed.is_set(*cpu).unwrap())
        .unwrap();
    let mut cpus = CpuSet::new();
    cpus.set(cpu).unwrap();
    // The kernel shares a CPU equally between sessions, whatever the policies of their threads are: there the pool
    // yields by its pauses alone.
    for has_own_session in [false, true] {
        let process = busy(has_own_session, &cpus);
        // Larger than can be filled here.
        let keys = KeyPool::start(KeyType::P256, 1_000_000, Priority::Idle).unwrap();
        let thread = pool_thread();
        sched_setaffinity(thread, &cpus).unwrap();
        let before = sleeps(thread);
        // With room in the pool, its thread waits for nothing else. Not many pauses, because each takes a turn of the
        // CPU, and SCHED_IDLE has a weight of 3 where other threads have 1,024 (kernel/sched/sched.h).
        until("pauses beside the busy process", || {
            sleeps(thread) >= before + 2
        });
        // The pool ends once it has the CPU.
        drop((process, keys));
        until("the end of the pool's thread", || {
            !PathBuf::from(format!("/proc/self/task/{thread}")).exists()
        });
    }
}

#[test]
fn idle_machine_fills_pool() {
    let pool = KeyPool::start(KeyType::P256, 50, Priority::Idle).unwrap();
    assert!(pool.wait(50, Duration::from_secs(600)));
    assert_eq!((pool.ready(), pool.size()), (50, 50));
    // A taken key is replaced.
    pool.try_take().unwrap();
    assert!(pool.wait(50, Duration::from_secs(600)));
}

#[test]
fn start_takes_key_of_pool() {
    let (authority, folder) = (TestAuthority::new("rotator"), memory());
    let pool = KeyPool::start(KeyType::Rsa2048, 1, Priority::Idle).unwrap();
    // At idle priority this takes longer on a busy machine.
    assert!(pool.wait(1, Duration::from_secs(600)));
    let before = pool.used();
    let now = SystemTime::now();
    let mut rotator = Rotator::open(settings(folder.path()), files(&authority), pool, now).unwrap();
    rotator
        .create(container(json!({ "guid": "g1" })), now)
        .unwrap();
    assert!(matches(
        &read_pair(&folder.path().join("g1"), "instance").unwrap()
    ));
    // The thread of a full pool rests until a key is taken.
    until("a key in place of the one that the start took", || {
        rotator.pool.used() > before
    });
}
