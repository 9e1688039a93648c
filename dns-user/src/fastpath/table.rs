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

use std::{
    cmp::Reverse,
    collections::{BTreeSet, VecDeque},
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use dns_common::{
    entry::{CELL_SIZE, Location},
    name::hash_name,
};
use hashbrown::{HashMap, HashSet};

use super::{
    Admission,
    arena::{Arena, ArenaFill, ArenaMemory, cells},
    entry::{Encoded, Unfitting as EntryUnfitting},
    gather::{self, Placed},
    index::{Full, Index},
    learn::LearnFilter,
    sys,
};
use crate::{
    name::Name,
    resolve::{Health, Outcome, Resolution},
};

/// How long cells stay in quarantine where the kernel refuses membarrier. A
/// program run takes microseconds; this is a wide margin, not a proof.
const GRACE_WITHOUT_MEMBARRIER: Duration = Duration::from_secs(2);

/// Names that a new snapshot is asked for first, because they were used last.
const HOTTEST: usize = 1024;

/// Evictions tried for one entry before it counts as not fitting.
const EVICTIONS_FOR_ONE: usize = 64;

/// What the names mean: a snapshot, seen by the publisher.
pub trait Answers: Send + Sync {
    /// The names to publish before anybody has asked for them, the most useful first.
    fn published_names(&self) -> Box<dyn Iterator<Item = Name> + '_>;

    /// What `name` means now; `None`: it is not ours to answer.
    fn resolve(&self, health: &dyn Health, name: &Name) -> Option<Resolution>;
}

/// How many names there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    /// Published and learned names together.
    pub(super) useful: usize,
    /// Those of them that the snapshot may list. The rest of its list is learned
    /// like any other name: in a huge fleet nobody asks for most of it, and what
    /// is asked for must find room.
    pub(super) listed: usize,
    /// Negative names, on top of those.
    pub(super) negative: usize,
}

/// Why a name is in the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Listed by the snapshot.
    Published,
    /// Asked for, and it exists.
    Learned,
    /// Asked for, and it does not.
    Negative,
}

/// Why a name that should be in the map is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unfitting {
    /// It cannot be an entry.
    Entry(EntryUnfitting),
    /// Another name has the same hash.
    Collision,
    /// The index or the arena is full of names that may not be evicted.
    NoRoom,
}

/// One name in the map.
#[derive(Debug)]
struct Record {
    /// The name.
    name: Name,
    /// Why it is there.
    kind: Kind,
    /// Where its entry lies.
    location: Location,
    /// Bytes of its entry.
    size: usize,
    /// Instances on whose health the answer depends.
    instances: Box<[IpAddr]>,
    /// Which place in its kind's queue is its own; older ones are void.
    ticket: u64,
    /// The mark when it was last spared from eviction.
    spared_at_ns: u64,
}

/// Names and sizes, for status and metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct TableStatus {
    /// Names of the snapshot that are in the map.
    pub published: usize,
    /// Names that were asked for, in the map.
    pub learned: usize,
    /// Names that do not exist or are malformed, in the map.
    pub negative: usize,
    /// Names of the snapshot that are not in the map, by reason; they are answered from userspace.
    pub unfitting: UnfittingStatus,
    /// Names that may be in the map, negative ones not counted.
    pub max_names: usize,
    /// Negative names that may be in the map.
    pub max_negative: usize,
    /// Memory of the entries.
    pub arena: ArenaFill,
    /// Names evicted since the start.
    pub evicted: u64,
    /// Entries written since the start.
    pub written: u64,
}

/// Names of the snapshot that are not in the map, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct UnfittingStatus {
    /// A label holds a NUL byte.
    pub nul_byte: usize,
    /// More addresses than an entry holds.
    pub too_many_addresses: usize,
    /// Another name has the same hash.
    pub collision: usize,
    /// `max_names` or the arena is exhausted: they are answered by the interface once asked for.
    pub no_room: usize,
}

