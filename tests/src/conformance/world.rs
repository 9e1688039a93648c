//! The surroundings of a scenario: a scratch folder, ports, scripted servers, and the server under
//! test. Must be created on a thread inside a private network namespace, because ports and instance
//! addresses are bound without checking for other users.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    net::{IpAddr, SocketAddr, TcpStream},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use serde_json::Value;
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};

use super::{
    client::Ports,
    http::HttpServer,
    recursor::Recursor,
    responder::Responder,
    scenario::{Counts, HealthScript, Scenario},
};
use crate::process::Kept;

/// Placeholders of ports: a string that consists of one becomes a number.
const PORTS: &[&str] = &[
    "PORT",
    "PORT2",
    "PORT3",
    "API_PORT",
    "HEALTH_PORT",
    "METRICS_PORT",
];

/// The first port, below the kernel's ephemeral range.
const FIRST_PORT: u16 = 12_000;

/// Files of a scenario that are not copied to the scratch folder.
const NOT_COPIED: &[&str] = &[
    "scenario.json",
    "cases.jsonl",
    "steps.jsonl",
    "startup.jsonl",
    "answers",
    "states",
];

/// Time limit for a server's exit after SIGTERM.
const FAREWELL: Duration = Duration::from_millis(1500);

/// How long a replay waits for recorded states in all, beyond the recorded pauses.
const PATIENCE: Duration = Duration::from_secs(120);

/// The surroundings of a scenario; on drop, everything ends, the server first.
#[derive(Debug)]
pub struct World<'a> {
    /// The server under test, once started.
    server: Option<Kept>,
    /// The scenario; its configuration may be modified before the start.
    pub scenario: Scenario,
    /// The scenario's folder.
    pub source: &'a Path,
    /// Folder of certificates and keys.
    pub certificates: &'a Path,
    pub folder: TempDir,
    pub ports: Ports,
    texts: BTreeMap<String, String>,
    /// Scripted recursors by placeholder.
    pub recursors: BTreeMap<String, Recursor>,
    /// Scripted DNS-over-JSON servers by placeholder.
    https: BTreeMap<String, HttpServer>,
    /// Health servers by instance.
    pub responders: BTreeMap<IpAddr, Responder>,
    /// Time lost so far compared with the steps' own pauses, caused by load on the machine.
    pub lateness: Duration,
    /// How much longer the replay may wait for recorded states.
    pub patience: Duration,
    /// Whether health checks, or a step, have changed a state, which the server may follow late.
    pub is_changing: bool,
    /// Runs the scripted servers.
    runtime: Runtime,
}

