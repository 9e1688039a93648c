//! Replaces [`super::live`] in a build without the feature `live-consul`: names come from definition files only.

use std::{future, sync::Arc, time::Duration};

use super::{Catalogs, ConsulNames, NewZone};
use dns_consul::{Lack, catalog::Place, source::Status};
use dns_upstream::{HostNames, InForce};

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

/// Returns the registrations of the definition files.
pub(crate) async fn whole(
    catalogs: &Catalogs,
    _hosts: &Arc<HostNames>,
    _patience: Duration,
) -> Option<NewZone> {
    Some(catalogs.zone())
}
