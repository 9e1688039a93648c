//! Reports the server's state to systemd (`sd_notify(3)`) if its unit has `Type=notify`; with
//! `WatchdogSec` it restarts a server whose loop hangs.

use sd_notify::NotifyState;
use tracing::debug;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The server answers queries.
    Ready,
    /// The main loop is running (watchdog keep-alive).
    Alive,
    /// The server is shutting down.
    Stopping,
}

/// Notifies the service manager, if there is one.
pub(super) fn tell(state: State) {
    let message = match state {
        State::Ready => NotifyState::Ready,
        State::Alive => NotifyState::Watchdog,
        State::Stopping => NotifyState::Stopping,
    };
    if let Err(error) = sd_notify::notify(false, &[message]) {
        debug!("cannot tell systemd (sd_notify) that the server is {state:?}: {error}");
    }
}
