//! A DNS server that replies as a function says, and `shadow` beside it.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::Path,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;
use whole_system_tests::{
    namespace::Namespace,
    process::{Kept, wait_until},
    server,
};

/// Time limit of waits for the command.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// Interval at which threads look whether the test is over.
const POLL: Duration = Duration::from_millis(50);

/// Maximum number of open TCP connections of a double.
const MAX_CONNECTIONS: usize = 64;

/// Replies to a message, given whether it came by TCP; `None` sends nothing.
pub(crate) type Replies = Arc<dyn Fn(&[u8], bool) -> Option<Vec<u8>> + Send + Sync>;

/// A running double; its threads end when it is dropped.
pub(crate) struct Double {
    ended: Arc<AtomicBool>,
}

impl Double {
    /// Starts at an address of the current namespace.
    pub(crate) fn start(address: SocketAddr, replies: Replies) -> Result<Self> {
        let ended = Arc::new(AtomicBool::new(false));
        let udp = UdpSocket::bind(address)?;
        udp.set_read_timeout(Some(POLL))?;
        let tcp = TcpListener::bind(address)?;
        tcp.set_nonblocking(true)?;
        let (stop, by_udp) = (ended.clone(), replies.clone());
        thread::spawn(move || serve_udp(&udp, &by_udp, &stop));
        let stop = ended.clone();
        thread::spawn(move || serve_tcp(&tcp, &replies, &stop));
        Ok(Self { ended })
    }
}

impl Drop for Double {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}

fn serve_udp(socket: &UdpSocket, replies: &Replies, ended: &AtomicBool) {
    let mut buffer = vec![0; 65_535];
    while !ended.load(Ordering::Relaxed) {
        let Ok((length, peer)) = socket.recv_from(&mut buffer) else {
            continue;
        };
        if let Some(reply) = replies(&buffer[..length], false) {
            // The client may have left.
            let _ = socket.send_to(&reply, peer);
        }
    }
}

fn serve_tcp(listener: &TcpListener, replies: &Replies, ended: &Arc<AtomicBool>) {
    let open = Arc::new(());
    while !ended.load(Ordering::Relaxed) {
        let Ok((stream, _)) = listener.accept() else {
            thread::sleep(Duration::from_millis(5));
            continue;
        };
        if Arc::strong_count(&open) > MAX_CONNECTIONS {
            continue;
        }
        let (replies, slot) = (replies.clone(), open.clone());
        thread::spawn(move || {
            // Ends with the connection.
            let _ = serve_connection(stream, &replies);
            drop(slot);
        });
    }
}

fn serve_connection(mut stream: TcpStream, replies: &Replies) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    loop {
        let mut length = [0; 2];
        stream.read_exact(&mut length)?;
        let mut message = vec![0; usize::from(u16::from_be_bytes(length))];
        stream.read_exact(&mut message)?;
        if let Some(reply) = replies(&message, true) {
            let length = u16::try_from(reply.len()).map_err(std::io::Error::other)?;
            // Both at once, as servers do.
            stream.write_all(&[&length.to_be_bytes()[..], &reply].concat())?;
        }
    }
}

/// A running `shadow` whose report is wanted.
pub(crate) struct Shadow {
    pub(crate) process: Kept,
    output: std::path::PathBuf,
}

impl Shadow {
    /// Starts the command with these arguments and `--json` inside the namespace. The report is written to `folder`.
    pub(crate) fn start(
        namespace: &Namespace,
        folder: &Path,
        config: &Path,
        arguments: &[&str],
    ) -> Result<Self> {
        let number = fastrand::u32(..);
        let output = folder.join(format!("shadow-{number}.json"));
        let mut command = namespace.command(server::program()?)?;
        command
            .args(["shadow", "--json", "--config"])
            .arg(config)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(std::fs::File::create(&output)?)
            .stderr(std::fs::File::create(output.with_extension("err"))?);
        Ok(Self {
            process: Kept::spawn(&mut command)?,
            output,
        })
    }

    /// Waits until the packet socket is open.
    pub(crate) fn wait_until_watching(&mut self) -> Result<()> {
        self.wait_until_watched_by(1)
    }

    /// Waits until so many packet sockets are open in the namespace.
    pub(crate) fn wait_until_watched_by(&mut self, sockets: usize) -> Result<()> {
        let table = format!("/proc/{}/net/packet", self.process.pid());
        wait_until("the packet socket", PATIENCE, || {
            // The report, or the lack of one, says why it ended.
            if self.process.ended().is_ok_and(|status| status.is_some()) {
                return true;
            }
            let text = std::fs::read_to_string(&table).unwrap_or_default();
            // Protocol ETH_P_ALL and "running": the filter is attached, and packets are received.
            let running = text.lines().skip(1).filter(|line| {
                let fields: Vec<&str> = line.split_whitespace().collect();
                fields.get(3) == Some(&"0003") && fields.get(5) == Some(&"1")
            });
            running.count() >= sockets
        })
    }

    /// Ends the watching and returns exit code and report.
    pub(crate) fn stop(mut self) -> Result<(i32, Value)> {
        // It may have ended.
        let _ = self.process.signal(Signal::SIGINT);
        self.finish()
    }

    /// Waits for the end and returns exit code and report.
    pub(crate) fn finish(&mut self) -> Result<(i32, Value)> {
        let status = self.process.wait(PATIENCE)?;
        let errors = std::fs::read_to_string(self.output.with_extension("err"))?;
        let code = status
            .code()
            .with_context(|| format!("{status}: {errors}"))?;
        let text = std::fs::read_to_string(&self.output)?;
        ensure!(!text.is_empty(), "exit code {code}: {errors}");
        Ok((code, serde_json::from_str(&text)?))
    }
}

/// Returns a number of the report, such as `/verdicts/equal`.
pub(crate) fn count(report: &Value, pointer: &str) -> u64 {
    report
        .pointer(pointer)
        .and_then(Value::as_u64)
        .unwrap_or(u64::MAX)
}

/// Returns the causes of unexplained differences, or the rows of documented ones.
pub(crate) fn causes(report: &Value, is_documented: bool) -> Vec<String> {
    let differences = report["differences"].as_array().into_iter().flatten();
    differences
        .filter(|difference| difference["documented"].is_array() == is_documented)
        .map(|difference| difference["cause"].as_str().unwrap_or_default().to_owned())
        .collect()
}

/// Returns the unexplained differences in full, for the message of a failure.
pub(crate) fn unexplained(report: &Value) -> String {
    let differences = report["differences"].as_array().into_iter().flatten();
    let unexplained: Vec<&Value> = differences
        .filter(|difference| difference["documented"].is_null())
        .collect();
    serde_json::to_string_pretty(&unexplained).unwrap_or_default()
}
