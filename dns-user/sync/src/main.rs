//! The program `bosh-dns-sync`.

fn main() -> std::process::ExitCode {
    dns_sync::main()
}
