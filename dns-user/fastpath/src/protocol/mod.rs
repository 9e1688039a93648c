//! Messages between the server and the attacher on a unix socket: one byte that carries the maps' descriptors,
//! then lines of JSON.
//!
//! * [`status`]: what the attacher reports about interfaces, programs and its own work.
//! * [`transport`]: descriptors and lines.
//!
//! The attacher takes its side of the protocol from here, and the pages that both processes map from [`crate::map`].

mod status;
mod transport;

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use serde::{Deserialize, Serialize};

pub use self::{
    status::{
        Effort, Hook, InterfaceState, InterfaceStatus, InterfacesStatus, Operation, ProgramState,
        ProgramStatus, Work,
    },
    transport::{Lines, is_nothing_yet, peer, receive_descriptors, send, send_descriptors},
};
use crate::map::Shape;
pub use crate::publish::table::Limits;

/// Number of maps that a server needs.
pub const SHARED_MAPS: usize = 7;

/// Number of queries within ten seconds that justify a program on an interface.
pub const MIN_QUERIES: u32 = 5;

/// Maximum number of clients in an [`Arrival`].
pub const MAX_CLIENTS: usize = 32;

/// The server's first line.
#[derive(Debug, Serialize, Deserialize)]
pub struct Request {
    /// Layout of the maps expected by the server ([`dns_common::LAYOUT_VERSION`]).
    pub layout: u32,
    /// Addresses on which the server listens.
    pub listen: Vec<SocketAddr>,
}

/// The attacher's reply to [`Request`]; the maps' descriptors precede it.
#[derive(Debug, Serialize, Deserialize)]
pub enum Response {
    /// The maps were sent.
    Maps {
        /// Shapes of `NAMES`, `ENTRIES`, `ANSWER_NAMES`, `ANSWER_ENTRIES`, `CONTROL`, `COUNTERS`, and `TAP`.
        shapes: Vec<Shape>,
        /// Shapes of a predecessor's `NAMES` and `ENTRIES`; empty without one.
        earlier: Vec<Shape>,
        /// How much the maps hold.
        limits: Limits,
    },
    /// The attacher sends no maps, for this reason.
    Refused(String),
}

/// Messages from the server after its request.
#[derive(Debug, Serialize, Deserialize)]
pub enum ServerMessage {
    /// The server listens on exactly these addresses.
    Listen(Vec<SocketAddr>),
    /// Queries that reached the server's sockets.
    Arrived(Vec<Arrival>),
    /// The maps are filled: attach the programs.
    Filled,
    /// Report the end of an RCU grace period.
    Grace,
    /// Ends the session. If the connection ends without it, the server has died and its programs stay.
    Stop {
        /// Whether the programs are detached.
        detach: bool,
    },
}

/// Queries that reached the server's sockets since its last report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arrival {
    /// Index of the receiving interface.
    pub ifindex: u32,
    /// Destination address and port.
    pub endpoint: SocketAddr,
    /// Number of queries for names that the server answers locally.
    pub queries: u32,
    /// Their senders, at most [`MAX_CLIENTS`].
    pub clients: Vec<IpAddr>,
    /// Whether senders were omitted.
    pub more: bool,
}

/// Messages from the attacher after its response.
#[derive(Debug, Serialize, Deserialize)]
pub enum AttacherMessage {
    /// The state has changed.
    Status(AttacherStatus),
    /// The grace period has ended; whether the kernel confirmed it.
    GraceOver(bool),
    /// Sent every two seconds: a stopped attacher keeps its connection open.
    Watching {
        /// The time of the last complete look at interfaces, rules and probes, in ns of the kernel's CLOCK_MONOTONIC.
        at_ns: u64,
        /// Progress of the attacher.
        work: Work,
    },
}

/// The state of interfaces and programs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AttacherStatus {
    /// The interfaces and endpoints at which queries are answered.
    pub interfaces: InterfacesStatus,
    /// The programs needed so far.
    pub programs: Vec<ProgramStatus>,
    /// Whether all interfaces present at the start have been processed.
    pub ready: bool,
    /// The path below which links and maps are pinned.
    pub pinned_at: Option<PathBuf>,
}
