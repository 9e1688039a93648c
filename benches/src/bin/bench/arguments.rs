//! Arguments of `cargo xtask bench`; xtask parses them too, so that `--help` needs no build.

use std::path::PathBuf;

use clap::Parser;

/// Measure everything and write the report.
#[derive(Parser)]
#[command(name = "cargo xtask bench")]
pub(crate) struct Arguments {
    /// Fewer rounds, sizes and peers: about ten minutes instead of an hour.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Maximum number of rounds; fewer take less time and widen the intervals.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..))]
    pub(crate) rounds: Option<u8>,
    /// Also measure bosh-dns, with this binary.
    #[arg(long)]
    pub(crate) bosh_dns: Option<PathBuf>,
    /// Compare with another build of the server, alternately on a saturated core, and measure
    /// nothing else; may be repeated.
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) against: Vec<PathBuf>,
    /// With --against: modes of the fast path (`off`: userspace only).
    #[arg(long, value_name = "MODE", default_value = "tc", requires = "against", value_parser = ["tc", "native", "off"])]
    pub(crate) mode: Vec<String>,
    /// Rewrite the pages from a report.json, without measuring anything.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["against", "only", "subject", "quick", "rounds", "bosh_dns"])]
    pub(crate) from: Option<PathBuf>,
    /// Folder of the report.
    #[arg(long, default_value = "report")]
    pub(crate) output: PathBuf,
    /// Only the parts with this text in their name; may be repeated.
    #[arg(long, value_name = "PART")]
    pub(crate) only: Vec<String>,
    /// Only subjects with this text in their label; may be repeated.
    #[arg(long, value_name = "TEXT")]
    pub(crate) subject: Vec<String>,
    /// Be the subject that returns queries with this number of answers.
    #[arg(long, value_name = "ANSWERS", hide = true)]
    pub(crate) echo: Option<u16>,
}
