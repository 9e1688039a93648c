//! Entry point of the `bosh-dns-xdp` binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    dns_resolver::cli::main(std::env::args_os())
}
