//! The handle on the fast path for its users.

use std::{
    net::IpAddr,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use dns_common::control::CLIENT_BUCKETS;

use crate::{FastPath, NameSource, Publisher, attach::status::InterfaceState};
use dns_core::name::{Name, NameRef};

/// Handle on the fast path in force; clones share it. Empty until the maps exist: until then every
/// call does nothing, and userspace answers. Calls are cheap and never block.
///
/// A restarted attacher brings a new fast path. Until its programs are attached, both the new and
/// the old one receive every change.
#[derive(Clone, Default)]
pub struct FastPathHandle(Arc<Inner>);

/// State that the clones share.
#[derive(Default)]
struct Inner {
    /// The fast path in force, if any, then its predecessor while that one's programs may still
    /// answer.
    held: ArcSwap<Vec<Member>>,
    /// Kept for later publishers.
    exact_last_used: AtomicBool,
}

/// One fast path behind the handle.
#[derive(Clone)]
struct Member {
    publisher: Publisher,
    /// Weak: only the owner decides when it ends.
    fast_path: Weak<FastPath>,
}

impl FastPathHandle {
    /// Puts a fast path in force. The predecessor keeps receiving changes until [`Self::retire`].
    pub fn fill(&self, fast_path: &Arc<FastPath>) {
        let held = Member { publisher: fast_path.publisher(), fast_path: Arc::downgrade(fast_path) };
        let before = self.0.held.load().first().cloned();
        self.0.held.store(Arc::new([Some(held), before].into_iter().flatten().collect()));
        fast_path.publisher().keep_exact_last_used(self.0.exact_last_used.load(Ordering::SeqCst));
    }

    /// Drops the predecessor of the fast path in force.
    pub fn retire(&self) {
        let first = self.0.held.load().first().cloned();
        self.0.held.store(Arc::new(first.into_iter().collect()));
    }

    /// Drops every fast path: each call does nothing, and userspace answers.
    pub fn clear(&self) {
        let none = Member { publisher: Publisher::off(), fast_path: Weak::new() };
        self.0.held.store(Arc::new(vec![none]));
    }

    /// Returns whether no fast path has been in force yet.
    pub fn is_empty(&self) -> bool {
        self.0.held.load().is_empty()
    }

    /// Returns the fast path in force.
    pub fn get(&self) -> Option<Arc<FastPath>> {
        self.0.held.load().first()?.fast_path.upgrade()
    }

    /// Publishes the names of a new state, see [`Publisher::install`].
    pub fn install(&self, names: &Arc<dyn NameSource>) {
        self.tell(|publisher| publisher.install(names.clone()));
    }

    /// Resolves the names of these domains again, see [`Publisher::refresh`].
    pub fn refresh(&self, names: &Arc<dyn NameSource>, domains: &[Name]) {
        self.tell(|publisher| publisher.refresh(names.clone(), domains));
    }

    /// Resolves the names of these instances again, see [`Publisher::health_changed`].
    pub fn health_changed(&self, instances: &[IpAddr]) {
        self.tell(|publisher| publisher.health_changed(instances));
    }

    /// Publishes a name that was just resolved in userspace, see [`Publisher::learn`].
    #[inline]
    pub fn learn<'n>(&self, name: impl Into<NameRef<'n>>) {
        if let Some(held) = self.0.held.load().first() {
            held.publisher.learn(name);
        }
    }

    /// Withdraws names that are no longer admitted, see [`Publisher::withdraw`].
    pub fn withdraw(&self, names: &[Name]) {
        self.tell(|publisher| publisher.withdraw(names));
    }

    /// Bounds for a while how many queries reach userspace, see [`Publisher::shed`].
    pub fn shed(&self, shares: Option<&[u32; CLIENT_BUCKETS]>, time: Duration) {
        self.tell(|publisher| publisher.shed(shares, time));
    }

    /// Returns the queries that interfaces have passed to userspace; `None` without a fast path.
    pub fn went_up(&self) -> Option<u64> {
        self.get().map(|fast_path| fast_path.counters().went_up())
    }

    /// Returns when an interface last answered for a name, see [`Publisher::last_used_ns`].
    pub fn last_used_ns(&self, name: &Name) -> Option<u64> {
        self.0.held.load().first()?.publisher.last_used_ns(name)
    }

    /// Makes last-used times exact or cheap, see [`Publisher::keep_exact_last_used`].
    pub fn keep_exact_last_used(&self, exact: bool) {
        // Stored first, so that a publisher added concurrently sees it either way.
        self.0.exact_last_used.store(exact, Ordering::SeqCst);
        self.tell(|publisher| publisher.keep_exact_last_used(exact));
    }

    /// Waits until the interfaces answer from everything installed so far.
    pub async fn flushed(&self) {
        let publisher = self.0.held.load().first().map(|held| held.publisher.clone());
        if let Some(publisher) = publisher {
            publisher.flushed().await;
        }
    }

    /// Returns whether interfaces answer a name now.
    pub fn is_published(&self, name: &Name) -> bool {
        self.0.held.load().first().is_some_and(|held| held.publisher.is_published(name))
    }

    /// Describes whether interfaces answer, and the reason if none does.
    pub fn in_words(&self) -> String {
        let Some(fast_path) = self.get() else { return "off".to_owned() };
        let interfaces = fast_path.status().interfaces.interfaces;
        let refused = interfaces.iter().find(|interface| interface.state == InterfaceState::Refused);
        match refused {
            _ if interfaces.iter().any(|interface| interface.hook.is_some()) => "on".to_owned(),
            Some(interface) => format!("on no interface: {}: {}", interface.name, interface.why),
            None => {
                "on no interface yet: each is served once enough queries have arrived through it".to_owned()
            }
        }
    }

    fn tell(&self, what: impl Fn(&Publisher)) {
        self.0.held.load().iter().for_each(|held| what(&held.publisher));
    }
}
