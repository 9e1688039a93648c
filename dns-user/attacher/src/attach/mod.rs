//! The programs on the interfaces: selection of interfaces and hooks, and takeover by a successor.
//!
//! * [`reconcile`]: the thread that follows interfaces as they come and go, and their status.
//! * [`selection`]: the interfaces that may be served, and the addresses and ports.
//! * [`gate`]: opens an interface after queries have arrived on it; [`topology`] excludes interfaces by
//!   their type, [`firewall`] by the [`rules`] of the packet filter and by IPsec policies;
//!   [`rtnl_throttle`] limits how often the RTNL lock is taken, and waits for CNI plugins.
//! * [`choice`]: the hooks that serve an interface.
//! * [`attachment`]: one program on one hook of an interface, and our clsact filters.
//! * [`collisions`]: log messages about names with the same hash.
//! * [`pins`]: links and maps under bpffs, which outlive the process.
//! * [`netlink`]: the subset of rtnetlink in use; [`bounded`]: a list with a maximum length; [`work`]: counters of all that
//!   takes time here.

pub(super) mod attachment;
mod bounded;
mod choice;
pub(super) mod collisions;
mod firewall;
mod gate;
mod heard;
#[cfg(test)]
mod kernel_tests;
pub(super) mod netlink;
pub(super) mod pins;
pub(super) mod reconcile;
mod rtnl_throttle;
pub(super) mod rules;
pub(super) mod selection;
pub(super) mod topology;
pub(super) mod work;
