//! The forwarded answers in the maps: admission, replacement, eviction, and renewal before they
//! expire.
//!
//! They mirror the cache in userspace, which hands over an answer when it is used for the second
//! time. The programs check lifetime and generation, so no answer outlives either, regardless of
//! this module.

use std::{cmp::Reverse, collections::BinaryHeap, sync::Arc, time::Instant};

use dns_common::entry::Location;
use dns_core::{name::Name, wire::ForwardedAnswer};
use hashbrown::HashMap;

use super::{
    allowance::Allowance,
    grace::GracePeriods,
    publisher::LearnFilter,
    second_chance::SecondChance,
    table::{EntryStore, Placed},
};
use crate::map::{answer, store::StoreFill};

/// One in this many answers may be admitted per second.
const ADMITTED_SHARE: usize = 8;

/// Share of its lifetime, in thousandths, after which an answer in use is renewed. Renewals of
/// answers that arrived together are spread over [`SPREAD`].
const RENEWAL: u64 = 900;
/// Spread of renewals, in thousandths of the lifetime.
const SPREAD: u64 = 50;

/// A question of class IN whose answer is about to expire while clients use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Renewal {
    /// Name of the question.
    pub name: Name,
    /// Type of the question.
    pub qtype: u16,
    /// Whether the query has DO set.
    pub dnssec_ok: bool,
    /// Whether the query has CD set.
    pub checking_disabled: bool,
}

/// Number of forwarded answers in the maps and their memory, for status and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct AnswersStatus {
    /// Answers in the maps.
    pub entries: usize,
    /// Limit of answers; 0: forwarded answers are not kept.
    pub max_entries: usize,
    /// Memory of the answers.
    pub store: StoreFill,
    /// Answers written since the start.
    pub written: u64,
    /// Answers evicted since the start.
    pub evicted: u64,
    /// Answers left to userspace since the start: too many records, too long, or incomplete.
    pub unfitting: u64,
    /// Renewals requested since the start.
    pub renewals: u64,
}

/// An answer in the maps.
struct Record {
    location: Location,
    size: usize,
    /// Ticket in the queue.
    ticket: u64,
    since_ns: u64,
    ends_ns: u64,
    renewal: Renewal,
}

impl Record {
    /// Returns the position of the entry with this key.
    fn placed(&self, key: u64) -> Placed {
        Placed { key, location: self.location, size: self.size }
    }
}

/// The kinds of scheduled work on an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Task {
    Renew,
    Remove,
}

/// A task that is due at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Due {
    at_ns: u64,
    key: u64,
    /// Arrival of the answer to which the task belongs.
    since_ns: u64,
    task: Task,
}

/// The forwarded answers in the maps.
pub(crate) struct AnswerTable {
    store: EntryStore,
    grace: GracePeriods,
    seed: u64,
    limit: usize,
    records: HashMap<u64, Record>,
    /// The answers in order of eviction.
    queue: SecondChance,
    due: BinaryHeap<Reverse<Due>>,
    admission: Allowance,
    /// Filters answers that need not be handed over again.
    filter: Arc<LearnFilter>,
    generation: u64,
    evicted: u64,
    unfitting: u64,
    renewals: u64,
}

