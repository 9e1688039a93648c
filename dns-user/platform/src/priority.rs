//! The priority of threads that work beside those that answer.

/// How much lower it is (`nice`).
const NICENESS: i32 = 5;

/// Lowers the priority of the calling thread, which does this: answering comes first.
pub fn lower(work: &str) {
    // SAFETY: takes plain numbers; process 0 is the calling thread (Linux, not POSIX).
    let result = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICENESS) };
    if result != 0 {
        let problem = std::io::Error::last_os_error();
        tracing::debug!("cannot lower the priority of {work}: {problem}");
    }
}
