//! Detects checks that fail everywhere: `unknown` for all instances usually means that this machine
//! is at fault.

use std::{collections::HashMap, net::IpAddr, time::SystemTime};

use parking_lot::Mutex;

use super::metrics::CheckResult;
use dns_kit::tls::TlsMaterial;

/// Results of the latest check of each instance.
#[derive(Debug, Default)]
pub(super) struct CheckFailures(Mutex<Latest>);

#[derive(Debug, Default)]
struct Latest {
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

impl CheckFailures {
    /// Records the result of a check.
    pub(super) fn record(&self, ip: IpAddr, result: CheckResult) {
        let failure = match result {
            CheckResult::Tls => Some(Failure::Tls),
            CheckResult::Unreachable | CheckResult::Timeout => Some(Failure::Other),
            _ => None,
        };
        self.0.lock().last.insert(ip, failure);
    }

    /// Records the error of the latest failed handshake.
    pub(super) fn record_tls_error(&self, error: &std::io::Error) {
        self.0.lock().tls_error = error.to_string();
    }

    /// Removes an instance that is no longer checked.
    pub(super) fn forget(&self, ip: IpAddr) {
        self.0.lock().last.remove(&ip);
    }

    /// Returns why no instance can be checked with these certificates; `None` while some can, or
    /// none is checked.
    pub(super) fn why_no_check_can_work(&self, tls: &TlsMaterial, now: SystemTime) -> Option<String> {
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
        let latest = self.0.lock();
        let refused = latest.last.values().filter(|failure| **failure == Some(Failure::Tls)).count();
        (latest.all_failed() && refused > 0).then(|| {
            format!(
                "none of {} checked instances can be reached, {refused} because of TLS ({}): compare \
                 health.ca_file and health.certificate_file with the CA of the instances",
                latest.last.len(),
                latest.tls_error
            )
        })
    }

    /// Returns that no instance answers; `None` while one does, or none is checked.
    pub(super) fn why_none_answers(&self) -> Option<String> {
        let latest = self.0.lock();
        latest.all_failed().then(|| {
            format!(
                "none of {} checked instances answers its health check: names resolve to all their instances; \
                 is the health server (port `health.port`) of the instances running, and does a firewall pass it?",
                latest.last.len()
            )
        })
    }
}

impl Latest {
    /// Returns whether instances are checked and none answered its latest check.
    fn all_failed(&self) -> bool {
        !self.last.is_empty() && self.last.values().all(Option::is_some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_answer_ends_the_outage() {
        let failures = CheckFailures::default();
        let [first, second] = [1, 2].map(|last| IpAddr::from([10, 0, 0, last]));
        assert_eq!(failures.why_none_answers(), None);
        failures.record(first, CheckResult::Unreachable);
        failures.record(second, CheckResult::Timeout);
        assert!(failures.why_none_answers().unwrap().contains("none of 2 checked instances"));
        failures.record(first, CheckResult::Failing);
        assert_eq!(failures.why_none_answers(), None);
        failures.forget(first);
        assert!(failures.why_none_answers().is_some());
    }
}
