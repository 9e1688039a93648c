//! Servers that forward to the same authority, each configured for one core; on request they also
//! know the names of a foundation.

use std::{
    fmt::Write as _,
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::Path,
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, Result};
use hickory_proto::rr::RecordType;
use serde_json::json;
use tempfile::TempDir;
use whole_system_tests::{
    client,
    cpu::on_cpu,
    metrics::wait_for_fast_path,
    process::{Kept, wait_until},
    server::{self, Server},
};

use crate::{
    foundation::{Entry, Foundation},
    lab::{self, CLIENT_CPU, Lab, SERVER_ADDRESS, SERVER_CPU, SERVER_INTERFACE},
};

/// The zone in which every name has one address.
pub const ZONE: &str = "forwarded.test";

/// Address of the authority, on the loopback of the server's namespace.
pub const AUTHORITY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 5300);

/// A forwarding server that is compared with the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Forwarder {
    /// This server, in userspace.
    Ours {
        /// Cache answers for their TTL.
        cache: bool,
    },
    /// This server with default limits, the names of a fleet, and the fast path.
    Fleet,
    /// NLnet Labs Unbound with a forward zone for everything.
    Unbound,
    /// This server with its fast path at tc and both caches on.
    Interface,
    /// dnsmasq with its default cache.
    Dnsmasq,
    /// CZ.NIC Knot Resolver, which forwards without validating.
    KnotResolver,
}

/// A forwarder and its authority, stopped when dropped.
#[derive(Debug)]
pub struct Running {
    /// Process id of the forwarder.
    pub pid: u32,
    /// Dropped before its files.
    _forwarder: Box<dyn std::fmt::Debug>,
    _authority: Box<dyn std::fmt::Debug>,
    _folder: TempDir,
}

