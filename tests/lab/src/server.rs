//! The server as a child process.

use std::{
    fs,
    io::{Read as _, Seek as _, SeekFrom},
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use hickory_proto::rr::RecordType;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    client, fleet,
    namespace::Namespace,
    process::{Kept, capture, family, wait_until},
};

/// Up-check name in every configuration.
const UPCHECK: &str = "upcheck.bosh-dns.";

/// Time limit for a line in the log, which may report work of minutes.
const LOGGED: Duration = Duration::from_secs(180);

/// Time limit for a server's first answer.
const FIRST_ANSWER: Duration = Duration::from_secs(180);

/// Longest wait for one of the first answers.
const MAX_PATIENCE: Duration = Duration::from_secs(5);

/// A running server with its own folder.
#[derive(Debug)]
pub struct Server {
    /// The first field, so that it ends before the folder is removed.
    process: Kept,
    /// Listen address of DNS.
    pub address: SocketAddr,
    pub folder: TempDir,
    in_namespace: Option<String>,
    program: PathBuf,
    /// When the process was started.
    pub started: Instant,
}

/// Returns the path of the server: the release build if it exists and is newer, else the debug
/// build.
pub fn program() -> Result<PathBuf> {
    if let Some(named) = std::env::var_os("BOSH_DNS_XDP") {
        return Ok(named.into());
    }
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
    let candidates = ["release", "debug"].map(|profile| target.join(profile).join("bosh-dns-xdp"));
    let newest = candidates
        .into_iter()
        .filter_map(|path| Some((fs::metadata(&path).ok()?.modified().ok()?, path)));
    let newest = newest
        .max()
        .context("the server is not built: run `cargo xtask build`")?;
    Ok(newest.1)
}

/// Returns the path of another program of this workspace, in its debug build.
pub fn companion(name: &str) -> Result<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../target/debug")
        .join(name);
    ensure!(
        path.exists(),
        "{name} is not built: run `cargo build --workspace --bins`"
    );
    Ok(path.canonicalize()?)
}

/// Returns a configuration as bosh-dns's job would write it, with optional features off and all
/// files in `folder`; and with longer time limits, so that the prompt reply of a busy machine counts.
pub fn config(folder: &Path, address: SocketAddr) -> Value {
    json!({
        "address": address.ip(),
        "port": address.port(),
        "log_level": "INFO",
        "recursor_timeout": "10s",
        "request_timeout": "60s",
        "recursor_selection": "serial",
        "records_file": folder.join("records.json"),
        "alias_files_glob": folder.join("aliases/*.json"),
        "handlers_files_glob": folder.join("handlers/*.json"),
        "addresses_files_glob": folder.join("addresses/*.json"),
        "upcheck_domains": [UPCHECK],
        "jobs_dir": folder.join("jobs"),
        "disable_recursors": true,
        "health": {"enabled": false},
        "metrics": {"enabled": false},
        "cache": {"enabled": false},
        // Several tests run servers at a time and share /run.
        "control": {"socket": ""},
    })
}

