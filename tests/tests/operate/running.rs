//! A server with API and metrics in a private namespace.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::Path,
    process::Output,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use hickory_proto::rr::RecordType;
use rcgen::{ExtendedKeyUsagePurpose, SanType};
use serde_json::{Value, json};
use tempfile::TempDir;
use whole_system_tests::{
    client,
    namespace::Namespace,
    pki::Authority,
    process::wait_until,
    server::{self, Server},
};

/// Port of the API.
pub(crate) const API_PORT: u16 = 53080;

/// Port of the metrics.
pub(crate) const METRICS_PORT: u16 = 53088;

/// Three instances of a group in two zones, and one of another group.
pub(crate) const RECORDS: &str = r#"{
    "record_keys": ["id", "num_id", "instance_group", "group_ids", "az", "az_id", "network", "network_id",
        "deployment", "ip", "domain", "agent_id", "instance_index"],
    "record_infos": [
        ["a", "1", "web", ["1"], "z1", "1", "net", "1", "dep", "10.0.0.1", "bosh", "agent-a", 0],
        ["b", "2", "web", ["1"], "z2", "2", "net", "1", "dep", "10.0.0.2", "bosh", "agent-b", 1],
        ["c", "3", "web", ["1"], "z1", "1", "net", "1", "dep", "10.0.0.3", "bosh", "agent-c", 2],
        ["d", "4", "db", ["2"], "z1", "1", "net", "1", "dep", "10.0.0.4", "bosh", "agent-d", 0]
    ],
    "version": 7
}"#;

/// The server and its surroundings.
pub(crate) struct Running {
    /// Ended before its namespace is removed.
    pub(crate) server: Server,
    pub(crate) namespace: Namespace,
}

impl Running {
    /// Starts the server and waits until it can be operated; `extra` is merged into its
    /// configuration.
    ///
    /// DNS is ready first, the API shortly afterwards.
    pub(crate) fn start(label: &str, extra: &Value) -> Result<Self> {
        Self::start_in(Namespace::new(label)?, extra)
    }

    /// Like [`Self::start`], in a namespace that may hold other servers already.
    pub(crate) fn start_in(namespace: Namespace, extra: &Value) -> Result<Self> {
        let folder = server::folder(
            RECORDS.as_bytes(),
            Some(br#"{"web.alias": ["*.web.net.dep.bosh"]}"#),
        )?;
        Self::start_with(namespace, folder, extra)
    }

    /// Like [`Self::start_in`], with the files in `folder`.
    pub(crate) fn start_with(namespace: Namespace, folder: TempDir, extra: &Value) -> Result<Self> {
        let links = folder.path().join("jobs/web/.bosh");
        fs::create_dir_all(&links)?;
        fs::write(
            links.join("links.json"),
            r#"[{"group": "1", "name": "web", "type": "http"}]"#,
        )?;
        let certificates = folder.path().join("certificates");
        fs::create_dir(&certificates)?;
        write_certificates(&certificates)?;
        let mut settings = json!({
            "api": {
                "port": API_PORT,
                "certificate_file": certificates.join("server.crt"),
                "private_key_file": certificates.join("server.key"),
                "ca_file": certificates.join("ca.crt"),
            },
            "metrics": {"enabled": true, "address": "127.0.0.1", "port": METRICS_PORT},
            "xdp": {"mode": "off"},
        });
        server::merge(&mut settings, extra);
        let server = Server::start(
            Some(&namespace),
            folder,
            ([127, 0, 0, 1], 53).into(),
            &settings,
        )?;
        let open = || TcpStream::connect((Ipv4Addr::LOCALHOST, API_PORT)).is_ok();
        wait_until("the API", Duration::from_secs(120), || {
            namespace.run(open).unwrap_or(false)
        })?;
        Ok(Self { server, namespace })
    }

    /// Returns the folder of the server's files.
    pub(crate) fn folder(&self) -> &Path {
        self.server.folder.path()
    }

    /// Runs a program in the server's namespace.
    pub(crate) fn output(&self, program: &str, arguments: &[&str]) -> Result<Output> {
        let mut command = self.namespace.command(program)?;
        command.args(arguments).current_dir(self.folder());
        command
            .output()
            .with_context(|| format!("cannot run {program}"))
    }

    /// Runs one of our commands with the server's configuration; returns exit code, standard output
    /// and standard error.
    pub(crate) fn cli(&self, arguments: &[&str]) -> Result<(i32, String, String)> {
        let program = server::program()?;
        let program = program
            .to_str()
            .context("the path of the program is text")?;
        let mut all = arguments.to_vec();
        all.extend(["--config", "config.json"]);
        let Output {
            status,
            stdout,
            stderr,
        } = self.output(program, &all)?;
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ok((status.code().unwrap_or(-1), text(stdout), text(stderr)))
    }

    /// Requests an API path by curl with the certificates in `folder`; returns output and status.
    pub(crate) fn curl_api(
        &self,
        path: &str,
        folder: &Path,
        more: &[&str],
    ) -> Result<(String, u16)> {
        let file = |name: &str| folder.join(name).display().to_string();
        let (ca, cert, key) = (file("ca.crt"), file("client.crt"), file("client.key"));
        let resolve = format!("api.bosh-dns:{API_PORT}:127.0.0.1");
        let url = format!("https://api.bosh-dns:{API_PORT}{path}");
        let mut arguments = vec![
            "-sS",
            "--max-time",
            "10",
            "-w",
            "\n%{http_code}",
            "--resolve",
            &resolve,
        ];
        arguments.extend(["--cacert", &ca, "--cert", &cert, "--key", &key]);
        arguments.extend(more);
        arguments.push(&url);
        let Output {
            status,
            stdout,
            stderr,
        } = self.output("curl", &arguments)?;
        ensure!(
            status.success(),
            "curl: {}",
            String::from_utf8_lossy(&stderr).trim()
        );
        let text = String::from_utf8(stdout)?;
        let (body, code) = text
            .rsplit_once('\n')
            .context("curl prints the status on a line of its own")?;
        Ok((body.to_owned(), code.parse()?))
    }

    /// Runs curl without TLS; returns the body.
    pub(crate) fn curl(&self, arguments: &[&str]) -> Result<String> {
        let mut all = vec!["-sS", "--max-time", "10"];
        all.extend(arguments);
        let Output {
            status,
            stdout,
            stderr,
        } = self.output("curl", &all)?;
        ensure!(
            status.success(),
            "curl: {}",
            String::from_utf8_lossy(&stderr).trim()
        );
        Ok(String::from_utf8(stdout)?)
    }

    /// Queries a name `times` times.
    pub(crate) fn ask(&self, name: &str, times: u32) -> Result<()> {
        let address: SocketAddr = self.server.address;
        self.namespace.run(|| {
            for _ in 0..times {
                client::ask(address, &client::query(name, RecordType::A, None)?)?;
            }
            Ok(())
        })?
    }
}

/// Writes a CA and its certificates for server and client, both with the name `api.bosh-dns`.
pub(crate) fn write_certificates(folder: &Path) -> Result<()> {
    let authority = Authority::new("test ca")?;
    let name = SanType::DnsName("api.bosh-dns".try_into()?);
    for (file, purpose) in [
        ("server", ExtendedKeyUsagePurpose::ServerAuth),
        ("client", ExtendedKeyUsagePurpose::ClientAuth),
    ] {
        let identity = authority.issue_with("api.bosh-dns", |params| {
            params.subject_alt_names = vec![name.clone()];
            params.extended_key_usages = vec![purpose];
        })?;
        identity.write(folder, file)?;
    }
    authority.write(folder)
}
