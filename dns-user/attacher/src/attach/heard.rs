//! The clients whose own queries have reached the server's socket lately, by interface and endpoint: where the kernel's
//! verdict depends on the client, interfaces answer only these.
//!
//! A packet filter may accept some senders only, routes may refuse replies to others, and forged senders fail the
//! reverse path check. There the kernel's verdict on the client's own query decides, so a misread rule cannot admit a
//! client that the kernel rejects.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    os::fd::{AsFd as _, OwnedFd},
    time::{Duration, Instant},
};

use dns_common::scope::{HeardClient, MAX_HEARD_CLIENTS};
use dns_kit::clock::kernel_monotonic_ns;
use zerocopy::IntoBytes as _;

use crate::{bpf, scope::address_bytes};

/// How long an arrived query proves that its client is admitted. Afterwards its next query passes to userspace, so a change that
/// nothing else shows is noticed within this time.
pub(super) const HEARD_FOR: Duration = Duration::from_secs(120);

/// A client at an endpoint of an interface.
pub(super) type Place = (u32, usize, IpAddr);

/// The heard clients, and their copy in the map `HEARD_CLIENTS`.
pub(super) struct HeardClients {
    map: OwnedFd,
    /// At most [`MAX_HEARD_CLIENTS`], with the time until which each counts.
    until: BTreeMap<Place, Instant>,
}

impl HeardClients {
    pub(super) fn new(map: OwnedFd) -> Self {
        Self {
            map,
            until: BTreeMap::new(),
        }
    }

    /// Notes that a query of the client has arrived. Ignored if there are too many clients: userspace answers it.
    pub(super) fn hear(&mut self, place: Place, now: Instant) {
        if !self.until.contains_key(&place) && self.until.len() >= MAX_HEARD_CLIENTS as usize {
            self.forget_old(now);
            if self.until.len() >= MAX_HEARD_CLIENTS as usize {
                return;
            }
        }
        // The programs read the kernel's clock, which a time namespace does not shift as it shifts
        // `Instant`.
        let lasts_ns = u64::try_from(HEARD_FOR.as_nanos()).unwrap_or(u64::MAX);
        let until_ns = kernel_monotonic_ns().saturating_add(lasts_ns);
        // Again for a client that is noted already: its time begins anew.
        match bpf::set_element(self.map.as_fd(), key(place).as_bytes(), until_ns.as_bytes()) {
            Ok(()) => drop(self.until.insert(place, now + HEARD_FOR)),
            // Without memory in the kernel, for example: userspace answers it.
            Err(error) => tracing::debug!(%error, "a client cannot be noted as heard"),
        }
    }

    /// Forgets the clients for which `keep` returns false, given their place and the time until which they count: their
    /// next queries pass to userspace.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(Place, Instant) -> bool) {
        let Self { map, until } = self;
        until.retain(|&place, until| {
            let is_kept = keep(place, *until);
            if !is_kept && let Err(error) = bpf::remove_element(map.as_fd(), key(place).as_bytes()) {
                tracing::error!(%error, "a client cannot be forgotten: it may be answered for two more minutes");
            }
            is_kept
        });
    }

    /// Forgets a client of which a query was lost.
    pub(super) fn forget(&mut self, place: Place) {
        self.retain(|known, _| known != place);
    }

    pub(super) fn forget_old(&mut self, now: Instant) {
        self.retain(|_, until| until > now);
    }

    /// Returns the number of clients that an interface answers only because they have been heard.
    pub(super) fn count(&self, ifindex: u32) -> usize {
        // 0.0.0.0 is the least of all addresses, because IPv4 sorts before IPv6.
        let places = (ifindex, 0, IpAddr::from([0; 4]))..(ifindex + 1, 0, IpAddr::from([0; 4]));
        self.until.range(places).count()
    }
}

fn key((ifindex, endpoint, client): Place) -> HeardClient {
    HeardClient {
        ifindex,
        endpoint: u32::try_from(endpoint).expect("at most MAX_ENDPOINTS"),
        address: address_bytes(client),
    }
}
