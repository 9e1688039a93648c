//! Handles signals. Reports the server's state to systemd (`sd_notify(3)`) if its unit has `Type=notify`; with
//! `WatchdogSec` it restarts a server whose loop hangs. Keeps files that a privileged command opened for the
//! service (`FileDescriptorStoreMax`).

use std::{
    fs::File,
    io,
    os::fd::{AsFd as _, FromRawFd as _},
};

use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::debug;

/// Notifies the service manager, if there is one, that the server is in this phase.
pub(super) fn notify(state: NotifyState<'_>, phase: &str) {
    if let Err(error) = sd_notify::notify(false, &[state]) {
        debug!("cannot tell systemd (sd_notify) that the server is {phase}: {error}");
    }
}

/// Gives open files to the service manager, which hands them to the service's main process by name.
pub(super) fn keep_files<const N: usize>(names: [&str; N], files: [Option<File>; N]) {
    for (name, file) in names.into_iter().zip(files) {
        // Those of an earlier start would otherwise fill the store.
        let mut result = sd_notify::notify(
            false,
            &[NotifyState::FdStoreRemove, NotifyState::FdName(name)],
        );
        if let Some(file) = &file {
            let state = [NotifyState::FdStore, NotifyState::FdName(name)];
            result =
                result.and_then(|()| sd_notify::notify_with_fds(false, &state, &[file.as_fd()]));
        }
        if let Err(error) = result {
            eprintln!("bosh-dns-xdp: cannot hand {name} to systemd (sd_notify): {error}");
        }
    }
}

/// Returns the files that the service manager kept under these names. Must be called once.
pub(super) fn handed_files<const N: usize>(names: [&str; N]) -> [Option<File>; N] {
    let handed: Vec<_> = sd_notify::listen_fds_with_names(false)
        .into_iter()
        .flatten()
        .collect();
    names.map(|wanted| {
        let (number, _) = handed.iter().find(|(_, name)| name == wanted)?;
        // SAFETY: the service manager opened this descriptor for this process, and nothing else uses it.
        Some(unsafe { File::from_raw_fd(*number) })
    })
}

//----------- Signals -----------------------------------------------------------

/// The signals that the server handles.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    on_hangup: OnHangup,
}

/// Meaning of SIGHUP for this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnHangup {
    /// Reload the configuration and every file, as services do.
    #[default]
    Reload,
    /// End with the terminal.
    End,
}

/// Request made by a signal.
pub(super) enum SignalRequest {
    /// Shut down; holds the signal's name.
    End(&'static str),
    /// Reload the configuration and every file.
    Reload,
}

impl Signals {
    pub(super) fn new(on_hangup: OnHangup) -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            on_hangup,
        })
    }

    pub(super) async fn next(&mut self) -> SignalRequest {
        tokio::select! {
            _ = self.terminate.recv() => SignalRequest::End("SIGTERM"),
            _ = self.interrupt.recv() => SignalRequest::End("SIGINT"),
            _ = self.hangup.recv() => match self.on_hangup {
                OnHangup::Reload => SignalRequest::Reload,
                OnHangup::End => SignalRequest::End("SIGHUP"),
            },
        }
    }
}
