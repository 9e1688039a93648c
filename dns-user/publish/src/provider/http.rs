//! HTTP requests to providers.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{Request, StatusCode};
use hyper_rustls::HttpsConnector;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use tokio::time::timeout;

use super::{ProviderError, TlsFiles};

/// Maximum size of a response in octets.
const MAX_BODY: usize = 256 << 20;

/// A client that reuses connections.
pub(super) struct Http {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    patience: Duration,
}

pub(super) struct Response {
    pub(super) status: StatusCode,
    pub(super) body: Bytes,
}

impl Http {
    /// Creates a client of servers at `urls`; reads the TLS files only for `https`. Each request
    /// takes at most `patience`.
    pub(super) fn new<'a>(
        mut urls: impl Iterator<Item = &'a str>,
        files: &TlsFiles,
        patience: Duration,
    ) -> Result<Self, ProviderError> {
        let config = match urls.any(|url| url.starts_with("https:")) {
            true => files.config(&[])?,
            false => TlsFiles::unused()?,
        };
        let connector = hyper_rustls::HttpsConnectorBuilder::new()
            .with_tls_config((*config).clone())
            .https_or_http()
            .enable_http1()
            .build();
        let client = Client::builder(TokioExecutor::new()).build(connector);
        Ok(Self { client, patience })
    }

    /// Sends a request and reads the whole response. `server` identifies the server in errors.
    pub(super) async fn send(
        &self,
        server: &str,
        request: Request<Full<Bytes>>,
    ) -> Result<Response, ProviderError> {
        let unreachable = |reason: String| ProviderError::Unreachable { server: server.to_owned(), reason };
        let exchange = async {
            let response = self.client.request(request).await;
            let response =
                response.map_err(|error| unreachable(format!("{:#}", anyhow::Error::from(error))))?;
            let (head, body) = response.into_parts();
            let body = Limited::new(body, MAX_BODY).collect().await;
            let body =
                body.map_err(|error| unreachable(format!("the response ended prematurely: {error}")))?;
            Ok(Response { status: head.status, body: body.to_bytes() })
        };
        let seconds = self.patience.as_secs();
        timeout(self.patience, exchange)
            .await
            .map_err(|_| unreachable(format!("no answer within {seconds} s")))?
    }
}
