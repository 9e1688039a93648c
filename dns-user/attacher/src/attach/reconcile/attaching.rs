//! Attaches programs to interfaces and detaches them, at a pace that leaves the RTNL lock to other network
//! configuration.

use std::time::Instant;

use dns_core::config::OnStop;
use dns_fastpath::protocol::{Hook, Operation};

use super::{InterfaceReconciler, OnInterface, Refused, Waiting, context};
use crate::{
    attach::{
        attachment::{self, IngressSlot, NotServed},
        choice::{self, TcOrder},
        netlink::{Link, link_at},
        pins::PinnedLink,
        rtnl_throttle::{Backlog, DEADLINE},
        topology,
    },
    bpf::LinkKind,
    scope::Served,
};

impl InterfaceReconciler {
    /// Returns whether to attach to an interface at once: it is named, or replaces a predecessor's program.
    pub(super) fn is_urgent(&self, link: &Link) -> bool {
        self.setting.selection.names(link)
            || self.earlier_filters.contains(&link.ifindex)
            || self
                .setting
                .predecessor
                .iter()
                .any(|left| left.ifindex == link.ifindex)
    }

    /// Returns whether a qdisc may be added to an interface.
    fn is_settled(&self, link: &Link, now: Instant) -> bool {
        self.setting.selection.names(link) || self.cni_grace.is_settled(link, now)
    }

    /// Returns whether to try to attach to an interface: not if that failed before and the interface has not
    /// changed.
    pub(super) fn may_attach(&self, link: &Link, now: Instant) -> bool {
        let before = self.refused.get(&link.ifindex);
        // Each attempt takes the RTNL lock, and the kernel's answer changes only with the
        // interface.
        if before.is_some_and(|before| before.link == *link && !before.again) {
            return false;
        }
        !self.cni_grace.is_waiting(link.ifindex) || self.is_settled(link, now)
    }

    /// Attaches to the interfaces that wait for a program, until `limit`.
    pub(super) fn attach_waiting(&mut self, mut waiting: Vec<&Link>, limit: Instant, now: Instant) {
        let before = std::mem::take(&mut self.waiting);
        for link in &waiting {
            let new = Waiting {
                since: now,
                has_foreign_qdisc: false,
            };
            let entry = before.get(&link.ifindex).copied().unwrap_or(new);
            self.waiting.insert(link.ifindex, entry);
        }
        let Some(since) = self.waiting.values().map(|entry| entry.since).min() else {
            return;
        };
        // Busy newcomers would otherwise keep those that wait for long from ever being served.
        waiting.sort_by_key(|link| {
            let since = self.waiting[&link.ifindex].since;
            let is_late = now.saturating_duration_since(since) >= DEADLINE;
            if is_late { since } else { now }
        });
        for (index, link) in waiting.iter().enumerate() {
            // A prepared link takes the lock no more.
            let is_prepared = self.setting.prepared.contains_key(&link.ifindex);
            let is_urgent = is_prepared || self.is_urgent(link);
            if !(is_urgent || self.rtnl.wait_before(limit)) {
                self.postponed = true;
                continue;
            }
            // Asks the kernel, so not before the interface's turn.
            let order = self.tc_order(link, now);
            if is_urgent || order == TcOrder::Clsact || self.may_hold_lock(link.ifindex, limit) {
                let left = Backlog {
                    waiting: waiting.len() - index - 1,
                    since,
                };
                self.attach(link, order, left, now);
            } else {
                self.postponed = true;
            }
        }
    }

    /// Waits until a tcx link may hold the RTNL lock; returns false if that is not before `limit`.
    fn may_hold_lock(&mut self, ifindex: u32, limit: Instant) -> bool {
        self.waiting
            .get(&ifindex)
            .is_some_and(|entry: &Waiting| entry.since.elapsed() >= DEADLINE)
            || self.events.wait_for_silence(limit)
    }

    /// Chooses the tc hook: a clsact filter where its qdisc exists and has no other filters, and where nothing else is
    /// possible; tcx otherwise. A new qdisc would make the interface lose what it sends meanwhile (`qdisc_graft`).
    fn tc_order(&mut self, link: &Link, now: Instant) -> TcOrder {
        // Replaced in its place; a tcx link would stand beside it until that one is removed.
        if self.earlier_filters.contains(&link.ifindex) {
            return TcOrder::Clsact;
        }
        let is_earlier_tcx =
            |left: &PinnedLink| left.ifindex == link.ifindex && left.kind == LinkKind::Tcx;
        // The link that is there changes its program in one step, and no second hook is needed.
        if self.setting.predecessor.iter().any(is_earlier_tcx)
            || self.setting.prepared.contains_key(&link.ifindex)
        {
            return TcOrder::Tcx;
        }
        let is_settled = self.is_settled(link, now);
        let Self {
            setting,
            netlink,
            waiting,
            ..
        } = self;
        let entry = waiting.get_mut(&link.ifindex);
        if entry.as_ref().is_some_and(|entry| entry.has_foreign_qdisc) {
            return TcOrder::Tcx;
        }
        match setting.filters.slot(link.ifindex, netlink) {
            Ok(IngressSlot::Clsact) => TcOrder::Clsact,
            // A filter keeps the lock so briefly that it need not wait for its turn.
            Ok(IngressSlot::Free) if setting.lacks_tcx && is_settled => TcOrder::Clsact,
            Ok(IngressSlot::Foreign) => {
                if let Some(entry) = entry {
                    entry.has_foreign_qdisc = true;
                }
                TcOrder::Tcx
            }
            // If the kernel does not answer, attaching fails as well and reports the reason.
            Ok(IngressSlot::Free) | Err(_) => TcOrder::Tcx,
        }
    }