impl Forwarder {
    /// Returns the label of the forwarder in reports.
    pub fn label(self) -> &'static str {
        match self {
            Self::Ours { cache: true } => "ours",
            Self::Ours { cache: false } => "ours, cache off",
            Self::Fleet => "ours",
            Self::Interface => "ours, tc",
            Self::Unbound => "unbound",
            Self::Dnsmasq => "dnsmasq",
            Self::KnotResolver => "knot-resolver",
        }
    }

    /// Returns whether it is this server.
    pub fn is_ours(self) -> bool {
        matches!(self, Self::Ours { .. } | Self::Fleet | Self::Interface)
    }

    /// Starts the forwarder and its authority, and waits for the first answer. The authority runs
    /// on the client's CPU, so that the forwarder has its own CPU.
    pub fn start(self, lab: &Lab) -> Result<Running> {
        let folder = TempDir::with_prefix("bdx-forward-")?;
        let authority = start_authority(lab, folder.path())?;
        self.start_with(lab, folder, authority, None, &[])
    }

    /// Like [`Self::start`], with the names of a foundation.
    pub fn start_with_names(self, lab: &Lab, foundation: &Foundation) -> Result<Running> {
        let folder = TempDir::with_prefix("bdx-forward-")?;
        let authority = start_authority(lab, folder.path())?;
        self.start_with(lab, folder, authority, Some(foundation), &foundation.entries(usize::MAX))
    }

    /// Starts the forwarder before an authority that runs at [`AUTHORITY`], with the names of a
    /// foundation if it takes them.
    pub fn start_before(
        self,
        lab: &Lab,
        authority: impl std::fmt::Debug + 'static,
        foundation: &Foundation,
    ) -> Result<Running> {
        self.start_with(lab, TempDir::with_prefix("bdx-forward-")?, authority, Some(foundation), &[])
    }

    fn start_with(
        self,
        lab: &Lab,
        folder: TempDir,
        authority: impl std::fmt::Debug + 'static,
        foundation: Option<&Foundation>,
        names: &[Entry],
    ) -> Result<Running> {
        let (forwarder, pid): (Box<dyn std::fmt::Debug>, u32) = match self {
            Self::Ours { .. } | Self::Interface => {
                let server = self.start_ours(lab, foundation)?;
                let pid = server.pid();
                (Box::new(server), pid)
            }
            Self::Fleet => {
                let server = start_with_fleet(lab, foundation.context("a fleet has names")?)?;
                let pid = server.pid();
                (Box::new(server), pid)
            }
            Self::Unbound | Self::Dnsmasq | Self::KnotResolver => {
                let process = self.start_peer(lab, folder.path(), names)?;
                let pid = process.pid();
                (Box::new(process), pid)
            }
        };
        let name = format!("first.{ZONE}.");
        wait_for_answer(lab, (SERVER_ADDRESS, 53).into(), &name, false)
            .with_context(|| format!("{}: {}", self.label(), log(folder.path())))?;
        if self == Self::Interface {
            wait_for_fast_path(&lab.server)?;
        }
        lab::pin(pid, SERVER_CPU)?;
        lab.pin_napi()?;
        Ok(Running { pid, _forwarder: forwarder, _authority: Box::new(authority), _folder: folder })
    }

    /// Starts another server with static names.
    fn start_peer(self, lab: &Lab, folder: &Path, names: &[Entry]) -> Result<Kept> {
        let file = folder.join("forwarder.conf");
        let (shown, here) = (file.display(), folder.display());
        let (mut hosts, mut local_data) = (String::new(), String::new());
        for (name, addresses) in names {
            for address in addresses {
                writeln!(hosts, "{address} {}", name.trim_end_matches('.'))?;
                writeln!(local_data, "  local-data: \"{name} 0 IN A {address}\"")?;
            }
        }
        fs::write(folder.join("hosts"), hosts)?;
        let (authority, port) = (AUTHORITY.ip(), AUTHORITY.port());
        let (program, arguments, text) = match self {
            Self::Unbound => (
                "unbound",
                vec!["-d".to_owned(), "-c".to_owned(), shown.to_string()],
                format!(
                    "server:\n  interface: {SERVER_ADDRESS}\n  access-control: 0.0.0.0/0 allow\n  do-daemonize: no\n\
                     \x20 username: \"\"\n  chroot: \"\"\n  pidfile: \"\"\n  use-syslog: no\n  logfile: \"\"\n\
                     \x20 verbosity: 0\n  num-threads: 1\n  module-config: \"iterator\"\n  do-not-query-localhost: no\n\
                     \x20 local-zone: \"test.\" nodefault\n  msg-cache-size: 64m\n  rrset-cache-size: 128m\n\
                     \x20 outgoing-range: 8192\n  num-queries-per-thread: 4096\n  so-rcvbuf: 1m\n{local_data}\
                     forward-zone:\n  name: \".\"\n  forward-addr: {authority}@{port}\n\
                     remote-control:\n  control-enable: no\n"
                ),
            ),
            Self::KnotResolver => (
                "kresd",
                vec!["-n".to_owned(), "-c".to_owned(), shown.to_string(), here.to_string()],
                format!(
                    "modules = {{'hints > iterate'}}\nnet.ipv6 = false\n\
                     net.listen('{SERVER_ADDRESS}', 53, {{kind = 'dns'}})\ntrust_anchors.remove('.')\n\
                     cache.size = 192 * MB\nhints.add_hosts('{here}/hosts')\nhints.ttl(0)\n\
                     policy.add(policy.all(policy.STUB('{authority}@{port}')))\n"
                ),
            ),
            _ => (
                "dnsmasq",
                vec![format!("--conf-file={shown}")],
                format!(
                    "keep-in-foreground\nno-resolv\nno-hosts\nbind-interfaces\nlisten-address={SERVER_ADDRESS}\n\
                     pid-file=\nuser=root\nserver={authority}#{port}\ncache-size=10000\n\
                     addn-hosts={here}/hosts\nlocal-ttl=0\ndns-forward-max=4096\n"
                ),
            ),
        };
        fs::write(&file, text)?;
        let log = fs::OpenOptions::new().create(true).append(true).open(folder.join("log"))?;
        let mut command = lab.server.command(program)?;
        command.args(arguments).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        Kept::spawn(&mut command)
    }

    /// Starts this server, without local names unless a foundation has some.
    fn start_ours(self, lab: &Lab, foundation: Option<&Foundation>) -> Result<Server> {
        let mode = if self == Self::Interface { "tc" } else { "off" };
        let cache = self != Self::Ours { cache: false };
        let extra = json!({
            "log_level": "WARN",
            "xdp": {"mode": mode, "interfaces": [SERVER_INTERFACE, "lo"], "cache_entries": 8192},
            "metrics": {"enabled": foundation.is_some()},
            "disable_recursors": false,
            "recursors": [AUTHORITY],
            "recursor_timeout": "2s",
            // As large as unbound's two caches together.
            "cache": {"enabled": cache, "max_entries": 1_000_000, "max_bytes": 192 << 20},
        });
        let folder = match foundation {
            Some(foundation) => server::folder(&foundation.records, foundation.aliases.as_deref())?,
            None => server::folder(b"{}", None)?,
        };
        // One worker for one CPU: the others are configured for one thread.
        on_cpu(SERVER_CPU, || Server::start(Some(&lab.server), folder, (SERVER_ADDRESS, 53).into(), &extra))
    }
}

