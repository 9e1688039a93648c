//! One server's session: its request, the maps handed over, and its messages until it ends.
//!
//! Each session has its own programs and maps. After a restart of either process a new session
//! takes over from the previous one like a restarted server does. Until then the previous programs
//! keep answering while their lease is valid. The server renews it by a plain store, even if the
//! attacher is dead.

use std::{
    io,
    net::SocketAddr,
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::net::UnixStream,
    },
    time::{Duration, Instant},
};

use dns_common::LAYOUT_VERSION;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::sync::watch;

use super::{
    Authority, Place, ReadAuthority,
    installed::{Installed, Loaded},
};
use crate::{
    bpf,
    mailbox::{self, Bell},
    protocol::{
        AttacherMessage, AttacherStatus, Lines, Request, Response, ServerMessage, send, send_descriptors,
    },
};
use dns_core::config::OnStop;

/// Minimum time between two reports once the server is ready: on a machine with short-lived
/// containers the state changes many times per second.
const PAUSE: Duration = Duration::from_millis(100);

/// Time limit for a server to receive each message, and for one that has connected to send its request.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// Serves one server until its connection ends. `patience` limits the wait for its request; `None`: the
/// server has started this attacher, and may need any time before it asks.
pub(super) fn serve(
    stream: &UnixStream,
    read: &ReadAuthority,
    place: &Place,
    patience: Option<Duration>,
) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    // The server is starting and reads its files meanwhile.
    let early = if patience.is_none() { load_early(read) } else { None };
    let mut lines = Lines::default();
    let Request { layout, listen } = match patience {
        Some(patience) => lines.next_within(stream, patience)?,
        None => lines.next(stream)?,
    };
    let (authority, listen, loaded, bell) = match load(layout, &listen, read, early) {
        Ok(loaded) => loaded,
        Err(why) => {
            tracing::warn!(why, "server refused: it gets no programs and answers every query from userspace");
            send_descriptors(stream, &[])?;
            return send(stream, &Response::Refused(why));
        }
    };
    hand_over(stream, &loaded)?;
    let (filled, installs) = watch::channel(0);
    let installed = loaded.attach(&authority.xdp, &listen, installs).map_err(io::Error::other)?;
    tracing::info!("maps handed to a server");
    let session =
        Session { stream, lines, installed: &installed, bell, filled, told: None, read, authority, place };
    let on_stop = session.run();
    // A server that died without a stop message will be restarted.
    let asked = on_stop.as_ref().ok().copied();
    installed.stop(asked.unwrap_or(OnStop::Keep));
    on_stop.map(drop)
}

/// Maps and programs that are loaded before a server requests them.
struct Early {
    authority: Authority,
    loaded: Loaded,
    bell: Bell,
}

/// Loads maps, and lets the kernel verify programs, for the server that has started this attacher; `None` if that
/// fails: its request will show the reason.
fn load_early(read: &ReadAuthority) -> Option<Early> {
    let authority = read().ok()?;
    let (mut loaded, bell) = load_maps(&authority).ok()?;
    loaded.order_programs(&authority.xdp);
    Some(Early { authority, loaded, bell })
}

/// Loads the maps of a server, and creates the bell that its programs ring.
fn load_maps(authority: &Authority) -> Result<(Loaded, Bell), String> {
    let (ringer, bell) = mailbox::bell().map_err(|error| format!("creating a socket pair: {error}"))?;
    let loaded = Loaded::load(&authority.xdp, authority.main, ringer).map_err(|error| error.to_string())?;
    Ok((loaded, bell))
}

/// Loads the maps requested by a server, unless they were loaded early; the error is the reason for a refusal.
fn load(
    layout: u32,
    listen: &[SocketAddr],
    read: &ReadAuthority,
    early: Option<Early>,
) -> Result<(Authority, Vec<SocketAddr>, Loaded, Bell), String> {
    if layout != LAYOUT_VERSION {
        return Err(format!(
            "the attacher's maps have layout {LAYOUT_VERSION}, the server's {layout}: run the same version of both"
        ));
    }
    let authority = read().map_err(|error| error.to_string())?;
    let listen = authority.allowed(listen);
    if listen.is_empty() {
        return Err("the attacher's configuration names none of the server's addresses".to_owned());
    }
    let is_same =
        |early: &Early| (&early.authority.xdp, early.authority.main) == (&authority.xdp, authority.main);
    let (mut loaded, bell) = match early.filter(is_same) {
        Some(Early { authority: _, loaded, bell }) => (loaded, bell),
        None => load_maps(&authority)?,
    };
    loaded.find_predecessor(&authority.xdp, authority.main);
    Ok((authority, listen, loaded, bell))
}

