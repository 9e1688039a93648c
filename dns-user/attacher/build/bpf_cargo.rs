//! The cargo command for BPF crates, with the compiler named in `.toolchain/env`.

use std::{env, ffi::OsStr, path::Path, process::Command};

/// Returns the command `cargo subcommand`, to be run in `folder`; `subcommand` is `build` or
/// another that takes the same arguments.
///
/// `settings` holds lines of `KEY=VALUE`: `ARGS` holds further arguments of cargo (separated by
/// spaces), `PATH_FIRST` a folder to search first; every other key is an environment variable.
pub(crate) fn bpf_cargo(
    cargo: impl AsRef<OsStr>,
    subcommand: &str,
    folder: &Path,
    settings: &str,
) -> Result<Command, String> {
    let mut command = Command::new(cargo);
    command
        .current_dir(folder)
        .args([subcommand, "--release", "--target", "bpfel-unknown-none"]);
    // Settings of the outer cargo or clippy must not leak into the inner build.
    for (key, _) in env::vars_os() {
        let key_text = key.to_string_lossy();
        if key_text.starts_with("CARGO") && key_text != "CARGO_HOME"
            || key_text.starts_with("RUST") && key_text != "RUSTUP_HOME"
        {
            command.env_remove(&key);
        }
    }
    for line in settings.lines().filter(|line| !line.is_empty()) {
        let (key, value) = line
            .split_once('=')
            .ok_or_else(|| format!(".toolchain/env: bad line {line:?}"))?;
        match key {
            "ARGS" => drop(command.args(value.split_whitespace())),
            "PATH_FIRST" => {
                let path = env::var("PATH").unwrap_or_default();
                command.env("PATH", format!("{value}:{path}"));
            }
            _ => drop(command.env(key, value)),
        }
    }
    Ok(command)
}
