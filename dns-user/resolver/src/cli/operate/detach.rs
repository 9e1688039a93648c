//! `detach`: detaches the fast path from all interfaces, even if its server has died.

use std::{
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
};

use clap::Args;

use super::{Problem, print, print_json};
use dns_fastpath::{Detached, FolderState, detach_all};

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
        let loaded = dns_kit::files::load_config(&self.config)
            .map_err(|error| Problem::BadAnswer(error.to_string()))?;
        let config = loaded.config;
        let detached = detach_all(&config.xdp, &[config.listen])
            .map_err(|error| Problem::BadAnswer(format!("cannot detach everything: {error}")))?;
        let is_alive = |socket: &Path| UnixStream::connect(socket).is_ok();
        let is_served = config.control.as_ref().is_some_and(|control| is_alive(&control.socket));
        if detached.links + detached.filters == 0 && is_served {
            return Err(Problem::BadAnswer(
                "nothing was detached: the server is running and holds its programs without pins; they stay \
                 attached until it stops, or until xdp.enabled is false and it restarts"
                    .to_owned(),
            ));
        }
        if self.json {
            return print_json(&(serde_json::to_string(&detached).unwrap_or_default() + "\n"));
        }
        print(&sentence(&detached))?;
        if is_served {
            print(
                "the server is running and attaches its programs again; to keep them off, set xdp.enabled to \
                 false and restart it\n",
            )?;
        }
        Ok(())
    }
}

fn sentence(detached: &Detached) -> String {
    let Detached { links, filters, folder, folder_state } = detached;
    let folder = folder.display();
    let programs = match (links, filters) {
        (0, 0) => "nothing was attached".to_owned(),
        _ => format!("detached {links} links and {filters} filters"),
    };
    match folder_state {
        FolderState::Absent => format!("{programs}; there are no pins ({folder})\n"),
        FolderState::Removed => format!("{programs}; removed {folder}\n"),
        FolderState::Kept => {
            format!("{programs}; {folder} stays: it holds entries that this version does not pin\n")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentence_states_each_outcome() {
        let say = |links, folder_state| {
            sentence(&Detached { links, filters: 0, folder: PathBuf::from("/pins"), folder_state })
        };
        assert_eq!(say(0, FolderState::Absent), "nothing was attached; there are no pins (/pins)\n");
        assert_eq!(say(2, FolderState::Removed), "detached 2 links and 0 filters; removed /pins\n");
        assert_eq!(
            say(0, FolderState::Kept),
            "nothing was attached; /pins stays: it holds entries that this version does not pin\n"
        );
    }
}
