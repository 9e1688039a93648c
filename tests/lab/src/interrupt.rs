//! Ctrl-C handling that still runs all clean-up.

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

/// Set by the signal handler.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Makes SIGINT and SIGTERM end the children of this program instead of the program itself.
///
/// Code that waits for a child then fails ([`crate::process::capture`] checks for it), and while
/// the error propagates, every guard (namespaces, processes, folders) cleans up. If that takes too
/// long, the program is ended. The signals are handled rather than blocked, because children would
/// inherit a blocked mask but not a handler.
pub fn install() -> Result<()> {
    let action = SigAction::new(
        SigHandler::Handler(note),
        SaFlags::SA_RESTART,
        SigSet::empty(),
    );
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
                // The child may have ended meanwhile.
                let _ = kill(child, Signal::SIGTERM);
            }
            thread::sleep(Duration::from_millis(100));
        }
        std::process::exit(130);
    });
    Ok(())
}

extern "C" fn note(_signal: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// Returns whether SIGINT or SIGTERM was received.
pub fn requested() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Sleeps for `duration`, or until a signal arrives.
pub fn sleep(duration: Duration) {
    let step = Duration::from_millis(20);
    let mut left = duration;
    while !left.is_zero() && !requested() {
        thread::sleep(left.min(step));
        left = left.saturating_sub(step);
    }
}

/// Returns the children of this program. `ip netns del` is spared because it is part of the
/// clean-up.
fn children() -> Vec<Pid> {
    let own = std::process::id();
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    let pids = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // Format "pid (name) state parent ...": the name may contain anything, including
        // parentheses.
        let Some((head, tail)) = stat.rsplit_once(')') else {
            return false;
        };
        let parent = tail
            .split_whitespace()
            .nth(1)
            .and_then(|field| field.parse::<u32>().ok());
        parent == Some(own) && !head.ends_with("(ip")
    })
    .map(Pid::from_raw)
    .collect()
}
