//! The whole answers in the maps: admission, replacement, eviction, renewal and withdrawal. They are of
//! three parts, each with separate room, so none evicts another's:
//!
//! * [`AnswerPart::Outside`]: forwarded answers. They mirror the cache in userspace, which hands over an answer
//!   when it is used for the second time. The programs check lifetime and generation, so no answer
//!   outlives either, regardless of this module.
//! * [`AnswerPart::Replies`]: local replies that are no address lists. The publisher computes them from the
//!   installed names, and again whenever these change.
//! * [`AnswerPart::Denials`]: local replies without an answer, of which random names make any number.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use dns_common::entry::{CELL_SIZE, Location};
use dns_core::wire::ForwardedAnswer;
use dns_kit::rate::TokenBucket;
use hashbrown::HashMap;

use super::{
    lease::GracePeriods,
    publisher::{LearnFilter, QuestionFilter, filter_key},
    replies::{self, HeldReply, MIN_WIDE},
    second_chance::{SecondChance, allowance},
    source::NameSource,
    table::{EntryStore, Placed},
};
use crate::map::{
    answer::{self, AnswerQuestion},
    store::{StoreFill, cells},
};

/// One in this many answers may be admitted per second.
const ADMITTED_SHARE: usize = 8;

/// Share of its lifetime, in thousandths, after which an answer in use is renewed. Renewals of
/// answers that arrived together are spread over [`SPREAD`].
const RENEWAL: u64 = 900;
/// Spread of renewals, in thousandths of the lifetime.
const SPREAD: u64 = 50;

/// Maximum number of local replies, denials included.
pub const MAX_REPLIES: usize = 2048;

/// Memory for local replies in bytes: whole chunks of the store.
pub const REPLY_BYTES: usize = 2 << 20;

/// One in this many local replies may be a denial.
const DENIAL_SHARE: usize = 8;

/// Time after which other records of a reply in use are shown, if not all fit.
const REDRAW_NS: u64 = 1_000_000_000;

/// Longest time in which local replies are computed again at once after a change. Those left then are
/// withdrawn, and computed later.
const REFRESHING: Duration = Duration::from_millis(2);

/// Longest time spent at once on replies withdrawn by a change.
const CATCHING_UP: Duration = Duration::from_millis(1);

/// Maximum number of replies redrawn at once.
const REDRAWN_AT_ONCE: usize = 2;

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
    /// The local replies, which share the memory.
    pub replies: RepliesStatus,
}

/// Number of local replies in the maps, for status and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct RepliesStatus {
    /// Replies in the maps, denials included.
    pub entries: usize,
    /// Replies without an answer.
    pub denials: usize,
    /// Limit of replies; 0: `xdp.other_types` is off.
    pub max_entries: usize,
    /// Memory in use, in bytes.
    pub bytes: usize,
    /// Replies evicted since the start.
    pub evicted: u64,
    /// Replies withdrawn since the start, because the names changed.
    pub withdrawn: u64,
    /// Questions left to userspace since the start, because their replies depend on more than the question.
    pub unfitting: u64,
}

/// An answer in the maps.
struct HeldAnswer {
    location: Location,
    size: usize,
    /// Ticket in the queue.
    ticket: u64,
    since_ns: u64,
    part: AnswerPart,
    content: Content,
}

/// The part of the maps to which an answer belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AnswerPart {
    Outside,
    Replies,
    Denials,
}

/// State of an answer outside its entry.
enum Content {
    Forwarded {
        ends_ns: u64,
        renewal: AnswerQuestion,
    },
    Local(Local),
}

#[derive(Clone)]
struct Local {
    question: AnswerQuestion,
    /// EDNS size for which it was computed; `None`: a common one, because no client has named any.
    size: Option<u16>,
    seed: u64,
    /// Whether the entry shows only some of the records or their orders.
    is_sample: bool,
    /// Last use of the entry when it was written.
    used_ns: u64,
}

/// The answers of a part, in order of eviction, and their room.
struct Room {
    queue: SecondChance,
    count: usize,
    limit: usize,
    cells: u32,
    max_cells: u32,
    admission: TokenBucket,
    evicted: u64,
}

impl Room {
    fn new(limit: usize, bytes: usize) -> Self {
        let max_cells = u32::try_from(bytes / CELL_SIZE).unwrap_or(u32::MAX);
        let admission = allowance(limit / ADMITTED_SHARE);
        Self {
            queue: SecondChance::default(),
            count: 0,
            limit,
            cells: 0,
            max_cells,
            admission,
            evicted: 0,
        }
    }

    fn has_room(&self, size: usize) -> bool {
        // Cells and not bytes: the rest of an entry's last cell stays unused.
        self.count < self.limit && self.cells + cells(size) <= self.max_cells
    }
}

