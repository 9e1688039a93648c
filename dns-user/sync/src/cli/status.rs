//! `status`: who has what.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Context;
use clap::Args;
use dns_core::terminal;

use super::instance::call;
use crate::{
    publisher::{
        book::{Agent, Book, Count},
        now_ms,
        state::Folder,
    },
    tls::TlsOptions,
};

/// `status`. Exit code 1 where somebody lags.
#[derive(Debug, Args)]
pub(super) struct Status {
    /// Folder of state of the publisher on this machine
    #[arg(long, value_name = "FOLDER", required_unless_present = "api")]
    state: Option<PathBuf>,
    /// URL of the publisher's API, https://HOST:PORT, with --tls-*
    #[arg(long, value_name = "URL", requires = "ca", conflicts_with = "state")]
    api: Option<String>,
    /// Our certificates for the API.
    #[command(flatten)]
    tls: TlsOptions,
    /// All agents, not only those that lag
    #[arg(long)]
    all: bool,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

impl Status {
    /// Prints it.
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        let Self { state, api, tls, all, json } = self;
        let book: Book = match (api, tls.files()) {
            (Some(api), Some(files)) => {
                serde_json::from_slice(&call(&api, "/v1/status", &files, None).await?)?
            }
            _ => {
                let folder = state.context("say --state FOLDER, or --api URL with its --tls-* files")?;
                let book = Folder::look(&folder).read("agents.json")?;
                book.with_context(|| format!("{}: nothing was published from here yet", folder.display()))?
            }
        };
        let count = book.count();
        let code = if count.synced == count.agents { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        if json {
            println!("{}", terminal::json(&serde_json::to_string(&book)?));
        } else {
            print!("{}", terminal::lines(&table(&book, all, now_ms())));
        }
        Ok(code)
    }
}

/// The book for people.
fn table(book: &Book, all: bool, now: u64) -> String {
    let Count { agents, synced, failing, silent } = book.count();
    let ago = |at: Option<u64>| {
        at.map_or("never".to_owned(), |at| format!("{} s ago", now.saturating_sub(at) / 1000))
    };
    let mut text = format!(
        "version {}, made {}\n{synced} of {agents} agents have it, {failing} failing, {silent} silent\n{} bytes of messages sent for it\n",
        book.version,
        ago(Some(book.made)),
        book.bytes_sent
    );
    let shown = book.agents.iter().filter(|(_, agent)| all || agent.version < book.version);
    let mut rows =
        vec![["AGENT", "VERSION", "LAG", "HEARD", "ASKED", "ATTEMPTS", "ERROR"].map(str::to_owned)];
    for (id, agent) in shown {
        let Agent { version, heard, asked, failures, error, .. } = agent;
        let lag = book.version.saturating_sub(*version);
        let error = error.clone().unwrap_or_default();
        rows.push([
            id.clone(),
            version.to_string(),
            lag.to_string(),
            ago(*heard),
            ago(*asked),
            failures.to_string(),
            error,
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
    use crate::message::Reply;

    #[test]
    fn those_that_lag_are_shown() {
        let mut book = Book::default();
        book.set_agents(["a", "b"].into_iter());
        book.set_version(5, 0);
        book.replied("a", 5, Reply::Synced, 1000, 0.5);
        book.replied("b", 5, Reply::Exception("disk full".to_owned()), 1000, 0.5);
        let text = table(&book, false, 4000);
        assert_eq!(
            text,
            "version 5, made 4 s ago\n1 of 2 agents have it, 1 failing, 0 silent\n0 bytes of messages sent for it\n\
             AGENT  VERSION  LAG  HEARD    ASKED  ATTEMPTS  ERROR\n\
             b      0        5    3 s ago  never  0         disk full\n"
        );
        assert!(table(&book, true, 4000).contains("\na "));
    }
}
