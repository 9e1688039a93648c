//! Arguments of `cargo xtask demo`; xtask parses them too, so that `--help` needs no build.

use std::path::PathBuf;

use clap::Parser;

/// Demonstrates bosh-dns-xdp on a generated foundation or your own data.
#[derive(Parser)]
#[command(name = "cargo xtask demo")]
pub(crate) struct Arguments {
    /// Your own records.json instead of a generated foundation.
    #[arg(long)]
    pub(crate) records: Option<PathBuf>,
    /// Your own alias file.
    #[arg(long, requires = "records")]
    pub(crate) aliases: Option<PathBuf>,
    /// Instances of the generated foundation.
    #[arg(long, default_value_t = 500)]
    pub(crate) instances: usize,
    /// Hook of the fast path: auto, native or tc.
    #[arg(long, default_value = "auto")]
    pub(crate) mode: String,
    /// Seconds of load in each measurement.
    #[arg(long, default_value_t = 3)]
    pub(crate) seconds: u64,
}
