//! The binary `bosh-dns-xdp-health FILE`: the health server, with the reference's command line.

use std::{ffi::OsString, path::Path, process::ExitCode};

use dns_health::server;
use dns_kit::logs::LogFormat;

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    match &arguments[..] {
        [file] if !file.to_string_lossy().starts_with('-') => {
            server::run(Path::new(file), LogFormat::default())
        }
        _ => {
            eprintln!(
                "usage: bosh-dns-xdp-health FILE\n\nFILE is the health server's configuration, JSON."
            );
            ExitCode::from(2)
        }
    }
}
