//! The real server, serving interfaces once queries arrive through them.

use std::{collections::BTreeMap, process::Command, time::Duration};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use whole_system_tests::{
    bpffs::Bpffs,
    metrics::{Metrics, wait_for_metrics},
    namespace::Namespace,
    pair::v4,
    process::{capture, wait_until},
    server::{self, Server},
};

/// A name in the records, with three addresses.
pub(crate) const NAME: &str = "q-s0.q-g3.bosh.";

/// Time limit for a state to be shown, many times what a busy machine needs.
const STATE_SHOWN: Duration = Duration::from_secs(60);

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
        let mut command = namespace.command(server::program()?)?;
        let config = self.server.folder.path().join("config.json");
        let said = capture(command.args(["status", "--json", "--config"]).arg(config))?;
        let status: Value = serde_json::from_str(&said)?;
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

/// Returns the number of replies from interfaces.
pub(crate) fn hits(namespace: &Namespace) -> Result<u64> {
    Ok(Metrics::read(namespace)?.fast_path_replies())
}
