//! Parts that `bosh-dns-sync`, `bosh-dns-publish` and `bosh-dns-identity` share; the server uses only
//! [`shell::print_parse_error`] and [`shell::parse`].
//!
//! * [`shell`]: the commands `man` and `completions`, output, parsing and errors.
//! * [`server`]: an HTTP server that idle clients cannot block.
//! * [`ended`]: the signals that end a program.

pub mod server;
pub mod shell;

/// Waits for SIGTERM or SIGINT.
pub async fn ended() {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut terminate), Ok(mut interrupt)) =
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        // Without handlers, the default action of the signals ends the process.
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}
