//! The programs on the interfaces: which interfaces, which hooks, and how a
//! successor takes over.
//!
//! * [`status`]: what operators see of it.
//! * [`reconcile`]: the thread that follows interfaces as they come and go.
//! * [`selection`]: which interfaces may be served.
//! * [`gate`]: which of them are, by what arrives at the server; [`structure`]: which never, by what they
//!   are; [`objections`]: which not, by the [`rules`] of the packet filter and by IPsec ([`xfrm`]);
//!   [`queues`]: when a probe may be lost without a reason there; [`pace`]: how fast.
//! * [`endpoints`]: which addresses and ports to serve.
//! * [`choice`]: which [`hook`]s serve an interface.
//! * [`attachment`]: one program on one hook of an interface.
//! * [`filters`]: our filters of clsact among those of others.
//! * [`folder`]: folders of pins, through no symbolic link.
//! * [`pins`]: what outlives the process, under bpffs.
//! * [`kinds`]: whether an interface is of this machine, or leads elsewhere.
//! * [`netlink`]: the little of rtnetlink that is needed.

pub(super) mod attachment;
pub(super) mod choice;
mod endpoints;
pub(super) mod filters;
mod folder;
pub(super) mod gate;
pub(super) mod hook;
pub(super) mod kinds;
pub(super) mod netlink;
mod objections;
mod pace;
pub(super) mod pins;
mod queues;
pub(super) mod reconcile;
pub(super) mod rules;
pub(super) mod selection;
pub(super) mod status;
mod structure;
mod xfrm;
