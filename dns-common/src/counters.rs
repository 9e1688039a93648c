//! Packet counters: one mmap-able element per CPU, incremented by the program and read by userspace
//! with plain loads.

use crate::scope::INTERFACES;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

macro_rules! outcomes {
    ($($(#[doc = $doc:literal])+ $variant:ident = $number:literal, $label:literal;)+) => {
        /// The outcome of a packet: answered, dropped, or the reason for passing it to the network
        /// stack.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Outcome {
            $($(#[doc = $doc])+ $variant = $number,)+
        }

        impl Outcome {
            /// Every outcome, in numeric order.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Returns the label used in metrics, status and tap.
            pub const fn label(self) -> &'static str {
                match self {
                    $(Self::$variant => $label,)+
                }
            }

            /// Returns the meaning, for the metrics reference.
            pub const fn about(self) -> &'static str {
                match self {
                    $(Self::$variant => concat!($($doc),+),)+
                }
            }
        }
    };
}

// Numbers are part of the layout: samples of the tap and pinned counters hold them, so a new
// outcome gets the next one.
outcomes! {
    /// Answered completely from an entry.
    Hit = 0, "hit";
    /// Answered from an entry with TC set, because not every address fits.
    HitTruncated = 1, "hit_truncated";
    /// Not a DNS query for this server: not UDP, not one of its endpoints, or not a query.
    NotOurs = 2, "not_ours";
    /// A fragment, IP options, IPv6 extension headers or more than one VLAN tag; at tc also a
    /// checksum whose state (partial or complete) the kernel does not tell.
    Unsupported = 3, "unsupported_header";
    /// IP, UDP and packet lengths disagree, or the message is cut short.
    BadLength = 4, "bad_length";
    /// QR is set: a reply, possibly our own on its way back over `lo`.
    Response = 5, "response";
    /// Opcode, flags or section counts do not match a plain query.
    NotPlain = 6, "not_plain";
    /// The question's name is malformed, compressed or too long.
    BadName = 7, "bad_name";
    /// A class other than IN, or another question that only userspace answers exactly.
    BadType = 8, "unsupported_type";
    /// An additional section that is not one well-formed OPT of version 0.
    BadEdns = 9, "unsupported_edns";
    /// The name is not published.
    NotPublished = 10, "not_published";
    /// An entry has the same hash but another name.
    Collision = 11, "collision";
    /// The lease has expired: userspace hangs or has ended.
    LeaseExpired = 12, "lease_expired";
    /// The packet could not be grown to hold the reply.
    NoRoom = 13, "no_room";
    /// Dropped instead of passed to userspace, which is overloaded
    /// ([`crate::control::Control::shed_until_ns`]).
    Shed = 14, "shed";
    /// A sender that the kernel rejects or no reply can reach: a multicast, broadcast, local or
    /// reserved address, a multicast MAC address, or port 0.
    BadSender = 15, "bad_sender";
    /// A wrong IPv4 or UDP checksum, or a missing UDP checksum over IPv6.
    BadChecksum = 16, "bad_checksum";
    /// The reply may exceed the path's MTU: the route sets one, or the reply has more than 1,232
    /// bytes and goes to another machine.
    LargeReply = 17, "large_reply";
    /// The interface is not served, or does not serve this endpoint.
    NotServed = 18, "not_served";
    /// Passed to the network stack although it could be answered, to test whether the kernel
    /// delivers it.
    Probe = 19, "probe";
    /// The program interrupted another run on the same CPU (PREEMPT_RT).
    Busy = 20, "busy";
    /// Answered from a forwarded answer ([`crate::forwarded`]).
    HitForwarded = 21, "hit_forwarded";
    /// The forwarded answer has reached its TTL.
    AnswerExpired = 22, "answer_expired";
    /// Answered from a local reply of another type.
    HitOther = 23, "hit_other";
    /// The kernel's verdict depends on the client here, and no query of this one has reached userspace lately.
    UnheardClient = 24, "unheard_client";
}

impl Outcome {
    /// Returns whether the program answered.
    pub const fn is_hit(self) -> bool {
        matches!(
            self,
            Self::Hit | Self::HitTruncated | Self::HitForwarded | Self::HitOther
        )
    }
}

/// Number of slots for [`Outcome`]: a power of two, with room to grow.
pub const OUTCOME_SLOTS: usize = 32;

/// Query types with separate reply counters; the rest is [`QueryKind::Other`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum QueryKind {
    /// Queries of type A (1).
    A = 0,
    /// Queries of type AAAA (28).
    Aaaa = 1,
    /// Queries of every other type.
    Other = 2,
    /// Queries of type ANY (255).
    Any = 3,
}

/// Number of slots for [`QueryKind`], a power of two.
pub const KIND_SLOTS: usize = 4;

/// Number of RCODEs with separate reply counters: slots in [`CpuCounters::replies`].
// 0 to 3: the programs send NOERROR, FORMERR and NXDOMAIN (RFC 1035, section 4.1.1).
pub const RCODE_SLOTS: usize = 4;

/// Element of the `COUNTERS` map: the counts of one CPU since the programs were loaded.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
// Aligned to a cache line, so that no two CPUs write to the same one.
#[repr(C, align(64))]
pub struct CpuCounters {
    /// Number of packets by [`Outcome`].
    pub outcomes: [u64; OUTCOME_SLOTS],
    /// Number of replies by [`QueryKind`] and RCODE (0..4).
    pub replies: [[u64; RCODE_SLOTS]; KIND_SLOTS],
    /// Total DNS message bytes of answered queries.
    pub query_bytes: u64,
    /// Total DNS message bytes of replies.
    pub reply_bytes: u64,
    // `interface_hits` then begins at a line of its own.
    /// Padding to the cache line, always zero.
    pub padding: [u64; 6],
    /// Number of replies by the interface's slot in [`crate::scope::Scope::interfaces`].
    pub interface_hits: [u64; INTERFACES],
}
