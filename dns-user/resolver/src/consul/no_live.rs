//! Replaces [`super::live`] in a build without the feature `live-consul`: names come from definition files only.

use std::{future, sync::Arc};

use super::{Catalogs, ConsulNames};
use dns_consul::{Lack, catalog::Place, source::Status};
use dns_upstream::InForce;

/// A live source, of which this build has none.
pub(super) enum Source {}

impl Source {
    pub(super) fn demand(&self, _lack: Lack) {
        match *self {}
    }

    pub(super) fn watches_all(&self) -> bool {
        match *self {}
    }

    pub(super) fn asked(&self, _place: Place, _service: String) {
        match *self {}
    }

    pub(super) fn used(&self, _services: Vec<(Place, String)>) {
        match *self {}
    }

    pub(super) fn status(&self) -> Status {
        match *self {}
    }
}

/// Never returns: the configuration has no live Consul.
pub(crate) async fn follow(
    _names: Arc<ConsulNames>,
    _catalogs: Arc<Catalogs>,
    _upstreams: Arc<InForce>,
    _installed: impl Fn() + Send + Sync + 'static,
) {
    future::pending().await
}
