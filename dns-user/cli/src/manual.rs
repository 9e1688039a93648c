//! Groups the commands for `--help` and writes the manual pages: of the commands, with the sections EXIT STATUS,
//! FILES and EXAMPLES, which clap does not support, and of `config.json`.

use std::{
    fs::{self, File},
    io,
    path::Path,
};

use clap_mangen::{
    Man,
    roff::{Roff, bold, italic, roman},
};

use self::ExitCodes::{Client, Comparison, Process, Verdict};
use super::defaults::sections;
use dns_command_line::without_commit;

/// Page of `config.json`, in the manual's section of file formats.
const CONFIGURATION: &str = "bosh-dns-xdp-config.json";

/// Section of the manual for the programs of system administrators (man(1)).
const SECTION: &str = "8";

/// Exit codes of a command.
#[derive(Clone, Copy, Debug)]
enum ExitCodes {
    /// A long-running process.
    Process,
    /// A command with a positive or negative result.
    Verdict,
    /// A command that queries a running server.
    Client,
    /// A command that compares with another server.
    Comparison,
}

impl ExitCodes {
    fn codes(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Process => &[
                ("0", "stopped by SIGTERM or SIGINT"),
                (
                    "1",
                    "an error that the operator can fix, reported on standard error or in the log",
                ),
                ("2", "wrong usage"),
                (
                    "70",
                    "an internal failure; a supervisor should restart the process",
                ),
            ],
            Self::Verdict => &[
                ("0", "success"),
                ("1", "negative result"),
                ("2", "wrong usage"),
            ],
            Self::Comparison => &[
                ("0", "every difference is documented, or there is none"),
                ("1", "an error, reported on standard error"),
                ("2", "wrong usage"),
                ("3", "differences without an explanation"),
            ],
            Self::Client => &[
                ("0", "success, and a positive result"),
                ("1", "the server answered with a negative result"),
                ("2", "wrong usage"),
                ("3", "the server is unreachable, or refuses the client"),
            ],
        }
    }
}

/// A command's part of the manual.
#[derive(Clone, Copy, Debug)]
struct ManualEntry {
    exits: ExitCodes,
    /// Begins with the name of the command.
    example: &'static str,
    purpose: &'static str,
}

impl ManualEntry {
    fn command(&self) -> &'static str {
        self.example.split(' ').next().unwrap_or_default()
    }
}

const fn entry(exits: ExitCodes, example: &'static str, purpose: &'static str) -> ManualEntry {
    ManualEntry {
        exits,
        example,
        purpose,
    }
}

