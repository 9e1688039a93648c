//! Builds the BPF object from `../dns-ebpf`, to be embedded in the binary.

use std::{env, fs, path::PathBuf, process::ExitCode};

#[path = "build/object.rs"]
mod object;

fn main() -> ExitCode {
    match build_object() {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            // One clear line: cargo shows a failed build script's stderr.
            eprintln!("{problem}");
            ExitCode::FAILURE
        }
    }
}

/// Builds the object, copies it to `OUT_DIR/dns-ebpf` and tells cargo what it depends on.
fn build_object() -> Result<(), String> {
    let crate_dir = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or("not run by cargo")?);
    let out_dir = PathBuf::from(env::var_os("OUT_DIR").ok_or("not run by cargo")?);
    let root = crate_dir.join("../..");
    let built = object::build(&root, &root.join("dns-ebpf"), &["dns-common/src"])?;
    fs::copy(built.join("dns-ebpf"), out_dir.join("dns-ebpf"))
        .map_err(|error| format!("cannot copy dns-ebpf: {error}"))?;
    Ok(())
}
