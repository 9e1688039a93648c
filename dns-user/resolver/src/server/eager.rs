//! Eager tasks: futures that are polled once where they are created and become tasks of the runtime
//! only if they must wait.
//!
//! A forwarded query is sent by the first poll of its future and then waits for the reply. Because
//! the UDP thread does that poll, no runtime thread has to wake up for sending. The runtime thread
//! that reads the reply from its socket wakes the future, which becomes a task on the same thread.

use std::{
    future::Future,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
};

use parking_lot::{Mutex, MutexGuard};

use tokio::runtime::Handle;

use dns_kit::threads;

/// A future without output, on the heap.
type Boxed = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Polls `future` once on the calling thread. If it is pending, its first wake-up makes it a task
/// of `runtime`.
pub(super) fn poll_then_spawn(runtime: &Handle, future: impl Future<Output = ()> + Send + 'static) {
    let mut future: Boxed = Box::pin(future);
    let task = Arc::new(EagerTask { state: Mutex::new(State::Polled), runtime: runtime.clone() });
    let waker = Waker::from(Arc::clone(&task));
    // Timers, sockets and tasks created by the future belong to the runtime.
    let _inside = runtime.enter();
    // A panic ends only this future, as it would in a task.
    let poll = || future.as_mut().poll(&mut Context::from_waker(&waker));
    if let Ok(Poll::Pending) = threads::catch(poll) {
        task.rest(future);
    }
}

/// A future that has been polled once, as its own waker.
struct EagerTask {
    state: Mutex<State>,
    /// The runtime on which the task is spawned.
    runtime: Handle,
}

/// The progress of an eager task.
enum State {
    /// Being polled by [`poll_then_spawn`].
    Polled,
    /// Still being polled, but already woken.
    Woken,
    /// Pending until it is woken.
    Resting(Boxed),
    /// Completed, or spawned as a task.
    Gone,
}

impl EagerTask {
    /// Stores the future after its first poll.
    fn rest(&self, future: Boxed) {
        let mut state = self.state();
        if matches!(*state, State::Woken) {
            *state = State::Gone;
            drop(state);
            self.runtime.spawn(future);
        } else {
            *state = State::Resting(future);
        }
    }

    /// Locks the state. No panic can leave it inconsistent.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl Wake for EagerTask {
    fn wake(self: Arc<Self>) {
        let mut state = self.state();
        match mem::replace(&mut *state, State::Gone) {
            State::Polled | State::Woken => *state = State::Woken,
            State::Resting(future) => {
                drop(state);
                // From its next poll on, the task has its own waker.
                self.runtime.spawn(future);
            }
            State::Gone => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::oneshot;

    use super::*;

    /// Spawns `future` from a thread outside the runtime.
    async fn spawn_elsewhere(future: impl Future<Output = ()> + Send + 'static) {
        let runtime = Handle::current();
        let thread = std::thread::spawn(move || poll_then_spawn(&runtime, future));
        tokio::task::spawn_blocking(|| thread.join()).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn ready_future_completes_on_return() {
        let (sender, mut receiver) = oneshot::channel();
        spawn_elsewhere(async {
            let _ = sender.send(7);
        })
        .await;
        assert_eq!(receiver.try_recv(), Ok(7));
    }

    #[tokio::test]
    async fn woken_future_resumes() {
        let (first, wait) = oneshot::channel();
        let (sender, mut receiver) = oneshot::channel();
        spawn_elsewhere(async {
            let found: Result<i32, _> = wait.await;
            tokio::time::sleep(Duration::from_millis(5)).await;
            let _ = sender.send(found);
        })
        .await;
        assert!(receiver.try_recv().is_err());
        first.send(8).unwrap();
        assert_eq!(receiver.await, Ok(Ok(8)));
    }

    #[tokio::test]
    async fn wake_during_poll_counts() {
        let (sender, receiver) = oneshot::channel();
        spawn_elsewhere(async {
            tokio::task::yield_now().await;
            let mut woken = false;
            std::future::poll_fn(|context| {
                context.waker().wake_by_ref();
                if mem::replace(&mut woken, true) { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            let _ = sender.send(9);
        })
        .await;
        assert_eq!(receiver.await, Ok(9));
    }

    #[tokio::test]
    async fn panic_is_contained() {
        spawn_elsewhere(async {
            panic!("as a defect would");
        })
        .await;
    }

    #[tokio::test]
    async fn unwoken_future_is_dropped() {
        let (first, wait) = oneshot::channel::<()>();
        let held = Arc::new(());
        let watched = Arc::downgrade(&held);
        spawn_elsewhere(async move {
            let _held = held;
            let _ = wait.await;
        })
        .await;
        assert!(watched.upgrade().is_some());
        drop(first);
        while watched.upgrade().is_some() {
            tokio::task::yield_now().await;
        }
    }

    #[test]
    fn runtime_shutdown_drops_pending() {
        let held = Arc::new(());
        let watched = Arc::downgrade(&held);
        let runtime = tokio::runtime::Runtime::new().unwrap();
        poll_then_spawn(runtime.handle(), async move {
            let _held = held;
            tokio::time::sleep(Duration::from_secs(3600)).await;
        });
        assert!(watched.upgrade().is_some());
        runtime.shutdown_timeout(Duration::from_secs(10));
        assert!(watched.upgrade().is_none());
    }

    #[tokio::test]
    async fn foreign_thread_timeout_fires() {
        let (sender, receiver) = oneshot::channel();
        spawn_elsewhere(async {
            let never = tokio::time::timeout(Duration::from_millis(20), std::future::pending::<()>());
            let _ = sender.send(never.await.is_err());
        })
        .await;
        assert_eq!(receiver.await, Ok(true));
    }
}
