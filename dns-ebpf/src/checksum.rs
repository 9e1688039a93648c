//! The internet checksum (RFC 1071).

use crate::{
    bytes::{Span, load, masked, opaque},
    headers::UDP,
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

    /// Creates a sum from one that was folded before.
    #[inline(always)]
    pub fn of(folded: u16) -> Self {
        Self(folded as u64)
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

    /// Adds the sum of a range that began at an even or odd offset.
    #[inline(always)]
    pub fn add_sum(&mut self, other: Sum, odd: bool) {
        let folded = other.fold();
        self.0 += if odd { folded.swap_bytes() } else { folded } as u64;
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
        index = opaque(index + 1);
    }
    let mut at = start + masked(len, 0x1ff8);
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
