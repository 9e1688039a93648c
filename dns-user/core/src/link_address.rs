//! The names that links ask for, written: the inverse of [`crate::query`]. Both programs' `address`
//! and the names for certificates come from here; `tests/link_addresses.json` has the cases.
//!
//! Short form `q-<criteria>.q-g<group>.<domain>`, long form
//! `q-<criteria>.<group>.<network>.<deployment>.<domain>`. The criteria are sorted
//! as texts, so `a10` stands before `a2` (observed at a director). `s` is always
//! there, `y` only where it was asked for.

use std::fmt;

/// The name of a link's instances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkAddress {
    /// Whose instances.
    pub group: AddressGroup,
    /// Which of them.
    pub first: FirstLabel,
    /// Domain; a final dot is left out of the name.
    pub domain: String,
}

/// Whose instances a name is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AddressGroup {
    /// Short form: a group by its id.
    Id(String),
    /// Long form: canonical names.
    Names {
        /// Canonical name of the instance group.
        instance_group: String,
        /// Canonical name of the network.
        network: String,
        /// Canonical name of the deployment.
        deployment: String,
    },
}

/// The first label of the name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FirstLabel {
    /// One instance, by its id.
    Instance(String),
    /// A filter: `q-` and the criteria.
    Query(Criteria),
    /// `*`, as certificates have it.
    Wildcard,
}

/// What a query narrows by; several values of one kind are alternatives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Criteria {
    /// Ids of availability zones (`a`).
    pub zones: Vec<String>,
    /// Indexes (`i`).
    pub indexes: Vec<u64>,
    /// Numerical ids of instances (`m`).
    pub numbers: Vec<u64>,
    /// Ids of networks (`n`).
    pub networks: Vec<u64>,
    /// Health (`s`).
    pub status: Status,
    /// Whether the first query waits for the first health checks (`y`), if it is said.
    pub synchronous: Option<bool>,
}

/// `status` of a link's address, `health_filter` of an alias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Status {
    /// Healthy instances, or all if none is healthy (`s0`).
    #[default]
    Smart,
    /// Only instances that fail (`s1`).
    Unhealthy,
    /// Only instances that run (`s3`).
    Healthy,
    /// Every instance, whatever its health (`s4`).
    All,
}

impl Status {
    /// Digit after `s`.
    pub fn digit(self) -> u8 {
        match self {
            Self::Smart => 0,
            Self::Unhealthy => 1,
            Self::Healthy => 3,
            Self::All => 4,
        }
    }
}

impl LinkAddress {
    /// The name for a certificate: no criteria, or `*` as the first label.
    pub fn san(self, wildcard: bool) -> Self {
        let first = match wildcard {
            true => FirstLabel::Wildcard,
            false => FirstLabel::Query(Criteria::default()),
        };
        Self { first, ..self }
    }
}

impl fmt::Display for LinkAddress {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.first {
            FirstLabel::Instance(id) => out.write_str(id)?,
            FirstLabel::Query(criteria) => write!(out, "q-{criteria}")?,
            FirstLabel::Wildcard => out.write_str("*")?,
        }
        match &self.group {
            AddressGroup::Id(id) => write!(out, ".q-g{id}")?,
            AddressGroup::Names { instance_group, network, deployment } => {
                write!(out, ".{instance_group}.{network}.{deployment}")?;
            }
        }
        write!(out, ".{}", self.domain.trim_end_matches('.'))
    }
}

impl fmt::Display for Criteria {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { zones, indexes, numbers, networks, status, synchronous } = self;
        let numbered = [('i', indexes), ('m', numbers), ('n', networks)]
            .into_iter()
            .flat_map(|(letter, values)| values.iter().map(move |value| format!("{letter}{value}")));
        let mut parts: Vec<String> = zones.iter().map(|zone| format!("a{zone}")).collect();
        parts.extend(numbered);
        parts.push(format!("s{}", status.digit()));
        parts.extend(synchronous.map(|wait| format!("y{}", u8::from(wait))));
        parts.sort_unstable();
        parts.iter().try_for_each(|part| out.write_str(part))
    }
}
