//! The control socket: one JSON object per line, one reply per line.

use std::{
    fs,
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::{
    profile::{Container, Guid},
    rotator::Status,
};

/// Maximum length of a command in bytes.
const LONGEST_COMMAND: u64 = 1 << 20;

/// Maximum time that a client may stay idle.
const PATIENCE: Duration = Duration::from_secs(10);

/// A command for a rotator.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "lowercase", deny_unknown_fields)]
pub enum Command {
    /// Create an identity; the reply is sent once its first pair is written.
    Create {
        /// Description of the new identity.
        container: Container,
    },
    /// Change the description of an identity.
    Update {
        /// Description that replaces the current one.
        container: Container,
    },
    /// Remove an identity and its files.
    Destroy {
        /// Id of the identity to remove.
        guid: Guid,
    },
    /// Return the state of all identities.
    Status,
}

/// The reply to a command.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reply {
    /// The command took effect.
    Done,
    /// The state of all identities.
    Status(Box<Status>),
    /// The command failed: cause and remedy.
    Error(String),
}

/// Error of the control socket.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct ControlError {
    path: PathBuf,
    problem: String,
}

/// Serves commands until the process ends; `execute` runs each.
pub fn serve(
    path: &Path,
    execute: impl Fn(Command) -> Reply + Clone + Send + 'static,
) -> Result<(), ControlError> {
    let failed = |problem: String| ControlError { path: path.to_owned(), problem };
    if UnixStream::connect(path).is_ok() {
        return Err(failed("another rotator serves this socket; stop it or choose another path".to_owned()));
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error.to_string())),
        _ => {}
    }
    let listener = UnixListener::bind(path)
        .map_err(|error| failed(format!("{error}; create its folder, writable for this user")))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))
        .map_err(|error| failed(error.to_string()))?;
    let accept = move || {
        for stream in listener.incoming() {
            match stream {
                Ok(stream) => {
                    let execute = execute.clone();
                    thread::spawn(move || {
                        if let Err(error) = answer(&stream, execute) {
                            tracing::debug!(%error, "control connection ended");
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "control socket cannot accept; retrying");
                    thread::sleep(Duration::from_millis(100));
                }
            }
        }
    };
    let spawned = thread::Builder::new().name("control".to_owned()).spawn(accept);
    spawned.map(|_| ()).map_err(|error| failed(error.to_string()))
}

fn answer(stream: &UnixStream, execute: impl Fn(Command) -> Reply) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = String::new();
        if (&mut reader).take(LONGEST_COMMAND).read_line(&mut line)? == 0 {
            return Ok(());
        }
        let reply = match serde_json::from_str(&line) {
            Ok(command) => execute(command),
            Err(error) => Reply::Error(format!("cannot parse the command: {error}")),
        };
        let mut text = serde_json::to_string(&reply)?;
        text.push('\n');
        (&mut &*stream).write_all(text.as_bytes())?;
    }
}

/// Sends one command to a rotator.
pub fn send(path: &Path, command: &Command) -> Result<Reply, ControlError> {
    let failed = |problem: String| ControlError { path: path.to_owned(), problem };
    let exchange = || {
        let mut stream = UnixStream::connect(path)?;
        let mut text = serde_json::to_string(command)?;
        text.push('\n');
        stream.write_all(text.as_bytes())?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        Ok(line)
    };
    let line = exchange()
        .map_err(|error: io::Error| failed(format!("{error}; is `bosh-dns-identity run` running?")))?;
    serde_json::from_str(&line).map_err(|error| failed(format!("cannot parse the reply: {error}")))
}
