//! Whether the server is well, as a list of things that were looked at.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{
    board::{Board, State},
    journal::Kind,
};
use crate::consul::ConsulNames;
use dns_fastpath::Slot;
use dns_health::HealthService;

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// `sockets`, `records`...
    pub name: &'static str,
    /// Whether it is as it should be.
    pub ok: bool,
    /// Whether nothing works without it, so that a restart is in order.
    pub vital: bool,
    /// What was seen, in a few words.
    pub detail: String,
}

/// The same, as `/status` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckStatus {
    /// `sockets`, `records`...
    pub name: String,
    /// Whether it is as it should be.
    pub ok: bool,
    /// What was seen, in a few words.
    pub detail: String,
}

impl From<Check> for CheckStatus {
    fn from(Check { name, ok, vital: _, detail }: Check) -> Self {
        Self { name: name.to_owned(), ok, detail }
    }
}

/// Looks at the board, and at the interfaces.
#[derive(Clone)]
pub struct Wellness {
    /// Where the other rooms say how they do.
    pub(crate) board: Board,
    /// The fast path.
    pub(crate) slot: Slot,
    /// Health checks; `None` if they are off.
    pub(crate) health: Option<Arc<HealthService>>,
    /// Consul's names; `None` without an object `"consul"`.
    pub(crate) consul: Option<Arc<ConsulNames>>,
}

impl Wellness {
    /// Returns everything that was looked at. Called on every probe: cheap, never blocking.
    pub fn checks(&self) -> Vec<Check> {
        let Self { board, slot, health, consul } = self;
        let State {
            listen,
            fast_path_off,
            instances,
            files,
            upcheck_error,
            silent_addresses,
            parts_off,
            notes: _,
        } = board.state();
        let listen: Vec<String> = listen.iter().map(ToString::to_string).collect();
        let mut checks = vec![Check {
            name: "sockets",
            ok: upcheck_error.is_none(),
            vital: true,
            detail: upcheck_error.unwrap_or_else(|| format!("answering on {}", listen.join(", "))),
        }];
        if !silent_addresses.is_empty() {
            // The others answer, and a restart brings no address back.
            let detail = silent_addresses.join("; ");
            checks.push(Check { name: "every address", ok: false, vital: false, detail });
        }
        for (name, kind) in [
            ("configuration", Kind::Config),
            ("records", Kind::Records),
            ("aliases", Kind::Aliases),
            ("handlers", Kind::Handlers),
            ("addresses", Kind::Addresses),
        ] {
            let Some(state) = files.get(kind.label()) else { continue };
            let fine = match kind {
                Kind::Records => format!("{instances} instances"),
                _ => format!("{} files", state.files.len()),
            };
            checks.push(Check {
                name,
                ok: state.error.is_none(),
                vital: false,
                detail: state.error.clone().unwrap_or(fine),
            });
        }
        checks.push(Check {
            name: "fast path",
            // Off is slower, not wrong.
            ok: true,
            vital: false,
            detail: fast_path_off.map_or_else(|| slot.in_words(), |reason| format!("off: {reason}")),
        });
        if let Some(health) = health {
            let blindness = health.blindness();
            checks.push(Check {
                name: "health checks",
                ok: blindness.is_none(),
                // Names resolve to all their instances meanwhile.
                vital: false,
                detail: blindness.unwrap_or_else(|| health_in_words(health)),
            });
        }
        if let Some(consul) = consul {
            let doubt = consul.doubt();
            // The last answers are served meanwhile, and a restart does not help.
            let ok = doubt.is_none();
            let fine = || format!("{} instances", consul.zone().catalog.instance_count());
            checks.push(Check { name: "Consul", ok, vital: false, detail: doubt.unwrap_or_else(fine) });
        }
        if !parts_off.is_empty() {
            // DNS is served all the same.
            checks.push(Check { name: "parts off", ok: true, vital: false, detail: parts_off.join("; ") });
        }
        checks
    }
}

/// The states of instances, in a few words.
fn health_in_words(health: &HealthService) -> String {
    let [running, failing, unknown, _] = health.states().counts();
    format!("{running} instances running, {failing} failing, {unknown} unknown")
}
