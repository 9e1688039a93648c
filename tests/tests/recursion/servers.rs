//! Real name servers as recursors: `named` and `unbound` from Debian.

use std::{
    fs,
    net::SocketAddr,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result};
use hickory_proto::rr::RecordType;
use tempfile::TempDir;
use whole_system_tests::{
    client,
    namespace::Namespace,
    process::{Kept, capture, wait_until},
};

/// Name of the DNSSEC-signed zone.
pub(crate) const SIGNED: &str = "signed.test";

/// A zone in which every name has the address 192.0.2.8.
pub(crate) const WILD: &str = "wild.test";

/// Time limit for a server's first answer.
const START: Duration = Duration::from_secs(120);

/// Both servers and BIND's zone tools.
pub(crate) const SERVERS: &[&str] = &["named", "unbound", "dnssec-signzone"];

pub(crate) struct Recursor {
    pub(crate) process: Kept,
    pub(crate) address: SocketAddr,
}

/// Files of all servers in a test.
pub(crate) struct Zones {
    folder: TempDir,
}

impl Zones {
    /// Writes and signs the zones.
    pub(crate) fn new() -> Result<Self> {
        let folder = TempDir::with_prefix("bdx-zones-")?;
        let path = folder.path();
        fs::write(path.join(SIGNED), signed_zone_text())?;
        fs::write(path.join(WILD), wild_zone_text())?;
        for key_flag in [&["-f", "KSK"][..], &[]] {
            let mut keygen = Command::new("dnssec-keygen");
            keygen
                .args(["-q", "-a", "ECDSAP256SHA256"])
                .args(key_flag)
                .arg(SIGNED);
            capture(keygen.current_dir(path))?;
        }
        let mut sign = Command::new("dnssec-signzone");
        // -S: sign with the keys in the folder.
        sign.args(["-q", "-S", "-o", SIGNED, SIGNED]);
        capture(sign.current_dir(path))?;
        fs::write(path.join("anchor"), trust_anchor(path)?)?;
        Ok(Self { folder })
    }

    /// Starts `named` as the authority for both zones, without recursion.
    pub(crate) fn named(&self, namespace: &Namespace, address: SocketAddr) -> Result<Recursor> {
        let folder = self.of(address)?;
        let (zones, here) = (self.folder.path().display(), folder.display());
        let config = format!(
            "options {{ directory \"{here}\"; listen-on port {} {{ {}; }}; listen-on-v6 {{ none; }}; recursion no;\n\
             dnssec-validation no; \
             pid-file none; session-keyfile none; max-udp-size 4096; edns-udp-size 4096; minimal-responses yes; }};\n\
             controls {{ }};\n\
             zone \"{SIGNED}\" {{ type primary; file \"{zones}/{SIGNED}.signed\"; }};\n\
             zone \"{WILD}\" {{ type primary; file \"{zones}/{WILD}\"; }};\n",
            address.port(),
            address.ip(),
        );
        fs::write(folder.join("named.conf"), config)?;
        // named listens only on addresses that it finds on an interface.
        namespace.ip(&format!("addr replace {}/8 dev lo", address.ip()))?;
        let mut command = namespace.command("named")?;
        command
            .args(["-g", "-n", "1", "-c"])
            .arg(folder.join("named.conf"));
        start(namespace, command, &folder, address, "answers.wild.test.")
    }

    /// Starts `unbound`, which validates, forwards to `authority` and answers names below [`WILD`]
    /// locally.
    pub(crate) fn unbound(
        &self,
        namespace: &Namespace,
        address: SocketAddr,
        authority: SocketAddr,
    ) -> Result<Recursor> {
        let folder = self.of(address)?;
        let (zones, here) = (self.folder.path().display(), folder.display());
        let config = format!(
            "server:\n  interface: {0}\n  port: {1}\n  username: \"\"\n  chroot: \"\"\n  directory: \"{here}\"\n\
             \x20 pidfile: \"\"\n  use-syslog: no\n  do-not-query-localhost: no\n  num-threads: 1\n\
             \x20 module-config: \"validator iterator\"\n  trust-anchor-file: \"{zones}/anchor\"\n\
             \x20 max-udp-size: 4096\n  edns-buffer-size: 4096\n  local-zone: \"test.\" nodefault\n\
             \x20 local-zone: \"{WILD}.\" redirect\n  local-data: \"{WILD}. 300 IN A 192.0.2.8\"\n\
             forward-zone:\n  name: \".\"\n  forward-addr: {2}@{3}\nremote-control:\n  control-enable: no\n",
            address.ip(),
            address.port(),
            authority.ip(),
            authority.port(),
        );
        fs::write(folder.join("unbound.conf"), config)?;
        let mut command = namespace.command("unbound")?;
        command.args(["-d", "-c"]).arg(folder.join("unbound.conf"));
        start(namespace, command, &folder, address, "answers.wild.test.")
    }

    /// Creates a folder for the server at `address`.
    fn of(&self, address: SocketAddr) -> Result<std::path::PathBuf> {
        let folder = self.folder.path().join(address.ip().to_string());
        fs::create_dir_all(&folder)?;
        Ok(folder)
    }
}

/// Starts a server and waits until it answers `name`.
fn start(
    namespace: &Namespace,
    mut command: Command,
    folder: &Path,
    address: SocketAddr,
    name: &str,
) -> Result<Recursor> {
    let log = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(folder.join("log"))?;
    command
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    let process = Kept::spawn(&mut command)?;
    let query = client::query(name, RecordType::A, None)?.to_vec()?;
    let answers = || client::ask_raw(address, &query, Duration::from_millis(100)).is_ok();
    let waited = wait_until("a recursor's first answer", START, || {
        namespace.run(answers).unwrap_or(false)
    });
    waited.with_context(|| fs::read_to_string(folder.join("log")).unwrap_or_default())?;
    Ok(Recursor { process, address })
}

/// Returns a zone with many record types.
fn signed_zone_text() -> String {
    let mut text = format!(
        "$ORIGIN {SIGNED}.\n$TTL 300\n@ IN SOA ns admin 1 3600 600 86400 60\n@ IN NS ns\nns IN A 127.0.0.10\n\
         www IN A 192.0.2.7\nwww IN AAAA 2001:db8::7\nalias IN CNAME www\n_sip._tcp IN SRV 1 2 5060 www\n\
         @ IN MX 10 www\nodd IN TYPE65280 \\# 3 010203\n"
    );
    // About 15 and about 2.5 KiB.
    for (name, count) in [("huge", 60), ("large", 10)] {
        for number in 0..count {
            text.push_str(&format!(
                "{name} IN TXT \"{number:02}{}\"\n",
                "x".repeat(238)
            ));
        }
    }
    text
}

/// Returns a zone in which every name exists.
fn wild_zone_text() -> String {
    format!(
        "$ORIGIN {WILD}.\n$TTL 300\n@ IN SOA ns admin 1 3600 600 86400 60\n@ IN NS ns\nns IN A 127.0.0.10\n\
         * IN A 192.0.2.8\n"
    )
}

/// Returns the zone's key-signing key in unbound's format.
fn trust_anchor(folder: &Path) -> Result<String> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "key") {
            let text = fs::read_to_string(&path)?;
            if let Some(line) = text.lines().find(|line| line.contains("DNSKEY 257 ")) {
                return Ok(format!("{line}\n"));
            }
        }
    }
    anyhow::bail!(
        "dnssec-keygen created no key-signing key in {}",
        folder.display()
    )
}

/// Kills a server and waits for its end.
pub(crate) fn kill(mut recursor: Recursor) -> Result<()> {
    recursor.process.kill(START).map(drop)
}
