//! Other DNS servers, and this server as a forwarder, each configured for one core as its manual
//! advises: the yardsticks.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, Result};
use hickory_proto::{op::Message, rr::RecordType};
use nix::sys::signal::Signal;
use serde_json::json;
use tempfile::TempDir;
use whole_system_tests::{
    client,
    cpu::on_cpu,
    health::write_files,
    metrics::wait_for_fast_path,
    pki::Authority,
    process::{Kept, family, wait_until},
    server::{self, Server},
};

use crate::{
    foundation::{Entry, Foundation},
    lab::{self, CLIENT_CPU, Lab, SERVER_ADDRESS, SERVER_CPU, SERVER_INTERFACE},
};

/// A server with the names of a foundation as static data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// NLnet Labs NSD: authoritative.
    Nsd,
    /// CZ.NIC Knot DNS: authoritative.
    Knot,
    /// Knot DNS with AF_XDP: kernel bypass by sockets.
    KnotXdp,
    /// NLnet Labs Unbound: names as local data.
    Unbound,
    /// dnsmasq: names as a hosts file.
    Dnsmasq,
}

/// A peer running in the lab.
#[derive(Debug)]
pub struct RunningPeer {
    /// Stopped when dropped, before its files are removed.
    process: Kept,
    peer: Peer,
    folder: TempDir,
}

/// Zones of the names of a foundation.
const ZONES: [&str; 2] = ["bosh.", "cf.internal."];

impl Peer {
    /// Returns the label of the peer in reports.
    pub fn label(self) -> &'static str {
        match self {
            Self::Nsd => "nsd",
            Self::Knot => "knotd",
            Self::KnotXdp => "knotd, AF_XDP",
            Self::Unbound => "unbound",
            Self::Dnsmasq => "dnsmasq",
        }
    }

    /// Starts the peer in the lab's server namespace on the server's CPU, with names of a
    /// foundation, and waits for its first answer.
    pub fn start(self, lab: &Lab, entries: &[Entry]) -> Result<RunningPeer> {
        let folder = TempDir::with_prefix("bdx-peer-")?;
        self.write_names(folder.path(), entries)?;
        let (program, arguments, config) =
            self.configuration(folder.path(), lab.endpoint().ip())?;
        let process = spawn(lab, folder.path(), program, arguments, &config)?;
        let (name, _) = entries.first().context("no names")?;
        wait_for_answer(&lab.client, lab.endpoint(), name)
            .with_context(|| format!("{}: {}", self.label(), log(folder.path())))?;
        let running = RunningPeer {
            process,
            peer: self,
            folder,
        };
        // After the first answer all its threads and children exist.
        for process in running.processes() {
            lab::pin(process, SERVER_CPU)?;
        }
        lab.pin_napi()?;
        Ok(running)
    }

    /// Writes the names in the peer's format.
    fn write_names(self, folder: &Path, entries: &[Entry]) -> Result<()> {
        match self {
            Self::Nsd | Self::Knot | Self::KnotXdp => ZONES.iter().try_for_each(|zone| {
                write_atomically(&zone_file(folder, zone), &zone_text(zone, entries))
            }),
            Self::Unbound => {
                let zones: String = ZONES
                    .iter()
                    .map(|zone| format!("  local-zone: \"{zone}\" static\n"))
                    .collect();
                let names = format!("server:\n{zones}{}", local_data(entries)?);
                write_atomically(&folder.join("names"), &names)
            }
            Self::Dnsmasq => write_atomically(&folder.join("names"), &hosts(entries)?),
        }
    }

    /// Returns the program, its arguments and the text of its configuration; unbound and dnsmasq listen at
    /// [`SERVER_ADDRESS`] only.
    fn configuration(
        self,
        folder: &Path,
        address: IpAddr,
    ) -> Result<(&'static str, Vec<String>, String)> {
        let here = folder.display();
        let file = format!("{here}/config");
        let mut text = String::new();
        let zone = |zone: &str| zone_file(folder, zone).display().to_string();
        // All rotate the addresses of a name, as this server does: a fixed order would cost less.
        let (program, arguments) = match self {
            Self::Nsd => {
                // By default NSD limits the replies to one client (rrl-ratelimit), and the load is one client.
                text.push_str(&nsd(
                    &format!("  ip-address: {address}\n  round-robin: yes\n"),
                    folder,
                ));
                for name in ZONES {
                    write!(
                        text,
                        "zone:\n  name: \"{name}\"\n  zonefile: \"{}\"\n",
                        zone(name)
                    )?;
                }
                ("nsd", vec!["-d".into(), "-c".into(), file])
            }
            Self::Knot | Self::KnotXdp => {
                // Replies leave by the interface of their query, so no look at the routing table is
                // needed for each.
                let xdp = match self {
                    Self::KnotXdp => {
                        format!("xdp:\n    listen: [ {SERVER_INTERFACE} ]\n    route-check: off\n")
                    }
                    _ => String::new(),
                };
                write!(
                    text,
                    "server:\n    rundir: \"{here}\"\n    listen: [ {address}@53 ]\n    udp-workers: 1\n\
                     \x20   tcp-workers: 1\n    background-workers: 1\n    answer-rotation: on\n{xdp}\
                     database:\n    storage: \"{here}\"\ntemplate:\n  - id: default\n    storage: \"{here}\"\n\
                     \x20   zonefile-load: whole\n    journal-content: none\nzone:\n"
                )?;
                for name in ZONES {
                    write!(text, "  - domain: {name}\n    file: \"{}\"\n", zone(name))?;
                }
                ("knotd", vec!["-c".into(), file])
            }
            Self::Unbound => {
                let own = "  rrset-roundrobin: yes\n  so-reuseport: yes\n";
                writeln!(text, "{}include: \"{here}/names\"", unbound(own, folder))?;
                ("unbound", vec!["-d".into(), "-c".into(), file])
            }
            Self::Dnsmasq => {
                text.push_str(&dnsmasq("local=/bosh/\nlocal=/cf.internal/\n", folder));
                ("dnsmasq", vec![format!("--conf-file={file}")])
            }
        };
        Ok((program, arguments, text))
    }
}

