//! The programs' answers: how names are added to the map, changed and removed.
//!
//! * [`publisher`]: the handle of the publisher, and what queries need not hand over again.
//! * [`events`]: what waits for the publisher and must not be lost.
//! * [`source`]: the meaning of names.
//! * [`thread`]: the publisher's thread, the only one that writes.
//! * [`table`]: the published names and the rules for them (`table/eviction.rs`: the choice of names to evict).
//! * [`answers`]: whole answers: forwarded ones, and local replies that are no address lists.
//! * [`replies`]: computes local replies.
//! * [`dependents`]: the names affected by a change of an instance's health.
//! * [`second_chance`]: the order of eviction, and the rate at which names may evict each other.
//! * [`lease`]: the time for which the programs may answer without renewal from userspace, and RCU grace periods,
//!   after which cells of removed entries may be reused.

pub(super) mod answers;
pub(super) mod dependents;
mod events;
pub(super) mod lease;
pub(super) mod publisher;
pub(super) mod replies;
mod second_chance;
pub(super) mod source;
pub(super) mod table;
pub(super) mod thread;