/// Sends the descriptors of the maps, and of the predecessor's maps if there are any.
fn hand_over(stream: &UnixStream, loaded: &Loaded) -> io::Result<()> {
    let maps = loaded.shared_maps().ok_or_else(|| io::Error::other("the object lacks a map"))?;
    let earlier = loaded.pins().and_then(|pins| pins.earlier_maps());
    let earlier: Vec<BorrowedFd<'_>> = earlier.iter().flatten().map(|map| map.as_fd()).collect();
    let shapes =
        |maps: &[BorrowedFd<'_>]| maps.iter().map(|map| bpf::map_shape(*map)).collect::<io::Result<_>>();
    let response =
        Response::Maps { shapes: shapes(&maps)?, earlier: shapes(&earlier)?, limits: loaded.limits() };
    send_descriptors(stream, &[&maps[..], &earlier].concat())?;
    send(stream, &response)
}

/// A connected server that has received its maps.
struct Session<'a> {
    stream: &'a UnixStream,
    lines: Lines,
    /// The programs attached for this server.
    installed: &'a Installed,
    /// Rings when the state of the programs may have changed.
    bell: Bell,
    /// Signals that the maps are filled.
    filled: watch::Sender<u64>,
    /// The last state sent to the server, with the time.
    told: Option<(AttacherStatus, Instant)>,
    /// Reads the attacher's configuration.
    read: &'a ReadAuthority,
    /// The last configuration that could be read.
    authority: Authority,
    place: &'a Place,
}

impl Session<'_> {
    /// Executes the server's requests until it ends the session; an error if the connection breaks.
    fn run(mut self) -> io::Result<OnStop> {
        let mut is_changed = true;
        loop {
            while let Some(message) = self.lines.take()? {
                if let Some(on_stop) = self.execute(message)? {
                    return Ok(on_stop);
                }
            }
            let pause = self.pause();
            if is_changed && pause.is_zero() {
                self.report()?;
                is_changed = false;
            }
            let mut fds =
                [self.stream.as_fd(), self.bell.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
            // Rounded up, because a shorter wait would cost another iteration.
            let pause = PollTimeout::try_from(pause + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
            // An interrupted wait is only a shorter one.
            let _ = poll(&mut fds, if is_changed { pause } else { PollTimeout::NONE });
            let [is_readable, has_rung] = fds.map(|fd| fd.any().unwrap_or(false));
            if has_rung {
                self.bell.silence();
                is_changed = true;
            }
            if is_readable {
                self.lines.receive(self.stream)?;
            }
        }
    }

    /// Executes one message; returns the server's choice if it was the last one.
    fn execute(&mut self, message: ServerMessage) -> io::Result<Option<OnStop>> {
        match message {
            ServerMessage::Listen(endpoints) => {
                // If the configuration cannot be read, the last good one stays in use.
                if let Ok(authority) = (self.read)() {
                    self.authority = authority;
                }
                self.installed.set_listen(&self.authority.allowed(&endpoints));
            }
            ServerMessage::Arrived(arrivals) => self.installed.report(arrivals),
            ServerMessage::Filled => {
                self.place.serves();
                self.filled.send_replace(1);
            }
            ServerMessage::Grace => {
                let vouched = bpf::rcu_grace_period().is_ok();
                send(self.stream, &AttacherMessage::GraceOver(vouched))?;
            }
            ServerMessage::Stop { detach: true } => return Ok(Some(OnStop::Detach)),
            ServerMessage::Stop { detach: false } => return Ok(Some(OnStop::Keep)),
        }
        Ok(None)
    }

    /// Returns how long the next report must wait.
    fn pause(&self) -> Duration {
        match &self.told {
            Some((status, at)) if status.ready => PAUSE.saturating_sub(at.elapsed()),
            _ => Duration::ZERO,
        }
    }

    /// Sends the state of the interfaces and their programs if it changed.
    fn report(&mut self) -> io::Result<()> {
        let status = self.installed.status();
        if self.told.as_ref().is_none_or(|(told, _)| *told != status) {
            send(self.stream, &AttacherMessage::Status(status.clone()))?;
            self.told = Some((status, Instant::now()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::protocol::receive_descriptors;
    use dns_core::config::ConfigErrors;

    #[test]
    fn own_attacher_waits_for_slow_server() {
        let (ours, servers) = UnixStream::pair().unwrap();
        let read: ReadAuthority = Box::new(|| Err(ConfigErrors(Vec::new())));
        let attacher = thread::spawn(move || super::super::serve(&ours, &read));
        // Longer than a server may take that connects to a service.
        thread::sleep(PATIENCE + Duration::from_millis(200));
        send(&servers, &Request { layout: LAYOUT_VERSION + 1, listen: Vec::new() }).unwrap();
        assert_eq!(receive_descriptors(&servers).unwrap().len(), 0);
        let response = Lines::default().next(&servers).unwrap();
        assert!(matches!(response, Response::Refused(why) if why.contains("layout")));
        attacher.join().unwrap().unwrap();
    }
}
