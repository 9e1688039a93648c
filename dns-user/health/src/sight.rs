//! Detects checks that fail everywhere: `unknown` for all instances usually means that this machine
//! is at fault.

use std::{collections::HashMap, net::IpAddr, time::SystemTime};

use parking_lot::Mutex;

use super::metrics::CheckResult;
use dns_kit::tls::TlsMaterial;

/// Results of the latest check of each instance.
#[derive(Debug, Default)]
pub(super) struct Sight(Mutex<Seen>);

#[derive(Debug, Default)]
struct Seen {
    /// Reason why the latest check of each instance failed; `None` if it was answered.
    last: HashMap<IpAddr, Option<Failure>>,
    /// Error of the latest failed handshake.
    tls_error: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    Tls,
    Other,
}

impl Sight {
    /// Records the result of a check.
    pub(super) fn note(&self, ip: IpAddr, result: CheckResult) {
        let failure = match result {
            CheckResult::Tls => Some(Failure::Tls),
            CheckResult::Unreachable | CheckResult::Timeout => Some(Failure::Other),
            _ => None,
        };
        self.0.lock().last.insert(ip, failure);
    }

    /// Records the error of the latest failed handshake.
    pub(super) fn note_tls_error(&self, error: &std::io::Error) {
        self.0.lock().tls_error = error.to_string();
    }

    /// Removes an instance that is no longer checked.
    pub(super) fn forget(&self, ip: IpAddr) {
        self.0.lock().last.remove(&ip);
    }

    /// Returns why no instance can be checked with these certificates; `None` while some can, or
    /// none is checked.
    pub(super) fn blindness(&self, tls: &TlsMaterial, now: SystemTime) -> Option<String> {
        if let Some(why) = tls.certificate.invalid_at(now) {
            return Some(format!(
                "the health client's own certificate {why}: instances refuse it; rotate health.certificate_file"
            ));
        }
        if tls.authorities.iter().all(|authority| authority.invalid_at(now).is_some()) {
            return Some(
                "no CA of health.ca_file is valid now: no instance is trusted; renew the file".to_owned(),
            );
        }
        let seen = self.0.lock();
        let is_dark = !seen.last.is_empty() && seen.last.values().all(Option::is_some);
        let refused = seen.last.values().filter(|failure| **failure == Some(Failure::Tls)).count();
        (is_dark && refused > 0).then(|| {
            format!(
                "none of {} checked instances can be reached, {refused} because of TLS ({}): compare \
                 health.ca_file and health.certificate_file with the CA of the instances",
                seen.last.len(),
                seen.tls_error
            )
        })
    }
}
