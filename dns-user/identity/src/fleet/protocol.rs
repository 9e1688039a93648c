//! Calls between agent and issuer: JSON over mutual TLS.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use dns_kit::http_client::{Limits, exchange};
use http_body_util::Full;
use hyper::{Request, StatusCode, body::Bytes, header};
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::{PrivateKeyDer, ServerName, pem::PemObject};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use zeroize::Zeroizing;

use crate::{
    authority::{Fingerprint, certificates},
    folder::Pair,
};

/// Body of `POST /v1/pair`: requests a certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PairRequest {
    /// Id of the instance; must be the client's own.
    pub instance: String,
    /// Common name shared by the fleet, such as `health.bosh-dns`; `None` for the instance's own pair.
    pub role: Option<String>,
    /// Additional names; each must belong to the instance.
    pub names: Vec<String>,
    /// Addresses; each must belong to the instance. `None` requests all of them.
    pub addresses: Option<Vec<IpAddr>>,
    /// Signing request (RFC 2986), DER in base64: proves possession of the key.
    pub request: String,
}

/// The issuer's reply to a [`PairRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairReply {
    /// Leaf and CA, PEM.
    pub certificate: String,
    /// CAs to trust, and the issuing one.
    pub orders: Orders,
}

/// Body of `POST /v1/report`: state of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// Generation of the trust bundle that all its folders have; 0 before the first.
    pub generation: u64,
    /// CAs that issued its pairs.
    pub issuers: BTreeSet<Fingerprint>,
    /// Latest end of validity of its pairs, in seconds since 1970.
    pub not_after: u64,
}

/// Reply to [`Report`]: the state that the fleet converges to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Orders {
    /// Generation of the trust set; incremented by every change.
    pub generation: u64,
    /// CAs to trust, PEM.
    pub bundle: String,
    /// Issuing CA; pairs of any other must be renewed.
    pub issuing: Fingerprint,
    /// Time of the issuer, in seconds since 1970; `None` from an older issuer.
    #[serde(default)]
    pub now: Option<u64>,
}

/// Body of an error reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// Cause of the rejection, and a remedy.
    pub error: String,
}

/// An instance that holds certificates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Generation of its trust bundle.
    pub generation: u64,
    /// CAs that issued its pairs.
    pub issuers: BTreeSet<Fingerprint>,
    /// Latest end of validity of its pairs, in seconds since 1970.
    pub not_after: u64,
}

/// All instances that hold certificates, by id.
pub type Members = BTreeMap<String, Member>;

//----------- Issuer ----------------------------------------------------------

/// Maximum duration of a call.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum size of a reply in bytes.
const LARGEST_REPLY: usize = 1 << 20;

/// Address of the issuer, and the name in its certificate.
#[derive(Clone, Debug)]
pub(super) struct Issuer {
    pub(super) address: String,
    pub(super) name: String,
}

/// Proof of a caller's identity, and the CAs that verify the issuer.
pub(super) struct Credentials {
    pub(super) proof: Proof,
    pub(super) roots: String,
}

/// Proof of a caller's identity.
pub(super) enum Proof {
    /// The instance's own pair.
    Pair(Pair),
    Token(Zeroizing<String>),
}

impl Issuer {
    pub(super) async fn call<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        credentials: &Credentials,
    ) -> anyhow::Result<T> {
        let call = self.try_call(path, body, credentials);
        let reply = tokio::time::timeout(TIMEOUT, call).await;
        let Self { address, name: _ } = self;
        reply.context("no reply within 30 s").flatten().with_context(|| format!("issuer {address}"))
    }

    async fn try_call<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        credentials: &Credentials,
    ) -> anyhow::Result<T> {
        let config = client_config(credentials)?;
        let stream = TcpStream::connect(&self.address).await?;
        let name = ServerName::try_from(self.name.clone())?;
        let connected = TlsConnector::from(Arc::new(config)).connect(name, stream).await;
        let stream = connected.map_err(explain)?;
        let mut request = Request::post(path)
            .header(header::HOST, &self.name)
            .header(header::CONTENT_TYPE, "application/json");
        if let Proof::Token(token) = &credentials.proof {
            request = request.header(header::AUTHORIZATION, format!("Bearer {}", token.as_str()));
        }
        let request = request.body(Full::new(Bytes::from(serde_json::to_vec(body)?)))?;
        let response = exchange(stream, request, Limits { time: TIMEOUT, body: LARGEST_REPLY }).await?;
        let (status, body) = (response.status(), response.into_body());
        if status == StatusCode::OK {
            return Ok(serde_json::from_slice(&body)?);
        }
        let refused = serde_json::from_slice(&body).map(|refused: Refused| refused.error);
        anyhow::bail!("{status}: {}", refused.unwrap_or_else(|_| "no reason given".to_owned()))
    }
}

/// Adds the remedy to a certificate that this machine's clock rejects.
fn explain(error: std::io::Error) -> anyhow::Error {
    let text = error.to_string();
    match text.contains("not valid yet") || text.contains("expired") {
        true => anyhow::Error::from(error).context("check the clocks of this machine and of the issuer"),
        false => error.into(),
    }
}

fn client_config(credentials: &Credentials) -> anyhow::Result<ClientConfig> {
    let Credentials { proof, roots } = credentials;
    let mut store = RootCertStore::empty();
    for root in certificates(roots.as_bytes())? {
        store.add(root)?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(store);
    Ok(match proof {
        Proof::Token(_) => builder.with_no_client_auth(),
        Proof::Pair(pair) => {
            let chain = certificates(pair.certificate.as_bytes())?;
            let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes())?;
            builder.with_client_auth_cert(chain, key)?
        }
    })
}
