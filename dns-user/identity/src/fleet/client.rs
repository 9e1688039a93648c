//! Calls from an agent to the issuer.

use std::{sync::Arc, time::Duration};

use anyhow::Context;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Request, StatusCode, body::Bytes, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::{PrivateKeyDer, ServerName, pem::PemObject};
use serde::{Serialize, de::DeserializeOwned};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::message::Refused;
use crate::{authority::certificates, folder::Pair};

/// Maximum duration of a call.
const PATIENCE: Duration = Duration::from_secs(30);

/// Maximum size of a reply in bytes.
const LARGEST_REPLY: usize = 1 << 20;

/// Address of the issuer, and the name in its certificate.
#[derive(Clone, Debug)]
pub(super) struct Issuer {
    pub(super) address: String,
    pub(super) name: String,
}

impl Issuer {
    /// Calls the issuer; `pair` is the client's certificate, `roots` verify the issuer's.
    pub(super) async fn call<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        roots: &str,
        pair: Option<&Pair>,
        token: Option<&str>,
    ) -> anyhow::Result<T> {
        let call = self.try_call(path, body, roots, pair, token);
        let reply = tokio::time::timeout(PATIENCE, call).await;
        let Self { address, name: _ } = self;
        reply.context("no reply within 30 s").flatten().with_context(|| format!("issuer {address}"))
    }

    async fn try_call<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        roots: &str,
        pair: Option<&Pair>,
        token: Option<&str>,
    ) -> anyhow::Result<T> {
        let config = client_config(roots, pair)?;
        let stream = TcpStream::connect(&self.address).await?;
        let name = ServerName::try_from(self.name.clone())?;
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let driver = tokio::spawn(connection);
        let mut request = Request::post(path)
            .header(header::HOST, &self.name)
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(token) = token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        let request = request.body(Full::new(Bytes::from(serde_json::to_vec(body)?)))?;
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), LARGEST_REPLY).collect().await;
        driver.abort();
        let body = body.map_err(|error| anyhow::anyhow!(error))?.to_bytes();
        if status == StatusCode::OK {
            return Ok(serde_json::from_slice(&body)?);
        }
        let refused = serde_json::from_slice(&body).map(|refused: Refused| refused.error);
        anyhow::bail!("{status}: {}", refused.unwrap_or_else(|_| "no reason given".to_owned()))
    }
}

fn client_config(roots: &str, pair: Option<&Pair>) -> anyhow::Result<ClientConfig> {
    let mut store = RootCertStore::empty();
    for root in certificates(roots.as_bytes())? {
        store.add(root)?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(store);
    Ok(match pair {
        None => builder.with_no_client_auth(),
        Some(pair) => {
            let chain = certificates(pair.certificate.as_bytes())?;
            let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes())?;
            builder.with_client_auth_cert(chain, key)?
        }
    })
}