impl UnfittingStatus {
    /// All of them.
    pub fn total(&self) -> usize {
        self.by_reason().iter().map(|(_, count)| count).sum()
    }

    /// Each with its label in metrics.
    pub fn by_reason(&self) -> [(&'static str, usize); 4] {
        let &Self { nul_byte, too_many_addresses, collision, no_room } = self;
        [
            ("nul_byte", nul_byte),
            ("too_many_addresses", too_many_addresses),
            ("collision", collision),
            ("no_room", no_room),
        ]
    }
}

/// Everything that is published, and how to change it.
pub(super) struct Table {
    /// Where the program finds entries.
    index: Index,
    /// Where entries are written.
    memory: Arc<ArenaMemory>,
    /// Which cells are free.
    arena: Arena,
    /// When cells last went into quarantine.
    last_free: Instant,
    /// Seed of the keys.
    seed: u64,
    /// How many names.
    limits: Limits,
    /// What names mean now.
    answers: Arc<dyn Answers>,
    /// The health of the moment.
    health: Arc<dyn Health + Send + Sync>,
    /// What may be published.
    admission: Arc<dyn Admission>,
    /// Repeated learning, held back at the source.
    filter: Arc<LearnFilter>,
    /// All names in the map, by key.
    records: HashMap<u64, Record>,
    /// Which keys depend on an instance.
    by_instance: BTreeSet<(IpAddr, u64)>,
    /// Learned names in the order of their turn to be evicted, with tickets.
    learned: VecDeque<(u64, u64)>,
    /// The same of negative names.
    negative: VecDeque<(u64, u64)>,
    /// Keys of the snapshot's list, as far as it is published.
    listed: HashSet<u64>,
    /// How many names the list has beyond those.
    beyond: usize,
    /// Those of them that are not in the map though they should be.
    unfitting: HashMap<u64, Unfitting>,
    /// The next ticket.
    next_ticket: u64,
    /// Names by kind: published, learned, negative.
    counts: [usize; 3],
    /// The newest mark when [`Self::gather`] looked last.
    newest_mark_ns: u64,
    /// See [`TableStatus::evicted`].
    evicted: u64,
    /// See [`TableStatus::written`].
    written: u64,
    /// Scratch space of the encoder.
    encoded: Encoded,
}

impl Table {
    /// An empty table over an empty index.
    pub(super) fn new(
        index: Index,
        memory: Arc<ArenaMemory>,
        seed: u64,
        limits: Limits,
        health: Arc<dyn Health + Send + Sync>,
        admission: Arc<dyn Admission>,
        filter: Arc<LearnFilter>,
    ) -> Self {
        Self {
            index,
            arena: Arena::new(memory.chunks()),
            memory,
            last_free: Instant::now(),
            seed,
            limits,
            answers: Arc::new(Nothing),
            health,
            admission,
            filter,
            records: HashMap::new(),
            by_instance: BTreeSet::new(),
            learned: VecDeque::new(),
            negative: VecDeque::new(),
            listed: HashSet::new(),
            beyond: 0,
            unfitting: HashMap::new(),
            next_ticket: 0,
            counts: [0; 3],
            newest_mark_ns: 0,
            evicted: 0,
            written: 0,
            encoded: Encoded::default(),
        }
    }

