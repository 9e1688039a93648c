//! `/instances`: the instances of the records with their health; `/local-groups`; and `/addresses`.

use std::{
    borrow::Cow,
    collections::BTreeSet,
    convert::Infallible,
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    vec,
};

use axum::{
    Json,
    body::{Body, Bytes},
    extract::{Query, State},
    http::header,
    response::{IntoResponse as _, Response},
};
use futures_util::stream;
use serde::{Deserialize, Serialize};

use super::{Backend, NameRefused, backend::parse, local_groups::groups, refused};
use dns_core::{
    catalog::{Instance, Snapshot},
    name::Name,
    resolve::{self, AddressQueries, AddressQuery, Existence},
};

/// Size from which the lines collected so far are sent: with another line still below the 16 KiB in which the
/// server hands parts on, so that lines stay whole. Lines are built only when the client has read the ones
/// before them: the response for 20,000 instances has 4 MB.
const PART: usize = 15 << 10;

/// A line of `/instances`: the same members as in bosh-dns, all of them strings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceLine<'a> {
    /// Instance id, as in the records.
    pub id: Cow<'a, str>,
    /// Name of the instance group.
    pub group: Cow<'a, str>,
    /// Network of the address.
    pub network: Cow<'a, str>,
    /// Name of the deployment.
    pub deployment: Cow<'a, str>,
    /// IPv4 or IPv6 address.
    pub ip: String,
    /// Domain, with a trailing dot.
    pub domain: Cow<'a, str>,
    /// Availability zone; empty if the instance has none.
    pub az: Cow<'a, str>,
    /// Index within the instance group.
    pub index: String,
    /// `running`, `failing`, `unknown` or `unchecked`.
    pub health_state: Cow<'a, str>,
}

/// Handles `/instances`. Of several `address` parameters the first counts, an empty one is
/// ignored, and so are other parameters (observed).
pub(super) async fn instances(
    State(backend): State<Arc<Backend>>,
    Query(parameters): Query<Vec<(String, String)>>,
) -> Response {
    let address = parameters
        .iter()
        .find(|(key, _)| key == "address")
        .map(|(_, value)| value.as_str());
    // One snapshot for the whole response, however slowly its client reads: a list of two versions
    // would show instances twice or not at all.
    let snapshot = backend.server_state.snapshot();
    let positions = match address.filter(|address| !address.is_empty()) {
        None => Ok((0..snapshot.instances().len() as u32).collect()),
        Some(address) => matching(&backend, &snapshot, address),
    };
    match positions {
        Ok(positions) => lines(backend, snapshot, positions),
        Err(reason) => refused(reason),
    }
}

fn matching(
    backend: &Backend,
    snapshot: &Snapshot,
    address: &str,
) -> Result<Vec<u32>, NameRefused> {
    resolve::instances(snapshot, &*backend.server_state.health, &parse(address)?).map_err(
        |existence| match existence {
            Existence::Malformed => NameRefused(format!("{address} is malformed")),
            _ => NameRefused(format!("{address}: no instance matches")),
        },
    )
}

fn lines(backend: Arc<Backend>, snapshot: Arc<Snapshot>, positions: Vec<u32>) -> Response {
    let mut positions = positions.into_iter();
    let parts = std::iter::from_fn(move || {
        let mut part = Vec::with_capacity(PART + 1024);
        for instance in positions
            .by_ref()
            .filter_map(|position| snapshot.instance(position))
        {
            serde_json::to_writer(&mut part, &line(&backend, &instance))
                .expect("texts can always be written as JSON");
            part.push(b'\n');
            if part.len() >= PART {
                break;
            }
        }
        (!part.is_empty()).then(|| Ok::<_, Infallible>(Bytes::from(part)))
    });
    (
        [(header::CONTENT_TYPE, "application/x-ndjson")],
        Body::from_stream(stream::iter(parts)),
    )
        .into_response()
}

