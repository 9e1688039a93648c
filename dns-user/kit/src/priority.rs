//! Lower priority for threads with background work.

/// Increment of the nice value.
const NICENESS: i32 = 5;

/// Lowers the priority of the calling thread, so that answering queries comes first. `work` is its
/// name in the log.
pub fn lower(work: &str) {
    // SAFETY: takes plain numbers; process 0 is the calling thread (Linux, not POSIX).
    let result = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICENESS) };
    if result != 0 {
        let problem = std::io::Error::last_os_error();
        tracing::debug!("cannot lower the priority of {work}: {problem}");
    }
}
