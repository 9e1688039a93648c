//! Builds the BPF objects from `ebpf`, to be embedded.

use std::{env, fs, path::PathBuf, process::ExitCode};

#[path = "../../dns-user/attacher/build/object.rs"]
mod object;

fn main() -> ExitCode {
    match build_objects() {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("{problem}");
            ExitCode::FAILURE
        }
    }
}

/// Builds the objects, copies them to `OUT_DIR` and tells cargo what they depend on.
fn build_objects() -> Result<(), String> {
    let crate_dir = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or("not run by cargo")?);
    let out_dir = PathBuf::from(env::var_os("OUT_DIR").ok_or("not run by cargo")?);
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-changed=ebpf");
    let built = object::build(
        &crate_dir.join("../.."),
        &crate_dir.join("ebpf"),
        &["dns-ebpf/src", "dns-common/src"],
    )?;
    for name in ["reset", "skeleton", "yardsticks"] {
        fs::copy(built.join(name), out_dir.join(name))
            .map_err(|error| format!("cannot copy {name}: {error}"))?;
    }
    Ok(())
}
