//! `detach`: detaches the fast path from all interfaces, even if its server has died.

use std::{
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
};

use clap::Args;

use super::{Problem, print, print_json};
use dns_fastpath::{Detached, detach_all};

#[derive(Debug, Args)]
pub(in crate::cli) struct Detach {
    /// config.json of the server whose fast path to detach
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Detach {
    /// Detaches the programs in the caller's network namespace.
    pub(super) fn run(self) -> Result<(), Problem> {
        let loaded = dns_platform::files::load_config(&self.config)
            .map_err(|error| Problem::BadAnswer(error.to_string()))?;
        let config = loaded.config;
        let detached = detach_all(&config.xdp, &[config.listen])
            .map_err(|error| Problem::BadAnswer(format!("cannot detach everything: {error}")))?;
        let is_alive = |socket: &Path| UnixStream::connect(socket).is_ok();
        if detached.links + detached.filters == 0
            && config.control.as_ref().is_some_and(|control| is_alive(&control.socket))
        {
            return Err(Problem::BadAnswer(
                "nothing was detached: the server is running and holds its programs without pins; they stay \
                 attached until it stops, or until xdp.enabled is false and it restarts"
                    .to_owned(),
            ));
        }
        if self.json {
            return print_json(&(serde_json::to_string(&detached).unwrap_or_default() + "\n"));
        }
        let Detached { links, filters, folder } = detached;
        print(&format!("detached {links} links and {filters} filters; {} is gone\n", folder.display()))
    }
}
