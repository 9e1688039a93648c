//! The metrics port: `/metrics` for Prometheus, `/healthz` and `/readyz` for supervisors and load
//! balancers.

use std::{future::Future, io, net::SocketAddr, sync::Arc};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use tokio::net::TcpListener;

use super::Metrics;
use crate::ops::readiness::{Check, Readiness, SOCKETS};
use dns_kit::http_server::{Listener, Server};

/// A bound metrics port.
pub struct MetricsServer {
    server: Server,
    served: Served,
}

/// State shared by the handlers.
#[derive(Clone)]
struct Served {
    metrics: Metrics,
    probe: Arc<Readiness>,
}

impl MetricsServer {
    /// Binds the metrics port to `address`.
    pub async fn bind(address: SocketAddr, metrics: Metrics, probe: Arc<Readiness>) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let server = Server::new("the metrics port", Listener::Plain(listener));
        Ok(Self { server, served: Served { metrics, probe } })
    }

    /// Returns the bound address, including a port chosen by the kernel.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.server.local_addr()
    }

    /// Serves until `shutdown` completes.
    pub async fn run(self, shutdown: impl Future<Output = ()>) {
        let routes = Router::new()
            .route("/metrics", get(exposition))
            .route("/healthz", get(alive))
            .route("/readyz", get(ready))
            .with_state(self.served);
        self.server.run(move |_| routes.clone(), shutdown).await;
    }
}

async fn exposition(State(served): State<Served>) -> Response {
    match served.metrics.text() {
        Ok(text) => {
            ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
        }
        Err(error) => {
            tracing::error!(%error, "cannot encode the metrics");
            (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response()
        }
    }
}

/// Handles `/healthz`: 503 if a restart would help.
async fn alive(State(served): State<Served>) -> Response {
    verdict(served.probe.checks().into_iter().filter(|check| check.name == SOCKETS))
}

/// Handles `/readyz`: 200 if the server also has all data needed for correct answers. A degraded
/// server is ready, because its answers are correct.
async fn ready(State(served): State<Served>) -> Response {
    verdict(served.probe.checks().into_iter())
}

/// Builds a response with one line per check; 503 if one fails.
fn verdict(checks: impl Iterator<Item = Check>) -> Response {
    let mut status = StatusCode::OK;
    let mut text = String::new();
    for Check { name, ok, result, detail } in checks {
        if !ok {
            status = StatusCode::SERVICE_UNAVAILABLE;
        }
        text.push_str(&format!("{:<4} {name}: {detail}\n", result.word()));
    }
    (status, text).into_response()
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
        sync::oneshot,
    };

    use dns_core::config::{Config, ConfigError};
    use dns_upstream::{Handlers, InForce, NoInterfaces, Upstream};

    use super::*;
    use crate::ops::service_status::{Kind, ServiceStatus};

    /// Returns the state of a server that is alive but not ready because no records were read.
    fn half() -> Arc<Readiness> {
        let service_status = ServiceStatus::default();
        let config = Config::parse("config.json", br#"{"port": 53}"#).unwrap().config;
        service_status.refused(
            Kind::Records,
            Vec::new(),
            &[ConfigError::of_file("records.json", "none read yet")],
        );
        Arc::new(Readiness {
            service_status,
            fast_path: dns_fastpath::FastPathHandle::default(),
            health: None,
            consul: None,
            upstreams: InForce::new(
                Upstream::new(&config, &[], &NoInterfaces::shared()),
                Handlers::default(),
            ),
            certificates: Vec::new(),
        })
    }

    /// Returns the complete response to a GET request.
    async fn get(address: SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn metrics_port_serves_probes() {
        let metrics =
            Metrics::new("dns://127.0.0.1:53".into(), dns_fastpath::FastPathHandle::default()).unwrap();
        let server = MetricsServer::bind("127.0.0.1:0".parse().unwrap(), metrics, half()).await.unwrap();
        let address = server.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let running = tokio::spawn(server.run(async move { drop(stopped.await) }));
        let text = get(address, "/metrics").await;
        assert!(text.starts_with("HTTP/1.1 200"), "{text}");
        assert!(text.contains("bosh_dns_xdp_build_info{"), "{text}");
        assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        let text = get(address, "/readyz").await;
        assert!(text.starts_with("HTTP/1.1 503"), "{text}");
        assert!(text.contains("fail records: records.json: none read yet"), "{text}");
        assert!(get(address, "/other").await.starts_with("HTTP/1.1 404"));
        drop(stop);
        running.await.unwrap();
    }
}
