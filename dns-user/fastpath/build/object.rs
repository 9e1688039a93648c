//! The BPF object, built from `dns-ebpf` by a cargo and a compiler of its own.

use std::path::{Path, PathBuf};

use self::bpf_cargo::bpf_cargo;

#[path = "bpf_cargo.rs"]
mod bpf_cargo;

/// Runs cargo in `dns-ebpf` with the settings of the toolchain; returns the object's path.
/// What is built goes to `target`.
pub(crate) fn run_cargo(dns_ebpf: &Path, settings: &str, target: &Path) -> Result<PathBuf, String> {
    let mut cargo = bpf_cargo("cargo", "build", dns_ebpf, settings)?;
    cargo.arg("--target-dir").arg(target);
    let output = cargo.output().map_err(|error| format!("cannot run cargo for dns-ebpf: {error}"))?;
    if !output.status.success() {
        return Err(format!("building dns-ebpf failed:\n{}", String::from_utf8_lossy(&output.stderr)));
    }
    Ok(target.join("bpfel-unknown-none/release/dns-ebpf"))
}
