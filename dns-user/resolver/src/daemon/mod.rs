//! The running server: startup, reloads and shutdown of all components.
//!
//! * `start`, `event_loop`: startup, main loop and shutdown.
//! * `signals`: end and reload.
//! * `settings`: config.json.
//! * `upstreams`, `retired`, `fast_path`: routes for non-local names; handlers that records suspend; lifecycle of the
//!   fast path, and renewals of its answers.
//! * `files`, `records`, `consul`, `followed_file`: follow files on disk.
//! * [`domains`]: the domains that only this server answers, for systemd-resolved.
//! * `listeners`: the listening sockets, updated when addresses files change; the API and the control socket.
//! * [`upcheck`]: the self-checks.
//! * `attacher`: starts the privileged process that loads and attaches the programs (`dns-attacher`).
//! * `failures`: handling of panics.

mod attacher;
pub mod check;
mod consul;
pub mod domains;
mod event_loop;
mod failures;
mod fast_path;
mod files;
mod followed_file;
mod listeners;
mod records;
mod retired;
mod settings;
pub mod shadow;
mod signals;
mod start;
pub mod upcheck;
mod upstreams;

pub use self::signals::OnHangup;

use std::{io, path::Path, process::ExitCode};

use anyhow::anyhow;
use tracing::{error, info, warn};

use self::settings::WholeConfig;
use crate::ops::api::bind_control;
use dns_core::config::LogLevel;
use dns_kit::{
    logs::{LogFormat, Logs, print_error},
    privileges,
    sandbox::{self, Work},
    service_manager::{self, NotifyState},
    threads::{self, INTERNAL_FAILURE, OnPanic},
};

/// Options given on the command line.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunOptions {
    /// Format of log lines.
    pub log_format: LogFormat,
    /// Meaning of SIGHUP to a server.
    pub on_hangup: OnHangup,
}

/// Serves until SIGTERM or SIGINT and returns the process's exit code.
///
/// The code is 0 after a graceful shutdown, 1 for errors that an operator can fix, and 70 after an
/// internal failure. The error is one line in the log, or on standard error if there is no log yet.
pub fn run(path: &Path, options: RunOptions) -> ExitCode {
    let mut is_logged = false;
    let problem = match start(path, options, &mut is_logged) {
        Ok(()) => return ExitCode::SUCCESS,
        Err(problem) => problem,
    };
    if !is_logged {
        print_error("bosh-dns-xdp", &problem.to_string());
    }
    if problem.is::<failures::Failure>() {
        ExitCode::from(INTERNAL_FAILURE)
    } else {
        ExitCode::FAILURE
    }
}

/// Performs the steps that must precede the first thread, then runs the server. Sets `is_logged`
/// once errors are written to the log.
fn start(path: &Path, options: RunOptions, is_logged: &mut bool) -> anyhow::Result<()> {
    let config = settings::load_config(path)?;
    let settings = &config.0.config;
    let xdp = &settings.xdp;
    // Must happen while the process may still change the socket's owner.
    let control = settings.control.as_ref().map(|control| {
        let bound = bind_control(control, xdp.user.as_deref());
        (control.socket.clone(), bound)
    });
    let has_own_attacher = xdp.attach_socket.is_none();
    // An earlier server's programs would answer from its records until its lease expires. With a service the
    // server may not detach them itself, see [`fast_path::end_earlier_programs`].
    let earlier =
        (has_own_attacher && !xdp.is_on()).then(|| dns_attacher::detach_all(xdp, settings.listen));
    // Must happen while the process has its capabilities and may execute programs.
    let attacher =
        (has_own_attacher && xdp.is_on()).then(|| attacher::spawn(path, options.log_format));
    privileges::keep_for_serving(xdp.user.as_deref())?;
    // Limits a compromised server to operations on files, sockets and threads.
    sandbox::enter(Work::Serve)
        .map_err(|error| anyhow!("cannot install the seccomp filter: {error}"))?;
    dns_kit::limits::raise_file_limit();
    let logs = Logs::init(&settings.logging, options.log_format)
        .map_err(|error| anyhow!("logging: {error}"))?;
    match earlier {
        Some(Ok(detached)) if detached.links + detached.filters > 0 => {
            info!("programs of an earlier server detached: the fast path is off");
        }
        Some(Err(problem)) => warn!(
            "cannot detach the programs of an earlier server: {problem}; they answer until its lease expires"
        ),
        Some(Ok(_)) | None => {}
    }
    let failures = failures::Failures::install()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        // A panic loses one task: a request, or a component whose end `serve` notices.
        .on_thread_start(|| threads::adopt(OnPanic::Continue))
        .build()
        .map_err(cannot_start)?;
    let result = runtime.block_on(serve(
        path,
        config,
        (control, attacher),
        &logs,
        failures,
        options.on_hangup,
    ));
    // Blocking file reads may still run; their results are no longer needed.
    runtime.shutdown_background();
    if let Err(problem) = &result {
        error!("{problem}");
        *is_logged = logs.levels().of("main") != LogLevel::None;
    }
    logs.flush();
    result
}

fn cannot_start(error: io::Error) -> anyhow::Error {
    anyhow!("cannot start: {error}")
}

async fn serve(
    path: &Path,
    config: WholeConfig,
    (control, attacher): (Option<listeners::Control>, Option<fast_path::OwnAttacher>),
    logs: &Logs,
    mut failures: failures::Failures,
    on_hangup: OnHangup,
) -> anyhow::Result<()> {
    // Installed first, so that a signal during startup also ends the process gracefully.
    let mut signals = signals::Signals::new(on_hangup).map_err(cannot_start)?;
    let mut daemon = start::start(path, config, (control, attacher), logs, &failures).await?;
    service_manager::notify(NotifyState::Ready, "Ready");
    let result = daemon.run(&mut signals, &mut failures).await;
    service_manager::notify(NotifyState::Stopping, "Stopping");
    daemon.stop().await;
    result
}
