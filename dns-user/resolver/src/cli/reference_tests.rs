//! The reference pages of the documentation, generated from the declarations that they describe.
//!
//! The pages are committed, so that they can be read without a build. The tests compare them;
//! `UPDATE_REFERENCES=1 cargo nextest run -p dns-resolver reference` rewrites them.

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
