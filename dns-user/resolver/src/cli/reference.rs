//! The reference pages of the documentation, generated from the declarations they describe.
//!
//! The pages are committed, so that they can be read without building anything. The tests
//! compare them; `UPDATE_REFERENCES=1 cargo nextest run -p dns-resolver reference` rewrites them.

use std::{env, fmt::Write, fs, path::Path};

use clap::{Command, CommandFactory};
use dns_core::config::keys::{KEYS, Origin};

use super::Cli;
use dns_platform::metrics::names::DECLARED;

/// Note at the top of each generated page.
const GENERATED: &str = "<!-- Generated: see dns-user/resolver/src/cli/reference.rs -->\n\n";

/// Compares a page with `text`, or rewrites it if `UPDATE_REFERENCES` is set.
fn compare(page: &str, text: &str) {
    let text = format!("{GENERATED}{}\n", text.trim_end());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference").join(page);
    if env::var_os("UPDATE_REFERENCES").is_some() {
        fs::write(&path, &text).unwrap();
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == text,
        "docs/reference/{page} is out of date: run \
         `UPDATE_REFERENCES=1 cargo nextest run -p dns-resolver reference` and commit the result"
    );
}

/// Escapes text for a table cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('<', "&lt;").replace('\n', " ")
}

/// Generates the page of `config.json`.
fn configuration() -> String {
    let mut page = "# Configuration reference\n\n\
        `config.json` is one JSON object. Keys may have any letter case, the last of several equal keys wins, and `null`\n\
        leaves a key at its default. Durations are texts in Go's form: `\"400ms\"`, `\"5s\"`, `\"1h2m3.5s\"`. An unknown key\n\
        is reported and ignored; a member whose name begins with `#` is a comment. `bosh-dns-xdp check --config FILE`\n\
        validates a file, `bosh-dns-xdp config --default` prints one to start from. Keys of the object `consul` are\n\
        described in [Consul](../consul.md).\n"
        .to_owned();
    let object = |path: &str| path.split_once('.').map_or("", |(object, _)| object).to_owned();
    let mut current = None;
    for key in KEYS {
        if current.as_ref() != Some(&object(key.path)) {
            let title = object(key.path);
            let title = if title.is_empty() { "Top level".to_owned() } else { format!("`{title}`") };
            let _ = write!(
                page,
                "\n## {title}\n\n| Key | Type, unit | Default | Example | Meaning |\n|---|---|---|---|---|\n"
            );
            current = Some(object(key.path));
        }
        let code = |text: &str| if text.is_empty() { String::new() } else { format!("`{}`", cell(text)) };
        let ours = if key.origin == Origin::Ours { " *(not in bosh-dns)*" } else { "" };
        let _ = writeln!(
            page,
            "| `{}` | {} | {} | {} | {}{ours} |",
            key.path,
            cell(key.form),
            code(key.default),
            code(key.example),
            cell(key.about),
        );
    }
    page
}

/// Generates the page of the metrics.
fn metrics() -> String {
    let mut page = "# Metrics reference\n\n\
        Families that `/metrics` exposes. Units are part of the names; counters end in `_total`. Names with `boshdns_`\n\
        and `coredns_` have the meaning they have in bosh-dns.\n\n\
        | Name | Type | Labels | Meaning |\n|---|---|---|---|\n"
        .to_owned();
    for family in DECLARED {
        let labels: Vec<String> = family.labels.iter().map(|label| format!("`{label}`")).collect();
        let _ = writeln!(
            page,
            "| `{}` | {} | {} | {} |",
            family.name,
            family.kind.to_lowercase(),
            labels.join(", "),
            cell(family.help),
        );
    }
    page
}

/// Generates the page of one program's commands.
fn commands(mut command: Command) -> String {
    command.build();
    let mut page = format!(
        "# Command reference\n\n{}.\n\n{}\n",
        command.get_about().map(ToString::to_string).unwrap_or_default(),
        command.get_after_help().map(ToString::to_string).unwrap_or_default(),
    );
    for subcommand in command.get_subcommands().filter(|subcommand| subcommand.get_name() != "help") {
        describe(subcommand, command.get_name(), &mut page);
    }
    page
}

/// Adds a command, its arguments and its subcommands.
fn describe(command: &Command, parent: &str, page: &mut String) {
    if command.is_hide_set() {
        return;
    }
    let name = format!("{parent} {}", command.get_name());
    let about = command.get_long_about().or(command.get_about()).map(ToString::to_string).unwrap_or_default();
    let _ = write!(page, "\n## {name}\n\n{}\n", about.trim_end_matches('.').to_owned() + ".");
    let arguments: Vec<_> = command
        .get_arguments()
        .filter(|argument| {
            !argument.is_hide_set() && !["help", "version"].contains(&argument.get_id().as_str())
        })
        .collect();
    if !arguments.is_empty() {
        page.push_str("\n| Argument | Meaning | Default |\n|---|---|---|\n");
    }
    for argument in arguments {
        let value = argument
            .get_value_names()
            .filter(|_| argument.get_action().takes_values())
            .map(|names| names.iter().map(|name| format!(" {name}")).collect::<String>())
            .unwrap_or_default();
        let form = match (argument.get_long(), argument.get_short()) {
            (Some(long), Some(short)) => format!("`-{short}`, `--{long}{value}`"),
            (Some(long), None) => format!("`--{long}{value}`"),
            (None, Some(short)) => format!("`-{short}{value}`"),
            (None, None) => format!("`{}`", value.trim_start()),
        };
        let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        let choices: Vec<String> = argument
            .get_possible_values()
            .iter()
            .filter(|_| argument.get_action().takes_values())
            .map(|value| format!("`{}`", value.get_name()))
            .collect();
        let choices = if choices.is_empty() { String::new() } else { format!(" ({})", choices.join(", ")) };
        let default: Vec<String> = argument
            .get_default_values()
            .iter()
            .filter(|_| argument.get_action().takes_values())
            .map(|value| format!("`{}`", value.to_string_lossy()))
            .collect();
        let _ = writeln!(page, "| {form} | {}{choices} | {} |", cell(&help), default.join(", "));
    }
    for subcommand in command.get_subcommands().filter(|subcommand| subcommand.get_name() != "help") {
        describe(subcommand, &name, page);
    }
}

#[test]
fn configuration_reference_is_current() {
    compare("configuration.md", &configuration());
}

#[test]
fn metrics_reference_is_current() {
    compare("metrics.md", &metrics());
}

#[test]
fn command_reference_is_current() {
    compare("commands.md", &commands(Cli::command()));
}