    /// Makes the map say what `answers` says. Calls `progress` every few names.
    pub(super) fn install(&mut self, answers: Arc<dyn Answers>, progress: &mut dyn FnMut()) {
        self.answers = answers.clone();
        // Most queries are for a few names: those do not wait for all the others.
        self.refresh_all(self.hottest(), progress);

        let mut names = answers.published_names();
        let listed: Vec<(u64, Name)> =
            names.by_ref().take(self.limits.listed).map(|name| (self.key(&name), name)).collect();
        self.beyond = names.count();
        self.listed = listed.iter().map(|&(key, _)| key).collect();
        self.unfitting.clear();

        // What is there first: stale answers go, and room is made for new names.
        let known: Vec<u64> = self.records.keys().copied().collect();
        for (index, key) in known.into_iter().enumerate() {
            if index % 64 == 0 {
                progress();
            }
            // An earlier step may have evicted it.
            let Some(record) = self.records.get(&key) else { continue };
            let used = self.memory.last_used_ns(record.location) != 0;
            if record.kind == Kind::Published && !self.listed.contains(&key) && !used {
                self.remove(key);
            } else {
                let name = record.name.clone();
                self.refresh(key, &name);
            }
        }
        for (index, (key, name)) in listed.iter().enumerate() {
            if index % 64 == 0 {
                progress();
            }
            match self.records.get(key) {
                Some(record) if record.name == *name => {}
                Some(_) => drop(self.unfitting.insert(*key, Unfitting::Collision)),
                None => self.publish_listed(*key, name),
            }
        }
    }

    /// Resolves the names again that hold these instances.
    pub(super) fn health_changed(&mut self, instances: &[IpAddr], progress: &mut dyn FnMut()) {
        let lowest = |ip: IpAddr| (ip, u64::MIN);
        let keys: BTreeSet<u64> = instances
            .iter()
            .flat_map(|&ip| self.by_instance.range(lowest(ip)..=(ip, u64::MAX)).map(|&(_, key)| key))
            .collect();
        self.refresh_all(keys, progress);
    }

    /// Keys of the names that were used last, the last one first.
    fn hottest(&self) -> Vec<u64> {
        let marks =
            self.records.iter().map(|(&key, record)| (self.memory.last_used_ns(record.location), key));
        let mut used: Vec<(u64, u64)> = marks.filter(|&(mark, _)| mark != 0).collect();
        if used.len() > HOTTEST {
            used.select_nth_unstable_by_key(HOTTEST, |&(mark, _)| Reverse(mark));
            used.truncate(HOTTEST);
        }
        used.sort_unstable_by_key(|&(mark, _)| Reverse(mark));
        used.into_iter().map(|(_, key)| key).collect()
    }

    /// Resolves these names again, as far as they are still there, and brings them into the map.
    fn refresh_all(&mut self, keys: impl IntoIterator<Item = u64>, progress: &mut dyn FnMut()) {
        for (index, key) in keys.into_iter().enumerate() {
            if index % 64 == 0 {
                progress();
            }
            if let Some(record) = self.records.get(&key) {
                let name = record.name.clone();
                self.refresh(key, &name);
            }
        }
    }

    /// Takes in a name that was asked for in userspace.
    pub(super) fn learn(&mut self, name: &Name) {
        let key = self.key(name);
        if self.records.contains_key(&key) {
            // It is there already, or another name with the same hash is: that
            // one stays, and the filter keeps this one quiet.
            return;
        }
        self.refresh(key, name);
        if !self.records.contains_key(&key) {
            // Perhaps the next time it may.
            self.filter.forget(key);
        }
    }

    /// Takes names out that may no longer be answered by the interface.
    pub(super) fn forget(&mut self, names: &[Name]) {
        for name in names {
            let key = self.key(name);
            if self.records.get(&key).is_some_and(|record| record.name == *name) {
                self.remove(key);
            }
        }
    }

    /// Makes quarantined cells free if that can be done now. To be called when there is nothing else to do.
    pub(super) fn tidy(&mut self) {
        if self.arena.fill().quarantined == 0 {
            return;
        }
        if sys::rcu_grace_period().is_ok() || self.last_free.elapsed() >= GRACE_WITHOUT_MEMBARRIER {
            self.arena.end_quarantine();
        }
    }

