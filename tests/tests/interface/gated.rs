//! The real server, serving interfaces once queries arrive through them.

use std::{
    collections::BTreeMap,
    fs,
    net::UdpSocket,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use dns_kit::metrics::names;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use whole_system_tests::{
    bpffs::Bpffs,
    metrics::{Metrics, wait_for_metrics},
    namespace::Namespace,
    pair::{Pair, addresses, v4},
    process::wait_until,
    server::{self, Server},
};

/// A name in the records, with three addresses.
pub(crate) const NAME: &str = "q-s0.q-g3.bosh.";

/// Time limit for a state to be shown, many times what a busy machine needs.
const STATE_SHOWN: Duration = Duration::from_secs(120);

/// A server that serves every interface once queries arrive through it.
pub(crate) struct Gated {
    pub(crate) server: Server,
    /// Dropped before the namespaces.
    pub(crate) bpffs: Bpffs,
}

/// The state of an interface in `status`.
#[derive(Clone, Debug, Default)]
pub(crate) struct State {
    /// `served`, `waiting` or `refused`.
    pub(crate) state: String,
    /// The hook, or `none`.
    pub(crate) hook: String,
    pub(crate) why: String,
}

impl Gated {
    /// Starts the server in a namespace.
    pub(crate) fn start(namespace: &Namespace) -> Result<Self> {
        Self::start_prepared(namespace, &json!({}), |_| {})
    }

    /// Starts the server with further settings of `xdp`; `prepare` modifies the command before it
    /// runs.
    pub(crate) fn start_prepared(
        namespace: &Namespace,
        xdp: &Value,
        prepare: impl FnOnce(&mut Command),
    ) -> Result<Self> {
        let bpffs = Bpffs::new()?;
        let folder = server::folder(&server::records_of_groups(&[3]), None)?;
        let mut settings = json!({
            "metrics": {"enabled": true},
            "control": {"socket": folder.path().join("control.sock")},
            "xdp": {"mode": "auto", "bpffs": bpffs.path(), "interfaces": ["*"]},
        });
        server::merge(&mut settings["xdp"], xdp);
        let server = Server::start_prepared(Some(namespace), folder, v4(), &settings, prepare)?;
        wait_for_metrics(namespace)?;
        Ok(Self { server, bpffs })
    }

    /// Waits for a state of an interface: `status` follows the interface, by up to a second on a busy machine.
    pub(crate) fn wait_for_state(
        &self,
        namespace: &Namespace,
        interface: &str,
        is_wanted: impl Fn(&State) -> bool,
    ) -> Result<()> {
        let mut shown = None;
        wait_until("the state in status", STATE_SHOWN, || {
            shown = self
                .states(namespace)
                .ok()
                .and_then(|mut states| states.remove(interface));
            shown.as_ref().is_some_and(&is_wanted)
        })
        .with_context(|| format!("{interface}: {shown:?}\n{}", self.server.log()))
    }

    /// Returns the state of each interface by name.
    pub(crate) fn states(&self, namespace: &Namespace) -> Result<BTreeMap<String, State>> {
        let status = self.server.status(namespace)?;
        let interfaces = status["fast_path"]["interfaces"]
            .as_array()
            .context("interfaces")?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let state = |one: &Value| State {
            state: text(&one["state"]),
            hook: text(&one["hook"]),
            why: text(&one["why"]),
        };
        Ok(interfaces
            .iter()
            .map(|one| (text(&one["name"]), state(one)))
            .collect())
    }
}

/// Returns the only child of a process.
pub(crate) fn child(pid: u32) -> Result<u32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    children
        .trim()
        .parse()
        .with_context(|| format!("children of {pid}: {children:?}"))
}

/// A process that is stopped by a signal, and continues when this is dropped.
struct Stopped(Pid);

