//! Release artifacts: the BOSH job as rendered by a director and run on machines, and the Debian
//! package.

mod debian;
mod identity;
mod identity_job;
mod job;
mod keys;
mod machine;
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
