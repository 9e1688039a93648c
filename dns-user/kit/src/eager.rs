//! Eager tasks: futures that are polled where they are created and where they are woken, and become
//! tasks of the runtime only otherwise.
//!
//! A forwarded query is sent by the first poll of its future and then waits for the reply. Because
//! the UDP thread does that poll, no runtime thread has to wake up for sending. The runtime thread
//! that reads the reply from its socket wakes the future and polls it at once ([`resume_woken`]), without
//! a task and its scheduling.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    future::Future,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
};

use parking_lot::Mutex;
use tokio::runtime::Handle;

use super::threads;

/// A future without output, on the heap.
type Boxed = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Polls `future` once on the calling thread. If it is pending, its first wake-up makes it a task
/// of `runtime`, except within [`resume_woken`].
pub fn poll_then_spawn(runtime: &Handle, future: impl Future<Output = ()> + Send + 'static) {
    let task = EagerTask {
        state: Mutex::new(TaskState::Polled),
        runtime: runtime.clone(),
    };
    Arc::new(task).poll(Box::pin(future));
}

/// Runs `wake`, then polls on this thread the eager tasks that it has woken, and tasks that they wake
/// in turn. For tasks of the runtime, while they hold no lock.
pub fn resume_woken<T>(wake: impl FnOnce() -> T) -> T {
    let Some(_scope) = Scope::open() else {
        return wake();
    };
    let result = wake();
    while let Some((task, future)) = next_woken() {
        task.poll(future);
    }
    result
}

thread_local! {
    /// Whether [`resume_woken`] runs on this thread. Has no destructor, so it can always be read.
    static IS_OPEN: Cell<bool> = const { Cell::new(false) };
    /// The eager tasks that it has yet to poll.
    static WOKEN: RefCell<VecDeque<(Arc<EagerTask>, Boxed)>> = const { RefCell::new(VecDeque::new()) };
}

fn next_woken() -> Option<(Arc<EagerTask>, Boxed)> {
    WOKEN.with_borrow_mut(VecDeque::pop_front)
}

/// Makes woken tasks wait for [`resume_woken`] until it is dropped.
struct Scope;

impl Scope {
    /// Returns `None` if there is one on this thread already, which then polls the tasks.
    fn open() -> Option<Self> {
        if IS_OPEN.replace(true) {
            None
        } else {
            Some(Self)
        }
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        IS_OPEN.set(false);
        // Some are left only after a panic.
        while let Some((task, future)) = next_woken() {
            task.runtime.spawn(future);
        }
    }
}

/// A future that waits after a poll, as its own waker.
struct EagerTask {
    state: Mutex<TaskState>,
    /// The runtime on which the task is spawned.
    runtime: Handle,
}

enum TaskState {
    /// The future is being polled.
    Polled,
    /// Still being polled, but already woken.
    Woken,
    /// Pending until it is woken.
    Resting(Boxed),
    /// Completed, spawned as a task, or about to be polled.
    Gone,
}

impl EagerTask {
    /// Polls the future on this thread, and keeps it if it is pending.
    fn poll(self: Arc<Self>, mut future: Boxed) {
        *self.state.lock() = TaskState::Polled;
        let waker = Waker::from(Arc::clone(&self));
        // Timers, sockets and tasks created by the future belong to the runtime.
        let _inside = self.runtime.enter();
        // A panic ends only this future, as it would in a task.
        if let Ok(Poll::Pending) =
            threads::catch(|| future.as_mut().poll(&mut Context::from_waker(&waker)))
        {
            self.rest(future);
        }
    }

    /// Stores the future after a poll.
    fn rest(&self, future: Boxed) {
        let mut state = self.state.lock();
        if matches!(*state, TaskState::Woken) {
            *state = TaskState::Gone;
            drop(state);
            self.runtime.spawn(future);
        } else {
            *state = TaskState::Resting(future);
        }
    }
}

impl Wake for EagerTask {
    fn wake(self: Arc<Self>) {
        let mut state = self.state.lock();
        match mem::replace(&mut *state, TaskState::Gone) {
            TaskState::Polled | TaskState::Woken => *state = TaskState::Woken,
            TaskState::Resting(future) => {
                drop(state);
                if IS_OPEN.get() {
                    WOKEN.with_borrow_mut(|woken| woken.push_back((Arc::clone(&self), future)));
                } else {
                    // From its next poll on, the task has its own waker.
                    self.runtime.spawn(future);
                }
            }
            TaskState::Gone => {}
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
        tokio::task::spawn_blocking(|| thread.join())
            .await
            .unwrap()
            .unwrap();
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
                if mem::replace(&mut woken, true) {
                    Poll::Ready(())
                } else {
                    Poll::Pending
                }
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
            let never =
                tokio::time::timeout(Duration::from_millis(20), std::future::pending::<()>());
            let _ = sender.send(never.await.is_err());
        })
        .await;
        assert_eq!(receiver.await, Ok(true));
    }

    /// Returns a future that waits for two values and then sends their sum, polled once, with its ends.
    fn waits_twice() -> ([oneshot::Sender<i32>; 2], oneshot::Receiver<i32>) {
        let ((first, one), (second, other)) = (oneshot::channel(), oneshot::channel());
        let (sender, receiver) = oneshot::channel();
        poll_then_spawn(&Handle::current(), async move {
            if let (Ok(one), Ok(other)) = (one.await, other.await) {
                let _ = sender.send(one + other);
            }
        });
        ([first, second], receiver)
    }

    #[tokio::test]
    async fn woken_future_resumes_at_once() {
        let ([first, second], mut sum) = waits_twice();
        assert_eq!(resume_woken(|| first.send(1)), Ok(()));
        assert!(sum.try_recv().is_err());
        assert_eq!(resume_woken(|| second.send(2)), Ok(()));
        assert_eq!(sum.try_recv(), Ok(3), "without a turn of the runtime");
    }

    #[tokio::test]
    async fn resumed_future_may_become_task() {
        let ([first, second], mut sum) = waits_twice();
        assert_eq!(resume_woken(|| first.send(1)), Ok(()));
        second.send(2).unwrap();
        assert!(
            sum.try_recv().is_err(),
            "a task, because it is woken elsewhere"
        );
        assert_eq!(sum.await, Ok(3));
    }

    #[tokio::test]
    async fn futures_resume_each_other() {
        let ([first, second], mut sum) = waits_twice();
        let (start, started) = oneshot::channel::<()>();
        poll_then_spawn(&Handle::current(), async move {
            let _ = started.await;
            resume_woken(|| first.send(1).unwrap());
            second.send(2).unwrap();
        });
        resume_woken(|| start.send(()).unwrap());
        assert_eq!(sum.try_recv(), Ok(3));
    }

    #[tokio::test]
    async fn panic_in_scope_loses_no_task() {
        let ([first, second], sum) = waits_twice();
        let panicked = threads::catch(|| {
            resume_woken(|| {
                first.send(1).unwrap();
                panic!("as a defect would");
            });
        });
        assert!(panicked.is_err());
        second.send(2).unwrap();
        assert_eq!(sum.await, Ok(3));
    }
}