/// Returns the key of an answer in the filter, which differs in each generation.
pub(crate) fn filter_key(key: u64, generation: u64) -> u64 {
    key ^ generation.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl AnswerTable {
    /// Returns an empty table for at most `limit` answers.
    pub(crate) fn new(
        (store, grace): (EntryStore, GracePeriods),
        seed: u64,
        limit: usize,
        filter: Arc<LearnFilter>,
    ) -> Self {
        Self {
            store,
            grace,
            seed,
            limit,
            records: HashMap::new(),
            queue: SecondChance::default(),
            due: BinaryHeap::new(),
            admission: Allowance::new(limit / ADMITTED_SHARE, Instant::now()),
            filter,
            generation: 0,
            evicted: 0,
            unfitting: 0,
            renewals: 0,
        }
    }

    /// Begins a generation: all earlier answers are void, and the programs ignore them already.
    pub(crate) fn begin(&mut self, generation: u64) {
        let Self { records, store, .. } = self;
        for (key, record) in records.drain() {
            store.remove(record.placed(key));
        }
        self.queue = SecondChance::default();
        self.due.clear();
        self.generation = generation;
    }

    /// Publishes an answer that was looked up in `generation`, at `now_ns` of `CLOCK_BOOTTIME`.
    pub(crate) fn publish(&mut self, answer: &ForwardedAnswer, generation: u64, now_ns: u64) {
        let key = answer::key(
            self.seed,
            (&answer.name).into(),
            answer.qtype,
            answer.dnssec_ok,
            answer.checking_disabled,
        );
        let ends_ns = answer.since_ns.saturating_add(u64::from(answer.lifetime) * 1_000_000_000);
        if generation != self.generation || self.limit == 0 || ends_ns <= now_ns {
            return self.release(key);
        }
        if self.records.get(&key).is_some_and(|record| record.since_ns == answer.since_ns) {
            // The same answer again: its renewal has failed.
            return;
        }
        let Some(words) = answer::encode(answer, self.seed, generation) else {
            self.unfitting += 1;
            // Not handed over again until another answer may have arrived.
            self.schedule(Due { at_ns: ends_ns, key, since_ns: answer.since_ns, task: Task::Remove });
            return;
        };
        if self.place(key, &words, answer, ends_ns).is_none() {
            self.release(key);
        }
    }

    /// Writes an entry and records it; `None` if there is no room or the admission rate is
    /// exceeded.
    fn place(&mut self, key: u64, words: &[u64], answer: &ForwardedAnswer, ends_ns: u64) -> Option<()> {
        let old = self.records.get(&key).map(|record| (record.location, record.size, record.ticket));
        if old.is_none() {
            self.admission.take(Instant::now()).then_some(())?;
            while self.records.len() >= self.limit {
                self.evict().then_some(())?;
            }
        }
        let size = words.len() * 8;
        self.reclaim();
        let Some(location) = self.store.allocate(size) else {
            let enough = self.store.batch(size);
            while !self.store.will_have(enough) && self.evict() {}
            self.reclaim();
            return None;
        };
        let placed = Placed { key, location, size };
        self.store.write(placed, words, old.map(|(location, size, _)| (location, size))).ok()?;
        let ticket = match old {
            Some((_, _, ticket)) => ticket,
            None => {
                let holds =
                    |key, ticket| self.records.get(&key).is_some_and(|record| record.ticket == ticket);
                self.queue.queue(key, 0, self.records.len(), holds)
            }
        };
        let &ForwardedAnswer { qtype, dnssec_ok, checking_disabled, since_ns, lifetime, .. } = answer;
        let renewal = Renewal { name: answer.name.clone(), qtype, dnssec_ok, checking_disabled };
        let record = Record { location, size, ticket, since_ns, ends_ns, renewal };
        self.records.insert(key, record);
        // A thousandth of a lifetime in seconds is that number of milliseconds. The key is a hash.
        let share = RENEWAL + (key >> 32) % SPREAD;
        let at_ns = since_ns.saturating_add(u64::from(lifetime) * share * 1_000_000);
        self.schedule(Due { at_ns, key, since_ns, task: Task::Renew });
        Some(())
    }

    /// Removes expired answers and returns the answers to renew: those used since they were
    /// published.
    pub(crate) fn expire(&mut self, now_ns: u64) -> Vec<Renewal> {
        let mut renewals = Vec::new();
        while let Some(&Reverse(due)) = self.due.peek()
            && due.at_ns <= now_ns
        {
            self.due.pop();
            let Due { key, since_ns, task, .. } = due;
            match (self.records.get(&key), task) {
                (Some(record), _) if record.since_ns != since_ns => {}
                (Some(record), Task::Renew) => {
                    if self.store.last_used_ns(record.location) != 0 {
                        renewals.push(record.renewal.clone());
                    }
                    let at_ns = record.ends_ns;
                    self.schedule(Due { at_ns, key, since_ns, task: Task::Remove });
                }
                (Some(_), Task::Remove) => self.remove(key),
                (None, Task::Remove) => self.release(key),
                (None, Task::Renew) => {}
            }
        }
        self.renewals += renewals.len() as u64;
        renewals
    }

    /// Makes the cells of removed answers reusable once no program can read them.
    pub(crate) fn reclaim(&mut self) {
        self.store.reclaim(&mut self.grace);
    }

    /// Returns whether no work is scheduled for any answer.
    pub(crate) fn is_empty(&self) -> bool {
        self.due.is_empty()
    }

    pub(crate) fn status(&self) -> AnswersStatus {
        AnswersStatus {
            entries: self.records.len(),
            max_entries: self.limit,
            store: self.store.fill(),
            written: self.store.written(),
            evicted: self.evicted,
            unfitting: self.unfitting,
            renewals: self.renewals,
        }
    }

    /// Evicts one answer; `false` if there is none.
    fn evict(&mut self) -> bool {
        let last_used = |key, ticket| {
            let record = self.records.get(&key).filter(|record| record.ticket == ticket)?;
            Some(self.store.last_used_ns(record.location))
        };
        let Some(key) = self.queue.next(self.records.len(), last_used) else { return false };
        self.remove(key);
        self.evicted += 1;
        true
    }

    /// Removes the answer with this key, if there is one.
    pub(crate) fn withdraw(&mut self, key: u64) {
        if self.records.contains_key(&key) {
            self.remove(key);
        }
    }

    fn remove(&mut self, key: u64) {
        if let Some(record) = self.records.remove(&key) {
            self.store.remove(record.placed(key));
        }
        self.release(key);
    }

    /// Lets the next use of an answer hand it over again.
    fn release(&self, key: u64) {
        self.filter.release(filter_key(key, self.generation));
    }

    fn schedule(&mut self, due: Due) {
        if self.due.len() > 4 * self.limit + 64 {
            let Self { due, records, .. } = self;
            due.retain(|Reverse(due)| {
                records.get(&due.key).is_some_and(|record| record.since_ns == due.since_ns)
            });
        }
        self.due.push(Reverse(due));
    }
}

#[cfg(test)]
mod tests {
    use dns_common::{entry::CHUNK_SIZE, index::Pair};
    use memmap2::{MmapMut, MmapRaw};

    use super::*;
    use crate::map::{
        index::{self, Index, IndexMemory},
        store::EntryMemory,
    };

    const SECOND: u64 = 1_000_000_000;

    /// A table, and the index from which the programs read.
    struct Bench {
        table: AnswerTable,
        index: Arc<IndexMemory>,
        memory: Arc<EntryMemory>,
        filter: Arc<LearnFilter>,
    }

    impl Bench {
        fn new(limit: usize) -> Self {
            let anonymous = |length: usize| -> MmapRaw { MmapMut::map_anon(length).unwrap().into() };
            let memory = Arc::new(EntryMemory::new(anonymous(CHUNK_SIZE)));
            let elements = index::elements(limit as u32) as usize;
            let index = Arc::new(IndexMemory::new(anonymous(elements * size_of::<Pair>()), memory.clone()));
            let store = EntryStore::new(Index::new(index.clone()), memory.clone());
            let grace = GracePeriods::start(|| true).unwrap();
            let filter = Arc::new(LearnFilter::new());
            let mut table = AnswerTable::new((store, grace), 7, limit, filter.clone());
            table.begin(1);
            Self { table, index, memory, filter }
        }

        /// Offers an answer as the publisher's handle does.
        fn offer(&mut self, number: u32, since_ns: u64, generation: u64) -> u64 {
            let answer = answer_of(number, since_ns);
            let key = answer::key(7, (&answer.name).into(), 1, false, false);
            self.filter.note(filter_key(key, generation));
            self.table.publish(&answer, generation, since_ns);
            key
        }

        /// Returns whether the next use of the answer would hand it over.
        fn is_wanted(&self, key: u64) -> bool {
            let key = filter_key(key, self.table.generation);
            let wanted = self.filter.note(key);
            if wanted {
                self.filter.release(key);
            }
            wanted
        }

        /// Marks an answer as used, like the programs.
        fn use_it(&self, key: u64, at_ns: u64) {
            let location = self.index.get(key).unwrap();
            self.memory.write(location, &[at_ns]);
        }
    }

    /// Returns an answer with a TTL of 100 s.
    fn answer_of(number: u32, since_ns: u64) -> ForwardedAnswer {
        let name: Name = format!("n{number}.example").parse().unwrap();
        let mut message = vec![0, 0, 0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0];
        message.extend(name.as_wire());
        message.extend([0, 1, 0, 1]);
        let ttl_at = u16::try_from(message.len() + 6).unwrap();
        message.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 100, 0, 4, 10, 0, 0, 1]);
        ForwardedAnswer {
            name,
            qtype: 1,
            dnssec_ok: false,
            checking_disabled: false,
            message: message.into(),
            ttls: [ttl_at].into(),
            ttl: 100,
            lifetime: 100,
            since_ns,
        }
    }

    #[test]
    fn published_answer_is_found() {
        let mut bench = Bench::new(100);
        let key = bench.offer(1, SECOND, 1);
        assert!(bench.index.get(key).is_some() && !bench.is_wanted(key));
        assert_eq!(bench.table.status().entries, 1);
    }

    #[test]
    fn other_generations_are_refused() {
        let mut bench = Bench::new(100);
        let key = bench.offer(1, SECOND, 1);
        bench.table.begin(2);
        assert_eq!((bench.index.get(key), bench.table.status().entries), (None, 0));
        assert!(bench.is_wanted(key));
        bench.offer(1, SECOND, 1);
        assert_eq!(bench.index.get(key), None, "looked up before the flush");
        bench.offer(1, SECOND, 2);
        assert!(bench.index.get(key).is_some());
    }

    #[test]
    fn expired_answer_is_removed() {
        let mut bench = Bench::new(100);
        let key = bench.offer(1, SECOND, 1);
        assert_eq!(bench.table.expire(100 * SECOND), []);
        assert!(bench.index.get(key).is_some());
        assert_eq!(bench.table.expire(101 * SECOND), []);
        assert_eq!(bench.index.get(key), None);
        assert!(bench.is_wanted(key) && bench.table.is_empty());
    }

    #[test]
    fn used_answer_is_renewed_once() {
        let mut bench = Bench::new(100);
        let (used, unused) = (bench.offer(1, SECOND, 1), bench.offer(2, SECOND, 1));
        bench.use_it(used, 5);
        assert_eq!(bench.table.expire(90 * SECOND), [], "too early");
        let renewals = bench.table.expire(97 * SECOND);
        assert_eq!(
            renewals.iter().map(|renewal| renewal.name.to_string()).collect::<Vec<_>>(),
            [answer_of(1, 0).name.to_string()]
        );
        assert_eq!(bench.table.expire(98 * SECOND), []);
        // The old answer is published again because the renewal failed.
        bench.table.publish(&answer_of(1, SECOND), 1, 98 * SECOND);
        assert_eq!(bench.table.status().written, 2);
        bench.table.publish(&answer_of(1, 98 * SECOND), 1, 98 * SECOND);
        bench.table.expire(101 * SECOND);
        assert!(bench.index.get(used).is_some(), "the new answer lives on");
        assert_eq!(bench.index.get(unused), None);
        assert_eq!(bench.table.expire(194 * SECOND), [], "not used since");
    }

    #[test]
    fn unused_answers_are_evicted_first() {
        let mut bench = Bench::new(10);
        let keys: Vec<u64> = (0..10).map(|number| bench.offer(number, SECOND, 1)).collect();
        for &key in &keys[..9] {
            bench.use_it(key, 5);
        }
        let new = bench.offer(10, SECOND, 1);
        assert_eq!(bench.index.get(keys[9]), None);
        assert!(keys[..9].iter().chain([&new]).all(|&key| bench.index.get(key).is_some()));
        assert!(bench.is_wanted(keys[9]));
        assert_eq!((bench.table.status().entries, bench.table.status().evicted), (10, 1));
    }

    #[test]
    fn unfitting_answer_is_handed_over_once() {
        let mut bench = Bench::new(100);
        let mut answer = answer_of(1, SECOND);
        answer.message[3] |= 2;
        let key = answer::key(7, (&answer.name).into(), 1, false, false);
        bench.filter.note(filter_key(key, 1));
        bench.table.publish(&answer, 1, SECOND);
        assert!(bench.index.get(key).is_none() && !bench.is_wanted(key));
        bench.table.expire(101 * SECOND);
        assert!(bench.is_wanted(key), "its successor may fit");
    }
}
