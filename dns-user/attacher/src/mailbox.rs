//! Channels to a thread that waits in poll(2): each receiver is also a file descriptor.

use std::{
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::{Arc, mpsc},
};

/// The sending end. Dropping it closes the channel.
pub(crate) struct Sender<T> {
    /// Declared before `wake`, and so dropped first: the receiver, woken by the end of `wake`,
    /// finds the channel closed.
    messages: mpsc::SyncSender<T>,
    wake: Notifier,
}

/// The receiving end: readable while messages are pending, and after the sender is gone.
pub(crate) struct Receiver<T> {
    messages: mpsc::Receiver<T>,
    woken: Notifications,
}

/// The other end of the channel is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ended;

/// Returns a channel in which at most `capacity` messages wait.
pub(crate) fn channel<T>(capacity: usize) -> io::Result<(Sender<T>, Receiver<T>)> {
    let (messages, received) = mpsc::sync_channel(capacity);
    let (wake, woken) = notifications()?;
    Ok((
        Sender { messages, wake },
        Receiver {
            messages: received,
            woken,
        },
    ))
}

impl<T> Sender<T> {
    /// Sends a message; waits while the channel is full.
    pub(crate) fn send(&self, message: T) -> Result<(), Ended> {
        self.messages.send(message).map_err(|_| Ended)?;
        self.wake.notify();
        Ok(())
    }

    /// Sends a message that may be lost; returns whether there was room for it.
    pub(crate) fn offer(&self, message: T) -> Result<bool, Ended> {
        match self.messages.try_send(message) {
            Ok(()) => {
                self.wake.notify();
                Ok(true)
            }
            Err(mpsc::TrySendError::Full(_)) => Ok(false),
            Err(mpsc::TrySendError::Disconnected(_)) => Err(Ended),
        }
    }
}

impl<T> Receiver<T> {
    /// Returns the next message, if there is one. The receiver stays readable until there is none.
    pub(crate) fn take(&self) -> Result<Option<T>, Ended> {
        match self.next() {
            Ok(None) => {
                // Not before: while messages are left, poll(2) must return at once.
                self.woken.clear();
                // One of the wake-ups may belong to a message that has arrived in the meantime.
                self.next()
            }
            found => found,
        }
    }

    fn next(&self) -> Result<Option<T>, Ended> {
        match self.messages.try_recv() {
            Ok(message) => Ok(Some(message)),
            Err(mpsc::TryRecvError::Empty) => Ok(None),
            Err(mpsc::TryRecvError::Disconnected) => Err(Ended),
        }
    }
}

impl<T> AsFd for Receiver<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.woken.as_fd()
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Notifier(Arc<UnixStream>);

/// Wake-ups without a message: readable after [`Notifier::notify`], and after the last notifier was dropped.
#[derive(Debug)]
pub(crate) struct Notifications(UnixStream);

pub(crate) fn notifications() -> io::Result<(Notifier, Notifications)> {
    let (notifier, notified) = UnixStream::pair()?;
    // Neither end may wait for the other: a full stream of wake-ups says all that there is to say.
    notifier.set_nonblocking(true)?;
    notified.set_nonblocking(true)?;
    Ok((Notifier(Arc::new(notifier)), Notifications(notified)))
}

impl Notifier {
    pub(crate) fn notify(&self) {
        // An error means that the stream is full of unread wake-ups or that no thread listens any more.
        let _ = (&*self.0).write(&[0]);
    }
}

impl Notifications {
    pub(crate) fn clear(&self) {
        let mut bytes = [0; 64];
        // A shorter read has emptied the stream.
        while (&self.0)
            .read(&mut bytes)
            .is_ok_and(|read| read == bytes.len())
        {}
    }
}

impl AsFd for Notifications {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    /// Returns whether poll(2) reports the descriptor as readable.
    fn is_readable(receiver: &impl AsFd) -> bool {
        poll(
            &mut [PollFd::new(receiver.as_fd(), PollFlags::POLLIN)],
            PollTimeout::ZERO,
        )
        .unwrap()
            > 0
    }

    #[test]
    fn messages_and_the_end_wake_the_receiver() {
        let (sender, receiver) = channel(4).unwrap();
        assert!(!is_readable(&receiver));
        assert_eq!(receiver.take(), Ok(None));
        sender.send(1).unwrap();
        sender.send(2).unwrap();
        assert!(is_readable(&receiver));
        assert_eq!(receiver.take(), Ok(Some(1)));
        assert!(is_readable(&receiver), "there is another one");
        assert_eq!([receiver.take(), receiver.take()], [Ok(Some(2)), Ok(None)]);
        assert!(!is_readable(&receiver));
        sender.send(3).unwrap();
        drop(sender);
        assert!(is_readable(&receiver));
        assert_eq!(
            [receiver.take(), receiver.take()],
            [Ok(Some(3)), Err(Ended)]
        );
    }

    #[test]
    fn full_channel_takes_no_offer() {
        let (sender, receiver) = channel(2).unwrap();
        assert_eq!(
            [1, 2, 3].map(|number| sender.offer(number)),
            [Ok(true), Ok(true), Ok(false)]
        );
        assert_eq!(receiver.take(), Ok(Some(1)));
        assert_eq!(sender.offer(4), Ok(true));
        drop(receiver);
        assert_eq!(sender.offer(5), Err(Ended));
    }

    #[test]
    fn notifications_wake_once() {
        let (notifier, notified) = notifications().unwrap();
        assert!(!is_readable(&notified));
        // The stream buffers a few hundred single bytes.
        (0..10_000).for_each(|_| notifier.notify());
        assert!(is_readable(&notified));
        notified.clear();
        assert!(!is_readable(&notified));
        notifier.notify();
        assert!(is_readable(&notified));
    }

    #[test]
    fn full_wake_stream_loses_no_message() {
        let (sender, receiver) = channel(10_000).unwrap();
        // The stream buffers a few hundred single bytes.
        for number in 0..10_000 {
            sender.send(number).unwrap();
        }
        for number in 0..10_000 {
            assert_eq!(receiver.take(), Ok(Some(number)));
        }
        while is_readable(&receiver) {
            assert_eq!(receiver.take(), Ok(None), "a wake-up too many does no harm");
        }
        drop(receiver);
        assert_eq!(sender.send(0), Err(Ended));
    }
}
