//! What a name means: the one place that knows. Pure.
//!
//! [`Resolution`] is what both paths answer from: the userspace server and, through
//! the publisher, the BPF program.

mod answer;
mod below;
mod explain;

mod select;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub use answer::{instances, resolve, resolve_local};
pub use explain::{Explanation, MatchExplanation, ResultExplanation, TargetExplanation, explain};

pub(crate) use select::select;

/// Result of the newest health check of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HealthState {
    /// The instance reported `running` for itself or the group.
    Running,
    /// The instance reported `failing` for itself or the group.
    Failing,
    /// The check failed, or its reply was unusable.
    Unknown,
    /// It was never asked.
    Unchecked,
}

/// Where `resolve` learns the health of instances. Implemented by
/// `health::HealthStates`, by [`AllRunning`], and by tests.
pub trait Health {
    /// State of the instance at `ip`; with `group`, the state of that group on
    /// it where it reports one, else the instance's own.
    fn state(&self, ip: IpAddr, group: Option<&str>) -> HealthState;
}

/// Health while checks are switched off: every instance counts as running
/// (observed: `q-s1` gives none, `q-s3` all).
#[derive(Clone, Copy, Debug)]
pub struct AllRunning;

impl Health for AllRunning {
    fn state(&self, _ip: IpAddr, _group: Option<&str>) -> HealthState {
        HealthState::Running
    }
}

/// What a name resolves to, given a snapshot and the health of the moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolution {
    /// Whether the name exists.
    pub existence: Existence,
    /// IPv4 addresses after the health filter, in no order. Each row counts
    /// once; two rows with one address give it twice (observed).
    pub v4: Vec<Ipv4Addr>,
    /// IPv6 addresses after the health filter, as with `v4`.
    pub v6: Vec<Ipv6Addr>,
    /// What a change of which instance's health would change, and what to check.
    pub checks: Checks,
}

impl Resolution {
    /// What a reply is made of.
    pub fn answer(&self) -> LocalAnswer<'_> {
        let Self { existence, v4, v6, checks: _ } = self;
        LocalAnswer { existence: *existence, v4, v6 }
    }
}

/// What a reply is made of: a [`Resolution`] without what is to be checked for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalAnswer<'a> {
    /// Whether the name exists.
    pub existence: Existence,
    /// IPv4 addresses, in no order.
    pub v4: &'a [Ipv4Addr],
    /// IPv6 addresses, in no order.
    pub v6: &'a [Ipv6Addr],
}

/// Whether a name exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Existence {
    /// It does; the lists may be empty all the same.
    Found,
    /// No row matches: NXDOMAIN.
    NoSuchName,
    /// The name does not follow the query language: FORMERR to A, AAAA and ANY;
    /// to other types NOERROR and empty.
    Malformed,
}

/// Which instances are to be checked for a name's sake, before the health filter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checks {
    /// Their addresses, each once, sorted: all matches, those of `s4` too; but
    /// none where s0 has exactly one match (so none for most instance names).
    /// A change of health of any other instance cannot change the answer.
    pub instances: Vec<IpAddr>,
    /// Whether asking for the name starts checks: there are `instances`.
    pub tracked: bool,
    /// `y1`: the first checks are to be waited for.
    pub synchronous: bool,
}
