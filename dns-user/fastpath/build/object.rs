//! Builds the BPF object from `dns-ebpf` with a separate cargo and compiler.

use std::path::{Path, PathBuf};

use self::bpf_cargo::bpf_cargo;

#[path = "bpf_cargo.rs"]
mod bpf_cargo;

/// Runs cargo in `dns-ebpf` with the toolchain's settings and the target folder `target`; returns
/// the path of the object.
pub(crate) fn run_cargo(dns_ebpf: &Path, settings: &str, target: &Path) -> Result<PathBuf, String> {
    let mut cargo = bpf_cargo("cargo", "build", dns_ebpf, settings)?;
    cargo.arg("--target-dir").arg(target);
    let output = cargo.output().map_err(|error| format!("cannot run cargo for dns-ebpf: {error}"))?;
    if !output.status.success() {
        return Err(format!("building dns-ebpf failed:\n{}", String::from_utf8_lossy(&output.stderr)));
    }
    Ok(target.join("bpfel-unknown-none/release/dns-ebpf"))
}
