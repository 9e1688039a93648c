//! What is published, and the rules for what enters, changes and leaves it. All
//! it needs of the kernel is memory, so all of it is tested without a program.
//!
//! Three kinds of names share the index:
//!
//! * [`Kind::Published`]: the snapshot lists them. Never evicted.
//! * [`Kind::Learned`]: asked for and resolved in userspace. Evicted by second
//!   chance when room is needed.
//! * [`Kind::Negative`]: asked for, and they do not exist or are malformed.
//!   They have a small share of their own and only push out each other.
//!
//! [`records`] keeps who is there and whose turn it is to leave, [`listing`] what the
//! snapshot lists, [`entry_store`] the entries themselves; [`room`] decides who leaves
//! for whom.

mod entry_store;
pub mod fuzzing;
mod listing;
mod machine;
mod records;
mod room;
mod status;

use std::{cmp::Reverse, net::IpAddr, sync::Arc, time::Instant};

use dns_common::{entry::Rules, name::hash_name};

pub(crate) use self::entry_store::EntryStore;
pub use self::status::{TableStatus, UnfittingStatus};
use self::{
    listing::{Listing, Pass, Step, Unfitting},
    records::{Kind, Placed, Record, Records},
};
use crate::{
    Admission,
    map::layout::Encoded,
    publish::{allowance::Allowance, dependents::Dependents, grace::GracePeriods, learn::LearnFilter},
};
use dns_core::{
    name::Name,
    resolve::{Existence, Health, Resolution},
};

/// Names that a new snapshot is asked for first, because they were used last.
const HOTTEST: usize = 1024;

/// A full table exchanges at most this share of its learned names in a second, so a
/// name that is asked for every few seconds stays, whatever flood of other names comes.
const EXCHANGED_EACH_SECOND: usize = 16;

/// Most bytes of instances that answers depend on, before names that are merely
/// asked for add no more.
const MAX_DEPENDENTS: usize = 32 << 20;

/// What the names mean: a snapshot, seen by the publisher.
pub trait NameSource: Send + Sync {
    /// The names to publish before anybody has asked for them, the most useful first.
    fn published_names(&self) -> Box<dyn Iterator<Item = Name> + '_>;

    /// What `name` means now; `None`: it is not ours to answer.
    fn resolve(&self, health: &dyn Health, name: &Name) -> Option<Resolution>;

    /// As [`Self::resolve`], with how the addresses are given, if not as the fleet's.
    fn resolve_ruled(&self, health: &dyn Health, name: &Name) -> Option<(Resolution, Option<Rules>)> {
        self.resolve(health, name).map(|resolution| (resolution, None))
    }
}

/// How many names there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Limits {
    /// Published and learned names together.
    pub(crate) useful: usize,
    /// Those of them that the snapshot may list. The rest of its list is learned
    /// like any other name: in a huge fleet nobody asks for most of it, and what
    /// is asked for must find room.
    pub(crate) listed: usize,
    /// Negative names, on top of those.
    pub(crate) negative: usize,
}

/// Everything that is published, and how to change it.
pub(crate) struct Table {
    /// The entries, and the index that leads to them.
    store: EntryStore,
    /// When cells that were given back become free.
    grace: GracePeriods,
    /// Seed of the keys.
    seed: u64,
    /// How many names.
    limits: Limits,
    /// What names mean now.
    answers: Arc<dyn NameSource>,
    /// The health of the moment.
    health: Arc<dyn Health + Send + Sync>,
    /// What may be published.
    admission: Arc<dyn Admission>,
    /// Repeated learning, held back at the source.
    filter: Arc<LearnFilter>,
    /// All names in the map.
    records: Records,
    /// Which keys depend on an instance.
    dependents: Dependents,
    /// How many learned names may make room for others now.
    exchange: Allowance,
    /// What the snapshot lists.
    listing: Listing,
    /// What is left to do of the pass over all names that is under way.
    pass: Option<Pass>,
    /// Newer answers came after that pass had begun.
    is_outdated: bool,
    /// See [`TableStatus::evicted`].
    evicted: u64,
    /// Scratch space of the encoder.
    encoded: Encoded,
}

