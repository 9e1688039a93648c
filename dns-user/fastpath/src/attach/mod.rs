//! The programs on the interfaces: which interfaces, which hooks, and how a
//! successor takes over.
//!
//! * [`reconcile`]: the thread that follows interfaces as they come and go.
//! * [`selection`]: which interfaces to serve.
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
pub(super) mod hook;
pub(super) mod kinds;
pub(super) mod netlink;
pub(super) mod pins;
pub(super) mod reconcile;
pub(super) mod selection;
