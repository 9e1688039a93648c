//! The main loop: reads the sources after every change, and reconciles each provider in its own
//! task, so that a slow or failing provider delays no other.

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
