//! One server's session: its request, the maps handed over, and its messages until it ends.
//!
//! Each session has its own programs and maps. After a restart of either process a new session takes over
//! from the previous one like a restarted server does. Until then the previous programs keep answering while
//! their lease is valid. The server renews it by a plain store, even if the attacher is dead.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use dns_common::{LAYOUT_VERSION, object as names};
use dns_core::config::{HookMode, OnStop, XdpConfig};
use dns_fastpath::{
    map::Shape,
    protocol::{
        Arrival, AttacherMessage, AttacherStatus, Lines, MAX_CLIENTS, Request, Response,
        SHARED_MAPS, ServerMessage, send, send_descriptors,
    },
};
use dns_kit::logs::LineLimit;
use nix::sys::resource::{Resource, getrlimit};

use super::{Authority, Holding, ReadAuthority};
use crate::{
    attach::{
        attachment::Filters,
        collisions::Collisions,
        pins::{KeptMaps, PinnedLink, Pins},
        reconcile::{Interfaces, Setting, WATCH_INTERVAL},
        selection::Selection,
        work,
    },
    bpf, during,
    mailbox::{self, Notifications, Notifier, wait_readable},
    object::Object,
    programs::{Program, ProgramStatuses, Programs},
};

/// Minimum time between two reports once the server is ready: on a machine with short-lived
/// containers the state changes many times per second.
const PAUSE: Duration = Duration::from_millis(100);

/// Time limit for a server to receive each message, and for one that has connected to send its request.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Serves one server until its connection ends; sets `serves` once its maps are filled. Its maps are gone when the last
/// clone of `holding` is; `None`: the server has started this attacher, and may need any time before it asks.
pub(super) fn serve(
    stream: &UnixStream,
    read: &ReadAuthority,
    serves: &AtomicBool,
    holding: Option<&Arc<Holding>>,
) -> io::Result<()> {
    // A server that does not read must not hold up its session for ever.
    stream.set_write_timeout(Some(TIMEOUT))?;
    let mut lines = Lines::default();
    // The server is starting and reads its files meanwhile.
    let mut early = None;
    let Request { layout, listen } = if holding.is_some() {
        lines.next_within(stream, TIMEOUT)?
    } else {
        early = load_early(read);
        lines.next(stream)?
    };
    let (authority, listen, prepared) = match prepare(layout, &listen, read, early, holding) {
        Ok(prepared) => prepared,
        Err(why) => {
            static LIMIT: LineLimit = LineLimit::new();
            if let Some(suppressed) = LIMIT.admit_any() {
                tracing::warn!(
                    why,
                    suppressed,
                    "server refused: it gets no programs and answers every query from userspace"
                );
            }
            // Even without descriptors: the server waits for their byte before the first line.
            send_descriptors(stream, &[])?;
            return send(stream, &Response::Refused(why));
        }
    };
    hand_over(stream, &prepared)?;
    let installed = prepared.attach(&authority.xdp, &listen)?;
    tracing::info!("maps handed to a server");
    let on_stop = ServerSession {
        stream,
        lines,
        installed: &installed,
        reported: None,
        watching_at: Instant::now(),
        read,
        authority,
        serves,
    }
    .run();
    // A server that died without a stop message will be restarted.
    let asked = on_stop.as_ref().ok().copied();
    installed.stop(asked.unwrap_or(OnStop::Keep));
    on_stop.map(drop)
}

/// Loads maps, and lets the kernel verify programs, for the server that has started this attacher; `None` if that
/// fails: its request will show the reason.
fn load_early(read: &ReadAuthority) -> Option<(Authority, Loaded)> {
    let authority = read().ok()?;
    let mut loaded = Loaded::load(&authority, None).ok()?;
    loaded.order_programs(&authority.xdp);
    Some((authority, loaded))
}

/// Loads the maps requested by a server, unless they were loaded early, and finds what its predecessor left; the error
/// is the reason for a refusal.
fn prepare(
    layout: u32,
    listen: &[SocketAddr],
    read: &ReadAuthority,
    early: Option<(Authority, Loaded)>,
    holding: Option<&Arc<Holding>>,
) -> Result<(Authority, Vec<SocketAddr>, Prepared), String> {
    // First of all, because a server of another version would read and write the maps wrongly.
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
    // The configuration may have changed since the maps were sized by it.
    let loaded = match early {
        Some((before, loaded)) if before.xdp == authority.xdp && before.main == authority.main => {
            loaded
        }
        other => {
            // The kernel need not hold the maps of both.
            drop(other);
            Loaded::load(&authority, holding).map_err(|error| error.to_string())?
        }
    };
    let prepared = loaded.find_predecessor(&authority);
    Ok((authority, listen, prepared))
}

