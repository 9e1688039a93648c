//! The main loop: reads the sources after every change, and reconciles each provider in its own
//! task, so that a slow or failing provider delays no other.

mod launch;
mod report;
mod run;
mod sources;
mod worker;

pub(crate) use self::run::alias_writer;
pub use self::{
    launch::{LaunchOptions, launch, options_problems},
    report::{ProviderState, statuses},
    run::run,
    sources::{Sources, State, read_once},
};