impl RunningPeer {
    /// Returns all its processes: NSD answers from a child process.
    pub fn processes(&self) -> Vec<u32> {
        family(self.process.pid())
    }

    /// Writes other names, which the peer reads after [`Self::signal_reload`].
    pub fn write_names(&self, entries: &[Entry]) -> Result<()> {
        self.peer.write_names(self.folder.path(), entries)
    }

    /// Sends the signal to reload the names.
    pub fn signal_reload(&self) -> Result<()> {
        self.process.signal(Signal::SIGHUP)
    }
}

//----------- Forwarders -----------------------------------------------------

/// The zone in which every name has one address.
pub const ZONE: &str = "forwarded.test";

/// Address of the authority, on the loopback of the server's namespace.
pub const AUTHORITY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 5300);

/// A forwarding server that is compared with the others; on request it also has the names of a
/// foundation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Forwarder {
    /// This server, in userspace.
    Ours {
        /// Cache answers for their TTL.
        cache: bool,
    },
    /// This server with its fast path at tc and both caches on.
    Interface,
    /// This server with default limits, the names of a fleet, and the fast path.
    Fleet,
    /// NLnet Labs Unbound with a forward zone for everything.
    Unbound,
    /// dnsmasq with a cache for 10,000 names: by default it keeps 150.
    Dnsmasq,
    /// CZ.NIC Knot Resolver, which forwards without validating.
    KnotResolver,
}

/// A forwarder and its authority, stopped when dropped.
#[derive(Debug)]
pub struct RunningForwarder {
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
            Self::Ours { cache: true } | Self::Fleet => "ours",
            Self::Ours { cache: false } => "ours, cache off",
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

    /// Starts the forwarder before a separate NSD, and waits for the first answer. The authority
    /// runs on the client's CPU, so that the forwarder has its own CPU.
    pub fn start(self, lab: &Lab, foundation: Option<&Foundation>) -> Result<RunningForwarder> {
        self.start_build(server::program()?, lab, foundation)
    }

    /// Like [`Self::start`], with another build of this server.
    pub fn start_build(
        self,
        program: PathBuf,
        lab: &Lab,
        foundation: Option<&Foundation>,
    ) -> Result<RunningForwarder> {
        let folder = TempDir::with_prefix("bdx-forward-")?;
        let authority = start_authority(lab, folder.path())?;
        let names = foundation
            .map(|foundation| foundation.entries(usize::MAX))
            .unwrap_or_default();
        self.start_in(
            program,
            lab,
            folder,
            Box::new(authority),
            foundation,
            &names,
        )
    }

