//! Builds BPF objects with a separate cargo and compiler.
//!
//! `.toolchain/env` names the compiler; `cargo xtask build` writes that file once it has found or
//! installed one (`xtask/src/toolchain.rs`).

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use self::bpf_cargo::bpf_cargo;

#[path = "bpf_cargo.rs"]
mod bpf_cargo;

/// Is the `main` of a build script: builds the BPF crate in `folder` (below the script's crate), and copies its `objects` to
/// `OUT_DIR` to be embedded. Cargo runs the script again when the BPF crate, one of `inputs` (below the repository) or the
/// toolchain changes.
#[allow(
    dead_code,
    reason = "xtask's test of the object calls only `run_cargo`"
)]
pub(crate) fn embed(folder: &str, inputs: &[&str], objects: &[&str]) -> ExitCode {
    match build(folder, inputs, objects) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            // One clear line: cargo shows a failed build script's stderr.
            eprintln!("{problem}");
            ExitCode::FAILURE
        }
    }
}

fn build(folder: &str, inputs: &[&str], objects: &[&str]) -> Result<(), String> {
    let crate_dir = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or("not run by cargo")?);
    let out_dir = PathBuf::from(env::var_os("OUT_DIR").ok_or("not run by cargo")?);
    let root = crate_dir.join("../..");
    let folder = crate_dir.join(folder);
    let toolchain = root.join(".toolchain/env");
    // Named one by one: the crate's folder holds its `target`, which each build changes.
    let of_crate = ["src", ".cargo", "Cargo.toml", "Cargo.lock"].map(|input| folder.join(input));
    let others = inputs.iter().map(|input| root.join(input));
    for input in of_crate
        .into_iter()
        .chain(others)
        .chain([toolchain.clone()])
    {
        println!("cargo::rerun-if-changed={}", input.display());
    }
    let settings = fs::read_to_string(toolchain).map_err(
        |_| "the BPF toolchain is not set up yet: run `cargo xtask build` (it installs what is missing)",
    )?;
    // One target folder: the crates share their dependencies.
    let built = run_cargo(&folder, &settings, &root.join("dns-ebpf/target"))?;
    for object in objects {
        fs::copy(built.join(object), out_dir.join(object))
            .map_err(|error| format!("cannot copy {object}: {error}"))?;
    }
    Ok(())
}

/// Runs cargo in `folder` with the toolchain's settings and the target folder `target`; returns the
/// folder of the objects.
pub(crate) fn run_cargo(folder: &Path, settings: &str, target: &Path) -> Result<PathBuf, String> {
    let mut cargo = bpf_cargo("cargo", "build", folder, settings)?;
    cargo.arg("--target-dir").arg(target);
    let shown = folder.display();
    let output = cargo
        .output()
        .map_err(|error| format!("cannot run cargo in {shown}: {error}"))?;
    if !output.status.success() {
        return Err(format!(
            "building {shown} failed:\n{}",
            String::from_utf8_lossy(&output.stderr)
        ));
    }
    Ok(target.join("bpfel-unknown-none/release"))
}
