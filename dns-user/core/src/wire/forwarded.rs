//! A forwarded answer, handed from the cache in userspace to the fast path.

use crate::name::Name;

/// A cached answer of another server, with everything that decides about a client's reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardedAnswer {
    /// Name of the question.
    pub name: Name,
    /// Type of the question; its class is IN.
    pub qtype: u16,
    /// DO of the queries that get this answer.
    pub dnssec_ok: bool,
    /// CD of the queries that get this answer.
    pub checking_disabled: bool,
    /// The message without OPT. Every reply to such a query with RD has its flags, except
    /// for AD, which only a client that understands it gets (RFC 6840, section 5.8).
    pub message: Box<[u8]>,
    /// Offsets of the TTLs in the message.
    pub ttls: Box<[u16]>,
    /// TTL of all records at the arrival, in seconds.
    pub ttl: u32,
    /// Time for which the answer is valid, in seconds.
    pub lifetime: u32,
    /// Arrival in nanoseconds of the kernel's `CLOCK_BOOTTIME`.
    pub since_ns: u64,
}
