//! `--help` of every command, without installing or building anything.

use std::process::Command;

fn help(arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(arguments)
        .output()
        .expect("xtask runs");
    (
        output.status.code(),
        String::from_utf8(output.stdout).expect("help is UTF-8"),
    )
}

#[test]
fn errors_have_no_backtrace() {
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["release", "0.0.0", "--unsigned"])
        .env("RUST_BACKTRACE", "1")
        .output()
        .expect("xtask runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.contains("Cargo.toml"), "{said}");
}

#[test]
fn every_command_explains_itself() {
    for (arguments, part) in [
        (&["help", "fuzz"][..], "--program"),
        (&["fuzz", "--help"], "--seed"),
        (&["mutants", "--help"], "--program"),
        (&["bench", "--help"], "--against"),
        (&["demo", "--help"], "--instances"),
        (&["help", "kernel-test"], "bzImage"),
    ] {
        let (code, text) = help(arguments);
        assert!(
            code == Some(0) && text.contains(part),
            "{arguments:?}: {code:?} {text}"
        );
    }
    assert_eq!(help(&["bench", "--nonsense"]).0, Some(2));
    assert_eq!(help(&[]).0, Some(2));
}
