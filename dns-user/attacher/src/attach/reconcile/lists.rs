//! Follows the interfaces and the local addresses: only endpoints with an address of this machine are served.

use std::{collections::HashSet, fs, net::IpAddr, time::Instant};

use dns_common::scope::{Endpoint, MAX_ENDPOINTS};

use super::{InterfaceReconciler, RETRY};
use crate::attach::{
    netlink::{Link, LocalAddress, NetworkEvent, link_at},
    selection::{expand, to_endpoint},
};

impl InterfaceReconciler {
    /// Publishes the endpoints and the addresses that are invalid as senders. An endpoint whose
    /// address was removed from this machine is no longer served. Returns whether that is known.
    pub(super) fn follow_addresses(&mut self) -> bool {
        match self.netlink.addresses() {
            Ok(local) => self.set_addresses(local),
            // Endpoints on loopback addresses need no list of addresses.
            Err(_)
                if self
                    .setting
                    .listen
                    .iter()
                    .all(|listen| listen.ip().is_loopback()) =>
            {
                self.set_addresses(self.local.clone());
            }
            Err(error) => {
                tracing::warn!(%error, "cannot list the local addresses (netlink): the known addresses stay in use; trying again");
                return false;
            }
        }
        true
    }

    pub(super) fn set_addresses(&mut self, local: Vec<LocalAddress>) {
        self.local = local;
        let addresses: Vec<IpAddr> = self.local.iter().map(|local| local.address).collect();
        let mut all = expand(&self.setting.listen, &addresses);
        let netlink = &mut self.netlink;
        all.retain(|endpoint| {
            // If the kernel gives no answer, only loopback addresses are known to be local.
            endpoint.ip().is_loopback()
                || addresses.contains(&endpoint.ip())
                || netlink.is_local(endpoint.ip()).unwrap_or(false)
        });
        // `expand` puts the addresses in a fixed order, so that the same ones are served each time.
        let served = &all[..all.len().min(MAX_ENDPOINTS)];
        let endpoints: Vec<Endpoint> = served
            .iter()
            .map(|&endpoint| to_endpoint(endpoint))
            .collect();
        let scope = &self.setting.scope;
        scope.set_endpoints(&endpoints);
        let refused = self.local.iter().flat_map(LocalAddress::refused_as_sender);
        // 127.0.0.0/8 and ::1 the programs refuse by themselves, except on `lo`.
        scope.set_refused_sources(refused.filter(|address| !address.is_loopback()));
        let mut placed = Vec::new();
        for (&address, endpoint) in served.iter().zip(&endpoints) {
            if let Some(slot) = scope.slot_of(endpoint) {
                placed.push((address, slot));
            }
        }
        // A different endpoint in a slot starts with a closed gate.
        self.gate.retain(|_, slot| {
            let before = self.endpoints.iter().find(|(_, known)| *known == slot);
            before.is_some_and(|endpoint| placed.contains(endpoint))
        });
        self.endpoints = placed;
        self.firewall.set_addresses(&self.local, &self.endpoints);
        let omitted = all.len() - served.len();
        // Only a larger number is news: this runs every ten seconds.
        if omitted > self.status.lock().omitted_endpoints {
            tracing::warn!(
                omitted,
                "too many listen addresses for the programs: the remaining ones are answered from userspace"
            );
        }
        self.change_status(|status| {
            status.omitted_endpoints = omitted;
            status.endpoints = served.to_vec();
        });
    }

