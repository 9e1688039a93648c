//! The migration tool `consul-aliases`: from Consul's names to aliases.

use std::process::ExitCode;

fn main() -> ExitCode {
    dns_resolver::cli::consul_aliases()
}
