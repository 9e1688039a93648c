//! Builds the BPF object from `ebpf`, to be embedded.

use std::{env, fs, path::PathBuf, process::ExitCode};

#[path = "../attacher/build/object.rs"]
mod object;

fn main() -> ExitCode {
    match build_object() {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("{problem}");
            ExitCode::FAILURE
        }
    }
}

/// Builds the object, copies it to `OUT_DIR` and tells cargo what it depends on.
fn build_object() -> Result<(), String> {
    let crate_dir = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or("not run by cargo")?);
    let out_dir = PathBuf::from(env::var_os("OUT_DIR").ok_or("not run by cargo")?);
    let built = object::build(
        &crate_dir.join("../.."),
        &crate_dir.join("ebpf"),
        &["dns-ebpf/src/bytes.rs", "dns-user/load/src/orders.rs"],
    )?;
    fs::copy(built.join("load"), out_dir.join("load"))
        .map_err(|error| format!("cannot copy the object: {error}"))?;
    Ok(())
}