impl HeldAnswer {
    fn placed(&self, key: u64) -> Placed {
        Placed {
            key,
            location: self.location,
            size: self.size,
        }
    }
}

/// The kinds of scheduled work on an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Task {
    Renew,
    Remove,
    Redraw,
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

/// The whole answers in the maps.
pub(crate) struct AnswerTable {
    store: EntryStore,
    grace: GracePeriods,
    seed: u64,
    records: HashMap<u64, HeldAnswer>,
    /// Room of the parts, by [`AnswerPart`] as a number.
    rooms: [Room; 3],
    due: BinaryHeap<Reverse<Due>>,
    /// Filters answers that need not be handed over again.
    filter: Arc<LearnFilter>,
    /// Filters questions that need not be handed over again.
    questions: Arc<QuestionFilter>,
    /// Local replies withdrawn by a change, to be computed again.
    later: VecDeque<(u64, Local)>,
    last_seed: u64,
    generation: u64,
    unfitting: u64,
    renewals: u64,
    withdrawn: u64,
    unfitting_replies: u64,
}

impl AnswerTable {
    /// Returns an empty table for at most `limit` forwarded answers, and `max_replies` local replies.
    pub(crate) fn new(
        (store, grace): (EntryStore, GracePeriods),
        seed: u64,
        (limit, max_replies): (usize, usize),
        filter: Arc<LearnFilter>,
        questions: Arc<QuestionFilter>,
    ) -> Self {
        let reply_bytes = if max_replies > 0 { REPLY_BYTES } else { 0 };
        // The maps were sized for both: what replies do not get is for answers.
        let outside_bytes = store.allocator.fill().total.saturating_sub(reply_bytes);
        let denials = max_replies / DENIAL_SHARE;
        let denial_bytes = reply_bytes / DENIAL_SHARE;
        let rooms = [
            Room::new(limit, outside_bytes),
            Room::new(max_replies - denials, reply_bytes - denial_bytes),
            Room::new(denials, denial_bytes),
        ];
        Self {
            store,
            grace,
            seed,
            records: HashMap::new(),
            rooms,
            due: BinaryHeap::new(),
            filter,
            questions,
            later: VecDeque::new(),
            last_seed: seed,
            generation: 0,
            unfitting: 0,
            renewals: 0,
            withdrawn: 0,
            unfitting_replies: 0,
        }
    }

    /// Begins a generation: all earlier forwarded answers are void, and the programs ignore them already.
    pub(crate) fn begin(&mut self, generation: u64) {
        let gone: Vec<u64> = self.keys(|record| record.part == AnswerPart::Outside);
        for key in gone {
            self.remove(key);
        }
        // All its tickets are void; skipping them one by one would cost the next evictions.
        self.rooms[AnswerPart::Outside as usize].queue = SecondChance::default();
        // Renewals and ends belong to forwarded answers alone.
        self.due.retain(|Reverse(due)| due.task == Task::Redraw);
        self.generation = generation;
    }

    /// Removes all forwarded answers.
    pub(crate) fn withdraw_all(&mut self) {
        self.begin(self.generation);
    }

    /// Publishes an answer that was looked up in `generation`, at `now_ns` of `CLOCK_BOOTTIME`.
    pub(crate) fn publish(&mut self, answer: &ForwardedAnswer, generation: u64, now_ns: u64) {
        let &ForwardedAnswer {
            since_ns, lifetime, ..
        } = answer;
        let renewal = AnswerQuestion::of(answer);
        let key = renewal.key(self.seed);
        let ends_ns = since_ns.saturating_add(u64::from(lifetime) * 1_000_000_000);
        let room = &self.rooms[AnswerPart::Outside as usize];
        // Looked up before a flush or a change of routes and handed over after it, or expired on
        // the way.
        if generation != self.generation || room.limit == 0 || ends_ns <= now_ns {
            return self.release(key);
        }
        if self
            .records
            .get(&key)
            .is_some_and(|record| record.since_ns == since_ns)
        {
            // The same answer again: its renewal has failed.
            return;
        }
        let Some(words) = answer::encode(answer, self.seed, generation) else {
            self.unfitting += 1;
            // Not handed over again until another answer may have arrived.
            self.schedule(Due {
                at_ns: ends_ns,
                key,
                since_ns,
                task: Task::Remove,
            });
            return;
        };
        let content = Content::Forwarded { ends_ns, renewal };
        if self
            .place(key, &words, AnswerPart::Outside, since_ns, content)
            .is_none()
        {
            return self.release(key);
        }
        // A thousandth of a lifetime in seconds is that number of milliseconds. The key is a hash.
        let share = RENEWAL + (key >> 32) % SPREAD;
        let at_ns = since_ns.saturating_add(u64::from(lifetime) * share * 1_000_000);
        self.schedule(Due {
            at_ns,
            key,
            since_ns,
            task: Task::Renew,
        });
    }

