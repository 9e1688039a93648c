//! `check`: validates a configuration without starting a server.

use std::{fmt::Write, path::PathBuf, process::ExitCode};

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
            report.add_taken_addresses(&served_addresses(&config));
        }
        let text = if json {
            let text =
                serde_json::to_string_pretty(&report).expect("texts and numbers are valid JSON");
            terminal::json(&text).into_owned() + "\n"
        } else {
            terminal::lines(&table(&report)).into_owned()
        };
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
    let mut text = String::new();
    let mut row = |name: &str, value: &str| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name:<18} {}", terminal::line(value));
    };
    if let Some(serves) = &report.serves {
        for (name, value) in rows(serves) {
            row(name, &value);
        }
    }
    for warning in report.warnings.iter().take(SHOWN_WARNINGS) {
        row("warning", warning);
    }
    if report.warnings.len() > SHOWN_WARNINGS {
        row(
            "warning",
            &format!(
                "and {} more (--json shows all)",
                report.warnings.len() - SHOWN_WARNINGS
            ),
        );
    }
    row("result", if report.ok { "ok" } else { "not ok" });
    text
}

fn rows(serves: &Serves) -> Vec<(&'static str, String)> {
    let joined = |list: &[String], none: &str| {
        if list.is_empty() {
            none.to_owned()
        } else {
            list.join(", ")
        }
    };
    let listen: Vec<String> = serves.listen.iter().map(ToString::to_string).collect();
    let version = serves
        .records_version
        .map_or_else(|| "without version".to_owned(), |v| format!("version {v}"));
    let recursors = match (serves.recursion, serves.recursor_addresses.is_empty()) {
        (false, _) => "off".to_owned(),
        (true, true) => "the ones of /etc/resolv.conf".to_owned(),
        (true, false) => serves.recursor_addresses.join(", "),
    };
    let mut rows = vec![
        ("listen", format!("{} (UDP and TCP)", listen.join(", "))),
        (
            "records",
            format!("{version}, {} instances", serves.instances),
        ),
        ("domains", joined(&serves.domains, "none")),
        ("aliases", serves.aliases.to_string()),
        ("handlers", joined(&serves.handlers, "none")),
        (
            "Consul's names",
            serves
                .consul_names
                .clone()
                .unwrap_or_else(|| "off".to_owned()),
        ),
        ("recursors", recursors),
        ("up-checks", joined(&serves.upcheck_domains, "none")),
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
            serves
                .api_port
                .map_or_else(|| "off".to_owned(), |port| format!("127.0.0.1:{port}")),
        ),
        (
            "metrics",
            serves
                .metrics_address
                .map_or_else(|| "off".to_owned(), |address| address.to_string()),
        ),
    ];
    for (kind, state) in &serves.files {
        let files: Vec<String> = state
            .files
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        let verdict = if state.errors.is_empty() {
            "ok"
        } else {
            "not usable"
        };
        rows.push((
            "file",
            format!("{kind}: {verdict}: {}", joined(&files, "none")),
        ));
    }
    rows
}
