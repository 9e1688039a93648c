//! Replaces the server's own attacher if it is killed.

use std::{
    io::{self, Read as _, Write as _},
    os::{fd::AsFd as _, unix::net::UnixStream},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{SigHandler, Signal, signal},
    unistd::{self, ForkResult},
};

use crate::{mailbox::wait_readable, service::offer_connection};

/// Time until the first replacement.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// Longest time until a replacement; it doubles each time.
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// Life of an attacher after which its end counts as the first one.
const STABLE: Duration = Duration::from_secs(120);

/// An attacher of the server.
pub(crate) struct AttacherProcess {
    pub(crate) server: UnixStream,
    /// Shows the standby process that this one has ended: the kernel closes it, also after a kill.
    end: UnixStream,
}

impl AttacherProcess {
    /// Declares that this attacher has done its work and needs no replacement.
    pub(crate) fn finish(&self) {
        // An error means that the standby process is gone.
        let _ = (&self.end).write(&[0]);
    }
}

/// Forks the standby process, which replaces the server's own attacher if it is killed. Returns once in each attacher,
/// this process first; `None` in the standby process, at its end.
///
/// The server cannot start a second attacher: it has given up its privileges, and its seccomp filter refuses
/// execve(2). So the attacher's process forks before its first thread: the parent attaches, and the child sleeps until
/// that process is killed, then forks the next one. Each attacher offers the server a connection through the stream
/// that the server created.
pub(crate) fn fork(server: UnixStream) -> io::Result<Option<AttacherProcess>> {
    // The seccomp filter does not permit wait4(2), so the kernel must reap attachers. SAFETY: SIG_IGN
    // installs no handler.
    unsafe { signal(Signal::SIGCHLD, SigHandler::SigIgn)? };
    let (worker, mut watched) = offer(&server)?;
    // SAFETY: the process has a single thread.
    if let ForkResult::Parent { .. } = unsafe { unistd::fork() }? {
        return Ok(Some(worker));
    }
    // This process must not hold the worker's end open, which the kernel closes when the worker
    // dies.
    drop(worker);
    let mut begun = Instant::now();
    let mut pause = FIRST_PAUSE;
    loop {
        // The server sends nothing on its stream: an end is all that there is to be seen.
        let ends = [server.as_fd(), watched.as_fd()];
        let [is_server_gone, is_attacher_gone] = wait_readable(ends, Duration::MAX);
        if is_server_gone || is_attacher_gone && is_finished(&watched) {
            return Ok(None);
        }
        // The wait was interrupted.
        if !is_attacher_gone {
            continue;
        }
        if begun.elapsed() >= STABLE {
            pause = FIRST_PAUSE;
        }
        // A pause that the end of the server cuts short.
        if wait_readable([server.as_fd()], pause) == [true] {
            return Ok(None);
        }
        pause = (pause * 2).min(MAX_PAUSE);
        begun = Instant::now();
        match replace(&server) {
            Ok(Replacement::Worker(worker)) => return Ok(Some(worker)),
            Ok(Replacement::Watched(next)) => watched = next,
            // The cause may be that of the attacher's end, such as a lack of memory, and may pass.
            Err(error) => eprintln!(
                "bosh-dns-xdp: cannot start the attacher again: {error}; trying again in {} s",
                pause.as_secs()
            ),
        }
    }
}

/// Each side of a fork of the standby process.
enum Replacement {
    /// The new attacher.
    Worker(AttacherProcess),
    /// The standby process, with the stream that ends with the attacher.
    Watched(UnixStream),
}

fn replace(server: &UnixStream) -> io::Result<Replacement> {
    let (worker, watched) = offer(server)?;
    // SAFETY: the process has a single thread.
    Ok(match unsafe { unistd::fork() }? {
        ForkResult::Child => Replacement::Worker(worker),
        ForkResult::Parent { .. } => Replacement::Watched(watched),
    })
}

/// Offers the server a connection to a new attacher; also returns the stream that ends with the attacher.
fn offer(server: &UnixStream) -> io::Result<(AttacherProcess, UnixStream)> {
    let connection = offer_connection(server)?;
    let (end, watched) = UnixStream::pair()?;
    Ok((
        AttacherProcess {
            server: connection,
            end,
        },
        watched,
    ))
}

/// Returns whether the attacher at the other end has declared its end.
fn is_finished(mut watched: &UnixStream) -> bool {
    matches!(watched.read(&mut [0]), Ok(1))
}
