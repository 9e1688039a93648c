//! Where a CPU found the entries that were asked for last.
//!
//! Two cache lines lead to an answer, one of the index and the first one of the
//! entry, and where many names are asked in turn both come from far away, one after
//! the other. A hint leads to the entry itself; all hints of a CPU fit in its second
//! cache. Nobody keeps them true: an entry tells by its hash whether it lives
//! ([`crate::entry`]), and where it does not, the index is asked.

use crate::entry::{Location, MAX_CELLS};

/// Hints of one CPU: 16 KiB of them. A power of two.
pub const HINTS: usize = 4096;

/// A [`Location`] and, above it, some bits of the hash of the name that has its entry
/// there, so that most other names do not follow it. All zeros: any hint like others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Hint(u32);

impl Hint {
    /// The entry of the name with this hash lies there.
    #[inline(always)]
    pub const fn new(hash: u64, location: Location) -> Self {
        Self(location.0 & (MAX_CELLS - 1) | Self::tag(hash))
    }

    /// Which of the [`HINTS`] is that of this hash.
    #[inline(always)]
    pub const fn place(hash: u64) -> usize {
        hash as usize & (HINTS - 1)
    }

    /// Where the entry of the name with this hash may lie.
    #[inline(always)]
    pub fn location(self, hash: u64) -> Option<Location> {
        ((self.0 ^ Self::tag(hash)) < MAX_CELLS).then_some(Location(self.0 & (MAX_CELLS - 1)))
    }

    /// Bits of the hash that have no part in [`Self::place`], where no location has any.
    #[inline(always)]
    const fn tag(hash: u64) -> u32 {
        (hash >> 32) as u32 & !(MAX_CELLS - 1)
    }
}

const _: () = assert!(HINTS.is_power_of_two() && HINTS as u64 <= 1 << 32 && MAX_CELLS.is_power_of_two());

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_hint_leads_its_own_name_to_the_entry(hash: u64, location in 0..MAX_CELLS) {
            prop_assert_eq!(Hint::new(hash, Location(location)).location(hash), Some(Location(location)));
        }

        #[test]
        fn most_other_names_do_not_follow_it(hash: u64, other: u64, location in 0..MAX_CELLS) {
            let followed = Hint::new(hash, Location(location)).location(other).is_some();
            prop_assert_eq!(followed, Hint::tag(hash) == Hint::tag(other));
        }
    }
}
