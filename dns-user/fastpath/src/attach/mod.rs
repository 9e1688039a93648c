//! The programs on the interfaces: selection of interfaces and hooks, and takeover by a successor.
//!
//! * [`status`]: the status shown to operators.
//! * [`reconcile`]: the thread that follows interfaces as they come and go.
//! * [`selection`]: the interfaces that may be served.
//! * [`gate`]: opens an interface after queries have arrived on it; [`structure`] excludes interfaces by
//!   their type, [`objections`] by the [`rules`] of the packet filter and by IPsec policies
//!   ([`xfrm`]); [`queues`] counts datagrams lost for another reason; [`pace`] decides how long to
//!   gather events.
//! * [`endpoints`]: the addresses and ports to serve.
//! * [`choice`]: the [`hook`]s that serve an interface.
//! * [`attachment`]: one program on one hook of an interface.
//! * [`filters`]: our clsact filters, distinguished from foreign ones; [`settling`]: interfaces to
//!   which a CNI plugin may still add a qdisc.
//! * [`folder`]: folders of pins, opened without following symbolic links.
//! * [`pins`]: links and maps under bpffs, which outlive the process.
//! * [`kinds`]: whether an interface belongs to this machine or leads elsewhere.
//! * [`netlink`]: the subset of rtnetlink in use.

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
mod settling;
pub(super) mod status;
mod structure;
mod xfrm;