/// Sends the descriptors of the maps, and of the predecessor's maps if there are any.
fn hand_over(stream: &UnixStream, prepared: &Prepared) -> io::Result<()> {
    let Prepared { loaded, pins, .. } = prepared;
    let maps = loaded
        .shared_maps()
        .ok_or_else(|| io::Error::other("the object lacks a map"))?;
    // Sent before the first link is replaced: the server takes over the names that the predecessor
    // has learned.
    let earlier = pins.as_ref().and_then(Pins::earlier_maps);
    let earlier: Vec<BorrowedFd<'_>> = earlier.iter().flatten().map(|map| map.as_fd()).collect();
    let response = Response::Maps {
        shapes: shapes_of(&maps)?,
        earlier: shapes_of(&earlier)?,
        limits: loaded.object.limits,
    };
    send_descriptors(stream, &[&maps[..], &earlier].concat())?;
    send(stream, &response)
}

/// Returns the sizes of maps, which a server without bpf(2) cannot find out.
fn shapes_of(maps: &[BorrowedFd<'_>]) -> io::Result<Vec<Shape>> {
    let mut shapes = Vec::with_capacity(maps.len());
    for map in maps {
        shapes.push(bpf::map_shape(*map)?);
    }
    Ok(shapes)
}

/// A connected server that has received its maps.
struct ServerSession<'a> {
    stream: &'a UnixStream,
    lines: Lines,
    installed: &'a Installed,
    /// The last state sent to the server, with the time.
    reported: Option<(AttacherStatus, Instant)>,
    /// When the thread of the interfaces was last reported to be alive.
    watching_at: Instant,
    read: &'a ReadAuthority,
    /// The last configuration that could be read.
    authority: Authority,
    serves: &'a AtomicBool,
}

impl ServerSession<'_> {
    /// Executes the server's requests until it ends the session; an error if the connection breaks.
    fn run(mut self) -> io::Result<OnStop> {
        let mut is_changed = true;
        loop {
            // Before the wait: poll(2) does not tell of lines that came together with an earlier
            // one.
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
            self.report_watching()?;
            let limit = if is_changed { pause } else { WATCH_INTERVAL };
            let fds = [self.stream.as_fd(), self.installed.notifications.as_fd()];
            let [is_readable, is_notified] = wait_readable(fds, limit);
            if is_notified {
                self.installed.notifications.clear();
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
                self.installed
                    .interfaces
                    .set_listen(&self.authority.allowed(&endpoints));
            }
            ServerMessage::Arrived(arrivals) => {
                self.installed.interfaces.report(within_limits(arrivals));
            }
            ServerMessage::Filled => {
                self.serves.store(true, Ordering::Relaxed);
                self.installed.interfaces.maps_are_filled();
            }
            ServerMessage::Grace => {
                // In this thread, although it takes 10 ms or more: the server waits for the answer
                // anyway.
                let is_confirmed = bpf::rcu_grace_period().is_ok();
                send(self.stream, &AttacherMessage::GraceOver(is_confirmed))?;
            }
            ServerMessage::Stop { detach: true } => return Ok(Some(OnStop::Detach)),
            ServerMessage::Stop { detach: false } => return Ok(Some(OnStop::Keep)),
        }
        Ok(None)
    }

    /// Returns how long the next report must wait.
    fn pause(&self) -> Duration {
        match &self.reported {
            // Until then each change matters to a start that waits for it.
            Some((status, at)) if status.ready => PAUSE.saturating_sub(at.elapsed()),
            _ => Duration::ZERO,
        }
    }

    /// Sends the server the time at which the thread of the interfaces was last at work, every [`WATCH_INTERVAL`].
    /// That thread's time is sent instead of this one's: either thread may hang alone, and after a stop of the
    /// process the old time proves nothing.
    fn report_watching(&mut self) -> io::Result<()> {
        if self.watching_at.elapsed() < WATCH_INTERVAL {
            return Ok(());
        }
        self.watching_at = Instant::now();
        let at_ns = self.installed.interfaces.watched_ns.load(Ordering::Relaxed);
        let work = work::so_far();
        send(self.stream, &AttacherMessage::Watching { at_ns, work })
    }

    /// Sends the state of the interfaces and their programs if it changed.
    fn report(&mut self) -> io::Result<()> {
        let status = self.installed.status();
        // After most notifications nothing has changed.
        if self
            .reported
            .as_ref()
            .is_none_or(|(reported, _)| *reported != status)
        {
            send(self.stream, &AttacherMessage::Status(status.clone()))?;
            self.reported = Some((status, Instant::now()));
        }
        Ok(())
    }
}

