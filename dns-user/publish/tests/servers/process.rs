//! Child processes that are killed at the end of their test.

use std::{
    fs::File,
    net::{SocketAddr, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Longest wait for a server to listen.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// A server that is killed when the test ends, also by a panic.
#[derive(Debug)]
pub(crate) struct Server(Child);

impl Server {
    /// Starts a command, with its output in `log`, and waits until `address` accepts connections.
    pub(crate) fn start(command: &mut Command, log: &Path, address: SocketAddr) -> Self {
        let output = File::create(log).unwrap();
        let errors = output.try_clone().unwrap();
        let child = command
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .spawn();
        let mut server = Self(child.unwrap_or_else(|error| panic!("{command:?}: {error}")));
        let begin = Instant::now();
        while TcpStream::connect(address).is_err() {
            let ended = server.0.try_wait().unwrap();
            assert!(
                ended.is_none() && begin.elapsed() < START_TIMEOUT,
                "{command:?} does not listen on {address}: {}",
                std::fs::read_to_string(log).unwrap()
            );
            thread::sleep(Duration::from_millis(20));
        }
        server
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a command to its end, feeding it `input`; returns its output.
pub(crate) fn run(command: &mut Command, input: &str) -> String {
    use std::io::Write as _;
    let spawned = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = spawned.unwrap_or_else(|error| panic!("{command:?}: {error}"));
    child
        .stdin
        .take()
        .unwrap()
        .write_all(input.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    text
}
