//! Tests in a process of their own: of what belongs to a whole process, such as its user or its environment.

use std::{env, process::Command};

/// Set in the process that [`command`] starts.
const VARIABLE: &str = "DNS_KIT_OWN_PROCESS";

/// Returns whether this is the process that [`command`] starts.
pub(crate) fn is_here() -> bool {
    env::var_os(VARIABLE).is_some()
}

/// Returns the arguments with which this program runs one test: that of a module (`module_path!`) with this name.
pub(crate) fn arguments(module: &str, name: &str) -> [String; 3] {
    let module = module.strip_prefix("dns_kit::").unwrap_or(module);
    [
        format!("{module}::{name}"),
        "--exact".to_owned(),
        "--nocapture".to_owned(),
    ]
}

/// Returns a command that runs a test.
pub(crate) fn command(module: &str, name: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(arguments(module, name)).env(VARIABLE, "1");
    command
}

/// Runs a test to its end; it must pass.
pub(crate) fn run(command: &mut Command) {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    // A name that is misspelt runs no test.
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}"
    );
}

/// Marks a command as that of a test's process.
pub(crate) fn mark(command: &mut Command) -> &mut Command {
    command.env(VARIABLE, "1")
}
