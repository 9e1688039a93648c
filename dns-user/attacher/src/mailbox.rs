//! Channels to a thread that waits in poll(2): each receiver is also a file descriptor.

use std::{
    io::{self, Read as _, Write as _},
    iter,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc,
        mpsc::{self, TryRecvError},
    },
    time::Duration,
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Waits until one of the descriptors is readable, at most `limit`; returns which of them are.
pub(crate) fn wait_readable<const COUNT: usize>(
    fds: [BorrowedFd<'_>; COUNT],
    limit: Duration,
) -> [bool; COUNT] {
    let mut fds = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN));
    // poll(2) counts milliseconds: rounded up, because a shorter wait would cost another one.
    let limit = PollTimeout::try_from(limit.saturating_add(Duration::from_micros(999)));
    // An interrupted wait is only a shorter one.
    let _ = poll(&mut fds, limit.unwrap_or(PollTimeout::MAX));
    fds.map(|fd| fd.any().unwrap_or(false))
}

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
    capacity: usize,
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
            capacity,
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

    /// Sends a message that is lost if the channel is full, or if the receiver is gone.
    pub(crate) fn offer(&self, message: T) {
        if self.messages.try_send(message).is_ok() {
            self.wake.notify();
        }
    }
}

impl<T> Receiver<T> {
    /// Returns the messages that wait, hardly more than the channel holds: a sender that fills it again and again must
    /// not keep the receiver from its other work. [`Ended`] follows them if no other will come.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = Result<T, Ended>> {
        let mut left = self.capacity;
        let mut is_cleared = false;
        iter::from_fn(move || {
            left = left.checked_sub(1)?;
            let mut found = self.messages.try_recv();
            if matches!(found, Err(TryRecvError::Empty)) && !is_cleared {
                // Not before: while messages are left, poll(2) must return at once.
                self.woken.clear();
                is_cleared = true;
                // Wake-ups of messages that arrived in the meantime are gone as well, so all of those are taken.
                left = self.capacity;
                found = self.messages.try_recv();
            }
            match found {
                Ok(message) => Some(Ok(message)),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => Some(Err(Ended)),
            }
        })
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
    // Neither end may wait for the other: one wake-up is as good as a full stream of them.
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
    use super::*;

    /// Returns whether poll(2) reports the descriptor as readable.
    fn is_readable(receiver: &impl AsFd) -> bool {
        wait_readable([receiver.as_fd()], Duration::ZERO) == [true]
    }

    #[test]
    fn messages_and_the_end_wake_the_receiver() {
        let (sender, receiver) = channel(4).unwrap();
        assert!(!is_readable(&receiver));
        assert_eq!(receiver.waiting().next(), None);
        sender.send(1).unwrap();
        sender.send(2).unwrap();
        assert!(is_readable(&receiver));
        assert_eq!(receiver.waiting().next(), Some(Ok(1)));
        assert!(is_readable(&receiver), "there is another one");
        assert!(receiver.waiting().eq([Ok(2)]));
        assert!(!is_readable(&receiver));
        sender.send(3).unwrap();
        drop(sender);
        assert!(is_readable(&receiver));
        assert!(receiver.waiting().take(2).eq([Ok(3), Err(Ended)]));
    }

    #[test]
    fn full_channel_takes_no_offer() {
        let (sender, receiver) = channel(2).unwrap();
        (1..=3).for_each(|number| sender.offer(number));
        assert_eq!(receiver.waiting().next(), Some(Ok(1)));
        sender.offer(4);
        assert!(receiver.waiting().eq([Ok(2), Ok(4)]));
        drop(receiver);
        sender.offer(5);
    }

    #[test]
    fn hasty_sender_holds_nobody_up() {
        let (sender, receiver) = channel(3).unwrap();
        sender.send(0).unwrap();
        let mut taken = Vec::new();
        for message in receiver.waiting() {
            let number = message.unwrap();
            taken.push(number);
            // As soon as there is room.
            sender.send(number + 1).unwrap();
        }
        assert_eq!(taken, [0, 1, 2]);
        assert!(is_readable(&receiver), "the next one waits");
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
        assert!(receiver.waiting().eq((0..10_000).map(Ok)));
        while is_readable(&receiver) {
            assert_eq!(
                receiver.waiting().next(),
                None,
                "a wake-up too many does no harm"
            );
        }
        drop(receiver);
        assert_eq!(sender.send(0), Err(Ended));
    }
}
