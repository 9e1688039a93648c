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

/// Path as text.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
