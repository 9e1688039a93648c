//! The privileged process that loads and attaches the programs: a separate service
//! (`xdp.attach_socket`), or a child process that the server starts.

use std::{
    env,
    fs::File,
    io::{self, Read as _, Write as _},
    net::SocketAddr,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::{net::UnixStream, process::CommandExt as _},
    },
    panic,
    path::{Path, PathBuf},
    process::{self, Command, ExitCode},
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::{SigHandler, SigSet, Signal, signal},
    unistd::{ForkResult, User, fork},
};
use sd_notify::NotifyState;
use tracing::{info, warn};

use super::{
    INTERNAL_FAILURE, RunOptions, followed_file::Sources, listeners::all_addresses, privileges,
    service_manager,
};
use crate::accounts;
use dns_core::config::{Config, ConfigErrors, HookMode, ParsedFiles, parse::parse_addresses};
use dns_fastpath::{Attacher, Authority, ReadAuthority};
use dns_kit::{
    logs::{LogFormat, Logs, print_error},
    sandbox::{self, Work},
};

/// Starts the attacher of a server with this configuration as a child process, and returns the
/// connection on which it, and after a kill its successor, offers itself. All of them end with the server.
///
/// Must be called before the server gives up its privileges.
pub(super) fn spawn(path: &Path, log_format: LogFormat) -> io::Result<UnixStream> {
    let (ours, attachers) = UnixStream::pair()?;
    // Use the path of the program, so that the process has its name.
    let program = env::current_exe().ok().filter(|path| path.exists());
    Command::new(program.as_deref().unwrap_or(Path::new("/proc/self/exe")))
        .arg0("bosh-dns-xdp")
        .args([
            "attach",
            "--parent",
            "--log-format",
            log_format.name(),
            "--config",
        ])
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
    match start(path, options, for_parent) {
        Ok(Outcome::Ended) => ExitCode::SUCCESS,
        // A restart would not help.
        Ok(Outcome::NothingToDo(why)) => {
            let file = path.display();
            eprintln!(
                "bosh-dns-xdp: nothing to do: {}",
                dns_core::terminal::lines(&format!("{file}: {why}"))
            );
            ExitCode::SUCCESS
        }
        Err(problem) => fail(&problem),
    }
}

fn fail(problem: &anyhow::Error) -> ExitCode {
    print_error("bosh-dns-xdp", &problem.to_string());
    ExitCode::FAILURE
}