impl Table {
    /// An empty table over an empty store.
    pub(crate) fn new(
        (store, grace): (EntryStore, GracePeriods),
        seed: u64,
        limits: Limits,
        health: Arc<dyn Health + Send + Sync>,
        admission: Arc<dyn Admission>,
        filter: Arc<LearnFilter>,
    ) -> Self {
        Self {
            store,
            grace,
            seed,
            limits,
            answers: Arc::new(Nothing),
            health,
            admission,
            filter,
            records: Records::default(),
            dependents: Dependents::default(),
            exchange: Allowance::new(limits.useful / EXCHANGED_EACH_SECOND, Instant::now()),
            listing: Listing::default(),
            pass: None,
            is_outdated: false,
            evicted: 0,
            encoded: Encoded::default(),
        }
    }

    /// Begins to make the map say what `answers` says: the names that were used last
    /// say so at once, the others as [`Self::go_on`] gets to them. Calls `progress`
    /// every few names.
    ///
    /// A pass over the names that is under way is not begun anew, or answers that come
    /// faster than passes end would keep it from ever getting to its last names. The next
    /// pass follows when it is done.
    pub(crate) fn install(&mut self, answers: Arc<dyn NameSource>, progress: &mut dyn FnMut()) {
        self.answers = answers;
        // Most queries are for a few names: those do not wait for all the others.
        self.refresh_all(self.hottest(), progress);
        if self.pass.is_some() {
            self.is_outdated = true;
        } else {
            self.begin_pass();
        }
    }

    /// Begins to bring all names up to the newest answers.
    fn begin_pass(&mut self) {
        self.is_outdated = false;
        let answers = self.answers.clone();
        let mut names = answers.published_names();
        let listed: Vec<(u64, Name)> =
            names.by_ref().take(self.limits.listed).map(|name| (self.key(&name), name)).collect();
        self.listing = Listing::new(&listed, names.count());
        let known = self.records.iter().map(|(key, _)| key).collect();
        self.pass = Some(Pass::new(known, listed));
    }

    /// Other names mean something else now, but only such within these domains: makes the
    /// map say so. The list of names stays until the next [`Self::install`].
    pub(crate) fn refresh_within(
        &mut self,
        answers: Arc<dyn NameSource>,
        domains: &[Name],
        progress: &mut dyn FnMut(),
    ) {
        self.answers = answers;
        let concerned = |record: &Record| {
            let name = self.store.name(record.location());
            // A name that cannot be read leaves the map.
            name.is_none_or(|name| domains.iter().any(|domain| name.is_within(domain)))
        };
        let keys: Vec<u64> =
            self.records.iter().filter(|(_, record)| concerned(record)).map(|(key, _)| key).collect();
        self.refresh_all(keys, progress);
    }

    /// Whether a pass is under way.
    pub(crate) fn is_installing(&self) -> bool {
        self.pass.is_some()
    }

    /// Whether newer answers wait for the pass that is under way to end.
    pub(crate) fn is_outdated(&self) -> bool {
        self.is_outdated
    }

    /// Goes on with the pass that is under way, about until a moment. `true`: it has ended;
    /// if newer answers waited for that, the next one has begun.
    pub(crate) fn go_on(&mut self, until: Instant) -> bool {
        let Some(mut pass) = self.pass.take() else { return false };
        loop {
            for _ in 0..64 {
                match pass.next() {
                    Some(Step::Reconsider(key)) => self.reconsider(key),
                    Some(Step::Publish(key, name)) => self.publish_listed(key, &name),
                    None => {
                        if self.is_outdated {
                            self.begin_pass();
                        }
                        return true;
                    }
                }
            }
            if Instant::now() >= until {
                self.pass = Some(pass);
                return false;
            }
        }
    }

    /// Brings a name that was in the map before the newest answers up to them.
    fn reconsider(&mut self, key: u64) {
        // An earlier step may have evicted it.
        let Some(record) = self.records.get(key) else { return };
        let used = self.store.last_used_ns(record.location()) != 0;
        if record.kind() == Kind::Published && !self.listing.contains(key) && !used {
            self.remove(key);
        } else {
            self.refresh_known(key);
        }
    }

    /// Resolves the names again that hold these instances.
    pub(crate) fn health_changed(&mut self, instances: &[IpAddr], progress: &mut dyn FnMut()) {
        let keys = self.dependents.keys(instances);
        self.refresh_all(keys, progress);
    }

