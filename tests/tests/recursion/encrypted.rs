//! DNS over TLS to recursors: unbound and knot-resolver.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use hickory_proto::{op::ResponseCode, rr::RecordType};
use parking_lot::Mutex;
use rcgen::SanType;
use serde_json::{Value, json};
use tempfile::TempDir;
use whole_system_tests::{
    client,
    namespace::Namespace,
    pki::Authority,
    process::{Kept, wait_until},
    requires,
};

use super::lab::{Lab, ensure_code, loopback};

/// Time limit for a server's start.
const START: Duration = Duration::from_secs(120);

/// The name in the servers' certificates.
pub(crate) const NAME: &str = "dns.encrypted.test";

/// Certificates of the recursors.
pub(crate) struct Files {
    folder: TempDir,
}

impl Files {
    pub(crate) fn new() -> Result<Self> {
        let folder = TempDir::with_prefix("bdx-dot-")?;
        let authority = Authority::new("ca")?;
        authority.write(folder.path())?;
        let name = SanType::DnsName(NAME.try_into()?);
        let identity =
            authority.issue_with(NAME, |params| params.subject_alt_names = vec![name])?;
        identity.write(folder.path(), "server")?;
        Ok(Self { folder })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// Runs a server until its TLS port accepts connections.
fn run(
    namespace: &Namespace,
    mut command: Command,
    log: &Path,
    address: SocketAddr,
) -> Result<Kept> {
    let output = fs::File::create(log)?;
    command
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output);
    let process = Kept::spawn(&mut command)?;
    let accepts = || {
        namespace
            .run(|| TcpStream::connect(address).is_ok())
            .unwrap_or(false)
    };
    wait_until("the TLS port", START, accepts)
        .with_context(|| fs::read_to_string(log).unwrap_or_default())?;
    Ok(process)
}

/// Starts unbound with TLS only, which answers every name below `encrypted.test` with 192.0.2.9.
pub(crate) fn unbound(namespace: &Namespace, files: &Files, address: SocketAddr) -> Result<Kept> {
    let config = format!(
        "server:\n  interface: {0}@{1}\n  tls-port: {1}\n  tls-service-key: \"{2}\"\n  tls-service-pem: \"{3}\"\n\
         \x20 username: \"\"\n  chroot: \"\"\n  directory: \"{4}\"\n  pidfile: \"\"\n  use-syslog: no\n\
         \x20 module-config: \"iterator\"\n  num-threads: 1\n  local-zone: \"test.\" nodefault\n\
         \x20 local-zone: \"encrypted.test.\" redirect\n  local-data: \"encrypted.test. 300 IN A 192.0.2.9\"\n\
         remote-control:\n  control-enable: no\n",
        address.ip(),
        address.port(),
        files.path("server.key").display(),
        files.path("server.crt").display(),
        files.folder.path().display(),
    );
    fs::write(files.path("unbound.conf"), config)?;
    let mut command = namespace.command("unbound")?;
    command.args(["-d", "-c"]).arg(files.path("unbound.conf"));
    run(namespace, command, &files.path("unbound.log"), address)
}

/// Starts knot-resolver with TLS only, with the same answers.
fn kresd(namespace: &Namespace, files: &Files, address: SocketAddr) -> Result<Kept> {
    let config = format!(
        "net.listen('{}', {}, {{ kind = 'tls' }})\nnet.tls('{}', '{}')\ncache.size = 10 * MB\n\
         policy.add(policy.suffix(policy.ANSWER({{ [kres.type.A] = {{ rdata = kres.str2ip('192.0.2.9'), ttl = 300 }} }}), \
         {{ todname('encrypted.test') }}))\n",
        address.ip(),
        address.port(),
        files.path("server.crt").display(),
        files.path("server.key").display(),
    );
    fs::write(files.path("kresd.conf"), config)?;
    let folder = files.path("kresd");
    fs::create_dir(&folder)?;
    let mut command = namespace.command("kresd")?;
    command
        .arg("-n")
        .arg("-c")
        .arg(files.path("kresd.conf"))
        .arg(folder);
    run(namespace, command, &files.path("kresd.log"), address)
}

/// Starts a server that trusts the CA of `files` and forwards to `recursor`.
fn start<'a>(namespace: &'a Namespace, files: &Files, recursor: &str) -> Result<Lab<'a>> {
    let ca = files.path("ca.crt");
    let settings: Value = json!({"recursors": [recursor], "cache": {"enabled": false}});
    Lab::start_prepared(namespace, &[], &settings, move |command| {
        command.env("SSL_CERT_FILE", ca).env_remove("SSL_CERT_DIR");
    })
}

/// Queries many names, by UDP and by TCP.
fn answers(lab: &Lab<'_>) -> Result<()> {
    for number in 0..50 {
        let query = client::query(
            &format!("n{number}.encrypted.test."),
            RecordType::A,
            Some(1232),
        )?;
        let reply = if number % 2 == 0 {
            lab.ask(&query)?
        } else {
            lab.ask_tcp(&query)?
        };
        ensure!(
            client::addresses(&reply) == [Ipv4Addr::new(192, 0, 2, 9)],
            "{reply}\n{}",
            lab.server.log()
        );
    }
    Ok(())
}

