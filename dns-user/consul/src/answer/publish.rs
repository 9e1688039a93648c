//! Selects names that an interface may answer: those whose answers consist of addresses only.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use dns_core::{
    name::Name,
    wire::{HEADER_LEN, MIN_UDP_SIZE, OPT_LEN, TYPE_A, TYPE_AAAA},
};

use super::{Search, Zone};
use crate::{
    pending::{MAX_PLAIN_ANSWERS, SPARE},
    question::Question,
    record::{Data, FIXED_LEN, Found},
};

/// Addresses of a name, and the limits of its UDP answers. A query for a family without addresses
/// must not be answered from this: its reply is more than an empty answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Publishable {
    /// Answer to type A.
    pub v4: Vec<Ipv4Addr>,
    /// Answer to type AAAA.
    pub v6: Vec<Ipv6Addr>,
    /// TTL of all records in seconds.
    pub ttl: u32,
    /// Maximum number of addresses in an answer; 0 if only the client's size limits it.
    pub most: u16,
    /// Maximum number of IPv4 addresses for a client with a limit of 512 bytes.
    pub plain_v4: u8,
    /// Maximum number of IPv6 addresses for such a client.
    pub plain_v6: u8,
    /// Whether TC is set if addresses are omitted.
    pub truncates: bool,
}

const POINTER: usize = 2;

impl Zone {
    /// Returns the answers that interfaces may give for a name; `None` if only userspace may answer.
    pub fn publishable(&self, name: &Name) -> Option<Publishable> {
        let dns = &self.config.dns;
        let zone = self.config.domain_of(name)?;
        // Replies at the interface always compress owner names to a pointer.
        if dns.disable_compression || self.lacks_for(name, TYPE_A).is_some() {
            return None;
        }
        // Answers to prepared queries depend on the client.
        if let Question::Query { .. } | Question::Empty | Question::Invalid =
            Question::read(name, zone, TYPE_A)
        {
            return None;
        }
        let found_v4 = self.only_addresses_of(name, TYPE_A, zone);
        let found_v6 = self.only_addresses_of(name, TYPE_AAAA, zone);
        let ttl = found_v4.as_ref().or(found_v6.as_ref())?.1;
        let mut v4: Vec<Ipv4Addr> = Vec::new();
        let mut v6: Vec<Ipv6Addr> = Vec::new();
        for (addresses, own_ttl) in found_v4.into_iter().chain(found_v6) {
            // Both types of an interface's answer share one TTL.
            if own_ttl != ttl {
                continue;
            }
            for address in addresses {
                match address {
                    IpAddr::V4(address) => v4.push(address),
                    IpAddr::V6(address) => v6.push(address),
                }
            }
        }
        let most = u16::try_from(dns.a_record_limit).unwrap_or(0);
        let limit = dns.udp_answer_limit;
        let plain_v4 = plain_limit(name, v4.len(), most, size_of::<Ipv4Addr>(), limit);
        let plain_v6 = plain_limit(name, v6.len(), most, size_of::<Ipv6Addr>(), limit);
        if plain_v4.is_none() {
            v4.clear();
        }
        if plain_v6.is_none() {
            v6.clear();
        }
        (!v4.is_empty() || !v6.is_empty()).then_some(Publishable {
            v4,
            v6,
            ttl,
            most,
            plain_v4: plain_v4.unwrap_or(0),
            plain_v6: plain_v6.unwrap_or(0),
            truncates: dns.enable_truncate,
        })
    }

    fn only_addresses_of(
        &self,
        name: &Name,
        qtype: u16,
        zone: &Name,
    ) -> Option<(Vec<IpAddr>, u32)> {
        let search = Search {
            unlimited: true,
            ..Search::whole(name, qtype, zone)
        };
        // Any order will do, because interfaces draw from all addresses at each reply.
        let found = self.find(&search, &mut fastrand::Rng::with_seed(0)).ok()?;
        only_addresses(found)
    }
}

