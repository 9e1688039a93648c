//! The program `bosh-dns-identity`.

fn main() -> std::process::ExitCode {
    dns_identity::main()
}
