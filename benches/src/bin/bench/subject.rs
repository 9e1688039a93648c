//! What is measured: servers and yardsticks behind one interface.

use std::{fs, path::PathBuf, process::Stdio, time::Duration};

use anyhow::{Context, Result};
use aya::{
    Ebpf, EbpfLoader,
    programs::{Xdp, XdpMode},
};
use bosh_dns_xdp_benches::{
    foundation::Foundation,
    lab::{self, CLIENT_INTERFACE, Lab, SERVER_ADDRESS, SERVER_CPU, SERVER_INTERFACE},
    peers::{Peer, Running as RunningPeer},
};
use dns_common::object::{PASS_PROGRAM, REFLECTOR_PROGRAM};
use dns_user::fastpath;
use hickory_proto::rr::RecordType;
use serde_json::{Value, json};
use tempfile::TempDir;
use whole_system_tests::{
    client,
    metrics::wait_for_fast_path,
    process::{Kept, wait_until},
    server::{self, Server},
};

/// Something to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    /// Ours, with the fast path by this mode.
    Ours(&'static str),
    /// Ours, userspace only.
    Userspace,
    /// Another server.
    Peer(Peer),
    /// The reference server.
    Reference(PathBuf),
    /// The program that only swaps addresses, native or generic.
    Reflector(&'static str),
}

/// A subject that answers in the lab; it ends when dropped.
pub(super) struct Running {
    /// Processes whose CPU and memory count.
    pub(super) processes: Vec<u32>,
    /// The server, if it is ours.
    pub(super) server: Option<Server>,
    /// Whatever else has to live meanwhile.
    _kept: Box<dyn std::any::Any>,
}

impl Subject {
    /// Its name in the report.
    pub(super) fn label(&self) -> String {
        match self {
            Self::Ours(mode) => format!("ours, {mode}"),
            Self::Userspace => "ours, userspace only".to_owned(),
            Self::Peer(peer) => peer.label().to_owned(),
            Self::Reference(_) => "bosh-dns".to_owned(),
            Self::Reflector(mode) => format!("bare reflector, {mode}"),
        }
    }

    /// Whether it is ours.
    pub(super) fn is_ours(&self) -> bool {
        matches!(self, Self::Ours(_) | Self::Userspace)
    }

    /// A program on the client's end, without which native XDP_TX on the server's
    /// end goes nowhere: the veth driver wants one on both. kxdpgun brings its own,
    /// and does not tolerate another; whoever sends by sockets has to attach this.
    pub(super) fn client_program(&self, lab: &Lab) -> Result<Option<Ebpf>> {
        let native = matches!(self, Self::Ours("native") | Self::Reflector("native"));
        native.then(|| attach(lab, Side::Client, PASS_PROGRAM, XdpMode::Driver)).transpose()
    }

    /// Starts it in the lab, on the server's CPU, and waits for its first answer.
    pub(super) fn start(&self, lab: &Lab, foundation: &Foundation) -> Result<Running> {
        let running = match self {
            Self::Ours(mode) => start_ours(lab, foundation, mode),
            Self::Userspace => start_ours(lab, foundation, "off"),
            Self::Peer(peer) => start_peer(*peer, lab, foundation),
            Self::Reference(program) => start_reference(program, lab, foundation),
            Self::Reflector(mode) => start_reflector(lab, mode),
        };
        let running = running.with_context(|| self.label())?;
        lab.pin_napi()?;
        Ok(running)
    }
}

/// Our own server.
fn start_ours(lab: &Lab, foundation: &Foundation, mode: &str) -> Result<Running> {
    let folder = server::folder(&foundation.records, foundation.aliases.as_deref())?;
    let extra = json!({
        "log_level": "WARN",
        "xdp": {"mode": mode, "interfaces": [SERVER_INTERFACE]},
        "metrics": {"enabled": true},
    });
    // One worker for one CPU, as the peers are told to have.
    let server = lab::on_cpu(SERVER_CPU, || {
        Server::start(Some(&lab.server), folder, (SERVER_ADDRESS, 53).into(), &extra)
    })?;
    if mode != "off" {
        wait_for_fast_path(&lab.server)?;
    }
    Ok(Running { processes: vec![server.pid()], server: Some(server), _kept: Box::new(()) })
}

/// A peer.
fn start_peer(peer: Peer, lab: &Lab, foundation: &Foundation) -> Result<Running> {
    let running: RunningPeer = peer.start(lab, &foundation.entries(usize::MAX))?;
    Ok(Running { processes: running.processes()?, server: None, _kept: Box::new(running) })
}

/// The reference server, on the same files.
fn start_reference(program: &PathBuf, lab: &Lab, foundation: &Foundation) -> Result<Running> {
    let folder: TempDir = server::folder(&foundation.records, foundation.aliases.as_deref())?;
    let config: Value = server::config(folder.path(), (SERVER_ADDRESS, 53).into());
    let file = folder.path().join("config.json");
    fs::write(&file, serde_json::to_vec(&config)?)?;
    let mut command = lab.server.command(program)?;
    let process = Kept::spawn(command.arg("--config").arg(file).stdout(Stdio::null()).stderr(Stdio::null()))?;
    let query = client::query("upcheck.bosh-dns.", RecordType::A, None)?.to_vec()?;
    let answers = || client::ask_raw((SERVER_ADDRESS, 53).into(), &query, Duration::from_millis(200)).is_ok();
    wait_until("bosh-dns", Duration::from_secs(10), || lab.client.run(answers).unwrap_or(false))?;
    lab::pin(process.pid(), SERVER_CPU)?;
    Ok(Running { processes: vec![process.pid()], server: None, _kept: Box::new((process, folder)) })
}

/// The bare reflector.
fn start_reflector(lab: &Lab, mode: &str) -> Result<Running> {
    let hook = if mode == "native" { XdpMode::Driver } else { XdpMode::Skb };
    let reflector = attach(lab, Side::Server, REFLECTOR_PROGRAM, hook)?;
    Ok(Running { processes: Vec::new(), server: None, _kept: Box::new(reflector) })
}

/// An end of the lab's veth.
#[derive(Clone, Copy)]
enum Side {
    /// 169.254.0.2.
    Server,
    /// 169.254.0.1.
    Client,
}

/// Attaches one of the XDP programs; it is detached when the object is dropped.
fn attach(lab: &Lab, side: Side, program: &str, mode: XdpMode) -> Result<Ebpf> {
    let (namespace, interface) = match side {
        Side::Server => (&lab.server, SERVER_INTERFACE),
        Side::Client => (&lab.client, CLIENT_INTERFACE),
    };
    let attached = namespace.run(|| -> Result<Ebpf> {
        let mut object = EbpfLoader::new().load(fastpath::OBJECT)?;
        let xdp: &mut Xdp = object.program_mut(program).context("no such program")?.try_into()?;
        xdp.load()?;
        xdp.attach(interface, mode)?;
        Ok(object)
    })?;
    attached.with_context(|| format!("{program} on {interface}"))
}
