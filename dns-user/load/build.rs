//! Builds the BPF object from `ebpf`, to be embedded.

use std::process::ExitCode;

#[path = "../attacher/build/object.rs"]
mod object;

fn main() -> ExitCode {
    object::embed(
        "ebpf",
        &["dns-ebpf/src/bytes.rs", "dns-user/load/src/orders.rs"],
        &["load"],
    )
}
