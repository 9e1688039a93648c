//! The status of the interfaces, for operators.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::Instant,
};

use super::InterfaceReconciler;
use crate::attach::{
    attachment::{Hook, NotServed},
    gate::MIN_QUERIES,
    heard::HEARD_FOR,
    netlink::Link,
    topology,
};

/// The status of one interface.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct InterfaceStatus {
    /// Name of the interface, such as `eth0`.
    pub name: String,
    /// Index of the interface in the network namespace.
    pub ifindex: u32,
    /// Whether the interface is served.
    pub state: InterfaceState,
    /// The hook that serves it; null if its queries are answered from userspace.
    pub hook: Option<Hook>,
    /// Its slot among the counters; null without one.
    pub slot: Option<usize>,
    /// The reason for the hook, or for not serving the interface.
    pub why: String,
}

/// Whether an interface is served.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum InterfaceState {
    /// A program on it answers queries.
    Served,
    /// Too few queries have arrived on it so far, or its program is being loaded.
    Waiting,
    /// It cannot or must not answer.
    Refused,
}

impl InterfaceState {
    /// Returns the label used in the status.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Served => "served",
            Self::Waiting => "waiting",
            Self::Refused => "refused",
        }
    }
}

/// The interfaces and endpoints at which queries are answered.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct InterfacesStatus {
    /// Interfaces that are served, should be served, or receive queries, by index.
    pub interfaces: Vec<InterfaceStatus>,
    /// Endpoints whose queries the programs answer.
    pub endpoints: Vec<SocketAddr>,
    /// Number of endpoints beyond the programs' limit; answered from userspace.
    pub omitted_endpoints: usize,
    /// Whether another server has taken over, so that this one no longer follows the interfaces.
    pub taken_over: bool,
    /// Number of times all interfaces were listed.
    pub polls: u64,
    /// The reason why no interface is served although one should be; null while an interface is
    /// served or the gate waits for queries.
    pub unserved: Option<String>,
}

impl InterfaceReconciler {
    pub(super) fn publish_status(&self, now: Instant) {
        let waiting: BTreeMap<u32, u32> = self.gate.waiting(now).collect();
        let open: BTreeSet<u32> = self.gate.interfaces().collect();
        let interfaces = self.links.iter().filter_map(|link| {
            self.status_of(
                link,
                open.contains(&link.ifindex),
                waiting.get(&link.ifindex),
            )
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
        // Sorted by index.
        let link_of = |interface: &InterfaceStatus| {
            let place = links.binary_search_by_key(&interface.ifindex, |link| link.ifindex);
            place.ok().map(|place| &links[place])
        };
        let taken: Vec<(&InterfaceStatus, bool)> = interfaces
            .iter()
            .filter_map(|interface| Some((interface, link_of(interface)?)))
            .filter(|(_, link)| setting.is_candidate(link))
            .map(|(interface, link)| (interface, setting.selection.names(link)))
            .collect();
        let is_served = taken
            .iter()
            .any(|(interface, _)| interface.state == InterfaceState::Served);
        let waits = |named: bool| {
            taken.iter().any(|(interface, is_named)| {
                interface.state == InterfaceState::Waiting && *is_named == named
            })
        };
        let missing = setting.selection.missing(links);
        // A named interface waits only for its program.
        if self.taken_over || is_served || waits(true) || (missing.is_empty() && waits(false)) {
            return None;
        }
        let refused = taken
            .iter()
            .filter(|(interface, _)| interface.state == InterfaceState::Refused);
        let mut reasons: Vec<String> = refused
            .map(|(interface, _)| format!("{}: {}", interface.name, interface.why))
            .collect();
        if !missing.is_empty() {
            let names = missing.join(", ");
            reasons.push(format!(
                "xdp.interfaces names {names}, which does not exist on this machine"
            ));
        }
        (!reasons.is_empty()).then(|| reasons.join("; "))
    }

    /// Returns the status of an interface; `None` if the interface is not reported.
    fn status_of(
        &self,
        link: &Link,
        is_open: bool,
        waiting: Option<&u32>,
    ) -> Option<InterfaceStatus> {
        let ifindex = link.ifindex;
        let on = self.attached.get(&ifindex).filter(|_| is_open);
        let is_taken = self.setting.is_candidate(link);
        let refusal = self.refusals.get(&ifindex).cloned().or_else(|| {
            let refusal = topology::refusal(link, &self.links).filter(|_| waiting.is_some());
            refusal.map(str::to_owned)
        });
        let on = on.filter(|_| self.setting.scope.interface(ifindex).is_some());
        let (state, why) = match (on, refusal, self.refused.get(&ifindex), waiting) {
            // Served, but only for some endpoints.
            (Some(on), Some(why), _, _) => (
                InterfaceState::Served,
                format!("{}; not for every endpoint: {why}", on.attachment.why),
            ),
            (Some(on), None, _, _) => (
                InterfaceState::Served,
                on.attachment.why.clone() + &self.heard_only(ifindex),
            ),
            (None, Some(why), _, _) => (InterfaceState::Refused, why),
            (None, None, Some(refused), _) => (InterfaceState::Refused, refused.why.clone()),
            (None, None, None, Some(_)) if !is_taken => (
                InterfaceState::Refused,
                "queries arrive, which xdp.interfaces or xdp.respect_filters leaves to userspace"
                    .to_owned(),
            ),
            (None, None, None, Some(0)) => (
                InterfaceState::Waiting,
                "queries arrive, none of which could be answered here at once within 10 s"
                    .to_owned(),
            ),
            (None, None, None, Some(queries)) => (
                InterfaceState::Waiting,
                format!("{queries} of {MIN_QUERIES} queries within 10 s"),
            ),
            (None, None, None, None) if self.loading.contains(&ifindex) => {
                (InterfaceState::Waiting, NotServed::Loading.to_string())
            }
            (None, None, None, None) if self.cni_grace.is_waiting(ifindex) => {
                (InterfaceState::Waiting, NotServed::Unsettled.to_string())
            }
            (None, None, None, None) if is_open && is_taken => (
                InterfaceState::Waiting,
                "waiting for its turn to be attached".to_owned(),
            ),
            (None, None, None, None) => return None,
        };
        Some(InterfaceStatus {
            name: link.name.clone(),
            ifindex,
            state,
            hook: on.map(|on| on.attachment.hook),
            slot: self.setting.scope.interface(ifindex),
            why,
        })
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
