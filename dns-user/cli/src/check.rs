//! `check`: validates a configuration without starting a server.

use std::{
    fmt::{Display, Write},
    path::PathBuf,
    process::ExitCode,
};

use clap::Args;

use super::{complain, operate::served_addresses};
use dns_command_line::print_or_fail;
use dns_core::terminal;
use dns_resolver::daemon::check::{CheckReport, Serves, check};

/// Maximum number of warnings in the table; `--json` includes all.
const SHOWN_WARNINGS: usize = 20;

#[derive(Debug, Args)]
pub(super) struct CheckArguments {
    /// config.json of bosh-dns
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

impl CheckArguments {
    /// Checks and prints the result; exits with 0 if a server would start and serve everything.
    pub(super) fn run(self) -> ExitCode {
        let Self { config, json } = self;
        let mut report = check(&config);
        if report.ok {
            // A running server with this configuration holds these addresses itself.
            report.add_taken_addresses(&served_addresses(&config));
        }
        let text = if json {
            let text =
                serde_json::to_string_pretty(&report).expect("texts and numbers are valid JSON");
            terminal::json(&text).into_owned() + "\n"
        } else {
            terminal::lines(&table(&report)).into_owned()
        };
        // The table first: with both streams on a terminal, the errors stand last, where they are
        // seen.
        let printed = print_or_fail("bosh-dns-xdp", &text);
        for error in &report.errors {
            complain(&error);
        }
        match printed {
            Ok(()) if report.ok => ExitCode::SUCCESS,
            Ok(()) => ExitCode::FAILURE,
            Err(code) => code,
        }
    }
}

fn table(report: &CheckReport) -> String {
    let mut rows = match &report.serves {
        Some(serves) => rows(serves),
        None => Vec::new(),
    };
    for warning in report.warnings.iter().take(SHOWN_WARNINGS) {
        rows.push(("warning", warning.clone()));
    }
    if report.warnings.len() > SHOWN_WARNINGS {
        let more = report.warnings.len() - SHOWN_WARNINGS;
        rows.push(("warning", format!("and {more} more (--json shows all)")));
    }
    let result = if report.ok { "ok" } else { "not ok" };
    rows.push(("result", result.to_owned()));
    let mut text = String::new();
    for (name, value) in rows {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name:<18} {}", terminal::line(&value));
    }
    text
}

fn rows(serves: &Serves) -> Vec<(&'static str, String)> {
    let version = match serves.records_version {
        Some(version) => format!("version {version}"),
        None => "without version".to_owned(),
    };
    let recursors = match (serves.recursion, serves.recursor_addresses.is_empty()) {
        (false, _) => "off".to_owned(),
        (true, true) => "the ones of /etc/resolv.conf".to_owned(),
        (true, false) => serves.recursor_addresses.join(", "),
    };
    let mut rows = vec![
        (
            "listen",
            format!("{} (UDP and TCP)", joined(&serves.listen)),
        ),
        (
            "records",
            format!("{version}, {} instances", serves.instances),
        ),
        ("domains", joined(&serves.domains)),
        ("aliases", serves.aliases.to_string()),
        ("handlers", joined(&serves.handlers)),
        ("Consul's names", or_off(serves.consul_names.as_ref())),
        ("recursors", recursors),
        ("up-checks", joined(&serves.upcheck_domains)),
        (
            "fast path",
            format!(
                "mode {}, {} names published at startup",
                serves.fast_path_mode, serves.published_names
            ),
        ),
        (
            "health checks",
            if serves.health_checks { "on" } else { "off" }.to_owned(),
        ),
        (
            "API",
            or_off(serves.api_port.map(|port| format!("127.0.0.1:{port}"))),
        ),
        ("metrics", or_off(serves.metrics_address)),
    ];
    for (kind, state) in &serves.files {
        let mut files = Vec::new();
        for path in &state.files {
            files.push(path.display());
        }
        let verdict = if state.errors.is_empty() {
            "ok"
        } else {
            "not usable"
        };
        rows.push(("file", format!("{kind}: {verdict}: {}", joined(&files))));
    }
    rows
}

/// Returns a list in one line.
fn joined(list: &[impl Display]) -> String {
    if list.is_empty() {
        return "none".to_owned();
    }
    let texts: Vec<String> = list.iter().map(ToString::to_string).collect();
    texts.join(", ")
}

fn or_off(value: Option<impl Display>) -> String {
    match value {
        Some(value) => value.to_string(),
        None => "off".to_owned(),
    }
}
