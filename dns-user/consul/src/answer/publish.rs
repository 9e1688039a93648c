//! Selects names that an interface may answer: their answers consist of addresses only.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use dns_core::{
    name::Name,
    wire::{HEADER_LEN, TYPE_A, TYPE_AAAA},
};

use super::{MAX_DEPTH, Search, Zone};
use crate::{
    draft::{MAX_PLAIN_ANSWERS, PLAIN_SIZE, SPARE},
    found::Found,
    question::Question,
    record::Data,
};

/// The addresses of a name, and the limits that its answers by UDP obey. A family without
/// addresses is not to be answered from this: what is said then is more than nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Publishable {
    /// Answer to type A.
    pub v4: Vec<Ipv4Addr>,
    /// Answer to type AAAA.
    pub v6: Vec<Ipv6Addr>,
    /// TTL of all records, seconds.
    pub ttl: u32,
    /// Most addresses in an answer; 0: as many as the client takes.
    pub most: u16,
    /// Most IPv4 addresses for a client that takes no more than 512 bytes.
    pub plain_v4: u8,
    /// The same of IPv6 addresses.
    pub plain_v6: u8,
    /// Whether TC tells that addresses were left out.
    pub truncates: bool,
}

/// Fixed bytes of a record behind its owner's name.
const RECORD: usize = 10;
/// Bytes of an OPT without options.
const OPT: usize = 11;
/// Bytes of a pointer to a name.
const POINTER: usize = 2;

impl Zone {
    /// Returns the answers that interfaces may give for a name; `None` if there are none.
    pub fn publishable(&self, name: &Name) -> Option<Publishable> {
        let dns = &self.config.dns;
        let zone = self.config.domain_of(name)?;
        // The interface's names point to the question.
        if dns.disable_compression || self.lacks_for(name, TYPE_A).is_some() {
            return None;
        }
        // Prepared queries depend on the client.
        if let Question::Query { .. } | Question::Empty | Question::Invalid =
            Question::read(name, zone, TYPE_A)
        {
            return None;
        }
        let of_type = |qtype| {
            let search = Search {
                name,
                owner: None,
                qtype,
                domain: zone,
                client: None,
                recursion: true,
                most: usize::MAX,
                depth: MAX_DEPTH,
                unlimited: true,
            };
            self.find(&search, &mut fastrand::Rng::with_seed(0)).ok().and_then(only_addresses)
        };
        let (found_v4, found_v6) = (of_type(TYPE_A), of_type(TYPE_AAAA));
        let ttl = found_v4.as_ref().or(found_v6.as_ref())?.1;
        let of = |found: Option<(Vec<IpAddr>, u32)>| found.filter(|(_, of)| *of == ttl).unwrap_or_default().0;
        let v4 = of(found_v4).into_iter().filter_map(|address| match address {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        });
        let v6 = of(found_v6).into_iter().filter_map(|address| match address {
            IpAddr::V6(address) => Some(address),
            IpAddr::V4(_) => None,
        });
        let (mut v4, mut v6): (Vec<Ipv4Addr>, Vec<Ipv6Addr>) = (v4.collect(), v6.collect());
        let most = u16::try_from(dns.a_record_limit).unwrap_or(0);
        let plain =
            |count: usize, record: usize| plain_limit(name, count, most, record, dns.udp_answer_limit);
        let mut limits = [0; 2];
        for (limit, count, record) in
            [(0, v4.len(), size_of::<Ipv4Addr>()), (1, v6.len(), size_of::<Ipv6Addr>())]
        {
            match plain(count, record) {
                Some(given) => limits[limit] = given,
                None if limit == 0 => v4.clear(),
                None => v6.clear(),
            }
        }
        let [plain_v4, plain_v6] = limits;
        (!v4.is_empty() || !v6.is_empty()).then_some(Publishable {
            v4,
            v6,
            ttl,
            most,
            plain_v4,
            plain_v6,
            truncates: dns.enable_truncate,
        })
    }
}

/// The addresses and their TTL, if what was found is nothing else.
fn only_addresses(found: Found) -> Option<(Vec<IpAddr>, u32)> {
    if !found.additional.is_empty() || found.for_client {
        return None;
    }
    let ttl = found.answers.first()?.ttl;
    let addresses = found.answers.into_iter().map(|record| match (record.owner, record.data) {
        (None, Data::A(address)) => Some(address.into()),
        (None, Data::Aaaa(address)) => Some(address.into()),
        _ => None,
    });
    Some((addresses.collect::<Option<_>>()?, ttl))
}

/// How many of `count` addresses a client gets that takes no more than 512 bytes, as
/// `Page::cut` would have it; `None`: none, or that depends on its OPT.
fn plain_limit(name: &Name, count: usize, most: u16, address: usize, udp_answer_limit: usize) -> Option<u8> {
    let all = if most == 0 { count } else { count.min(most.into()) };
    let limit = all.min(udp_answer_limit.min(MAX_PLAIN_ANSWERS));
    let name_length = name.as_wire().len();
    // Where not all are given, their size counts as if names were not compressed.
    let owner = if all > limit { name_length } else { POINTER };
    let given = |opt: usize| {
        let room = PLAIN_SIZE - SPARE - opt - HEADER_LEN - name_length - 4;
        limit.min(room / (owner + RECORD + address))
    };
    let (without, with) = (given(0), given(OPT));
    // At most MAX_PLAIN_ANSWERS.
    (without == with && without > 0).then_some(without as u8)
}
