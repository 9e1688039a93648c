//! Ctrl-C that lets everything clean up after itself.

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::Result;
use nix::{
    sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, sigaction},
    unistd::Pid,
};

/// Set once the program was asked to end.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Makes SIGINT and SIGTERM end this program's children instead of itself.
///
/// Whatever waits for them then fails ([`crate::process::capture`] sees to it), the
/// failure travels up, and on its way every guard (namespaces, processes, folders)
/// cleans up. Should that take too long, the program is ended. The signals are handled
/// rather than blocked: children would inherit the blocking, but not the handling.
pub fn install() -> Result<()> {
    let action = SigAction::new(SigHandler::Handler(note), SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        // SAFETY: the handler only stores to an atomic.
        unsafe { sigaction(signal, &action)? };
    }
    thread::spawn(|| {
        while !requested() {
            thread::sleep(Duration::from_millis(50));
        }
        eprintln!("\ninterrupted: cleaning up");
        for _ in 0..100 {
            for child in children() {
                // It may have ended by itself meanwhile.
                let _ = kill(child, Signal::SIGTERM);
            }
            thread::sleep(Duration::from_millis(100));
        }
        std::process::exit(130);
    });
    Ok(())
}

/// Notes that the program was asked to end.
extern "C" fn note(_signal: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// Whether the program was asked to end.
pub fn requested() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Sleeps, but not longer than until the program is asked to end.
pub fn sleep(duration: Duration) {
    let step = Duration::from_millis(20);
    let mut left = duration;
    while !left.is_zero() && !requested() {
        thread::sleep(left.min(step));
        left = left.saturating_sub(step);
    }
}

/// This program's child processes. `ip netns del` is let live: it is the clean-up itself.
fn children() -> Vec<Pid> {
    let own = std::process::id();
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // "pid (name) state parent ...": the name may hold anything but ends at the last ')'.
        let Some((head, tail)) = stat.rsplit_once(')') else { return false };
        let parent = tail.split_whitespace().nth(1).and_then(|field| field.parse::<u32>().ok());
        parent == Some(own) && !head.ends_with("(ip")
    })
    .map(Pid::from_raw)
    .collect()
}
