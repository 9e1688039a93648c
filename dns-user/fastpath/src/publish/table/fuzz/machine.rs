//! A table in ordinary memory, with answers and health set by the test; used by the table's tests
//! and by the fuzz target `table`.

use std::{
    any::Any,
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
};

use dns_common::{
    entry::{CELL_SIZE, CHUNK_CELLS, CHUNK_SIZE, EntryHeader, Location},
    index::Pair,
    name::hash_name,
};
use memmap2::{MmapMut, MmapRaw};
use parking_lot::Mutex;

use super::super::{EntryStore, Limits, Table};
use crate::{
    AdmitAll,
    map::{
        index::{self, IndexMemory},
        layout::{read_header, read_name},
        store::EntryMemory,
    },
    publish::{lease::GracePeriods, publisher::LearnFilter, source::NameSource},
};
use dns_core::{
    changes::{Changes, Facet, Facets},
    name::Name,
    resolve::{Checks, Existence, Health, HealthState, Resolution},
};

/// Hash seed of the table.
pub(crate) const SEED: u64 = 7;

/// A snapshot with a fixed list of names, their addresses and whether they are listed.
#[derive(Clone, Default)]
pub(crate) struct Fixed {
    /// Whether the name is listed, and its addresses; `None`: the name does not exist.
    pub(crate) names: BTreeMap<Name, (bool, Option<Vec<Ipv4Addr>>)>,
    /// Whether nothing is known about the differences to another snapshot.
    pub(crate) is_incomparable: bool,
}

impl Fixed {
    pub(crate) fn with(mut self, text: &str, listed: bool, addresses: &[u8]) -> Self {
        let addresses = addresses
            .iter()
            .map(|&last| Ipv4Addr::new(10, 0, 0, last))
            .collect();
        self.names.insert(name(text), (listed, Some(addresses)));
        self
    }

    /// Adds a name that is ours but does not exist.
    pub(crate) fn without(mut self, text: &str) -> Self {
        self.names.insert(name(text), (false, None));
        self
    }
}

impl NameSource for Fixed {
    fn published_names(&self) -> Box<dyn Iterator<Item = Name> + '_> {
        Box::new(
            self.names
                .iter()
                .filter(|(_, (listed, _))| *listed)
                .map(|(name, _)| name.clone()),
        )
    }

    fn resolve(&self, health: &dyn Health, name: &Name) -> Option<Resolution> {
        let (_, addresses) = self.names.get(name)?;
        let instances: Vec<IpAddr> = addresses.iter().flatten().map(|&ip| ip.into()).collect();
        let v4 = addresses.iter().flatten().copied();
        Some(Resolution {
            existence: if addresses.is_some() {
                Existence::Found
            } else {
                Existence::NoSuchName
            },
            v4: v4
                .filter(|&ip| health.state(ip.into(), None) == HealthState::Running)
                .collect(),
            v6: Vec::new(),
            checks: Checks {
                instances,
                tracked: false,
                synchronous: false,
            },
        })
    }

    /// Names that start with `q` have several facets, others one.
    fn facets(&self, name: &Name) -> Facets {
        let own = [Facet::of(name), Facet::of("q")];
        let count = if name.as_wire()[1] == b'q' { 2 } else { 1 };
        own.into_iter().take(count).collect()
    }

    fn changes_since(&self, older: &dyn NameSource) -> Option<Changes> {
        let older = (older as &dyn Any)
            .downcast_ref::<Self>()
            .filter(|_| !self.is_incomparable)?;
        let mut changes = Changes::default();
        for name in self.names.keys().chain(older.names.keys()) {
            let [old, new] = [older, self].map(|snapshot| snapshot.names.get(name));
            if old == new {
                continue;
            }
            changes.facets.extend([Facet::ANY, Facet::of(name)]);
            let is_listed =
                |name: Option<&(bool, _)>| name.is_some_and(|(is_listed, _)| *is_listed);
            match (is_listed(old), is_listed(new)) {
                (false, true) => changes.listed.push(name.clone()),
                (true, false) => changes.unlisted.push(name.clone()),
                (true, true) | (false, false) => {}
            }
        }
        for names in [&mut changes.listed, &mut changes.unlisted] {
            names.sort_unstable();
            names.dedup();
        }
        Some(changes)
    }
}

/// Health set by tests: the failing addresses.
#[derive(Default)]
pub(crate) struct Failing(pub(crate) Mutex<Vec<IpAddr>>);