/// Builds a line. The health state belongs to the instance and does not depend on the queried name
/// (observed).
fn line<'a>(backend: &Backend, instance: &Instance<'a>) -> InstanceLine<'a> {
    let state = instance
        .ip
        .map(|ip| backend.server_state.health.state(ip, None).label());
    InstanceLine {
        id: instance.id.into(),
        group: instance.instance_group.into(),
        network: instance.network.into(),
        deployment: instance.deployment.into(),
        ip: instance.ip.map(|ip| ip.to_string()).unwrap_or_default(),
        domain: instance.domain.into(),
        az: instance.az.into(),
        index: instance
            .index
            .map(|index| index.to_string())
            .unwrap_or_default(),
        // An instance without a usable address cannot be checked.
        health_state: state.unwrap_or("unknown").into(),
    }
}

/// Handles `/addresses`: the addresses of names for publication in zones of other servers.
pub(super) async fn addresses(
    State(backend): State<Arc<Backend>>,
    Json(AddressQueries(queries)): Json<AddressQueries>,
) -> Response {
    let mut names = Vec::with_capacity(queries.len());
    for AddressQuery { name, withdrawn } in queries {
        match parse(&name) {
            Ok(name) => names.push((name, withdrawn)),
            // Before the response begins: its status cannot be changed later.
            Err(reason) => return refused(reason),
        }
    }
    let answers = AddressAnswers {
        backend,
        names: names.into_iter(),
        before: b'[',
    };
    let parts = stream::unfold(answers, |mut answers| async move {
        let part = answers.next_part().await?;
        Some((Ok::<_, Infallible>(part), answers))
    });
    (
        [(header::CONTENT_TYPE, "application/json")],
        Body::from_stream(parts),
    )
        .into_response()
}

/// The answers of `/addresses` as a list in JSON. Each is found only when the client has read the ones before
/// it: 1,000 names of a large group have hundreds of megabytes.
struct AddressAnswers {
    backend: Arc<Backend>,
    names: vec::IntoIter<(Name, BTreeSet<IpAddr>)>,
    /// Text before the next answer; `]` after the end of the list.
    before: u8,
}

impl AddressAnswers {
    /// Returns the next part of the list; `None` after its end.
    async fn next_part(&mut self) -> Option<Bytes> {
        if self.before == b']' {
            return None;
        }
        let server_state = &self.backend.server_state;
        let mut part = Vec::with_capacity(PART + 1024);
        while part.len() < PART {
            let Some((name, withdrawn)) = self.names.next() else {
                // An empty list has not begun yet.
                if self.before == b'[' {
                    part.push(b'[');
                }
                self.before = b']';
                part.push(b']');
                break;
            };
            part.push(self.before);
            self.before = b',';
            let state = server_state.state_full();
            // Names that only other servers publish would not be checked otherwise, and failing
            // instances would stay in their zones.
            server_state.keep_checked(&state, &name);
            let health = &*server_state.health;
            let found = resolve::addresses(&state.snapshot, health, &name, &withdrawn);
            serde_json::to_writer(&mut part, &found).expect("addresses can be written as JSON");
            // The names of a fleet take time.
            tokio::task::yield_now().await;
        }
        Some(part.into())
    }
}

pub(super) async fn local_groups(State(backend): State<Arc<Backend>>) -> Response {
    let health = match &backend.readiness.health {
        // The agent on this VM reports its own jobs, which no name may have made the tracker
        // follow.
        Some(checks) => Some(checks.ask_once(IpAddr::V4(Ipv4Addr::LOCALHOST)).await),
        None => None,
    };
    let links = match &backend.jobs {
        Some(jobs) => jobs.links().await,
        None => Vec::new(),
    };
    let mut lines = Vec::new();
    for group in groups(links, health.as_ref()) {
        serde_json::to_writer(&mut lines, &group).expect("texts can always be written as JSON");
        lines.push(b'\n');
    }
    // It may wait for its client.
    lines.shrink_to_fit();
    ([(header::CONTENT_TYPE, "application/x-ndjson")], lines).into_response()
}
