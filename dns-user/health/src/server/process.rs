//! The health server as a process.

use std::{path::Path, process::ExitCode};

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{HealthServer, HealthServerConfig};
use dns_kit::logs::{LogFormat, Logs, print_error};

/// Runs the health server with the configuration in `file` until SIGTERM or SIGINT. A startup error
/// is written to standard error as one line.
pub fn run(file: &Path, format: LogFormat) -> ExitCode {
    match start(file, format) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_error("bosh-dns-xdp health", &error.to_string());
            ExitCode::FAILURE
        }
    }
}

/// Implements [`run`]; returns `Ok` after a signal.
fn start(file: &Path, format: LogFormat) -> Result<(), Box<dyn std::error::Error>> {
    let config = HealthServerConfig::load(file)?;
    let logs = Logs::init(&config.logging, format)?;
    // One thread: the load is a few handshakes a minute and small answers.
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(2).build()?;
    let result = runtime.block_on(async {
        let (terminate, interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let hangup = signal(SignalKind::hangup())?;
        let server = HealthServer::bind(&config).await?;
        tracing::info!(address = %config.listen, "health server listening");
        server.run(stop(terminate, interrupt, hangup)).await;
        tracing::info!("health server stopping");
        Ok(())
    });
    logs.flush();
    result
}

/// Completes on SIGTERM or SIGINT. SIGHUP is ignored: everything that can change is checked
/// continuously.
async fn stop(mut terminate: Signal, mut interrupt: Signal, mut hangup: Signal) {
    loop {
        tokio::select! {
            _ = terminate.recv() => return,
            _ = interrupt.recv() => return,
            _ = hangup.recv() => {}
        }
    }
}
