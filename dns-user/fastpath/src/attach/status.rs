//! State of the interfaces and endpoints, shown to operators.

use std::net::SocketAddr;

use super::hook::Hook;

/// The status of one interface.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct InterfaceStatus {
    /// Name of the interface, such as `eth0`.
    pub name: String,
    /// Index of the interface in the network namespace.
    pub ifindex: u32,
    /// Whether the interface is served.
    pub state: InterfaceState,
    /// The hook that serves it; null if its queries are answered from userspace.
    pub hook: Option<Hook>,
    /// Its slot among the counters; null without one.
    pub slot: Option<usize>,
    /// The reason for the hook, or for not serving the interface.
    pub why: String,
}

/// Whether an interface is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InterfaceState {
    /// A program on it answers queries.
    Served,
    /// Too few queries have arrived on it so far, or its program is being loaded.
    Waiting,
    /// It cannot or must not answer.
    Refused,
}

impl InterfaceState {
    /// Returns the label used in the status.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Served => "served",
            Self::Waiting => "waiting",
            Self::Refused => "refused",
        }
    }
}

/// The interfaces and endpoints at which queries are answered.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct InterfacesStatus {
    /// Interfaces that are served, should be served, or receive queries, by index.
    pub interfaces: Vec<InterfaceStatus>,
    /// Endpoints whose queries the programs answer.
    pub endpoints: Vec<SocketAddr>,
    /// Number of endpoints beyond the programs' limit; answered from userspace.
    pub endpoints_left_out: usize,
    /// Whether another server has taken over, so that this one no longer follows the interfaces.
    pub taken_over: bool,
    /// Number of times all interfaces were listed.
    pub polls: u64,
    /// The reason why no interface is served although one should be; null while an interface is
    /// served or the gate waits for queries.
    #[serde(default)]
    pub unserved: Option<String>,
}