/// Drops the clients that a hostile server reports beyond the protocol's limit: reports wait for the thread of the
/// interfaces, and a line has room for 200,000 addresses.
fn within_limits(mut arrivals: Vec<Arrival>) -> Vec<Arrival> {
    for arrival in &mut arrivals {
        if arrival.clients.len() > MAX_CLIENTS {
            arrival.clients.truncate(MAX_CLIENTS);
            arrival.clients.shrink_to_fit();
            arrival.more = true;
        }
    }
    arrivals
}

/// Maps of one server, with programs that are not attached yet.
struct Loaded {
    programs: Programs,
    /// Our filters, for interfaces with clsact.
    filters: Filters,
    statuses: ProgramStatuses,
    object: Object,
    changed: Notifier,
    notifications: Notifications,
}

impl Loaded {
    /// Loads the maps for a server, and touches nothing of a running one.
    fn load(authority: &Authority, holding: Option<&Arc<Holding>>) -> io::Result<Self> {
        let (changed, notifications) =
            mailbox::notifications().map_err(|error| during("creating a socket pair", error))?;
        let (image, object) = Object::load(&authority.xdp)?;
        let statuses = ProgramStatuses::new(changed.clone());
        let programs = Programs::start(
            image,
            statuses.clone(),
            object.limits.answers + object.limits.replies > 0,
            holding.cloned(),
        )
        .map_err(|error| during("starting the thread that loads programs", error))?;
        Ok(Self {
            programs,
            filters: Filters::of(authority.main),
            statuses,
            object,
            changed,
            notifications,
        })
    }

    /// Lets the kernel verify the program that most interfaces need in this mode, before they are known.
    fn order_programs(&mut self, config: &XdpConfig) {
        let program = match config.mode {
            HookMode::Auto | HookMode::Tc => Program::Tc,
            HookMode::Native => Program::Xdp,
            HookMode::Off => return,
        };
        // An empty list of interfaces means that none is served.
        if config
            .interfaces
            .as_ref()
            .is_none_or(|names| !names.is_empty())
        {
            self.programs.order(program);
        }
    }

    /// Opens the folder of pins of this main address, and finds what a predecessor left there.
    fn find_predecessor(self, authority: &Authority) -> Prepared {
        let pins = Pins::prepare(&authority.xdp.bpffs, authority.main)
            .inspect_err(|error| {
                tracing::warn!(%error, "cannot pin under xdp.bpffs: programs are detached when this process ends, regardless of xdp.on_stop");
            })
            .ok();
        let mut predecessor = Vec::new();
        if let Some(pins) = &pins {
            // Before the maps are handed over: a flush by the new server counts on it.
            pins.end_forwarded_answers();
            // No other user: this process runs as the attacher's, whose pins count anyway.
            predecessor = pins.pinned_links(None);
        }
        if !predecessor.is_empty() {
            tracing::info!(
                links = predecessor.len(),
                "taking over the predecessor's pinned links"
            );
        }
        Prepared {
            loaded: self,
            pins,
            predecessor,
        }
    }

    /// Returns the maps that the server needs, in the protocol's order.
    fn shared_maps(&self) -> Option<[BorrowedFd<'_>; SHARED_MAPS]> {
        let object = &self.object;
        Some([
            object.kept_map(names::NAMES)?,
            object.kept_map(names::ENTRIES)?,
            object.kept_map(names::ANSWER_NAMES)?,
            object.kept_map(names::ANSWER_ENTRIES)?,
            object.kept_map(names::CONTROL)?,
            object.kept_map(names::COUNTERS)?,
            object.tap.as_fd(),
        ])
    }
}

/// Maps of one server, and what its predecessor left.
struct Prepared {
    loaded: Loaded,
    /// The folder of pins; `None` without pinning.
    pins: Option<Pins>,
    predecessor: Vec<PinnedLink>,
}

