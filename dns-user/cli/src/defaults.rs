//! The keys of `config.json` for operators: `config` prints a starter configuration with every key, its default
//! and its purpose; [`sections`] orders them for the reference and the manual page.

use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use dns_command_line::print_or_fail;
use dns_core::config::keys::{ConfigKey, KEYS};

#[derive(Debug, Args)]
pub(super) struct PrintConfig {
    /// Print a config.json with every key at its default; members that begin with # explain them
    #[arg(long, required = true)]
    default: bool,
}

impl PrintConfig {
    pub(super) fn run(self) -> ExitCode {
        // A sorted map would put all explanations first.
        print_or_fail("bosh-dns-xdp", &(text() + "\n"))
            .err()
            .unwrap_or(ExitCode::SUCCESS)
    }
}

/// Returns the configuration as text: the keys of [`KEYS`] with a starter value, in that order.
fn text() -> String {
    let mut lines = Vec::new();
    let mut object: Option<&str> = None;
    for ConfigKey {
        path,
        about,
        starter,
        ..
    } in KEYS
    {
        if starter.is_empty() {
            continue;
        }
        let (place, key) = match path.rsplit_once('.') {
            Some((place, key)) => (Some(place), key),
            None => (None, *path),
        };
        if place != object {
            if object.is_some() {
                lines.push("  },".to_owned());
            }
            if let Some(place) = place {
                lines.push(format!("  {}: {{", json!(place)));
            }
            object = place;
        }
        let indent = if place.is_some() { "    " } else { "  " };
        lines.push(format!(
            "{indent}{}: {},",
            json!(format!("# {key}")),
            json!(about)
        ));
        lines.push(format!("{indent}{}: {starter},", json!(key)));
    }
    if object.is_some() {
        lines.push("  },".to_owned());
    }
    let mut text = format!("{{\n{}\n}}", lines.join("\n"));
    // JSON allows no comma after the last member.
    for close in ["\n  }", "\n}"] {
        text = text.replace(&format!(",{close}"), close);
    }
    text
}

/// Returns all keys, Consul's too, by the object that contains them; its name is empty for the top level.
pub(super) fn sections() -> Vec<(String, Vec<&'static ConfigKey>)> {
    let mut sections: Vec<(String, Vec<&ConfigKey>)> = Vec::new();
    // Keys of the same object are adjacent.
    for key in KEYS.iter().chain(dns_consul::config::KEYS) {
        // Consul's objects are nested, the others are one level deep.
        let name = match key.path.rsplit_once('.') {
            Some((object, _)) if object.starts_with("consul") => object,
            _ => key.path.split_once('.').map_or("", |(object, _)| object),
        };
        match sections.last_mut() {
            Some((last, keys)) if last == name => keys.push(key),
            _ => sections.push((name.to_owned(), vec![key])),
        }
    }
    sections
}

#[cfg(test)]
mod tests {
    use super::*;
    use dns_core::config::{Config, Loaded};
    use serde_json::{Map, Value};

    #[test]
    fn starter_configuration_equals_defaults() {
        let printed = text();
        let Loaded {
            config: printed_config,
            warnings,
        } = Config::parse("config.json", printed.as_bytes()).unwrap();
        assert_eq!(
            warnings,
            [] as [&str; 0],
            "without an API there is the control socket"
        );
        // A configuration with only those keys that have no default.
        let needed = [
            "address",
            "port",
            "records_file",
            "alias_files_glob",
            "handlers_files_glob",
            "addresses_files_glob",
            "upcheck_domains",
        ];
        let all: Map<String, Value> = serde_json::from_str(&printed).unwrap();
        let mut small: Map<String, Value> = all
            .into_iter()
            .filter(|(key, _)| needed.contains(&key.as_str()))
            .collect();
        small.insert(
            "control".to_owned(),
            json!({"socket": "/run/bosh-dns-xdp/control.sock"}),
        );
        // Without the key, the old format of bosh-dns applies.
        let small = Config::parse("config.json", json!(small).to_string().as_bytes())
            .unwrap()
            .config;
        assert_eq!(printed_config, small);
    }
}
