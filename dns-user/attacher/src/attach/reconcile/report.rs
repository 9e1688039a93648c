//! The status of the interfaces, for operators.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use dns_fastpath::protocol::{InterfaceState, InterfaceStatus, MIN_QUERIES};

use super::{InterfaceReconciler, OnInterface};
use crate::attach::{
    attachment::NotServed,
    heard::HEARD_FOR,
    netlink::{Link, link_at},
    topology,
};

impl InterfaceReconciler {
    pub(super) fn publish_status(&self, now: Instant) {
        let waiting: BTreeMap<u32, u32> = self.gate.waiting(now).collect();
        let open: BTreeSet<u32> = self.gate.interfaces().collect();
        let mut interfaces = Vec::new();
        for link in &self.links {
            let is_open = open.contains(&link.ifindex);
            interfaces.extend(self.status_of(link, is_open, waiting.get(&link.ifindex)));
        }
        let unserved = self.unserved(&interfaces);
        let is_new = {
            let status = self.status.lock();
            status.interfaces != interfaces
                || status.unserved != unserved
                || status.taken_over != self.taken_over
        };
        if is_new {
            self.change_status(|status| {
                status.interfaces = interfaces;
                status.unserved = unserved;
                status.taken_over = self.taken_over;
            });
        }
    }

    /// Returns why no interface is served although one should be. An interface selected by a
    /// wildcard or by default may wait for queries.
    fn unserved(&self, interfaces: &[InterfaceStatus]) -> Option<String> {
        if self.taken_over {
            return None;
        }
        let Self { setting, links, .. } = self;
        let mut is_waiting = false;
        let mut reasons = Vec::new();
        for interface in interfaces {
            let Some(link) = link_at(links, interface.ifindex) else {
                continue;
            };
            if !setting.is_candidate(link) {
                continue;
            }
            match interface.state {
                InterfaceState::Served => return None,
                // A named interface waits only for its program.
                InterfaceState::Waiting if setting.selection.names(link) => return None,
                InterfaceState::Waiting => is_waiting = true,
                InterfaceState::Refused => {
                    reasons.push(format!("{}: {}", interface.name, interface.why));
                }
            }
        }
        let missing = setting.selection.missing(links);
        if !missing.is_empty() {
            let names = missing.join(", ");
            reasons.push(format!(
                "xdp.interfaces names {names}, which does not exist on this machine"
            ));
        } else if is_waiting {
            return None;
        }
        if reasons.is_empty() {
            return None;
        }
        Some(reasons.join("; "))
    }

    /// Returns the status of an interface; `None` if the interface is not reported.
    fn status_of(
        &self,
        link: &Link,
        is_open: bool,
        waiting: Option<&u32>,
    ) -> Option<InterfaceStatus> {
        let ifindex = link.ifindex;
        let slot = self.setting.scope.interface(ifindex);
        // Without a slot the program passes every query, though it is still attached.
        let is_answering = is_open && slot.is_some();
        let on = self.attached.get(&ifindex).filter(|_| is_answering);
        let (state, why) = self.state_of(link, on, is_open, waiting)?;
        Some(InterfaceStatus {
            name: link.name.clone(),
            ifindex,
            state,
            hook: on.map(|on| on.attachment.hook),
            slot,
            why,
        })
    }

    /// Returns the state of an interface and its reason; `on` is its program, if that answers.
    fn state_of(
        &self,
        link: &Link,
        on: Option<&OnInterface>,
        is_open: bool,
        waiting: Option<&u32>,
    ) -> Option<(InterfaceState, String)> {
        let ifindex = link.ifindex;
        let mut objection = self.refusals.get(&ifindex).cloned();
        // A machine has many interfaces of these kinds; only those that receive queries are worth a
        // line.
        if objection.is_none() && waiting.is_some() {
            objection = topology::refusal(link, &self.links).map(str::to_owned);
        }
        if let Some(on) = on {
            let limits = match objection {
                Some(why) => format!("; not for every endpoint: {why}"),
                None => self.heard_only(ifindex),
            };
            return Some((InterfaceState::Served, on.attachment.why.clone() + &limits));
        }
        // The packet filter's objection comes before a failed attach, which may be long ago.
        let failure = self.refused.get(&ifindex);
        if let Some(why) = objection.or_else(|| failure.map(|failure| failure.why.clone())) {
            return Some((InterfaceState::Refused, why));
        }
        let is_candidate = self.setting.is_candidate(link);
        if waiting.is_some() && !is_candidate {
            let why =
                "queries arrive, which xdp.interfaces or xdp.respect_filters leaves to userspace";
            return Some((InterfaceState::Refused, why.to_owned()));
        }
        let why = match waiting {
            Some(0) => "queries arrive, none of which could be answered here at once within 10 s"
                .to_owned(),
            Some(queries) => format!("{queries} of {MIN_QUERIES} queries within 10 s"),
            None if self.loading.contains(&ifindex) => NotServed::Loading.to_string(),
            None if self.cni_grace.is_waiting(ifindex) => NotServed::Unsettled.to_string(),
            None if is_open && is_candidate => "waiting for its turn to be attached".to_owned(),
            None => return None,
        };
        Some((InterfaceState::Waiting, why))
    }

    /// Returns the reason for which an interface answers only some clients; empty if it answers all.
    fn heard_only(&self, ifindex: u32) -> String {
        let heard_only = self
            .admitted
            .get(&ifindex)
            .map_or(0, |admitted| admitted.heard_only);
        if heard_only == 0 {
            return String::new();
        }
        let slots = self.endpoints.iter().map(|&(_, slot)| slot);
        let mut doubted = slots.filter(|slot| heard_only & 1 << slot != 0);
        let witness = doubted.find_map(|slot| self.gate.witness(ifindex, slot));
        let why = match witness {
            Some(client) => format!("queries of {client} do not arrive"),
            None => "packet filter or routes decide by client".to_owned(),
        };
        format!(
            "; {why}, so only clients whose own queries have arrived within {} s are answered here: {} now",
            HEARD_FOR.as_secs(),
            self.heard.count(ifindex)
        )
    }
}
