//! Other DNS servers with the same names, each configured for one core as its manual advises: the
//! yardsticks.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use hickory_proto::rr::RecordType;
use nix::sys::signal::Signal;
use tempfile::TempDir;
use whole_system_tests::{
    client,
    process::{Kept, wait_until},
};

use crate::{
    foundation::Entry,
    lab::{self, Lab, SERVER_ADDRESS, SERVER_CPU},
};

/// A server to compare with.
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

/// A name with its services, as ports and hosts, final dots included.
pub type Services = (String, Vec<(u16, String)>);

/// The data of a peer.
#[derive(Clone, Copy, Debug)]
pub struct Names<'a> {
    /// Zones that contain the names.
    pub zones: &'a [&'a str],
    /// Names with addresses; the readiness check queries the first one.
    pub entries: &'a [Entry],
    /// Names with their services (SRV records).
    pub services: &'a [Services],
}

/// A peer running in the lab.
#[derive(Debug)]
pub struct Running {
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
    pub fn start(self, lab: &Lab, entries: &[Entry]) -> Result<Running> {
        self.start_with(lab, &Names { zones: &ZONES, entries, services: &[] })
    }

    /// Starts the peer like [`Self::start`], with any names.
    pub fn start_with(self, lab: &Lab, names: &Names<'_>) -> Result<Running> {
        let folder = TempDir::with_prefix("bdx-peer-")?;
        self.write_names(folder.path(), names)?;
        let (program, arguments) = self.configure(folder.path(), names.zones)?;
        let log = fs::File::create(folder.path().join("log"))?;
        let mut command = lab.server.command(program)?;
        command.args(arguments).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let process = Kept::spawn(&mut command)?;
        let mut running = Running { process, peer: self, folder };
        let (name, _) = names.entries.first().context("no names")?;
        running.wait_for(lab, name, |_| true)?;
        lab::pin(running.pid(), SERVER_CPU)?;
        for child in running.processes()? {
            lab::pin(child, SERVER_CPU)?;
        }
        lab.pin_napi()?;
        Ok(running)
    }

    /// Writes the names in the peer's format.
    fn write_names(self, folder: &Path, names: &Names<'_>) -> Result<()> {
        let Names { zones, entries, services } = *names;
        match self {
            Self::Nsd | Self::Knot | Self::KnotXdp => {
                for zone in zones {
                    write_atomically(&zone_file(folder, zone), &zone_text(zone, entries, services))?;
                }
                Ok(())
            }
            Self::Unbound => {
                let mut text = String::from("server:\n");
                for zone in zones {
                    writeln!(text, "  local-zone: \"{zone}\" static")?;
                }
                for (name, addresses) in entries {
                    for address in addresses {
                        writeln!(text, "  local-data: \"{name} 0 IN A {address}\"")?;
                    }
                }
                for (name, places) in services {
                    for (port, host) in places {
                        writeln!(text, "  local-data: \"{name} 0 IN SRV 1 1 {port} {host}\"")?;
                    }
                }
                write_atomically(&folder.join("names"), &text)
            }
            Self::Dnsmasq => {
                let mut text = String::new();
                for (name, addresses) in entries {
                    for address in addresses {
                        writeln!(text, "{address} {}", name.trim_end_matches('.'))?;
                    }
                }
                write_atomically(&folder.join("names"), &text)
            }
        }
    }

