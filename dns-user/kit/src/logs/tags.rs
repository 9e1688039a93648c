//! Tags of log lines: bosh-dns's names for corresponding parts, our own for the rest.
//!
//! A tag covers a set of modules. A line shows the tag with the most specific module; a level set
//! for a tag applies to all of its modules.

use std::collections::BTreeSet;

/// A tag and the modules that it covers.
#[derive(Clone, Copy, Debug)]
pub struct Tag {
    /// Name in the configuration and in log lines.
    pub name: &'static str,
    /// Prefixes of the covered module paths.
    pub targets: &'static [&'static str],
    /// Description of the lines, for operators.
    pub about: &'static str,
}

/// All tags, as listed in `docs/operating.md`.
pub const TAGS: &[Tag] = &[
    Tag {
        name: "main",
        targets: &[
            "dns_resolver",
            "dns_cli",
            "dns_command_line",
            "dns_kit",
            "dns_core",
            "dns_shadow",
            "dns_attacher::process",
            "bosh_dns_xdp",
            "bosh_dns_xdp_health",
        ],
        about: "start, reload, stop, configuration, and everything without a separate tag",
    },
    Tag {
        name: "RecordsRepo",
        targets: &[
            "dns_core::catalog",
            "dns_resolver::daemon::records",
            "dns_kit::files::watch",
        ],
        about: "records.json and alias files: loaded and refused content",
    },
    Tag {
        name: "DiscoveryHandler",
        targets: &["dns_resolver::state", "dns_core::resolve"],
        about: "names of the fleet",
    },
    Tag {
        name: "ForwardHandler",
        targets: &["dns_upstream"],
        about: "recursors: queries and their results",
    },
    Tag {
        name: "HTTPClientHandler",
        targets: &["dns_upstream::http"],
        about: "http handlers",
    },
    Tag {
        name: "CachingDNSHandler",
        targets: &["dns_upstream::cache"],
        about: "the cache",
    },
    Tag {
        name: "ArpaHandler",
        targets: &["dns_upstream::reverse"],
        about: "reverse names",
    },
    Tag {
        name: "RequestLoggerHandler",
        targets: &[super::requests::TARGET],
        about: "one line per request that reaches userspace, at DEBUG, bounded in rate",
    },
    Tag {
        name: "Consul",
        targets: &[
            "dns_consul",
            "dns_consul_source",
            "dns_resolver::consul",
            "dns_resolver::daemon::consul",
        ],
        about: "Consul's names: definition files, a live Consul",
    },
    Tag {
        name: "dnstap",
        targets: &["dns_dnstap"],
        about: "the log of whole messages: its output opened, broken or full",
    },
    Tag {
        name: "HealthWatcher",
        targets: &["dns_health"],
        about: "health checks of instances",
    },
    Tag {
        name: "MetricsServer",
        targets: &["dns_resolver::ops::metrics"],
        about: "the metrics endpoint",
    },
    Tag {
        name: "API",
        targets: &[
            "dns_resolver::ops::api",
            "dns_kit::http_server",
            "dns_kit::unix_socket",
        ],
        about: "the API and other HTTP servers: refused connections and requests",
    },
    Tag {
        name: "server",
        targets: &["dns_resolver::server"],
        about: "sockets, TCP sessions, malformed messages",
    },
    Tag {
        name: "fastpath",
        targets: &["dns_fastpath", "dns_attacher"],
        about: "interfaces and hooks, publishing, lease",
    },
    Tag {
        name: "ebpf",
        targets: &["dns_fastpath::observe", "dns_attacher::attach::collisions"],
        about: "reports of the BPF programs",
    },
    Tag {
        name: LIBRARIES,
        // Its crates cannot be listed: it covers all that are not ours.
        targets: &[],
        about: "warnings of the libraries that the server is built from",
    },
];

/// Tag of all crates that no other tag covers.
pub const LIBRARIES: &str = "libraries";

/// Returns the crates of this project that have tags, to which the general level applies.
pub fn our_crates() -> BTreeSet<&'static str> {
    let mut crates = BTreeSet::new();
    for target in TAGS.iter().flat_map(|tag| tag.targets) {
        crates.insert(target.split("::").next().unwrap_or(target));
    }
    crates
}