/// Starts this server with the names of a foundation, the fast path, and default limits.
fn start_with_fleet(lab: &Lab, foundation: &Foundation) -> Result<Server> {
    let extra = json!({
        "log_level": "WARN",
        "xdp": {"mode": "auto", "interfaces": [SERVER_INTERFACE, "lo"], "max_names": foundation.max_names},
        "metrics": {"enabled": true},
        "disable_recursors": false,
        "recursors": [AUTHORITY],
        "recursor_timeout": "2s",
    });
    let folder = server::folder(&foundation.records, foundation.aliases.as_deref())?;
    on_cpu(SERVER_CPU, || Server::start(Some(&lab.server), folder, (SERVER_ADDRESS, 53).into(), &extra))
}

/// NSD with a zone in which every name exists, on the client's CPU.
fn start_authority(lab: &Lab, folder: &Path) -> Result<Kept> {
    let (here, address, port) = (folder.display(), AUTHORITY.ip(), AUTHORITY.port());
    let zone = format!(
        "$ORIGIN {ZONE}.\n$TTL 3600\n@ IN SOA ns admin 1 3600 600 86400 60\n@ IN NS ns\nns IN A {address}\n\
         * IN A 192.0.2.1\n"
    );
    fs::write(folder.join("zone"), zone)?;
    let text = format!(
        "server:\n  ip-address: {address}\n  port: {port}\n  server-count: 1\n  username: \"\"\n\
         \x20 chroot: \"\"\n  zonesdir: \"{here}\"\n  database: \"\"\n  pidfile: \"{here}/nsd.pid\"\n  xfrdir: \"{here}\"\n\
         \x20 zonelistfile: \"{here}/zonelist\"\n  xfrdfile: \"{here}/xfrd\"\n  rrl-ratelimit: 0\n  minimal-responses: yes\n\
         remote-control:\n  control-enable: no\nzone:\n  name: \"{ZONE}\"\n  zonefile: \"{here}/zone\"\n"
    );
    let file = folder.join("nsd.conf");
    fs::write(&file, text)?;
    let log_file = fs::OpenOptions::new().create(true).append(true).open(folder.join("log"))?;
    let cpu = CLIENT_CPU.to_string();
    let mut command = lab.server.command("taskset")?;
    command.args(["-c", &cpu, "nsd", "-d", "-c"]).arg(&file);
    let process = Kept::spawn(command.stdin(Stdio::null()).stdout(log_file.try_clone()?).stderr(log_file))?;
    wait_for_answer(lab, AUTHORITY, &format!("first.{ZONE}."), true).with_context(|| log(folder))?;
    Ok(process)
}

/// Waits until `name` has an address at `server`, queried from the server's or from the client's
/// namespace.
fn wait_for_answer(lab: &Lab, server: SocketAddr, name: &str, from_inside: bool) -> Result<()> {
    let query = client::query(name, RecordType::A, None)?.to_vec()?;
    let answered = || {
        let reply = client::ask_raw(server, &query, Duration::from_millis(200)).ok()?;
        let reply = hickory_proto::op::Message::from_vec(&reply).ok()?;
        Some(!client::addresses(&reply).is_empty())
    };
    let namespace = if from_inside { &lab.server } else { &lab.client };
    wait_until(name, Duration::from_secs(15), || namespace.run(answered).ok().flatten() == Some(true))
}

/// Returns the log of the servers.
fn log(folder: &Path) -> String {
    fs::read_to_string(folder.join("log")).unwrap_or_default()
}
