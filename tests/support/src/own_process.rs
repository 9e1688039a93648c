//! Tests in a process of their own: of what belongs to a whole process, such as its user or its environment.

use std::{env, process::Command};

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Set in the process that [`command`] starts.
const VARIABLE: &str = "BOSH_DNS_OWN_PROCESS";

/// Returns whether this is the process that [`command`] starts.
pub fn is_here() -> bool {
    env::var_os(VARIABLE).is_some()
}

/// Returns the arguments with which this program runs the test with this name of a module (`module_path!`).
pub fn arguments(module: &str, name: &str) -> [String; 3] {
    // The names of tests do not begin with the crate.
    let (_, module) = module.split_once("::").unwrap_or(("", module));
    [
        format!("{module}::{name}"),
        "--exact".to_owned(),
        "--nocapture".to_owned(),
    ]
}

/// Returns a command that runs a test.
///
/// # Panics
///
/// Panics if the path of this program is unknown.
pub fn command(module: &str, name: &str) -> Command {
    let mut command = Command::new(env::current_exe().expect("the program has a path"));
    command.args(arguments(module, name)).env(VARIABLE, "1");
    command
}

/// Runs a test to its end.
///
/// # Panics
///
/// Panics if it cannot be started or does not pass.
pub fn run(command: &mut Command) {
    let output = command.output().expect("the test starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    // A name that is misspelt runs no test.
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}"
    );
}

/// Returns the result of `work`, during which this process, of a single test, can open no file and no socket.
///
/// # Panics
///
/// Panics if the limit cannot be changed.
pub fn without_descriptors<T>(work: impl FnOnce() -> T) -> T {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("a process has limits");
    setrlimit(Resource::RLIMIT_NOFILE, 0, hard).expect("a limit can be lowered");
    let result = work();
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).expect("below the hard limit it can be raised");
    result
}

/// Marks a command as that of a test's process.
pub fn mark(command: &mut Command) -> &mut Command {
    command.env(VARIABLE, "1")
}
