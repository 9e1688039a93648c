//! Follows the local addresses: only endpoints with an address of this machine are served.

use std::net::{IpAddr, SocketAddr};

use dns_common::scope::{Endpoint, MAX_ENDPOINTS};

use super::Follower;
use crate::attach::{
    endpoints::{expand, to_endpoint},
    netlink::LocalAddress,
};

impl Follower {
    /// Publishes the endpoints and the addresses that are invalid as senders. An endpoint whose
    /// address was removed from this machine is no longer served.
    pub(super) fn follow_addresses(&mut self) {
        match self.netlink.addresses() {
            Ok(local) => self.local = local,
            // Endpoints on loopback addresses need no list of addresses.
            Err(_) if self.setting.listen.iter().all(|listen| listen.ip().is_loopback()) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot list the local addresses (netlink): the known addresses stay in use; trying again");
                return;
            }
        }
        let addresses: Vec<IpAddr> = self.local.iter().map(|local| local.address).collect();
        let mut all = expand(&self.setting.listen, &addresses);
        let netlink = &mut self.netlink;
        all.retain(|endpoint| {
            // If the kernel gives no answer, only loopback addresses are known to be local.
            endpoint.ip().is_loopback()
                || addresses.contains(&endpoint.ip())
                || netlink.is_local(endpoint.ip()).unwrap_or(false)
        });
        let served = &all[..all.len().min(MAX_ENDPOINTS)];
        let endpoints: Vec<Endpoint> = served.iter().map(|&endpoint| to_endpoint(endpoint)).collect();
        let scope = &self.setting.scope;
        scope.set_endpoints(&endpoints);
        let refused = self.local.iter().flat_map(LocalAddress::refused_as_sender);
        scope.set_refused_sources(refused.filter(|address| !address.is_loopback()));
        let with_slots = served.iter().zip(&endpoints);
        let placed: Vec<(SocketAddr, usize)> =
            with_slots.filter_map(|(&address, endpoint)| Some((address, scope.slot_of(endpoint)?))).collect();
        // A different endpoint in a slot starts with a closed gate.
        let stays = |slot: usize| {
            let of = |all: &[(SocketAddr, usize)]| {
                all.iter().find(|(_, known)| *known == slot).map(|(address, _)| *address)
            };
            of(&placed).is_some() && of(&placed) == of(&self.endpoints)
        };
        self.gate.retain(|_, slot| stays(slot));
        self.endpoints = placed;
        let left_out = all.len() - served.len();
        if left_out > self.status.borrow().endpoints_left_out {
            tracing::warn!(
                left_out,
                "too many listen addresses for the programs: the remaining ones are answered from userspace"
            );
        }
        self.status.send_modify(|status| {
            status.endpoints_left_out = left_out;
            status.endpoints = served.to_vec();
        });
    }
}
