//! The privileged process that loads and attaches the programs: a separate service
//! (`xdp.attach_socket`), or a child process that the server starts.

use std::{
    env,
    fs::File,
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::{net::UnixStream, process::CommandExt as _},
    },
    panic,
    path::{Path, PathBuf},
    process::{self, Command, ExitCode},
    time::{Duration, Instant},
};

use clap::ValueEnum as _;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::{SigHandler, SigSet, Signal, signal},
    unistd::{ForkResult, User, fork},
};
use tracing::{info, warn};

use super::{INTERNAL_FAILURE, RunOptions, listeners::all_addresses, privileges, service_manager};
use crate::system::{self, NoAccount};
use dns_core::config::{Config, ConfigErrors, HookMode, ParsedFiles};
use dns_fastpath::{Attacher, Authority, ReadAuthority};
use dns_kit::{
    logs::{LogFormat, Logs, LogsError, print_error},
    sandbox::{self, Work},
};

/// The reason why the attacher did not start, or ended.
#[derive(Debug, thiserror::Error)]
enum AttacherError {
    /// A required file is invalid.
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    /// `xdp.attach_socket` is not set: the server starts its own attacher.
    #[error("{0}: xdp.attach_socket: is missing; with this configuration the server starts its own attacher")]
    NotWanted(String),
    /// The fast path is disabled.
    #[error("{0}: xdp: disabled (xdp.enabled, xdp.mode)")]
    Off(String),
    /// A configured user does not exist.
    #[error(transparent)]
    NoAccount(#[from] NoAccount),
    /// The user given to `prepare-pins` does not exist.
    #[error("user {0:?} does not exist; expected a name from /etc/passwd")]
    NoSuchUser(String),
    /// The attach socket cannot be bound.
    #[error("xdp.attach_socket: {0}")]
    Socket(io::Error),
    /// The connection to the server that started this process is missing or broken, or the process
    /// that replaces a killed attacher cannot be forked.
    #[error("the connection to the server: {0}")]
    Parent(io::Error),
    /// The pin folder cannot be created.
    #[error("xdp.bpffs: {0}")]
    Pins(io::Error),
    /// The other capabilities could not be dropped.
    #[error(transparent)]
    Privileges(#[from] privileges::PrivilegesError),
    /// The kernel rejected the seccomp filter.
    #[error("cannot install the seccomp filter: {0}")]
    Sandbox(io::Error),
    /// Logging could not be set up.
    #[error("logging: {0}")]
    Logs(#[from] LogsError),
}

/// Starts the attacher of a server with this configuration as a child process, and returns the
/// connection on which it, and after a kill its successor, offers itself. All of them end with the server.
///
/// Must be called before the server gives up its privileges.
pub(super) fn spawn(path: &Path, log_format: LogFormat) -> io::Result<UnixStream> {
    let (ours, attachers) = UnixStream::pair()?;
    let log_format = log_format.to_possible_value().ok_or(io::ErrorKind::InvalidInput)?;
    // Use the path of the program, so that the process has its name.
    let program = env::current_exe().ok().filter(|path| path.exists());
    Command::new(program.as_deref().unwrap_or(Path::new("/proc/self/exe")))
        .arg0("bosh-dns-xdp")
        .args(["attach", "--parent", "--log-format", log_format.get_name(), "--config"])
        .arg(path)
        .stdin(OwnedFd::from(attachers))
        // Only the server notifies the service manager.
        .env_remove("NOTIFY_SOCKET")
        .env_remove("WATCHDOG_USEC")
        .spawn()?;
    // The seccomp filter does not permit wait4(2), so the kernel must reap the child. SAFETY:
    // SIG_IGN installs no handler.
    unsafe { signal(Signal::SIGCHLD, SigHandler::SigIgn)? };
    Ok(ours)
}

/// Attaches programs for servers with this configuration until killed, or with `for_parent` for the
/// server that started this process, until its connection ends. Attached programs stay.
pub fn attach(path: &Path, options: RunOptions, for_parent: bool) -> ExitCode {
    let problem = match start(path, options, for_parent) {
        Ok(()) => return ExitCode::SUCCESS,
        // A restart would not help.
        Err(problem @ (AttacherError::NotWanted(_) | AttacherError::Off(_))) => {
            eprintln!("bosh-dns-xdp: nothing to do: {}", dns_core::terminal::lines(&problem.to_string()));
            return ExitCode::SUCCESS;
        }
        Err(problem) => problem,
    };
    print_error("bosh-dns-xdp", &problem.to_string());
    ExitCode::FAILURE
}

/// The servers for which the attacher works.
enum Servers<S> {
    /// All servers that connect to a socket.
    Any(Attacher),
    /// The server that started this process.
    Parent(S),
}

fn start(path: &Path, options: RunOptions, for_parent: bool) -> Result<(), AttacherError> {
    let config = dns_kit::files::load_config(path)?.config;
    let xdp = &config.xdp;
    let file = || path.display().to_string();
    if !xdp.enabled || xdp.mode == HookMode::Off {
        detach_earlier_programs(&config);
        return Err(AttacherError::Off(file()));
    }
    let own = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    let ids = |user: &User| (user.uid.as_raw(), user.gid.as_raw());
    let known = |key, name: &Option<String>| name.as_ref().map(|name| system::user(key, name)).transpose();
    let server = known("xdp.user", &xdp.user)?.as_ref().map_or(own, ids);
    let attach_user = known("xdp.attach_user", &xdp.attach_user)?;
    // The folder may belong to an earlier attacher or have been prepared by a service manager
    // (`prepare-pins`).
    let pins = dns_fastpath::prepare_pins(&xdp.bpffs, Some(attach_user.as_ref().map_or(own, ids)));
    let servers = match (for_parent, &xdp.attach_socket) {
        (true, _) => Servers::Parent(parent().map_err(AttacherError::Parent)?),
        (false, Some(socket)) => {
            Servers::Any(Attacher::bind(socket, server.0, server.1).map_err(AttacherError::Socket)?)
        }
        (false, None) => return Err(AttacherError::NotWanted(file())),
    };
    let first = authority(&config)?;
    dns_fastpath::use_rule_lists(service_manager::handed_files(dns_fastpath::RULE_LISTS));
    privileges::keep_for_attaching(attach_user.as_ref())?;
    sandbox::enter(Work::Attach).map_err(AttacherError::Sandbox)?;
    // Forks, so it must precede the first thread.
    let servers = match servers {
        Servers::Parent(server) => match fork_standby(server).map_err(AttacherError::Parent)? {
            Some(worker) => Servers::Parent(worker),
            None => return Ok(()),
        },
        Servers::Any(attacher) => Servers::Any(attacher),
    };
    // Every served interface takes a descriptor.
    dns_kit::limits::raise_file_limit();
    end_at_panics();
    let logs = Logs::init(&config.logging, options.log_format)?;
    if let Err(problem) = pins
        && nix::unistd::geteuid().is_root()
    {
        warn!("xdp.bpffs: {problem}: programs are detached when their process ends");
    }
    let read = authority_reader(path.to_owned(), first);
    let ended = match servers {
        Servers::Parent(worker) => {
            serve_parent(worker, &read);
            Ok(())
        }
        Servers::Any(attacher) => {
            let socket = xdp.attach_socket.as_deref().unwrap_or(Path::new(""));
            info!("attacher ready at {}", socket.display());
            service_manager::notify(service_manager::Phase::Ready);
            Err(AttacherError::Socket(attacher.run(read)))
        }
    };
    logs.flush();
    ended
}

/// Detaches the programs of an earlier server, which would answer from its records until its lease expires.
fn detach_earlier_programs(config: &Config) {
    if let Err(problem) = dns_fastpath::detach_all(&config.xdp, &[config.listen]) {
        eprintln!("bosh-dns-xdp: cannot detach the programs of an earlier server: {problem}");
    }
}

fn serve_parent(worker: AttacherProcess, read: &ReadAuthority) {
    match dns_fastpath::serve(worker.server(), read) {
        Ok(()) => worker.finish(),
        // If the server is still there, the standby process replaces this one.
        Err(problem) => warn!(
            "connection to the server lost: {problem}; its programs stay attached and answer until its lease expires"
        ),
    }
}

/// Returns a function that reads the current authority from the configuration at `path`; `first` is the one
/// loaded at start.
fn authority_reader(path: PathBuf, first: Authority) -> ReadAuthority {
    Box::new(move || match dns_kit::files::load_config(&path) {
        Ok(loaded) => authority(&loaded.config),
        // Only root may read the file, so the authority loaded at start stays in use.
        Err(_) if File::open(&path).is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied) => {
            Ok(first.clone())
        }
        Err(problem) => Err(problem),
    })
}

/// Returns the connection to the server that started this process.
fn parent() -> io::Result<UnixStream> {
    let stream = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    // Fails for anything but a unix socket.
    stream.peer_addr()?;
    // Service managers and terminals send these signals to the whole process group, but the server
    // decides whether the programs stay.
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]);
    signals.thread_block()?;
    Ok(stream)
}

