//! Whether the server is well, for `/healthz`, `/readyz` and the command `status`.

use std::sync::Arc;

use super::status::{Board, State};
use crate::{
    consul::ConsulNames,
    ops::{
        journal::Kind,
        probe::{Check, Probe},
    },
};
use dns_fastpath::Slot;
use dns_health::HealthService;

/// Looks at the board, and at the interfaces.
#[derive(Clone)]
pub(super) struct Wellness {
    /// Where the other rooms say how they do.
    pub(super) board: Board,
    /// The fast path.
    pub(super) slot: Slot,
    /// Health checks; `None` if they are off.
    pub(super) health: Option<Arc<HealthService>>,
    /// Consul's names; `None` without an object `"consul"`.
    pub(super) consul: Option<Arc<ConsulNames>>,
}

impl Probe for Wellness {
    fn checks(&self) -> Vec<Check> {
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
