//! Privilege separation: a small root process (`bosh-dns-xdp attach`) loads, pins and attaches; the
//! server, which reads from the network, never calls bpf(2).
//!
//! * [`attacher`]: the root process. Its only socket is the one on which the server connects.
//! * [`server`]: the server's side.
//! * [`wire`]: the protocol between them, and the hand-over of the maps' descriptors.
//!
//! Each connection has its own set of programs and maps. After a restart of either process the new
//! connection starts a new set, which takes over from the previous one like a restarted server
//! does. Until then the previous programs keep answering while their lease runs; the server renews
//! it by a plain store, even if the attacher is dead.

pub(super) mod attacher;
pub(super) mod server;
mod wire;
