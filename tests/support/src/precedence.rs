//! Precedence over other work on the machine, for tests of what passes in real time.

/// Gives the calling thread, and what it starts, precedence, if that is permitted.
pub fn take() {
    // SAFETY: takes plain numbers. The result is ignored: other users than root lack the permission.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -20) };
}
