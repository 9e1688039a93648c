//! Runs the binary under several names: the names of the bosh-dns package's programs, which other jobs and
//! scripts call, and the health server's.
//!
//! | Called as | Runs |
//! |---|---|
//! | `bosh-dns-health FILE`, `bosh-dns-xdp-health FILE` | `health --config FILE` |
//! | `bosh-dns-wait ...` | `wait ...` |
//! | `bosh-dns-nameserverconfig ...` | `resolver --keep ...` |
//! | `bosh-dns-systemd-resolved-updater --config FILE` | `resolver --systemd-resolved --once --keep ...` |
//! | anything else | the command in its arguments |

use std::{ffi::OsString, path::Path};

/// Translates a call under another name to the binary's own syntax.
pub(super) fn own_form(given: Vec<OsString>) -> Vec<OsString> {
    let name = given.first().and_then(|path| Path::new(path).file_name()?.to_str()).unwrap_or_default();
    let (command, options): (&[&str], _) = match name {
        "bosh-dns-health" | "bosh-dns-xdp-health" => {
            // Only a single word that is not an option; clap reports anything else.
            let is_file = given.len() == 2 && !given[1].to_string_lossy().starts_with('-');
            (if is_file { &["health", "--config"] } else { &["health"] }, false)
        }
        "bosh-dns-wait" => (&["wait"], true),
        // As in bosh-dns, nothing is restored when the process ends.
        "bosh-dns-nameserverconfig" => (&["resolver", "--keep"], true),
        "bosh-dns-systemd-resolved-updater" => {
            (&["resolver", "--keep", "--systemd-resolved", "--once"], true)
        }
        _ => return given,
    };
    let mut given = given.into_iter();
    let mut ours: Vec<OsString> = given.next().into_iter().collect();
    ours.extend(command.iter().map(OsString::from));
    ours.extend(given.map(|word| if options { two_dashes(word) } else { word }));
    ours
}

/// Accepts `-port` for `--port`, as Go's `flag` does.
fn two_dashes(word: OsString) -> OsString {
    match word.to_str() {
        Some(text) if text.len() > 2 && text.starts_with('-') && !text.starts_with("--") => {
            format!("-{text}").into()
        }
        _ => word,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bosh_dns_names_are_commands() {
        for (given, expected) in [
            ("/x/bosh-dns --config f", "--config f"),
            ("bosh-dns-xdp status", "status"),
            ("/x/bosh-dns-health f.json", "health --config f.json"),
            ("bosh-dns-xdp-health --help", "health --help"),
            ("bosh-dns-wait -port 5 --checkDomain a.", "wait --port 5 --checkDomain a."),
            ("bosh-dns-nameserverconfig --bindAddress 1.1.1.1", "resolver --keep --bindAddress 1.1.1.1"),
            (
                "bosh-dns-systemd-resolved-updater --config f",
                "resolver --keep --systemd-resolved --once --config f",
            ),
            ("cli instances", "instances"),
        ] {
            let words = own_form(given.split_whitespace().map(OsString::from).collect());
            let words: Vec<String> =
                words.into_iter().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
            assert_eq!(words.join(" "), expected, "{given}");
        }
    }
}
