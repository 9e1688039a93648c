//! What a thread keeps at hand of the caches, so that a hot name costs no more than
//! a comparison. The shared store stays the one that knows what is kept and how long.

use std::{
    cell::RefCell,
    hash::BuildHasher,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::cache::Entry;

/// Places for entries, in each thread that answers from caches.
const PLACES: usize = 512;
/// Largest entry that is kept at hand, bytes: with the places, half a mebibyte a thread.
const MAX_BYTES: usize = 1024;
/// After so many uses the store is asked again, so that it knows what is in use.
const MAX_USES: u8 = 16;

thread_local! {
    /// What this thread has at hand, by hash of the key.
    static PLACES_OF_THREAD: RefCell<Vec<Option<Place>>> = const { RefCell::new(Vec::new()) };
}

/// An entry at hand.
struct Place {
    /// Whose it is, and of which time: see [`Front`].
    cache: (u64, u64),
    /// Its key.
    key: Box<[u8]>,
    /// The entry.
    entry: Arc<Entry>,
    /// How often it was used.
    uses: u8,
}

/// One cache as threads see it.
#[derive(Debug)]
pub(super) struct Front {
    /// Tells caches apart.
    cache: u64,
    /// Goes up when the cache is emptied: what is at hand from before is void.
    emptied: AtomicU64,
    /// Seeded, so that nobody can choose names that collide.
    hasher: foldhash::fast::RandomState,
}

impl Front {
    /// For a new cache.
    pub(super) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self {
            cache: NEXT.fetch_add(1, Ordering::Relaxed),
            emptied: AtomicU64::new(0),
            hasher: foldhash::fast::RandomState::default(),
        }
    }

    /// The entry for `key`: the one at hand if it is still good, else what `store` has.
    pub(super) fn find(&self, key: &[u8], store: impl FnOnce() -> Option<Arc<Entry>>) -> Option<Arc<Entry>> {
        let cache = (self.cache, self.emptied.load(Ordering::Acquire));
        PLACES_OF_THREAD.with_borrow_mut(|places| {
            if places.is_empty() {
                places.resize_with(PLACES, || None);
            }
            let place = &mut places[self.hasher.hash_one(key) as usize % PLACES];
            if let Some(Place { uses, entry, .. }) =
                place.as_mut().filter(|place| place.cache == cache && *place.key == *key)
                && *uses < MAX_USES
                && entry.is_good()
            {
                *uses += 1;
                return Some(Arc::clone(entry));
            }
            let found = store()?;
            if found.is_good() && found.bytes() <= MAX_BYTES {
                *place = Some(Place { cache, key: key.into(), entry: Arc::clone(&found), uses: 0 });
            }
            Some(found)
        })
    }

    /// The cache has been emptied.
    pub(super) fn empty(&self) {
        self.emptied.fetch_add(1, Ordering::Release);
    }
}
