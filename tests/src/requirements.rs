//! What a test needs of the machine. Nothing is skipped silently: where something is
//! missing the test fails, unless `cargo xtask test` runs it, which lists at its end
//! what was not run, and why. In CI (variable `CI` set) it fails there, too.

use std::{fmt::Display, fs::File, io::Write as _, thread};

use crate::yardstick::{Hook, Yardstick};

/// Names the file to which a test that cannot be run adds a line: `name: reason`.
pub const NOT_RUN_VARIABLE: &str = "BOSH_DNS_NOT_RUN";

/// Ends the calling test, as one that was not run, if the machine lacks one of these requirements:
/// `requires!(namespaces, bpf)`. Each is a function of this module.
#[macro_export]
macro_rules! requires {
    ($($requirement:ident),+) => {
        $(
            if !$crate::requirements::$requirement() {
                return $crate::requirements::Outcome::not_run();
            }
        )+
    };
}

/// Results of test functions.
pub trait Outcome {
    /// The result of a test that was not run.
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

/// Whether a test can go on: network namespaces can be made.
///
/// # Panics
///
/// Where they cannot and nobody lists what was not run.
pub fn namespaces() -> bool {
    met("network namespaces", crate::namespace::available())
}

/// Whether a test can go on: BPF programs can be loaded.
///
/// # Panics
///
/// Where they cannot and nobody lists what was not run.
pub fn bpf() -> bool {
    let loaded = Yardstick::Pass.load(Hook::Native).map(drop);
    met("BPF programs", loaded)
}

/// Reports a requirement that is not met.
///
/// # Panics
///
/// Where nobody lists what was not run, and in CI.
pub fn met<E: Display>(what: &str, found: Result<(), E>) -> bool {
    match found {
        Ok(()) => true,
        Err(problem) => {
            let reason = format!("{what} are not available here: {problem}");
            assert!(std::env::var_os("CI").is_none(), "{reason}");
            not_run(&reason);
            false
        }
    }
}

/// Puts the running test on the list of those that were not run.
///
/// # Panics
///
/// Where there is no such list.
pub fn not_run(reason: &str) {
    let test = thread::current().name().unwrap_or("a test").to_owned();
    let Some(list) = std::env::var_os(NOT_RUN_VARIABLE) else {
        panic!("{test} cannot be run: {reason} (`cargo xtask test` lists it and goes on)");
    };
    let mut list = File::options().create(true).append(true).open(&list).expect("the list of tests not run");
    writeln!(list, "{test}: {reason}").expect("the list of tests not run");
}
