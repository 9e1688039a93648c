//! Becoming the machine's resolver: by `/etc/resolv.conf`, with or without resolvconf, or by
//! systemd-resolved. What is changed can be put back as it was found.

mod resolv_conf;
mod resolved;

pub use self::{resolv_conf::ResolvConf, resolved::Resolved};

use std::{io, process::Command, thread, time::Duration};

use dns_core::config::ConfigError;

/// Why the machine does not ask the server.
#[derive(Debug, thiserror::Error)]
pub enum SystemError {
    /// A file cannot be read or written.
    #[error("{file}: {problem}")]
    File {
        file: String,
        /// What the kernel said.
        problem: io::Error,
    },
    #[error("{command} failed: {problem}")]
    Command {
        /// As a person would type it.
        command: String,
        problem: String,
    },
    /// Somebody else decides what stands in resolv.conf.
    #[error("{file} is written by {who}: {remedy}")]
    Managed { file: String, who: &'static str, remedy: &'static str },
    /// The server's configuration cannot be read.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The kernel gave no timer or signal.
    #[error("{0}")]
    Runtime(#[from] io::Error),
}

/// How often a program is run that has to succeed before this process ends.
const ATTEMPTS: u32 = 20;

/// How long before it is run again.
const PAUSE: Duration = Duration::from_millis(100);

/// Runs a program that puts something back, while this process is being stopped.
///
/// To stop a unit, systemd sends SIGTERM to all its processes until no new one shows up: a
/// program that is started then may be hit before it has done anything (observed, systemd
/// 252: the machine went on asking a server that was gone). So it is run again.
fn run_while_stopping(program: &str, arguments: &[&str]) -> Result<(), SystemError> {
    for _ in 1..ATTEMPTS {
        if run(program, arguments).is_ok() {
            return Ok(());
        }
        thread::sleep(PAUSE);
    }
    run(program, arguments).map(drop)
}

/// Runs a program to its end; what it printed.
fn run(program: &str, arguments: &[&str]) -> Result<String, SystemError> {
    let failed = |problem: String| SystemError::Command {
        command: format!("{program} {}", arguments.join(" ")),
        problem,
    };
    let output = Command::new(program).args(arguments).output().map_err(|error| failed(error.to_string()))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => {
            Err(failed(format!("{} ({})", String::from_utf8_lossy(&output.stderr).trim(), output.status)))
        }
    }
}
