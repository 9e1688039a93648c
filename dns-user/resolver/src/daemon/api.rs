//! Opens the API and the control socket.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::Arc,
};

use super::failures::Failures;
use crate::ops::{
    api::{self, ApiServer, Backend},
    service_status::ServiceStatus,
};
use dns_core::config::ApiConfig;
use dns_kit::{tls::RotatingTls, unix_socket::ControlSocket};

/// Common name in the certificates of bosh-dns's API (observed).
const API_NAME: &str = "api.bosh-dns";

/// The control socket's path, and the socket if it could be bound.
pub(super) type Control = (PathBuf, io::Result<ControlSocket>);

/// Loads the certificates of the API. Without usable ones the API stays off; DNS is unaffected.
pub(super) fn certificates(api: &ApiConfig, service_status: &ServiceStatus) -> Option<Arc<RotatingTls>> {
    RotatingTls::load("api", API_NAME, &api.tls)
        .map_err(|problem| service_status.stays_off(format!("api: {problem}; the API stays off")))
        .ok()
}

/// Opens the API. If its port is unavailable, the API stays off; DNS is unaffected.
pub(super) async fn open(api: &ApiConfig, tls: Arc<RotatingTls>, backend: Arc<Backend>, failures: &Failures) {
    let service_status = backend.service_status.clone();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, api.port));
    let server = match ApiServer::bind(address, tls.clone(), backend, api.admins.clone()).await {
        Ok(server) => server,
        Err(problem) => {
            return service_status
                .stays_off(format!("api: cannot listen on {address}: {problem}; the API stays off"));
        }
    };
    failures.spawn("the watch on the API's certificates", tls.watch(|_| ()));
    // Runs until the process ends; an earlier return is a failure.
    failures.spawn("the API", server.run(std::future::pending()));
}

/// Serves the control socket. If binding failed, it stays off; DNS is unaffected.
pub(super) fn open_control((path, socket): Control, backend: Arc<Backend>, failures: &Failures) {
    let path = path.display();
    match socket {
        Ok(socket) => failures.spawn("the control socket", async {
            // Runs until the process ends; an earlier return is a failure.
            if let Err(problem) = api::serve_control(socket, backend).await {
                tracing::error!("control: {problem}");
            }
        }),
        Err(problem) => {
            let problem = format!("control: {path} cannot be bound: {problem}; the control socket stays off");
            backend.service_status.stays_off(problem);
        }
    }
}
