//! What the programs answer: names come in, change and leave.
//!
//! * [`publisher`]: the one thread that changes anything, and the handle to it.
//! * [`table`]: what is published, and the rules for it (`table/room.rs`: who leaves for whom).
//! * [`allowance`]: how fast names that were asked for may push each other out.
//! * [`dependents`]: which names a change of an instance's health concerns.
//! * [`grace`]: when cells that were given back can be used again.
//! * [`learn`]: names that were asked for in userspace, on their way here.
//! * [`lease`]: how long the programs may answer without hearing from userspace.

pub(super) mod allowance;
pub(super) mod dependents;
pub(super) mod grace;
pub(super) mod learn;
pub(super) mod lease;
pub(super) mod publisher;
pub(super) mod table;