    /// Starts the forwarder before an authority that runs at [`AUTHORITY`]; only this server gets
    /// the names of the foundation.
    pub fn start_before(
        self,
        lab: &Lab,
        authority: impl std::fmt::Debug + 'static,
        foundation: &Foundation,
    ) -> Result<RunningForwarder> {
        let folder = TempDir::with_prefix("bdx-forward-")?;
        self.start_in(
            server::program()?,
            lab,
            folder,
            Box::new(authority),
            Some(foundation),
            &[],
        )
    }

    fn start_in(
        self,
        program: PathBuf,
        lab: &Lab,
        folder: TempDir,
        authority: Box<dyn std::fmt::Debug>,
        foundation: Option<&Foundation>,
        names: &[Entry],
    ) -> Result<RunningForwarder> {
        let (forwarder, pid): (Box<dyn std::fmt::Debug>, u32) = if self.is_ours() {
            let server = self.start_ours(program, lab, foundation)?;
            let pid = server.pid();
            (Box::new(server), pid)
        } else {
            let process = self.start_peer(lab, folder.path(), names)?;
            let pid = process.pid();
            (Box::new(process), pid)
        };
        wait_for_answer(
            &lab.client,
            (SERVER_ADDRESS, 53).into(),
            &format!("first.{ZONE}."),
        )
        .with_context(|| format!("{}: {}", self.label(), log(folder.path())))?;
        // The first answer may be that of userspace, which serves while the programs are loaded.
        if matches!(self, Self::Interface | Self::Fleet) {
            wait_for_fast_path(&lab.server)?;
        }
        lab::pin(pid, SERVER_CPU)?;
        lab.pin_napi()?;
        Ok(RunningForwarder {
            pid,
            _forwarder: forwarder,
            _authority: authority,
            _folder: folder,
        })
    }

    /// Starts another server with static names.
    fn start_peer(self, lab: &Lab, folder: &Path, names: &[Entry]) -> Result<Kept> {
        let here = folder.display();
        let file = format!("{here}/config");
        fs::write(folder.join("names"), hosts(names)?)?;
        let authority = AUTHORITY.ip();
        let port = AUTHORITY.port();
        let (program, arguments, text) = match self {
            Self::Unbound => {
                // By default unbound asks no server at loopback, and `test.` is empty (RFC 6761, section 6.2).
                let own = format!(
                    "  do-not-query-localhost: no\n  local-zone: \"test.\" nodefault\n  msg-cache-size: 64m\n\
                     \x20 rrset-cache-size: 128m\n  outgoing-range: 8192\n  num-queries-per-thread: 4096\n\
                     \x20 so-rcvbuf: 1m\n{}forward-zone:\n  name: \".\"\n  forward-addr: {authority}@{port}\n",
                    local_data(names)?
                );
                (
                    "unbound",
                    vec!["-d".to_owned(), "-c".to_owned(), file],
                    unbound(&own, folder),
                )
            }
            Self::KnotResolver => (
                "kresd",
                vec!["-n".to_owned(), "-c".to_owned(), file, here.to_string()],
                format!(
                    "modules = {{'hints > iterate'}}\nnet.ipv6 = false\n\
                     net.listen('{SERVER_ADDRESS}', 53, {{kind = 'dns'}})\ntrust_anchors.remove('.')\n\
                     cache.size = 192 * MB\nhints.add_hosts('{here}/names')\nhints.ttl(0)\n\
                     policy.add(policy.all(policy.STUB('{authority}@{port}')))\n"
                ),
            ),
            _ => {
                // By default dnsmasq forwards 150 queries at a time (dns-forward-max).
                let own =
                    format!("server={authority}#{port}\ncache-size=10000\ndns-forward-max=4096\n");
                (
                    "dnsmasq",
                    vec![format!("--conf-file={file}")],
                    dnsmasq(&own, folder),
                )
            }
        };
        spawn(lab, folder, program, arguments, &text)
    }

