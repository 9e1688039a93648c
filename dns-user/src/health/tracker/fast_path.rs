//! The tracker and the fast path, seen by one another.

use super::{Marks, Tracker};
use crate::{
    fastpath::{Admission, Publisher},
    name::Name,
    resolve::Resolution,
};

impl Admission for Tracker {
    fn may_publish(&self, name: &Name, resolution: &Resolution) -> bool {
        Self::may_publish(self, name, resolution)
    }
}

impl Marks for Publisher {
    fn last_used_ns(&self, name: &Name) -> Option<u64> {
        Self::last_used_ns(self, name)
    }

    fn forget(&self, names: &[Name]) {
        Self::forget(self, names);
    }

    fn order_counts(&self, counts: bool) {
        self.mark_exactly(counts);
    }
}