/// The commands by purpose, in the order of `--help`.
const GROUPS: &[(&str, &[ManualEntry])] = &[
    (
        "Serve",
        &[
            entry(
                Process,
                "run --config /etc/bosh-dns-xdp/config.json",
                "Serve DNS until SIGTERM.",
            ),
            entry(
                Process,
                "health --config health_server_config.json",
                "Answer the health checks of other machines.",
            ),
            entry(
                Process,
                "attach --config /etc/bosh-dns-xdp/config.json",
                "Attach programs on behalf of an unprivileged server.",
            ),
            entry(
                Verdict,
                "prepare-pins --config /etc/bosh-dns-xdp/config.json --user bosh-dns-xdp",
                "Create the folder of pins before an unprivileged service starts.",
            ),
            entry(
                Process,
                "resolver --config /etc/bosh-dns-xdp/config.json",
                "Make the server this machine's resolver.",
            ),
        ],
    ),
    (
        "Try and configure",
        &[
            entry(
                Process,
                "try",
                "Serve a small foundation on a free port of 127.0.0.1.",
            ),
            entry(
                Verdict,
                "config --default > config.json",
                "Write a configuration that explains every common key.",
            ),
            entry(
                Verdict,
                "check --config config.json",
                "Print every error in a configuration and in the files it names.",
            ),
            entry(
                Comparison,
                "shadow --for 24h --html shadow.html",
                "Watch the clients of the server in use for a day and report what this one would answer differently.",
            ),
        ],
    ),
    (
        "Watch a running server",
        &[
            entry(
                Client,
                "status",
                "Show the checks, the fast path, the recursors and recent problems.",
            ),
            entry(
                Client,
                "top --once --seconds 10",
                "Measure for ten seconds and print the busiest names.",
            ),
            entry(
                Client,
                "tap --name web --misses",
                "Show live queries for names that contain \"web\".",
            ),
            entry(
                Client,
                "resolve q-s0.q-g1.bosh",
                "Explain how a name resolves.",
            ),
            entry(
                Client,
                "instances --address q-s0.q-g1.bosh",
                "List the instances of a name.",
            ),
            entry(
                Client,
                "local-groups --json",
                "List the links of this VM's jobs.",
            ),
        ],
    ),
    (
        "Change a running server",
        &[
            entry(
                Client,
                "reload",
                "Reload all files; exit code 1 if one cannot be used.",
            ),
            entry(
                Client,
                "cache lookup www.example.org",
                "Show the cached answers for a name, with their records.",
            ),
            entry(Client, "flush", "Drop all cached answers."),
            entry(
                Client,
                "log --tag ForwardHandler --level debug",
                "Log forwarded queries in detail until the next reload.",
            ),
            entry(
                Verdict,
                "detach --config /etc/bosh-dns-xdp/config.json",
                "Remove programs that a dead server left attached.",
            ),
        ],
    ),
    (
        "For scripts and shells",
        &[
            entry(
                Verdict,
                "wait --address 169.254.0.2 --timeout 30s",
                "Wait until the server answers.",
            ),
            entry(
                Verdict,
                "address --group 1 --status healthy",
                "Print the name of a group.",
            ),
            entry(
                Verdict,
                "completions bash",
                "Print the completions for bash.",
            ),
            entry(Verdict, "man | man -l -", "Show the manual page."),
        ],
    ),
];

/// Files that the commands use.
const FILES: &[(&str, &str)] = &[
    (
        "/etc/bosh-dns-xdp/config.json",
        "configuration of the Debian package",
    ),
    (
        "/var/vcap/jobs/bosh-dns/config/config.json",
        "configuration of the BOSH job",
    ),
    (
        "/run/bosh-dns-xdp/control.sock",
        "default control socket, through which the commands reach the server",
    ),
    (
        "/run/bosh-dns-xdp-pins",
        "default folder of pins, which let programs survive a restart of the server",
    ),
];

/// Adds the grouped list of commands to the help of the whole command line.
pub(super) fn grouped(command: clap::Command) -> clap::Command {
    let mut groups = String::new();
    for (title, entries) in GROUPS {
        groups.push_str(&format!("{title}:\n"));
        for entry in *entries {
            let mut about = String::new();
            if let Some(found) = command.find_subcommand(entry.command())
                && let Some(text) = found.get_about()
            {
                about = text.to_string();
            }
            // clap wraps only the lists that it makes itself.
            let lines = wrapped(&about, WIDTH - INDENT);
            let about = lines.join(&format!("\n{:INDENT$}", ""));
            groups.push_str(&format!("  {:<13} {about}\n", entry.command()));
        }
        groups.push('\n');
    }
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{groups}Options:\n{{options}}{{after-help}}"
    );
    command.help_template(template)
}

/// Width of a usual terminal, at which the list of commands is wrapped.
const WIDTH: usize = 80;

/// Column of the commands' purposes.
const INDENT: usize = 16;

fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is a line");
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= width {
            line.push_str(&format!(" {word}"));
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

/// Writes the main page, or with `folder` a page for each command.
pub(super) fn write(mut command: clap::Command, folder: Option<&Path>) -> io::Result<Vec<u8>> {
    // Its page would repeat all others.
    command = command.disable_help_subcommand(true);
    command.build();
    let Some(folder) = folder else {
        return page(&command, None);
    };
    write_page(&command, None, folder)?;
    fs::write(
        folder.join(format!("{CONFIGURATION}.5")),
        configuration_page(),
    )?;
    for subcommand in command.get_subcommands() {
        let mut entries = GROUPS.iter().flat_map(|(_, entries)| *entries);
        write_pages(
            subcommand,
            entries.find(|entry| entry.command() == subcommand.get_name()),
            folder,
        )?;
    }
    Ok(Vec::new())
}

fn write_pages(
    command: &clap::Command,
    entry: Option<&ManualEntry>,
    folder: &Path,
) -> io::Result<()> {
    // Hidden commands serve other programs only.
    if command.is_hide_set() {
        return Ok(());
    }
    write_page(command, entry, folder)?;
    command
        .get_subcommands()
        .try_for_each(|subcommand| write_pages(subcommand, entry, folder))
}

fn write_page(
    command: &clap::Command,
    entry: Option<&ManualEntry>,
    folder: &Path,
) -> io::Result<()> {
    let name = Man::new(command.clone()).section(SECTION).get_filename();
    io::Write::write_all(
        &mut File::create(folder.join(name))?,
        &page(command, entry)?,
    )
}

/// Returns the page of one command, or of the whole command line.
fn page(command: &clap::Command, own: Option<&ManualEntry>) -> io::Result<Vec<u8>> {
    let man = Man::new(without_commit(command.clone()))
        .section(SECTION)
        .manual("System Administration");
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    let mut entries = GROUPS.iter().flat_map(|(_, entries)| *entries);
    let examples: Vec<&ManualEntry> = match own {
        Some(entry) => vec![entry],
        // The main page is for newcomers: what they do first, in this order.
        None => ["try", "check", "status", "resolve"]
            .into_iter()
            .filter_map(|name| entries.find(|entry| entry.command() == name))
            .collect(),
    };
    let mut roff = Roff::default();
    roff.control("SH", ["EXIT STATUS"]);
    // The main page lists the codes that most commands have.
    for (code, meaning) in own.map_or(Client, |entry| entry.exits).codes() {
        item(&mut roff, code, meaning);
    }
    roff.control("SH", ["FILES"]);
    for (file, purpose) in FILES {
        item(&mut roff, file, purpose);
    }
    roff.control("SH", ["EXAMPLES"]);
    for ManualEntry {
        example, purpose, ..
    } in examples
    {
        item(&mut roff, &format!("bosh-dns-xdp {example}"), purpose);
    }
    roff.control("SH", ["SEE ALSO"]);
    roff.text([bold(CONFIGURATION), roman("(5)")]);
    roff.to_writer(&mut page)?;
    // Subcommands inherit none, and clap_mangen panics without one.
    if command.get_version().is_some() {
        man.render_version_section(&mut page)?;
    }
    Ok(page)
}

fn item(roff: &mut Roff, term: &str, text: &str) {
    roff.control("TP", [])
        .text([bold(term)])
        .text([roman(text)]);
}

/// Returns the page of `config.json`, from the same declarations as its reference in the documentation.
fn configuration_page() -> String {
    let mut roff = Roff::default();
    roff.control("TH", [CONFIGURATION, "5", "", "", "File Formats"]);
    roff.control("SH", ["NAME"]);
    roff.text([roman(format!(
        "{CONFIGURATION} - configuration of the DNS server bosh-dns-xdp"
    ))]);
    roff.control("SH", ["DESCRIPTION"]);
    roff.text([roman(
        "config.json is one JSON object. Keys may have any letter case, the last of several equal keys wins, and \
         null leaves a key at its default. Durations are texts in Go's form, such as \"400ms\" or \"1h2m3.5s\". An \
         unknown key is reported and ignored; a member whose name begins with # is a comment.",
    )]);
    for (object, keys) in sections() {
        let title = if object.is_empty() {
            "TOP LEVEL".to_owned()
        } else {
            format!("OBJECT {object}")
        };
        roff.control("SH", [title.as_str()]);
        for key in keys {
            roff.control("TP", []);
            roff.text([bold(key.path), roman(" ("), italic(key.form), roman(")")]);
            let mut about = format!("{}.", key.about);
            for (what, value) in [("Default", key.default), ("Example", key.example)] {
                if !value.is_empty() {
                    about.push_str(&format!(" {what}: {value}."));
                }
            }
            roff.text([roman(about)]);
        }
    }
    roff.control("SH", ["FILES"]);
    for (file, purpose) in FILES
        .iter()
        .filter(|(file, _)| file.ends_with("/config.json"))
    {
        item(&mut roff, file, purpose);
    }
    roff.control("SH", ["EXAMPLES"]);
    for (line, purpose) in [
        ("config --default", "Print a configuration to start from."),
        (
            "check --config FILE",
            "Validate a file, and the files that it names.",
        ),
    ] {
        item(&mut roff, &format!("bosh-dns-xdp {line}"), purpose);
    }
    roff.control("SH", ["SEE ALSO"]);
    roff.text([bold("bosh-dns-xdp"), roman(format!("({SECTION})"))]);
    roff.render()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::Cli;

    #[test]
    fn every_command_has_one_group() {
        let mut listed: Vec<&str> = GROUPS
            .iter()
            .flat_map(|(_, entries)| *entries)
            .map(|entry| entry.command())
            .collect();
        listed.sort_unstable();
        let command = Cli::command();
        let mut known: Vec<&str> = command
            .get_subcommands()
            .filter(|command| !command.is_hide_set())
            .map(clap::Command::get_name)
            .collect();
        known.sort_unstable();
        assert_eq!(listed, known);
        let help = grouped(Cli::command()).render_long_help().to_string();
        for (title, _) in GROUPS {
            assert!(help.contains(&format!("\n{title}:\n")), "{title}: {help}");
        }
    }

    #[test]
    fn help_fits_usual_terminal() {
        let help = grouped(Cli::command()).render_help().to_string();
        let long: Vec<&str> = help
            .lines()
            .filter(|line| line.chars().count() > WIDTH)
            .collect();
        assert_eq!(long, Vec::<&str>::new());
    }

    #[test]
    fn examples_are_valid_commands() {
        for entry in GROUPS.iter().flat_map(|(_, entries)| *entries) {
            let line = entry
                .example
                .split([' ', '|', '>'])
                .take_while(|word| !word.is_empty());
            let words = std::iter::once("bosh-dns-xdp").chain(line);
            assert!(
                Cli::command().try_get_matches_from(words).is_ok(),
                "{}",
                entry.example
            );
        }
    }

    #[test]
    fn footer_has_room_for_version() {
        let long = "1.0.0 (commit 0123456789012345678901234567890123456789)";
        let page = page(&Cli::command().version(long), None).unwrap();
        let page = String::from_utf8(page).unwrap();
        let title = page.lines().find(|line| line.starts_with(".TH")).unwrap();
        assert!(
            title.contains("1.0.0") && !title.contains("0123456789"),
            "{title}"
        );
    }

    #[test]
    fn configuration_page_describes_every_key() {
        let folder = tempfile::tempdir().unwrap();
        write(Cli::command(), Some(folder.path())).unwrap();
        let file = folder.path().join(format!("{CONFIGURATION}.5"));
        let page = fs::read_to_string(&file).unwrap();
        for key in sections().into_iter().flat_map(|(_, keys)| keys) {
            let term = key.path.replace('-', "\\-");
            assert!(page.contains(&term), "{} is missing", key.path);
        }
        let shown = std::process::Command::new("man")
            .args(["--warnings", "-l"])
            .arg(&file)
            .output();
        // `man` is optional, but what it prints must be clean.
        let Ok(shown) = shown else { return };
        assert!(
            shown.status.success() && shown.stderr.is_empty(),
            "{shown:?}"
        );
    }

    #[test]
    fn pages_have_all_sections() {
        let folder = tempfile::tempdir().unwrap();
        write(Cli::command(), Some(folder.path())).unwrap();
        for name in [
            "bosh-dns-xdp.8",
            "bosh-dns-xdp-run.8",
            "bosh-dns-xdp-status.8",
        ] {
            let page = fs::read_to_string(folder.path().join(name)).unwrap();
            for section in ["EXIT STATUS", "FILES", "EXAMPLES", "OPTIONS"] {
                assert!(page.contains(section), "{section}: {page}");
            }
        }
    }
}
