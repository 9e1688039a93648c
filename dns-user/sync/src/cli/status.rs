//! `status`: the version that each agent reported.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Context;
use clap::Args;
use dns_core::terminal;

use super::instance::call;
use crate::{
    distributor::{
        registry::{Agent, AgentRegistry, AgentState, Count},
        state::{Folder, State},
    },
    http::TlsOptions,
    message::printable,
    now_ms,
};

/// `status`. The exit code is 1 unless all agents hold the version.
#[derive(Debug, Args)]
pub(super) struct Status {
    /// The publisher's state folder on this machine
    #[arg(long, value_name = "FOLDER", required_unless_present = "api")]
    state: Option<PathBuf>,
    /// URL of the publisher's API, https://HOST:PORT; needs --tls-*
    #[arg(long, value_name = "URL", requires = "ca", conflicts_with = "state")]
    api: Option<String>,
    /// Our certificates for the API.
    #[command(flatten)]
    tls: TlsOptions,
    /// Show all agents, not only lagging ones
    #[arg(long)]
    all: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Status {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        let Self { state, api, tls, all, json } = self;
        let (registry, newest): (AgentRegistry, u64) = match (api, tls.files()) {
            (Some(api), Some(files)) => {
                let registry: AgentRegistry =
                    serde_json::from_slice(&call(&api, "/v1/status", &files, None).await?)?;
                let newest = registry.version;
                (registry, newest)
            }
            _ => {
                let path =
                    state.context("--state FOLDER, or --api URL with its --tls-* files, is required")?;
                let folder = Folder::open(&path);
                let registry: Option<AgentRegistry> = folder.read("agents.json")?;
                let registry = registry.with_context(|| {
                    format!(
                        "{}: no agent reports: nothing has been published from this state folder, or the \
                         disk is full (see the publisher's log)",
                        path.display()
                    )
                })?;
                // A version is committed before it is announced, and announced before the registry is
                // saved: reading the state after the registry shows whether the registry is current.
                let state: State = folder.read("state.json")?.unwrap_or_default();
                (registry, state.versions.last().map_or(0, |made| made.version))
            }
        };
        let count = registry.count();
        let synced = count.complete() && registry.version > 0 && newest <= registry.version;
        let code = if synced { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        if json {
            println!("{}", terminal::json(&serde_json::to_string(&registry)?));
        } else {
            print!("{}", terminal::lines(&table(&registry, all, now_ms())));
            if newest > registry.version {
                println!("announcing version {newest}");
            }
        }
        Ok(code)
    }
}

/// Formats the registry as text.
fn table(registry: &AgentRegistry, all: bool, now: u64) -> String {
    let count = registry.count();
    let Count { agents, synced, .. } = count;
    let ago = |at: Option<u64>| {
        at.map_or("never".to_owned(), |at| format!("{} s ago", now.saturating_sub(at) / 1000))
    };
    let mut text = match registry.version {
        0 => format!("no version was announced yet\n0 of {agents} agents have one, {count}\n"),
        version => format!(
            "version {version}, made {}\n{synced} of {agents} agents have it, {count}\n{} bytes of messages \
             sent for it\n",
            ago(Some(registry.made)),
            registry.bytes_sent
        ),
    };
    let shown =
        registry.agents.iter().filter(|(_, agent)| all || registry.state(agent) != AgentState::Synced);
    let mut rows =
        vec![["AGENT", "VERSION", "LAG", "HEARD", "ASKED", "ATTEMPTS", "ERROR"].map(str::to_owned)];
    for (id, agent) in shown {
        let Agent { held, heard, asked, failures, error, .. } = agent;
        let version = held.as_ref().map_or(0, |held| held.version);
        let error = match (registry.state(agent), error) {
            (AgentState::Disagreeing, _) => {
                let digest = held.as_ref().and_then(|held| held.digest.as_deref()).unwrap_or_default();
                format!("disagrees: holds {digest}")
            }
            (AgentState::Unverified, _) => "reports no digest (BOSH agent)".to_owned(),
            (_, error) => error.clone().unwrap_or_default(),
        };
        rows.push([
            printable(id),
            version.to_string(),
            registry.version.saturating_sub(version).to_string(),
            ago(*heard),
            ago(*asked),
            failures.to_string(),
            printable(&error),
        ]);
    }
    if rows.len() == 1 {
        return text;
    }
    let mut widths = [0; 7];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.len());
        }
    }
    for row in &rows {
        let cells: Vec<String> =
            row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        distributor::registry::Call,
        message::{Reply, Report},
    };

    #[test]
    fn unsynced_agents_are_listed() {
        let call = Call { version: 5, nonce: 1 };
        let mut registry = AgentRegistry::default();
        registry.set_agents(["a", "b", "c"].into_iter());
        registry.set_version(5, "five", 0);
        for id in ["a", "b", "c"] {
            registry.asked(id, call, 0, 0, 0.5);
        }
        let report = |digest: &str| Report { version: 5, digest: Some(digest.to_owned()), patches: true };
        registry.replied("a", call, Reply::Synced(Some(report("five"))), 1000, 0.5);
        registry.replied("b", call, Reply::Exception("disk full".to_owned()), 1000, 0.5);
        registry.replied("c", call, Reply::Synced(Some(report("other"))), 1000, 0.5);
        let text = table(&registry, false, 4000);
        assert_eq!(
            text,
            "version 5, made 4 s ago\n1 of 3 agents have it, 1 failing, 0 silent, 1 disagreeing\n\
             0 bytes of messages sent for it\n\
             AGENT  VERSION  LAG  HEARD    ASKED    ATTEMPTS  ERROR\n\
             b      0        5    3 s ago  4 s ago  1         disk full\n\
             c      5        0    3 s ago  4 s ago  0         disagrees: holds other\n"
        );
        assert!(table(&registry, true, 4000).contains("\na "));
        let early = table(&AgentRegistry::default(), false, 1_795_721_272_000);
        assert_eq!(early, "no version was announced yet\n0 of 0 agents have one, 0 failing, 0 silent\n");
    }
}
