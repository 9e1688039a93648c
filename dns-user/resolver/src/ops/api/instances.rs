//! `/instances`: the instances of the records with their health.

use std::sync::Arc;

use axum::{
    extract::{Query, State},
    response::Response,
};
use serde::{Deserialize, Serialize};

use super::{Backend, json_lines, refused};

/// A line of `/instances`: the same members as in bosh-dns, all of them strings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceLine {
    /// Instance id, as in the records.
    pub id: String,
    /// Name of the instance group.
    pub group: String,
    /// Network of the address.
    pub network: String,
    /// Name of the deployment.
    pub deployment: String,
    /// IPv4 or IPv6 address.
    pub ip: String,
    /// Domain, with a trailing dot.
    pub domain: String,
    /// Availability zone; empty if the instance has none.
    pub az: String,
    /// Index within the instance group.
    pub index: String,
    /// `running`, `failing`, `unknown` or `unchecked`.
    pub health_state: String,
}

/// Handles `/instances`. Of several `address` parameters the first counts, an empty one is
/// ignored, and so are other parameters (observed).
pub(super) async fn instances(
    State(backend): State<Arc<Backend>>,
    Query(parameters): Query<Vec<(String, String)>>,
) -> Response {
    let address = parameters.iter().find(|(key, _)| key == "address").map(|(_, value)| value.as_str());
    match backend.instances(address.filter(|address| !address.is_empty())) {
        Ok(lines) => json_lines(lines),
        Err(reason) => refused(reason),
    }
}
