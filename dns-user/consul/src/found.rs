//! Result of a search: records, or the reason for their absence.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use dns_core::name::Name;

use crate::record::{Data, Record};

/// Records that answer a question.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) answers: Answers,
    /// Records that save the client a further query.
    pub(crate) additional: Vec<Record>,
    /// Whether the SOA is included if there are no answers.
    pub(crate) soa: bool,
    /// Whether the answer depends on the client's location in the network.
    pub(crate) for_client: bool,
}

/// Records of an answer section.
#[derive(Clone, Debug)]
pub(crate) enum Answers {
    Records(Vec<Record>),
    /// Addresses of the question's name; no other section has records. A service has thousands of
    /// them, and records would be sixteen times as large.
    Addresses {
        /// TTL of each, in seconds.
        ttl: u32,
        addresses: Addresses,
    },
}

/// Addresses in the order of an answer.
#[derive(Clone, Debug)]
pub(crate) enum Addresses {
    V4(Vec<Ipv4Addr>),
    /// Of any family.
    Mixed(Vec<IpAddr>),
}

impl Default for Answers {
    fn default() -> Self {
        Self::Records(Vec::new())
    }
}

impl Answers {
    pub(crate) fn len(&self) -> usize {
        self.section().len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the TTL of the first record.
    pub(crate) fn ttl(&self) -> Option<u32> {
        match self {
            Self::Records(records) => records.first().map(|record| record.ttl),
            Self::Addresses { ttl, .. } => (!self.is_empty()).then_some(*ttl),
        }
    }

    /// Returns the answers as records with this owner.
    pub(crate) fn into_records(self, owner: Option<&Name>) -> Vec<Record> {
        let record = |ttl, address| Record::address(owner.cloned(), ttl, address);
        match self {
            Self::Records(records) => records,
            Self::Addresses { ttl, addresses: Addresses::V4(addresses) } => {
                addresses.into_iter().map(|address| record(ttl, address.into())).collect()
            }
            Self::Addresses { ttl, addresses: Addresses::Mixed(addresses) } => {
                addresses.into_iter().map(|address| record(ttl, address)).collect()
            }
        }
    }

    /// Returns the answers in the form in which they are encoded.
    pub(crate) fn section(&self) -> Section<'_> {
        match self {
            Self::Records(records) => Section::Records(records),
            Self::Addresses { ttl, addresses: Addresses::V4(addresses) } => Section::V4(*ttl, addresses),
            Self::Addresses { ttl, addresses: Addresses::Mixed(addresses) } => {
                Section::Mixed(*ttl, addresses)
            }
        }
    }
}

/// Leading records of an answer section; addresses with their TTL.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Section<'a> {
    Records(&'a [Record]),
    V4(u32, &'a [Ipv4Addr]),
    Mixed(u32, &'a [IpAddr]),
}

/// TYPE, CLASS, TTL and RDLENGTH of a record.
const FIXED_LEN: usize = 10;

impl Section<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Records(records) => records.len(),
            Self::V4(_, addresses) => addresses.len(),
            Self::Mixed(_, addresses) => addresses.len(),
        }
    }

    /// Returns the number of aliases before the first final record.
    pub(crate) fn leading_aliases(&self) -> usize {
        let Self::Records(records) = self else { return 0 };
        records.iter().take_while(|record| matches!(record.data, Data::Cname(_))).count()
    }

    /// Returns the first `count` records.
    pub(crate) fn first(self, count: usize) -> Self {
        match self {
            Self::Records(records) => Self::Records(&records[..count]),
            Self::V4(ttl, addresses) => Self::V4(ttl, &addresses[..count]),
            Self::Mixed(ttl, addresses) => Self::Mixed(ttl, &addresses[..count]),
        }
    }

    /// Returns the encoded size of addresses with an owner of `owner` bytes; `None` for records.
    pub(crate) fn size_of_addresses(&self, owner: usize) -> Option<usize> {
        let v4 = owner + FIXED_LEN + size_of::<Ipv4Addr>();
        match self {
            Self::Records(_) => None,
            Self::V4(_, addresses) => Some(addresses.len() * v4),
            Self::Mixed(_, addresses) => {
                let v6 = addresses.iter().filter(|address| address.is_ipv6()).count();
                let more = size_of::<Ipv6Addr>() - size_of::<Ipv4Addr>();
                Some(addresses.len() * v4 + v6 * more)
            }
        }
    }
}

/// Reason for the lack of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    NoSuchName,
    /// SERVFAIL without records: the authoritative agent is unreachable or the token lacks
    /// permission.
    Server,
}
