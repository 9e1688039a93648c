//! The migration tool `consul-aliases`, which generates aliases for Consul's names.

use std::process::ExitCode;

fn main() -> ExitCode {
    dns_resolver::cli::consul_aliases()
}
