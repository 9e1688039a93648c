//! The `NAMES` map by system calls: a reader and writer for tests, independent of the publisher's.

use std::borrow::{Borrow, BorrowMut};

use anyhow::{Context as _, Result};
use aya::maps::{Array, Map, MapData};
use dns_common::{
    entry::Location,
    index::{self, BUCKET_SLOTS, Bucket, Pair, WORD_SLOTS},
};

/// Words of 8 bytes per map element.
const WORDS: usize = size_of::<Pair>() / 8;

pub struct Names<T>(Array<T, [u64; WORDS]>);

impl Names<MapData> {
    /// Opens a pinned map.
    pub fn from_pin(map: MapData) -> Result<Self> {
        Ok(Self(Map::Array(map).try_into()?))
    }
}

impl<'a> Names<&'a mut MapData> {
    /// Opens the map of a loaded object; an empty map is initialised as the largest table that
    /// fits.
    pub fn of(map: &'a mut Map) -> Result<Self> {
        let mut names = Self(map.try_into()?);
        if names.pairs()? == 0 {
            let mut root = [0; WORDS];
            root[0] = u64::from(names.0.len() / 2);
            names.0.set(0, root, 0).context("cannot write to NAMES")?;
        }
        Ok(names)
    }
}

impl<T: Borrow<MapData>> Names<T> {
    /// Returns the locations that may hold the entry for this hash.
    pub fn get(&self, hash: u64) -> Result<Vec<Location>> {
        let Pair(buckets) = self.pair(hash)?;
        let cells = buckets.iter().flat_map(|bucket| {
            let cell = |slot: usize| Location(bucket.cells[slot]);
            (0..BUCKET_SLOTS)
                .filter(|&slot| tag(bucket, slot) == index::tag(hash))
                .map(cell)
        });
        Ok(cells.collect())
    }

    fn pairs(&self) -> Result<u32> {
        Ok(u32::try_from(self.0.get(&0, 0)?[0])?)
    }

    /// Returns the pair of buckets for this hash.
    fn pair(&self, hash: u64) -> Result<Pair> {
        Ok(zerocopy::transmute!(
            self.0.get(&index::element(hash, self.pairs()?), 0)?
        ))
    }
}

impl<T: BorrowMut<MapData>> Names<T> {
    /// Empties the table but keeps its size.
    pub fn clear(&mut self) -> Result<()> {
        // Element 0 is the root, which holds the size of the table.
        for element in 1..self.0.len() {
            self.0
                .set(element, [0; WORDS], 0)
                .context("cannot write to NAMES")?;
        }
        Ok(())
    }

    /// Stores `location` for this hash, replacing `old` if given.
    pub fn set(&mut self, hash: u64, location: Location, old: Option<Location>) -> Result<()> {
        let mut pair = self.pair(hash)?;
        let preferred = index::preferred_bucket(hash);
        let taken = |&(bucket, slot): &(usize, usize)| {
            let bucket: &Bucket = &pair.0[bucket];
            tag(bucket, slot) == index::tag(hash) && old == Some(Location(bucket.cells[slot]))
        };
        let free = |&(bucket, slot): &(usize, usize)| tag(&pair.0[bucket], slot) == 0;
        let slots = || {
            let buckets = [preferred, 1 - preferred].into_iter();
            buckets.flat_map(|bucket| (0..BUCKET_SLOTS).map(move |slot| (bucket, slot)))
        };
        let there = slots().find(taken);
        let place = there.or_else(|| slots().find(free));
        let (bucket, slot) = place.context("no room in NAMES")?;
        if there.is_none() && bucket != preferred {
            let word = &mut pair.0[preferred].tags[1];
            *word = index::with_overflow(*word);
        }
        let bucket = &mut pair.0[bucket];
        bucket.cells[slot] = location.0;
        bucket.tags[slot / WORD_SLOTS] |= u64::from(index::tag(hash)) << (8 * (slot % WORD_SLOTS));
        let element = index::element(hash, self.pairs()?);
        let words: [u64; WORDS] = zerocopy::transmute!(pair);
        self.0
            .set(element, words, 0)
            .context("cannot write to NAMES")
    }
}

fn tag(bucket: &Bucket, slot: usize) -> u8 {
    bucket.tags[slot / WORD_SLOTS].to_le_bytes()[slot % WORD_SLOTS]
}