    /// Starts this server, without local names unless a foundation has some.
    fn start_ours(
        self,
        program: PathBuf,
        lab: &Lab,
        foundation: Option<&Foundation>,
    ) -> Result<Server> {
        // The default of `xdp.max_names`.
        let max_names = foundation.map_or(65_536, |foundation| foundation.max_names);
        let xdp = |mode: &str| json!({"mode": mode, "interfaces": [SERVER_INTERFACE, "lo"], "max_names": max_names});
        let mut extra = json!({
            "log_level": "WARN",
            "metrics": {"enabled": foundation.is_some()},
            "disable_recursors": false,
            "recursors": [AUTHORITY],
            "recursor_timeout": "2s",
        });
        if self == Self::Fleet {
            extra["xdp"] = xdp("auto");
        } else {
            extra["xdp"] = xdp(if self == Self::Interface { "tc" } else { "off" });
            // The default, which is more than the names that a load repeats: none is evicted.
            extra["xdp"]["cache_entries"] = json!(8192);
            // As large as unbound's two caches together.
            let enabled = self != Self::Ours { cache: false };
            extra["cache"] =
                json!({"enabled": enabled, "max_entries": 1_000_000, "max_bytes": 192 << 20});
        }
        let folder = match foundation {
            Some(foundation) => server::folder(&foundation.records, foundation.aliases.as_deref())?,
            None => server::folder(b"{}", None)?,
        };
        // One worker for one CPU: the others are configured for one thread.
        on_cpu(SERVER_CPU, || {
            Server::start_program(
                program,
                Some(&lab.server),
                folder,
                (SERVER_ADDRESS, 53).into(),
                &extra,
                |_| {},
            )
        })
    }
}

/// Starts NSD with a zone in which every name exists, on the client's CPU.
fn start_authority(lab: &Lab, folder: &Path) -> Result<Kept> {
    let here = folder.display();
    let address = AUTHORITY.ip();
    let port = AUTHORITY.port();
    let zone = format!(
        "$ORIGIN {ZONE}.\n$TTL 3600\n@ IN SOA ns admin 1 3600 600 86400 60\n@ IN NS ns\nns IN A {address}\n\
         * IN A 192.0.2.1\n"
    );
    let folder = folder.join("authority");
    fs::create_dir(&folder)?;
    fs::write(folder.join("zone"), zone)?;
    let own = format!("  ip-address: {address}\n  port: {port}\n  minimal-responses: yes\n");
    let zone = format!("zone:\n  name: \"{ZONE}\"\n  zonefile: \"{here}/authority/zone\"\n");
    let arguments = [
        "-c",
        &CLIENT_CPU.to_string(),
        "nsd",
        "-d",
        "-c",
        &format!("{here}/authority/config"),
    ];
    let arguments = arguments.map(str::to_owned).to_vec();
    let process = spawn(
        lab,
        &folder,
        "taskset",
        arguments,
        &(nsd(&own, &folder) + &zone),
    )?;
    wait_for_answer(&lab.server, AUTHORITY, &format!("first.{ZONE}."))
        .with_context(|| log(&folder))?;
    Ok(process)
}

//----------- Files and processes --------------------------------------------

/// Starts a server of the lab with its configuration in `folder`, and its log.
fn spawn(
    lab: &Lab,
    folder: &Path,
    program: &str,
    arguments: Vec<String>,
    config: &str,
) -> Result<Kept> {
    fs::write(folder.join("config"), config)?;
    let log = fs::File::create(folder.join("log"))?;
    let mut command = lab.server.command(program)?;
    Kept::spawn(
        command
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log),
    )
}

/// Waits until `name` has an address at `server`, queried from this namespace.
pub(crate) fn wait_for_answer(
    from: &whole_system_tests::namespace::Namespace,
    server: SocketAddr,
    name: &str,
) -> Result<()> {
    let query = client::query(name, RecordType::A, None)?.to_vec()?;
    wait_until(name, Duration::from_secs(20), || {
        from.run(|| {
            let reply = client::ask_raw(server, &query, Duration::from_millis(200)).ok()?;
            Some(!client::addresses(&Message::from_vec(&reply).ok()?).is_empty())
        })
        .ok()
        .flatten()
            == Some(true)
    })
}

fn log(folder: &Path) -> String {
    fs::read_to_string(folder.join("log")).unwrap_or_default()
}

// No server drops its rights, since only root can read the temporary folder.
fn nsd(own: &str, folder: &Path) -> String {
    let here = folder.display();
    format!(
        "server:\n{own}  server-count: 1\n  username: \"\"\n  chroot: \"\"\n  zonesdir: \"{here}\"\n\
         \x20 database: \"\"\n  pidfile: \"{here}/pid\"\n  xfrdir: \"{here}\"\n  zonelistfile: \"{here}/zonelist\"\n\
         \x20 xfrdfile: \"{here}/xfrd\"\n  rrl-ratelimit: 0\nremote-control:\n  control-enable: no\n"
    )
}

