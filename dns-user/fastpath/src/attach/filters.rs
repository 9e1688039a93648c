//! Our clsact filters, distinguished from foreign ones, and the qdisc that they need.

use std::{io, net::SocketAddr, os::fd::BorrowedFd};

use dns_common::object;

use super::{
    cni_grace::QUIET,
    netlink::{FilterInfo, Socket},
};

/// The only ingress qdisc that our filters can share with foreign ones.
const CLSACT: &str = "clsact";

/// Suffix of a filter's name if the server added the qdisc.
const WITH_QDISC: &str = " qdisc";

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

/// Whether the interface accepts a classic filter, and whether that is sensible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IngressSlot {
    /// No qdisc: one may be added.
    Free,
    /// A clsact qdisc without foreign filters at ingress, which could see packets first.
    Clsact,
    /// Another qdisc, or foreign filters.
    Foreign,
}

/// Creator of a filter's qdisc.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QdiscOwner {
    /// A server at the same address. The qdisc goes with the filter.
    Us,
    Others,
}

/// A filter of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Filter {
    pub(super) priority: u16,
    qdisc: QdiscOwner,
}

impl Filter {
    /// Removes the filter, and the qdisc if a server added it and nothing else uses it: a CNI
    /// plugin could otherwise no longer add `ingress`.
    pub(super) fn remove(self, ifindex: u32, netlink: &mut Socket) -> io::Result<()> {
        netlink.remove_filter(ifindex, self.priority)?;
        if self.qdisc == QdiscOwner::Us && !netlink.has_filters(ifindex)? {
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

    /// Returns the state of an interface's ingress.
    pub(crate) fn slot(&self, ifindex: u32, netlink: &mut Socket) -> io::Result<IngressSlot> {
        Ok(match netlink.ingress_qdisc(ifindex)? {
            None => IngressSlot::Free,
            Some(kind) if kind == CLSACT && self.are_all(&netlink.filters(ifindex)?) => IngressSlot::Clsact,
            Some(_) => IngressSlot::Foreign,
        })
    }

    /// Sets our filter. A clsact qdisc is added only if the interface is settled.
    pub(super) fn set(
        &self,
        ifindex: u32,
        program: BorrowedFd<'_>,
        settled: bool,
        netlink: &mut Socket,
    ) -> Result<Filter, ClsactError> {
        let place = match netlink.ingress_qdisc(ifindex)? {
            Some(kind) if kind == CLSACT => {
                self.place(&netlink.filters(ifindex)?).ok_or(ClsactError::NoPriority)?
            }
            Some(kind) => return Err(ClsactError::OtherQdisc(kind)),
            // Another qdisc may have been added just before ours; the next attempt finds it.
            None if !settled || !netlink.add_clsact(ifindex)? => return Err(ClsactError::Unsettled),
            None => Place { priority: self.first, is_ours: false, qdisc: QdiscOwner::Us },
        };
        let Place { priority, is_ours, qdisc } = place;
        netlink.set_filter(ifindex, priority, is_ours, program, &self.name(qdisc))?;
        Ok(Filter { priority, qdisc })
    }

    /// Returns our filter on an interface, whichever process set it.
    fn find(&self, ifindex: u32, netlink: &mut Socket) -> io::Result<Option<Filter>> {
        let place = self.place(&netlink.filters(ifindex)?).filter(|place| place.is_ours);
        Ok(place.map(|Place { priority, qdisc, .. }| Filter { priority, qdisc }))
    }

    /// Returns whether an interface has our filter, whichever process set it.
    pub(crate) fn is_on(&self, ifindex: u32, netlink: &mut Socket) -> io::Result<bool> {
        Ok(self.find(ifindex, netlink)?.is_some())
    }

    /// Removes our filter from an interface, whichever process set it; returns whether there was
    /// one.
    pub(crate) fn remove(&self, ifindex: u32, netlink: &mut Socket) -> io::Result<bool> {
        match self.find(ifindex, netlink)? {
            Some(filter) => filter.remove(ifindex, netlink).map(|()| true),
            None => Ok(false),
        }
    }

    /// Returns the name of our filter.
    fn name(&self, qdisc: QdiscOwner) -> String {
        let suffix = if qdisc == QdiscOwner::Us { WITH_QDISC } else { "" };
        format!("{} {}{suffix}", object::TC_PROGRAM, self.owner)
    }

    /// Returns the owner of the qdisc if a filter of this name is ours.
    fn qdisc_of(&self, name: &str) -> Option<QdiscOwner> {
        [QdiscOwner::Us, QdiscOwner::Others].into_iter().find(|&qdisc| name == self.name(qdisc))
    }

    /// Returns whether a filter of this name is ours.
    pub(crate) fn are(&self, name: &str) -> bool {
        self.qdisc_of(name).is_some()
    }

    fn are_all(&self, filters: &[FilterInfo]) -> bool {
        filters.iter().all(|filter| self.are(&filter.name))
    }

    /// Returns the place for our filter among those at ingress; `None` if foreign filters occupy
    /// every priority tried.
    fn place(&self, filters: &[FilterInfo]) -> Option<Place> {
        let mut free = None;
        for step in 0..Self::TRIES {
            let priority = 0xb000 | (self.first.wrapping_add(step) & 0xfff);
            match filters.iter().find(|filter| filter.priority == priority) {
                Some(filter) => {
                    if let Some(qdisc) = self.qdisc_of(&filter.name) {
                        return Some(Place { priority, is_ours: true, qdisc });
                    }
                }
                None => {
                    free = free.or(Some(Place { priority, is_ours: false, qdisc: QdiscOwner::Others }));
                }
            }
        }
        free
    }
}

/// A priority for our filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    priority: u16,
    /// Whether our filter is there already.
    is_ours: bool,
    qdisc: QdiscOwner,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_priority_is_kept() {
        let (ours, theirs) =
            ["169.254.0.2:53", "169.254.0.2:54"].map(|text| Filters::of(text.parse().unwrap())).into();
        assert!((0xb000..0xc000).contains(&ours.first) && ours.first != theirs.first);
        let filter = |priority: u16, name: String| FilterInfo { priority, program: 1, name };
        let mut there = Vec::new();
        let others = QdiscOwner::Others;
        let free = |priority| Some(Place { priority, is_ours: false, qdisc: others });
        assert_eq!(ours.place(&there), free(ours.first));
        // As if the hashes of both addresses were equal.
        there.push(filter(ours.first, theirs.name(others)));
        let next = 0xb000 | (ours.first + 1) & 0xfff;
        assert_eq!(ours.place(&there), free(next));
        there.push(filter(next, ours.name(QdiscOwner::Us)));
        let found = Some(Place { priority: next, is_ours: true, qdisc: QdiscOwner::Us });
        assert_eq!(ours.place(&there), found, "of an earlier process");
        // Our filter is found even if the first priority has become free.
        there.remove(0);
        assert_eq!(ours.place(&there), found);
        let all: Vec<FilterInfo> =
            (0..0x1000).map(|step| filter(0xb000 | step, "somebody's".to_owned())).collect();
        assert_eq!(ours.place(&all), None);
        assert!(!ours.are_all(&all) && ours.are_all(&there));
    }
}
