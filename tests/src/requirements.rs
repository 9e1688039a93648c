//! Requirements of whole-system tests on the machine, beside those of `test_support`.

use std::env;

pub use test_support::requirements::{NOT_RUN_VARIABLE, met, not_run, root};

use crate::yardstick::{Hook, Yardstick};

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