enum Outcome {
    Ended,
    /// The configuration asks for no attacher of this kind.
    NothingToDo(&'static str),
}

const OWN_ATTACHER: &str =
    "xdp.attach_socket: is missing; with this configuration the server starts its own attacher";

/// The servers for which the attacher works.
enum Servers<S> {
    /// All servers that connect to a socket.
    Any(Attacher),
    /// The server that started this process.
    Parent(S),
}

fn start(path: &Path, options: RunOptions, for_parent: bool) -> anyhow::Result<Outcome> {
    let config = dns_kit::files::load_config(path)?.config;
    let xdp = &config.xdp;
    if !xdp.enabled || xdp.mode == HookMode::Off {
        detach_earlier_programs(&config);
        return Ok(Outcome::NothingToDo(
            "xdp: disabled (xdp.enabled, xdp.mode)",
        ));
    }
    let own = (
        nix::unistd::geteuid().as_raw(),
        nix::unistd::getegid().as_raw(),
    );
    let ids = |user: &User| (user.uid.as_raw(), user.gid.as_raw());
    let known = |key, name: &Option<String>| {
        name.as_ref()
            .map(|name| accounts::user(key, name))
            .transpose()
    };
    let server = known("xdp.user", &xdp.user)?.as_ref().map_or(own, ids);
    let attach_user = known("xdp.attach_user", &xdp.attach_user)?;
    let broken = |error| anyhow!("the connection to the server: {error}");
    let no_socket = |error| anyhow!("xdp.attach_socket: {error}");
    // The folder may belong to an earlier attacher or have been prepared by a service manager
    // (`prepare-pins`).
    let pins = dns_fastpath::prepare_pins(&xdp.bpffs, Some(attach_user.as_ref().map_or(own, ids)));
    let servers = match (for_parent, &xdp.attach_socket) {
        (true, _) => Servers::Parent(parent().map_err(broken)?),
        (false, Some(socket)) => {
            Servers::Any(Attacher::bind(socket, server.0, server.1).map_err(no_socket)?)
        }
        (false, None) => return Ok(Outcome::NothingToDo(OWN_ATTACHER)),
    };
    let first = authority(&config)?;
    dns_fastpath::use_rule_lists(service_manager::handed_files(dns_fastpath::RULE_LISTS));
    privileges::keep_for_attaching(attach_user.as_ref())?;
    sandbox::enter(Work::Attach)
        .map_err(|error| anyhow!("cannot install the seccomp filter: {error}"))?;
    // Forks, so it must precede the first thread.
    let servers = match servers {
        Servers::Parent(server) => match fork_standby(server).map_err(broken)? {
            Some(worker) => Servers::Parent(worker),
            None => return Ok(Outcome::Ended),
        },
        Servers::Any(attacher) => Servers::Any(attacher),
    };
    // Every served interface takes a descriptor.
    dns_kit::limits::raise_file_limit();
    end_at_panics();
    let logs = Logs::init(&config.logging, options.log_format)
        .map_err(|error| anyhow!("logging: {error}"))?;
    if let Err(problem) = pins
        && nix::unistd::geteuid().is_root()
    {
        warn!("xdp.bpffs: {problem}: programs are detached when their process ends");
    }
    let read = authority_reader(path.to_owned(), config.clone(), first);
    let ended = match servers {
        Servers::Parent(worker) => {
            serve_parent(worker, &read);
            Ok(Outcome::Ended)
        }
        Servers::Any(attacher) => {
            let socket = xdp.attach_socket.as_deref().unwrap_or(Path::new(""));
            info!("attacher ready at {}", socket.display());
            service_manager::notify(NotifyState::Ready, "Ready");
            Err(no_socket(attacher.run(read)))
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
    match dns_fastpath::serve(&worker.server, read) {
        Ok(()) => worker.finish(),
        // If the server is still there, the standby process replaces this one.
        Err(problem) => warn!(
            "connection to the server lost: {problem}; its programs stay attached and answer until its lease expires"
        ),
    }
}

/// Returns a function that reads the current authority from the configuration at `path`; `config` is the
/// one loaded at start, and `first` its authority.
fn authority_reader(path: PathBuf, config: Config, first: Authority) -> ReadAuthority {
    Box::new(move || match dns_kit::files::load_config(&path) {
        Ok(loaded) => authority(&loaded.config),
        // Only root may read the file, so the configuration loaded at start stays in use.
        Err(_)
            if File::open(&path)
                .is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied) =>
        {
            authority_since(&config, &first)
        }
        Err(problem) => Err(problem),
    })
}

/// Returns the authority of the configuration loaded at start, with addresses that its addresses files
/// have gained since.
fn authority_since(config: &Config, first: &Authority) -> Result<Authority, ConfigErrors> {
    let mut current = authority(config)?;
    // Files that only root may read were read at the start.
    if let (Some(listen), Some(known)) = (&mut current.listen, &first.listen) {
        listen.extend(known);
    }
    Ok(current)
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

/// Reads the addresses files; the result has the errors of invalid ones.
fn addresses(config: &Config) -> ParsedFiles<Vec<SocketAddr>> {
    Sources::of(config)
        .addresses
        .read()
        .parse(|files| parse_addresses(files.iter().copied()))
}

/// Returns the addresses permitted by the configuration and its addresses files.
fn authority(config: &Config) -> Result<Authority, ConfigErrors> {
    let ParsedFiles { valid, errors } = addresses(config);
    for error in errors {
        warn!("{error}; the other addresses files are used");
    }
    let listen = Some(all_addresses(config.listen, &valid));
    Ok(Authority {
        xdp: config.fast_path(),
        main: config.listen,
        listen,
    })
}

/// Creates the pin folder on a BPF file system and gives it to `user`, for a service that does not
/// start as root.
pub fn prepare_pins(path: &Path, user: &str) -> ExitCode {
    let prepare = || -> anyhow::Result<()> {
        let xdp = dns_kit::files::load_config(path)?.config.xdp;
        let found = User::from_name(user).ok().flatten();
        let user = found.with_context(|| {
            format!("user {user:?} does not exist; expected a name from /etc/passwd")
        })?;
        let owner = (user.uid.as_raw(), user.gid.as_raw());
        dns_fastpath::prepare_pins(&xdp.bpffs, Some(owner))
            .map_err(|error| anyhow!("xdp.bpffs: {error}"))?;
        // The service that follows may not open these.
        service_manager::keep_files(dns_fastpath::RULE_LISTS, dns_fastpath::open_rule_lists());
        Ok(())
    };
    match prepare() {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => fail(&problem),
    }
}

//----------- Standby -----------------------------------------------------------

/// Time until the first replacement.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// Longest time until a replacement; it doubles each time.
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// Life of an attacher after which its end counts as the first one.
const STABLE: Duration = Duration::from_secs(120);

/// An attacher of the server.
pub(super) struct AttacherProcess {
    server: UnixStream,
    /// Shows the standby process that this one has ended: the kernel closes it, also after a kill.
    end: UnixStream,
}

impl AttacherProcess {
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
    let mut begun = Instant::now();
    let mut pause = FIRST_PAUSE;
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
        pause = (pause * 2).min(MAX_PAUSE);
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

/// The process whose end was noticed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ended {
    Server,
    Attacher,
    /// Neither, within the time limit.
    Nothing,
}

/// Waits for the end of the server or of the attacher; the server sends nothing on its stream.
fn wait_for_end(
    server: &UnixStream,
    attacher: &UnixStream,
    limit: Option<Duration>,
) -> io::Result<Ended> {
    let end = limit.map(|limit| Instant::now() + limit);
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let timeout = left.map_or(PollTimeout::NONE, |left| {
            PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
        });
        let mut fds =
            [server, attacher].map(|stream| PollFd::new(stream.as_fd(), PollFlags::POLLIN));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_addresses_file_is_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let write =
            |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("a.json", r#"[{"address": "127.0.0.2", "port": 53}]"#);
        write("b.json", "{");
        std::os::unix::fs::symlink("missing", folder.path().join("c.json")).unwrap();
        let text = format!(
            r#"{{"address": "127.0.0.1", "port": 53, "addresses_files_glob": "{}/*.json"}}"#,
            folder.path().display()
        );
        let config = Config::check("config.json", text.as_bytes())
            .1
            .unwrap()
            .config;
        let ParsedFiles { valid, errors } = addresses(&config);
        assert_eq!(valid, [SocketAddr::from(([127, 0, 0, 2], 53))]);
        assert_eq!(errors.len(), 2, "{errors:?}");
    }
}
