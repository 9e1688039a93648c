//! How cargo is called for `dns-ebpf`: with a compiler of its own, that of `.toolchain/env`.

use std::{env, ffi::OsStr, path::Path, process::Command};

/// Cargo, or what is called as it is, in `dns-ebpf`; `subcommand`: `build` or another that
/// takes the same arguments.
///
/// `settings`: lines of `KEY=VALUE`. `ARGS` holds further arguments of cargo
/// (separated by spaces), `PATH_FIRST` a folder to search first; everything
/// else is an environment variable.
pub(crate) fn bpf_cargo(
    cargo: impl AsRef<OsStr>,
    subcommand: &str,
    dns_ebpf: &Path,
    settings: &str,
) -> Result<Command, String> {
    let mut command = Command::new(cargo);
    command.current_dir(dns_ebpf).args([subcommand, "--release", "--target", "bpfel-unknown-none"]);
    // What cargo and clippy set for this build must not reach the other one.
    for (key, _) in env::vars_os() {
        let key_text = key.to_string_lossy();
        if key_text.starts_with("CARGO") && key_text != "CARGO_HOME"
            || key_text.starts_with("RUST") && key_text != "RUSTUP_HOME"
        {
            command.env_remove(&key);
        }
    }
    for line in settings.lines().filter(|line| !line.is_empty()) {
        let (key, value) =
            line.split_once('=').ok_or_else(|| format!(".toolchain/env: bad line {line:?}"))?;
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
