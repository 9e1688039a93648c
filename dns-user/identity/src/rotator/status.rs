//! State of a rotator, for `status` and metrics.

use std::{collections::BTreeMap, path::PathBuf, time::SystemTime};

use serde::{Deserialize, Serialize};

use crate::{authority::Fingerprint, certificate::unix, profile::Guid, schedule::Failure};

/// State of a rotator.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    /// The CA in use.
    pub authority: AuthorityStatus,
    /// Number of keys that are ready.
    pub pool_ready: usize,
    /// Number of keys that the pool keeps ready.
    pub pool_size: usize,
    /// Number of renewals since the start.
    pub renewals: u64,
    /// Number of failures since the start, by reason.
    pub failures: BTreeMap<String, u64>,
    /// All identities, by guid.
    pub identities: Vec<IdentityStatus>,
}

/// State of the CA.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AuthorityStatus {
    /// Path of the CA's file.
    pub file: PathBuf,
    /// Fingerprint of the certificate in use.
    pub fingerprint: Fingerprint,
    /// End of its validity.
    #[serde(with = "unix")]
    pub not_after: SystemTime,
    /// Reason why the current files cannot be used; `None` if they can.
    pub problem: Option<String>,
}

/// State of one identity.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct IdentityStatus {
    /// Id of the identity.
    pub guid: Guid,
    /// Folder that holds its files.
    pub folder: PathBuf,
    /// Start of validity of the pair in use, in seconds since 1970.
    pub not_before: Option<u64>,
    /// End of validity of the pair in use, in seconds since 1970.
    pub not_after: Option<u64>,
    /// Time of the next renewal or retry.
    #[serde(with = "unix")]
    pub renews_at: SystemTime,
    /// CA of the pair in use.
    pub issuer: Option<Fingerprint>,
    /// The current failure; `None` after a success.
    pub failure: Option<Failure>,
}
