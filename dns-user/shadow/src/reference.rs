//! The part of our server that the shadow needs without starting it: answers, and the reasons for them.

use std::{
    net::{IpAddr, SocketAddr},
    time::Instant,
};

use dns_core::{name::Name, wire::Transport};

/// A query as it was seen.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// The message as received.
    pub query: &'a [u8],
    /// The endpoint that sent it.
    pub client: SocketAddr,
    /// How it was carried.
    pub transport: Transport,
}

/// The settings with which our server answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settings {
    /// The settings of config.json.
    Configured,
    /// The same with every compatibility setting.
    Compatible,
}

/// The source of answers.
pub trait Reference {
    /// Returns how many states were in use at `since` or later; 0 is the current one, 1 its predecessor, and so on.
    fn states(&self, since: Instant) -> usize;

    /// Answers a query from a state. Sends nothing and never waits.
    fn answer(&mut self, asked: &Asked<'_>, settings: Settings, state: usize) -> Ours;

    /// Returns whether an address belongs to an instance or alias of the current state.
    fn is_of_fleet(&self, address: IpAddr) -> bool;

    /// Explains step by step how a name resolves.
    fn steps(&self, name: &Name) -> String;

    /// Returns the properties of a name that explain differences.
    fn nature(&self, name: &Name) -> Nature;
}

/// Properties of a name that explain differences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Nature {
    /// An alias covers it.
    pub is_alias: bool,
    /// It is below a domain of the records, and no query.
    pub is_malformed: bool,
    /// It has no data, but names below it do.
    pub is_above_ours: bool,
    /// Another domain of the records is a suffix of its text.
    pub has_other_domain: bool,
    /// A handler covers it whose domain the records once had.
    pub is_of_former_handler: bool,
}

/// Our answer to a query.
#[derive(Clone, Debug)]
pub struct Ours {
    /// The reply of our server.
    pub reply: OurReply,
    /// The source that answers the name.
    pub route: Route,
    /// Instances of the name before the filter of health.
    pub instances: Vec<IpAddr>,
    /// Reliability of their health.
    pub health: HealthKnowledge,
    /// Whether an interface would have answered, or why not.
    pub interface: Result<(), &'static str>,
}

/// The reply of our server, as far as it is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OurReply {
    /// A reply made from local data.
    Message(Vec<u8>),
    /// The reply of a recursor, a handler or another source, which is not asked.
    Elsewhere,
    /// No reply at all.
    Silence,
}

/// The source that answers a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Route {
    /// The names of the up-check.
    Upcheck,
    /// The records and aliases.
    Fleet,
    /// Reverse names of the records.
    Reverse,
    /// The names of Consul.
    Consul,
    /// The handler of a domain.
    Handler,
    /// The recursors of the configuration.
    Recursors,
    /// No source: REFUSED, or the message is not a valid query.
    NoSource,
}

impl Route {
    /// Returns the source in words.
    pub fn text(self) -> &'static str {
        match self {
            Self::Upcheck => "up-check",
            Self::Fleet => "fleet",
            Self::Reverse => "reverse names",
            Self::Consul => "Consul's names",
            Self::Handler => "handler",
            Self::Recursors => "recursors",
            Self::NoSource => "no source",
        }
    }
}

/// Reliability of the health of a name's instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthKnowledge {
    /// It has been the same for a while.
    Settled,
    /// It has just changed, or is not known yet.
    Changing,
    /// Health is not followed.
    Ignored,
}
