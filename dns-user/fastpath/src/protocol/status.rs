//! The attacher's reports about interfaces, programs and its own work.

use std::{borrow::Cow, collections::BTreeMap, fmt, net::SocketAddr};

use serde::{Deserialize, Serialize};

//----------- Interfaces ------------------------------------------------------

/// A hook to which a program can be attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Hook {
    /// XDP in the driver.
    Native,
    /// tcx at ingress (kernel 6.6).
    Tcx,
    /// A classic filter at the clsact qdisc.
    Clsact,
}

impl Hook {
    /// Returns the label used in metrics and in the status.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        }
    }
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

/// The status of one interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
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
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfacesStatus {
    /// Interfaces that are served, should be served, or receive queries, by index.
    pub interfaces: Vec<InterfaceStatus>,
    /// Endpoints whose queries the programs answer.
    pub endpoints: Vec<SocketAddr>,
    /// Number of endpoints beyond the programs' limit; answered from userspace.
    pub omitted_endpoints: usize,
    /// Whether another server has taken over, so that this one no longer follows the interfaces.
    pub taken_over: bool,
    /// Number of times all interfaces were listed.
    pub polls: u64,
    /// The reason why no interface is served although one should be; null while an interface is
    /// served or the gate waits for queries.
    pub unserved: Option<String>,
}

//----------- Programs --------------------------------------------------------

/// The state of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProgramState {
    /// The kernel is verifying it.
    Loading,
    /// The kernel has accepted it.
    Loaded,
    /// The kernel has refused it; it is not tried again.
    Refused,
    /// Loading failed for a possibly temporary reason, such as lack of memory; it is tried again.
    Failed,
}

impl ProgramState {
    /// Returns the label used in metrics and in the status.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Loading => "loading",
            Self::Loaded => "loaded",
            Self::Refused => "refused",
            Self::Failed => "failed",
        }
    }
}

/// The status of a program that was needed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProgramStatus {
    /// Name in the BPF object.
    pub name: Cow<'static, str>,
    /// Whether the program is loaded, and if not, why.
    pub state: ProgramState,
    /// Number of instructions processed by the verifier; null before kernel 5.16.
    pub instructions: Option<u32>,
    /// Total duration of all loading attempts, in milliseconds; null while loading.
    pub load_ms: Option<f64>,
    /// The reason why the program is not loaded.
    pub why: Option<String>,
    /// The last lines of the verifier's log, if the kernel refused the program.
    pub verifier: Vec<String>,
}

//----------- Work ------------------------------------------------------------

/// An operation of the attacher.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Operation {
    /// The thread that follows the interfaces wakes up. Counted only.
    Round,
    /// Lists the interfaces, under the RTNL lock.
    Links,
    /// Lists the addresses.
    Addresses,
    /// Lists the routes.
    Routes,
    /// Looks up one route.
    Route,
    /// Looks for the qdisc or the filters of one interface, under the RTNL lock.
    Filters,
    /// Attaches a program, under the RTNL lock.
    Attach,
    /// Detaches a program, under the RTNL lock.
    Detach,
    /// Reads the packet filter and the IPsec policies.
    Rules,
    /// Walks through the rules for one interface, or for one client of it.
    Walk,
}

impl Operation {
    /// All operations, in order.
    pub const ALL: [Self; 10] = [
        Self::Round,
        Self::Links,
        Self::Addresses,
        Self::Routes,
        Self::Route,
        Self::Filters,
        Self::Attach,
        Self::Detach,
        Self::Rules,
        Self::Walk,
    ];

    /// Returns the label used in metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Round => "round",
            Self::Links => "links",
            Self::Addresses => "addresses",
            Self::Routes => "routes",
            Self::Route => "route",
            Self::Filters => "filters",
            Self::Attach => "attach",
            Self::Detach => "detach",
            Self::Rules => "rules",
            Self::Walk => "walk",
        }
    }
}

/// How often an operation was done, and how long that took in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Effort {
    /// How often.
    pub times: u64,
    /// Nanoseconds, the wait for locks included.
    pub ns: u64,
}

/// The operations of this process so far.
pub type Work = BTreeMap<Operation, Effort>;
