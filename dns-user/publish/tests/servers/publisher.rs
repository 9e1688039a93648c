//! The program `bosh-dns-publish` in a folder with its configuration and documents.

use std::{
    fs,
    io::Read as _,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use dns_publish::control;
use nix::{
    pty::{OpenptyResult, Winsize, openpty},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::name_server::{NameServer, SECRET};

/// Longest wait for an effect that needs no further action.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Library of the Debian package `faketime`, which changes the clock of a process.
const FAKETIME: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1";

pub(crate) struct Publisher {
    pub(crate) folder: tempfile::TempDir,
}

/// Result of a command.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) errors: String,
}

/// A running publisher, killed when dropped.
pub(crate) struct Running {
    pub(crate) child: Child,
    pub(crate) folder: PathBuf,
}

impl Publisher {
    pub(crate) fn new() -> Self {
        let publisher = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        fs::create_dir(publisher.path("documents")).unwrap();
        publisher.write(
            "publish.yml",
            "documents: [documents]\nstore: state/store\ncontrol: {socket: control.sock}\n",
        );
        publisher
    }

    /// With the DNS Update Record `bind` for a server.
    pub(crate) fn of(server: &NameServer) -> Self {
        let publisher = Self::new();
        publisher.provider(server, &json!({}));
        publisher
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    /// Writes the DNS Update Record `bind`, with further parameters.
    pub(crate) fn provider(&self, server: &NameServer, more: &Value) {
        self.provider_at(server.address, more);
    }

    /// Writes the DNS Update Record `bind` for a server at an address, with further parameters.
    pub(crate) fn provider_at(&self, server: SocketAddr, more: &Value) {
        let mut record = update_record_at(server);
        let parameters = record["spec"]["external-dns-parameters"]
            .as_object_mut()
            .unwrap();
        parameters.extend(more.as_object().unwrap().clone());
        record["apiVersion"] = "bosh-dns-publish/v1".into();
        record["kind"] = "DNSUpdateRecord".into();
        self.write("documents/bind.json", &record.to_string());
    }

    /// Writes a DNSEndpoint with A records.
    pub(crate) fn endpoints(&self, document: &str, addresses: &[(&str, &str)]) {
        let entries: Vec<Value> = addresses
            .iter()
            .map(|(name, address)| json!({"dnsName": name, "recordTTL": 60, "targets": [address]}))
            .collect();
        let endpoint = json!({
            "apiVersion": "externaldns.k8s.io/v1alpha1",
            "kind": "DNSEndpoint",
            "metadata": {"name": document, "labels": {"dnsprovider": "bind"}},
            "spec": {"endpoints": entries},
        });
        self.write(&format!("documents/{document}.json"), &endpoint.to_string());
    }

    pub(crate) fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bosh-dns-publish"));
        command
            .args(["--config", "publish.yml"])
            .args(arguments.split(' '))
            .current_dir(self.folder.path());
        command
    }

    pub(crate) fn call(&self, arguments: &str) -> Said {
        let output = self.command(arguments).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Said {
            code: output.status.code().unwrap(),
            out: text(output.stdout),
            errors: text(output.stderr),
        }
    }

    /// Runs a command with standard error on a terminal; also returns its output there.
    pub(crate) fn call_on_terminal(&self, arguments: &str) -> (Said, String) {
        let size = Winsize {
            ws_row: 40,
            ws_col: 120,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let OpenptyResult { master, slave } = openpty(Some(&size), None).unwrap();
        let mut command = self.command(arguments);
        command
            .env("TERM", "xterm")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::from(slave));
        let child = command.spawn().unwrap();
        // It holds the other end of the terminal; once that is closed, reading ends with the process.
        drop(command);
        let screen = thread::spawn(move || {
            let mut drawn = Vec::new();
            // Reading a terminal without another end is an error.
            let _ = fs::File::from(master).read_to_end(&mut drawn);
            String::from_utf8_lossy(&drawn).into_owned()
        });
        let output = child.wait_with_output().unwrap();
        let out = String::from_utf8(output.stdout).unwrap();
        let said = Said {
            code: output.status.code().unwrap(),
            out,
            errors: String::new(),
        };
        (said, screen.join().unwrap())
    }

    /// Starts a command that the test stops.
    pub(crate) fn spawn(&self, arguments: &str) -> Child {
        let mut command = self.command(arguments);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    /// Runs a command that must exit with this code.
    pub(crate) fn expect(&self, code: i32, arguments: &str) -> Said {
        let said = self.call(arguments);
        assert_eq!(said.code, code, "{arguments}: {said:?}");
        said
    }

    /// Starts `run` and waits until it answers on its control socket.
    pub(crate) fn start(&self) -> Running {
        self.start_by(self.command("run"))
    }

    /// Starts `run` with a clock that runs faster than the real one.
    pub(crate) fn start_fast(&self, factor: u32) -> Running {
        // The program `faketime` would remain between test and publisher, and fails if a semaphore of an
        // earlier process with the same id was left.
        let mut command = self.command("run");
        command
            .env("LD_PRELOAD", FAKETIME)
            .env("FAKETIME", format!("+0 x{factor}"));
        self.start_by(command)
    }

    fn start_by(&self, mut command: Command) -> Running {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.path("log"))
            .unwrap();
        let child = command.stdin(Stdio::null()).stderr(log).spawn().unwrap();
        let running = Running {
            child,
            folder: self.folder.path().to_owned(),
        };
        running.wait_until("the control socket", || {
            running.ask("GET", "/v2/openapi.json", None).is_some()
        });
        running
    }
}

impl Running {
    /// Sends a request to the control socket; `None` if the publisher does not answer.
    pub(crate) fn ask(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Option<(u16, Value)> {
        let socket = self.folder.join("control.sock");
        let body = body.map(ToString::to_string).unwrap_or_default();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let call = control::call(
            control::TIMEOUT,
            &socket,
            method.parse().unwrap(),
            path,
            body.into(),
        );
        let (status, body) = runtime.block_on(call).ok()?;
        let text = String::from_utf8_lossy(&body).into_owned();
        Some((
            status.as_u16(),
            serde_json::from_str(&text).unwrap_or(Value::String(text)),
        ))
    }

    pub(crate) fn get(&self, path: &str) -> (u16, Value) {
        self.ask("GET", path, None).unwrap()
    }

    pub(crate) fn wait_until(&self, what: &str, is_so: impl Fn() -> bool) {
        let begin = Instant::now();
        while !is_so() {
            assert!(
                begin.elapsed() < TIMEOUT,
                "{what} does not come: {}",
                self.log()
            );
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    pub(crate) fn kill_now(&self) {
        kill(
            Pid::from_raw(self.child.id().cast_signed()),
            Signal::SIGKILL,
        )
        .unwrap();
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends SIGTERM; the process must exit successfully.
    pub(crate) fn stop(mut self) {
        kill(
            Pid::from_raw(self.child.id().cast_signed()),
            Signal::SIGTERM,
        )
        .unwrap();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}: {}", self.log());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The DNS Update Record `bind` for a server, in the API's form.
pub(crate) fn update_record(server: &NameServer) -> Value {
    update_record_at(server.address)
}

fn update_record_at(server: SocketAddr) -> Value {
    json!({
        "metadata": {"name": "bind"},
        "spec": {
            "provider": "rfc2136",
            "external-dns-parameters": {
                "rfc2136-host": server.to_string(),
                "rfc2136-zone": "example.org",
                "rfc2136-tsig-keyname": "publisher",
                "rfc2136-tsig-secret": SECRET,
                "rfc2136-tsig-secret-alg": "hmac-sha256",
                "txt-owner-id": "me",
            },
        },
    })
}

/// Returns the lines of an existing file.
pub(crate) fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}
