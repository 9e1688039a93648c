//! Starts the privileged process that loads and attaches the programs, see `dns-attacher`.

use std::{
    env, io,
    os::{
        fd::OwnedFd,
        unix::{net::UnixStream, process::CommandExt as _},
    },
    path::Path,
    process::Command,
};

use dns_kit::logs::LogFormat;
use nix::sys::signal::{SigHandler, Signal, signal};

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
