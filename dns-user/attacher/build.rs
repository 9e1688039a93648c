//! Builds the BPF object from `dns-ebpf`, to be embedded in the binary.

use std::process::ExitCode;

#[path = "build/object.rs"]
mod object;

fn main() -> ExitCode {
    object::embed("../../dns-ebpf", &["dns-common/src"], &["dns-ebpf"])
}
