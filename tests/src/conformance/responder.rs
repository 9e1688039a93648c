//! The health server of an instance: `https://IP:PORT/health`, for clients of the recordings' CA.

use std::{
    convert::Infallible,
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result};
use http_body_util::Full;
use hyper::{Response, body::Bytes, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use rustls::{ServerConfig, server::WebPkiClientVerifier};
use serde_json::{Value, json};
use tokio::{net::TcpListener, runtime::Runtime, task::JoinHandle, time::sleep};
use tokio_rustls::TlsAcceptor;

use super::{
    client::{authority, identity},
    scenario::HealthScript,
};

/// A running health server.
#[derive(Debug)]
pub struct Responder {
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    script: Mutex<HealthScript>,
    hits: AtomicU64,
}

impl Responder {
    /// Starts an instance's health server.
    ///
    /// # Errors
    ///
    /// Fails if the port is in use or a certificate cannot be read.
    pub fn start(
        runtime: &Runtime,
        ip: IpAddr,
        port: u16,
        script: HealthScript,
        certificates: &Path,
    ) -> Result<Self> {
        let acceptor = TlsAcceptor::from(Arc::new(server_config(&script, certificates)?));
        let address = SocketAddr::new(ip, port);
        let listener = runtime
            .block_on(TcpListener::bind(address))
            .with_context(|| format!("{address} is not free"))?;
        let shared = Arc::new(Shared {
            script: Mutex::new(script),
            hits: AtomicU64::new(0),
        });
        let tasks = Arc::clone(&shared);
        let accepting = runtime.spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else {
                    continue;
                };
                let (shared, acceptor) = (Arc::clone(&tasks), acceptor.clone());
                tokio::spawn(async move {
                    // The handshake fails without a client certificate of the CA.
                    let stream = acceptor.accept(stream).await.ok()?;
                    let service =
                        service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
                            let shared = Arc::clone(&shared);
                            async move {
                                Ok::<_, Infallible>(shared.respond(request.uri().path()).await)
                            }
                        });
                    http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await
                        .ok()
                });
            }
        });
        Ok(Self { shared, accepting })
    }

    /// Returns the number of requests so far.
    pub fn hits(&self) -> u64 {
        self.shared.hits.load(Ordering::Relaxed)
    }

    /// Replaces the script unless that needs another certificate; returns whether it did.
    pub fn take_script(&self, script: &HealthScript) -> bool {
        let mut current = self.shared.script.lock();
        let same = current.cert == script.cert;
        if same {
            *current = script.clone();
        }
        same
    }

    pub fn close(self, runtime: &Runtime) {
        self.accepting.abort();
        // The task was aborted, so its result is an error.
        let _ = runtime.block_on(self.accepting);
    }
}

impl Shared {
    /// Counts a request and responds according to the script.
    async fn respond(&self, path: &str) -> Response<Full<Bytes>> {
        self.hits.fetch_add(1, Ordering::Relaxed);
        let script = self.script.lock().clone();
        let HealthScript {
            state,
            group_state,
            http_status,
            body,
            delay_ms,
            cert: _,
            refuse: _,
        } = script;
        let mut response = Response::default();
        if path != "/health" {
            *response.status_mut() = hyper::StatusCode::NOT_FOUND;
            return response;
        }
        sleep(Duration::from_millis(delay_ms)).await;
        let text = body.unwrap_or_else(|| {
            let mut document = json!({"state": state.as_deref().unwrap_or("running")});
            if !group_state.is_empty() {
                document["group_state"] = Value::from_iter(group_state);
            }
            document.to_string()
        });
        *response.body_mut() = Full::new(Bytes::from(text));
        // An invalid status in a script becomes 200.
        *response.status_mut() = http_status.unwrap_or(200).try_into().unwrap_or_default();
        response
    }
}

/// Builds a configuration with the script's certificate that requires a client certificate of the
/// CA.
fn server_config(script: &HealthScript, certificates: &Path) -> Result<ServerConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let roots = Arc::new(authority(certificates)?);
    let clients = WebPkiClientVerifier::builder_with_provider(roots, provider.clone()).build()?;
    let (chain, key) = identity(
        certificates,
        script.cert.as_deref().unwrap_or("health_server"),
    )?;
    Ok(ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(clients)
        .with_single_cert(chain, key)?)
}
