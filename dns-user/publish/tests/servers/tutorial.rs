//! Runs the tutorial of docs/external-dns.md as written.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};
use test_support::free_address;

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// A step of the tutorial.
#[derive(Debug)]
enum Step {
    File { name: String, text: String },
    Command { line: String, output: String },
}

/// Reads the steps between the heading `## Tutorial` and the next one.
fn steps(page: &str) -> Vec<Step> {
    let (_, tutorial) = page.split_once("\n## Tutorial\n").unwrap();
    let (tutorial, _) = tutorial.split_once("\n## ").unwrap();
    let mut steps = Vec::new();
    let mut name = None;
    let mut lines = tutorial.lines();
    while let Some(line) = lines.next() {
        if let Some(file) = line
            .strip_prefix('`')
            .and_then(|line| line.strip_suffix("`:"))
        {
            name = Some(file.to_owned());
        }
        let Some(language) = line.strip_prefix("```") else {
            continue;
        };
        let block: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
        if language == "console" {
            for line in block {
                match line.strip_prefix("$ ") {
                    Some(command) => {
                        steps.push(Step::Command {
                            line: command.to_owned(),
                            output: String::new(),
                        });
                    }
                    None => match steps.last_mut() {
                        Some(Step::Command { output, .. }) => output.push_str(&format!("{line}\n")),
                        _ => panic!("output without a command: {line}"),
                    },
                }
            }
        } else {
            let name = name
                .take()
                .unwrap_or_else(|| panic!("a file without a name: {block:?}"));
            steps.push(Step::File {
                name,
                text: block.join("\n") + "\n",
            });
        }
    }
    steps
}

/// Kills the programs whose ids the tutorial has written to files.
struct Cleanup<'a>(&'a Path);

impl Drop for Cleanup<'_> {
    fn drop(&mut self) {
        for file in ["publish.pid", "named.pid"] {
            let id = fs::read_to_string(self.0.join(file))
                .ok()
                .and_then(|text| text.trim().parse().ok());
            if let Some(id) = id {
                // It has exited already if the tutorial has finished.
                let _ = kill(Pid::from_raw(id), Signal::SIGKILL);
            }
        }
    }
}

#[test]
fn tutorial_works_as_written() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/external-dns.md");
    let steps = steps(&fs::read_to_string(page).unwrap());
    assert!(steps.len() > 20, "{steps:?}");
    let folder = tempfile::tempdir().unwrap();
    // The tutorial's ports may be in use on this machine.
    let (dns, metrics) = (
        free_address().port().to_string(),
        free_address().port().to_string(),
    );
    let here = |text: &str| text.replace("5300", &dns).replace("7979", &metrics);
    let program = Path::new(env!("CARGO_BIN_EXE_bosh-dns-publish"))
        .parent()
        .unwrap();
    let path = format!(
        "{}:/usr/sbin:{}",
        program.display(),
        std::env::var("PATH").unwrap()
    );
    let _cleanup = Cleanup(folder.path());
    let mut exports = String::new();
    for step in steps {
        match step {
            Step::File { name, text } => {
                let file = folder.path().join(name);
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                fs::write(file, here(&text)).unwrap();
            }
            Step::Command { line, .. } if line.starts_with("export ") => {
                exports.push_str(&format!("{line}\n"))
            }
            Step::Command { line, output } => {
                // Commands keep running behind a shell that has ended; their output must not be waited for.
                let said = fs::File::create(folder.path().join("said")).unwrap();
                let status = Command::new("bash")
                    .args(["-c", &here(&format!("{exports}{line}"))])
                    .current_dir(folder.path())
                    .env("PATH", &path)
                    .stdin(Stdio::null())
                    .stdout(said.try_clone().unwrap())
                    .stderr(said)
                    .status()
                    .unwrap();
                let said = fs::read_to_string(folder.path().join("said")).unwrap();
                assert!(status.success(), "{line}: {said}");
                let lines = |text: &str| {
                    let mut lines: Vec<String> = text
                        .lines()
                        .map(|line| line.trim_end().to_owned())
                        .collect();
                    // Errors and results arrive on two streams.
                    lines.sort();
                    lines
                };
                assert_eq!(lines(&said), lines(&here(&output)), "{line}");
            }
        }
    }
}