#[test]
fn unbound_answers_over_tls() -> Result<()> {
    requires!(namespaces, programs(&["unbound"]));
    let namespace = Namespace::new("dotunb")?;
    let (files, address) = (Files::new()?, SocketAddr::new(loopback(31).ip(), 853));
    let _unbound = unbound(&namespace, &files, address)?;
    for recursor in [
        format!("tls://{}#{NAME}", address.ip()),
        format!("tls://{address}"),
    ] {
        let lab = start(&namespace, &files, &recursor)?;
        answers(&lab)?;
        let failures = lab.metric("bosh_dns_xdp_recursor_failures_total", "")?;
        ensure!(failures == 0, "{failures} failures\n{}", lab.server.log());
    }
    Ok(())
}

/// Lengths of the TLS records that went to a recursor.
type Lengths = Arc<Mutex<BTreeSet<usize>>>;

/// Relays connections to a recursor until the test ends.
fn relay(namespace: &Namespace, at: SocketAddr, to: SocketAddr) -> Result<Lengths> {
    let lengths = Lengths::default();
    let seen = Arc::clone(&lengths);
    namespace.run(|| -> Result<()> {
        let listener = TcpListener::bind(at)?;
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let seen = Arc::clone(&seen);
                // It ends with the connection.
                thread::spawn(move || relay_one(client, to, &seen));
            }
        });
        Ok(())
    })??;
    Ok(lengths)
}

fn relay_one(mut client: TcpStream, to: SocketAddr, seen: &Mutex<BTreeSet<usize>>) -> Result<()> {
    let mut recursor = TcpStream::connect(to)?;
    let (mut from, mut back) = (recursor.try_clone()?, client.try_clone()?);
    thread::spawn(move || io::copy(&mut from, &mut back));
    loop {
        let mut head = [0; 5];
        client.read_exact(&mut head)?;
        let mut body = vec![0; usize::from(u16::from_be_bytes([head[3], head[4]]))];
        client.read_exact(&mut body)?;
        seen.lock().insert(body.len());
        recursor.write_all(&[&head[..], &body].concat())?;
    }
}

/// Queries are padded (RFC 8467): the length of what is sent does not tell the name.
#[test]
fn queries_over_tls_have_one_length() -> Result<()> {
    requires!(namespaces, programs(&["unbound"]));
    let namespace = Namespace::new("dotpad")?;
    let (files, address) = (Files::new()?, SocketAddr::new(loopback(31).ip(), 853));
    let _unbound = unbound(&namespace, &files, address)?;
    let between = SocketAddr::new(loopback(32).ip(), 853);
    let lengths = relay(&namespace, between, address)?;
    let lab = start(&namespace, &files, &format!("tls://{between}#{NAME}"))?;
    let lengths_of = |label: &str| -> Result<BTreeSet<usize>> {
        lengths.lock().clear();
        let reply = lab.ask_for(&format!("{label}.encrypted.test."), RecordType::A)?;
        ensure!(
            reply.metadata.response_code == ResponseCode::NoError,
            "{reply}\n{}",
            lab.server.log()
        );
        Ok(lengths.lock().clone())
    };
    // The first query connects.
    lengths_of("n")?;
    let short = lengths_of("n")?;
    ensure!(!short.is_empty() && lengths_of(&"n".repeat(40))? == short);
    Ok(())
}

#[test]
fn knot_resolver_answers_over_tls() -> Result<()> {
    requires!(namespaces, programs(&["kresd"]));
    let namespace = Namespace::new("dotknot")?;
    let (files, address) = (Files::new()?, SocketAddr::new(loopback(32).ip(), 853));
    let _kresd = kresd(&namespace, &files, address)?;
    answers(&start(
        &namespace,
        &files,
        &format!("tls://{address}#{NAME}"),
    )?)
}

#[test]
fn other_certificates_are_refused() -> Result<()> {
    requires!(namespaces, programs(&["unbound"]));
    let namespace = Namespace::new("dotbad")?;
    let (files, other) = (Files::new()?, Files::new()?);
    let address = SocketAddr::new(loopback(33).ip(), 853);
    let _unbound = unbound(&namespace, &files, address)?;
    for (trusted, recursor) in [
        (&files, format!("tls://{address}#other.encrypted.test")),
        (&other, format!("tls://{address}#{NAME}")),
    ] {
        let lab = start(&namespace, trusted, &recursor)?;
        let reply = lab.ask_for("www.encrypted.test.", RecordType::A)?;
        ensure_code(&reply, ResponseCode::ServFail)?;
        lab.server
            .wait_for_log("TLS handshake with a recursor failed")?;
        let counted = || lab.metric("bosh_dns_xdp_recursor_failures_total", "reason=\"tls\"");
        wait_until("the failure in the metrics", START, || {
            counted().is_ok_and(|count| count >= 1)
        })?;
    }
    Ok(())
}