impl<'a> World<'a> {
    /// Builds the surroundings without starting the server.
    ///
    /// # Errors
    ///
    /// Fails if a port is in use, or a file cannot be read or written.
    pub fn new(scenario: Scenario, source: &'a Path, certificates: &'a Path) -> Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let checks_health = scenario.config.pointer("/health/enabled");
        let is_changing = checks_health.and_then(Value::as_bool).unwrap_or(false);
        let mut world = Self {
            server: None,
            folder: TempDir::with_prefix("bdx-")?,
            scenario,
            source,
            certificates,
            ports: Ports::new(),
            texts: BTreeMap::new(),
            recursors: BTreeMap::new(),
            https: BTreeMap::new(),
            responders: BTreeMap::new(),
            lateness: Duration::ZERO,
            patience: PATIENCE,
            is_changing,
            runtime,
        };
        world.start_scripted_servers()?;
        world.copy_files()?;
        Ok(world)
    }

    /// Assigns ports and starts the scripted servers.
    fn start_scripted_servers(&mut self) -> Result<()> {
        let mut next = FIRST_PORT..;
        let mut port = || next.next().context("no port is left");
        let further = self.scenario.extra_ports.iter().map(String::as_str);
        for name in ["PORT", "API_PORT", "METRICS_PORT", "HEALTH_PORT"]
            .into_iter()
            .chain(further)
        {
            self.ports.insert(name.to_owned(), port()?);
        }
        let Scenario {
            recursors,
            http,
            health,
            ..
        } = self.scenario.clone();
        self.texts.extend([
            ("DIR".to_owned(), self.folder.path().display().to_string()),
            (
                "CERTS".to_owned(),
                self.certificates.canonicalize()?.display().to_string(),
            ),
        ]);
        self.texts.extend(
            self.ports
                .iter()
                .map(|(name, port)| (name.clone(), port.to_string())),
        );
        for (name, script) in recursors {
            let port = port()?;
            self.texts.insert(name.clone(), format!("127.0.0.1:{port}"));
            if !script.not_listening {
                self.recursors
                    .insert(name, Recursor::start(&self.runtime, script, port)?);
            }
        }
        for (name, script) in http {
            let port = port()?;
            self.texts.insert(name.clone(), format!("127.0.0.1:{port}"));
            if !script.not_listening {
                self.https
                    .insert(name, HttpServer::start(&self.runtime, script, port)?);
            }
        }
        health
            .into_iter()
            .try_for_each(|(ip, script)| self.set_health(ip, Some(script)))
    }

    /// Copies the scenario's files to the scratch folder with placeholders expanded.
    fn copy_files(&self) -> Result<()> {
        copy(self.source, self.folder.path(), NOT_COPIED, &|text| {
            self.expand(text)
        })?;
        for folder in &self.scenario.make_dirs {
            fs::create_dir_all(self.folder.path().join(folder))?;
        }
        for file in &self.scenario.executable_files {
            fs::set_permissions(
                self.folder.path().join(file),
                fs::Permissions::from_mode(0o755),
            )?;
        }
        Ok(())
    }

    //------- The server

    pub fn config_file(&self) -> PathBuf {
        self.folder.path().join("config.json")
    }

    /// Writes the configuration.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be written.
    pub fn write_config(&self) -> Result<()> {
        let mut config = self.scenario.config.clone();
        self.expand_json(&mut config);
        Ok(fs::write(
            self.config_file(),
            serde_json::to_vec_pretty(&config)?,
        )?)
    }

    /// Starts the server; `command` is split at spaces.
    ///
    /// # Errors
    ///
    /// Fails if the command cannot be run.
    pub fn launch(&mut self, command: &str) -> Result<()> {
        let config = self.config_file().display().to_string();
        let mut words = command
            .split_whitespace()
            .map(|word| word.replace("{config}", &config));
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.folder.path().join("server.log"))?;
        let mut command = Command::new(words.next().context("the server's command is empty")?);
        for (variable, _) in std::env::vars_os() {
            if variable.to_string_lossy().to_lowercase().contains("proxy") {
                command.env_remove(variable);
            }
        }
        let environment = self
            .scenario
            .env
            .iter()
            .map(|(name, value)| (name, self.expand(value)));
        command
            .args(words)
            .envs(environment)
            .current_dir(self.folder.path());
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        self.server = Some(Kept::spawn(&mut command)?);
        Ok(())
    }

    /// Waits until the server accepts TCP connections (without sending a DNS message), and a little
    /// longer; returns whether it does and is still running.
    ///
    /// # Errors
    ///
    /// Fails if the scenario names an undefined port.
    pub fn wait_until_ready(&mut self, limit: Duration) -> Result<bool> {
        let port = self
            .ports
            .get(&self.scenario.ready_port)
            .context("no such port")?;
        let address = SocketAddr::new(self.scenario.ready_addr, *port);
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline && self.exit_code()?.is_none() {
            if TcpStream::connect_timeout(&address, Duration::from_millis(500)).is_ok() {
                thread::sleep(Duration::from_millis(self.scenario.settle_ms));
                return Ok(self.exit_code()?.is_none());
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(false)
    }

    /// Waits at most `limit` for the server to exit; returns its exit code, or the negated number
    /// of the signal that ended it.
    ///
    /// # Errors
    ///
    /// Fails if the server was not started.
    pub fn wait_for_exit(&mut self, limit: Duration) -> Result<Option<i32>> {
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline && self.exit_code()?.is_none() {
            thread::sleep(Duration::from_millis(20));
        }
        self.exit_code()
    }

    /// Returns the server's exit code in the same form, if it has exited.
    ///
    /// # Errors
    ///
    /// Fails if the server was not started.
    pub fn exit_code(&mut self) -> Result<Option<i32>> {
        use std::os::unix::process::ExitStatusExt;
        let status = self
            .server
            .as_mut()
            .context("the server was not started")?
            .ended()?;
        Ok(status.map(|status| {
            status
                .code()
                .unwrap_or_else(|| -status.signal().unwrap_or_default())
        }))
    }

    /// Sends a signal to the server.
    ///
    /// # Errors
    ///
    /// Fails if the signal is unknown or the server has exited.
    pub fn signal(&self, name: &str) -> Result<()> {
        self.server
            .as_ref()
            .context("the server was not started")?
            .signal(name.parse::<Signal>()?)
    }

    /// Returns the server's log.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("server.log")).unwrap_or_default()
    }

    //------- Files and scripts

    /// Writes a file in the scratch folder with placeholders expanded.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be written.
    pub fn write_file(&self, path: &str, text: &str, atomic: bool) -> Result<()> {
        let path = self.folder.path().join(path);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let text = self.expand(text);
        if atomic {
            let mut beside = path.clone().into_os_string();
            beside.push(".tmp");
            fs::write(&beside, text)?;
            fs::rename(beside, path)?;
        } else {
            fs::write(path, text)?;
        }
        Ok(())
    }

    /// Replaces the script of an instance's health server; `None` closes its port.
    ///
    /// # Errors
    ///
    /// Fails if the port is in use.
    pub fn set_health(&mut self, ip: IpAddr, script: Option<HealthScript>) -> Result<()> {
        let script = script.filter(|script| !script.refuse);
        if let (Some(script), Some(responder)) = (&script, self.responders.get(&ip))
            && responder.take_script(script)
        {
            return Ok(());
        }
        if let Some(responder) = self.responders.remove(&ip) {
            responder.close(&self.runtime);
        }
        if let Some(script) = script {
            let port = self.ports["HEALTH_PORT"];
            let responder = Responder::start(&self.runtime, ip, port, script, self.certificates)?;
            self.responders.insert(ip, responder);
        }
        Ok(())
    }

    /// Returns the number of requests that an instance has received.
    pub fn health_hits(&self, ip: IpAddr) -> u64 {
        self.responders.get(&ip).map_or(0, Responder::hits)
    }

    /// Returns the queries that the scripted servers have received so far.
    pub fn upstream_counts(&self) -> Counts {
        let recursors = self
            .recursors
            .iter()
            .map(|(name, recursor)| (name.clone(), recursor.counts()));
        let http = |server: &HttpServer| BTreeMap::from([("http".to_owned(), server.count())]);
        let https = self
            .https
            .iter()
            .map(|(name, server)| (name.clone(), http(server)));
        recursors.chain(https).collect()
    }

    /// Returns the last query that a scripted server has received.
    pub fn upstream_last(&self, name: &str) -> Option<Value> {
        let recursor = self.recursors.get(name).and_then(Recursor::last);
        recursor.or_else(|| self.https.get(name)?.last())
    }

    /// Returns the number of whole seconds by which the replay lags behind the recording.
    pub fn late(&self) -> u32 {
        u32::try_from(self.lateness.as_secs()).unwrap_or(u32::MAX)
    }

    /// Returns the errors found so far in the scripts.
    pub fn script_problems(&self) -> Vec<String> {
        let problem = |(name, recursor): (&String, &Recursor)| {
            Some(format!("{name}: {}", recursor.problem()?))
        };
        self.recursors.iter().filter_map(problem).collect()
    }

    /// Expands the placeholders in a text.
    pub fn expand(&self, text: &str) -> String {
        self.texts
            .iter()
            .fold(text.to_owned(), |text, (name, value)| {
                text.replace(&format!("${{{name}}}"), value)
            })
    }

    /// Expands the placeholders in all strings of a document; a string that is a port placeholder
    /// becomes a number.
    fn expand_json(&self, value: &mut Value) {
        match value {
            Value::Object(members) => members
                .values_mut()
                .for_each(|value| self.expand_json(value)),
            Value::Array(items) => items.iter_mut().for_each(|value| self.expand_json(value)),
            Value::String(text) => {
                let port = text
                    .strip_prefix("${")
                    .and_then(|text| text.strip_suffix('}'));
                let port = port
                    .filter(|name| PORTS.contains(name))
                    .and_then(|name| self.ports.get(name));
                *value = port.map_or_else(|| self.expand(text).into(), |&port| port.into());
            }
            _ => {}
        }
    }
}

impl Drop for World<'_> {
    fn drop(&mut self) {
        // The server may have ended already; if it does not end, dropping it kills it.
        if let Some(server) = &mut self.server
            && server.stop(FAREWELL).is_err()
        {
            let _ = server.kill(Duration::from_secs(60));
        }
    }
}

/// Copies the contents of a folder except for the given names, passing text through `expand`.
fn copy(from: &Path, to: &Path, but: &[&str], expand: &dyn Fn(&str) -> String) -> Result<()> {
    for entry in fs::read_dir(from).with_context(|| from.display().to_string())? {
        let entry = entry?;
        let name = entry.file_name();
        if but.iter().any(|but| name == *but) {
            continue;
        }
        let (from, to) = (entry.path(), to.join(&name));
        if entry.file_type()?.is_dir() {
            fs::create_dir(&to)?;
            copy(&from, &to, &[], expand)?;
            continue;
        }
        if !entry.file_type()?.is_file() {
            bail!("{} is neither a file nor a folder", from.display());
        }
        let bytes = fs::read(&from)?;
        let expanded = std::str::from_utf8(&bytes)
            .ok()
            .map(|text| expand(text).into_bytes());
        fs::write(&to, expanded.unwrap_or(bytes))?;
    }
    Ok(())
}
