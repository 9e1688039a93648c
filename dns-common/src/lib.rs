//! What the BPF programs and the userspace of `bosh-dns-xdp` share: one
//! definition of every byte that crosses the border, compiled for both sides.
//!
//! * [`name`]: lower-casing and hashing of wire-format names.
//! * [`entry`]: how a published name and its addresses lie in the store.
//! * [`index`]: the hash table by which the program finds it.
//! * [`control`]: what the server tells the programs: lease, seed, tap, shedding.
//! * [`scope`]: what the attaching process tells them: endpoints, VLANs, interfaces.
//! * [`counters`]: what the program tells userspace: one slot per CPU.
//! * [`reset`]: for the bench of the programs alone.
//! * [`generator`]: for the benches' load.
//! * [`tap`]: the sampled events that show what tcpdump cannot see.
#![no_std]

pub mod control;
pub mod counters;
pub mod entry;
pub mod generator;
pub mod index;
pub mod name;
pub mod reset;
pub mod scope;
pub mod tap;

/// Version of everything in this crate that lies in a map.
///
/// Part of the pin path: a process never adopts maps of another layout.
pub const LAYOUT_VERSION: u32 = 8;

/// Room before a packet that the XDP program for drivers makes use of, in bytes: what
/// drivers keep there for XDP (256 bytes, `XDP_PACKET_HEADROOM`) less what the kernel
/// keeps of it for itself (`struct xdp_frame`: 40 bytes since Linux 5.18, 32 before).
pub const XDP_HEAD_ROOM: usize = 256 - 40;

/// Size of datagram that our replies announce in their OPT (RFC 6891, section 6.2.3): what
/// passes every usual path without fragments (RFC 9715, section 3.1).
pub const UDP_PAYLOAD_SIZE: u16 = 1232;

/// Names of the maps and programs inside the object, used by the loader and by
/// whoever looks with `bpftool`.
pub mod object {
    /// `BPF_MAP_TYPE_ARRAY`, mmap-able, of [`crate::index::Pair`]s: the hash
    /// table from names to entries, see [`crate::index`].
    pub const NAMES: &str = "NAMES";
    /// `BPF_MAP_TYPE_ARRAY`, mmap-able, of [`crate::entry::CHUNK_SIZE`]-byte
    /// chunks that hold the entries.
    pub const ENTRIES: &str = "ENTRIES";
    /// `BPF_MAP_TYPE_ARRAY`, mmap-able, one [`crate::control::Control`].
    pub const CONTROL: &str = "CONTROL";
    /// `BPF_MAP_TYPE_ARRAY`, mmap-able, one [`crate::scope::Scope`].
    pub const SCOPE: &str = "SCOPE";
    /// `BPF_MAP_TYPE_ARRAY`, mmap-able, one [`crate::counters::CpuCounters`]
    /// per possible CPU.
    pub const COUNTERS: &str = "COUNTERS";
    /// `BPF_MAP_TYPE_RINGBUF` of [`crate::tap::TapEvent`].
    pub const TAP: &str = "TAP";

    /// The XDP program for drivers (native mode).
    pub const XDP_PROGRAM: &str = "dns_xdp";
    /// The XDP program for generic mode, where the kernel has made an skb already.
    pub const XDP_GENERIC_PROGRAM: &str = "dns_xdp_generic";
    /// The tc program (tcx and clsact), at ingress.
    pub const TC_PROGRAM: &str = "dns_tc";
    /// The tc program that answers what that one found to be for us.
    pub const TC_ANSWER_PROGRAM: &str = "dns_tc_answer";
    /// `BPF_MAP_TYPE_PROG_ARRAY` by which it is called.
    pub const TC_ANSWER: &str = "TC_ANSWER";
}
