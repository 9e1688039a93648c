//! Tells systemd how the server does (`sd_notify(3)`), where it was started by systemd
//! with `Type=notify`: a unit with `WatchdogSec` restarts a server whose loop stands still.

use sd_notify::NotifyState;
use tracing::debug;

/// What is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The server answers queries.
    Ready,
    /// The daemon's loop goes round.
    Alive,
    /// The server is ending.
    Stopping,
}

/// Tells the service manager, if there is one that wants to know.
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
