//! Requirements of tests on the machine. Nothing is skipped silently: a test with a missing
//! requirement fails, except under `cargo xtask test`, which lists it at the end as not run, with
//! the reason. In CI (variable `CI` set) it fails there, too.

use std::{env, fmt::Display, fs::File, io::Write as _, thread};

use crate::yardstick::{Hook, Yardstick};

/// Environment variable with the path of the file to which a test that cannot run adds a line
/// `name: reason`.
pub const NOT_RUN_VARIABLE: &str = "BOSH_DNS_NOT_RUN";

/// Ends the calling test as "not run" if the machine lacks one of the given requirements:
/// `requires!(namespaces, bpf, programs(&["dig"]))`. Each requirement is a function of this module.
#[macro_export]
macro_rules! requires {
    ($($requirement:ident $(($($argument:expr),+))?),+) => {
        $(
            if !$crate::requirements::$requirement($($($argument),+)?) {
                return $crate::requirements::Outcome::not_run();
            }
        )+
    };
}

/// Return type of a test function.
pub trait Outcome {
    /// Returns the result of a test that was not run.
    fn not_run() -> Self;
}

impl Outcome for () {
    fn not_run() -> Self {}
}

impl<E> Outcome for Result<(), E> {
    fn not_run() -> Self {
        Ok(())
    }
}

/// Returns whether network namespaces can be created.
///
/// # Panics
///
/// Panics if not, unless tests that were not run are being listed.
pub fn namespaces() -> bool {
    met("network namespaces", crate::namespace::available())
}

/// Returns whether BPF programs can be loaded.
///
/// # Panics
///
/// Panics if not, unless tests that were not run are being listed.
pub fn bpf() -> bool {
    let loaded = Yardstick::Pass.load(Hook::Native).map(drop);
    met("BPF programs", loaded)
}

/// Reports a requirement that is not met.
///
/// # Panics
///
/// Panics in CI, and unless tests that were not run are being listed.
pub fn met<E: Display>(what: &str, found: Result<(), E>) -> bool {
    match found {
        Ok(()) => true,
        Err(problem) => {
            let reason = format!("{what} are not available here: {problem}");
            assert!(env::var_os("CI").is_none(), "{reason}");
            not_run(&reason);
            false
        }
    }
}

/// Returns whether all these programs are installed.
///
/// # Panics
///
/// Like [`met`].
pub fn programs(names: &[&str]) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    names.iter().all(|name| {
        let found = if env::split_paths(&path).any(|folder| folder.join(name).is_file()) {
            Ok(())
        } else {
            Err("not installed")
        };
        met(name, found)
    })
}

/// Returns whether Prometheus is installed.
///
/// # Panics
///
/// Like [`met`].
pub fn prometheus() -> bool {
    programs(&["prometheus", "promtool"])
}

/// Adds the running test to the list of tests that were not run.
///
/// # Panics
///
/// Panics if there is no such list.
pub fn not_run(reason: &str) {
    let test = thread::current().name().unwrap_or("a test").to_owned();
    let Some(list) = env::var_os(NOT_RUN_VARIABLE) else {
        panic!("{test} cannot be run: {reason} (`cargo xtask test` lists it and continues)");
    };
    let mut list = File::options()
        .create(true)
        .append(true)
        .open(&list)
        .expect("the list of tests not run");
    writeln!(list, "{test}: {reason}").expect("the list of tests not run");
}
