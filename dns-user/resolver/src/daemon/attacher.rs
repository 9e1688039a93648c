//! The root process that attaches programs for an unprivileged server.

use std::{fs::File, io, path::Path, process::ExitCode};

use nix::unistd::User;
use tracing::{error, info};

use super::{RunOptions, listeners::all_addresses, privileges, service_manager};
use dns_core::config::{Config, ConfigError, HookMode};
use dns_fastpath::{Attacher, Authority};
use dns_platform::{
    logs::{Logs, LogsError},
    sandbox::{self, Work},
};

/// Why the attacher did not start, or ended.
#[derive(Debug, thiserror::Error)]
enum AttacherError {
    /// A required file is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// `xdp.attach_socket` is not set: the server attaches its own programs.
    #[error("{0}: xdp.attach_socket: is missing; with this configuration the server attaches by itself")]
    NotWanted(String),
    /// The fast path is disabled.
    #[error("{0}: xdp: is switched off (xdp.enabled, xdp.mode)")]
    Off(String),
    /// The user does not exist.
    #[error("xdp.user, xdp.attach_user: there is no user {0:?}; allowed is a name of /etc/passwd")]
    NoSuchUser(String),
    /// The attach socket cannot be bound.
    #[error("xdp.attach_socket: {0}")]
    Socket(io::Error),
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

/// Attaches programs for servers with this configuration until killed; attached programs stay.
pub fn attach(path: &Path, options: RunOptions) -> ExitCode {
    let problem = match start(path, options) {
        Ok(problem) => AttacherError::Socket(problem),
        // A restart by the supervisor would not help.
        Err(problem @ (AttacherError::NotWanted(_) | AttacherError::Off(_))) => {
            eprintln!("bosh-dns-xdp: nothing to do: {}", dns_core::terminal::lines(&problem.to_string()));
            return ExitCode::SUCCESS;
        }
        Err(problem) => problem,
    };
    error!("{problem}");
    eprintln!("bosh-dns-xdp: {}", dns_core::terminal::lines(&problem.to_string()));
    ExitCode::FAILURE
}

/// Serves attach requests; returns only with the error that ended it.
fn start(path: &Path, options: RunOptions) -> Result<io::Error, AttacherError> {
    let config = dns_platform::files::load_config(path)?.config;
    let xdp = &config.xdp;
    let file = || path.display().to_string();
    let socket = xdp.attach_socket.as_ref().ok_or_else(|| AttacherError::NotWanted(file()))?;
    if !xdp.enabled || xdp.mode == HookMode::Off {
        return Err(AttacherError::Off(file()));
    }
    let known = |name: &String| {
        User::from_name(name).ok().flatten().ok_or_else(|| AttacherError::NoSuchUser(name.clone()))
    };
    let own = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    let ids = |user: &User| (user.uid.as_raw(), user.gid.as_raw());
    let server = xdp.user.as_ref().map(known).transpose()?.as_ref().map_or(own, ids);
    let attach_user = xdp.attach_user.as_ref().map(known).transpose()?;
    // The folder may belong to a server that attached by itself before, or have been prepared by a
    // service manager (`prepare-pins`).
    let owner = attach_user.as_ref().map_or(own, ids);
    match dns_fastpath::prepare_pins(&xdp.bpffs, Some(owner)) {
        Err(problem) if nix::unistd::geteuid().is_root() => return Err(AttacherError::Pins(problem)),
        // If this failed, pinning reports the consequences.
        Ok(()) | Err(_) => {}
    }
    let attacher = Attacher::bind(socket, server.0, server.1).map_err(AttacherError::Socket)?;
    let first = authority(&config)?;
    privileges::keep_for_attaching(attach_user.as_ref())?;
    sandbox::enter(Work::Attach).map_err(AttacherError::Sandbox)?;
    let logs = Logs::init(&config.logging, options.log_format)?;
    info!("attacher ready at {}", socket.display());
    service_manager::tell(service_manager::State::Ready);
    let path = path.to_owned();
    let ended = attacher.run(Box::new(move || match dns_platform::files::load_config(&path) {
        Ok(loaded) => authority(&loaded.config),
        // Only root may read the file: keep the authority loaded at start.
        Err(_) if File::open(&path).is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied) => {
            Ok(first.clone())
        }
        Err(problem) => Err(problem),
    }));
    logs.flush();
    Ok(ended)
}

/// Returns the addresses permitted by the configuration and its addresses files.
fn authority(config: &Config) -> Result<Authority, ConfigError> {
    let further = dns_platform::files::read_addresses(&config.addresses_files_glob)?;
    let listen = all_addresses(config.listen, &further);
    Ok(Authority { xdp: config.xdp.clone(), main: config.listen, listen })
}

/// Creates the pin folder on a BPF file system and gives it to `user`, for a service that does not
/// start as root.
pub fn prepare_pins(path: &Path, user: &str) -> ExitCode {
    let prepare = || -> Result<(), AttacherError> {
        let xdp = dns_platform::files::load_config(path)?.config.xdp;
        let found = User::from_name(user).ok().flatten();
        let user = found.ok_or_else(|| AttacherError::NoSuchUser(user.to_owned()))?;
        let owner = (user.uid.as_raw(), user.gid.as_raw());
        dns_fastpath::prepare_pins(&xdp.bpffs, Some(owner)).map_err(AttacherError::Pins)
    };
    match prepare() {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("bosh-dns-xdp: {}", dns_core::terminal::lines(&problem.to_string()));
            ExitCode::FAILURE
        }
    }
}
