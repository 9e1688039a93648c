//! Cache of forwarded answers, limited in entries and bytes.
//!
//! Replies are kept as bytes, without their OPT. A hit is a copy with the client's id and letter
//! case, in which the TTLs are overwritten.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use smallvec::SmallVec;

use super::{
    CachedQuestion, InterfaceAnswers, NoInterfaces,
    message::{self, CacheKey, FLAG_AD, Flags, Form, KEY_CLASS, KeyFields, MessageIndex},
    store::{self, Generation, SLOT_SIZE, Store, Stored, Totals},
};
use dns_core::{
    config::{CacheConfig, Compat},
    wire::{
        self, CLASS_IN, ExtendedError, ForwardedAnswer, InfoCode, OPT_LEN, Query, TYPE_ANY,
        remaining_ttl,
    },
};
use dns_kit::clock::{BootInstant, milliseconds};

/// Minimum TTL in seconds: lower ones except 0 are raised to it (observed). Also the lifetime of an
/// empty answer without SOA (observed).
const MIN_TTL: u32 = 5;
/// Maximum TTL of an answer with data, in seconds (observed).
const MAX_TTL: u32 = 3600;
/// Maximum TTL of an answer without data, in seconds (observed).
const MAX_DENIAL_TTL: u32 = 1800;
/// TTL of stale answers in seconds (RFC 8767, section 4 recommends 30 s).
const STALE_TTL: u32 = 30;
/// Time after a failed renewal during which an entry is served without another attempt (RFC 8767,
/// section 5: "failure recheck timer", at least 30 s).
const STALE_RECHECK: Duration = Duration::from_secs(30);
/// Bytes of an entry in addition to its message and key: its fields, its slot in the store, and two
/// allocator headers.
const ENTRY_OVERHEAD: usize = size_of::<Entry>() + SLOT_SIZE + 32;
/// Query types IXFR, AXFR, MAILB, MAILA, whose answers cannot be cached.
const UNCACHEABLE_TYPES: std::ops::RangeInclusive<u16> = 251..=254;

#[derive(Debug)]
pub(crate) struct Cache {
    /// Entries by key. The weight of an entry is its size in bytes.
    store: Store<Entry>,
    /// Minimum weight of an entry, so that there are not more entries than configured.
    least_weight: u64,
    /// Time for which expired entries may be served; `None` to disable this.
    pub(crate) stale: Option<Duration>,
    /// The parts of a client's query that are forwarded and therefore determine the answer.
    form: Form,
    /// Quirks of bosh-dns to reproduce.
    compat: Compat,
    /// Interfaces that answer from copies of entries.
    interfaces: Arc<dyn InterfaceAnswers>,
    /// Number of look-ups by result.
    pub(crate) counters: CacheCounters,
}

/// Look-ups since the start, by result.
#[derive(Debug, Default)]
pub(crate) struct CacheCounters {
    /// Hits on entries with data.
    pub(crate) hits: AtomicU64,
    /// Hits on entries without data (NXDOMAIN, NODATA).
    pub(crate) denial_hits: AtomicU64,
    /// Look-ups without a usable entry.
    pub(crate) misses: AtomicU64,
    /// Expired answers served while renewal failed.
    pub(crate) stale_hits: AtomicU64,
}

/// A cached answer with its lifetime.
#[derive(Debug)]
pub(crate) struct Entry {
    /// The message without OPT.
    pub(crate) message: Box<[u8]>,
    /// Offsets of the TTLs, all of which have the same value.
    ttls: SmallVec<[u16; 6]>,
    /// Offsets of owner names that repeat the question's name uncompressed.
    owners: SmallVec<[u16; 2]>,
    /// The TTL when the answer arrived, in seconds.
    ttl: u32,
    /// Time of arrival. TTLs keep running while the machine is suspended.
    since: BootInstant,
    /// Time for which the answer is fresh.
    pub(crate) lifetime: Duration,
    /// Time after that for which it may be served while recursors are down.
    pub(crate) stale: Duration,
    /// Whether the answer is NODATA or NXDOMAIN.
    pub(crate) denial: bool,
    /// Name of the recursor that sent the answer; `None` for the answer of an HTTP handler.
    pub(crate) recursor: Option<Arc<str>>,
    /// Time in milliseconds after `since` until which it is served stale without another attempt.
    no_recheck_before_ms: AtomicU64,
}

