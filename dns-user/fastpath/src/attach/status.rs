//! The state of interfaces and endpoints, for operators.

use std::net::SocketAddr;

use super::hook::Hook;

/// One interface, for the status.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct InterfaceStatus {
    /// Its name.
    pub name: String,
    /// Its number.
    pub ifindex: u32,
    /// Whether it is served.
    pub state: InterfaceState,
    /// The hook that serves it; null: none does, its queries are answered from userspace.
    pub hook: Option<Hook>,
    /// Its slot among the counters; null: it has none.
    pub slot: Option<usize>,
    /// Why that one, or why none.
    pub why: String,
}

/// Whether an interface is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InterfaceState {
    /// It answers.
    Served,
    /// Too few queries arrived through it yet, or its program is being loaded.
    Waiting,
    /// It cannot or must not answer.
    Refused,
}

impl InterfaceState {
    /// Label in the status.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Served => "served",
            Self::Waiting => "waiting",
            Self::Refused => "refused",
        }
    }
}

/// Where queries are answered.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct InterfacesStatus {
    /// Interfaces that are served, or should be, or at which queries arrive, by number.
    pub interfaces: Vec<InterfaceStatus>,
    /// Addresses and ports whose queries the program answers.
    pub endpoints: Vec<SocketAddr>,
    /// Addresses and ports beyond the program's limit: answered from userspace.
    pub endpoints_left_out: usize,
    /// Whether another server has taken over, so that this one follows nothing any more.
    pub taken_over: bool,
    /// How often all interfaces were listed so far.
    pub looks: u64,
}
