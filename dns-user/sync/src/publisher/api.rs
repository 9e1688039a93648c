//! The publisher's API: HTTPS, for certificates of its CA that have one of the names that may use
//! it. Agents have certificates of the same CA, and may not.
//!
//! | Call | Does |
//! |---|---|
//! | `GET /v1/status` | who has what, as `status --json` |
//! | `POST /v1/changes` | an instance is added, removed or moved: `{"change": "add" ...}` |

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use anyhow::Context;
use axum::{
    Json, Router,
    extract::State as Extract,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
    service::TowerToHyperService,
};
use serde_json::json;
use tokio::{net::TcpListener, sync::Semaphore};
use tokio_rustls::TlsAcceptor;

use super::{Shared, book::Book, source::InventoryOptions, state::Folder};
use crate::{
    inventory::changes::Change,
    tls::{self, TlsFiles},
};

/// Connections at a time; the API is for operators and their tools.
const MOST_CONNECTIONS: usize = 64;

/// Longest life of a connection.
const LIFE: Duration = Duration::from_secs(30);

/// What the calls work on.
#[derive(Clone, Debug)]
pub(super) struct Desk {
    /// The inventory.
    pub(super) source: InventoryOptions,
    /// The folder of state.
    pub(super) state: PathBuf,
    /// Who has what.
    pub(super) shared: Shared,
}

/// Serves the API until the process ends, to clients of these common names.
pub(super) async fn spawn(
    address: SocketAddr,
    files: TlsFiles,
    clients: Vec<String>,
    desk: Desk,
) -> anyhow::Result<()> {
    let listener = TcpListener::bind(address).await.with_context(|| format!("API at {address}"))?;
    let mut config = Arc::new(tls::server(&files)?);
    let router =
        Router::new().route("/v1/status", get(status)).route("/v1/changes", post(change)).with_state(desk);
    let clients: Arc<[String]> = clients.into();
    let connections = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    tokio::spawn(async move {
        loop {
            // The semaphore is never closed.
            let Ok(permit) = connections.clone().acquire_owned().await else { return };
            let Ok((stream, _)) = listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            // Rotated certificates are used from the next connection on.
            match tls::server(&files) {
                Ok(new) => config = Arc::new(new),
                Err(error) => {
                    tracing::warn!("API: cannot use the new certificates; the last good ones stay: {error}")
                }
            }
            let (acceptor, mut router) = (TlsAcceptor::from(config.clone()), router.clone());
            let clients = clients.clone();
            tokio::spawn(async move {
                let _permit = permit;
                let served = async {
                    let stream = acceptor.accept(stream).await?;
                    let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
                    let name = certificate.and_then(|certificate| tls::common_name(certificate));
                    let name = name.unwrap_or_default();
                    if !clients.contains(&name) {
                        tracing::warn!("API: refused client {name:?}: it is not among --api-clients");
                        router = Router::new().fallback(refused);
                    }
                    auto::Builder::new(TokioExecutor::new())
                        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
                        .await
                        .map_err(std::io::Error::other)
                };
                if let Ok(Err(error)) = tokio::time::timeout(LIFE, served).await {
                    tracing::info!("API: a connection ended: {error}");
                }
            });
        }
    });
    Ok(())
}

/// For whoever may not use the API.
async fn refused() -> Response {
    let problem = "the certificate's common name is not among --api-clients";
    (StatusCode::FORBIDDEN, Json(json!({ "error": problem }))).into_response()
}

/// Who has what.
async fn status(Extract(desk): Extract<Desk>) -> Json<Book> {
    // Nothing panics while it is locked.
    Json(desk.shared.lock().clone())
}

/// Takes in a change.
async fn change(Extract(desk): Extract<Desk>, Json(change): Json<Change>) -> Response {
    let done = tokio::task::spawn_blocking(move || {
        let Desk { source, state, shared: _ } = desk;
        source.change(&Folder::look(&state), change).map_err(|error| error.to_string())
    });
    match done.await.map_err(|error| error.to_string()).and_then(|done| done) {
        Ok(()) => StatusCode::ACCEPTED.into_response(),
        Err(problem) => (StatusCode::UNPROCESSABLE_ENTITY, Json(json!({ "error": problem }))).into_response(),
    }
}
