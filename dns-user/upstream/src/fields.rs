//! Numbers in messages: what they are called, and reading them.

/// Bytes of the header (RFC 1035, section 4.1.1).
pub(crate) const HEADER_LEN: usize = 12;
/// Type OPT (RFC 6891).
pub(crate) const TYPE_OPT: u16 = 41;
pub(crate) const TYPE_SOA: u16 = 6;

/// A number of two bytes at `at`, if the message reaches that far.
pub(crate) fn u16_at(message: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*message.get(at..)?.first_chunk()?))
}

/// A number of four bytes at `at`, if the message reaches that far.
pub(crate) fn u32_at(message: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*message.get(at..)?.first_chunk()?))
}
