//! State of a rotator, for `status` and metrics.

use std::{collections::BTreeMap, path::PathBuf, time::SystemTime};

use serde::{Deserialize, Serialize};

use crate::{authority::Fingerprint, profile::Guid};

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
    /// Start of validity of the pair in use.
    #[serde(with = "unix_option")]
    pub not_before: Option<SystemTime>,
    /// End of validity of the pair in use.
    #[serde(with = "unix_option")]
    pub not_after: Option<SystemTime>,
    /// Time of the next renewal or retry.
    #[serde(with = "unix")]
    pub renews_at: SystemTime,
    /// CA of the pair in use.
    pub issuer: Option<Fingerprint>,
    /// The current failure; `None` after a success.
    pub failure: Option<FailureStatus>,
}

/// The most recent failed renewal of an identity.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FailureStatus {
    /// Number of consecutive failed attempts.
    pub attempts: u32,
    /// Cause of the failure, and a remedy.
    pub message: String,
    /// Time of the next attempt, after backoff.
    #[serde(with = "unix")]
    pub retry_at: SystemTime,
}

/// Serialises times as seconds since 1970.
pub(crate) mod unix {
    use std::time::SystemTime;

    use serde::{Deserialize, Deserializer, Serializer};

    use crate::certificate::{moment, seconds};

    pub(crate) fn serialize<S: Serializer>(at: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(seconds(*at))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SystemTime, D::Error> {
        u64::deserialize(deserializer).map(moment)
    }
}

/// Serialises optional times as [`unix`] does, or null.
mod unix_option {
    use std::time::SystemTime;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::certificate::{moment, seconds};

    pub(super) fn serialize<S: Serializer>(
        at: &Option<SystemTime>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        at.map(seconds).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<SystemTime>, D::Error> {
        Ok(Option::<u64>::deserialize(deserializer)?.map(moment))
    }
}
