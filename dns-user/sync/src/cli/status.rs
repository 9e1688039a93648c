//! `status`: the version that each agent reported.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Context;
use clap::Args;
use dns_core::terminal;

use super::instance::call;
use crate::{
    clock::now_ms,
    message::printable,
    publisher::{
        book::{Agent, AgentState, Book, Count},
        state::{Folder, State},
    },
    tls::TlsOptions,
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
        let (book, newest): (Book, u64) = match (api, tls.files()) {
            (Some(api), Some(files)) => {
                let book: Book = serde_json::from_slice(&call(&api, "/v1/status", &files, None).await?)?;
                let newest = book.version;
                (book, newest)
            }
            _ => {
                let path =
                    state.context("--state FOLDER, or --api URL with its --tls-* files, is required")?;
                let folder = Folder::open(&path);
                let book: Option<Book> = folder.read("agents.json")?;
                let book = book.with_context(|| {
                    format!(
                        "{}: no agent reports: nothing has been published from this state folder, or the \
                         disk is full (see the publisher's log)",
                        path.display()
                    )
                })?;
                // A version is committed before it is announced, and announced before the book is
                // saved: reading the state after the book shows whether the book is current.
                let state: State = folder.read("state.json")?.unwrap_or_default();
                (book, state.versions.last().map_or(0, |made| made.version))
            }
        };
        let count = book.count();
        let synced = count.complete() && book.version > 0 && newest <= book.version;
        let code = if synced { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        if json {
            println!("{}", terminal::json(&serde_json::to_string(&book)?));
        } else {
            print!("{}", terminal::lines(&table(&book, all, now_ms())));
            if newest > book.version {
                println!("announcing version {newest}");
            }
        }
        Ok(code)
    }
}

/// Formats the book as text.
fn table(book: &Book, all: bool, now: u64) -> String {
    let count = book.count();
    let Count { agents, synced, .. } = count;
    let ago = |at: Option<u64>| {
        at.map_or("never".to_owned(), |at| format!("{} s ago", now.saturating_sub(at) / 1000))
    };
    let mut text = format!(
        "version {}, made {}\n{synced} of {agents} agents have it, {count}\n{} bytes of messages sent for it\n",
        book.version,
        ago(Some(book.made)),
        book.bytes_sent
    );
    let shown = book.agents.iter().filter(|(_, agent)| all || book.state(agent) != AgentState::Synced);
    let mut rows =
        vec![["AGENT", "VERSION", "LAG", "HEARD", "ASKED", "ATTEMPTS", "ERROR"].map(str::to_owned)];
    for (id, agent) in shown {
        let Agent { held, heard, asked, failures, error, .. } = agent;
        let version = held.as_ref().map_or(0, |held| held.version);
        let error = match (book.state(agent), error) {
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
            book.version.saturating_sub(version).to_string(),
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
        message::{Reply, Report},
        publisher::book::Call,
    };

    #[test]
    fn unsynced_agents_are_listed() {
        let call = Call { version: 5, nonce: 1 };
        let mut book = Book::default();
        book.set_agents(["a", "b", "c"].into_iter());
        book.set_version(5, "five", 0);
        for id in ["a", "b", "c"] {
            book.asked(id, call, 0, 0, 0.5);
        }
        let report = |digest: &str| Report { version: 5, digest: Some(digest.to_owned()), patches: true };
        book.replied("a", call, Reply::Synced(Some(report("five"))), 1000, 0.5);
        book.replied("b", call, Reply::Exception("disk full".to_owned()), 1000, 0.5);
        book.replied("c", call, Reply::Synced(Some(report("other"))), 1000, 0.5);
        let text = table(&book, false, 4000);
        assert_eq!(
            text,
            "version 5, made 4 s ago\n1 of 3 agents have it, 1 failing, 0 silent, 1 disagreeing\n\
             0 bytes of messages sent for it\n\
             AGENT  VERSION  LAG  HEARD    ASKED    ATTEMPTS  ERROR\n\
             b      0        5    3 s ago  4 s ago  1         disk full\n\
             c      5        0    3 s ago  4 s ago  0         disagrees: holds other\n"
        );
        assert!(table(&book, true, 4000).contains("\na "));
    }
}
