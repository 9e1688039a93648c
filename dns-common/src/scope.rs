//! Scope of the programs: endpoints, VLANs and interfaces, in one mmap-able element.
//!
//! Only the process that attaches the programs writes this map. The server never receives it, so a
//! compromised server cannot extend its scope. The programs write only the [`Probe`]s.
//!
//! Slots are reused in three steps with an RCU grace period between them: clear the word that marks
//! the slot as valid, write the rest, set the word again. A program run that still reads the old
//! word ends before the rest changes; a run that reads the new word began after the rest was
//! visible to every CPU, regardless of the architecture's load order.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Maximum number of served endpoints. Queries to further ones are answered by userspace.
// The programs compare a packet's destination with each in turn.
pub const MAX_ENDPOINTS: usize = 16;

/// Number of words in [`Scope::vlans`], a power of two.
pub const VLAN_WORDS: usize = 4096 / 64;

/// Number of slots in [`Scope::interfaces`], a power of two.
pub const INTERFACES: usize = 2048;

/// Number of slots, from [`Scope::first_slot`] on, in which an interface may be stored.
pub const INTERFACE_TRIES: usize = 16;

/// Number of words in [`Scope::refused_sources`], a power of two.
// 32 KiB, of which a packet touches one line.
pub const SOURCE_WORDS: usize = 4096;

/// Index of `lo` in every network namespace (`LOOPBACK_IFINDEX`, kernel 2.6.39).
pub const LOOPBACK_IFINDEX: u32 = 1;

/// The single element of the `SCOPE` map.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Scope {
    /// Number of leading slots of `endpoints` that may be in use.
    pub endpoint_slots: u32,
    /// Padding to the next 8 bytes, always zero.
    pub padding: u32,
    /// Endpoints of the server. An endpoint keeps its slot as long as it is served.
    pub endpoints: [Endpoint; MAX_ENDPOINTS],
    /// VLANs whose frames are answered: bit `id` of 4,096.
    pub vlans: [u64; VLAN_WORDS],
    /// Bloom filter, by [`source_hash`], of the addresses that the kernel accepts only from this
    /// machine: local and broadcast addresses. A client that it contains by chance, one in 20,000
    /// beside 1,000 such addresses, is answered in userspace.
    pub refused_sources: [u64; SOURCE_WORDS],
    /// Interfaces on which the programs answer.
    pub interfaces: [Interface; INTERFACES],
}

/// An address and port on which the server listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Endpoint {
    /// Address in network order, IPv4 as `::ffff:a.b.c.d`. Never a wildcard.
    pub address: [u8; 16],
    /// Port in network order.
    pub port: [u8; 2],
    /// IP version, 4 or 6; 0: the slot is empty.
    pub family: u8,
    /// Padding to the next 8 bytes, always zero.
    pub padding: [u8; 5],
}

/// An interface on which the programs answer.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Interface {
    /// Interface index; 0: the slot is empty.
    pub ifindex: u32,
    /// Bit set of [`NEAR`] and [`BOUNDED`].
    pub flags: u32,
    /// Endpoints to which the kernel delivers from this interface: bit `index` of
    /// [`Scope::endpoints`].
    pub endpoints: u64,
    /// The endpoints among them at which only heard clients ([`HeardClient`]) are answered, because the kernel's verdict
    /// depends on the client.
    pub heard_only: u64,
    /// Ethernet address, followed by two zero bytes.
    pub address: [u8; 8],
    /// Ethernet address of the bridge or bond that the interface belongs to, or else its own.
    pub master: [u8; 8],
    /// Probes sent through this interface, by endpoint.
    pub probes: [Probe; MAX_ENDPOINTS],
}

/// Key of the map `HEARD_CLIENTS`: a client whose own queries have reached the server's socket through this
/// interface. The value is the time until which that counts, in nanoseconds of `CLOCK_MONOTONIC`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct HeardClient {
    /// Interface index.
    pub ifindex: u32,
    // Four bytes, so that the key has no padding: a hash map compares every byte.
    /// Slot of the endpoint.
    pub endpoint: u32,
    /// Address in network order, IPv4 as `::ffff:a.b.c.d`.
    pub address: [u8; 16],
}

/// Maximum number of heard clients. Further ones are answered by userspace.
pub const MAX_HEARD_CLIENTS: u32 = 16_384;

/// Lowest source port of a heard client: rules distinguish the ports below, which need a privilege.
pub const MIN_HEARD_PORT: u16 = 1024;

/// Flag of [`Interface::flags`]: all traffic on this interface comes from this machine, so replies
/// may exceed 1,232 bytes.
pub const NEAR: u32 = 1;

/// Flag of [`Interface::flags`]: a route through this interface sets an MTU. `bpf_fib_lookup` does
/// not always respect it, so replies of more than 576 bytes are left to userspace.
pub const BOUNDED: u32 = 2;

/// Probes: queries for published names passed to the network stack to test whether the kernel
/// delivers them.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(8))]
pub struct Probe {
    /// Due time of the next probe, in nanoseconds of `CLOCK_MONOTONIC`.
    pub due_ns: u64,
    /// Number of probes. Two CPUs may count the same one.
    pub count: u64,
    /// Address of the last probe's client in network order, IPv4 as `::ffff:a.b.c.d`.
    pub client: [u8; 16],
}

/// One in this many queries becomes a probe once one is due, so that a client with few queries loses
/// hardly any after the server was killed. A power of two.
pub const PROBE_SHARE: u32 = 4;

/// Minimum time between two probes in nanoseconds.
pub const PROBE_INTERVAL_NS: u64 = 1_000_000_000;

impl Scope {
    /// Returns the slot at which the search for an interface begins.
    #[inline(always)]
    pub const fn first_slot(ifindex: u32) -> usize {
        ifindex as usize % INTERFACES
    }

    /// Returns the word index and bit of a VLAN in [`Self::vlans`]. `tag` is in host order; its
    /// priority bits are ignored.
    #[inline(always)]
    pub const fn vlan(tag: u16) -> (usize, u64) {
        (tag as usize / 64 % VLAN_WORDS, 1 << (tag % 64))
    }

    /// Returns the word index and the three bits (some may be equal) of a hash in
    /// [`Self::refused_sources`]: a single load decides.
    #[inline(always)]
    pub const fn refused_source(hash: u32) -> (usize, u64) {
        // Bits 0 to 17 choose those in the word, 20 to 31 the word itself: none counts twice.
        let bits = 1 << (hash % 64) | 1 << (hash / 64 % 64) | 1 << (hash / 4096 % 64);
        (hash as usize >> 20 & (SOURCE_WORDS - 1), bits)
    }
}

/// Returns the hash of a sender's address, given as four words in memory order; IPv4 fills only the
/// last one.
#[inline(always)]
pub const fn source_hash(words: [u32; 4]) -> u32 {
    let [a, b, c, d] = words;
    // Products with odd constants carry upwards only, so the upper bits are mixed into the lower ones.
    let sum = a
        .wrapping_mul(0x85eb_ca6b)
        .wrapping_add(b.wrapping_mul(0xc2b2_ae35))
        .wrapping_add(c.wrapping_mul(0x27d4_eb2f))
        .wrapping_add(d.wrapping_mul(0x9e37_79b9));
    let sum = (sum ^ sum >> 15).wrapping_mul(0x2c1b_3c6d);
    sum ^ sum >> 16
}
