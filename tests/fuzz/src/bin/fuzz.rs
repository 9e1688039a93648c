//! The target that the environment variable `FUZZ_TARGET` names, under libFuzzer.
#![no_main]

use std::sync::LazyLock;

use bosh_dns_xdp_fuzz::{TARGETS, Target};
use libfuzzer_sys::fuzz_target;

static CHOSEN: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").expect("FUZZ_TARGET is set by `cargo xtask fuzz`");
    *TARGETS
        .iter()
        .find(|target| target.name == name)
        .expect("FUZZ_TARGET names a target")
});

fuzz_target!(|bytes: &[u8]| (CHOSEN.run)(bytes));
