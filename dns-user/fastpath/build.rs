//! Builds the BPF object from `../dns-ebpf`, to be embedded in the binary.
//!
//! `.toolchain/env` names the compiler; `cargo xtask build` writes that file once it has found or
//! installed one (`xtask/src/toolchain.rs`).

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
    let toolchain = root.join(".toolchain/env");
    for input in [
        "dns-ebpf/src",
        "dns-ebpf/.cargo",
        "dns-ebpf/Cargo.toml",
        "dns-ebpf/Cargo.lock",
        "dns-common/src",
        ".toolchain/env",
    ] {
        println!("cargo::rerun-if-changed={}", root.join(input).display());
    }

    let settings = fs::read_to_string(&toolchain).map_err(
        |_| "the BPF toolchain is not set up yet: run `cargo xtask build` (it installs what is missing)",
    )?;
    let source = root.join("dns-ebpf");
    let built = object::run_cargo(&source, &settings, &source.join("target"))?;
    fs::copy(&built, out_dir.join("dns-ebpf"))
        .map_err(|error| format!("cannot copy {}: {error}", built.display()))?;
    Ok(())
}
