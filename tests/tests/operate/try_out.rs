//! The `try` command, following its own output.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    net::{IpAddr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    process::Stdio,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use hickory_proto::{op::Message, rr::RecordType};
use nix::sys::signal::Signal;
use serde_json::Value;
use whole_system_tests::{
    client,
    namespace::Namespace,
    process::{Kept, capture, wait_until},
    requires, server,
};

/// Time limit, reached only on failure.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A running `try`, and what its output says.
struct Trial {
    process: Kept,
    server: SocketAddr,
    /// The name to query.
    name: String,
    config: PathBuf,
}

impl Trial {
    /// Starts it and reads the printed commands: dig, resolve, top.
    fn start(namespace: &Namespace) -> Result<Self> {
        let mut command = namespace.command(server::program()?)?;
        let mut child = command
            .arg("try")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let said = child.stdout.take().context("no standard output")?;
        let process = Kept::from(child);
        let lines: Vec<String> = BufReader::new(said)
            .lines()
            .take(6)
            .collect::<Result<_, _>>()?;
        let pasted = |word: &str| {
            lines
                .iter()
                .find(|line| line.contains(word))
                .map(|line| line.trim().to_owned())
        };
        let dig = pasted("dig @").with_context(|| format!("{lines:?}"))?;
        let mut words = dig.split_whitespace().skip(1);
        let address: IpAddr = words
            .next()
            .context("no address")?
            .trim_start_matches('@')
            .parse()?;
        let port = words.nth(1).context("no port")?.parse()?;
        let name = words.next().context("no name")?.to_owned();
        let top = pasted(" top ").context("no top")?;
        let config = top.rsplit(' ').next().context("no configuration")?.into();
        Ok(Self {
            process,
            server: (address, port).into(),
            name,
            config,
        })
    }

    /// Sends a signal; the trial must end well and leave nothing behind.
    fn end(mut self, signal: Signal) -> Result<()> {
        self.process.signal(signal)?;
        ensure!(self.process.wait(TIMEOUT)?.success(), "{signal}");
        ensure!(
            !fs::exists(&self.config)?,
            "{} is left behind",
            self.config.display()
        );
        Ok(())
    }
}

#[test]
fn try_as_root_uses_interface() -> Result<()> {
    requires!(namespaces, bpf);
    let namespace = Namespace::new("try")?;
    let trial = Trial::start(&namespace)?;
    let query = client::query(&format!("{}.", trial.name), RecordType::A, None)?.to_vec()?;
    let done = AtomicBool::new(false);
    let shown = thread::scope(|scope| {
        scope.spawn(|| {
            namespace.run(|| {
                while !done.load(Ordering::Relaxed) {
                    // The server may still be starting.
                    let _ = client::ask_raw(trial.server, &query, Duration::from_millis(200));
                    thread::sleep(Duration::from_millis(1));
                }
            })
        });
        let shown = wait_until("top to show the fast path", TIMEOUT, || {
            let looked = namespace.command(server::program().unwrap_or_default());
            let looked = looked.and_then(|mut top| {
                capture(
                    top.args(["top", "--once", "--json", "--config"])
                        .arg(&trial.config),
                )
            });
            let looked = looked
                .ok()
                .and_then(|text| serde_json::from_str::<Value>(&text).ok())
                .unwrap_or_default();
            let names = looked["names"].as_array().cloned().unwrap_or_default();
            names.iter().any(|asked| {
                asked["name"]
                    .as_str()
                    .is_some_and(|asked| asked.trim_end_matches('.') == trial.name)
                    && asked["fast"].as_u64() > Some(0)
            })
        });
        done.store(true, Ordering::Relaxed);
        shown
    });
    shown?;
    trial.end(Signal::SIGINT)
}

#[test]
fn closed_terminal_ends_trial() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("try-hup")?;
    Trial::start(&namespace)?.end(Signal::SIGHUP)
}

#[test]
fn trial_answers_reverse_names() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("try-x")?;
    let trial = Trial::start(&namespace)?;
    // As `dig -x 10.0.1.10`.
    let query = client::query("10.1.0.10.in-addr.arpa.", RecordType::PTR, None)?.to_vec()?;
    let reply = namespace.run(|| client::ask_raw(trial.server, &query, TIMEOUT))??;
    let reply = Message::from_vec(&reply)?;
    ensure!(
        reply.to_string().contains("web-0.web.default.demo.bosh"),
        "{reply}"
    );
    trial.end(Signal::SIGTERM)
}

#[test]
fn trial_needs_no_ipv4() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("try-v6")?;
    namespace.ip("addr del 127.0.0.1/8 dev lo")?;
    let trial = Trial::start(&namespace)?;
    ensure!(trial.server.ip() == Ipv6Addr::LOCALHOST, "{}", trial.server);
    let query = client::query(&format!("{}.", trial.name), RecordType::A, None)?.to_vec()?;
    let reply = namespace.run(|| client::ask_raw(trial.server, &query, TIMEOUT))??;
    ensure!(client::addresses(&Message::from_vec(&reply)?).len() == 3);
    trial.end(Signal::SIGTERM)
}