impl Health for Failing {
    fn state(&self, ip: IpAddr, _group: Option<&str>) -> HealthState {
        if self.0.lock().contains(&ip) {
            HealthState::Failing
        } else {
            HealthState::Running
        }
    }
}

/// A table in anonymous memory.
pub(crate) struct Machine {
    pub(crate) table: Table,
    pub(crate) index: Arc<IndexMemory>,
    pub(crate) memory: Arc<EntryMemory>,
}

impl Machine {
    /// Returns a table with these limits and `chunks` chunks.
    pub(crate) fn with(
        max_names: usize,
        negative: usize,
        chunks: usize,
        health: Arc<dyn Health + Send + Sync>,
        grace: GracePeriods,
    ) -> Self {
        let memory = EntryMemory::new(anonymous(chunks * CHUNK_SIZE));
        Self::over(memory, max_names, negative, health, grace)
    }

    /// Returns a table whose entries are in this memory.
    pub(crate) fn over(
        memory: EntryMemory,
        max_names: usize,
        negative: usize,
        health: Arc<dyn Health + Send + Sync>,
        grace: GracePeriods,
    ) -> Self {
        let memory = Arc::new(memory);
        let elements = index::elements(memory.chunks() * CHUNK_CELLS) as usize;
        let index = Arc::new(IndexMemory::new(
            anonymous(elements * size_of::<Pair>()),
            memory.clone(),
        ));
        let table = Table::new(
            (EntryStore::of(index.clone()), grace),
            SEED,
            Limits {
                max_names,
                max_precomputed: max_names,
                negative,
                answers: 0,
                replies: 0,
            },
            health,
            Arc::new(AdmitAll),
            Arc::new(LearnFilter::new()),
        );
        Self {
            table,
            index,
            memory,
        }
    }

    /// Returns the location of a name's entry, according to the index.
    pub(crate) fn place(&self, text: &str) -> Option<Location> {
        self.index.get(hash_name(SEED, name(text).as_wire()))
    }

    /// Returns the program's answer for a name: the last bytes of the addresses, or the RCODE.
    pub(crate) fn answer(&self, text: &str) -> Option<Result<Vec<u8>, u8>> {
        let location = self.place(text)?;
        if read_name(&self.memory, location)? != name(text) {
            return None;
        }
        let header: EntryHeader = read_header(&self.memory, location)?;
        if header.rcode != 0 {
            return Some(Err(header.rcode));
        }
        let words = self.memory.read(location, header.size().div_ceil(8))?;
        let bytes = zerocopy::IntoBytes::as_bytes(&words[..]);
        let addresses = &bytes[header.v4_offset()..][..usize::from(header.v4_count) * 4];
        Some(Ok(addresses.chunks(4).map(|address| address[3]).collect()))
    }

    /// Sets the last-used time of a name.
    pub(crate) fn use_at(&self, text: &str, at_ns: u64) {
        let location = self.place(text).expect("a name in the map");
        let header = read_header(&self.memory, location).expect("the index leads to entries");
        let size = header.size().div_ceil(8);
        let mut words = self
            .memory
            .read(location, size)
            .expect("entries lie inside the store");
        words[0] = at_ns;
        self.memory.write(location, &words);
    }

    /// Checks the invariants: the index holds exactly the records, counts and limits are right, and
    /// only the memory of the entries is in use.
    pub(crate) fn check(&self) {
        let status = self.table.status();
        assert_eq!(
            self.index.locations().count(),
            self.table.records.iter().count()
        );
        assert_eq!(
            status.published + status.learned + status.negative,
            self.table.records.iter().count()
        );
        assert!(status.published + status.learned <= status.max_names);
        assert!(status.negative <= status.max_negative);
        let mut used = 0;
        for (key, record) in self.table.records.iter() {
            assert_eq!(self.index.get(key), Some(record.location));
            used += record.size().next_multiple_of(CELL_SIZE);
            if let Some(set) = record.dependency {
                assert!(self.table.dependents.depends(key, set));
            }
        }
        assert_eq!(status.store.used, used);
        let dependent = self
            .table
            .records
            .iter()
            .filter(|(_, record)| record.dependency.is_some())
            .count();
        assert_eq!(self.table.dependents.names(), dependent);
    }
}

fn anonymous(length: usize) -> MmapRaw {
    MmapMut::map_anon(length).expect("there is memory").into()
}

pub(crate) fn name(text: &str) -> Name {
    text.parse().expect("a name")
}
