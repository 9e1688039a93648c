//! Interfaces that may still change. A CNI plugin adds its `ingress` qdisc some time after the
//! interface, and fails if another qdisc occupies that slot.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use super::netlink::Link;

/// How long an interface must stay unchanged before a qdisc may be added. Plugins run one after the
/// other, and between the first and the last thousands of packet filter rules may be written.
pub(crate) const QUIET: Duration = Duration::from_secs(20);

/// The interfaces' last changes.
#[derive(Debug, Default)]
pub(super) struct CniGrace {
    /// Time of the last change, by interface index.
    changed: BTreeMap<u32, Instant>,
    /// Interfaces that wait to be settled.
    waiting: BTreeSet<u32>,
}

impl CniGrace {
    /// Processes a new list of interfaces.
    pub(super) fn listed(&mut self, before: &[Link], after: &[Link], now: Instant) {
        let before: BTreeMap<u32, &Link> = before.iter().map(|link| (link.ifindex, link)).collect();
        let change = |link: &Link| {
            let same = before.get(&link.ifindex) == Some(&link);
            let since = self.changed.get(&link.ifindex).filter(|_| same);
            (link.ifindex, since.copied().unwrap_or(now))
        };
        let changed: BTreeMap<u32, Instant> = after.iter().map(change).collect();
        self.waiting.retain(|ifindex| changed.contains_key(ifindex));
        self.changed = changed;
    }

    /// Returns whether a qdisc may be added to an interface. CNI plugins use virtual interfaces
    /// only.
    pub(super) fn is_settled(&self, link: &Link, now: Instant) -> bool {
        let is_quiet = |since: &Instant| now.saturating_duration_since(*since) >= QUIET;
        link.kind.is_none() || self.changed.get(&link.ifindex).is_some_and(is_quiet)
    }

    /// Records whether an interface waits.
    pub(super) fn set_waiting(&mut self, ifindex: u32, waits: bool) {
        if waits {
            self.waiting.insert(ifindex);
        } else {
            self.waiting.remove(&ifindex);
        }
    }

    /// Returns whether an interface waits.
    pub(super) fn is_waiting(&self, ifindex: u32) -> bool {
        self.waiting.contains(&ifindex)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_restart_the_wait() {
        let (mut grace, begin) = (CniGrace::default(), Instant::now());
        let uplink = Link::named(2, "eth0");
        let veth = Link { kind: Some("veth".to_owned()), ..Link::named(3, "s-1") };
        let first = [uplink.clone(), veth.clone()];
        grace.listed(&[], &first, begin);
        assert!(grace.is_settled(&uplink, begin), "hardware");
        assert!(!grace.is_settled(&veth, begin + QUIET / 2));
        grace.listed(&first, &first, begin + QUIET / 2);
        assert!(grace.is_settled(&veth, begin + QUIET));

        let bridged = Link { master: Some(9), ..veth.clone() };
        let second = [uplink, bridged.clone()];
        grace.listed(&first, &second, begin + QUIET);
        assert!(!grace.is_settled(&bridged, begin + QUIET));
        grace.set_waiting(3, true);
        grace.listed(&second, &second[..1], begin + QUIET * 2);
        assert!(!grace.is_settled(&bridged, begin + QUIET * 4) && !grace.is_waiting(3), "gone");
    }
}