    /// Writes an entry and records it; `None` if there is no room or the admission rate is exceeded.
    fn place(
        &mut self,
        key: u64,
        words: &[u64],
        part: AnswerPart,
        since_ns: u64,
        content: Content,
    ) -> Option<()> {
        let size = words.len() * 8;
        // A question whose name has come into existence, or has gone, moves to a part with room of
        // its own.
        if self
            .records
            .get(&key)
            .is_some_and(|record| record.part != part)
        {
            self.remove(key);
        }
        let old = self
            .records
            .get(&key)
            .map(|record| (record.location, record.size, record.ticket));
        // Only newcomers count: a change of what is there must not wait for the rate.
        if old.is_none() && !self.admit(part, size) {
            return None;
        }
        self.reclaim();
        let Some(location) = self.store.allocator.allocate(size) else {
            // Room for several, since it is there only after a grace period; this one comes again
            // with its next use.
            let enough = self.store.batch(size);
            while !self.store.will_have(enough) && self.evict(part) {}
            self.reclaim();
            return None;
        };
        let placed = Placed {
            key,
            location,
            size,
        };
        self.store
            .write(
                placed,
                words,
                old.map(|(location, size, _)| (location, size)),
            )
            .ok()?;
        let room = &mut self.rooms[part as usize];
        let ticket = match old {
            Some((_, old_size, ticket)) => {
                // Its ticket stays, and so does its turn to be evicted: a renewal is not a use.
                room.cells -= cells(old_size);
                ticket
            }
            None => {
                let records = &self.records;
                room.count += 1;
                room.queue.queue(key, 0, room.count, |key, ticket| {
                    records
                        .get(&key)
                        .is_some_and(|record| record.part == part && record.ticket == ticket)
                })
            }
        };
        room.cells += cells(size);
        self.records.insert(
            key,
            HeldAnswer {
                location,
                size,
                ticket,
                since_ns,
                part,
                content,
            },
        );
        Some(())
    }

    /// Makes room for a further answer, if the rate of its part permits one.
    fn admit(&mut self, part: AnswerPart, size: usize) -> bool {
        if !self.rooms[part as usize].admission.take(Instant::now()) {
            return false;
        }
        while !self.rooms[part as usize].has_room(size) {
            if !self.evict(part) {
                return false;
            }
        }
        true
    }

    /// Removes expired answers, shows other records of local replies by `source`, and returns the answers
    /// to renew: those used since they were published.
    pub(crate) fn expire(&mut self, source: &dyn NameSource, now_ns: u64) -> Vec<AnswerQuestion> {
        let mut renewals = Vec::new();
        let mut redrawn = 0;
        while let Some(due) = self.next_due(now_ns) {
            let Due {
                key,
                since_ns,
                task,
                ..
            } = due;
            let Some(record) = self.records.get(&key) else {
                continue;
            };
            match (&record.content, task) {
                (Content::Forwarded { ends_ns, renewal }, Task::Renew) => {
                    // Without a query for it at the interface it is not worth a query to a
                    // recursor.
                    if self.store.memory.last_used_ns(record.location) != 0 {
                        renewals.push(renewal.clone());
                    }
                    self.schedule(Due {
                        at_ns: *ends_ns,
                        key,
                        since_ns,
                        task: Task::Remove,
                    });
                }
                (Content::Forwarded { .. }, Task::Remove) => drop(self.remove(key)),
                (Content::Local(local), Task::Redraw) => {
                    let is_used = self.store.memory.last_used_ns(record.location) != local.used_ns;
                    // The others come a second later: drawing takes up to a millisecond, and the
                    // thread has other work.
                    if is_used && redrawn < REDRAWN_AT_ONCE {
                        redrawn += 1;
                        self.redraw(key, source, now_ns);
                    } else {
                        self.schedule(Due {
                            at_ns: now_ns + REDRAW_NS,
                            key,
                            since_ns,
                            task: Task::Redraw,
                        });
                    }
                }
                _ => {}
            }
        }
        self.renewals += renewals.len() as u64;
        renewals
    }

    /// Takes the next task that is due, of an answer that is still there.
    fn next_due(&mut self, now_ns: u64) -> Option<Due> {
        while let Some(&Reverse(due)) = self.due.peek()
            && due.at_ns <= now_ns
        {
            self.due.pop();
            match self.records.get(&due.key) {
                Some(record) if record.since_ns == due.since_ns => return Some(due),
                // The task of an earlier answer to the question.
                Some(_) => {}
                // An answer that does not fit has no record; its time is over, so another may be
                // handed over.
                None if due.task == Task::Remove => self.release(due.key),
                None => {}
            }
        }
        None
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
        let [outside, replies, denials] = &self.rooms;
        AnswersStatus {
            entries: outside.count,
            max_entries: outside.limit,
            store: self.store.allocator.fill(),
            written: self.store.written,
            evicted: outside.evicted,
            unfitting: self.unfitting,
            renewals: self.renewals,
            replies: RepliesStatus {
                entries: replies.count + denials.count,
                denials: denials.count,
                max_entries: replies.limit + denials.limit,
                bytes: (replies.cells + denials.cells) as usize * CELL_SIZE,
                evicted: replies.evicted + denials.evicted,
                withdrawn: self.withdrawn,
                unfitting: self.unfitting_replies,
            },
        }
    }

