//! The reference pages of the documentation, generated from the declarations that they describe.
//!
//! The pages are committed, so that they can be read without a build. The tests compare them;
//! `UPDATE_REFERENCES=1 cargo nextest run -p dns-cli reference` rewrites them.

use std::fmt::Write;

use clap::CommandFactory;
use dns_common::counters::Outcome;
use dns_core::config::keys::Origin;

use super::{Cli, defaults::sections};
use dns_kit::metrics::names::DECLARED;
use test_support::command_page::{self, cell, commands, compare};

/// Returns the page of `config.json`.
fn configuration() -> String {
    let mut page = "# Configuration reference\n\n\
        `config.json` is one JSON object. Keys may have any letter case, the last of several equal keys wins, and `null`\n\
        leaves a key at its default. Durations are texts in Go's form: `\"400ms\"`, `\"5s\"`, `\"1h2m3.5s\"`. An unknown key\n\
        is reported and ignored; a member whose name begins with `#` is a comment. `bosh-dns-xdp check --config FILE`\n\
        validates a file, `bosh-dns-xdp config --default` prints one to start from. The object `consul` has Consul's own keys\n\
        ([Consul's names](../consul.md)).\n"
        .to_owned();
    for (object, keys) in sections() {
        let title = if object.is_empty() {
            "Top level".to_owned()
        } else {
            format!("`{object}`")
        };
        let _ = write!(
            page,
            "\n## {title}\n\n| Key | Type, unit | Default | Example | Meaning |\n|---|---|---|---|---|\n"
        );
        for key in keys {
            let code = |text: &str| {
                if text.is_empty() {
                    String::new()
                } else {
                    format!("`{}`", cell(text))
                }
            };
            let ours = match (key.origin, object.starts_with("consul")) {
                (Origin::Ours, false) => " *(not in bosh-dns)*",
                (Origin::Ours, true) => " *(not in Consul)*",
                (Origin::BoshDns, _) => "",
            };
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
    }
    page
}

/// Returns the page of the metrics.
fn metrics() -> String {
    let introduction = "# Metrics reference\n\n\
        Families that `/metrics` exposes. Units are part of the names; counters end in `_total`. Names with `boshdns_`\n\
        and `coredns_` have the meaning they have in bosh-dns.";
    let meanings: Vec<String> = DECLARED
        .iter()
        .map(|family| format!("{}{}", family.help, without_links(family.note)))
        .collect();
    let families = DECLARED.iter().zip(&meanings).map(|(family, meaning)| {
        (
            family.name,
            family.kind.to_owned(),
            family.labels.to_vec(),
            meaning.as_str(),
        )
    });
    let mut page = command_page::metrics(introduction, families);
    page.push_str(
        "\n## Outcomes of packets\n\nValues of the label `outcome` of `bosh_dns_xdp_fast_path_packets_total`; `status`, \
         `top` and `tap --misses` show the\nsame words. Hits are answered by the interface, all others except `shed` go to \
         userspace.\n\n| Outcome | Meaning |\n|---|---|\n",
    );
    for outcome in Outcome::ALL {
        let about = without_links(outcome.about());
        let _ = writeln!(page, "| `{}` | {} |", outcome.label(), cell(about.trim()));
    }
    page
}

const STATUS: &str = include_str!("../../resolver/src/ops/status.rs");

/// The types of `status --json`, outermost first, each with the source that declares it.
const STATUS_TYPES: [(&str, &str); 10] = [
    ("ServerStatus", STATUS),
    ("Check", include_str!("../../resolver/src/ops/readiness.rs")),
    ("RecordsStatus", STATUS),
    ("RepliesStatus", STATUS),
    ("FastPathView", STATUS),
    ("InterfaceView", STATUS),
    ("OverloadStatus", STATUS),
    (
        "RecursorStatus",
        include_str!("../../upstream/src/status.rs"),
    ),
    ("CertificateStatus", STATUS),
    (
        "Event",
        include_str!("../../resolver/src/ops/service_status.rs"),
    ),
];

/// Returns the page of the JSON object that `status --json` and `/status` give.
fn status_object() -> String {
    let mut page = "# The JSON of `status`\n\n\
        `bosh-dns-xdp status --json` and the API's `/status` give one object. Members may be added; a member that is\n\
        listed here keeps its name and meaning. The conditions are listed in [troubleshooting](../troubleshooting.md#conditions).\n"
        .to_owned();
    for (name, source) in STATUS_TYPES {
        let _ = write!(
            page,
            "\n## {name}\n\n| Member | Type | Meaning |\n|---|---|---|\n"
        );
        for (member, form, about) in members(name, source) {
            let _ = writeln!(page, "| `{member}` | `{form}` | {} |", cell(&about));
        }
    }
    page
}

/// Returns name, type and doc comment of the public fields of a struct, as they are serialised.
fn members(name: &str, source: &str) -> Vec<(String, String, String)> {
    let begin = format!("pub struct {name} {{\n");
    let (_, rest) = source
        .split_once(&begin)
        .expect("the struct is declared there");
    let (body, _) = rest.split_once("\n}").expect("it ends");
    let (mut members, mut about, mut renamed) = (Vec::new(), String::new(), None);
    for line in body.lines().map(str::trim) {
        if let Some(text) = line.strip_prefix("///") {
            about.push_str(text);
        } else if let Some((_, text)) = line.split_once("rename = \"") {
            renamed = text.split('"').next().map(str::to_owned);
        } else if let Some((field, form)) = line
            .strip_prefix("pub ")
            .and_then(|line| line.trim_end_matches(',').split_once(": "))
        {
            let member = renamed.take().unwrap_or_else(|| field.to_owned());
            let about = std::mem::take(&mut about);
            members.push((member, form.to_owned(), about.trim().to_owned()));
        }
    }
    members
}

#[test]
fn status_reference_is_current() {
    compare("status.md", &status_object());
}

/// Returns a doc comment without its links to the code.
fn without_links(text: &str) -> String {
    let mut parts = text.split(" ([`");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| {
        text + part.split_once("`])").map_or(part, |(_, rest)| rest)
    })
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
