//! The signals that mean something to the server.

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::DaemonError;

/// The signals that mean something to us.
pub(super) struct Signals {
    /// SIGTERM: end.
    terminate: Signal,
    /// SIGINT: end.
    interrupt: Signal,
    /// SIGHUP: read everything again.
    hangup: Signal,
}

/// What a signal asks for.
pub(super) enum Asked {
    /// To end; the signal's name.
    End(&'static str),
    /// To read everything again.
    Reload,
}

impl Signals {
    /// Takes them over from their default actions.
    pub(super) fn new() -> Result<Self, DaemonError> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// The next one.
    pub(super) async fn next(&mut self) -> Asked {
        tokio::select! {
            _ = self.terminate.recv() => Asked::End("SIGTERM"),
            _ = self.interrupt.recv() => Asked::End("SIGINT"),
            _ = self.hangup.recv() => Asked::Reload,
        }
    }
}
