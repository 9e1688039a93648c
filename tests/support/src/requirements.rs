//! Requirements of tests on the machine. Nothing is skipped silently: a test with a missing
//! requirement fails, except under `cargo xtask test`, which lists it at the end as not run, with
//! the reason. In CI (variable `CI` set) it fails there, too.

use std::{env, fmt::Display, fs::File, io::Write as _, net::UdpSocket, thread};

use nix::unistd::Uid;

/// Environment variable with the path of the file to which a test that cannot run adds a line
/// `name: reason`.
pub const NOT_RUN_VARIABLE: &str = "BOSH_DNS_NOT_RUN";

/// Returns whether the process is root's, which may change owners, namespaces and mounts.
///
/// # Panics
///
/// Like [`met`].
pub fn root() -> bool {
    let found = if Uid::effective().is_root() {
        Ok(())
    } else {
        Err("the user is another one")
    };
    met("root's rights", found)
}

/// Returns whether sockets can be bound to `::1`: Docker, for one, turns IPv6 off.
///
/// # Panics
///
/// Like [`met`].
pub fn ipv6() -> bool {
    met("IPv6 addresses", UdpSocket::bind("[::1]:0").map(drop))
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
