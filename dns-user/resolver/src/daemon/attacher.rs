//! The process of root's that attaches programs for a server without privileges.

use std::{io, path::Path, process::ExitCode};

use nix::unistd::User;
use tracing::{error, info};

use super::{RunOptions, privileges};
use dns_core::config::{ConfigError, HookMode};
use dns_fastpath::Attacher;
use dns_platform::logs::{Logs, LogsError};

/// Why the attacher did not start, or ended.
#[derive(Debug, thiserror::Error)]
enum AttacherError {
    /// A file that has to be right is not.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The configuration has nobody ask for it.
    #[error("{0}: xdp.attach_socket: is missing; the server of this configuration attaches by itself")]
    NotWanted(String),
    /// The configuration wants no programs.
    #[error("{0}: xdp: is switched off (xdp.enabled, xdp.mode)")]
    Off(String),
    /// The user database does not know it.
    #[error("xdp.user: there is no user {0:?}; allowed is a name of /etc/passwd")]
    NoSuchUser(String),
    /// The socket cannot be had.
    #[error("xdp.attach_socket: {0}")]
    Socket(io::Error),
    /// The folder of pins cannot be had.
    #[error("xdp.bpffs: {0}")]
    Pins(io::Error),
    /// Capabilities cannot be given up.
    #[error(transparent)]
    Privileges(#[from] privileges::PrivilegesError),
    /// Logging does not work.
    #[error("logging: {0}")]
    Logs(#[from] LogsError),
}

/// Attaches for the servers of this configuration until it is killed; what is attached stays then.
pub fn attach(path: &Path, options: RunOptions) -> ExitCode {
    let problem = match start(path, options) {
        Ok(problem) => AttacherError::Socket(problem),
        Err(problem) => problem,
    };
    error!("{problem}");
    eprintln!("bosh-dns-xdp: {}", dns_core::terminal::lines(&problem.to_string()));
    ExitCode::FAILURE
}

/// The work; why it ended.
fn start(path: &Path, options: RunOptions) -> Result<io::Error, AttacherError> {
    let config = dns_platform::files::load_config(path)?.config;
    let xdp = &config.xdp;
    let file = || path.display().to_string();
    let socket = xdp.attach_socket.as_ref().ok_or_else(|| AttacherError::NotWanted(file()))?;
    if !xdp.enabled || xdp.mode == HookMode::Off {
        return Err(AttacherError::Off(file()));
    }
    let (user, group) = match &xdp.user {
        Some(name) => {
            let user = User::from_name(name).ok().flatten();
            let user = user.ok_or_else(|| AttacherError::NoSuchUser(name.clone()))?;
            (user.uid.as_raw(), user.gid.as_raw())
        }
        None => (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw()),
    };
    // A server that attached by itself may have been the folder's owner.
    let own = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    dns_fastpath::prepare_pins(&xdp.bpffs, Some(own)).map_err(AttacherError::Pins)?;
    let attacher = Attacher::bind(socket, user, group).map_err(AttacherError::Socket)?;
    privileges::keep_for_attaching()?;
    let logs = Logs::init(&config.logging, options.log_format)?;
    info!("waiting at {} for servers, to load and attach their programs", socket.display());
    let path = path.to_owned();
    let ended = attacher.run(Box::new(move || {
        let config = dns_platform::files::load_config(&path)?.config;
        Ok((config.xdp, config.listen))
    }));
    logs.flush();
    Ok(ended)
}
