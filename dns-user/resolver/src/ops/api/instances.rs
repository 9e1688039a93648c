//! `/instances`.

use std::sync::Arc;

use axum::{
    extract::{Query, State},
    response::Response,
};
use serde::{Deserialize, Serialize};

use super::{Backend, json_lines, refused};

/// A line of `/instances`: the reference's members, all of them text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceLine {
    /// Instance id.
    pub id: String,
    /// Instance group.
    pub group: String,
    /// Network.
    pub network: String,
    /// Deployment.
    pub deployment: String,
    /// Address.
    pub ip: String,
    /// Domain, with the final dot.
    pub domain: String,
    /// Availability zone; empty: none.
    pub az: String,
    /// Index.
    pub index: String,
    /// `running`, `failing`, `unknown` or `unchecked`.
    pub health_state: String,
}

/// Lists instances. Of several addresses the first counts, an empty one is
/// none, other parameters do not count (observed).
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
