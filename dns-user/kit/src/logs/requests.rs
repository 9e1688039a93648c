//! The request log: one line per request, off by default and rate-limited.
//!
//! Enabled by `log_level: DEBUG`, or for the tag `RequestLoggerHandler` alone (in the
//! configuration, or with `bosh-dns-xdp log --tag RequestLoggerHandler --level DEBUG`). It contains
//! only requests that reach userspace; `tap` shows both paths.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use crate::{
    metrics::labels::{rcode_label, type_label},
    rate::EachSecond,
};
use dns_core::name::Name;

/// Target of these lines, for the filter; the tag is `RequestLoggerHandler`.
pub const TARGET: &str = "dns_resolver::requests";

/// Default limit in lines per second; see [`set_limit`].
pub const DEFAULT_LIMIT: u32 = 100;

/// Returns whether request lines are enabled; costs a single load if not.
#[inline]
pub fn wanted() -> bool {
    tracing::enabled!(target: TARGET, tracing::Level::DEBUG)
}

/// Logs a request unless the rate limit is exceeded.
#[inline]
pub fn log(request: &Request<'_>) {
    // In this order, because lines that nobody wants are not suppressed ones.
    if wanted() && LIMITER.admit(now_seconds()) {
        write(request);
    }
}

/// Sets the maximum number of lines per second; 0 disables them.
pub fn set_limit(lines_per_second: u32) {
    LIMITER.limit.store(lines_per_second, Ordering::Relaxed);
}

/// Returns the maximum number of lines per second.
pub fn limit() -> u32 {
    LIMITER.limit.load(Ordering::Relaxed)
}

/// Logs the number of lines suppressed since the last report, if any.
pub(super) fn report_suppressed() {
    let suppressed = LIMITER.suppressed.load(Ordering::Relaxed);
    // More lines of the current second may still be suppressed.
    if suppressed == 0 || LIMITER.written.latest() == now_seconds() {
        return;
    }
    let suppressed = LIMITER.suppressed.swap(0, Ordering::Relaxed);
    tracing::debug!(target: TARGET, suppressed, limit_per_second = limit(), "request lines suppressed");
}

#[cold]
fn write(request: &Request<'_>) {
    tracing::debug!(
        target: TARGET,
        name = %request.name,
        r#type = %type_label(request.query_type),
        rcode = %rcode_label(request.rcode),
        answers = request.answers,
        bytes = request.bytes,
        client = %request.client,
        transport = request.transport,
        by = request.answered_by,
        micros = u64::try_from(request.took.as_micros()).unwrap_or(u64::MAX),
        "request"
    );
}

//----------- Limiter --------------------------------------------------------

static LIMITER: Limiter = Limiter {
    limit: AtomicU32::new(DEFAULT_LIMIT),
    written: EachSecond::new(),
    suppressed: AtomicU64::new(0),
};

/// Limits lines per whole second.
struct Limiter {
    limit: AtomicU32,
    written: EachSecond,
    /// Lines suppressed since the last report.
    suppressed: AtomicU64,
}

impl Limiter {
    /// Returns whether a line may be written in second `now`; counts suppressed lines.
    fn admit(&self, now: u32) -> bool {
        let limit = self.limit.load(Ordering::Relaxed);
        let is_admitted = self.written.take(limit, now);
        if !is_admitted {
            self.suppressed.fetch_add(1, Ordering::Relaxed);
        }
        is_admitted
    }
}

/// Returns the seconds since the first call, truncated to 32 bits.
fn now_seconds() -> u32 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_secs() as u32
}

//----------- Request --------------------------------------------------------

/// A request answered in userspace.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Name in the question.
    pub name: &'a Name,
    /// QTYPE of the question.
    pub query_type: u16,
    /// RCODE of the reply.
    pub rcode: u8,
    /// Number of answers in the reply.
    pub answers: u16,
    /// Size of the reply in bytes.
    pub bytes: usize,
    /// Address and port of the client.
    pub client: SocketAddr,
    /// Transport protocol: `udp` or `tcp`.
    pub transport: &'static str,
    /// Source of the answer: `local`, `recursor`, `cache`, `handler`...
    pub answered_by: &'static str,
    /// Time from receiving the query to the reply.
    pub took: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::logs::logged;

    #[test]
    fn excess_lines_are_counted() {
        let limiter = Limiter {
            limit: AtomicU32::new(3),
            written: EachSecond::new(),
            suppressed: AtomicU64::new(0),
        };
        let admitted = |now| (0..10).filter(|_| limiter.admit(now)).count();
        assert_eq!(admitted(7), 3);
        assert_eq!(admitted(7), 0);
        assert_eq!(admitted(8), 3);
        assert_eq!(limiter.suppressed.load(Ordering::Relaxed), 24);
        limiter.limit.store(0, Ordering::Relaxed);
        assert_eq!(admitted(9), 0);
    }

    #[test]
    fn lines_have_a_limit_and_the_rest_is_counted() {
        assert_eq!(limit(), DEFAULT_LIMIT);
        let name = Name::from_text("a.bosh.").unwrap();
        let request = Request {
            name: &name,
            query_type: 28,
            rcode: 3,
            answers: 2,
            bytes: 99,
            client: "192.0.2.1:5353".parse().unwrap(),
            transport: "udp",
            answered_by: "cache",
            took: Duration::from_micros(1_234),
        };
        assert!(!wanted(), "nobody reads them");
        let line = logged(|| {
            assert!(wanted());
            log(&request);
        });
        let expected = " DEBUG [RequestLoggerHandler] request name=a.bosh. type=AAAA rcode=NXDOMAIN answers=2 bytes=99 \
                        client=192.0.2.1:5353 transport=udp by=cache micros=1234\n";
        assert!(line.ends_with(expected), "{line}");

        set_limit(0);
        assert_eq!(limit(), 0);
        log(&request);
        assert_eq!(LIMITER.suppressed.load(Ordering::Relaxed), 0);
        let lines = logged(|| {
            for _ in 0..3 {
                log(&request);
            }
        });
        assert_eq!(lines, "");
        // The last line is of another second than this one.
        assert!(LIMITER.written.take(5, u32::MAX));
        let report = logged(report_suppressed);
        let expected = " DEBUG [RequestLoggerHandler] request lines suppressed suppressed=3 limit_per_second=0\n";
        assert!(report.ends_with(expected), "{report}");
        assert_eq!(logged(report_suppressed), "", "told once");

        set_limit(7);
        assert_eq!(limit(), 7);
        set_limit(DEFAULT_LIMIT);
    }

    #[test]
    fn current_second_is_reported_later() {
        loop {
            let second = now_seconds();
            assert!(LIMITER.written.take(u32::MAX, second));
            LIMITER.suppressed.store(2, Ordering::Relaxed);
            let report = logged(report_suppressed);
            // Otherwise the second has passed meanwhile.
            if now_seconds() == second {
                assert_eq!(report, "");
                return;
            }
        }
    }
}
