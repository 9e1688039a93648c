//! Resolution of local names. Pure.
//!
//! Both paths answer from a [`Resolution`]: the userspace server and, through the publisher, the
//! BPF program.

mod answer;
mod below;
mod explain;

mod select;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub use answer::{instances, resolve, resolve_local};
pub use below::is_above_local;
pub use explain::{Explanation, MatchExplanation, ResultExplanation, TargetExplanation, explain};

pub(crate) use answer::has_matches;
pub(crate) use select::select;

/// Result of an instance's latest health check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HealthState {
    /// The instance reported `running` for itself or the group.
    Running,
    /// The instance reported `failing` for itself or the group.
    Failing,
    /// The check failed, or its reply was unusable.
    Unknown,
    /// No check has finished yet.
    Unchecked,
}

/// Source of the instances' health, implemented by `health::HealthStates`, by [`AllRunning`], and
/// by tests.
pub trait Health {
    /// Returns the state of the instance at `ip`; with `group`, that group's state on it if
    /// reported, or else the instance's own.
    fn state(&self, ip: IpAddr, group: Option<&str>) -> HealthState;
}

/// The health source while checks are disabled: every instance counts as running (observed: `q-s1`
/// selects none, `q-s3` all).
#[derive(Clone, Copy, Debug)]
pub struct AllRunning;

impl Health for AllRunning {
    fn state(&self, _ip: IpAddr, _group: Option<&str>) -> HealthState {
        HealthState::Running
    }
}

/// The resolution of a name, given a snapshot and the current health.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolution {
    /// Whether the name exists, which decides the RCODE.
    pub existence: Existence,
    /// IPv4 addresses after the health filter, in no particular order. Each row counts once; two
    /// rows with the same address yield it twice (observed).
    pub v4: Vec<Ipv4Addr>,
    /// IPv6 addresses after the health filter, as with `v4`.
    pub v6: Vec<Ipv6Addr>,
    /// Instances whose health affects the resolution.
    pub checks: Checks,
}

impl Resolution {
    /// Returns the part that determines the reply.
    pub fn answer(&self) -> LocalAnswer<'_> {
        let Self { existence, v4, v6, checks: _ } = self;
        LocalAnswer { existence: *existence, v4, v6 }
    }
}

/// The part of a [`Resolution`] that determines the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalAnswer<'a> {
    /// Whether the name exists, which decides the RCODE.
    pub existence: Existence,
    /// IPv4 addresses, in no particular order.
    pub v4: &'a [Ipv4Addr],
    /// IPv6 addresses, in no particular order.
    pub v6: &'a [Ipv6Addr],
}

/// Whether a name exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Existence {
    /// The name exists; the address lists may still be empty.
    Found,
    /// No row matches: NXDOMAIN.
    NoSuchName,
    /// The name violates the query language: FORMERR for A, AAAA and ANY; NOERROR without records
    /// for other types.
    Malformed,
}

/// The instances to check for a name, before the health filter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checks {
    /// Sorted addresses without duplicates: all matches, also for `s4`, but none if s0 has exactly
    /// one match (as for most instance names). The health of other instances cannot change the
    /// answer.
    pub instances: Vec<IpAddr>,
    /// Whether a query for the name starts checks, that is, `instances` is not empty.
    pub tracked: bool,
    /// `y1`: the first query waits for the first checks.
    pub synchronous: bool,
}
