//! The program `bosh-dns-publish`.

fn main() -> std::process::ExitCode {
    dns_publish::main()
}
