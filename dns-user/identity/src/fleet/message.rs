//! Bodies of the calls between agent and issuer, JSON over mutual TLS.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use serde::{Deserialize, Serialize};

use crate::authority::Fingerprint;

/// `POST /v1/pair`: asks for a certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PairRequest {
    /// Id of the instance; must be the client's own.
    pub instance: String,
    /// Common name shared by the fleet, such as `health.bosh-dns`; `None` for the instance's own pair.
    pub role: Option<String>,
    /// Further names; each must belong to the instance.
    pub names: Vec<String>,
    /// Addresses; each must belong to the instance. `None` asks for all of them.
    pub addresses: Option<Vec<IpAddr>>,
    /// Signing request (RFC 2986), DER in base64: proves possession of the key.
    pub request: String,
}

/// The issuer's reply to a [`PairRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairReply {
    /// Leaf and CA, PEM.
    pub certificate: String,
    /// CAs to trust, and the one that issues.
    pub orders: Orders,
}

/// `POST /v1/report`: state of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// Generation of the trust bundle in all of its folders; 0 before the first.
    pub generation: u64,
    /// CAs of all its pairs.
    pub issuers: BTreeSet<Fingerprint>,
    /// End of the last pair, seconds since 1970.
    pub not_after: u64,
}

/// Reply to [`Report`]: the state that the fleet converges to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Orders {
    /// Number of the trust set; grows with every change.
    pub generation: u64,
    /// CAs to trust, PEM.
    pub bundle: String,
    /// CA that issues now; a pair of another one must be renewed.
    pub issuing: Fingerprint,
}

/// Body of a refusal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// Cause of the refusal, and a remedy.
    pub error: String,
}

/// An instance that holds certificates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Generation of its trust bundle.
    pub generation: u64,
    /// CAs of its pairs.
    pub issuers: BTreeSet<Fingerprint>,
    /// End of its last pair, seconds since 1970.
    pub not_after: u64,
    /// Last report, seconds since 1970.
    pub reported_at: u64,
}

/// All instances that hold certificates.
pub type Members = BTreeMap<String, Member>;