    /// Evicts one answer of a part; `false` if there is none.
    fn evict(&mut self, part: AnswerPart) -> bool {
        let Self {
            records,
            rooms,
            store,
            ..
        } = self;
        let room = &mut rooms[part as usize];
        // The queue holds tickets of answers that are gone or have moved; only a record with the
        // same one counts.
        let next = room.queue.next(room.count, |key, ticket| {
            let record = records.get(&key)?;
            if record.part != part || record.ticket != ticket {
                return None;
            }
            Some(store.memory.last_used_ns(record.location))
        });
        let Some(key) = next else {
            return false;
        };
        room.evicted += 1;
        self.remove(key);
        true
    }

    /// Removes the forwarded answer with this key, if there is one.
    pub(crate) fn withdraw(&mut self, key: u64) {
        if self
            .records
            .get(&key)
            .is_some_and(|record| record.part == AnswerPart::Outside)
        {
            self.remove(key);
        }
    }

    fn remove(&mut self, key: u64) -> Option<Content> {
        let Some(record) = self.records.remove(&key) else {
            // A name without a record may still be suppressed by the filter.
            self.release(key);
            return None;
        };
        let room = &mut self.rooms[record.part as usize];
        room.count -= 1;
        room.cells -= cells(record.size);
        self.store.remove(record.placed(key));
        match record.part {
            AnswerPart::Outside => self.release(key),
            AnswerPart::Replies | AnswerPart::Denials => self.questions.release(key),
        }
        Some(record.content)
    }

    fn keys(&self, are_wanted: impl Fn(&HeldAnswer) -> bool) -> Vec<u64> {
        let wanted = self.records.iter().filter(|(_, record)| are_wanted(record));
        wanted.map(|(&key, _)| key).collect()
    }

    /// Lets the next use of an answer hand it over again.
    fn release(&self, key: u64) {
        self.filter.release(filter_key(key, self.generation));
    }

    fn schedule(&mut self, due: Due) {
        let [outside, replies, denials] = &self.rooms;
        // Tasks of answers that are gone stay until they are due, which may be days: they are
        // dropped once they outnumber the others.
        if self.due.len() > 4 * (outside.limit + replies.limit + denials.limit) + 64 {
            let Self { due, records, .. } = self;
            due.retain(|Reverse(due)| {
                records
                    .get(&due.key)
                    .is_some_and(|record| record.since_ns == due.since_ns)
            });
        }
        self.due.push(Reverse(due));
    }
}

//----------- Local replies --------------------------------------------------

impl AnswerTable {
    /// Publishes the replies to a question of clients with this EDNS size, computed from `source`.
    /// Replies already there stay, unless the size was not known then.
    pub(crate) fn learn(
        &mut self,
        source: &dyn NameSource,
        question: AnswerQuestion,
        size: Option<u16>,
        now_ns: u64,
    ) {
        let key = question.key(self.seed);
        // Smaller sizes say nothing about clients that accept more.
        let size = size.filter(|&size| size >= MIN_WIDE);
        // The entry is there already, unless it was made for a common size and this client has
        // named one.
        if let Some(HeldAnswer {
            content: Content::Local(local),
            ..
        }) = self.records.get(&key)
            && (local.size.is_some() || size.is_none())
        {
            return;
        }
        let local = Local {
            question,
            size,
            seed: self.next_seed(),
            is_sample: false,
            used_ns: 0,
        };
        self.show(key, local, source, now_ns);
    }

    /// Computes the local replies that differ between two sources again, and withdraws those that cannot
    /// be computed in time: when this returns, no reply of the older source is left that the newer one
    /// does not give.
    pub(crate) fn refresh(
        &mut self,
        older: &dyn NameSource,
        source: &dyn NameSource,
        now_ns: u64,
        progress: &mut dyn FnMut(),
    ) {
        let begun = Instant::now();
        // Questions that only userspace could answer may have replies now.
        self.questions.begin();
        for (index, key) in self
            .keys(|record: &HeldAnswer| match &record.content {
                Content::Forwarded { .. } => false,
                Content::Local(local) => !source.gives_same_replies(older, &local.question.name),
            })
            .into_iter()
            .enumerate()
        {
            if index % 16 == 0 {
                progress();
            }
            // Withdrawn rather than late: userspace answers, and no reply of the older records is
            // left.
            if begun.elapsed() <= REFRESHING && self.show_again(key, source, now_ns, None) {
                continue;
            }
            self.withdrawn += 1;
            if let Some(Content::Local(local)) = self.remove(key) {
                self.later.push_back((key, local));
            }
        }
        // Bounded by the number of records at a time; a change in between may have made it longer.
        self.later.truncate(MAX_REPLIES);
    }

