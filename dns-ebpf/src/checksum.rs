//! The internet checksum (RFC 1071).

use crate::{
    bytes::{Span, barrier, barrier_and, load},
    frame::UDP,
};

/// A partial one's complement sum. Words are added in memory order, so no byte swap is needed (RFC
/// 1071, section 2B).
#[derive(Clone, Copy)]
pub struct Sum(u64);

impl Sum {
    #[inline(always)]
    pub fn new() -> Self {
        Self(0)
    }

    /// Creates a sum from the number returned by [`Self::raw`] or [`Self::fold`].
    #[inline(always)]
    pub fn of(raw: u64) -> Self {
        Self(raw)
    }

    /// Returns the sum, not folded.
    #[inline(always)]
    pub fn raw(self) -> u64 {
        self.0
    }

    /// Adds four bytes `times` times, at most 2^16.
    #[inline(always)]
    pub fn add_times(&mut self, half: u32, times: usize) {
        self.0 += half as u64 * times as u64;
    }

    /// Adds eight bytes. The sum has room for 2^31 such additions.
    #[inline(always)]
    pub fn add(&mut self, word: u64) {
        self.0 += (word & 0xffff_ffff) + (word >> 32);
    }

    /// Returns the sum of two words, each added `times` times, at most 2^16.
    #[inline(always)]
    pub fn repeated(first: u64, second: u64, times: usize) -> Self {
        let mut once = Self(0);
        once.add(first);
        once.add(second);
        Self(once.0 * times as u64)
    }

    #[inline(always)]
    pub fn add_half(&mut self, half: u32) {
        self.0 += half as u64;
    }

    /// Adds length and protocol of the UDP pseudo-header.
    #[inline(always)]
    pub fn add_pseudo_tail(&mut self, udp_len: usize) {
        self.0 += (udp_len as u16).to_be() as u64 + u16::from_ne_bytes([0, UDP]) as u64;
    }

    /// Adds the sum of a range that began at an even or odd offset: below 2^55.
    #[inline(always)]
    pub fn add_sum(&mut self, other: Sum, is_odd: bool) {
        // 2^16 is 1 modulo 65,535, so a factor of 2^8 swaps the bytes of every half-word (RFC 1071,
        // section 2B).
        self.0 += other.0 << (8 * is_odd as u32);
    }

    /// Returns whether a range with this sum, which includes its checksum, has the right checksum.
    /// The sum must not be zero.
    #[inline(always)]
    pub fn is_right(self) -> bool {
        // Then it is a multiple of 65,535, an odd number, and its product with that number's inverse
        // modulo 2^64 is small (Hacker's Delight, section 10-17). Cheaper than folding.
        self.0.wrapping_mul(INVERSE) <= u64::MAX / 0xffff
    }

    /// Returns whether the folded sum would be `folded`. Neither is zero.
    #[inline(always)]
    pub fn folds_to(self, folded: u16) -> bool {
        Self(self.0 + (!folded) as u64).is_right()
    }

    /// Folds the sum to 16 bits.
    #[inline(always)]
    pub fn fold(self) -> u16 {
        let mut sum = (self.0 & 0xffff_ffff) + (self.0 >> 32);
        sum = (sum & 0xffff) + (sum >> 16);
        sum = (sum & 0xffff) + (sum >> 16);
        sum = (sum & 0xffff) + (sum >> 16);
        sum as u16
    }

    /// Returns the checksum in its stored form.
    #[inline(always)]
    pub fn finish(self) -> u16 {
        !self.fold()
    }
}

/// The inverse of 65,535 modulo 2^64.
const INVERSE: u64 = {
    // 65,535 * (1 + 2^16) is -1 modulo 2^32; one more factor extends that to 2^64.
    let inverse = 0u64.wrapping_sub(1 + (1 << 16)).wrapping_mul(1 + (1 << 32));
    assert!(inverse.wrapping_mul(0xffff) == 1);
    inverse
};

/// Sums the first `len` bytes of `span`, at most eight times `WORDS`.
#[inline(always)]
pub fn sum_bytes<const WORDS: usize>(span: Span, len: usize) -> Option<Sum> {
    let Span { start, end } = span;
    let mut sum = Sum::new();
    let full = len >> 3;
    let mut index = 0;
    while index < WORDS {
        let at = start + index * 8;
        if index >= full || at + 8 > end {
            break;
        }
        // SAFETY: just compared with the end.
        sum.add(unsafe { load(at) });
        index = barrier(index + 1);
    }
    let mut at = start + barrier_and(len, 0x1ff8);
    if len & 4 != 0 {
        if at + 4 > end {
            return None;
        }
        // SAFETY: just compared with the end.
        sum.add(unsafe { load::<u32>(at) } as u64);
        at += 4;
    }
    if len & 2 != 0 {
        if at + 2 > end {
            return None;
        }
        // SAFETY: just compared with the end.
        sum.add(unsafe { load::<u16>(at) } as u64);
        at += 2;
    }
    if len & 1 != 0 {
        if at + 1 > end {
            return None;
        }
        // SAFETY: just compared with the end.
        sum.add(unsafe { load::<u8>(at) } as u64);
    }
    Some(sum)
}
