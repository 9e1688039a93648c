//! `config`: a first configuration, every key with its default and what it is for.

use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};

/// Arguments of `config`.
#[derive(Debug, Args)]
pub(super) struct PrintConfig {
    /// Print a config.json with every key at its default; members that begin with # explain them
    #[arg(long, required = true)]
    default: bool,
}

impl PrintConfig {
    /// Prints it.
    pub(super) fn run(self) -> ExitCode {
        // Sorted by name, the explanations would all come first.
        println!("{}", text());
        ExitCode::SUCCESS
    }
}

/// The configuration, as text: keys in the order of [`keys`].
fn text() -> String {
    let mut lines = Vec::new();
    let mut object: Option<&str> = None;
    for (path, value, about) in keys() {
        let (place, key) = path.rsplit_once('.').map_or((None, path), |(place, key)| (Some(place), key));
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
        lines.push(format!("{indent}{}: {},", json!(format!("# {key}")), json!(about)));
        lines.push(format!("{indent}{}: {value},", json!(key)));
    }
    if object.is_some() {
        lines.push("  },".to_owned());
    }
    let mut text = format!("{{\n{}\n}}", lines.join("\n"));
    // JSON has no comma after a last member.
    for close in ["\n  }", "\n}"] {
        text = text.replace(&format!(",{close}"), close);
    }
    text
}

/// Every key that a first configuration has: path, default, explanation. Keys of one object stand
/// together, and objects come last.
fn keys() -> Vec<(&'static str, Value, &'static str)> {
    let none = || Value::Array(Vec::new());
    vec![
        ("address", json!("127.0.0.2"), "Address that is listened on; on a VM of BOSH 169.254.0.2"),
        ("port", json!(53), "Port that is listened on, UDP and TCP"),
        ("log_level", json!("INFO"), "DEBUG, INFO, WARN, ERROR or NONE"),
        (
            "records_file",
            json!("/var/lib/bosh-dns-xdp/records.json"),
            "The fleet, as BOSH writes it; read anew when it changes",
        ),
        ("alias_files_glob", json!("/etc/bosh-dns-xdp/aliases.d/*.json"), "Names that stand for other names"),
        (
            "handlers_files_glob",
            json!("/etc/bosh-dns-xdp/handlers.d/*.json"),
            "Domains that other servers answer",
        ),
        (
            "addresses_files_glob",
            json!("/etc/bosh-dns-xdp/addresses.d/*.json"),
            "Further addresses to listen on",
        ),
        ("upcheck_domains", json!(["upcheck.bosh-dns."]), "Names that are answered with 127.0.0.1 and ::1"),
        ("disable_recursors", json!(false), "true: only names of the fleet and of handlers are answered"),
        ("recursors", none(), "Servers that other names go to; empty: those of /etc/resolv.conf, followed"),
        ("excluded_recursors", none(), "Servers that are never asked"),
        ("recursor_selection", json!("smart"), "smart: the best one is kept; serial: always from the first"),
        ("recursor_timeout", json!("2s"), "How long one try of a recursor may take"),
        ("recursor_max_retries", json!(0), "Further tries of one recursor after network errors"),
        (
            "recursor_errors",
            json!("truthful"),
            "truthful, or nxdomain: what clients get when all recursors failed",
        ),
        ("recursor_0x20", json!(false), "Random letter case in forwarded questions, against forgery"),
        ("request_timeout", json!("5s"), "How long a client's query may take in all"),
        ("timeout", json!("5s"), "How long the start may take"),
        (
            "max_reply",
            Value::Null,
            "Most bytes of a UDP reply to clients of other networks, from 512; null: no bound",
        ),
        ("identity", json!("edns"), "Who is told version and host name: edns, always, off"),
        ("cache.enabled", json!(false), "Whether forwarded answers are kept for their TTL"),
        ("cache.max_entries", json!(10_000), "Answers that are kept, at most"),
        ("cache.max_bytes", json!(67_108_864), "Their memory, at most"),
        (
            "cache.serve_stale",
            json!("0s"),
            "How long past its TTL an answer is given while recursors are down",
        ),
        (
            "control.socket",
            json!("/run/bosh-dns-xdp/control.sock"),
            "Where status, top, tap and the others ask",
        ),
        ("control.user", json!(""), "Owner of the socket; empty: whoever starts the server"),
        ("control.group", json!(""), "Group whose members may ask as well; empty: none"),
        ("metrics.enabled", json!(false), "Whether Prometheus, /healthz and /readyz are served"),
        ("metrics.address", json!("127.0.0.1"), "Their address"),
        ("metrics.port", json!(53_088), "Their port"),
        ("xdp.enabled", json!(true), "Whether hot names are answered at the interface"),
        ("xdp.mode", json!("auto"), "Where programs are attached: auto, native, generic, tc, off"),
        (
            "xdp.interfaces",
            Value::Null,
            "Names and patterns such as veth*; null: all on which queries can arrive",
        ),
        (
            "xdp.respect_filters",
            none(),
            "Names and patterns of interfaces left to userspace, behind the packet filter",
        ),
        ("xdp.vlans", none(), "VLANs whose tagged frames are answered at the interface"),
        (
            "xdp.shed",
            json!(true),
            "Whether interfaces drop a part of the queries while more come than the server can answer",
        ),
        ("xdp.max_names", json!(65_536), "Names that the interface can answer"),
        ("xdp.lease", json!("10s"), "How long the interface answers without a word of the server"),
        ("xdp.bpffs", json!("/sys/fs/bpf/bosh-dns-xdp"), "Where programs and maps are pinned"),
        (
            "xdp.on_stop",
            json!("detach"),
            "detach, or keep: answer until the next server takes over or the lease ends",
        ),
        (
            "xdp.attach_socket",
            json!(""),
            "Socket of bosh-dns-xdp attach, which attaches in the server's place; empty: the server does so itself",
        ),
        ("xdp.user", json!(""), "User that the server becomes once it has what it needs; empty: none"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use dns_core::config::{Config, Loaded};
    use serde_json::Map;

    #[test]
    fn what_is_printed_is_the_default() {
        let printed = text();
        let Loaded { config: printed_config, warnings } =
            Config::parse("config.json", printed.as_bytes()).unwrap();
        assert_eq!(warnings, [] as [&str; 0], "without an API there is the control socket");
        // The same with nothing but what has no default.
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
        let mut small: Map<String, Value> =
            all.into_iter().filter(|(key, _)| needed.contains(&key.as_str())).collect();
        small.insert("control".to_owned(), json!({"socket": "/run/bosh-dns-xdp/control.sock"}));
        // Without a format the reference's old one is meant.
        let small = Config::parse("config.json", json!(small).to_string().as_bytes()).unwrap().config;
        assert_eq!(printed_config, small);
    }

    #[test]
    fn every_key_is_explained() {
        for (path, _, about) in keys() {
            assert!(about.len() > 5 && !about.ends_with('.'), "{path}: {about:?}");
        }
    }
}