    /// Moves the entries that were used since the last call next to each other, if they
    /// lie scattered and there is room for them in one place. Tells how many it moved.
    pub(super) fn gather(&mut self) -> usize {
        let since = self.newest_mark_ns;
        let mut used = Vec::new();
        for (&key, &Record { location, size, .. }) in &self.records {
            let mark = self.memory.last_used_ns(location);
            self.newest_mark_ns = self.newest_mark_ns.max(mark);
            if mark > since {
                used.push(Placed { key, location, size });
            }
        }
        let scattered = gather::scattered(used);
        let filled: u32 = scattered.iter().map(|entry| cells(entry.size)).sum();
        if filled == 0 {
            return 0;
        }
        let Some(Location(mut next)) = self.arena.allocate(filled as usize * CELL_SIZE) else { return 0 };
        for &Placed { key, location: old, size } in &scattered {
            let new = Location(next);
            next += cells(size);
            self.relocate(key, old, new, size);
        }
        scattered.len()
    }

    /// Moves the entry of a name to cells that were allocated for it. The answer stays the
    /// same all the while: until the index leads to the new one, the old one lives. Should
    /// the program answer from it once more meanwhile, that mark is lost.
    fn relocate(&mut self, key: u64, old: Location, new: Location, size: usize) {
        let words = self.memory.read(old, size.div_ceil(8)).expect("entries lie inside the arena");
        self.memory.write(new, &words);
        if self.lead_to(key, (new, size), Some((old, size))).is_ok()
            && let Some(record) = self.records.get_mut(&key)
        {
            record.location = new;
        }
    }

    /// Counts for status and metrics.
    pub(super) fn status(&self) -> TableStatus {
        let mut unfitting = UnfittingStatus { no_room: self.beyond, ..Default::default() };
        for reason in self.unfitting.values() {
            *match reason {
                Unfitting::Entry(EntryUnfitting::NulByte) => &mut unfitting.nul_byte,
                Unfitting::Entry(EntryUnfitting::TooManyAddresses) => &mut unfitting.too_many_addresses,
                Unfitting::Collision => &mut unfitting.collision,
                Unfitting::NoRoom => &mut unfitting.no_room,
            } += 1;
        }
        let [published, learned, negative] = self.counts;
        TableStatus {
            published,
            learned,
            negative,
            unfitting,
            max_names: self.limits.useful,
            max_negative: self.limits.negative,
            arena: self.arena.fill(),
            evicted: self.evicted,
            written: self.written,
        }
    }

    /// The key of a name.
    fn key(&self, name: &Name) -> u64 {
        hash_name(self.seed, name.as_wire())
    }

    /// Puts a name of the list into the map, unless it has nothing to say yet:
    /// a listed name that resolves to nothing waits until somebody asks for it.
    fn publish_listed(&mut self, key: u64, name: &Name) {
        let Some(resolution) = self.answers.resolve(&*self.health, name) else { return };
        if resolution.outcome == Outcome::Found && self.admission.may_publish(name, &resolution) {
            self.put(key, name, Kind::Published, &resolution);
        }
    }

    /// Resolves a name and makes the map say so.
    fn refresh(&mut self, key: u64, name: &Name) {
        let resolution = self.answers.resolve(&*self.health, name);
        match resolution {
            Some(resolution) if self.admission.may_publish(name, &resolution) => {
                let kind = match resolution.outcome {
                    Outcome::Found if self.listed.contains(&key) => Kind::Published,
                    Outcome::Found => Kind::Learned,
                    Outcome::NoSuchName | Outcome::Malformed => Kind::Negative,
                };
                self.put(key, name, kind, &resolution);
            }
            Some(_) | None => self.remove(key),
        }
    }

