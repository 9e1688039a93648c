//! The binary `bosh-dns-xdp`.

fn main() {}
