//! Servers and yardsticks behind one interface.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use aya::Ebpf;
use bosh_dns_xdp_benches::{
    foundation::Foundation,
    lab::{CLIENT_INTERFACE, Lab, SERVER_ADDRESS, SERVER_CPU, SERVER_INTERFACE},
    peers::{Peer, Running as RunningPeer},
    reference::Reference,
    yardstick::{Hook, Yardstick},
};
use serde_json::json;
use whole_system_tests::{
    cpu::on_cpu,
    metrics::wait_for_fast_path,
    server::{self, Server},
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    /// This server, with this mode of the fast path.
    Ours(&'static str),
    Userspace,
    /// Another build of this server, with this mode of the fast path (`off`: userspace only).
    Build(PathBuf, &'static str),
    Peer(Peer),
    Reference(PathBuf),
    /// The program that only swaps addresses, on this hook.
    Reflector(Hook),
    /// The program that sends a constant number of answers, on this hook.
    Constant(Hook, u32),
}

/// A subject running in the lab, stopped when dropped.
pub(super) struct Running {
    /// Processes whose CPU time and memory count.
    pub(super) processes: Vec<u32>,
    /// The server, if the subject is this server.
    pub(super) server: Option<Server>,
    /// Resources that must live as long as the subject.
    _kept: Box<dyn std::any::Any>,
}

impl Subject {
    /// Returns the label of the subject in the report.
    pub(super) fn label(&self) -> String {
        match self {
            Self::Ours(mode) => format!("ours, {mode}"),
            Self::Userspace => "ours, userspace only".to_owned(),
            Self::Build(program, mode) => format!("{}, {mode}", program.display()),
            Self::Peer(peer) => peer.label().to_owned(),
            Self::Reference(_) => "bosh-dns".to_owned(),
            Self::Reflector(hook) => format!("bare reflector, {}", hook_label(*hook)),
            Self::Constant(hook, answers) => format!("{answers} constant answers, {}", hook_label(*hook)),
        }
    }

    /// Returns whether the subject is this server.
    pub(super) fn is_ours(&self) -> bool {
        matches!(self, Self::Ours(_) | Self::Userspace)
    }

    /// Returns whether a program on the interface answers all queries.
    pub(super) fn answers_at_interface(&self) -> bool {
        match self {
            Self::Ours(_) | Self::Reflector(_) | Self::Constant(..) => true,
            Self::Build(_, mode) => *mode != "off",
            Self::Userspace | Self::Peer(_) | Self::Reference(_) => false,
        }
    }

    /// Attaches a program to the client's end, without which native XDP_TX on the server's end
    /// loses its packets: the veth driver needs a program on both ends, or NAPI. The generator
    /// brings one; a client that uses sockets must attach this one.
    pub(super) fn client_program(&self, lab: &Lab) -> Result<Option<Ebpf>> {
        let native = matches!(
            self,
            Self::Ours("native") | Self::Reflector(Hook::Native) | Self::Constant(Hook::Native, _)
        );
        native.then(|| Yardstick::Pass.attach(Hook::Native, &lab.client, CLIENT_INTERFACE)).transpose()
    }

    /// Starts the subject in the lab, on the server's CPU, and waits for its first answer. With a
    /// fast path, waits for the first answer from the interface.
    pub(super) fn start(&self, lab: &Lab, foundation: &Foundation) -> Result<Running> {
        let running = self.begin(lab, foundation)?;
        if let Self::Ours(mode) | Self::Build(_, mode) = self
            && *mode != "off"
        {
            wait_for_fast_path(&lab.server).with_context(|| self.label())?;
        }
        lab.pin_napi()?;
        Ok(running)
    }

    /// Starts the subject in the lab, on the server's CPU, and waits for its first answer, from any
    /// path.
    pub(super) fn begin(&self, lab: &Lab, foundation: &Foundation) -> Result<Running> {
        let running = match self {
            Self::Ours(mode) => start_ours(lab, foundation, mode),
            Self::Userspace => start_ours(lab, foundation, "off"),
            Self::Build(program, mode) => start_build(program.clone(), lab, foundation, mode),
            Self::Peer(peer) => start_peer(*peer, lab, foundation),
            Self::Reference(program) => start_reference(program, lab, foundation),
            Self::Reflector(hook) => start_yardstick(lab, Yardstick::Reflector, *hook),
            Self::Constant(hook, answers) => {
                start_yardstick(lab, Yardstick::Constant { answers: *answers }, *hook)
            }
        };
        running.with_context(|| self.label())
    }
}

fn start_ours(lab: &Lab, foundation: &Foundation, mode: &str) -> Result<Running> {
    start_build(server::program()?, lab, foundation, mode)
}

/// Starts a build of this server.
fn start_build(program: PathBuf, lab: &Lab, foundation: &Foundation, mode: &str) -> Result<Running> {
    let folder = server::folder(&foundation.records, foundation.aliases.as_deref())?;
    let extra = json!({
        "log_level": "WARN",
        "xdp": {"mode": mode, "interfaces": [SERVER_INTERFACE, "lo"], "max_names": foundation.max_names},
        "metrics": {"enabled": true},
    });
    // One worker for one CPU, as configured for the peers.
    let server = on_cpu(SERVER_CPU, || {
        Server::start_program(program, Some(&lab.server), folder, (SERVER_ADDRESS, 53).into(), &extra, |_| {})
    })?;
    Ok(Running { processes: vec![server.pid()], server: Some(server), _kept: Box::new(()) })
}

fn start_peer(peer: Peer, lab: &Lab, foundation: &Foundation) -> Result<Running> {
    let running: RunningPeer = peer.start(lab, &foundation.entries(usize::MAX))?;
    Ok(Running { processes: running.processes()?, server: None, _kept: Box::new(running) })
}

/// Starts bosh-dns on the same files.
fn start_reference(program: &Path, lab: &Lab, foundation: &Foundation) -> Result<Running> {
    let running = Reference::start(program, lab, foundation)?;
    Ok(Running { processes: vec![running.pid()], server: None, _kept: Box::new(running) })
}

/// Attaches a program that answers without data.
fn start_yardstick(lab: &Lab, yardstick: Yardstick, hook: Hook) -> Result<Running> {
    let attached = yardstick.attach(hook, &lab.server, SERVER_INTERFACE)?;
    Ok(Running { processes: Vec::new(), server: None, _kept: Box::new(attached) })
}

/// Parses the name of a hook in the configuration.
pub(super) fn hook_label(hook: Hook) -> &'static str {
    match hook {
        Hook::Native => "native",
        Hook::Tc => "tc",
    }
}
