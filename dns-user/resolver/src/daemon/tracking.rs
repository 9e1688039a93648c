//! Joins the health tracker to the fleet.

use std::sync::Arc;

use futures::future::BoxFuture;

use crate::fleet::Track;
use dns_core::{
    catalog::Snapshot,
    name::{Name, NameRef},
    resolve::{AllRunning, Resolution, resolve},
};
use dns_health::Tracker;

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
