//! Constants of the wire format, and functions to read numbers.

/// Length of the header (RFC 1035, section 4.1.1).
pub(crate) const HEADER_LEN: usize = 12;
/// Type OPT (RFC 6891).
pub(crate) const TYPE_OPT: u16 = 41;
pub(crate) const TYPE_SOA: u16 = 6;

/// Reads two bytes at `at`; `None` past the end.
pub(crate) fn u16_at(message: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*message.get(at..)?.first_chunk()?))
}

/// Reads four bytes at `at`; `None` past the end.
pub(crate) fn u32_at(message: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*message.get(at..)?.first_chunk()?))
}