/// Makes a panic end the process: the servers notice that, and attached programs stay.
fn end_at_panics() {
    let print = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        print(panic);
        process::exit(INTERNAL_FAILURE.into());
    }));
}

/// Returns the addresses permitted by the configuration and its addresses files.
fn authority(config: &Config) -> Result<Authority, ConfigErrors> {
    let ParsedFiles { valid, errors } = dns_kit::files::read_addresses(&config.addresses_files_glob)?;
    for error in errors {
        warn!("{error}; the other addresses files are used");
    }
    let listen = Some(all_addresses(config.listen, &valid));
    Ok(Authority { xdp: config.fast_path(), main: config.listen, listen })
}

/// Creates the pin folder on a BPF file system and gives it to `user`, for a service that does not
/// start as root.
pub fn prepare_pins(path: &Path, user: &str) -> ExitCode {
    let prepare = || -> Result<(), AttacherError> {
        let xdp = dns_kit::files::load_config(path)?.config.xdp;
        let found = User::from_name(user).ok().flatten();
        let user = found.ok_or_else(|| AttacherError::NoSuchUser(user.to_owned()))?;
        let owner = (user.uid.as_raw(), user.gid.as_raw());
        dns_fastpath::prepare_pins(&xdp.bpffs, Some(owner)).map_err(AttacherError::Pins)?;
        // The service that follows may not open these.
        service_manager::keep_files(dns_fastpath::RULE_LISTS, dns_fastpath::open_rule_lists());
        Ok(())
    };
    match prepare() {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            print_error("bosh-dns-xdp", &problem.to_string());
            ExitCode::FAILURE
        }
    }
}

