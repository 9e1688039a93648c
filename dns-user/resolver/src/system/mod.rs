//! Makes the server the machine's resolver through `/etc/resolv.conf`, with or without resolvconf,
//! or through systemd-resolved. Every change can be undone.

mod resolv_conf;
mod resolved;

pub use self::{resolv_conf::ResolvConf, resolved::Resolved};

use std::{io, process::Command, thread, time::Duration};

use dns_core::config::ConfigErrors;

/// Reasons why the machine does not use the server.
#[derive(Debug, thiserror::Error)]
pub enum SystemError {
    /// A file cannot be read or written.
    #[error("{file}: {problem}")]
    File {
        /// Path of the file.
        file: String,
        /// The error of the system call.
        problem: io::Error,
    },
    /// A program failed or could not be run.
    #[error("{command} failed: {problem}")]
    Command {
        /// The command line that failed.
        command: String,
        /// Its standard error and exit status, or the reason it could not be run.
        problem: String,
    },
    /// Another program manages resolv.conf.
    #[error("{file} is written by {who}: {remedy}")]
    Managed {
        /// Path of resolv.conf.
        file: String,
        /// Name of the other program.
        who: &'static str,
        /// Advice to the operator.
        remedy: &'static str,
    },
    /// The server's configuration cannot be read.
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    /// The runtime could not create a timer or a signal handler.
    #[error("{0}")]
    Runtime(#[from] io::Error),
}

/// Maximum number of runs of a program that must succeed before this process ends.
const ATTEMPTS: u32 = 20;

/// Pause between two runs.
const PAUSE: Duration = Duration::from_millis(100);

/// Runs a program that undoes a change, while this process is being stopped.
///
/// To stop a unit, systemd sends SIGTERM to all its processes until no new one appears, so a
/// program started then may be killed before it has done anything (observed with systemd 252: the
/// machine kept using a server that was gone). The program is therefore run again.
fn run_while_stopping(program: &str, arguments: &[&str]) -> Result<(), SystemError> {
    for _ in 1..ATTEMPTS {
        if run(program, arguments).is_ok() {
            return Ok(());
        }
        thread::sleep(PAUSE);
    }
    run(program, arguments).map(drop)
}

/// Runs a program to completion; returns its standard output.
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
