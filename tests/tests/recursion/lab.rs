//! The server and its recursors in one network namespace.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    process::{Command, Output},
};

use anyhow::{Context as _, Result, ensure};
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::RecordType,
};
use serde_json::{Value, json};
use whole_system_tests::{
    bpffs::Bpffs,
    client,
    metrics::{Metrics, wait_for_metrics},
    namespace::Namespace,
    server::{self, Server},
};

/// Listen address of the server.
pub(crate) const OURS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 53);

/// One instance, which also has a reverse name.
pub(crate) const RECORDS: &str = r#"{
    "record_keys": ["id", "instance_group", "group_ids", "network", "deployment", "ip", "domain"],
    "record_infos": [["a", "web", ["1"], "net", "dep", "10.0.0.1", "bosh"]],
    "records": [["10.0.0.1", "a.web.net.dep.bosh"]],
    "version": 1
}"#;

/// The name of the instance in [`RECORDS`].
pub(crate) const LOCAL_NAME: &str = "q-s0.q-g1.bosh.";

/// Fails unless the reply has this response code.
pub(crate) fn ensure_code(reply: &Message, code: ResponseCode) -> Result<()> {
    ensure!(reply.metadata.response_code == code, "{reply}");
    Ok(())
}

/// Returns loopback address number `last`, on port 53, for a recursor.
pub(crate) fn loopback(last: u8) -> SocketAddr {
    (Ipv4Addr::new(127, 0, 0, last), 53).into()
}

/// The server in its namespace.
#[derive(Debug)]
pub(crate) struct Lab<'a> {
    pub(crate) server: Server,
    pub(crate) namespace: &'a Namespace,
    /// Where the server pins its maps and programs, if it has any.
    pub(crate) bpffs: Option<Bpffs>,
}

impl<'a> Lab<'a> {
    /// Starts the server on [`OURS`] with these recursors; `extra` is merged into its
    /// configuration.
    pub(crate) fn start(
        namespace: &'a Namespace,
        recursors: &[SocketAddr],
        extra: &Value,
    ) -> Result<Self> {
        Self::start_prepared(namespace, recursors, extra, |_| {})
    }

    /// Like [`Self::start`], with a modified command.
    pub(crate) fn start_prepared(
        namespace: &'a Namespace,
        recursors: &[SocketAddr],
        extra: &Value,
        prepare: impl FnOnce(&mut Command),
    ) -> Result<Self> {
        let mut config = json!({
            "xdp": {"mode": "off"},
            "disable_recursors": false,
            "recursors": recursors,
            "metrics": {"enabled": true},
        });
        server::merge(&mut config, extra);
        let address = config
            .get("address")
            .and_then(Value::as_str)
            .map(str::parse)
            .transpose()?;
        let address = SocketAddr::new(address.unwrap_or(OURS.ip()), OURS.port());
        let folder = server::folder(RECORDS.as_bytes(), None)?;
        if let Some(handlers) = config
            .as_object_mut()
            .and_then(|config| config.remove("handlers"))
        {
            std::fs::write(
                folder.path().join("handlers/handlers.json"),
                handlers.to_string(),
            )?;
        }
        let server = Server::start_prepared(Some(namespace), folder, address, &config, prepare)?;
        if config["metrics"]["enabled"] == true {
            // They become available shortly after DNS.
            wait_for_metrics(namespace).with_context(|| server.log())?;
        }
        Ok(Self {
            server,
            namespace,
            bpffs: None,
        })
    }

    pub(crate) fn ask(&self, message: &Message) -> Result<Message> {
        self.namespace
            .run(|| client::ask(self.server.address, message))?
    }

    pub(crate) fn ask_tcp(&self, message: &Message) -> Result<Message> {
        self.namespace
            .run(|| client::ask_tcp(self.server.address, message))?
    }

    /// Queries a name by UDP without EDNS.
    pub(crate) fn ask_for(&self, name: &str, record_type: RecordType) -> Result<Message> {
        self.ask(&client::query(name, record_type, None)?)
    }

    /// Runs one of the server's commands; returns exit code, standard output and standard error.
    pub(crate) fn cli(&self, arguments: &[&str]) -> Result<(i32, String, String)> {
        let program = server::program()?;
        let mut command = self
            .namespace
            .command(program.to_str().context("the program's path is text")?)?;
        command
            .args(arguments)
            .arg("--config")
            .arg(self.server.folder.path().join("config.json"));
        let Output {
            status,
            stdout,
            stderr,
        } = command.output()?;
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ok((status.code().unwrap_or(-1), text(stdout), text(stderr)))
    }

    /// Sums all samples of a metric whose labels contain `label`.
    pub(crate) fn metric(&self, family: &str, label: &str) -> Result<u64> {
        Ok(Metrics::read(self.namespace)?.sum(family, label))
    }
}
