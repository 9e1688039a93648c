//! The published names, and the rules for adding, changing and removing them. Needs nothing
//! from the kernel but memory, so all of it is tested without a program.
//!
//! Three kinds of names share the index:
//!
//! * [`Kind::Published`]: listed by the snapshot. Never evicted.
//! * [`Kind::Learned`]: queried and resolved in userspace. Evicted by second chance when room is
//!   needed.
//! * [`Kind::Negative`]: queried, but malformed or without existence. They have a small share of
//!   the index and only evict each other.
//!
//! [`records`] keeps the names in the map, their order of eviction and the snapshot's list,
//! [`entry_store`] the entries themselves; [`eviction`] chooses the names to evict.

mod entry_store;
mod eviction;
pub mod fuzz;
mod records;

use std::{cmp::Reverse, net::IpAddr, sync::Arc, time::Instant};

use dns_common::{entry::AnswerPolicy, name::hash_name};

pub(crate) use self::entry_store::{EntryStore, Placed};
use self::records::{Kind, Listing, Pass, Records, Step, UnpublishedReason};
pub use self::records::{TableStatus, UnfittingStatus};
use crate::{
    Admission,
    map::layout::{Encoded, is_named, read_name},
    publish::{
        dependents::Dependents, lease::GracePeriods, publisher::LearnFilter,
        second_chance::allowance, source::NameSource,
    },
};
use dns_core::{
    changes::Changes,
    name::Name,
    resolve::{Existence, Health, Resolution},
};
use dns_kit::rate::TokenBucket;

/// Number of most recently used names that a new snapshot updates first.
const HOTTEST: usize = 1024;

/// Share of the limit of listed names by which changes may exceed it before the list is made again.
const LISTED_BEYOND: usize = 16;

/// A full table replaces at most one in this many learned names per second, so that a name queried
/// every few seconds survives a flood of other names.
const EXCHANGED_EACH_SECOND: usize = 16;

/// Maximum size in bytes of the sets of instances on which answers depend. Beyond it, learned names
/// with further instances are not added.
const MAX_DEPENDENTS: usize = 32 << 20;

/// Maximum number of names by kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Limits {
    /// Maximum number of published and learned names together.
    #[serde(rename = "useful")]
    pub max_names: usize,
    /// Maximum number of forwarded answers, kept in separate maps.
    pub answers: usize,
    /// Maximum number of local replies that are no address lists, in the same maps.
    pub replies: usize,
    /// Maximum number of listed names within `max_names`. Further listed names are learned like any
    /// other name: most names of a huge fleet are never queried, and queried names need room.
    #[serde(rename = "listed")]
    pub max_precomputed: usize,
    /// Maximum number of negative names, in addition to `max_names`.
    pub negative: usize,
}

/// The published names, and the operations that change them.
pub(crate) struct Table {
    store: EntryStore,
    /// Grace periods after which freed cells become free.
    grace: GracePeriods,
    /// Hash seed of the keys.
    seed: u64,
    limits: Limits,
    /// The snapshot installed last.
    answers: Arc<dyn NameSource>,
    health: Arc<dyn Health + Send + Sync>,
    /// Decides which names may be published.
    admission: Arc<dyn Admission>,
    /// Suppresses repeated learning at the source.
    filter: Arc<LearnFilter>,
    /// The names in the map.
    records: Records,
    /// Index from instances to the keys that depend on them.
    dependents: Dependents,
    /// Limits how fast learned names are exchanged.
    exchange: TokenBucket,
    listing: Listing,
    /// The remaining work of the current pass over all names.
    pass: Option<Pass>,
    /// Whether a pass has begun.
    has_begun: bool,
    /// Whether the list holds only the first names, as before the first pass has published them.
    is_list_partial: bool,
    /// Whether newer answers have arrived since the current pass began.
    pub(crate) is_outdated: bool,
    evicted: u64,
    encoded: Encoded,
}

