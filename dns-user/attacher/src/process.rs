//! The process `bosh-dns-xdp attach`: a separate service (`xdp.attach_socket`), or a child process that the server
//! starts.

use std::{
    fs::File,
    io,
    net::SocketAddr,
    os::{fd::AsFd as _, unix::net::UnixStream},
    panic,
    path::{Path, PathBuf},
    process::{self, ExitCode},
};

use anyhow::{Context as _, anyhow};
use nix::{
    sys::signal::{SigSet, Signal},
    unistd::{User, getegid, geteuid},
};
use tracing::{info, warn};

use crate::{
    attach::{pins, rules},
    service::{self, Attacher, Authority, ReadAuthority},
    standby::{self, AttacherProcess},
};
use dns_core::config::{
    Config, ConfigError, HookMode, ParsedFiles, all_addresses, parse::parse_addresses,
};
use dns_kit::{
    accounts::{self, NoAccount},
    files::{bounded, glob::glob},
    logs::{LineLimit, LogFormat, Logs, print_error},
    privileges,
    sandbox::{self, Work},
    service_manager::{self, NotifyState},
    threads::INTERNAL_FAILURE,
};

/// Attaches programs for servers with this configuration until killed, or with `for_parent` for the
/// server that started this process, until its connection ends. Attached programs stay.
pub fn attach(path: &Path, log_format: LogFormat, for_parent: bool) -> ExitCode {
    match start(path, log_format, for_parent) {
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

fn start(path: &Path, log_format: LogFormat, for_parent: bool) -> anyhow::Result<Outcome> {
    let config = dns_kit::files::load_config(path)?.config;
    let xdp = &config.xdp;
    if !xdp.enabled || xdp.mode == HookMode::Off {
        detach_earlier_programs(&config);
        return Ok(Outcome::NothingToDo(
            "xdp: disabled (xdp.enabled, xdp.mode)",
        ));
    }
    let server = account("xdp.user", xdp.user.as_deref())?;
    let attach_user = account("xdp.attach_user", xdp.attach_user.as_deref())?;
    let broken = |error| anyhow!("the connection to the server: {error}");
    let no_socket = |error| anyhow!("xdp.attach_socket: {error}");
    // The folder may belong to an earlier attacher or have been prepared by a service manager
    // (`prepare-pins`).
    let pins = prepare_folder(&xdp.bpffs, ids(attach_user.as_ref()));
    let servers = match (for_parent, &xdp.attach_socket) {
        (true, _) => Servers::Parent(parent().map_err(broken)?),
        (false, Some(socket)) => {
            let (user, group) = ids(server.as_ref());
            Servers::Any(Attacher::bind(socket, user, group).map_err(no_socket)?)
        }
        (false, None) => return Ok(Outcome::NothingToDo(OWN_ATTACHER)),
    };
    // While the process may still read what only root may.
    let first = authority(&config);
    rules::use_lists(service_manager::handed_files(rules::LISTS));
    // Before the filter, which refuses changes of user.
    privileges::keep_for_attaching(attach_user.as_ref())?;
    sandbox::enter(Work::Attach)
        .map_err(|error| anyhow!("cannot install the seccomp filter: {error}"))?;
    // Forks, so it must precede the first thread.
    let servers = match servers {
        Servers::Parent(server) => match standby::fork(server).map_err(broken)? {
            Some(worker) => Servers::Parent(worker),
            None => return Ok(Outcome::Ended),
        },
        Servers::Any(attacher) => Servers::Any(attacher),
    };
    // Every served interface takes a descriptor.
    dns_kit::limits::raise_file_limit();
    end_at_panics();
    let logs =
        Logs::init(&config.logging, log_format).map_err(|error| anyhow!("logging: {error}"))?;
    // Another user gets its folder from `prepare-pins`; each session logs a warning if it cannot pin
    // there.
    if let Err(problem) = pins
        && geteuid().is_root()
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

/// Returns the account that a key names, if it names one.
fn account(key: &'static str, name: Option<&str>) -> Result<Option<User>, NoAccount> {
    name.map(|name| accounts::user(key, name)).transpose()
}

/// Returns the ids of a user and its group, or those of this process.
fn ids(user: Option<&User>) -> (u32, u32) {
    match user {
        Some(user) => (user.uid.as_raw(), user.gid.as_raw()),
        None => (geteuid().as_raw(), getegid().as_raw()),
    }
}

/// Detaches the programs of an earlier server, which would answer from its records until its lease expires.
fn detach_earlier_programs(config: &Config) {
    if let Err(problem) = crate::detach_all(&config.xdp, config.listen) {
        eprintln!("bosh-dns-xdp: cannot detach the programs of an earlier server: {problem}");
    }
}

fn serve_parent(worker: AttacherProcess, read: &ReadAuthority) {
    match service::serve(&worker.server, read) {
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
        Ok(loaded) => Ok(authority(&loaded.config)),
        // Only root may read the file, so the configuration loaded at start stays in use.
        Err(_)
            if File::open(&path)
                .is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied) =>
        {
            Ok(authority_since(&config, &first))
        }
        Err(problem) => Err(problem),
    })
}

/// Returns the authority of the configuration loaded at start, with addresses that its addresses files
/// have gained since.
fn authority_since(config: &Config, first: &Authority) -> Authority {
    let mut current = authority(config);
    // Files that only root may read were read at the start.
    for &address in &first.listen {
        if !current.listen.contains(&address) {
            current.listen.push(address);
        }
    }
    current
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
    let mut files = Vec::new();
    let mut errors = Vec::new();
    // The pattern was checked with the configuration.
    for path in glob(&config.addresses_files_glob).unwrap_or_default() {
        // A FIFO or a device would hold up the start, or never end.
        if bounded::is_special(&path) {
            continue;
        }
        let name = path.display().to_string();
        match bounded::read(&path) {
            Ok(bytes) => files.push((name, bytes)),
            Err(error) => errors.push(ConfigError::of_file(
                name,
                format!("cannot be read: {error}"),
            )),
        }
    }
    let files = files
        .iter()
        .map(|(name, bytes)| (name.as_str(), bytes.as_slice()));
    let parsed = parse_addresses(files);
    errors.extend(parsed.errors);
    ParsedFiles {
        valid: parsed.valid,
        errors,
    }
}

/// Returns the addresses permitted by the configuration and its addresses files.
fn authority(config: &Config) -> Authority {
    let ParsedFiles { valid, errors } = addresses(config);
    // Read for each message that a server sends about its addresses.
    static LIMIT: LineLimit = LineLimit::new();
    for error in errors {
        if let Some(suppressed) = LIMIT.admit_any() {
            warn!(suppressed, "{error}; the other addresses files are used");
        }
    }
    Authority {
        xdp: config.fast_path(),
        main: config.listen,
        listen: all_addresses(config.listen, &valid),
    }
}

/// Creates the folder of pins, on a bpffs that is mounted if necessary, and gives the folder and its content
/// to a user. Must be called before privileges are dropped, because mounting needs CAP_SYS_ADMIN.
fn prepare_folder(bpffs: &Path, (uid, gid): (u32, u32)) -> io::Result<()> {
    pins::ensure_bpffs(bpffs)?;
    pins::hand_over(bpffs, uid, gid)
}

/// Creates the pin folder on a BPF file system and gives it to `user`, for a service that does not
/// start as root.
pub fn prepare_pins(path: &Path, user: &str) -> ExitCode {
    match prepare_for_service(path, user) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => fail(&problem),
    }
}

fn prepare_for_service(path: &Path, user: &str) -> anyhow::Result<()> {
    let xdp = dns_kit::files::load_config(path)?.config.xdp;
    let found = User::from_name(user).ok().flatten();
    let user = found.with_context(|| {
        format!("user {user:?} does not exist; expected a name from /etc/passwd")
    })?;
    prepare_folder(&xdp.bpffs, ids(Some(&user))).map_err(|error| anyhow!("xdp.bpffs: {error}"))?;
    // The service that follows may not open these.
    service_manager::keep_files(rules::LISTS, rules::open_lists());
    Ok(())
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