    /// Looks for clsact filters of a predecessor: links are found by their pins, filters only at the
    /// interfaces.
    pub(super) fn find_earlier_filters(&mut self) {
        let Self {
            setting,
            netlink,
            links,
            earlier_filters,
            ..
        } = self;
        for link in links.iter() {
            match setting.filters.is_on(link.ifindex, netlink) {
                Ok(true) => {
                    earlier_filters.insert(link.ifindex);
                }
                // The kernel lists no filters of an interface that is gone.
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(%error, interface = %link.name, "cannot look for a filter of the previous server: it may answer until its lease expires, and stays unless the interface is served again");
                }
            }
        }
        if !earlier_filters.is_empty() {
            tracing::info!(
                filters = earlier_filters.len(),
                "taking over the predecessor's clsact filters"
            );
        }
    }

    /// Lists addresses and interfaces; returns whether the kernel has completed both lists. If not, the next full check
    /// comes soon.
    pub(super) fn list_all(&mut self) -> bool {
        let has_addresses = self.follow_addresses();
        let has_links = self.list_interfaces();
        let are_known = has_addresses && has_links;
        if !are_known {
            self.next_round = self.next_round.min(Instant::now() + RETRY);
        }
        are_known
    }

    /// Lists the interfaces; returns whether the kernel has completed the list. Drops the state and the pins of interfaces
    /// that are gone.
    fn list_interfaces(&mut self) -> bool {
        self.change_status(|status| status.polls += 1);
        match self.netlink.links() {
            Ok(links) => {
                // A changed name or address alone is the same interface.
                self.forget_links(|before| {
                    link_at(&links, before.ifindex).is_some_and(|after| {
                        after.name != before.name && after.address != before.address
                    })
                });
                self.set_links(links);
            }
            Err(error) => {
                tracing::warn!(%error, "cannot list the interfaces (netlink): programs stay attached where they are; trying again");
                return false;
            }
        }
        self.list_routes();
        true
    }

    /// Applies the kernel's reports of changes. Creating a container causes a dozen of them, and listing everything each
    /// time would hold the RTNL lock for as long as there are containers; only if some were lost it is necessary.
    pub(super) fn follow_events(&mut self) {
        let events = self.events.take();
        if events.contains(&NetworkEvent::Lost) {
            self.firewall.routes_changed();
            self.list_all();
            return;
        }
        // Applied to copies, because `set_links` compares with what was known before.
        let mut links = self.links.clone();
        let mut local = self.local.clone();
        let mut gone = HashSet::new();
        let mut has_mtu = false;
        let mut may_refuse = false;
        for event in events {
            match event {
                NetworkEvent::Link(link) => {
                    links.retain(|known| known.ifindex != link.ifindex);
                    links.push(link);
                }
                // Its addresses go with it, whether or not the kernel reports each of them.
                NetworkEvent::LinkGone(ifindex) => {
                    links.retain(|known| known.ifindex != ifindex);
                    local.retain(|known| known.ifindex != ifindex);
                    gone.insert(ifindex);
                }
                NetworkEvent::Address(address) => {
                    local.retain(|known| !known.is_same(&address));
                    local.push(address);
                }
                NetworkEvent::AddressGone(address) => {
                    local.retain(|known| !known.is_same(&address))
                }
                NetworkEvent::Route {
                    has_mtu: sets_mtu,
                    may_refuse: refuses,
                } => {
                    has_mtu |= sets_mtu;
                    may_refuse |= refuses;
                }
                NetworkEvent::Detail | NetworkEvent::Lost => {}
            }
        }
        // As in a list.
        links.sort_unstable_by_key(|link| link.ifindex);
        local.sort_unstable();
        if may_refuse {
            self.firewall.routes_changed();
        }
        self.forget_links(|link| gone.contains(&link.ifindex));
        // A route may make an address local.
        self.set_addresses(local);
        self.set_links(links);
        if has_mtu {
            self.list_routes();
        }
    }

    fn list_routes(&mut self) {
        match self.netlink.routes_with_mtu() {
            Ok(bounded) => self.bounded = Some(bounded.into_iter().collect()),
            Err(error) => {
                tracing::warn!(%error, "cannot list the routes (netlink): the known MTUs stay in use; trying again");
            }
        }
    }

    /// Forgets interfaces that are gone before others are known: a container's may have got the index of an earlier one
    /// in the meantime, and must inherit neither its program nor its admission.
    fn forget_links(&mut self, is_gone: impl Fn(&Link) -> bool) {
        let mut left = self.links.clone();
        left.retain(|link| !is_gone(link));
        if left.len() != self.links.len() {
            self.set_links(left);
        }
    }

    pub(super) fn set_links(&mut self, links: Vec<Link>) {
        let mut changed = HashSet::new();
        for before in &self.links {
            let ifindex = before.ifindex;
            let after = link_at(&links, ifindex);
            if after == Some(before) {
                continue;
            }
            // Our own attachment at XDP changes no rule's verdict.
            let mut but_program = before.clone();
            but_program.xdp_program = after.and_then(|after| after.xdp_program);
            if after == Some(&but_program) {
                continue;
            }
            changed.insert(ifindex);
            if after.is_some() {
                continue;
            }
            // Closes the descriptor: a program that is still attached ends with the last one and
            // the pin.
            self.attached.remove(&ifindex);
            self.earlier_filters.remove(&ifindex);
            self.setting.scope.remove_interface(ifindex);
            // A pin left behind would be taken for the link of a later interface with this index.
            if let Some(pins) = &self.setting.kept_maps.pins {
                pins.unpin_links(ifindex);
            }
        }
        if !changed.is_empty() {
            // Rules may ask for the name, and another interface may have got the index.
            self.firewall.forget_interfaces(&changed);
            self.heard
                .retain(|(ifindex, ..), _| !changed.contains(&ifindex));
        }
        self.refused
            .retain(|&ifindex, _| link_at(&links, ifindex).is_some());
        self.gate
            .retain(|ifindex, _| link_at(&links, ifindex).is_some());
        self.cni_grace.listed(&self.links, &links, Instant::now());
        self.links = links;
    }
}

/// Returns the number of datagrams dropped so far by full receive queues of UDP sockets in the calling
/// thread's network namespace (`RcvbufErrors`; 0 on a kernel without the file).
pub(super) fn lost_to_queues() -> u64 {
    // Not /proc/self, which is the namespace of the process's first thread.
    let v4 = fs::read_to_string("/proc/thread-self/net/snmp").unwrap_or_default();
    let v6 = fs::read_to_string("/proc/thread-self/net/snmp6").unwrap_or_default();
    lost_v4(&v4).unwrap_or(0) + lost_v6(&v6).unwrap_or(0)
}

/// Parses the counter in `snmp`: a line of names, then a line of numbers.
fn lost_v4(text: &str) -> Option<u64> {
    let mut lines = text.lines().filter(|line| line.starts_with("Udp:"));
    let names = lines.next()?;
    let numbers = lines.next()?;
    let place = names
        .split_whitespace()
        .position(|name| name == "RcvbufErrors")?;
    numbers.split_whitespace().nth(place)?.parse().ok()
}

/// Parses the counter in `snmp6`: a name and a number per line.
fn lost_v6(text: &str) -> Option<u64> {
    let line = text
        .lines()
        .find(|line| line.starts_with("Udp6RcvbufErrors"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_files_are_read() {
        let v4 = "Tcp: RtoMin\nTcp: 200\nUdp: InDatagrams InErrors RcvbufErrors\nUdp: 7 2 13\nUdpLite: RcvbufErrors\nUdpLite: 9\n";
        assert_eq!(lost_v4(v4), Some(13));
        assert_eq!(
            lost_v6("Udp6InErrors \t0\nUdp6RcvbufErrors                \t4\n"),
            Some(4)
        );
        let ours = fs::read_to_string("/proc/thread-self/net/snmp").unwrap();
        assert!(lost_v4(&ours).is_some(), "{ours}");
        assert_eq!(lost_v4(""), None);
    }
}