/// Returns the names of all tags.
pub fn names() -> impl Iterator<Item = &'static str> {
    TAGS.iter().map(|tag| tag.name)
}

/// Returns a tag, given in any letter case, as it is spelt; `None` if it is unknown.
pub fn spelt(name: &str) -> Option<&'static str> {
    names().find(|known| known.eq_ignore_ascii_case(name))
}

/// Returns the tag for lines from `target`.
pub fn of_target(target: &str) -> &'static str {
    let mut name = LIBRARIES;
    let mut longest = 0;
    for tag in TAGS {
        for prefix in tag.targets {
            if is_within(target, prefix) && prefix.len() > longest {
                name = tag.name;
                longest = prefix.len();
            }
        }
    }
    name
}

/// Returns whether `target` is the module `prefix` or inside it.
fn is_within(target: &str, prefix: &str) -> bool {
    target
        .strip_prefix(prefix)
        // By whole parts of the path: `dns_consul_source` is not within `dns_consul`.
        .is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_specific_module_wins() {
        assert_eq!(of_target("dns_upstream::pool"), "ForwardHandler");
        assert_eq!(of_target("dns_upstream::cache"), "CachingDNSHandler");
        assert_eq!(of_target("dns_upstream::cached"), "ForwardHandler");
        assert_eq!(of_target("dns_resolver::state::route"), "DiscoveryHandler");
        assert_eq!(of_target("dns_resolver::ops::service_status"), "main");
        assert_eq!(of_target("hyper::client"), LIBRARIES);
    }

    /// Adds a crate of the workspace and the ones that it links, and the names of its programs.
    fn add_linked(name: &str, found: &mut BTreeSet<String>) {
        let folder = name.strip_prefix("dns-").unwrap();
        let path = format!("{}/../{folder}/Cargo.toml", env!("CARGO_MANIFEST_DIR"));
        // Not below dns-user: without log lines.
        let Ok(manifest) = std::fs::read_to_string(path) else {
            return;
        };
        if !found.insert(name.replace('-', "_")) {
            return;
        }
        let (packages, _) = manifest
            .split_once("[dev-dependencies]")
            .unwrap_or((&manifest, ""));
        for line in packages.lines() {
            let name = line.split(['.', ' ']).next().unwrap_or_default();
            if name.starts_with("dns-") {
                add_linked(name, found);
            } else if let Some(program) = line.strip_prefix("name = \"bosh-") {
                found.insert(format!(
                    "bosh_{}",
                    program.trim_end_matches('"').replace('-', "_")
                ));
            }
        }
    }

    #[test]
    fn every_crate_of_the_server_has_a_tag() {
        let mut linked = BTreeSet::new();
        add_linked("dns-cli", &mut linked);
        assert!(linked.len() > 10, "{linked:?}");
        let tagged: BTreeSet<String> = our_crates().into_iter().map(str::to_owned).collect();
        assert_eq!(tagged, linked);
        for ours in linked {
            assert_ne!(of_target(&format!("{ours}::module")), LIBRARIES, "{ours}");
        }
    }

    #[test]
    fn operators_guide_lists_every_tag() {
        let guide = include_str!("../../../../docs/operating.md");
        for tag in TAGS {
            let row =
                |line: &str| line.starts_with('|') && line.contains(&format!("`{}`", tag.name));
            assert!(
                guide.lines().any(row),
                "{} is missing in docs/operating.md",
                tag.name
            );
        }
    }

    #[test]
    fn names_ignore_letter_case() {
        for tag in TAGS {
            assert_eq!(spelt(&tag.name.to_uppercase()), Some(tag.name));
            assert_eq!(
                TAGS.iter()
                    .filter(|other| other.name.eq_ignore_ascii_case(tag.name))
                    .count(),
                1
            );
        }
        assert_eq!(spelt("nothing"), None);
    }

    #[test]
    fn tags_match_configuration_spelling() {
        for (name, expected) in [
            ("MAIN", Some("main")),
            ("dnsTap", Some("dnstap")),
            ("LIBRARIES", Some("libraries")),
            ("mai", None),
            ("", None),
        ] {
            assert_eq!(spelt(name), expected, "{name}");
        }
        assert_eq!(names().count(), TAGS.len());
    }
}