/// Result of a look-up.
pub(crate) enum Lookup {
    Fresh(Vec<u8>),
    /// An expired answer, which should be renewed first.
    Stale(Arc<Stored<Entry>>),
    Miss,
}

impl Cache {
    /// Creates an empty cache, limited in bytes. If that limit would permit more entries than
    /// configured, small entries get a higher weight.
    pub(crate) fn new(config: &CacheConfig, form: Form, compat: Compat) -> Self {
        let least_weight = config.max_bytes / config.max_entries.max(1);
        Self {
            store: Store::new(config.max_bytes, least_weight),
            least_weight,
            stale: config.serve_stale,
            form,
            compat,
            interfaces: NoInterfaces::shared(),
            counters: CacheCounters::default(),
        }
    }

    /// Sets the interfaces that answer from copies of entries.
    pub(crate) fn mirrored_by(self, interfaces: &Arc<dyn InterfaceAnswers>) -> Self {
        Self {
            interfaces: Arc::clone(interfaces),
            ..self
        }
    }

    pub(crate) fn interfaces(&self) -> &dyn InterfaceAnswers {
        &*self.interfaces
    }

    /// Gives interfaces that have an answer to this question the new one. `generation` is the
    /// interfaces' before the answer was fetched.
    pub(crate) fn update_interfaces(&self, key: &[u8], query: &Query<'_>, generation: u64) {
        let Some(question) =
            KeyFields::of(key).and_then(|fields| self.question_on_interface(fields))
        else {
            return;
        };
        match self.copy(query) {
            Some(answer) => self.interfaces.replace(answer, generation),
            // The new answer cannot be copied, and the old copy must not outlive the entry.
            None => self.interfaces.remove(&question),
        }
    }