    /// Keys of the names that were used last, the last one first.
    fn hottest(&self) -> Vec<u64> {
        let used_at =
            self.records.iter().map(|(key, record)| (self.store.last_used_ns(record.location()), key));
        let mut used: Vec<(u64, u64)> = used_at.filter(|&(last_used, _)| last_used != 0).collect();
        if used.len() > HOTTEST {
            used.select_nth_unstable_by_key(HOTTEST, |&(last_used, _)| Reverse(last_used));
            used.truncate(HOTTEST);
        }
        used.sort_unstable_by_key(|&(last_used, _)| Reverse(last_used));
        used.into_iter().map(|(_, key)| key).collect()
    }

    /// Resolves these names again, as far as they are still there, and brings them into the map.
    fn refresh_all(&mut self, keys: impl IntoIterator<Item = u64>, progress: &mut dyn FnMut()) {
        for (index, key) in keys.into_iter().enumerate() {
            if index % 64 == 0 {
                progress();
            }
            self.refresh_known(key);
        }
    }

    /// Resolves a name again, if it is still in the map, and makes the map say so.
    fn refresh_known(&mut self, key: u64) {
        let Some(record) = self.records.get(key) else { return };
        match self.store.name(record.location()) {
            Some(name) => self.refresh(key, &name),
            // Somebody else has written to the store.
            None => self.remove(key),
        }
    }

    /// Takes in a name that was asked for in userspace, if there is room for it.
    pub(crate) fn learn(&mut self, name: &Name) {
        let key = self.key(name);
        if self.records.get(key).is_some() {
            // It is there already, or another name with the same hash is: that
            // one stays, and the filter keeps this one quiet.
            return;
        }
        if self.has_room_to_learn() || self.exchange.is_left(Instant::now()) {
            self.refresh(key, name);
        }
        if self.records.get(key).is_none() {
            // Perhaps the next time it may.
            self.filter.release(key);
        }
    }

    /// Takes names out that may no longer be answered by the interface.
    pub(crate) fn withdraw(&mut self, names: &[Name]) {
        for name in names {
            let key = self.key(name);
            if self.records.get(key).is_some_and(|record| self.store.is_named(record.location(), name)) {
                self.remove(key);
            }
        }
    }

    /// Makes cells free whose grace period is over, and begins the next one. To be
    /// called often; never waits.
    pub(crate) fn reclaim(&mut self) {
        if self.grace.ended() {
            self.store.end_grace_period();
        }
        if !self.grace.is_running() && self.store.begin_grace_period() {
            // If the thread of the grace periods has ended, these cells stay as they are.
            self.grace.begin();
        }
    }

    /// Whether cells become free soon.
    pub(crate) fn is_reclaiming(&self) -> bool {
        self.grace.is_running()
    }

    /// Waits until all cells that were given back are free: a grace period or two.
    fn reclaim_now(&mut self) {
        for _ in 0..2 {
            self.reclaim();
            if self.grace.wait() {
                self.store.end_grace_period();
            }
        }
    }

    /// Counts for status and metrics.
    pub(crate) fn status(&self) -> TableStatus {
        TableStatus {
            published: self.records.count(Kind::Published),
            learned: self.records.count(Kind::Learned),
            negative: self.records.count(Kind::Negative),
            unfitting: self.listing.unfitting(),
            max_names: self.limits.useful,
            max_negative: self.limits.negative,
            store: self.store.fill(),
            evicted: self.evicted,
            written: self.store.written(),
            unvouched: !self.grace.vouched(),
        }
    }

    /// The key of a name.
    fn key(&self, name: &Name) -> u64 {
        hash_name(self.seed, name.as_wire())
    }

    /// Puts a name of the list into the map, unless it has nothing to say yet:
    /// a listed name that resolves to nothing waits until somebody asks for it.
    fn publish_listed(&mut self, key: u64, name: &Name) {
        match self.records.get(key) {
            Some(record) if self.store.is_named(record.location(), name) => return,
            Some(_) => {
                self.listing.note_unfitting(key, Unfitting::Collision);
                return;
            }
            None => {}
        }
        let Some((resolution, rules)) = self.answers.resolve_ruled(&*self.health, name) else { return };
        if resolution.existence == Existence::Found && self.admission.may_publish(name, &resolution) {
            self.put(key, name, Kind::Published, &resolution, rules);
        }
    }