impl Stopped {
    fn new(pid: u32) -> Result<Self> {
        let pid = Pid::from_raw(pid.cast_signed());
        kill(pid, Signal::SIGSTOP)?;
        Ok(Self(pid))
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // Fails only if the process is gone.
        let _ = kill(self.0, Signal::SIGCONT);
    }
}

/// Commands that make the kernel drop the queries or replies of a pair's client, and their removal.
const CUTS: [[&str; 2]; 2] = [
    [
        "iptables-legacy -w -A INPUT -i srv -p udp --dport 53 -j DROP",
        "iptables-legacy -w -D INPUT -i srv -p udp --dport 53 -j DROP",
    ],
    [
        "ip rule add prohibit to 169.254.0.1/32 pref 5",
        "ip rule del prohibit to 169.254.0.1/32 pref 5",
    ],
];

/// Stops the attacher and takes the client's queries or replies away: once the lease has ended, no interface
/// answers. When the attacher continues, interfaces answer again.
pub(crate) fn outlast_stopped_attacher(pair: &Pair, server: &Server, attacher: u32) -> Result<()> {
    const SILENCE: Duration = Duration::from_millis(50);
    let ask = |times: usize, timeout: Duration| -> Result<usize> {
        let mut answered = 0;
        for _ in 0..times {
            answered += usize::from(addresses(&pair.client, v4(), NAME, timeout)?.is_some());
        }
        Ok(answered)
    };
    let is_answered_by_interface = || -> Result<bool> {
        let before = hits(&pair.server)?;
        ask(3, Duration::from_secs(3))?;
        Ok(hits(&pair.server)? > before)
    };
    let named = || {
        let shown = fast_path_check(&pair.server, server);
        shown.is_ok_and(|detail| detail.contains("the attacher has been silent"))
    };
    for [cut, mend] in CUTS {
        wait_until("the interface to answer", STATE_SHOWN, || {
            is_answered_by_interface().unwrap_or(false)
        })
        .with_context(|| server.log())?;
        let stopped = Stopped::new(attacher)?;
        pair.server.capture(cut)?;
        wait_until("status to name the attacher", STATE_SHOWN, named)
            .with_context(|| format!("{:?}", fast_path_check(&pair.server, server)))?;
        let before = hits(&pair.server)?;
        ensure!(ask(40, SILENCE)? == 0, "{cut:?}: answered");
        ensure!(
            hits(&pair.server)? == before,
            "{cut:?}: the interface answers"
        );
        let up = Metrics::read(&pair.server)?.sum(names::FAST_PATH_UP, "");
        ensure!(up == 0, "up is {up}");
        drop(stopped);
        pair.server.capture(mend)?;
    }
    wait_until("the interface to answer again", STATE_SHOWN, || {
        is_answered_by_interface().unwrap_or(false)
    })
    .with_context(|| server.log())
}

/// Returns what `status` says about the fast path.
fn fast_path_check(namespace: &Namespace, server: &Server) -> Result<String> {
    let status = server.status(namespace)?;
    let checks = status["checks"].as_array().context("checks")?;
    let check = checks.iter().find(|check| check["name"] == "fast path");
    let detail = check.context("fast path")?["detail"].as_str();
    Ok(detail.unwrap_or_default().to_owned())
}

/// Answers every query with this RCODE until `done`.
pub(crate) fn deny_all(socket: &UdpSocket, rcode: u8, done: &AtomicBool) -> Result<()> {
    socket.set_read_timeout(Some(Duration::from_millis(50)))?;
    while !done.load(Ordering::Relaxed) {
        let mut message = [0; 512];
        let Ok((length, client)) = socket.recv_from(&mut message) else {
            continue;
        };
        // QR.
        message[2] |= 0x80;
        message[3] = message[3] & 0xf0 | rcode;
        socket.send_to(&message[..length], client)?;
    }
    Ok(())
}

/// Returns the number of replies from interfaces.
pub(crate) fn hits(namespace: &Namespace) -> Result<u64> {
    Ok(Metrics::read(namespace)?.fast_path_replies())
}
