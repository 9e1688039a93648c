//! The program `bosh-dns-identity`.

fn main() {}