    /// Writes the entry of a name, if it differs from what is there.
    fn put(&mut self, key: u64, name: &Name, kind: Kind, resolution: &Resolution) {
        if let Err(reason) = self.encoded.encode(key, name, resolution) {
            self.remove(key);
            self.note_unfitting(key, Unfitting::Entry(reason));
            return;
        }
        let same = self.records.get(&key).map(|record| {
            (record.location, self.memory.equals_unmarked(record.location, self.encoded.words()), record.size)
        });
        if let Some((_, true, size)) = same
            && size == self.encoded.size()
        {
            self.set_instances(key, &resolution.checks.instances);
            self.set_kind(key, kind);
            return;
        }
        // The encoder's words must survive evictions, which encode nothing.
        let Some(location) = self.room(key, kind) else {
            self.remove(key);
            self.note_unfitting(key, Unfitting::NoRoom);
            return;
        };
        let size = self.encoded.size();
        // The making of room may have evicted this very name.
        let old = self.records.get(&key).map(|record| (record.location, record.size));
        if let Some((old, _)) = old {
            self.encoded.set_mark(self.memory.last_used_ns(old));
        }
        self.memory.write(location, self.encoded.words());
        if self.lead_to(key, (location, size), old).is_err() {
            self.note_unfitting(key, Unfitting::NoRoom);
            return;
        }
        self.unfitting.remove(&key);
        if let Some(record) = self.records.get_mut(&key) {
            record.location = location;
            record.size = size;
        } else {
            let name = name.clone();
            let instances = Box::new([]);
            self.records
                .insert(key, Record { name, kind, location, size, instances, ticket: 0, spared_at_ns: 0 });
            self.counts[kind as usize] += 1;
            self.queue(key, kind);
        }
        self.set_instances(key, &resolution.checks.instances);
        self.set_kind(key, kind);
    }

    /// Makes the index lead to the entry that was written to `new` (place and bytes), and gives
    /// back the cells of the old one. Where the index is full, those of the new one go back.
    fn lead_to(
        &mut self,
        key: u64,
        new: (Location, usize),
        old: Option<(Location, usize)>,
    ) -> Result<(), Full> {
        if let Err(full) = self.index.set(key, new.0, old.map(|(location, _)| location)) {
            self.quarantine(new.0, new.1);
            return Err(full);
        }
        self.written += 1;
        if let Some((location, size)) = old {
            self.quarantine(location, size);
        }
        Ok(())
    }

    /// Room for the encoded entry of a name of this kind, evicting what may be evicted for it.
    fn room(&mut self, key: u64, kind: Kind) -> Option<Location> {
        let held = self.records.get(&key).map(|record| record.kind);
        match kind {
            Kind::Published | Kind::Learned if !matches!(held, Some(Kind::Published | Kind::Learned)) => {
                while self.counts[Kind::Published as usize] + self.counts[Kind::Learned as usize]
                    >= self.limits.useful
                {
                    self.evict(Kind::Learned).then_some(())?;
                }
            }
            Kind::Negative if held != Some(Kind::Negative) => {
                while self.counts[Kind::Negative as usize] >= self.limits.negative {
                    self.evict(Kind::Negative).then_some(())?;
                }
            }
            Kind::Published | Kind::Learned | Kind::Negative => {}
        }
        let size = self.encoded.size();
        for _ in 0..EVICTIONS_FOR_ONE {
            if let Some(location) = self.arena.allocate(size) {
                return Some(location);
            }
            self.tidy();
            if let Some(location) = self.arena.allocate(size) {
                return Some(location);
            }
            let evicted = self.evict(Kind::Negative) || kind != Kind::Negative && self.evict(Kind::Learned);
            evicted.then_some(())?;
        }
        None
    }

    /// Evicts one name of a kind by second chance: who was used since it was
    /// last looked at is spared once. `false`: there is none.
    fn evict(&mut self, kind: Kind) -> bool {
        let mut spared = 0;
        while let Some((key, ticket)) = self.queue_of(kind).pop_front() {
            let Some(record) = self.records.get_mut(&key) else { continue };
            if record.ticket != ticket || record.kind != kind {
                continue;
            }
            let mark = self.memory.last_used_ns(record.location);
            // After a whole round everybody has had the second chance.
            if mark > record.spared_at_ns && spared <= self.counts[kind as usize] {
                record.spared_at_ns = mark;
                spared += 1;
                self.queue_of(kind).push_back((key, ticket));
                continue;
            }
            self.remove(key);
            self.evicted += 1;
            return true;
        }
        false
    }