impl Table {
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
            exchange: allowance(limits.max_names / EXCHANGED_EACH_SECOND),
            listing: Listing::default(),
            pass: None,
            has_begun: false,
            is_list_partial: false,
            is_outdated: false,
            evicted: 0,
            encoded: Encoded::default(),
        }
    }

    /// Begins to update the map to `answers`: the most recently used names immediately, the others
    /// through [`Self::go_on`]. Calls `progress` every few names.
    ///
    /// Names on which the differences to the earlier answers have no effect are left alone. If any
    /// name may have changed, all are resolved. A running pass is not restarted, because answers that
    /// arrive faster than passes end would keep it from ever reaching its last names. The next pass
    /// follows once it has ended.
    pub(crate) fn install(&mut self, answers: Arc<dyn NameSource>, progress: &mut dyn FnMut()) {
        if !self.follow(answers, progress) {
            self.resolve_all(progress);
        }
    }

    /// The same if any name may have another answer, also one that the differences do not show.
    pub(crate) fn renew(&mut self, answers: Arc<dyn NameSource>, progress: &mut dyn FnMut()) {
        self.follow(answers, progress);
        self.resolve_all(progress);
    }

    /// Replaces the answers and updates the names concerned by the differences; `false` if any name may
    /// have changed.
    fn follow(&mut self, answers: Arc<dyn NameSource>, progress: &mut dyn FnMut()) -> bool {
        // Dropped at the end: freeing an old snapshot takes a while.
        let older = std::mem::replace(&mut self.answers, answers);
        let changes = self.answers.changes_since(&*older);
        let are_known = changes.is_some();
        if let Some(changes) = changes {
            self.apply(changes, progress);
        }
        are_known
    }

    /// Updates the most recently used names immediately and begins a pass over the others.
    fn resolve_all(&mut self, progress: &mut dyn FnMut()) {
        // Most queries are for a few names, which should not wait for the others.
        let keys = self.records.iter().map(|(key, _)| key).collect();
        let (hottest, _) = self.hottest(keys, true);
        self.refresh_all(hottest, progress);
        if self.pass.is_some() {
            self.is_outdated = true;
        } else {
            self.begin_pass();
        }
    }

    /// Updates the names concerned by changes, and the list. Names that the current pass has not
    /// reached yet are resolved from the newest answers anyway, so it need not be repeated.
    fn apply(&mut self, changes: Changes, progress: &mut dyn FnMut()) {
        if changes.is_empty() {
            return;
        }
        let Changes {
            facets,
            renewed,
            listed,
            still_listed,
            unlisted,
            zones: _,
        } = changes;
        let mut keys = self.records.with_facets(&facets);
        for name in &unlisted {
            let key = self.key(name);
            self.listing.remove(key);
            keys.push(key);
        }
        keys.extend(renewed.iter().map(|name| self.key(name)));
        let limit = self.limits.max_precomputed + self.limits.max_precomputed / LISTED_BEYOND;
        let mut new = Vec::new();
        for (names, is_new) in [(listed, true), (still_listed, false)] {
            for name in names {
                let key = self.key(&name);
                if self.listing.add(key, limit, is_new) {
                    // A name that was learned becomes a listed one; one without an answer may have one.
                    keys.push(key);
                    new.push((key, name));
                }
            }
        }
        keys.sort_unstable();
        keys.dedup();
        // Names that are not in the map are resolved when they are queried, or listed below.
        keys.retain(|&key| self.records.get(key).is_some());
        for (key, name) in self.listing.too_large() {
            let of_name = self.answers.facets(name);
            // They are not among the records, so no facet leads to them.
            if of_name.iter().any(|facet| facets.contains(facet)) {
                new.push((key, name.clone()));
            }
        }
        self.update_first(keys, new, progress);
    }

    /// Updates the most useful names at once, and leaves the others to the pass.
    fn update_first(
        &mut self,
        keys: Vec<u64>,
        mut new: Vec<(u64, Name)>,
        progress: &mut dyn FnMut(),
    ) {
        let (first, later) = self.hottest(keys, false);
        for (index, key) in first.into_iter().enumerate() {
            if index % 64 == 0 {
                progress();
            }
            self.reconsider(key);
        }
        // A large change must not hold up everything else.
        let new_later = new.split_off(new.len().min(HOTTEST));
        for (key, name) in new {
            self.publish_listed(key, &name);
        }
        if !later.is_empty() || !new_later.is_empty() {
            self.pass
                .get_or_insert_default()
                .add_first(later, new_later);
        }
    }

    fn begin_pass(&mut self) {
        self.is_outdated = false;
        let mut limit = self.limits.max_precomputed;
        // Interfaces can answer once the first names are in the map, and making the list of a fleet of
        // 100,000 instances takes longer than that. So the first pass makes the rest afterwards.
        let is_first = !std::mem::replace(&mut self.has_begun, true);
        if is_first {
            limit = limit.min(HOTTEST);
        }
        let answers = self.answers.clone();
        let mut names = answers.published_names();
        let listed: Vec<(u64, Name)> = names
            .by_ref()
            .take(limit)
            .map(|name| (self.key(&name), name))
            .collect();
        self.is_list_partial = is_first && listed.len() == HOTTEST;
        // Only counted, and counting makes every name, which the first pass cannot wait for.
        let beyond = if self.is_list_partial {
            0
        } else {
            names.count()
        };
        self.listing = Listing::new(&listed, beyond);
        let known = self.records.iter().map(|(key, _)| key).collect();
        self.pass = Some(Pass::new(known, listed));
    }

    /// Updates the answers after a change within these domains, whose names do not wait for a pass.
    pub(crate) fn refresh_within(
        &mut self,
        answers: Arc<dyn NameSource>,
        domains: &[Name],
        progress: &mut dyn FnMut(),
    ) {
        if !self.follow(answers, progress) {
            // The answers may also have changed elsewhere.
            self.resolve_all(progress);
        }
        // Without a pass, all names concerned are up to date by now.
        if self.pass.is_none() {
            return;
        }
        let mut keys = Vec::new();
        for (key, record) in self.records.iter() {
            let name = read_name(&self.store.memory, record.location);
            // A name that cannot be read is removed.
            if name.is_none_or(|name| domains.iter().any(|domain| name.is_within(domain))) {
                keys.push(key);
            }
        }
        self.refresh_all(keys, progress);
    }

    pub(crate) fn answers(&self) -> Arc<dyn NameSource> {
        self.answers.clone()
    }

    pub(crate) fn is_installing(&self) -> bool {
        self.pass.is_some()
    }

    /// Continues the current pass, approximately until `until`. Returns `true` once it has ended;
    /// if newer answers were waiting, the next pass has begun by then. The first pass stops once
    /// between its first names and the list of all.
    pub(crate) fn go_on(&mut self, until: Instant) -> bool {
        if self.is_list_partial && self.pass.as_ref().is_some_and(Pass::is_empty) {
            self.begin_pass();
        }
        let Some(mut pass) = self.pass.take() else {
            return false;
        };
        loop {
            for _ in 0..64 {
                match pass.next() {
                    Some(Step::Reconsider(key)) => self.reconsider(key),
                    Some(Step::Publish(key, name)) => self.publish_listed(key, &name),
                    None if self.is_list_partial => {
                        self.pass = Some(pass);
                        return false;
                    }
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

    /// Updates a name already in the map to the newest answers.
    fn reconsider(&mut self, key: u64) {
        // An earlier step may have evicted it.
        let Some(record) = self.records.get(key) else {
            return;
        };
        let used = self.store.memory.last_used_ns(record.location) != 0;
        // No longer listed and never asked for: its room is for others. A used one becomes a
        // learned name.
        if record.kind == Kind::Published && !self.listing.contains(key) && !used {
            self.remove(key);
        } else {
            self.refresh_known(key);
        }
    }

    /// Resolves the names again whose answers contain these instances.
    pub(crate) fn health_changed(&mut self, instances: &[IpAddr], progress: &mut dyn FnMut()) {
        let keys = self.dependents.keys(instances);
        self.refresh_all(keys, progress);
    }

    /// Divides names into those to update immediately and the others: at most [`HOTTEST`] of them,
    /// most recently used first. With `used_only` they must have been used.
    fn hottest(&self, keys: Vec<u64>, used_only: bool) -> (Vec<u64>, Vec<u64>) {
        if keys.len() <= 1 {
            return (keys, Vec::new());
        }
        let mut used = Vec::with_capacity(keys.len());
        for key in keys {
            let record = self.records.get(key);
            let last_used =
                record.map_or(0, |record| self.store.memory.last_used_ns(record.location));
            if last_used != 0 || !used_only {
                used.push((Reverse(last_used), key));
            }
        }
        let mut others = Vec::new();
        if used.len() > HOTTEST {
            // The order of the others does not matter, and sorting all would take longer.
            used.select_nth_unstable_by_key(HOTTEST, |&(last_used, _)| last_used);
            others = used.split_off(HOTTEST);
        }
        used.sort_unstable_by_key(|&(last_used, _)| last_used);
        (keys_of(used), keys_of(others))
    }

    /// Resolves these names again, if they are still in the map, and updates them.
    fn refresh_all(&mut self, keys: impl IntoIterator<Item = u64>, progress: &mut dyn FnMut()) {
        for (index, key) in keys.into_iter().enumerate() {
            if index % 64 == 0 {
                progress();
            }
            self.refresh_known(key);
        }
    }

    fn refresh_known(&mut self, key: u64) {
        let Some(record) = self.records.get(key) else {
            return;
        };
        match read_name(&self.store.memory, record.location) {
            Some(name) => self.refresh(key, &name),
            // A foreign process has overwritten the store.
            None => self.remove(key),
        }
    }

    /// Adds a name resolved in userspace, if there is room.
    pub(crate) fn learn(&mut self, name: &Name) {
        let key = self.key(name);
        if self.records.get(key).is_some() {
            // The map already holds this name or another one with the same hash, which stays; the
            // filter then suppresses this one.
            return;
        }
        // Resolving costs more than a look at the room, and a flood of names would resolve each in
        // vain.
        if self.has_room_to_learn() || self.exchange.is_left(Instant::now()) {
            self.refresh(key, name);
        }
        if self.records.get(key).is_none() {
            // The name may be admitted later.
            self.filter.release(key);
        }
    }

    /// Removes names that the interface may no longer answer.
    pub(crate) fn withdraw(&mut self, names: &[Name]) {
        for name in names {
            let key = self.key(name);
            if self
                .records
                .get(key)
                .is_some_and(|record| is_named(&self.store.memory, record.location, name))
            {
                self.remove(key);
            }
        }
    }

    /// Frees cells whose grace period has ended and begins the next one. Must be called often; never waits.
    pub(crate) fn reclaim(&mut self) {
        self.store.reclaim(&mut self.grace);
    }

    /// Returns whether cells will become free soon.
    pub(crate) fn is_reclaiming(&self) -> bool {
        self.grace.running
    }

    /// Waits until all freed cells are reusable: one or two grace periods.
    fn reclaim_now(&mut self) {
        for _ in 0..2 {
            self.reclaim();
            if self.grace.wait() {
                self.store.allocator.end_grace_period();
            }
        }
    }

    pub(crate) fn status(&self) -> TableStatus {
        TableStatus {
            published: self.records.count(Kind::Published),
            learned: self.records.count(Kind::Learned),
            negative: self.records.count(Kind::Negative),
            unfitting: self.listing.unfitting(),
            max_names: self.limits.max_names,
            max_negative: self.limits.negative,
            store: self.store.allocator.fill(),
            evicted: self.evicted,
            written: self.store.written,
            grace_unconfirmed: !self.grace.confirmed,
        }
    }

    fn key(&self, name: &Name) -> u64 {
        hash_name(self.seed, name.as_wire())
    }

    /// Publishes a listed name. A listed name without an answer is not published before its first query.
    fn publish_listed(&mut self, key: u64, name: &Name) {
        match self.records.get(key) {
            Some(record) if is_named(&self.store.memory, record.location, name) => return,
            Some(_) => {
                self.listing
                    .note_unfitting(key, name, UnpublishedReason::Collision);
                return;
            }
            None => {}
        }
        let Some((resolution, policy)) = self.answers.resolve_with_policy(&*self.health, name)
        else {
            return;
        };
        if resolution.existence == Existence::Found && self.admission.may_publish(name, &resolution)
        {
            self.put(key, name, Kind::Published, &resolution, policy);
        }
    }

    /// Resolves a name and updates the map.
    fn refresh(&mut self, key: u64, name: &Name) {
        match self.answers.resolve_with_policy(&*self.health, name) {
            Some((resolution, policy)) if self.admission.may_publish(name, &resolution) => {
                let kind = match resolution.existence {
                    Existence::Found if self.listing.contains(key) => Kind::Published,
                    Existence::Found => Kind::Learned,
                    Existence::NoSuchName | Existence::Malformed => Kind::Negative,
                };
                self.put(key, name, kind, &resolution, policy);
            }
            Some(_) | None => self.remove(key),
        }
    }

    /// Writes the entry of a name if it differs from the current one.
    fn put(
        &mut self,
        key: u64,
        name: &Name,
        kind: Kind,
        resolution: &Resolution,
        policy: Option<AnswerPolicy>,
    ) {
        if let Err(reason) = self.encoded.encode(key, name, resolution, policy) {
            self.remove(key);
            self.listing
                .note_unfitting(key, name, UnpublishedReason::Entry(reason));
            return;
        }
        let instances = &resolution.checks.instances;
        if self.says_so(key) {
            // The same addresses may depend on other instances, whose health changes them later.
            self.depend(key, name, instances);
            self.set_kind(key, kind);
            return;
        }
        if kind != Kind::Published
            && self.records.get(key).is_none()
            && self.dependents.weight_with(instances) > MAX_DEPENDENTS
        {
            // Other names are evicted at a limited rate; the next query for this name tries again.
            self.exchange_one(kind);
            return;
        }
        // The encoder's words survive evictions, which encode nothing.
        let Some(location) = self.room(key, kind) else {
            self.remove(key);
            self.listing
                .note_unfitting(key, name, UnpublishedReason::NoRoom);
            return;
        };
        if !self.write(
            Placed {
                key,
                location,
                size: self.encoded.size(),
            },
            kind,
        ) {
            // An earlier entry would go on giving the earlier answer.
            self.remove(key);
            self.listing
                .note_unfitting(key, name, UnpublishedReason::NoRoom);
            return;
        }
        self.listing.fits(key);
        self.depend(key, name, instances);
        self.set_kind(key, kind);
    }

    /// Returns whether the name's entry equals the one encoded last.
    fn says_so(&self, key: u64) -> bool {
        self.records.get(key).is_some_and(|record| {
            record.size() == self.encoded.size()
                && self
                    .store
                    .memory
                    .equals_but_last_used(record.location, self.encoded.words())
        })
    }

    /// Writes the entry encoded last to its allocated cells; `false` if the index is full, or memory cannot be mapped.
    fn write(&mut self, entry: Placed, kind: Kind) -> bool {
        let Placed {
            key,
            location,
            size,
        } = entry;
        // Making room may have evicted this name itself.
        let old = self
            .records
            .get(key)
            .map(|record| (record.location, record.size()));
        if let Some((old, _)) = old {
            // The new entry counts as used when the old one was, for its eviction and for health
            // checks.
            self.encoded
                .set_last_used_ns(self.store.memory.last_used_ns(old));
        }
        if self.store.write(entry, self.encoded.words(), old).is_err() {
            return false;
        }
        match self.records.get_mut(key) {
            Some(record) => record.place(location, size),
            None => self
                .records
                .insert(entry, kind, self.store.memory.last_used_ns(location)),
        }
        true
    }

    fn remove(&mut self, key: u64) {
        let Some(record) = self.records.remove(key) else {
            return;
        };
        if let Some(set) = record.dependency {
            self.dependents.release(key, set);
        }
        // Its next query in userspace hands it over again.
        self.filter.release(key);
        self.store.remove(Placed {
            key,
            location: record.location,
            size: record.size(),
        });
    }

    /// Records the instances and the facets on which a name depends.
    fn depend(&mut self, key: u64, name: &Name, instances: &[IpAddr]) {
        if let Some(record) = self.records.get_mut(key) {
            record.dependency = self.dependents.assign(key, record.dependency, instances);
            let facets = self.answers.facets(name);
            self.records.set_facets(key, &facets);
        }
    }

    /// Moves a name to another kind, room permitting.
    fn set_kind(&mut self, key: u64, kind: Kind) {
        if !self.records.set_kind(key, kind, &self.store) {
            return;
        }
        // An unchanged entry may change its kind without a check for room: a negative name that now
        // exists, or the reverse.
        let too_many = self.records.positive_count() > self.limits.max_names;
        let too_many_negative = self.records.count(Kind::Negative) > self.limits.negative;
        if too_many && !self.evict(Kind::Learned)
            || too_many_negative && !self.evict(Kind::Negative)
        {
            self.remove(key);
        }
    }
}

fn keys_of(used: Vec<(Reverse<u64>, u64)>) -> Vec<u64> {
    used.into_iter().map(|(_, key)| key).collect()
}

/// The snapshot before the first one, which answers for no name.
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
mod tests;
