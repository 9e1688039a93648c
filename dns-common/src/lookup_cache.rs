//! Where a CPU found the entries that were asked for last.
//!
//! Two cache lines lead to an answer, one of the index and the first one of the
//! entry, and where many names are asked in turn both come from far away, one after
//! the other. A slot leads to the entry itself; all slots of a CPU stay in its second
//! cache. Nobody keeps them true: an entry tells by its hash whether it lives
//! ([`crate::entry`]), and where it does not, the index is asked.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::entry::{Location, MAX_CELLS};

/// Places of a CPU: 8 KiB. A power of two.
pub const LOOKUP_CACHE_SLOTS: usize = 1024;

/// The two names that were found last of those whose hash leads to one place.
///
/// Each half is a [`Location`] and, above it, some bits of the hash, so that most
/// other names do not follow it. All zeros: locations like others, and most likely false.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct CachedLocations(u64);

impl CachedLocations {
    /// Which of the [`LOOKUP_CACHE_SLOTS`] is that of this hash.
    #[inline(always)]
    pub const fn slot(hash: u64) -> usize {
        hash as usize & (LOOKUP_CACHE_SLOTS - 1)
    }

    /// Where the entry of the name with this hash may lie.
    #[inline(always)]
    pub fn location(self, hash: u64) -> Option<Location> {
        let (last, earlier) = (self.0 as u32 ^ tag(hash), (self.0 >> 32) as u32 ^ tag(hash));
        // Where the tags are equal, the location is left.
        let found = if last < MAX_CELLS { last } else { earlier };
        (found < MAX_CELLS).then_some(Location(found))
    }

    /// The same with one more: the entry of the name with this hash lies there.
    #[inline(always)]
    pub const fn with(self, hash: u64, location: Location) -> Self {
        let half = location.0 & (MAX_CELLS - 1) | tag(hash);
        Self(self.0 << 32 | half as u64)
    }
}

/// Bits of the hash that have no part in [`CachedLocations::slot`], where no location has any.
#[inline(always)]
const fn tag(hash: u64) -> u32 {
    (hash >> 32) as u32 & !(MAX_CELLS - 1)
}

const _: () = assert!(LOOKUP_CACHE_SLOTS.is_power_of_two() && MAX_CELLS.is_power_of_two());

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_last_two_names_of_a_place_are_remembered(
            hashes: [u64; 3],
            locations in prop::array::uniform3(0..MAX_CELLS),
        ) {
            let pairs = || hashes.into_iter().zip(locations.map(Location));
            let cached = pairs().fold(CachedLocations(0), |cached, (hash, location)| cached.with(hash, location));
            let last_of = |hash| pairs().rfind(|&(other, _)| tag(other) == tag(hash));
            for (hash, location) in pairs().skip(1) {
                // Of two with one tag the later one is.
                let expected = last_of(hash).map_or(location, |(_, location)| location);
                prop_assert_eq!(cached.location(hash), Some(expected));
            }
        }

        #[test]
        fn most_other_names_follow_no_slot(hash: u64, other: u64, location in 0..MAX_CELLS) {
            let cached = CachedLocations(0).with(hash, Location(location)).with(hash, Location(location));
            prop_assert_eq!(cached.location(other).is_some(), tag(hash) == tag(other));
        }
    }
}
