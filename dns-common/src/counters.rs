//! What became of the packets, counted per CPU by the program in an mmap-able
//! array: read by userspace with plain loads.

use crate::scope::INTERFACES;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

macro_rules! outcomes {
    ($($(#[doc = $doc:literal])+ $variant:ident = $number:literal, $label:literal;)+) => {
        /// What became of a packet: answered, or why it went up.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Outcome {
            $($(#[doc = $doc])+ $variant = $number,)+
        }

        impl Outcome {
            /// All of them, in the order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Label in metrics, status and tap.
            pub const fn label(self) -> &'static str {
                match self {
                    $(Self::$variant => $label,)+
                }
            }
        }
    };
}

outcomes! {
    /// Answered from an entry, complete.
    Hit = 0, "hit";
    /// Answered from an entry with TC set: more addresses than fit.
    HitTruncated = 1, "hit_truncated";
    /// Not for us: no UDP, or none of our addresses and ports. Not a query.
    NotOurs = 2, "not_ours";
    /// A fragment, IP options, IPv6 extension headers, more than one VLAN tag; at generic
    /// XDP a checksum that may be finished or not.
    Unsupported = 3, "unsupported_header";
    /// IP, UDP and packet lengths disagree, or the message is cut short.
    BadLength = 4, "bad_length";
    /// QR is set: a reply, perhaps our own on its way back over `lo`.
    Response = 5, "response";
    /// Opcode, flags or section counts that are not of a plain query.
    NotPlain = 6, "not_plain";
    /// The question's name is malformed, compressed or too long.
    BadName = 7, "bad_name";
    /// Type ANY, class other than IN, and whatever else userspace words better.
    BadType = 8, "unsupported_type";
    /// An additional section that is not one well-formed OPT of version 0.
    BadEdns = 9, "unsupported_edns";
    /// The name is not published.
    NotPublished = 10, "not_published";
    /// The hash is there but the name differs: a collision.
    Collision = 11, "collision";
    /// The lease has run out: userspace hangs or is gone.
    LeaseExpired = 12, "lease_expired";
    /// The packet could not be grown to hold the reply.
    NoRoom = 13, "no_room";
    /// Dropped in the place of going up: userspace has more queries than it can answer
    /// ([`crate::control::Control::shed_until_ns`]).
    Shed = 14, "shed";
    /// A sender that the kernel refuses or no reply reaches: a multicast, broadcast, local or
    /// reserved address, a MAC address of many, port 0.
    BadSender = 15, "bad_sender";
    /// A wrong checksum of IPv4 or UDP, or none of UDP over IPv6.
    BadChecksum = 16, "bad_checksum";
    /// The reply may be too long for its way back: the route's MTU decides, or more than 1,232
    /// bytes would go to another machine.
    LargeReply = 17, "large_reply";
    /// The interface is not served, or not for this endpoint.
    NotServed = 18, "not_served";
    /// Let up although it could be answered, to see whether the kernel delivers it.
    Probe = 19, "probe";
    /// The run interrupted another one on the same CPU (PREEMPT_RT).
    Busy = 20, "busy";
}

/// Slots for [`Outcome`], a power of two with room to grow.
pub const OUTCOME_SLOTS: usize = 32;

/// Types whose replies are counted one by one; the rest is [`QueryKind::Other`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum QueryKind {
    /// Queries of type A (1).
    A = 0,
    /// Queries of type AAAA (28).
    Aaaa = 1,
    /// Queries of every other type.
    Other = 2,
}

/// Slots for [`QueryKind`], a power of two.
pub const KIND_SLOTS: usize = 4;

/// RCODEs that the program can give: slots in [`CpuCounters::replies`].
pub const RCODE_SLOTS: usize = 4;

/// One element of the `COUNTERS` map: what one CPU has counted since load.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(64))]
pub struct CpuCounters {
    /// Packets by [`Outcome`].
    pub outcomes: [u64; OUTCOME_SLOTS],
    /// Replies by [`QueryKind`] (0..3) and RCODE (0..4).
    pub replies: [[u64; RCODE_SLOTS]; KIND_SLOTS],
    /// Bytes of DNS message in queries that were answered.
    pub query_bytes: u64,
    /// Bytes of DNS message in replies.
    pub reply_bytes: u64,
    /// Explicit padding, zero.
    pub padding: [u64; 6],
    /// Replies by interface, by its slot in [`crate::scope::Scope::interfaces`].
    pub interface_hits: [u64; INTERFACES],
}