/// Merges the members of `extra` into `base`, recursing into objects.
pub fn merge(base: &mut Value, extra: &Value) {
    match (base, extra) {
        (Value::Object(base), Value::Object(extra)) => {
            for (key, value) in extra {
                merge(base.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (base, extra) => *base = extra.clone(),
    }
}

/// Creates a server's folder with records and, if given, an alias file.
pub fn folder(records: &[u8], aliases: Option<&[u8]>) -> Result<TempDir> {
    let folder = TempDir::with_prefix("bdx-")?;
    for below in ["aliases", "handlers", "addresses", "jobs"] {
        fs::create_dir(folder.path().join(below))?;
    }
    fs::write(folder.path().join("records.json"), records)?;
    if let Some(aliases) = aliases {
        fs::write(folder.path().join("aliases/aliases.json"), aliases)?;
    }
    Ok(folder)
}

/// Returns records of one group per size, with the names `q-s0.q-g<size>.bosh`.
pub fn records_of_groups(sizes: &[u16]) -> Vec<u8> {
    let instances = sizes.iter().flat_map(|&size| {
        let first = Ipv4Addr::from_bits(0x0a00_0000 + (u32::from(size) << 8));
        (0..size).map(move |index| {
            (
                size.into(),
                Ipv4Addr::from_bits(first.to_bits() + u32::from(index)),
            )
        })
    });
    fleet::records(1, instances)
}

impl Server {
    /// Starts a server on `address` with the files of `folder` and waits until it answers.
    ///
    /// `extra` is merged into [`config`]; without `namespace` the server runs in the test's
    /// namespace.
    pub fn start(
        namespace: Option<&Namespace>,
        folder: TempDir,
        address: SocketAddr,
        extra: &Value,
    ) -> Result<Self> {
        Self::start_prepared(namespace, folder, address, extra, |_| {})
    }

    /// Like [`Self::start`]; `prepare` modifies the command before it runs, such as its environment
    /// or its view of the file system.
    pub fn start_prepared(
        namespace: Option<&Namespace>,
        folder: TempDir,
        address: SocketAddr,
        extra: &Value,
        prepare: impl FnOnce(&mut Command),
    ) -> Result<Self> {
        Self::start_program(program()?, namespace, folder, address, extra, prepare)
    }

    /// Like [`Self::start_prepared`], with another executable than [`program`].
    pub fn start_program(
        program: PathBuf,
        namespace: Option<&Namespace>,
        folder: TempDir,
        address: SocketAddr,
        extra: &Value,
        prepare: impl FnOnce(&mut Command),
    ) -> Result<Self> {
        let mut config = config(folder.path(), address);
        // Named, so that interfaces are attached before any query arrives.
        merge(
            &mut config,
            &json!({"xdp": {"interfaces": ["lo", "srv", "late"]}}),
        );
        merge(&mut config, extra);
        let config_file = folder.path().join("config.json");
        fs::write(&config_file, serde_json::to_vec_pretty(&config)?)?;
        let started = Instant::now();
        let process = spawn(&program, namespace, folder.path(), prepare)?;
        let in_namespace = namespace.map(|namespace| namespace.name().to_owned());
        let mut server = Self {
            process,
            address,
            folder,
            in_namespace,
            program,
            started,
        };
        server.wait_until_ready(namespace)?;
        Ok(server)
    }

    /// Starts the program again on the same folder, after it has ended.
    pub fn restart(&mut self, namespace: Option<&Namespace>) -> Result<()> {
        self.restart_prepared(namespace, |_| {})
    }

    /// Like [`Self::restart`]; `prepare` modifies the command before it runs.
    pub fn restart_prepared(
        &mut self,
        namespace: Option<&Namespace>,
        prepare: impl FnOnce(&mut Command),
    ) -> Result<()> {
        self.started = Instant::now();
        self.process = spawn(&self.program, namespace, self.folder.path(), prepare)?;
        self.wait_until_ready(namespace)
    }

    /// Returns the path of the configuration.
    pub fn config_file(&self) -> PathBuf {
        self.folder.path().join("config.json")
    }

    /// Returns the configuration in its file.
    pub fn settings(&self) -> Result<Value> {
        Ok(serde_json::from_slice(&fs::read(self.config_file())?)?)
    }

    /// Changes the configuration in its file, for a reload or restart.
    pub fn change_settings(&self, change: impl FnOnce(&mut Value)) -> Result<()> {
        let mut settings = self.settings()?;
        change(&mut settings);
        Ok(fs::write(self.config_file(), settings.to_string())?)
    }

    /// Runs a command of the server's program in `namespace` with the server's configuration; returns its
    /// output. The error of a command that fails contains its messages.
    pub fn cli(&self, namespace: &Namespace, arguments: &[&str]) -> Result<String> {
        let mut command = namespace.command(program()?)?;
        capture(
            command
                .args(arguments)
                .arg("--config")
                .arg(self.config_file()),
        )
    }

    /// Returns what `status --json` shows.
    pub fn status(&self, namespace: &Namespace) -> Result<Value> {
        Ok(serde_json::from_str(
            &self.cli(namespace, &["status", "--json"])?,
        )?)
    }

    pub fn process(&mut self) -> &mut Kept {
        &mut self.process
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Returns the server's process and its descendants: the attacher, and the process that replaces it.
    pub fn processes(&self) -> Vec<u32> {
        family(self.pid())
    }

    /// Sends a signal to the server and its children.
    pub fn signal_all(&self, signal: Signal) -> Result<()> {
        for pid in self.processes() {
            kill(Pid::from_raw(pid.cast_signed()), signal)?;
        }
        Ok(())
    }

    /// Returns the log written so far. A thread writes it, some time after the event.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Returns the length of the log in bytes, for [`Self::log_after`].
    pub fn log_length(&self) -> Result<u64> {
        Ok(fs::metadata(self.folder.path().join("log"))?.len())
    }

    /// Returns the log from `length` on, so that a long run need not read all of it again and again.
    pub fn log_after(&self, length: u64) -> String {
        let read = || -> std::io::Result<String> {
            let mut log = fs::File::open(self.folder.path().join("log"))?;
            log.seek(SeekFrom::Start(length))?;
            let mut text = String::new();
            log.read_to_string(&mut text)?;
            Ok(text)
        };
        read().unwrap_or_default()
    }

    /// Waits until the log contains a text; the error contains the log.
    pub fn wait_for_log(&self, text: &str) -> Result<()> {
        let contains = || self.log().contains(text);
        wait_until(&format!("{text:?} in the log"), LOGGED, contains).with_context(|| self.log())
    }

    /// Returns the name of the server's namespace, or `None` for the test's namespace.
    pub fn in_namespace(&self) -> Option<&str> {
        self.in_namespace.as_deref()
    }

    /// Waits until the up-check is answered; the error contains the log if the server ends instead.
    fn wait_until_ready(&mut self, namespace: Option<&Namespace>) -> Result<()> {
        let message = client::query(UPCHECK, RecordType::A, None)?.to_vec()?;
        let address = match self.address {
            SocketAddr::V4(v4) if v4.ip().is_unspecified() => ([127, 0, 0, 1], v4.port()).into(),
            other => other,
        };
        let mut patience = Duration::from_millis(200);
        let mut ended = None;
        let waited = wait_until("the server's first answer", FIRST_ANSWER, || {
            ended = self.process.ended().ok().flatten();
            let ask = || client::ask_raw(address, &message, patience);
            let asked = namespace.map_or_else(|| Ok(ask()), |inside| inside.run(ask));
            let is_answered = matches!(asked, Ok(Ok(_)));
            // A query may be lost while the server starts, and a busy machine answers late.
            if let Ok(Err(error)) = asked
                && error.kind() == std::io::ErrorKind::WouldBlock
            {
                patience = (patience * 2).min(MAX_PATIENCE);
            }
            ended.is_some() || is_answered
        });
        match (waited, ended) {
            (_, Some(status)) => bail!("the server ended ({status}):\n{}", self.log()),
            (Err(error), None) => Err(error.context(self.log())),
            (Ok(()), None) => Ok(()),
        }
    }
}

/// Runs `program` in `namespace` with the configuration in `folder`; its output is appended to
/// `folder/log`.
fn spawn(
    program: &Path,
    namespace: Option<&Namespace>,
    folder: &Path,
    prepare: impl FnOnce(&mut Command),
) -> Result<Kept> {
    let log = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(folder.join("log"))?;
    let mut command = match namespace {
        Some(namespace) => namespace.command(program)?,
        None => Command::new(program),
    };
    command.arg("--config").arg(folder.join("config.json"));
    prepare(&mut command);
    Kept::spawn(
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log),
    )
}
