//! Listeners: the control socket and mutual TLS.

use std::{io, path::Path, sync::Arc};

use axum::{Router, http::StatusCode};
use dns_kit::{
    http_server::{Listener, Server},
    tls::RotatingTls,
    unix_socket::{self, ControlSocket},
};
use nix::unistd::Group;
use tokio::net::TcpListener;

/// Clients that are admitted by their certificate.
#[derive(Clone, Debug)]
pub enum Access {
    /// All clients with a certificate of the CA.
    All,
    /// Clients whose certificate has one of these common names.
    Names(Arc<[String]>),
}

/// Binds the control socket for the process's user, and for a group if one is given.
pub fn bind_control(path: &Path, group: Option<&str>) -> io::Result<ControlSocket> {
    let group = match group {
        Some(name) => {
            let unknown =
                || io::Error::new(io::ErrorKind::NotFound, format!("group {name:?} does not exist"));
            Some(Group::from_name(name)?.ok_or_else(unknown)?.gid)
        }
        None => None,
    };
    ControlSocket::bind(path, unix_socket::Access { user: None, group }, &[])
}

/// Serves the control socket until dropped.
pub async fn serve_control(socket: ControlSocket, routes: Router) -> io::Result<()> {
    let server = Server::new("the control socket", Listener::Control(socket.listen()?));
    server.run(move |_| routes.clone(), std::future::pending()).await;
    Ok(())
}

/// Serves mutual TLS until dropped.
pub async fn serve_tls(listener: TcpListener, tls: Arc<RotatingTls>, access: Access, routes: Router) {
    let refused = Router::new().fallback(|| async {
        (StatusCode::FORBIDDEN, "the client certificate's common name is not in api.clients\n")
    });
    let listener = Listener::Tls(listener, Box::new(move || tls.server_config()));
    let server = Server::new("the API", listener);
    let routes = move |client: &dns_kit::http_server::Client| {
        let is_admitted = match &access {
            Access::All => true,
            Access::Names(names) => client.common_name().is_some_and(|name| names.contains(&name)),
        };
        if is_admitted { routes.clone() } else { refused.clone() }
    };
    server.run(routes, std::future::pending()).await;
}
