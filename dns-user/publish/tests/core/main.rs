//! The pure core against the facts about external-dns, and against generated zones.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read its input has failed"
)]

mod cases;
mod exact;
mod messages;
mod model;
mod properties;
mod records;
