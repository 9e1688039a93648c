//! Data shared by the BPF programs and userspace of `bosh-dns-xdp`: a single definition of every
//! byte in the maps, compiled for both sides.
//!
//! * [`name`]: lower-casing and hashing of wire-format names.
//! * [`entry`]: layout of a published name and its addresses in the store.
//! * [`forwarded`]: layout of forwarded answers and of other whole replies.
//! * [`index`]: the hash table from names to entries.
//! * [`control`]: settings written by the server: lease, seed, tap, shedding.
//! * [`scope`]: settings written by the attaching process: endpoints, VLANs, interfaces.
//! * [`counters`]: packet counters, one element per CPU.
//! * [`tap`]: sampled events for queries that tcpdump cannot see.
#![no_std]

pub mod control;
pub mod counters;
pub mod entry;
pub mod forwarded;
pub mod index;
pub mod name;
pub mod scope;
pub mod tap;

#[cfg(test)]
mod tests;

/// Version of the map layouts in this crate.
///
/// Part of the pin path, so a process never adopts maps with another layout.
// Raised also if only the meaning of a field changes: a successor may read what its predecessor
// wrote.
pub const LAYOUT_VERSION: u32 = 12;

/// Headroom in bytes that the native XDP program may use: the drivers' 256 bytes
/// (`XDP_PACKET_HEADROOM`) less the kernel's own share (`struct xdp_frame`: 40 bytes since Linux
/// 5.18, 32 before) and the header of virtio_net (12 or 20 bytes). Before Linux 6.4 that driver
/// silently drops a reply without room for its header.
// 40 and 20 bytes, rounded up.
pub const XDP_HEAD_ROOM: usize = 256 - 64;

/// UDP payload size announced in the OPT of our replies (RFC 6891, section 6.2.3), which passes all
/// usual paths without fragmentation (RFC 9715, section 3.1).
pub const UDP_PAYLOAD_SIZE: u16 = 1232;

/// Maximum size of a UDP reply without EDNS in bytes (RFC 1035, section 2.3.4), and the least that a size in an OPT means
/// (RFC 6891, section 6.2.5).
pub const MIN_UDP_SIZE: usize = 512;

/// Names of the maps and programs in the object file, as used by the loader and shown by `bpftool`.
pub mod object {
    /// `BPF_MAP_TYPE_ARRAY`, mmap-able, of [`crate::index::Pair`]s: the hash
    /// table from names to entries, see [`crate::index`].
    pub const NAMES: &str = "NAMES";
    /// `BPF_MAP_TYPE_ARRAY`, mmap-able, of [`crate::entry::CHUNK_SIZE`]-byte
    /// chunks that hold the entries.
    pub const ENTRIES: &str = "ENTRIES";
    /// `BPF_MAP_TYPE_ARRAY`, mmap-able, of [`crate::index::Pair`]s: the hash
    /// table from queries to forwarded answers.
    pub const ANSWER_NAMES: &str = "ANSWER_NAMES";
    /// `BPF_MAP_TYPE_ARRAY`, mmap-able, of [`crate::entry::CHUNK_SIZE`]-byte
    /// chunks that hold forwarded answers, see [`crate::forwarded`].
    pub const ANSWER_ENTRIES: &str = "ANSWER_ENTRIES";
    /// `BPF_MAP_TYPE_ARRAY`, mmap-able, one [`crate::control::Control`].
    pub const CONTROL: &str = "CONTROL";
    /// `BPF_MAP_TYPE_ARRAY`, mmap-able, one [`crate::scope::Scope`].
    pub const SCOPE: &str = "SCOPE";
    /// `BPF_MAP_TYPE_HASH` from [`crate::scope::HeardClient`]s to the times until which they count.
    pub const HEARD_CLIENTS: &str = "HEARD_CLIENTS";
    /// `BPF_MAP_TYPE_ARRAY`, mmap-able, one [`crate::counters::CpuCounters`]
    /// per possible CPU.
    pub const COUNTERS: &str = "COUNTERS";
    /// `BPF_MAP_TYPE_RINGBUF` of [`crate::tap::TapEvent`].
    pub const TAP: &str = "TAP";

    /// Global `u8`: 1 if one run of a program may interrupt another on the same CPU, as on kernels
    /// with PREEMPT_RT, else 0. Set before the load.
    pub const PREEMPTIBLE: &str = "PREEMPTIBLE";

    /// The XDP program for native mode.
    pub const XDP_PROGRAM: &str = "dns_xdp";
    /// The tc program (tcx and clsact), at ingress.
    pub const TC_PROGRAM: &str = "dns_tc";
    /// The tc program that builds the reply, tail-called by [`TC_PROGRAM`].
    pub const TC_ANSWER_PROGRAM: &str = "dns_tc_answer";
    /// The shorter tc program that answers until the kernel has verified [`TC_ANSWER_PROGRAM`].
    pub const TC_FIRST_PROGRAM: &str = "dns_tc_first";
    /// The tc program that answers from forwarded answers, tail-called by
    /// [`TC_ANSWER_PROGRAM`].
    pub const TC_FORWARDED_PROGRAM: &str = "dns_tc_forwarded";
    /// The XDP program for native mode that answers from forwarded answers,
    /// tail-called by [`XDP_PROGRAM`].
    pub const XDP_FORWARDED_PROGRAM: &str = "dns_xdp_forwarded";
    /// `BPF_MAP_TYPE_PROG_ARRAY` for the tail call to [`TC_FIRST_PROGRAM`], later [`TC_ANSWER_PROGRAM`].
    pub const TC_ANSWER: &str = "TC_ANSWER";
    /// `BPF_MAP_TYPE_PROG_ARRAY` for the tail call to [`TC_FORWARDED_PROGRAM`].
    pub const TC_FORWARDED: &str = "TC_FORWARDED";
    /// `BPF_MAP_TYPE_PROG_ARRAY` for the tail call to [`XDP_FORWARDED_PROGRAM`].
    pub const XDP_FORWARDED: &str = "XDP_FORWARDED";
}