    /// Resolves a name and makes the map say so.
    fn refresh(&mut self, key: u64, name: &Name) {
        match self.answers.resolve_ruled(&*self.health, name) {
            Some((resolution, rules)) if self.admission.may_publish(name, &resolution) => {
                let kind = match resolution.existence {
                    Existence::Found if self.listing.contains(key) => Kind::Published,
                    Existence::Found => Kind::Learned,
                    Existence::NoSuchName | Existence::Malformed => Kind::Negative,
                };
                self.put(key, name, kind, &resolution, rules);
            }
            Some(_) | None => self.remove(key),
        }
    }

    /// Writes the entry of a name, if it differs from what is there.
    fn put(&mut self, key: u64, name: &Name, kind: Kind, resolution: &Resolution, rules: Option<Rules>) {
        if let Err(reason) = self.encoded.encode(key, name, resolution, rules) {
            self.remove(key);
            self.listing.note_unfitting(key, Unfitting::Entry(reason));
            return;
        }
        let instances = &resolution.checks.instances;
        if self.says_so(key) {
            self.depend(key, instances);
            self.set_kind(key, kind);
            return;
        }
        if kind != Kind::Published
            && self.records.get(key).is_none()
            && self.dependents.weight_with(instances) > MAX_DEPENDENTS
        {
            // Others go, a few a second, and the next query for this name tries again.
            self.exchange_one(kind);
            return;
        }
        // The encoder's words must survive evictions, which encode nothing.
        let Some(location) = self.room(key, kind) else {
            self.remove(key);
            self.listing.note_unfitting(key, Unfitting::NoRoom);
            return;
        };
        if !self.write(Placed { key, location, size: self.encoded.size() }, kind) {
            self.listing.note_unfitting(key, Unfitting::NoRoom);
            return;
        }
        self.listing.fits(key);
        self.depend(key, instances);
        self.set_kind(key, kind);
    }

    /// Whether the map says of a name what was encoded last.
    fn says_so(&self, key: u64) -> bool {
        self.records.get(key).is_some_and(|record| {
            record.size() == self.encoded.size() && self.store.says(record.location(), self.encoded.words())
        })
    }

    /// Writes what was encoded last to cells that were allocated for it; `false`: the index is full.
    fn write(&mut self, entry: Placed, kind: Kind) -> bool {
        let Placed { key, location, size } = entry;
        // The making of room may have evicted this very name.
        let old = self.records.get(key).map(|record| (record.location(), record.size()));
        if let Some((old, _)) = old {
            self.encoded.set_last_used_ns(self.store.last_used_ns(old));
        }
        if self.store.write(entry, self.encoded.words(), old).is_err() {
            return false;
        }
        match self.records.get_mut(key) {
            Some(record) => record.place(location, size),
            None => self.records.insert(entry, kind, self.store.last_used_ns(location)),
        }
        true
    }

    /// Takes a name out of the map.
    fn remove(&mut self, key: u64) {
        let Some(record) = self.records.remove(key) else { return };
        if let Some(set) = record.dependency {
            self.dependents.release(key, set);
        }
        self.filter.release(key);
        self.store.remove(Placed { key, location: record.location(), size: record.size() });
    }

    /// Sets which instances a name depends on.
    fn depend(&mut self, key: u64, instances: &[IpAddr]) {
        if let Some(record) = self.records.get_mut(key) {
            record.dependency = self.dependents.assign(key, record.dependency, instances);
        }
    }

    /// Moves a name to another kind, room permitting.
    fn set_kind(&mut self, key: u64, kind: Kind) {
        if !self.records.set_kind(key, kind, &self.store) {
            return;
        }
        // An entry that stays as it is may change its kind without asking for
        // room: negative names that exist now, the other way round.
        let too_many_useful = self.records.useful() > self.limits.useful;
        let too_many_negative = self.records.count(Kind::Negative) > self.limits.negative;
        if too_many_useful && !self.evict(Kind::Learned) || too_many_negative && !self.evict(Kind::Negative) {
            self.remove(key);
        }
    }
}

/// Before the first snapshot: nothing is ours.
struct Nothing;

impl NameSource for Nothing {
    fn published_names(&self) -> Box<dyn Iterator<Item = Name> + '_> {
        Box::new(std::iter::empty())
    }

    fn resolve(&self, _health: &dyn Health, _name: &Name) -> Option<Resolution> {
        None
    }
}

#[cfg(test)]
mod interleavings;
#[cfg(test)]
mod tests;
