//! The running server: joins the rooms in order, keeps up with files, ends in order.
//!
//! * `start`, `serve`, `signals`: the start in order; the loop, the end; what ends it.
//! * `upstreams`, `fast_path`: what answers other names; the life of the fast path.
//! * `files`, `records`, `consul`, `sources`, `watch`: what is on disk becomes what is served.
//! * [`domains`]: those that only this server knows, for systemd-resolved.
//! * `listeners`: the sockets, as the addresses files come and go.
//! * `upcheck`: the server asks itself.
//! * `attacher`: the process of root's that attaches for a server without privileges.
//! * `api`: opens the API and the control socket.
//! * `failures`: what becomes of panics.

mod aliases;
mod api;
mod attacher;
pub mod check;
mod consul;
pub mod domains;
mod failures;
mod fast_path;
mod files;
mod listeners;
mod privileges;
mod records;
mod serve;
mod service_manager;
mod settings;
mod signals;
mod sources;
mod start;
pub(crate) mod upcheck;
mod upstreams;
mod watch;

pub use self::{
    aliases::aliases_of_consul,
    attacher::{attach, prepare_pins},
};

use std::{io, path::Path, process::ExitCode};

use tracing::error;

use crate::{ops::api::ControlSocket, server::ServerError};
use dns_core::config::{ConfigError, ControlConfig, HookMode, Loaded};
use dns_health::HealthError;
use dns_platform::{
    logs::{LogFormat, Logs, LogsError},
    sandbox::{self, Work},
    threads::{self, OnPanic},
};

/// Exit code after a part of the server failed from within (a panic): whoever
/// supervises it is to start it again. As `EX_SOFTWARE` of sysexits.h.
const INTERNAL_FAILURE: u8 = 70;

/// How to run.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunOptions {
    /// How log lines look.
    pub log_format: LogFormat,
}

/// Why the server did not start, or ended by itself.
#[derive(Debug, thiserror::Error)]
enum DaemonError {
    /// A file that has to be right is not.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Another user was asked for, in vain.
    #[error(transparent)]
    Privileges(#[from] privileges::PrivilegesError),
    /// The kernel refused the filter of system calls.
    #[error("cannot give up system calls (seccomp): {0}")]
    Sandbox(io::Error),
    /// Logging does not work.
    #[error("logging: {0}")]
    Logs(#[from] LogsError),
    /// The kernel gave no thread or timer.
    #[error("cannot start: {0}")]
    Runtime(#[from] io::Error),
    /// Two metrics of one name: a mistake of ours.
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// Health checks cannot be made.
    #[error(transparent)]
    Health(#[from] HealthError),
    /// A port is not to be had.
    #[error(transparent)]
    Listen(#[from] ServerError),
    /// The sockets were not bound within `timeout`.
    #[error("the sockets were not bound within `timeout` ({0:?})")]
    BindTimeout(std::time::Duration),
    /// The up-check was not answered within `timeout`.
    #[error("the server does not answer its own up-checks within `timeout`: {0}")]
    NotUp(upcheck::UpcheckError),
    /// The up-check was answered once, and is not any more.
    #[error("the server does not answer its own up-checks any more: {0}")]
    Hung(upcheck::UpcheckError),
    /// A part of the server failed from within.
    #[error("{0}")]
    Failed(#[from] failures::Failure),
}

/// Serves until SIGTERM or SIGINT; the process's exit code.
///
/// 0 after an end in order, 1 for whatever an operator can put right (one clear
/// line on standard error), 70 after a failure from within.
pub fn run(path: &Path, options: RunOptions) -> ExitCode {
    let problem = match start(path, options) {
        Ok(()) => return ExitCode::SUCCESS,
        Err(problem) => problem,
    };
    error!("{problem}");
    eprintln!("bosh-dns-xdp: {}", dns_core::terminal::lines(&problem.to_string()));
    match problem {
        DaemonError::Failed(_) => ExitCode::from(INTERNAL_FAILURE),
        _ => ExitCode::FAILURE,
    }
}

/// What has to happen before there is any thread, then the rest.
fn start(path: &Path, options: RunOptions) -> Result<(), DaemonError> {
    let loaded = dns_platform::files::load_config(path)?;
    let xdp = &loaded.config.xdp;
    // While it can still be given to another user.
    let bind =
        |control: &ControlConfig| (control.socket.clone(), ControlSocket::bind(control, xdp.user.as_deref()));
    let control = loaded.config.control.as_ref().map(bind);
    let attaches = xdp.enabled && xdp.mode != HookMode::Off && xdp.attach_socket.is_none();
    if attaches && xdp.user.is_none() {
        // Mounting is over with the system calls given up below; pinning will say what fails.
        let _ = dns_fastpath::prepare_pins(&xdp.bpffs, None);
    }
    privileges::drop_to_user(xdp, attaches)?;
    // What a compromised server could do with files, sockets and threads it can do; nothing else.
    sandbox::enter(if attaches { Work::ServeAndAttach } else { Work::Serve })
        .map_err(DaemonError::Sandbox)?;
    dns_platform::limits::raise_file_limit();
    let logs = Logs::init(&loaded.config.logging, options.log_format)?;
    let failures = failures::Failures::install()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        // A panic loses one task: a request, or a part of the server whose end `serve` notices.
        .on_thread_start(|| threads::adopt(OnPanic::Continue))
        .build()?;
    let result = runtime.block_on(serve(path, loaded, control, &logs, failures));
    // Blocking reads of files may still run; nothing of theirs is needed any more.
    runtime.shutdown_background();
    logs.flush();
    result
}

/// Starts everything in order, serves until a signal, ends in order.
async fn serve(
    path: &Path,
    loaded: Loaded,
    control: Option<api::Control>,
    logs: &Logs,
    mut failures: failures::Failures,
) -> Result<(), DaemonError> {
    // Before anything else: a signal during the start ends us in order as well.
    let mut signals = signals::Signals::new()?;
    let mut daemon = start::start(path, loaded, control, logs, &failures).await?;
    service_manager::tell(service_manager::State::Ready);
    let result = daemon.run(&mut signals, &mut failures).await;
    service_manager::tell(service_manager::State::Stopping);
    daemon.stop().await;
    result
}
