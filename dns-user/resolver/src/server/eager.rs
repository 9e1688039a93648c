//! Eager tasks: futures that are polled once where they are made and become tasks of
//! the runtime only when there is more to do.
//!
//! A forwarded query goes up within its first poll, and then nothing happens until
//! the reply is there. Polled once by the UDP thread, it costs no wake-up of a
//! runtime thread on its way up; the reply, which such a thread takes from its
//! socket, makes it a task of just that thread.

use std::{
    future::Future,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
};

use parking_lot::{Mutex, MutexGuard};

use tokio::runtime::Handle;

use dns_platform::threads;

/// A future without output, on the heap.
type Boxed = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Polls `future` once, here and now. If it is not done, the first to wake it
/// makes it a task of `runtime`.
pub(super) fn spawn_eagerly(runtime: &Handle, future: impl Future<Output = ()> + Send + 'static) {
    let mut future: Boxed = Box::pin(future);
    let task = Arc::new(EagerTask { state: Mutex::new(State::Polled), runtime: runtime.clone() });
    let waker = Waker::from(Arc::clone(&task));
    // Timers, sockets and tasks that it makes belong to the runtime.
    let _inside = runtime.enter();
    // A panic ends this future and nothing else, as that of a task would.
    let poll = || future.as_mut().poll(&mut Context::from_waker(&waker));
    if let Ok(Poll::Pending) = threads::catch(poll) {
        task.rest(future);
    }
}

/// A future that has been polled once, as its own waker.
struct EagerTask {
    state: Mutex<State>,
    /// Where it becomes a task.
    runtime: Handle,
}

/// Where an eager task is.
enum State {
    /// In the hands of [`spawn_eagerly`].
    Polled,
    /// As before, and there is already more to do.
    Woken,
    /// Here, until there is more to do.
    Resting(Boxed),
    /// Done, or a task.
    Gone,
}

impl EagerTask {
    /// Takes the future after its first poll.
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

    /// The state. It is whole before anything can panic.
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
                // The task has a waker of its own from its next poll on.
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

    /// Spawns `future` on a thread that is none of the runtime's.
    async fn spawn_elsewhere(future: impl Future<Output = ()> + Send + 'static) {
        let runtime = Handle::current();
        let thread = std::thread::spawn(move || spawn_eagerly(&runtime, future));
        tokio::task::spawn_blocking(|| thread.join()).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn what_is_done_at_once_is_done_on_return() {
        let (sender, mut receiver) = oneshot::channel();
        spawn_elsewhere(async {
            let _ = sender.send(7);
        })
        .await;
        assert_eq!(receiver.try_recv(), Ok(7));
    }

    #[tokio::test]
    async fn what_waits_goes_on_when_it_is_woken() {
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
    async fn a_wake_during_the_first_poll_is_not_lost() {
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
    async fn a_panic_stays_where_it_is() {
        spawn_elsewhere(async {
            panic!("as a defect would");
        })
        .await;
    }

    #[tokio::test]
    async fn what_is_never_woken_again_is_dropped() {
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
    fn the_end_of_the_runtime_drops_what_rests() {
        let held = Arc::new(());
        let watched = Arc::downgrade(&held);
        let runtime = tokio::runtime::Runtime::new().unwrap();
        spawn_eagerly(runtime.handle(), async move {
            let _held = held;
            tokio::time::sleep(Duration::from_secs(3600)).await;
        });
        assert!(watched.upgrade().is_some());
        runtime.shutdown_timeout(Duration::from_secs(10));
        assert!(watched.upgrade().is_none());
    }

    #[tokio::test]
    async fn a_timeout_that_was_spawned_elsewhere_ends() {
        let (sender, receiver) = oneshot::channel();
        spawn_elsewhere(async {
            let never = tokio::time::timeout(Duration::from_millis(20), std::future::pending::<()>());
            let _ = sender.send(never.await.is_err());
        })
        .await;
        assert_eq!(receiver.await, Ok(true));
    }
}
