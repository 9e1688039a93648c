//! Builds the BPF objects from `ebpf`, to be embedded.

use std::process::ExitCode;

#[path = "../../dns-user/attacher/build/object.rs"]
mod object;

fn main() -> ExitCode {
    object::embed(
        "ebpf",
        &["benches/programs/src", "dns-ebpf/src", "dns-common/src"],
        &["reset", "skeleton", "yardsticks"],
    )
}