    pub(crate) fn replies(&self) -> Vec<HeldReply> {
        let mut replies = Vec::new();
        for record in self.records.values() {
            if let Content::Local(local) = &record.content {
                replies.push(HeldReply {
                    question: local.question.clone(),
                    bytes: record.size,
                    is_denial: record.part == AnswerPart::Denials,
                });
            }
        }
        replies
    }

    /// Publishes some of the replies that were withdrawn by a change.
    pub(crate) fn catch_up(&mut self, source: &dyn NameSource, now_ns: u64) {
        let until = Instant::now() + CATCHING_UP;
        while let Some((key, local)) = self.later.pop_front() {
            if !self.records.contains_key(&key) {
                self.show(key, local, source, now_ns);
            }
            if Instant::now() >= until {
                return;
            }
        }
    }

    /// Returns whether replies that were withdrawn wait to be computed.
    pub(crate) fn is_behind(&self) -> bool {
        !self.later.is_empty()
    }

    /// Returns a seed that differs between servers and calls.
    fn next_seed(&mut self) -> u64 {
        // Steps of the golden ratio, wide enough for the draws from one seed.
        self.last_seed = self.last_seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.last_seed
    }

    pub(crate) fn keeps_forwarded(&self) -> bool {
        self.rooms[AnswerPart::Outside as usize].limit > 0
    }

    pub(crate) fn keeps_replies(&self) -> bool {
        self.rooms[AnswerPart::Replies as usize].limit > 0
    }

    /// Shows other records of a reply that is in use.
    fn redraw(&mut self, key: u64, source: &dyn NameSource, now_ns: u64) {
        let seed = self.next_seed();
        if !self.show_again(key, source, now_ns, Some(seed)) {
            self.remove(key);
        }
    }

    /// Computes a local reply again, in other orders if there is a new seed; `false` if it cannot be
    /// published any more.
    fn show_again(
        &mut self,
        key: u64,
        source: &dyn NameSource,
        now_ns: u64,
        seed: Option<u64>,
    ) -> bool {
        let Some(HeldAnswer {
            content: Content::Local(local),
            ..
        }) = self.records.get(&key)
        else {
            return true;
        };
        let mut local = local.clone();
        local.seed = seed.unwrap_or(local.seed);
        self.show(key, local, source, now_ns)
    }

