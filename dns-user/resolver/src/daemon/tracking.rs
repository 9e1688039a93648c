//! Joins the health tracker to the fleet and to the fast path.

use std::sync::Arc;

use futures::future::BoxFuture;

use crate::{
    fastpath::{Admission, Publisher},
    fleet::Track,
    health::{FastPathUse, Tracker},
};
use dns_core::{
    catalog::Snapshot,
    name::{Name, NameRef},
    resolve::{AllRunning, Resolution, resolve},
};

impl Track for Tracker {
    fn install(&self, snapshot: Arc<Snapshot>) {
        // What a name needs checked does not depend on what is known of it.
        self.decide_by(Arc::new(move |name| Some(resolve(&snapshot, &AllRunning, name)?.checks)));
    }

    fn asked(&self, name: &Name, resolution: &Resolution) {
        Self::asked(self, name, resolution);
    }

    fn asked_again(&self, name: NameRef<'_>) -> bool {
        Self::asked_again(self, name)
    }

    fn first_checks<'a>(&'a self, name: &'a Name, resolution: &'a Resolution) -> BoxFuture<'a, ()> {
        Box::pin(Self::first_checks(self, name, resolution))
    }
}

impl Admission for Tracker {
    fn may_publish(&self, name: &Name, resolution: &Resolution) -> bool {
        Self::may_publish(self, name, resolution)
    }
}

impl FastPathUse for Publisher {
    fn last_used_ns(&self, name: &Name) -> Option<u64> {
        Self::last_used_ns(self, name)
    }

    fn withdraw(&self, names: &[Name]) {
        Self::withdraw(self, names);
    }

    fn order_counts(&self, counts: bool) {
        self.keep_exact_last_used(counts);
    }
}