//----------- Standby -----------------------------------------------------------

/// Time until the first replacement.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// Longest time until a replacement; it doubles each time.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Life of an attacher after which its end counts as the first one.
const STABLE: Duration = Duration::from_secs(120);

/// An attacher of the server.
pub(super) struct AttacherProcess {
    server: UnixStream,
    /// Shows the standby process that this one has ended: the kernel closes it, also after a kill.
    end: UnixStream,
}

impl AttacherProcess {
    pub(super) fn server(&self) -> &UnixStream {
        &self.server
    }

    /// Declares that this attacher has done its work and needs no replacement.
    pub(super) fn finish(&self) {
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
fn fork_standby(server: UnixStream) -> io::Result<Option<AttacherProcess>> {
    // The seccomp filter does not permit wait4(2), so the kernel must reap attachers. SAFETY: SIG_IGN
    // installs no handler.
    unsafe { signal(Signal::SIGCHLD, SigHandler::SigIgn)? };
    let (worker, mut watched) = offer(&server)?;
    // SAFETY: the process has a single thread.
    if let ForkResult::Parent { .. } = unsafe { fork() }? {
        return Ok(Some(worker));
    }
    drop(worker);
    let (mut begun, mut pause) = (Instant::now(), FIRST_PAUSE);
    loop {
        if wait_for_end(&server, &watched, None)? == Ended::Server || is_finished(&watched) {
            return Ok(None);
        }
        if begun.elapsed() >= STABLE {
            pause = FIRST_PAUSE;
        }
        if wait_for_end(&server, &server, Some(pause))? == Ended::Server {
            return Ok(None);
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
        let (worker, next) = offer(&server)?;
        // SAFETY: as above.
        if let ForkResult::Child = unsafe { fork() }? {
            return Ok(Some(worker));
        }
        (watched, begun) = (next, Instant::now());
    }
}

/// Offers the server a connection to a new attacher; also returns the stream that ends with the attacher.
fn offer(server: &UnixStream) -> io::Result<(AttacherProcess, UnixStream)> {
    let connection = dns_fastpath::offer_connection(server)?;
    let (end, watched) = UnixStream::pair()?;
    Ok((AttacherProcess { server: connection, end }, watched))
}

/// Returns whether the attacher at the other end has declared its end.
fn is_finished(mut watched: &UnixStream) -> bool {
    matches!(watched.read(&mut [0]), Ok(1))
}

/// The process whose end was noticed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ended {
    Server,
    Attacher,
    /// Neither, within the time limit.
    Nothing,
}

/// Waits for the end of the server or of the attacher; the server sends nothing on its stream.
fn wait_for_end(server: &UnixStream, attacher: &UnixStream, limit: Option<Duration>) -> io::Result<Ended> {
    let end = limit.map(|limit| Instant::now() + limit);
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let timeout =
            left.map_or(PollTimeout::NONE, |left| PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX));
        let mut fds = [server, attacher].map(|stream| PollFd::new(stream.as_fd(), PollFlags::POLLIN));
        match poll(&mut fds, timeout) {
            Ok(0) => return Ok(Ended::Nothing),
            Ok(_) => {}
            Err(nix::Error::EINTR) => continue,
            Err(error) => return Err(error.into()),
        }
        let [server, attacher] = fds.map(|fd| fd.any().unwrap_or(false));
        match (server, attacher) {
            (true, _) => return Ok(Ended::Server),
            (false, true) => return Ok(Ended::Attacher),
            (false, false) => {}
        }
    }
}
