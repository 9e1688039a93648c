//! Execution of other programs, and of set-up steps side by side.

use std::{
    env,
    ffi::OsStr,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
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

/// Runs `cargo install` for a tool, unoptimised: it works for seconds, and compiling it for speed takes
/// minutes.
pub(crate) fn install(command: &mut Command) -> Result<()> {
    let name = command
        .get_args()
        // The first argument is `install`.
        .nth(1)
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    println!("set-up: installing {name}");
    command.args(["--quiet", "--locked"]);
    for (setting, value) in [
        ("OPT_LEVEL", "0"),
        ("DEBUG", "false"),
        ("LTO", "off"),
        ("CODEGEN_UNITS", "16"),
    ] {
        command.env(format!("CARGO_PROFILE_RELEASE_{setting}"), value);
    }
    // The tool does not belong to this workspace's build.
    run(command.env_remove("CARGO_TARGET_DIR"))
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
