//! Our clsact filters, distinguished from foreign ones, and the qdisc that they need.

use std::{io, net::SocketAddr, os::fd::BorrowedFd};

use dns_common::object;

use super::{netlink::Socket, settling::QUIET};

/// The only ingress qdisc that our filters can share with foreign ones.
const CLSACT: &str = "clsact";

/// The reason why our filter cannot be set.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClsactError {
    /// Foreign filters occupy every priority available to ours.
    #[error("clsact: foreign filters occupy every priority available to the server")]
    NoPriority,
    /// Filters of another qdisc, such as a bandwidth limit, may see packets first and consume them.
    #[error(
        "clsact: the interface has a foreign qdisc \"{0}\" (a bandwidth limit?), which before Linux 6.6 \
         excludes ours"
    )]
    OtherQdisc(String),
    /// No qdisc may be added yet.
    #[error(
        "before Linux 6.6 a clsact qdisc is added {} s after the interface's last change, because a CNI plugin may still add \"ingress\"",
        QUIET.as_secs()
    )]
    Unsettled,
    #[error("clsact: {0}")]
    Os(#[from] io::Error),
}

/// A filter of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Filter {
    pub(super) priority: u16,
    /// Whether this process added the qdisc.
    owns_qdisc: bool,
}

impl Filter {
    /// Removes the filter, and the qdisc if this process added it and nothing else uses it: a CNI
    /// plugin could otherwise no longer add `ingress`.
    pub(super) fn remove(self, ifindex: u32, netlink: &mut Socket) -> io::Result<()> {
        netlink.remove_filter(ifindex, self.priority)?;
        if self.owns_qdisc && !netlink.has_filters(ifindex)? {
            netlink.remove_clsact(ifindex)?;
        }
        Ok(())
    }
}

/// Our clsact filters. The kernel identifies a filter of an interface only by its priority, so each
/// of ours carries its owner in its name.
#[derive(Clone, Debug)]
pub(crate) struct Filters {
    /// The server's main address and port.
    owner: String,
    /// Our first priority; if a foreign filter occupies it, the next one is tried.
    first: u16,
}

impl Filters {
    /// Number of priorities to try.
    const TRIES: u16 = 16;

    /// Returns the filters of the server at this address.
    pub(crate) fn of(main: SocketAddr) -> Self {
        let owner = main.to_string();
        let hash = dns_common::name::hash_name(0, owner.as_bytes());
        // 0xb000 to 0xbfff: after filters with low numbers, before the kernel's own choices from
        // 0xc000 down.
        Self { first: 0xb000 | (hash % 0x1000) as u16, owner }
    }

    /// Sets our filter. A clsact qdisc is added only if the interface is settled.
    pub(super) fn set(
        &self,
        ifindex: u32,
        program: BorrowedFd<'_>,
        settled: bool,
        netlink: &mut Socket,
    ) -> Result<Filter, ClsactError> {
        let owns_qdisc = match netlink.ingress_qdisc(ifindex)? {
            Some(kind) if kind == CLSACT => false,
            Some(kind) => return Err(ClsactError::OtherQdisc(kind)),
            // Another qdisc may have been added just before ours; the next attempt finds it.
            None if !settled || !netlink.add_clsact(ifindex)? => return Err(ClsactError::Unsettled),
            None => true,
        };
        let place = self.place(|priority| Ok(netlink.filter(ifindex, priority)?.map(|(_, name)| name)))?;
        let (priority, replace) = place.ok_or(ClsactError::NoPriority)?;
        netlink.set_filter(ifindex, priority, replace, program, &self.name())?;
        Ok(Filter { priority, owns_qdisc })
    }

    /// Removes our filter from an interface, whichever process set it; returns whether there was
    /// one.
    pub(crate) fn remove(&self, ifindex: u32, netlink: &mut Socket) -> io::Result<bool> {
        let place = self.place(|priority| Ok(netlink.filter(ifindex, priority)?.map(|(_, name)| name)));
        match place? {
            Some((priority, true)) => netlink.remove_filter(ifindex, priority).map(|()| true),
            _ => Ok(false),
        }
    }

    /// Returns the name of our filter.
    pub(crate) fn name(&self) -> String {
        format!("{} {}", object::TC_PROGRAM, self.owner)
    }

    /// Returns whether a filter of this name is ours.
    pub(crate) fn are(&self, name: &str) -> bool {
        name == self.name()
    }

    /// Returns the priority for our filter, and whether the filter is attached already; `None` if
    /// foreign filters occupy every priority tried.
    pub(crate) fn place(
        &self,
        mut at: impl FnMut(u16) -> io::Result<Option<String>>,
    ) -> io::Result<Option<(u16, bool)>> {
        let mut free = None;
        for step in 0..Self::TRIES {
            let priority = 0xb000 | (self.first.wrapping_add(step) & 0xfff);
            match at(priority)? {
                Some(name) if self.are(&name) => return Ok(Some((priority, true))),
                Some(_) => {}
                None => free = free.or(Some((priority, false))),
            }
        }
        Ok(free)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn foreign_priority_is_kept() {
        let (ours, theirs) =
            ["169.254.0.2:53", "169.254.0.2:54"].map(|text| Filters::of(text.parse().unwrap())).into();
        assert!((0xb000..0xc000).contains(&ours.first) && ours.first != theirs.first);
        let mut there: BTreeMap<u16, String> = BTreeMap::new();
        let place = |filters: &Filters, there: &BTreeMap<u16, String>| {
            filters.place(|priority| Ok(there.get(&priority).cloned())).unwrap()
        };
        assert_eq!(place(&ours, &there), Some((ours.first, false)));
        // As if the hashes of both addresses were equal.
        there.insert(ours.first, theirs.name());
        let next = 0xb000 | (ours.first + 1) & 0xfff;
        assert_eq!(place(&ours, &there), Some((next, false)));
        there.insert(next, ours.name());
        assert_eq!(place(&ours, &there), Some((next, true)), "of an earlier process");
        // Our filter is found even if the first priority has become free.
        there.remove(&ours.first);
        assert_eq!(place(&ours, &there), Some((next, true)));
        let all = (0..0x1000).map(|step| (0xb000 | step, "somebody's".to_owned())).collect();
        assert_eq!(place(&ours, &all), None);
    }
}
