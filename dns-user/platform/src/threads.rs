//! Threads of the process, each with what a panic in it means.

use std::{
    cell::Cell,
    io,
    panic::{self, AssertUnwindSafe},
    thread::{self, JoinHandle},
};

/// Consequence of a panic on a thread, for the panic hook of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnPanic {
    /// A part of the process is gone for good: the process has to end and be restarted.
    EndProcess,
    /// One piece of work is lost, and its thread goes on with the next.
    Continue,
}

thread_local! {
    /// Threads of libraries say nothing, and so end the process.
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

/// Runs work whose panic is caught here and loses nothing but the work.
pub fn catch<T>(work: impl FnOnce() -> T) -> thread::Result<T> {
    let before = ON_PANIC.replace(OnPanic::Continue);
    let result = panic::catch_unwind(AssertUnwindSafe(work));
    ON_PANIC.set(before);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fate_does_not_depend_on_name() {
        for fate in [OnPanic::EndProcess, OnPanic::Continue] {
            for name in ["tokio-rt-worker", "dns-udp-0", "publisher"] {
                assert_eq!(spawn(name, fate, on_panic).unwrap().join().unwrap(), fate, "{name}");
            }
        }
        let plain = thread::Builder::new().name("tokio-rt-worker".into()).spawn(on_panic).unwrap();
        assert_eq!(plain.join().unwrap(), OnPanic::EndProcess);
    }

    #[test]
    fn caught_panics_lose_only_their_work() {
        let result = catch(|| {
            assert_eq!(on_panic(), OnPanic::Continue);
            panic!("as a defect would");
        });
        assert!(result.is_err());
        assert_eq!(on_panic(), OnPanic::EndProcess);
    }
}
