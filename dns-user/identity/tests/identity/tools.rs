//! openssl as an independent implementation.

use std::{
    io::Write,
    path::Path,
    process::{Command, Stdio},
};

/// Runs openssl on `input`; returns standard output, or standard error if it fails.
pub(crate) fn openssl(arguments: &[&str], input: &[u8]) -> Result<String, String> {
    let mut child = Command::new("openssl")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that does not read its input closes the pipe.
    let _ = child.stdin.take().unwrap().write_all(input);
    let output = child.wait_with_output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Adds the running test to the list of tests not run; fails in CI, or without a list.
pub(crate) fn not_run(reason: &str) {
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    assert!(std::env::var_os("CI").is_none(), "{test}: {reason}");
    let list = std::env::var_os("BOSH_DNS_NOT_RUN").unwrap_or_else(|| {
        panic!("{test} cannot be run: {reason} (`cargo xtask test` lists it and continues)")
    });
    let mut list = std::fs::File::options().create(true).append(true).open(list).unwrap();
    writeln!(list, "{test}: {reason}").unwrap();
}