impl Prepared {
    /// Attaches the programs, in the caller's network namespace, once the maps are filled.
    fn attach(self, config: &XdpConfig, endpoints: &[SocketAddr]) -> io::Result<Installed> {
        let Self {
            loaded,
            pins,
            predecessor,
        } = self;
        let Object {
            kept_maps: maps,
            tap: _,
            heard_clients,
            scope,
            counters,
            limits: _,
        } = loaded.object;
        scope.set_vlans(&config.vlans);
        let kept_maps = Arc::new(KeptMaps { pins, maps });
        let interfaces = Interfaces::start(Setting {
            selection: Selection::new(config.interfaces.as_deref(), &config.respect_filters),
            mode: config.mode,
            programs: loaded.programs,
            filters: loaded.filters,
            listen: endpoints.to_vec(),
            scope,
            counters,
            collisions: Collisions::default(),
            heard_clients,
            max_interfaces: max_interfaces(),
            predecessor,
            prepared: BTreeMap::new(),
            lacks_tcx: false,
            kept_maps: kept_maps.clone(),
            changed: loaded.changed,
        })
        .map_err(|error| during("following the interfaces", error))?;
        let statuses = loaded.statuses;
        let notifications = loaded.notifications;
        Ok(Installed {
            interfaces,
            statuses,
            notifications,
            kept_maps,
        })
    }
}

/// Programs that are attached, or soon will be.
struct Installed {
    interfaces: Interfaces,
    statuses: ProgramStatuses,
    /// Sent when the state of interfaces or programs may have changed.
    notifications: Notifications,
    /// The maps needed by the programs, kept open, and the folder of pins.
    kept_maps: Arc<KeptMaps>,
}

impl Installed {
    fn status(&self) -> AttacherStatus {
        AttacherStatus {
            interfaces: self.interfaces.status.lock().clone(),
            programs: self.statuses.all(),
            ready: self.interfaces.is_ready.load(Ordering::Relaxed),
            pinned_at: self.kept_maps.pins.as_ref().map(|pins| pins.folder.clone()),
        }
    }

    /// Detaches everything, or leaves it to a successor.
    fn stop(self, on_stop: OnStop) {
        self.interfaces.stop(on_stop);
        if on_stop == OnStop::Detach
            && let Some(pins) = &self.kept_maps.pins
            // The pinned links are a predecessor's if this server ended before it took over.
            && (self.kept_maps.are_pinned() || pins.pinned_links(None).is_empty())
            && let Err(error) = pins.remove()
        {
            tracing::warn!(%error, "cannot remove the pinned maps");
        }
    }
}

/// Returns the maximum number of served interfaces: a quarter of the descriptors, and at least 256,
/// stay reserved.
fn max_interfaces() -> usize {
    const RESERVE: u64 = 256;
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft);
    usize::try_from(limit.saturating_sub(RESERVE.max(limit / 4))).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use dns_core::config::ConfigErrors;
    use dns_fastpath::protocol::receive_descriptors;

    use super::*;

    #[test]
    fn report_holds_no_more_clients_than_agreed() {
        let reported = |clients: usize| Arrival {
            ifindex: 1,
            endpoint: ([127, 0, 0, 1], 53).into(),
            queries: 1,
            clients: vec![[127, 0, 0, 1].into(); clients],
            more: false,
        };
        let kept = within_limits(vec![reported(200_000), reported(MAX_CLIENTS)]);
        assert!(kept[0].clients.capacity() < 2 * MAX_CLIENTS);
        assert!(kept[0].more, "some were omitted");
        assert_eq!(kept[1], reported(MAX_CLIENTS));
    }

    #[test]
    fn own_attacher_waits_for_slow_server() {
        let (ours, servers) = UnixStream::pair().unwrap();
        let read: ReadAuthority = Box::new(|| Err(ConfigErrors(Vec::new())));
        let attacher = thread::spawn(move || super::super::serve(&ours, &read));
        // Longer than a server may take that connects to a service.
        thread::sleep(TIMEOUT + Duration::from_millis(200));
        send(
            &servers,
            &Request {
                layout: LAYOUT_VERSION + 1,
                listen: Vec::new(),
            },
        )
        .unwrap();
        assert_eq!(receive_descriptors(&servers).unwrap().len(), 0);
        let response = Lines::default().next(&servers).unwrap();
        assert!(matches!(response, Response::Refused(why) if why.contains("layout")));
        attacher.join().unwrap().unwrap();
    }
}
