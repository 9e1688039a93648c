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
    structure,
};

impl Follower {
    /// Publishes the status of all interfaces.
    pub(super) fn publish_status(&self, now: Instant) {
        let waiting: BTreeMap<u32, Waiting> = self.gate.waiting(now).collect();
        let open: BTreeSet<u32> = self.gate.interfaces().collect();
        let interfaces = self.links.iter().filter_map(|link| {
            self.status_of(link, open.contains(&link.ifindex), waiting.get(&link.ifindex))
        });
        let mut interfaces: Vec<InterfaceStatus> = interfaces.collect();
        interfaces.sort_by_key(|interface| interface.ifindex);
        self.status.send_if_modified(|status| {
            let is_new = status.interfaces != interfaces || status.taken_over != self.taken_over;
            status.interfaces = interfaces;
            status.taken_over = self.taken_over;
            is_new
        });
    }

    /// Returns the status of an interface; `None` if the interface is not worth a report.
    fn status_of(&self, link: &Link, is_open: bool, waiting: Option<&Waiting>) -> Option<InterfaceStatus> {
        let ifindex = link.ifindex;
        let on = self.attached.get(&ifindex).filter(|_| is_open);
        let is_taken = self.setting.selection.takes(link);
        let refusal = self.refusals.get(&ifindex).cloned().or_else(|| {
            let refusal = structure::refusal(link, &self.links).filter(|_| waiting.is_some());
            refusal.map(str::to_owned)
        });
        let on = on.filter(|_| self.setting.scope.interface(ifindex).is_some());
        let (state, why) = match (on, refusal, self.refused.get(&ifindex), waiting) {
            // Served for some endpoints.
            (Some(on), Some(why), _, _) => {
                (InterfaceState::Served, format!("{}; not for every endpoint: {why}", on.attachment.why()))
            }
            (Some(on), None, _, _) => (InterfaceState::Served, on.attachment.why().to_owned()),
            (None, Some(why), _, _) => (InterfaceState::Refused, why),
            (None, None, Some(refused), _) => (InterfaceState::Refused, refused.why.clone()),
            (None, None, None, Some(Waiting::Witness(client))) => {
                (InterfaceState::Refused, format!("queries of {client} do not arrive from here"))
            }
            (None, None, None, Some(Waiting::Evidence(queries))) if !is_taken => (
                InterfaceState::Refused,
                format!(
                    "left to userspace by xdp.interfaces or xdp.respect_filters ({queries} queries arrived)"
                ),
            ),
            (None, None, None, Some(Waiting::Evidence(queries))) => {
                (InterfaceState::Waiting, format!("{queries} of {ENOUGH} queries within 10 s"))
            }
            (None, None, None, None) if self.loading.contains(&ifindex) => {
                (InterfaceState::Waiting, NotServed::Loading.to_string())
            }
            (None, None, None, None) if self.settling.is_waiting(ifindex) => {
                (InterfaceState::Waiting, NotServed::Unsettled.to_string())
            }
            (None, None, None, None) if is_open && is_taken => {
                (InterfaceState::Waiting, "its turn to be attached comes".to_owned())
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
