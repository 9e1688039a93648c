//! Release artifacts: the BOSH job as rendered by a director and run on machines, and the Debian
//! package; and the publisher's fleet names, which need the same crates.

mod debian;
mod errand;
mod fleet_names;
mod identity;
mod identity_job;
mod job;
mod keys;
mod machine;
mod migration;
mod packages;
mod publish_job;
mod published;
mod release;
mod rendering;
mod resolver;
mod running;
mod sync_job;
mod together;
mod units;