    /// Takes a name out of the index.
    fn remove(&mut self, key: u64) {
        self.set_instances(key, &[]);
        let Some(record) = self.records.remove(&key) else { return };
        self.index.remove(key, record.location);
        self.counts[record.kind as usize] -= 1;
        self.filter.forget(key);
        self.quarantine(record.location, record.size);
    }

    /// Gives cells back that programs may still be reading, but none that begins now.
    fn quarantine(&mut self, location: Location, size: usize) {
        self.memory.bury(location);
        self.arena.free(location, size);
        self.last_free = Instant::now();
    }

    /// Sets which instances a name depends on, in both directions.
    fn set_instances(&mut self, key: u64, instances: &[IpAddr]) {
        let Some(record) = self.records.get_mut(&key) else { return };
        if *record.instances == *instances {
            return;
        }
        for &ip in &record.instances {
            self.by_instance.remove(&(ip, key));
        }
        record.instances = instances.into();
        self.by_instance.extend(instances.iter().map(|&ip| (ip, key)));
    }

    /// Moves a name to another kind, room permitting.
    fn set_kind(&mut self, key: u64, kind: Kind) {
        let Some(record) = self.records.get_mut(&key) else { return };
        if record.kind == kind {
            return;
        }
        self.counts[record.kind as usize] -= 1;
        record.kind = kind;
        self.counts[kind as usize] += 1;
        self.queue(key, kind);
        // An entry that stays as it is may change its kind without asking for
        // room: negative names that exist now, the other way round.
        let useful = self.counts[Kind::Published as usize] + self.counts[Kind::Learned as usize];
        if useful > self.limits.useful && !self.evict(Kind::Learned)
            || self.counts[Kind::Negative as usize] > self.limits.negative && !self.evict(Kind::Negative)
        {
            self.remove(key);
        }
    }

    /// Gives a name its place at the end of its kind's queue.
    fn queue(&mut self, key: u64, kind: Kind) {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let Some(record) = self.records.get_mut(&key) else { return };
        record.ticket = ticket;
        record.spared_at_ns = self.memory.last_used_ns(record.location);
        if kind == Kind::Published {
            return;
        }
        let count = self.counts[kind as usize];
        let records = &self.records;
        let queue = match kind {
            Kind::Learned => &mut self.learned,
            Kind::Published | Kind::Negative => &mut self.negative,
        };
        queue.push_back((key, ticket));
        if queue.len() > 2 * count + 64 {
            // Places of names that left by other ways.
            queue.retain(|(key, ticket)| records.get(key).is_some_and(|record| record.ticket == *ticket));
        }
    }

    /// The queue of a kind that has one.
    fn queue_of(&mut self, kind: Kind) -> &mut VecDeque<(u64, u64)> {
        match kind {
            Kind::Learned => &mut self.learned,
            Kind::Published | Kind::Negative => &mut self.negative,
        }
    }

    /// Remembers that a listed name did not get into the map. Others are only
    /// answered from above: remembering them all would let clients fill memory.
    fn note_unfitting(&mut self, key: u64, reason: Unfitting) {
        if self.listed.contains(&key) {
            self.unfitting.insert(key, reason);
        }
    }
}

/// Before the first snapshot: nothing is ours.
struct Nothing;

impl Answers for Nothing {
    fn published_names(&self) -> Box<dyn Iterator<Item = Name> + '_> {
        Box::new(std::iter::empty())
    }

    fn resolve(&self, _health: &dyn Health, _name: &Name) -> Option<Resolution> {
        None
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
