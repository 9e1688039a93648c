//! The binary `bosh-dns-xdp`.

use std::process::ExitCode;

fn main() -> ExitCode {
    dns_resolver::cli::main(std::env::args_os())
}
