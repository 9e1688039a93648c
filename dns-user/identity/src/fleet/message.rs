//! Bodies of the calls between agent and issuer, JSON over mutual TLS.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use serde::{Deserialize, Serialize};

use crate::authority::Fingerprint;

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
    /// Time of the last report, in seconds since 1970.
    pub reported_at: u64,
}

/// All instances that hold certificates, by id.
pub type Members = BTreeMap<String, Member>;