    /// Writes its configuration; returns the program and its arguments.
    fn configure(self, folder: &Path, zones: &[&str]) -> Result<(&'static str, Vec<String>)> {
        let file = folder.join("config");
        let shown = |path: &Path| path.display().to_string();
        let here = shown(folder);
        let (program, arguments, text) = match self {
            Self::Nsd => {
                let mut text = format!(
                    "server:\n  ip-address: {SERVER_ADDRESS}\n  server-count: 1\n  username: \"\"\n  chroot: \"\"\n\
                     \x20 zonesdir: \"{here}\"\n  database: \"\"\n  pidfile: \"{here}/pid\"\n  xfrdir: \"{here}\"\n\
                     \x20 zonelistfile: \"{here}/zonelist\"\n  xfrdfile: \"{here}/xfrd\"\n  rrl-ratelimit: 0\n\
                     \x20 round-robin: yes\nremote-control:\n  control-enable: no\n"
                );
                for zone in zones {
                    write!(
                        text,
                        "zone:\n  name: \"{zone}\"\n  zonefile: \"{}\"\n",
                        shown(&zone_file(folder, zone))
                    )?;
                }
                ("nsd", vec!["-d".into(), "-c".into(), shown(&file)], text)
            }
            Self::Knot | Self::KnotXdp => {
                let xdp = if self == Self::KnotXdp {
                    format!("xdp:\n    listen: [ {} ]\n    route-check: off\n", lab::SERVER_INTERFACE)
                } else {
                    String::new()
                };
                let mut text = format!(
                    "server:\n    rundir: \"{here}\"\n    listen: [ {SERVER_ADDRESS}@53 ]\n    udp-workers: 1\n\
                     \x20   tcp-workers: 1\n    background-workers: 1\n    answer-rotation: on\n{xdp}\
                     database:\n    storage: \"{here}\"\ntemplate:\n  - id: default\n    storage: \"{here}\"\n\
                     \x20   zonefile-load: whole\n    journal-content: none\nzone:\n"
                );
                for zone in zones {
                    write!(text, "  - domain: {zone}\n    file: \"{}\"\n", shown(&zone_file(folder, zone)))?;
                }
                ("knotd", vec!["-c".into(), shown(&file)], text)
            }
            Self::Unbound => {
                let text = format!(
                    "server:\n  interface: {SERVER_ADDRESS}\n  access-control: 0.0.0.0/0 allow\n  do-daemonize: no\n\
                     \x20 username: \"\"\n  chroot: \"\"\n  pidfile: \"{here}/pid\"\n  directory: \"{here}\"\n  num-threads: 1\n\
                     \x20 use-syslog: no\n  logfile: \"\"\n  verbosity: 0\n  rrset-roundrobin: yes\n  so-reuseport: yes\n\
                     \x20 module-config: \"iterator\"\ninclude: \"{here}/names\"\nremote-control:\n  control-enable: no\n"
                );
                ("unbound", vec!["-d".into(), "-c".into(), shown(&file)], text)
            }
            Self::Dnsmasq => {
                let text = format!(
                    "keep-in-foreground\nno-resolv\nno-hosts\nbind-interfaces\nlisten-address={SERVER_ADDRESS}\n\
                     addn-hosts={here}/names\npid-file=\nlocal-ttl=0\nlocal=/bosh/\nlocal=/cf.internal/\nuser=root\n"
                );
                ("dnsmasq", vec![format!("--conf-file={}", shown(&file))], text)
            }
        };
        fs::write(&file, text)?;
        Ok((program, arguments))
    }
}

impl Running {
    /// Returns the process id of the process started first.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Returns all its processes: NSD answers from a child process.
    pub fn processes(&self) -> Result<Vec<u32>> {
        let mut found = vec![self.pid()];
        let mut next = 0;
        while let Some(&parent) = found.get(next) {
            let children = format!("/proc/{parent}/task/{parent}/children");
            let children = fs::read_to_string(children).unwrap_or_default();
            found.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
            next += 1;
        }
        Ok(found)
    }

    /// Writes other names, which the peer reads after [`Self::signal_reload`].
    pub fn write_names(&self, entries: &[Entry]) -> Result<()> {
        self.peer.write_names(self.folder.path(), &Names { zones: &ZONES, entries, services: &[] })
    }

    /// Sends the signal to reload the names.
    pub fn signal_reload(&self) -> Result<()> {
        self.process.signal(Signal::SIGHUP)
    }

    /// Queries a name until the answer is as `wanted`.
    pub fn wait_for(
        &mut self,
        lab: &Lab,
        name: &str,
        wanted: impl Fn(&[IpAddr]) -> bool + Sync,
    ) -> Result<()> {
        let query = client::query(name, RecordType::A, None)?;
        let bytes = query.to_vec()?;
        let address = SocketAddr::from((SERVER_ADDRESS, 53));
        let answered = || {
            let reply = client::ask_raw(address, &bytes, Duration::from_millis(200)).ok()?;
            let reply = hickory_proto::op::Message::from_vec(&reply).ok()?;
            Some(wanted(&client::addresses(&reply)))
        };
        let limit = Duration::from_secs(20);
        let mut ended = false;
        let waited = wait_until(self.peer.label(), limit, || {
            ended = self.process.ended().is_ok_and(|status| status.is_some());
            ended || lab.client.run(answered).ok().flatten() == Some(true)
        });
        if ended || waited.is_err() {
            let log = fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
            bail!("{} does not answer {name}: {}", self.peer.label(), log.trim());
        }
        Ok(())
    }
}

/// Returns the path of a zone's file.
fn zone_file(folder: &Path, zone: &str) -> PathBuf {
    folder.join(format!("{zone}zone"))
}

/// Returns a zone file with the names inside the zone. The serial is the time, so that a reload is
/// detected.
fn zone_text(zone: &str, entries: &[Entry], services: &[Services]) -> String {
    let serial = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    // Tenths of a second, so that two reloads within one second differ too; 32 bits wrap as serials may.
    let serial = (serial.as_millis() / 100) as u32;
    let mut text = format!(
        "$TTL 0\n{zone} IN SOA ns.{zone} admin.{zone} {serial} 3600 600 86400 5\n{zone} IN NS ns.{zone}\nns.{zone} IN A 127.0.0.1\n"
    );
    let mut known = BTreeSet::new();
    for (name, addresses) in entries {
        if name.strip_suffix(zone).is_some_and(|rest| rest.ends_with('.')) && known.insert(name) {
            for address in addresses {
                text.push_str(&format!("{name} IN A {address}\n"));
            }
        }
    }
    for (name, places) in services.iter().filter(|(name, _)| name.ends_with(zone)) {
        for (port, host) in places {
            text.push_str(&format!("{name} IN SRV 1 1 {port} {host}\n"));
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
