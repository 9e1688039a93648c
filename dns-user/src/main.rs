//! The binary `bosh-dns-xdp`.

use std::process::ExitCode;

fn main() -> ExitCode {
    dns_user::cli::main(std::env::args_os())
}
