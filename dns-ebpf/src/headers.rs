//! Lengths of headers and records, and the numbers in them.

use dns_common::name::MAX_NAME_LEN;

/// Bytes of an Ethernet header.
pub const ETHERNET_LEN: usize = 14;
/// Bytes of one 802.1Q tag.
pub const VLAN_TAG_LEN: usize = 4;
/// Bytes of an IPv4 header without options.
pub const IPV4_LEN: usize = 20;
/// Offset of the byte after the sender's address in an IPv4 header.
pub const IPV4_SOURCE_END: usize = 16;
/// Bytes of an IPv6 header.
pub const IPV6_LEN: usize = 40;
/// Offset of the byte after the sender's address in an IPv6 header.
pub const IPV6_SOURCE_END: usize = 24;
/// Protocol number of UDP.
pub const UDP: u8 = 17;
/// Bytes of a UDP header.
pub const UDP_LEN: usize = 8;
/// Offset of the checksum in a UDP header.
pub const UDP_SUM: usize = 6;

/// Bytes of a DNS header.
pub const HEADER_LEN: usize = 12;
/// Bytes of QTYPE and QCLASS.
pub const TYPE_CLASS_LEN: usize = 4;
/// Longest question section: a name of maximum length, type and class.
pub const MAX_QUESTION_LEN: usize = MAX_NAME_LEN + TYPE_CLASS_LEN;
/// Bytes of an OPT record without options (RFC 6891, section 6.1.2).
pub const OPT_LEN: usize = 11;
/// Longest query that is parsed; only a query with very many EDNS options is longer.
pub const MAX_QUERY_LEN: usize = 1500;

/// Bytes of an A record whose owner is a pointer to the question's name.
pub const A_LEN: usize = 16;
/// Bytes of an AAAA record whose owner is a pointer to the question's name.
pub const AAAA_LEN: usize = 28;
/// Longest message sent by the programs, in bytes. Longer replies, for clients that accept them,
/// are left to userspace.
pub const MAX_REPLY_LEN: usize = 4096;
