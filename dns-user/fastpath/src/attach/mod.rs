//! The programs on the interfaces: selection of interfaces and hooks, and takeover by a successor.
//!
//! * [`status`]: the status shown to operators.
//! * [`reconcile`]: the thread that follows interfaces as they come and go.
//! * [`selection`]: the interfaces that may be served.
//! * [`gate`]: opens an interface after queries have arrived on it; [`topology`] excludes interfaces by
//!   their type, [`firewall`] by the [`rules`] of the packet filter and by IPsec policies
//!   ([`xfrm`]); [`queues`] counts datagrams lost for another reason; [`rtnl_throttle`] limits how
//!   often the RTNL lock is taken.
//! * [`endpoints`]: the addresses and ports to serve.
//! * [`choice`]: the [`hook`]s that serve an interface.
//! * [`attachment`]: one program on one hook of an interface.
//! * [`filters`]: our clsact filters, distinguished from foreign ones; [`cni_grace`]: interfaces to
//!   which a CNI plugin may still add a qdisc.
//! * [`folder`]: folders of pins, opened without following symbolic links.
//! * [`pins`]: links and maps under bpffs, which outlive the process.
//! * [`kinds`]: whether an interface belongs to this machine or leads elsewhere.
//! * [`netlink`]: the subset of rtnetlink in use.

pub(super) mod attachment;
pub(super) mod choice;
mod cni_grace;
mod endpoints;
pub(super) mod filters;
mod firewall;
mod folder;
pub(super) mod gate;
pub(super) mod hook;
pub(super) mod kinds;
pub(super) mod netlink;
pub(super) mod pins;
mod queues;
pub(super) mod reconcile;
mod rtnl_throttle;
pub(super) mod rules;
pub(super) mod selection;
pub(super) mod status;
mod topology;
mod xfrm;
