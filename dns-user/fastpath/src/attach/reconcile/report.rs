//! The status of the interfaces, for operators.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use super::Follower;
use crate::attach::{
    choice::NotServed,
    gate::{ENOUGH, Waiting},
    netlink::Link,
    status::{InterfaceState, InterfaceStatus},
    topology,
};

impl Follower {
    pub(super) fn publish_status(&self, now: Instant) {
        let waiting: BTreeMap<u32, Waiting> = self.gate.waiting(now).collect();
        let open: BTreeSet<u32> = self.gate.interfaces().collect();
        let interfaces = self.links.iter().filter_map(|link| {
            self.status_of(link, open.contains(&link.ifindex), waiting.get(&link.ifindex))
        });
        let mut interfaces: Vec<InterfaceStatus> = interfaces.collect();
        interfaces.sort_by_key(|interface| interface.ifindex);
        let unserved = self.unserved(&interfaces);
        self.status.send_if_modified(|status| {
            let is_new = status.interfaces != interfaces
                || status.unserved != unserved
                || status.taken_over != self.taken_over;
            status.interfaces = interfaces;
            status.unserved = unserved;
            status.taken_over = self.taken_over;
            is_new
        });
    }

    /// Returns why no interface is served although one should be. An interface selected by a
    /// wildcard or by default may wait for queries.
    fn unserved(&self, interfaces: &[InterfaceStatus]) -> Option<String> {
        let Self { setting, links, .. } = self;
        let link_of =
            |interface: &InterfaceStatus| links.iter().find(|link| link.ifindex == interface.ifindex);
        let taken: Vec<(&InterfaceStatus, bool)> = interfaces
            .iter()
            .filter_map(|interface| Some((interface, link_of(interface)?)))
            .filter(|(_, link)| setting.selection.takes(link))
            .map(|(interface, link)| (interface, setting.selection.names(link)))
            .collect();
        let is_served = taken.iter().any(|(interface, _)| interface.state == InterfaceState::Served);
        let waits = |named: bool| {
            taken
                .iter()
                .any(|(interface, is_named)| interface.state == InterfaceState::Waiting && *is_named == named)
        };
        let missing = setting.selection.missing(links);
        // A named interface waits only for its program.
        if self.taken_over || is_served || waits(true) || (missing.is_empty() && waits(false)) {
            return None;
        }
        let refused = taken.iter().filter(|(interface, _)| interface.state == InterfaceState::Refused);
        let mut reasons: Vec<String> =
            refused.map(|(interface, _)| format!("{}: {}", interface.name, interface.why)).collect();
        if !missing.is_empty() {
            let names = missing.join(", ");
            reasons.push(format!("xdp.interfaces names {names}, which does not exist on this machine"));
        }
        (!reasons.is_empty()).then(|| reasons.join("; "))
    }

    /// Returns the status of an interface; `None` if the interface is not reported.
    fn status_of(&self, link: &Link, is_open: bool, waiting: Option<&Waiting>) -> Option<InterfaceStatus> {
        let ifindex = link.ifindex;
        let on = self.attached.get(&ifindex).filter(|_| is_open);
        let is_taken = self.setting.selection.takes(link);
        let refusal = self.refusals.get(&ifindex).cloned().or_else(|| {
            let refusal = topology::refusal(link, &self.links).filter(|_| waiting.is_some());
            refusal.map(str::to_owned)
        });
        let on = on.filter(|_| self.setting.scope.interface(ifindex).is_some());
        let (state, why) = match (on, refusal, self.refused.get(&ifindex), waiting) {
            // Served, but only for some endpoints.
            (Some(on), Some(why), _, _) => {
                (InterfaceState::Served, format!("{}; not for every endpoint: {why}", on.attachment.why()))
            }
            (Some(on), None, _, _) => (InterfaceState::Served, on.attachment.why().to_owned()),
            (None, Some(why), _, _) => (InterfaceState::Refused, why),
            (None, None, Some(refused), _) => (InterfaceState::Refused, refused.why.clone()),
            (None, None, None, Some(Waiting::Witness(client))) => {
                (InterfaceState::Refused, format!("queries of {client} do not arrive from here"))
            }
            (None, None, None, Some(Waiting::Evidence(_))) if !is_taken => (
                InterfaceState::Refused,
                "queries arrive, which xdp.interfaces or xdp.respect_filters leaves to userspace".to_owned(),
            ),
            (None, None, None, Some(Waiting::Evidence(0))) => (
                InterfaceState::Waiting,
                "queries arrive, none of which could be answered here at once within 10 s".to_owned(),
            ),
            (None, None, None, Some(Waiting::Evidence(queries))) => {
                (InterfaceState::Waiting, format!("{queries} of {ENOUGH} queries within 10 s"))
            }
            (None, None, None, None) if self.loading.contains(&ifindex) => {
                (InterfaceState::Waiting, NotServed::Loading.to_string())
            }
            (None, None, None, None) if self.cni_grace.is_waiting(ifindex) => {
                (InterfaceState::Waiting, NotServed::Unsettled.to_string())
            }
            (None, None, None, None) if is_open && is_taken => {
                (InterfaceState::Waiting, "waiting for its turn to be attached".to_owned())
            }
            (None, None, None, None) => return None,
        };
        Some(InterfaceStatus {
            name: link.name.clone(),
            ifindex,
            state,
            hook: on.map(|on| on.attachment.hook()),
            slot: self.setting.scope.interface(ifindex),
            why,
        })
    }
}
