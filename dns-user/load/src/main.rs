//! The program `bosh-dns-xdp-load`, see the library.

fn main() -> std::process::ExitCode {
    dns_load::main()
}