// Without the validator, because this server does not validate either.
fn unbound(own: &str, folder: &Path) -> String {
    let here = folder.display();
    format!(
        "remote-control:\n  control-enable: no\nserver:\n  interface: {SERVER_ADDRESS}\n\
         \x20 access-control: 0.0.0.0/0 allow\n  do-daemonize: no\n  username: \"\"\n  chroot: \"\"\n\
         \x20 pidfile: \"{here}/pid\"\n  directory: \"{here}\"\n  num-threads: 1\n  use-syslog: no\n\
         \x20 logfile: \"\"\n  verbosity: 0\n  module-config: \"iterator\"\n{own}"
    )
}

fn dnsmasq(own: &str, folder: &Path) -> String {
    let here = folder.display();
    format!(
        "keep-in-foreground\nno-resolv\nno-hosts\nbind-interfaces\nlisten-address={SERVER_ADDRESS}\n\
         addn-hosts={here}/names\npid-file=\nlocal-ttl=0\nuser=root\n{own}"
    )
}

/// Returns names in unbound's format.
fn local_data(entries: &[Entry]) -> Result<String> {
    let mut text = String::new();
    for (name, address) in pairs(entries) {
        writeln!(text, "  local-data: \"{name} 0 IN A {address}\"")?;
    }
    Ok(text)
}

fn hosts(entries: &[Entry]) -> Result<String> {
    let mut text = String::new();
    for (name, address) in pairs(entries) {
        writeln!(text, "{address} {}", name.trim_end_matches('.'))?;
    }
    Ok(text)
}

fn pairs(entries: &[Entry]) -> impl Iterator<Item = (&str, &Ipv4Addr)> {
    entries.iter().flat_map(|(name, addresses)| {
        addresses
            .iter()
            .map(move |address| (name.as_str(), address))
    })
}

fn zone_file(folder: &Path, zone: &str) -> PathBuf {
    folder.join(format!("{zone}zone"))
}

/// Returns a zone file with the names inside the zone. The serial is the time in tenths of a second,
/// so that each reload is detected; 32 bits wrap as serials may.
fn zone_text(zone: &str, entries: &[Entry]) -> String {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    let serial = (now.as_millis() / 100) as u32;
    let mut text = format!(
        "$TTL 0\n{zone} IN SOA ns.{zone} admin.{zone} {serial} 3600 600 86400 5\n{zone} IN NS ns.{zone}\n\
         ns.{zone} IN A 127.0.0.1\n"
    );
    let mut known = BTreeSet::new();
    for (name, addresses) in entries {
        if name
            .strip_suffix(zone)
            .is_some_and(|rest| rest.ends_with('.'))
            && known.insert(name)
        {
            for address in addresses {
                text.push_str(&format!("{name} IN A {address}\n"));
            }
        }
    }
    text
}

/// Writes a file atomically: a reader sees the old or the new content.
fn write_atomically(path: &Path, text: &str) -> Result<()> {
    let next = path.with_extension("next");
    fs::write(&next, text)?;
    Ok(fs::rename(&next, path)?)
}

/// Port of its API on loopback, as its job configures it.
const API_PORT: u16 = 53080;

/// Starts bosh-dns's program, waits for its first answer, and pins it to the server's CPU.
///
/// It requires an API with certificates, which are generated for the run.
pub fn start_reference(program: &Path, lab: &Lab, foundation: &Foundation) -> Result<Server> {
    let folder = server::folder(&foundation.records, foundation.aliases.as_deref())?;
    let authority = Authority::new("bench")?;
    let identity = authority.issue("api.bosh-dns")?;
    let files = write_files(folder.path(), &identity, &authority.certificate)?;
    let api = json!({
        "port": API_PORT,
        "certificate_file": files.certificate,
        "private_key_file": files.private_key,
        "ca_file": files.ca,
    });
    let server = Server::start_program(
        program.to_owned(),
        Some(&lab.server),
        folder,
        (SERVER_ADDRESS, 53).into(),
        &json!({"api": api}),
        |_| {},
    )?;
    lab::pin(server.pid(), SERVER_CPU)?;
    Ok(server)
}
