//! Threads of the process, each with the consequence of a panic.

use std::{
    cell::Cell,
    io,
    panic::{self, AssertUnwindSafe},
    thread::{self, JoinHandle},
};

/// Exit code after an internal failure (a panic), after which supervisors should restart the program; `EX_SOFTWARE` in
/// sysexits.h.
pub const INTERNAL_FAILURE: u8 = 70;

/// Consequence of a panic on a thread, for the server's panic hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnPanic {
    /// The process must end and be restarted, because a part of it is lost for good.
    EndProcess,
    /// One unit of work is lost; the thread continues with the next.
    Continue,
}

thread_local! {
    /// Library threads do not set it, so their panics end the process.
    static ON_PANIC: Cell<OnPanic> = const { Cell::new(OnPanic::EndProcess) };
}

/// Starts a thread. Its name is for operators only.
pub fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    on_panic: OnPanic,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    thread::Builder::new().name(name.into()).spawn(move || {
        adopt(on_panic);
        work()
    })
}

/// Sets the consequence of a panic on the calling thread, for threads that a library starts:
/// `on_thread_start` of a tokio runtime.
pub fn adopt(on_panic: OnPanic) {
    ON_PANIC.set(on_panic);
}

/// Returns the consequence of a panic at this point of the calling thread.
pub fn on_panic() -> OnPanic {
    ON_PANIC.get()
}

/// Runs work with panics caught: a panic loses only this work.
pub fn catch<T>(work: impl FnOnce() -> T) -> thread::Result<T> {
    let before = ON_PANIC.replace(OnPanic::Continue);
    let result = panic::catch_unwind(AssertUnwindSafe(work));
    // Calls may be nested, so the consequence of the outer one returns.
    ON_PANIC.set(before);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_does_not_decide_fate() {
        for fate in [OnPanic::EndProcess, OnPanic::Continue] {
            for name in ["tokio-rt-worker", "dns-udp-0", "publisher"] {
                assert_eq!(
                    spawn(name, fate, on_panic).unwrap().join().unwrap(),
                    fate,
                    "{name}"
                );
            }
        }
        let plain = thread::Builder::new()
            .name("tokio-rt-worker".into())
            .spawn(on_panic)
            .unwrap();
        assert_eq!(plain.join().unwrap(), OnPanic::EndProcess);
    }

    #[test]
    fn caught_panics_keep_the_thread() {
        let result = catch(|| {
            assert_eq!(on_panic(), OnPanic::Continue);
            panic!("as a defect would");
        });
        assert!(result.is_err());
        assert_eq!(on_panic(), OnPanic::EndProcess);
    }
}