    /// Writes the entry of a local reply unless the present one is the same; `false` if there is none.
    fn show(&mut self, key: u64, mut local: Local, source: &dyn NameSource, now_ns: u64) -> bool {
        let entry =
            replies::draw(source, &local.question, local.size, local.seed).and_then(|drawn| {
                let words = answer::encode_local(&drawn.reply, &local.question, self.seed)?;
                let part = if drawn.reply.is_negative() {
                    AnswerPart::Denials
                } else {
                    AnswerPart::Replies
                };
                Some((words, part, drawn.is_sample))
            });
        let Some((mut words, part, is_sample)) = entry else {
            self.unfitting_replies += 1;
            return false;
        };
        if let Some(record) = self.records.get(&key).filter(|record| record.part == part) {
            if self
                .store
                .memory
                .equals_but_last_used(record.location, &words)
            {
                return true;
            }
            // The new entry of a question in use counts as used, for its eviction and its
            // redrawing.
            words[0] = self.store.memory.last_used_ns(record.location);
        }
        (local.is_sample, local.used_ns) = (is_sample, words[0]);
        if self
            .place(key, &words, part, now_ns, Content::Local(local))
            .is_none()
        {
            // There may be room at its next query.
            self.questions.release(key);
            return false;
        }
        if is_sample {
            self.schedule(Due {
                at_ns: now_ns + REDRAW_NS,
                key,
                since_ns: now_ns,
                task: Task::Redraw,
            });
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use dns_common::{entry::CHUNK_SIZE, forwarded::MAX_ANSWER_SIZE, index::Pair};
    use dns_core::{
        name::Name,
        resolve::{Health, Resolution},
        wire::{Parsed, Query, append_opt, parse},
    };
    use memmap2::{MmapMut, MmapRaw};

    use super::*;
    use crate::map::{
        index::{self, IndexMemory},
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

    /// Names without local replies.
    struct Nothing;

    impl NameSource for Nothing {
        fn published_names(&self) -> Box<dyn Iterator<Item = Name> + '_> {
            Box::new(std::iter::empty())
        }

        fn resolve(&self, _health: &dyn Health, _name: &Name) -> Option<Resolution> {
            None
        }
    }

    /// Names with an SRV record for each port; a name that begins with `x` is denied.
    struct Ports(&'static [u8]);

    impl NameSource for Ports {
        fn published_names(&self) -> Box<dyn Iterator<Item = Name> + '_> {
            Box::new(std::iter::empty())
        }

        fn resolve(&self, _health: &dyn Health, _name: &Name) -> Option<Resolution> {
            None
        }

        fn reply(&self, query: &Query<'_>, serial: u32, seed: u64) -> Option<Vec<u8>> {
            let mut ports = self.0.to_vec();
            let is_denied = query.question.raw_name[1].eq_ignore_ascii_case(&b'x');
            if is_denied {
                ports.clear();
            }
            // Orders that differ from draw to draw, as from a random generator.
            let turns = seed as usize % ports.len().max(1);
            ports.rotate_left(turns);
            let mut reply = vec![
                0,
                0,
                0x85,
                0x80,
                0,
                1,
                0,
                ports.len() as u8,
                0,
                u8::from(is_denied),
                0,
                0,
            ];
            reply.extend(&query.message[query.question_range()]);
            for port in ports {
                reply.extend(b"\xc0\x0c\0\x21\0\x01\0\0\0\0\0\x09\0\x01\0\x01\0");
                reply.extend([port, 1, b'a', 0]);
            }
            if is_denied {
                reply.extend(b"\0\0\x06\0\x01\0\0\0\x05\0\x16\0\0");
                reply.extend(serial.to_be_bytes());
                reply.extend([0; 16]);
            }
            append_opt(query, &mut reply);
            Some(reply)
        }
    }

    impl Bench {
        /// A table for local replies, too.
        fn with_replies(limit: usize, replies: usize) -> Self {
            Self::of(limit, replies, 4)
        }

        fn new(limit: usize) -> Self {
            Self::of(limit, 0, 1)
        }

        fn of(limit: usize, replies: usize, chunks: usize) -> Self {
            let anonymous =
                |length: usize| -> MmapRaw { MmapMut::map_anon(length).unwrap().into() };
            let memory = Arc::new(EntryMemory::new(anonymous(chunks * CHUNK_SIZE)));
            let elements = index::elements((limit + replies) as u32) as usize;
            let index = Arc::new(IndexMemory::new(
                anonymous(elements * size_of::<Pair>()),
                memory.clone(),
            ));
            let store = EntryStore::of(index.clone());
            let grace = GracePeriods::start(|| true).unwrap();
            let filter = Arc::new(LearnFilter::new());
            let mut table = AnswerTable::new(
                (store, grace),
                7,
                (limit, replies),
                filter.clone(),
                Arc::default(),
            );
            table.begin(1);
            Self {
                table,
                index,
                memory,
                filter,
            }
        }

        fn expire(&mut self, now_ns: u64) -> Vec<AnswerQuestion> {
            self.table.expire(&Nothing, now_ns)
        }

        /// Learns the SRV reply of a name as the publisher does, and returns its key.
        fn learn(&mut self, source: &dyn NameSource, name: &str) -> u64 {
            let question = AnswerQuestion {
                name: name.parse::<Name>().unwrap(),
                qtype: 33,
                dnssec_ok: false,
                checking_disabled: false,
            };
            let key = question.key(7);
            self.table.learn(source, question, Some(1232), SECOND);
            key
        }

        /// Returns the replies that the programs give.
        fn replies(&self, key: u64, name: &str) -> Vec<Vec<u8>> {
            let Some(location) = self.index.get(key) else {
                return Vec::new();
            };
            let entry = self.memory.read(location, MAX_ANSWER_SIZE / 8).unwrap();
            let mut message = b"\0\x07\x01\0\0\x01\0\0\0\0\0\0".to_vec();
            message.extend(name.parse::<Name>().unwrap().as_wire());
            message.extend([0, 33, 0, 1]);
            let Parsed::Query(query) = parse(&message) else {
                panic!("a query")
            };
            test_support::forwarded::models(&entry, &query, 0)
        }

        /// Offers an answer as the publisher's handle does.
        fn offer(&mut self, number: u32, since_ns: u64, generation: u64) -> u64 {
            let answer = answer_of(number, since_ns);
            let key = AnswerQuestion::of(&answer).key(7);
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
        assert_eq!(
            (bench.index.get(key), bench.table.status().entries),
            (None, 0)
        );
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
        assert_eq!(bench.expire(100 * SECOND), []);
        assert!(bench.index.get(key).is_some());
        assert_eq!(bench.expire(101 * SECOND), []);
        assert_eq!(bench.index.get(key), None);
        assert!(bench.is_wanted(key) && bench.table.is_empty());
    }

    #[test]
    fn used_answer_is_renewed_once() {
        let mut bench = Bench::new(100);
        let used = bench.offer(1, SECOND, 1);
        let unused = bench.offer(2, SECOND, 1);
        bench.use_it(used, 5);
        assert_eq!(bench.expire(90 * SECOND), [], "too early");
        let renewals = bench.expire(97 * SECOND);
        assert_eq!(
            renewals
                .iter()
                .map(|renewal| renewal.name.to_string())
                .collect::<Vec<_>>(),
            [answer_of(1, 0).name.to_string()]
        );
        assert_eq!(bench.expire(98 * SECOND), []);
        // The old answer is published again because the renewal failed.
        bench.table.publish(&answer_of(1, SECOND), 1, 98 * SECOND);
        assert_eq!(bench.table.status().written, 2);
        bench
            .table
            .publish(&answer_of(1, 98 * SECOND), 1, 98 * SECOND);
        bench.expire(101 * SECOND);
        assert!(bench.index.get(used).is_some(), "the new answer lives on");
        assert_eq!(bench.index.get(unused), None);
        assert_eq!(bench.expire(194 * SECOND), [], "not used since");
    }

    #[test]
    fn unused_answers_are_evicted_first() {
        let mut bench = Bench::new(10);
        let keys: Vec<u64> = (0..10)
            .map(|number| bench.offer(number, SECOND, 1))
            .collect();
        for &key in &keys[..9] {
            bench.use_it(key, 5);
        }
        let new = bench.offer(10, SECOND, 1);
        assert_eq!(bench.index.get(keys[9]), None);
        assert!(
            keys[..9]
                .iter()
                .chain([&new])
                .all(|&key| bench.index.get(key).is_some())
        );
        assert!(bench.is_wanted(keys[9]));
        assert_eq!(
            (bench.table.status().entries, bench.table.status().evicted),
            (10, 1)
        );
    }

    #[test]
    fn unfitting_answer_is_handed_over_once() {
        let mut bench = Bench::new(100);
        let mut answer = answer_of(1, SECOND);
        answer.message[3] |= 2;
        let key = AnswerQuestion::of(&answer).key(7);
        bench.filter.note(filter_key(key, 1));
        bench.table.publish(&answer, 1, SECOND);
        assert!(bench.index.get(key).is_none() && !bench.is_wanted(key));
        bench.expire(101 * SECOND);
        assert!(bench.is_wanted(key), "its successor may fit");
    }

    #[test]
    fn each_record_comes_first_once() {
        let mut bench = Bench::with_replies(10, 100);
        let key = bench.learn(&Ports(&[1, 2, 3]), "web.test");
        let replies = bench.replies(key, "web.test");
        let mut firsts: Vec<u8> = replies
            .iter()
            .map(|reply| reply[12 + 10 + 4 + 17])
            .collect();
        firsts.sort_unstable();
        assert_eq!(firsts, [1, 2, 3]);
        assert_eq!(bench.table.status().replies.entries, 1);
    }

    #[test]
    fn change_replaces_older_reply_at_once() {
        let mut bench = Bench::with_replies(10, 100);
        let old = Ports(&[1]);
        let new = Ports(&[2]);
        let keys = ["a.test", "b.test"].map(|name| (bench.learn(&old, name), name));
        bench.table.refresh(&old, &new, SECOND, &mut || {});
        for (key, name) in keys {
            let replies = bench.replies(key, name);
            assert!(
                replies
                    .iter()
                    .all(|reply| reply.ends_with(&[2, 1, b'a', 0])),
                "{replies:02x?}"
            );
        }
        bench.table.refresh(&new, &Nothing, SECOND, &mut || {});
        assert!(keys.iter().all(|&(key, _)| bench.index.get(key).is_none()));
        assert_eq!(bench.table.status().replies.entries, 0);
    }

    #[test]
    fn change_leaves_other_replies_alone() {
        /// A newer source, which differs only for one name.
        struct OneChanged(Ports);
        impl NameSource for OneChanged {
            fn published_names(&self) -> Box<dyn Iterator<Item = Name> + '_> {
                self.0.published_names()
            }
            fn resolve(&self, health: &dyn Health, name: &Name) -> Option<Resolution> {
                self.0.resolve(health, name)
            }
            fn gives_same_replies(&self, _older: &dyn NameSource, name: &Name) -> bool {
                *name != "n7.test".parse().unwrap()
            }
            fn reply(&self, query: &Query<'_>, serial: u32, seed: u64) -> Option<Vec<u8>> {
                assert!(
                    query.question.raw_name.starts_with(b"\x02n7")
                        || query.question.raw_name.starts_with(b"\x02N7")
                );
                self.0.reply(query, serial, seed)
            }
        }
        let mut bench = Bench::with_replies(10, 100);
        let old = Ports(&[1]);
        let new = OneChanged(Ports(&[2]));
        let names: Vec<String> = (0..50).map(|number| format!("n{number}.test")).collect();
        let keys: Vec<u64> = names.iter().map(|name| bench.learn(&old, name)).collect();
        bench.table.refresh(&old, &new, SECOND, &mut || {});
        for (number, (key, name)) in keys.into_iter().zip(&names).enumerate() {
            let port = if number == 7 { 2 } else { 1 };
            let replies = bench.replies(key, name);
            // No time is set here: the changed reply may be withdrawn instead on a busy machine.
            assert!(number == 7 || !replies.is_empty(), "{name} was withdrawn");
            assert!(
                replies
                    .iter()
                    .all(|reply| reply.ends_with(&[port, 1, b'a', 0])),
                "{name}: {replies:02x?}"
            );
        }
    }

    #[test]
    fn unfinished_replies_are_withdrawn_and_caught_up() {
        /// A source so slow that a refresh has no time for a second reply.
        struct Slow(Ports);
        impl NameSource for Slow {
            fn published_names(&self) -> Box<dyn Iterator<Item = Name> + '_> {
                self.0.published_names()
            }
            fn resolve(&self, health: &dyn Health, name: &Name) -> Option<Resolution> {
                self.0.resolve(health, name)
            }
            fn reply(&self, query: &Query<'_>, serial: u32, seed: u64) -> Option<Vec<u8>> {
                std::thread::sleep(REFRESHING);
                self.0.reply(query, serial, seed)
            }
        }
        let mut bench = Bench::with_replies(10, 100);
        let old = Ports(&[1]);
        let new = Slow(Ports(&[2]));
        let names = ["a.test", "b.test", "c.test", "d.test"];
        let keys = names.map(|name| bench.learn(&old, name));
        bench.table.refresh(&old, &new, SECOND, &mut || {});
        assert_eq!(
            keys.iter()
                .filter(|&&key| bench.index.get(key).is_some())
                .count(),
            1
        );
        while bench.table.is_behind() {
            bench.table.catch_up(&new, SECOND);
        }
        for (key, name) in keys.into_iter().zip(names) {
            assert!(bench.replies(key, name)[0].ends_with(&[2, 1, b'a', 0]));
        }
    }

    #[test]
    fn denials_evict_only_denials() {
        let mut bench = Bench::with_replies(100, 80);
        // Without its rate, which a test would have to wait for.
        for room in &mut bench.table.rooms {
            room.admission = allowance(1 << 20);
        }
        let source = Ports(&[1, 2]);
        let outside = bench.offer(1, SECOND, 1);
        let replies: Vec<(u64, String)> = (0..70)
            .map(|number| format!("n{number}.test"))
            .map(|name| (bench.learn(&source, &name), name))
            .collect();
        for number in 0..1000 {
            bench.learn(&source, &format!("x{number}.test"));
        }
        let status = bench.table.status().replies;
        assert_eq!((status.entries, status.denials), (80, 10));
        assert!(bench.index.get(outside).is_some());
        assert!(
            replies
                .iter()
                .all(|(key, name)| bench.replies(*key, name).len() == 2)
        );
        for number in 1000..2000 {
            bench.learn(&source, &format!("n{number}.test"));
        }
        assert!(
            bench.index.get(outside).is_some(),
            "each part has room of its own"
        );
        assert_eq!(bench.table.status().replies.denials, 10);
    }

    #[test]
    fn flush_of_cache_leaves_local_replies() {
        let mut bench = Bench::with_replies(10, 100);
        let outside = bench.offer(1, SECOND, 1);
        let local = bench.learn(&Ports(&[1]), "web.test");
        bench.table.begin(2);
        assert!(bench.index.get(outside).is_none() && bench.index.get(local).is_some());
        bench.table.withdraw(local);
        assert!(bench.index.get(local).is_some(), "it is not the cache's");
    }

    #[test]
    fn samples_in_use_show_other_records() {
        let mut bench = Bench::with_replies(10, 100);
        let source = Ports(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        let key = bench.learn(&source, "web.test");
        let before = bench.replies(key, "web.test");
        assert_eq!(before.len(), 8);
        bench.table.expire(&source, 2 * SECOND);
        assert_eq!(bench.replies(key, "web.test"), before, "unused");
        bench.use_it(key, 5);
        bench.table.expire(&source, 3 * SECOND);
        assert_ne!(bench.replies(key, "web.test"), before);
        let location = bench.index.get(key).unwrap();
        assert_eq!(
            bench.memory.last_used_ns(location),
            5,
            "its place in the queue stays"
        );
    }
}