/// Returns the addresses and their TTL if the result consists of nothing else.
fn only_addresses(found: Found) -> Option<(Vec<IpAddr>, u32)> {
    if !found.additional.is_empty() || found.for_client {
        return None;
    }
    let ttl = found.answers.ttl()?;
    let mut addresses = Vec::with_capacity(found.answers.len());
    for record in found.answers.into_records(None) {
        match (record.owner, record.data) {
            (None, Data::A(address)) => addresses.push(address.into()),
            (None, Data::Aaaa(address)) => addresses.push(address.into()),
            _ => return None,
        }
    }
    Some((addresses, ttl))
}

/// Returns how many of `count` addresses a client with a limit of 512 bytes gets, as computed by
/// `Page::cut`; `None` if none, or if the number depends on its OPT.
fn plain_limit(
    name: &Name,
    count: usize,
    most: u16,
    address: usize,
    udp_answer_limit: usize,
) -> Option<u8> {
    let all = if most == 0 {
        count
    } else {
        count.min(most.into())
    };
    let limit = all.min(udp_answer_limit.min(MAX_PLAIN_ANSWERS));
    let name_length = name.as_wire().len();
    // If addresses are omitted, the uncompressed size counts.
    let owner = if all > limit { name_length } else { POINTER };
    let room = MIN_UDP_SIZE - SPARE - HEADER_LEN - name_length - 4;
    let record = owner + FIXED_LEN + address;
    let without = limit.min(room / record);
    let with = limit.min((room - OPT_LEN) / record);
    // At most MAX_PLAIN_ANSWERS.
    (without == with && without > 0).then_some(without as u8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Answers, Record};

    #[test]
    fn plain_limit_counts_whole_records() {
        // 20 bytes in a message.
        let name = Name::from_text("web.service.consul.").unwrap();
        // 512 bytes, less 7 spare ones, the header and the question, hold 469 bytes of records.
        for (count, most, address, limit, expected) in [
            (8, 0, 4, 8, Some(8)),
            // 28 bytes each.
            (8, 0, 16, 8, Some(8)),
            // The whole name counts as soon as one is omitted: 46 bytes each.
            (9, 0, 16, 8, Some(8)),
            (9, 3, 16, 8, Some(3)),
            (9, 0, 16, 20, Some(8)),
            (0, 0, 16, 8, None),
        ] {
            let found = plain_limit(&name, count, most, address, limit);
            assert_eq!(found, expected, "{count} {most} {address} {limit}");
        }
    }

    #[test]
    fn addresses_alone_are_published() {
        let addresses = vec![[10, 0, 0, 1].into(), [10, 0, 0, 2].into()];
        let found = || Found {
            answers: Answers::V4(7, addresses.clone()),
            ..Found::default()
        };
        let expected: Vec<IpAddr> = addresses.iter().map(|&address| address.into()).collect();
        assert_eq!(only_addresses(found()), Some((expected, 7)));
        let name = Name::from_text("a").unwrap();
        let alias = Record {
            owner: None,
            ttl: 7,
            data: Data::Cname(name),
        };
        let aliases = Answers::Records(vec![alias.clone()]);
        for other in [
            Found::default(),
            Found {
                additional: vec![alias],
                ..found()
            },
            Found {
                for_client: true,
                ..found()
            },
            Found {
                answers: aliases,
                ..found()
            },
        ] {
            assert_eq!(only_addresses(other), None);
        }
    }

    #[test]
    fn plain_limit_is_that_of_the_bytes() {
        for length in [1, 20, 40, 63] {
            let label = "a".repeat(length);
            let name = Name::from_text(&format!("{label}.consul.")).unwrap();
            let wire = name.as_wire().len();
            for count in 0..12 {
                for address in [4, 16] {
                    let limit = count.min(8);
                    let owner = if count > limit { wire } else { 2 };
                    let fitting = |opt: usize| {
                        let fits = |number: &usize| {
                            12 + wire + 4 + number * (owner + 10 + address) + opt + 7 <= 512
                        };
                        (0..=limit).rev().find(fits).unwrap()
                    };
                    let expected = fitting(0);
                    let is_known = expected == fitting(11) && expected > 0;
                    let found = plain_limit(&name, count, 0, address, 9);
                    let expected = is_known.then_some(expected as u8);
                    assert_eq!(found, expected, "{length} {count} {address}");
                }
            }
        }
    }
}
