//! The control socket: one JSON object per line, one reply per line.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use dns_kit::unix_socket::{self, Access};
use serde::{Deserialize, Serialize};

use crate::{
    profile::{Container, Guid},
    rotator::Status,
};

/// Maximum length of a command in bytes.
const LONGEST_COMMAND: u64 = 1 << 20;

/// Maximum time that a client may stay idle.
const TIMEOUT: Duration = Duration::from_secs(10);

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
    /// Confirm that descriptions of many identities may disappear at once.
    #[serde(rename = "confirm-removals")]
    ConfirmRemovals {
        /// Largest number of identities to remove.
        number: usize,
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

/// Binds the socket, with access for this user only from its creation. To be called before the process
/// starts threads, because the umask changes meanwhile.
pub fn bind(path: &Path) -> Result<UnixListener, ControlError> {
    let failed = |problem: String| ControlError { path: path.to_owned(), problem };
    if UnixStream::connect(path).is_ok() {
        return Err(failed("another rotator serves this socket; stop it or choose another path".to_owned()));
    }
    unix_socket::bind(path, Access { user: None, group: None }, &[])
        .map_err(|error| failed(error.to_string()))
}

/// Serves commands until the process ends; `execute` runs each.
pub fn serve(
    listener: UnixListener,
    execute: impl Fn(Command) -> Reply + Clone + Send + 'static,
) -> io::Result<()> {
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
    thread::Builder::new().name("control".to_owned()).spawn(accept).map(|_| ())
}

fn answer(stream: &UnixStream, execute: impl Fn(Command) -> Reply) -> io::Result<()> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
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
