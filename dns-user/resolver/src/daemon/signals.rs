//! The signals that end or reload the server.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

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
                // Handled, since the default action would end the process in the middle of its
                // work.
                OnHangup::End => SignalRequest::End("SIGHUP"),
            },
        }
    }
}
