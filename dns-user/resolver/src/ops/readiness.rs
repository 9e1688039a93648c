//! Liveness and readiness of the server, as a list of checks.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{
    reload_history::Kind,
    service_status::{ServiceStatus, State},
};
use crate::consul::ConsulNames;
use dns_fastpath::FastPathHandle;
use dns_health::HealthService;

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// Name of the check, such as `sockets` or `records`.
    pub name: &'static str,
    /// Whether the check passed.
    pub ok: bool,
    /// Whether a failure prevents all service, so that a restart is needed.
    pub vital: bool,
    /// Finding, in a few words.
    pub detail: String,
}

/// A check as shown by `/status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckStatus {
    /// Name of the check, such as `sockets` or `records`.
    pub name: String,
    /// Whether the check passed.
    pub ok: bool,
    /// Finding, in a few words.
    pub detail: String,
}

impl From<Check> for CheckStatus {
    fn from(Check { name, ok, vital: _, detail }: Check) -> Self {
        Self { name: name.to_owned(), ok, detail }
    }
}

/// Runs the checks on the service status and the components.
#[derive(Clone)]
pub struct Readiness {
    pub(crate) service_status: ServiceStatus,
    pub(crate) fast_path: FastPathHandle,
    /// `None` if health checks are off.
    pub(crate) health: Option<Arc<HealthService>>,
    /// `None` without an object `"consul"`.
    pub(crate) consul: Option<Arc<ConsulNames>>,
}

impl Readiness {
    /// Returns the result of every check. Called on every probe: cheap, never blocks.
    pub fn checks(&self) -> Vec<Check> {
        let Self { service_status, fast_path, health, consul } = self;
        let State {
            listen,
            fast_path_off,
            instances,
            files,
            upcheck_error,
            silent_addresses,
            parts_off,
            notes: _,
        } = service_status.state();
        let listen: Vec<String> = listen.iter().map(ToString::to_string).collect();
        let mut checks = vec![Check {
            name: "sockets",
            ok: upcheck_error.is_none(),
            vital: true,
            detail: upcheck_error.unwrap_or_else(|| format!("answering on {}", listen.join(", "))),
        }];
        if !silent_addresses.is_empty() {
            // The other addresses answer, and a restart would not bring this one back.
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
            // Without the fast path answers are slower, not wrong.
            ok: true,
            vital: false,
            detail: fast_path_off.map_or_else(|| fast_path.in_words(), |reason| format!("off: {reason}")),
        });
        if let Some(health) = health {
            let blindness = health.blindness();
            checks.push(Check {
                name: "health checks",
                ok: blindness.is_none(),
                // Until then names resolve to all their instances.
                vital: false,
                detail: blindness.unwrap_or_else(|| health_in_words(health)),
            });
        }
        if let Some(consul) = consul {
            let doubt = consul.doubt();
            // The last known data is served meanwhile; a restart would not help.
            let ok = doubt.is_none();
            let fine = || format!("{} instances", consul.zone().catalog.instance_count());
            checks.push(Check { name: "Consul", ok, vital: false, detail: doubt.unwrap_or_else(fine) });
        }
        if !parts_off.is_empty() {
            // DNS works without them.
            checks.push(Check { name: "parts off", ok: true, vital: false, detail: parts_off.join("; ") });
        }
        checks
    }
}

/// Summarises the states of instances.
fn health_in_words(health: &HealthService) -> String {
    let [running, failing, unknown, _] = health.states().counts();
    format!("{running} instances running, {failing} failing, {unknown} unknown")
}