    /// Returns the question of an entry if interfaces have an answer to it.
    pub(crate) fn question_on_interface<'k>(
        &self,
        fields: KeyFields<'k>,
    ) -> Option<CachedQuestion<'k>> {
        CachedQuestion::of(fields).filter(|question| self.interfaces.holds(question))
    }

    /// Returns whether the answer to a query is cached: not without RD, for a single subnet, and for zone
    /// transfers.
    pub(crate) fn keeps(&self, query: &Query<'_>) -> bool {
        query.recursion_desired()
            && !UNCACHEABLE_TYPES.contains(&query.question.qtype)
            && self.form.subnet(query).is_none()
    }

    /// Returns the key of a query; `None` if its answer is not cached.
    pub(crate) fn key(&self, query: &Query<'_>) -> Option<CacheKey> {
        if !self.keeps(query) {
            return None;
        }
        // bosh-dns returns a cached answer whether or not the query has EDNS.
        let mut key = Form {
            transparent: false,
            ..self.form
        }
        .key(query);
        if self.compat.cache_as_authority {
            // bosh-dns looks answers up by name and type alone (observed).
            key[KEY_CLASS..KEY_CLASS + 2].fill(0);
        }
        Some(key)
    }

    /// Returns a fresh answer to the same question without DO, which is more useful than a failure.
    pub(crate) fn without_dnssec(&self, query: &Query<'_>) -> Option<Vec<u8>> {
        let edns = query.edns.filter(|edns| edns.dnssec_ok)?;
        let mut plain = *query;
        plain.edns = Some(wire::Edns {
            dnssec_ok: false,
            ..edns
        });
        let mut reply = Vec::new();
        self.write_fresh(&self.key(&plain)?, query, &mut reply)
            .then_some(reply)
    }

    /// Returns whether [`Self::key`] equals [`Form::key`] where it returns a key.
    pub(crate) fn has_keys_of_form(&self) -> bool {
        !self.form.transparent && !self.compat.cache_as_authority
    }

    /// Looks up an answer; counts a miss if there is none.
    pub(crate) fn get(&self, key: &CacheKey, query: &Query<'_>) -> Lookup {
        let Some(entry) = self.store.get(&key[..]) else {
            self.count_miss();
            return Lookup::Miss;
        };
        let mut reply = Vec::new();
        if self.write_if_fresh(&entry, query, &mut reply) {
            return Lookup::Fresh(reply);
        }
        self.count_miss();
        let age = entry.since.elapsed();
        if age >= entry.lifetime + entry.stale {
            return Lookup::Miss;
        }
        if u128::from(entry.no_recheck_before_ms.load(Ordering::Relaxed)) > age.as_millis() {
            return Lookup::Fresh(self.stale_reply(&entry, query));
        }
        Lookup::Stale(entry)
    }

    pub(crate) fn count_miss(&self) {
        self.counters.misses.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns whether there may be an expired answer.
    pub(crate) fn may_be_stale(&self, key: &[u8]) -> bool {
        self.stale.is_some() && self.store.get(key).is_some()
    }

    /// Returns an entry that may be served, with its remaining lifetime; `None` in place of the
    /// lifetime once it is stale.
    pub(crate) fn peek(&self, key: &CacheKey) -> Option<(Arc<Stored<Entry>>, Option<Duration>)> {
        let entry = self.store.get(&key[..])?;
        let age = entry.since.elapsed();
        let left = entry.lifetime.checked_sub(age);
        if age >= entry.lifetime + entry.stale {
            return None;
        }
        Some((entry, left))
    }

    /// Writes a fresh answer into `reply`; `false` if there is none. A miss is not counted here,
    /// because the client's query looks the name up again.
    pub(crate) fn write_fresh(
        &self,
        key: &CacheKey,
        query: &Query<'_>,
        reply: &mut Vec<u8>,
    ) -> bool {
        let Some(entry) = self.store.get(&key[..]) else {
            return false;
        };
        self.write_if_fresh(&entry, query, reply)
    }

    /// Writes an answer into `reply` if it is fresh; returns whether it did.
    fn write_if_fresh(&self, entry: &Entry, query: &Query<'_>, reply: &mut Vec<u8>) -> bool {
        if !self.write_at(entry, query, entry.since.elapsed(), reply) {
            return false;
        }
        let count = if entry.denial {
            &self.counters.denial_hits
        } else {
            &self.counters.hits
        };
        count.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Writes the reply from an entry of this age; `false` if it has expired.
    fn write_at(
        &self,
        entry: &Entry,
        query: &Query<'_>,
        age: Duration,
        reply: &mut Vec<u8>,
    ) -> bool {
        let Some(ttl) = entry.fresh_ttl_at(age) else {
            return false;
        };
        self.write(entry, query, ttl, reply);
        true
    }

    /// Returns the reply to a query that the cache would give at this age of the entry; `None`
    /// without an entry.
    pub(crate) fn reply_at(&self, query: &Query<'_>, age: Duration) -> Option<Vec<u8>> {
        let entry = self.store.get(&self.key(query)?[..])?;
        let mut reply = Vec::new();
        self.write_at(&entry, query, age, &mut reply)
            .then_some(reply)
    }

    /// Returns a copy of the fresh answer to a query, for
    /// [`Answer::cached`](crate::Answer::cached).
    pub(crate) fn copy(&self, query: &Query<'_>) -> Option<ForwardedAnswer> {
        let entry = self.store.get(&self.key(query)?[..])?;
        let is_fresh = entry.fresh_ttl_at(entry.since.elapsed()).is_some();
        // An uncompressed owner has the client's letter case, which differs between queries.
        if !is_fresh || !entry.owners.is_empty() || query.question.qclass != CLASS_IN {
            return None;
        }
        let mut message = entry.message.clone();
        // For a client that understands AD.
        let mut validating = *query;
        validating.flags |= FLAG_AD;
        self.write_flags(&mut message, &validating);
        Some(ForwardedAnswer {
            name: query.question.name(),
            qtype: query.question.qtype,
            dnssec_ok: query.dnssec_ok(),
            checking_disabled: query.checking_disabled(),
            message,
            ttls: entry.ttls.as_slice().into(),
            ttl: entry.ttl,
            lifetime: entry.lifetime_secs(),
            since_ns: entry.since.kernel_ns(),
        })
    }

    /// Returns the expired answer, for use after its renewal has failed.
    pub(crate) fn stale_reply(&self, entry: &Entry, query: &Query<'_>) -> Vec<u8> {
        self.counters.stale_hits.fetch_add(1, Ordering::Relaxed);
        let mut reply = Vec::new();
        self.write(entry, query, STALE_TTL, &mut reply);
        let is_nxdomain = Flags::of(&reply).rcode() == message::NXDOMAIN;
        let code = if is_nxdomain {
            InfoCode::StaleNxdomain
        } else {
            InfoCode::StaleAnswer
        };
        ExtendedError::new(code, "").push(query, &mut reply);
        reply
    }

    /// Processes a recursor's answer: converts it to the form of cached answers, and stores it if permitted.
    /// `reply` must have the client's id and letter case; `generation` is the cache's when the recursor was
    /// queried, `recursor` its name.
    pub(crate) fn admit(
        &self,
        key: &[u8],
        query: &Query<'_>,
        (reply, index): (&mut Vec<u8>, &mut MessageIndex),
        recursor: Option<Arc<str>>,
        generation: Generation,
    ) {
        let Some(terms) = Terms::of(query, reply, index, self.compat) else {
            return;
        };
        message::remove_opt(reply, index);
        let Some(places) = WrittenPlaces::of(reply, index, query.question.raw_name) else {
            return;
        };
        for &at in &places.ttls {
            let at = usize::from(at);
            reply[at..at + 4].copy_from_slice(&terms.ttl.to_be_bytes());
        }
        // With AD, for later clients that understand it.
        let entry_message = Box::from(&reply[..]);
        if self.compat.transparent_forwarding {
            message::hide_authentic(reply, query);
        }
        let with_opt = reply.len() + if query.edns.is_some() { OPT_LEN } else { 0 };
        if self.compat.transparent_forwarding && with_opt > query.limit() {
            // This client gets a truncated reply, which bosh-dns does not cache (observed).
            return;
        }
        let entry = Entry {
            message: entry_message,
            ttls: places.ttls,
            owners: places.owners,
            ttl: terms.ttl,
            since: BootInstant::now(),
            lifetime: Duration::from_secs(terms.lifetime.into()),
            stale: self.stale.unwrap_or_default(),
            denial: terms.denial,
            recursor,
            no_recheck_before_ms: AtomicU64::new(0),
        };
        let terms = store::EntryTerms {
            weight: entry.weight(key, self.least_weight),
            until: entry.since + entry.lifetime + entry.stale,
            denial: entry.denial,
        };
        let now = entry.since;
        self.store.insert(
            key,
            entry,
            terms,
            now,
            generation,
            &Mirrored(&*self.interfaces),
        );
    }

    /// Writes a reply to this client from an entry.
    fn write(&self, entry: &Entry, query: &Query<'_>, ttl: u32, reply: &mut Vec<u8>) {
        reply.clear();
        reply.reserve(entry.message.len() + OPT_LEN);
        reply.extend_from_slice(&entry.message);
        message::set_id(reply, query.id);
        let name = query.question.raw_name;
        // The name is part of the key, so the question of the entry has the same length.
        reply[query.question_range()].copy_from_slice(&query.message[query.question_range()]);
        for &at in &entry.owners {
            let at = usize::from(at);
            reply[at..at + name.len()].copy_from_slice(name);
        }
        for &at in &entry.ttls {
            let at = usize::from(at);
            reply[at..at + 4].copy_from_slice(&ttl.to_be_bytes());
        }
        self.write_flags(reply, query);
        wire::append_opt(query, reply);
    }

    /// Sets the flags of a reply to this client.
    fn write_flags(&self, reply: &mut [u8], query: &Query<'_>) {
        if self.compat.transparent_forwarding {
            message::hide_authentic(reply, query);
        } else {
            message::set_own_flags(reply, query);
        }
        if self.compat.cache_as_authority {
            message::set_authoritative(reply, true);
        }
    }

    /// Returns the generation for [`Self::admit`]. Every flush starts a new one, so an answer
    /// requested before a flush is not stored after it.
    pub(crate) fn generation(&self) -> Generation {
        self.store.generation()
    }

    /// Removes the entries whose key is selected; returns their number.
    pub(crate) fn flush(&self, mut goes: impl FnMut(&KeyFields<'_>) -> bool) -> u64 {
        self.store
            .flush(|key, _| KeyFields::of(key).is_none_or(|fields| goes(&fields)))
    }

    /// Calls `each` with every entry and its age, in no particular order.
    pub(crate) fn for_each(&self, mut each: impl FnMut(&KeyFields<'_>, &Entry, Duration)) {
        let now = BootInstant::now();
        self.store.for_each(|key, entry| {
            if let Some(fields) = KeyFields::of(key) {
                each(&fields, entry, now.since(entry.since));
            }
        });
    }

    pub(crate) fn totals(&self) -> Totals {
        self.store.totals()
    }

    /// Returns the current totals without expired entries.
    pub(crate) fn swept_totals(&self) -> Totals {
        self.store.sweep(BootInstant::now());
        self.store.totals()
    }
}

/// The copies of entries at interfaces, which are used and evicted with them.
struct Mirrored<'a>(&'a dyn InterfaceAnswers);

impl store::Mirror for Mirrored<'_> {
    fn last_used_ns(&self, key: &[u8]) -> Option<u64> {
        self.0
            .last_used_ns(&CachedQuestion::of(KeyFields::of(key)?)?)
    }

    fn evicted(&self, key: &[u8]) {
        if let Some(question) = KeyFields::of(key).and_then(CachedQuestion::of)
            && self.0.holds(&question)
        {
            self.0.remove(&question);
        }
    }
}

impl Entry {
    fn lifetime_secs(&self) -> u32 {
        u32::try_from(self.lifetime.as_secs()).unwrap_or(u32::MAX)
    }

    /// Returns the TTL in replies at this age; `None` once the answer has expired.
    fn fresh_ttl_at(&self, age: Duration) -> Option<u32> {
        let age_ns = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
        remaining_ttl(self.ttl, self.lifetime_secs(), age_ns)
    }

    /// Returns the number of bytes for which the entry counts against the limit, at least `least`.
    fn weight(&self, key: &[u8], least: u64) -> u32 {
        let written = heap_bytes(&self.ttls) + heap_bytes(&self.owners);
        let bytes = (key.len() + self.message.len() + written + ENTRY_OVERHEAD) as u64;
        u32::try_from(bytes.max(least)).unwrap_or(u32::MAX)
    }

    /// Returns the TTL of the records at this age of the entry.
    pub(crate) fn ttl_at(&self, age: Duration) -> u32 {
        self.fresh_ttl_at(age).unwrap_or(STALE_TTL)
    }

    /// Records a failed renewal: for a short time the entry is served stale without another
    /// attempt.
    pub(crate) fn renewal_failed(&self) {
        let until = milliseconds(self.since.elapsed() + STALE_RECHECK);
        self.no_recheck_before_ms.store(until, Ordering::Relaxed);
    }
}

/// Returns the bytes that offsets take outside of their entry: for short records, as many as a third of the message.
fn heap_bytes(offsets: &SmallVec<impl smallvec::Array<Item = u16>>) -> usize {
    if offsets.spilled() {
        offsets.capacity() * size_of::<u16>()
    } else {
        0
    }
}

/// The offsets in a message at which each hit writes.
struct WrittenPlaces {
    /// See [`Entry::ttls`].
    ttls: SmallVec<[u16; 6]>,
    /// See [`Entry::owners`].
    owners: SmallVec<[u16; 2]>,
}

impl WrittenPlaces {
    /// Returns the places in the answer to a question for `name`.
    fn of(reply: &[u8], index: &MessageIndex, name: &[u8]) -> Option<Self> {
        let mut ttls = SmallVec::new();
        let mut owners = SmallVec::new();
        for (_, record) in index.walk(reply) {
            // A message has at most 65,535 bytes, so every offset fits.
            let ttl_at = u16::try_from(record.ttl_at).ok()?;
            let owner = u16::try_from(record.owner).ok()?;
            ttls.push(ttl_at);
            let written_out = reply.get(record.owner..record.owner + name.len());
            // A hit repeats its client's letter case here as well.
            if let Some(written_out) = written_out
                && written_out.eq_ignore_ascii_case(name)
            {
                owners.push(owner);
            }
        }
        Some(Self { ttls, owners })
    }
}

/// Lifetime of a reply according to its records.
struct Lifetimes {
    /// The smallest TTL, in seconds.
    smallest: u32,
    /// The minimum of the SOA with a denial; `None` without one.
    minimum: Option<u32>,
    /// Whether there are records of the queried type.
    has_data: bool,
}

impl Lifetimes {
    fn of(reply: &[u8], index: &MessageIndex, qtype: u16) -> Self {
        let mut smallest = u32::MAX;
        let mut minimum = None;
        // An alias whose target has no such records is no data either (RFC 2308, section 2.2).
        let mut has_data = false;
        for (section, record) in index.walk(reply) {
            // Its TTL field has other contents (RFC 6891, section 6.1.3).
            if record.rtype == message::TYPE_OPT {
                continue;
            }
            // A TTL with the highest bit set counts as 0 (RFC 2181, section 8).
            let ttl = if record.ttl > i32::MAX as u32 {
                0
            } else {
                record.ttl
            };
            smallest = smallest.min(ttl);
            has_data |= section == 0 && (record.rtype == qtype || qtype == TYPE_ANY);
            if section == 1 && record.rtype == message::TYPE_SOA {
                // The last field of the SOA.
                minimum = message::u32_at(reply, record.data.end - 4);
            }
        }
        Self {
            smallest,
            minimum,
            has_data,
        }
    }
}

/// The lifetime of a cached answer.
#[derive(Debug, PartialEq, Eq)]
struct Terms {
    /// TTL of all its records, in seconds.
    ttl: u32,
    /// Time for which the answer is fresh, in seconds: the TTL, or less.
    lifetime: u32,
    /// Whether the answer is NODATA or NXDOMAIN.
    denial: bool,
}

impl Terms {
    /// Returns the lifetime of an answer to `query`; `None` if it must not be cached.
    fn of(query: &Query<'_>, reply: &[u8], index: &MessageIndex, compat: Compat) -> Option<Self> {
        let flags = Flags::of(reply);
        // Without its question, nothing tells that the reply belongs to this name.
        let question = index.question()?;
        let same =
            message::same_question(&query.message[query.question_range()], reply.get(question)?);
        // A truncated answer would hide the whole one from clients over TCP; bosh-dns caches none (observed).
        if !same || flags.truncated() || flags.opcode() != 0 {
            return None;
        }
        let Lifetimes {
            smallest,
            minimum,
            has_data,
        } = Lifetimes::of(reply, index, query.question.qtype);
        // Valid only for the current transaction (RFC 1035, section 3.2.1).
        let is_for_now = smallest == 0 || !has_data && minimum == Some(0);
        if is_for_now && !compat.cache_zero_ttl {
            return None;
        }
        match (flags.rcode(), index.records[0], minimum) {
            (message::NOERROR, _, _) if has_data => {
                let ttl = smallest.clamp(MIN_TTL, MAX_TTL);
                Some(Self {
                    ttl,
                    lifetime: ttl,
                    denial: false,
                })
            }
            // Clients see the SOA's TTL (observed), but the answer is fresh for the lower of TTL
            // and minimum (RFC 2308, section 5).
            (message::NOERROR, 0, Some(minimum)) => {
                let ttl = smallest.clamp(MIN_TTL, MAX_DENIAL_TTL);
                Some(Self {
                    ttl,
                    lifetime: ttl.min(minimum.max(MIN_TTL)),
                    denial: true,
                })
            }
            // The lower of both, for clients too (RFC 2308, sections 2.2 and 5).
            (message::NXDOMAIN, _, Some(minimum)) | (message::NOERROR, 1.., Some(minimum)) => {
                let ttl = smallest.min(minimum).clamp(MIN_TTL, MAX_DENIAL_TTL);
                Some(Self {
                    ttl,
                    lifetime: ttl,
                    denial: true,
                })
            }
            // Only http handlers pass a SERVFAIL on as an answer (observed).
            (message::NOERROR, _, None) | (message::SERVFAIL, _, _) => Some(Self {
                ttl: MIN_TTL,
                lifetime: MIN_TTL,
                denial: true,
            }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
