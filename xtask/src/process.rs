//! Execution of other programs, and of set-up steps side by side.

use std::{
    env,
    ffi::OsStr,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Returns the folder of the repository.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask is a folder of the repository")
}

/// Runs cargo at the root with its output on the terminal.
pub(crate) fn cargo<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> Result<()> {
    run(Command::new("cargo").args(arguments).current_dir(root()))
}

pub(crate) fn cargo_home() -> Option<PathBuf> {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    home.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cargo")))
}

pub(crate) fn cargo_metadata(folder: &Path, arguments: &[&str]) -> Result<Value> {
    let mut command = Command::new("cargo");
    command
        .args(["metadata", "--format-version", "1", "--locked"])
        .args(arguments)
        .current_dir(folder);
    serde_json::from_str(&capture(&mut command)?).context("cargo metadata returned no JSON")
}

/// Runs a command with its output on the terminal; fails unless it succeeds.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("cannot run {}", shown(command)))?;
    if !status.success() {
        bail!("{} failed ({status})", shown(command));
    }
    Ok(())
}

/// Returns `cargo install` for a tool, unoptimised: it works for seconds, and compiling it for speed takes
/// minutes.
pub(crate) fn install(tool: &str, version: &str) -> Command {
    println!("set-up: installing {tool}");
    let mut command = Command::new("cargo");
    command.args(["install", tool, "--version", version, "--quiet", "--locked"]);
    for (setting, value) in [
        ("OPT_LEVEL", "0"),
        ("DEBUG", "false"),
        ("LTO", "off"),
        ("CODEGEN_UNITS", "16"),
    ] {
        command.env(format!("CARGO_PROFILE_RELEASE_{setting}"), value);
    }
    // The tool does not belong to this workspace's build.
    command.env_remove("CARGO_TARGET_DIR");
    command
}

/// Builds the test program with this name by a command of `cargo test`, whose progress and errors go to the terminal;
/// returns its path.
pub(crate) fn build_test(cargo: &mut Command, name: &str) -> Result<PathBuf> {
    cargo.args(["--no-run", "--message-format", "json-render-diagnostics"]);
    let messages = capture(cargo.stderr(Stdio::inherit()))?;
    for line in messages.lines() {
        let message: Value = serde_json::from_str(line).context("cargo writes JSON")?;
        if message["target"]["name"] == name
            && let Some(program) = message["executable"].as_str()
        {
            return Ok(program.into());
        }
    }
    bail!("cargo built no test program {name}")
}

/// Runs a command and returns its output; fails unless it succeeds.
pub(crate) fn capture(command: &mut Command) -> Result<String> {
    let Output {
        status,
        stdout,
        stderr,
    } = command
        .output()
        .with_context(|| format!("cannot run {}", shown(command)))?;
    if !status.success() {
        bail!(
            "{} failed ({status}): {}",
            shown(command),
            String::from_utf8_lossy(&stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}

pub(crate) fn on_path(program: &str) -> bool {
    env::var_os("PATH")
        .is_some_and(|path| env::split_paths(&path).any(|folder| folder.join(program).is_file()))
}

/// Returns the command as typed in a shell.
fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Steps faster than this found everything in place, and are not worth a line.
const UNNOTICED: Duration = Duration::from_secs(1);

/// A step in a separate thread.
pub(crate) struct Step {
    name: &'static str,
    thread: JoinHandle<Result<()>>,
}

impl Step {
    /// Starts a step; its end is printed with its duration.
    pub(crate) fn start(
        name: &'static str,
        work: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Self {
        let thread = thread::spawn(move || {
            let begin = Instant::now();
            let done = work();
            let took = begin.elapsed();
            if done.is_ok() && took > UNNOTICED {
                println!("set-up: {name}: done in {} s", took.as_secs());
            }
            done
        });
        Self { name, thread }
    }

    /// Waits for the end of the step.
    pub(crate) fn finish(self) -> Result<()> {
        match self.thread.join() {
            Ok(done) => done.map_err(|error| error.context(self.name)),
            // The panic has printed its message and place.
            Err(_) => bail!("{} panicked", self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_step_is_named() {
        let step = Step::start("kernels", || bail!("no network"));
        assert_eq!(
            format!("{:#}", step.finish().unwrap_err()),
            "kernels: no network"
        );
        Step::start("nothing", || Ok(())).finish().unwrap();
    }
}