    /// Detaches programs from interfaces that are no longer served, until `limit` and only while no
    /// other interface waits.
    pub(super) fn detach_unwanted(&mut self, unwanted: &[u32], limit: Instant) {
        for &ifindex in unwanted {
            // The programs pass every query of these interfaces already, so an interface that waits for a
            // program comes first.
            if self.postponed || !self.rtnl.wait_before(limit) {
                self.postponed = true;
                return;
            }
            let Some(on) = self.attached.remove(&ifindex) else {
                continue;
            };
            let Self {
                setting,
                netlink,
                rtnl,
                links,
                refusals,
                ..
            } = self;
            // Lost probes were logged; an idle interface is no event.
            if let Some(why) = refusals.get(&ifindex) {
                let interface = link_at(links, ifindex).map(|link| &link.name);
                tracing::info!(
                    interface,
                    why,
                    "fast path detached; queries are answered in userspace"
                );
            }
            rtnl.run(Operation::Detach, None, || {
                on.attachment
                    .detach(&setting.programs, &setting.filters, netlink)
            });
        }
    }

    /// Describes an interface for the programs.
    pub(super) fn served(&self, link: &Link) -> Served {
        let master = link.master.and_then(|master| link_at(&self.links, master));
        Served {
            ifindex: link.ifindex,
            address: link.address,
            master: master.unwrap_or(link).address,
            near: topology::is_near(link, &self.links),
            // Unknown routes may set one, and a reply beyond it would be lost.
            bounded: self
                .bounded
                .as_ref()
                .is_none_or(|bounded| bounded.contains(&link.ifindex)),
        }
    }

    /// Attaches to one interface. `backlog` describes the interfaces that wait after it.
    fn attach(&mut self, link: &Link, order: TcOrder, backlog: Backlog, now: Instant) {
        let settled = self.is_settled(link, now);
        if self.attached.len() >= self.setting.max_interfaces {
            return self.refuse(link, format!(
                "{} interfaces are served already, and the remaining descriptors are reserved for sockets; \
                 raise LimitNOFILE",
                self.attached.len()
            ));
        }
        let slot = self.setting.scope.interface(link.ifindex);
        // The slot may have counted for an earlier interface, and its replies must not keep this
        // one from retiring.
        if let Some(slot) = slot {
            self.setting.counters.clear_interface(slot);
        }
        let Self {
            setting,
            netlink,
            rtnl,
            cni_grace,
            ..
        } = self;
        setting.scope.expect_runs();
        let begun = Instant::now();
        let is_prepared = setting.prepared.contains_key(&link.ifindex);
        let made = choice::plan(setting.mode, link, order).and_then(|plan| {
            let mut context = context(setting, netlink, settled);
            // Its link exists, so nothing takes the lock and no pause is due.
            if is_prepared {
                return choice::attach(plan, link, &mut context);
            }
            rtnl.run(Operation::Attach, Some(backlog), || {
                choice::attach(plan, link, &mut context)
            })
        });
        cni_grace.set_waiting(link.ifindex, matches!(made, Err(NotServed::Unsettled)));
        match made {
            Ok(attachment) => {
                // At clsact the new filter has replaced it; after a change of hooks it would stay
                // behind.
                if self.earlier_filters.remove(&link.ifindex) && attachment.hook != Hook::Clsact {
                    self.remove_earlier_filter(link.ifindex);
                }
                tracing::info!(interface = %link.name, hook = %attachment.hook, why = attachment.why, took_us = begun.elapsed().as_micros(), "program attached: the interface answers queries");
                self.refused.remove(&link.ifindex);
                self.attached.insert(
                    link.ifindex,
                    OnInterface {
                        attachment,
                        replies: (0, now),
                    },
                );
            }
            Err(NotServed::Loading) => {
                self.loading.insert(link.ifindex);
            }
            Err(NotServed::Unsettled) => {}
            Err(refusal) => self.refuse(link, refusal.to_string()),
        }
    }

    /// Records why an interface is not served; logs each reason once.
    pub(super) fn refuse(&mut self, link: &Link, why: String) {
        if self
            .refused
            .get(&link.ifindex)
            .is_none_or(|before| before.why != why)
        {
            tracing::warn!(interface = %link.name, why, "interface not served: its queries are answered from userspace");
        }
        self.refused.insert(
            link.ifindex,
            Refused {
                link: link.clone(),
                why,
                again: false,
            },
        );
    }

    /// Detaches the programs, or leaves them to a successor.
    pub(super) fn finish(mut self, on_stop: OnStop) {
        // Links of the predecessor that were not taken over are kept or removed like ours.
        let left = std::mem::take(&mut self.setting.predecessor);
        match on_stop {
            OnStop::Keep => {
                let lost = self
                    .attached
                    .values()
                    .filter(|on| !on.attachment.is_kept())
                    .count();
                if lost > 0 {
                    tracing::warn!(
                        lost,
                        "links are not pinned: programs are detached when this process ends, regardless of xdp.on_stop"
                    );
                }
            }
            OnStop::Detach => {
                // Without pauses between the operations, unlike `detach_unwanted`: the server waits
                // 20 s for all of it, and nothing will be attached again.
                for link in left {
                    attachment::drop_predecessor(link);
                }
                for ifindex in std::mem::take(&mut self.earlier_filters) {
                    self.remove_earlier_filter(ifindex);
                }
                for (_, on) in std::mem::take(&mut self.attached) {
                    on.attachment.detach(
                        &self.setting.programs,
                        &self.setting.filters,
                        &mut self.netlink,
                    );
                }
            }
        }
    }
}
