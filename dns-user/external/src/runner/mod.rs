//! The loop: sources are read at every change, and each provider is reconciled by a task of its
//! own, so that a provider that hangs or fails delays no other.

mod launch;
mod one_shot;
mod report;
mod run;
mod sources;
mod worker;

pub use self::{
    launch::{LaunchOptions, launch},
    one_shot::{Read, read_once},
    report::{ProviderState, statuses},
    run::run,
    sources::Sources,
};
