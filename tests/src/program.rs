//! The BPF object, loaded for tests and benches, with an entry writer that is independent of the
//! publisher, so that a mistake there is not hidden by the same mistake here.

use std::{
    borrow::Cow,
    mem::offset_of,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use aya::{
    Ebpf, EbpfLoader, TestRun as _, TestRunOptions, VerifierLogLevel,
    maps::{HashMap, Map, MapData, PerCpuArray, PerCpuValues, ProgramArray},
    programs::{ProgramFd, SchedClassifier, Xdp},
};
use dns_common::{
    control::Control,
    counters::{CpuCounters, OUTCOME_SLOTS, Outcome},
    entry::{AnswerPolicy, CELL_SIZE, CHUNK_CELLS, CHUNK_SIZE, EntryHeader, HAS_POLICY, Location},
    forwarded::AnswerHeader,
    name::hash_name,
    object,
    scope::{Endpoint, HeardClient, INTERFACES, LOOPBACK_IFINDEX, MAX_ENDPOINTS, NEAR, Scope},
};
use zerocopy::{FromBytes as _, FromZeros as _, IntoBytes as _};

use crate::{
    mapping::{Mapping, header_at, offset_in_arena},
    names::Names,
};

/// Chunks of the store in [`Program::load`].
const CHUNKS: u32 = 4;

/// Elements of the index in [`Program::load`]: a table of 6,144 slots.
pub const ELEMENTS: u32 = 512;

pub const XDP_PASS: u32 = 2;
pub const XDP_DROP: u32 = 1;
pub const TC_ACT_SHOT: u32 = 2;
pub const XDP_TX: u32 = 3;
pub const TC_ACT_UNSPEC: u32 = u32::MAX;
pub const TC_ACT_REDIRECT: u32 = 7;

/// The programs that can be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// XDP in the driver.
    Xdp,
    Tc,
}

impl Hook {
    pub const fn is_xdp(self) -> bool {
        !matches!(self, Self::Tc)
    }

    /// Returns the name of the program in the object.
    pub const fn program(self) -> &'static str {
        match self {
            Self::Xdp => object::XDP_PROGRAM,
            Self::Tc => object::TC_PROGRAM,
        }
    }
}

/// Words of the programs' scratch space.
const SCRATCH_WORDS: usize = 573;

/// The programs' scratch space; word 3 is 1 while a run uses it.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Scratch([u64; SCRATCH_WORDS]);

// SAFETY: words, valid with any content.
unsafe impl aya::Pod for Scratch {}

pub struct Program {
    ebpf: Ebpf,
    entries: Mapping,
    /// The store of forwarded answers: one chunk.
    answers: Mapping,
    control: Mapping,
    scope: Mapping,
    counters: Mapping,
    /// The interface on which packets arrive; `None`: `lo`.
    interface: Option<u32>,
    /// Used cells of the store.
    used: u32,
    /// Used cells of the store of forwarded answers.
    used_by_answers: u32,
    /// Number of possible CPUs.
    cpus: usize,
}

/// Published answers of a name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Published {
    pub v4: Vec<Ipv4Addr>,
    pub v6: Vec<Ipv6Addr>,
    /// RCODE for A and AAAA queries.
    pub rcode: u8,
    /// RCODE for other types.
    pub rcode_other: u8,
    /// Answer policy, if it differs from the fleet's.
    pub policy: Option<AnswerPolicy>,
}

/// Result of a program run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    pub verdict: u32,
    /// The packet after the run.
    pub packet: Vec<u8>,
    /// Duration of one run.
    pub duration: Duration,
}

impl Program {
    /// Loads the embedded object, or the file named by `DNS_EBPF_OBJECT`, as for a kernel without
    /// PREEMPT_RT.
    ///
    /// Starts with seed 7, an unlimited lease and no endpoints; frames to the zero address, which
    /// is the address of `lo`, are accepted.
    pub fn load() -> Result<Self> {
        Self::load_for(false)
    }

    /// Like [`Self::load`]; `preemptible`: as for a kernel on which one run may interrupt another.
    pub fn load_for(preemptible: bool) -> Result<Self> {
        let object = match std::env::var_os("DNS_EBPF_OBJECT") {
            Some(path) => {
                Cow::from(std::fs::read(&path).with_context(|| format!("{}", path.display()))?)
            }
            None => Cow::from(dns_attacher::OBJECT),
        };
        Self::load_object(&object, preemptible)
    }

    /// Like [`Self::load_for`], with another object that has the same maps and programs.
    pub fn load_object(object: &[u8], preemptible: bool) -> Result<Self> {
        let cpus =
            aya::util::nr_cpus().map_err(|(file, error)| anyhow::anyhow!("{file}: {error}"))?;
        let mut ebpf = EbpfLoader::new()
            .map_max_entries(object::COUNTERS, cpus as u32)
            .map_max_entries(object::ENTRIES, CHUNKS)
            .map_max_entries(object::NAMES, ELEMENTS)
            .map_max_entries(object::ANSWER_NAMES, ELEMENTS)
            .override_global(object::PREEMPTIBLE, &u8::from(preemptible), true)
            .verifier_log_level(match std::env::var_os("DNS_EBPF_LOG") {
                Some(_) => VerifierLogLevel::VERBOSE,
                None => VerifierLogLevel::STATS,
            })
            .load(object)
            .context("cannot load the object")?;
        for name in [object::XDP_PROGRAM, object::XDP_FORWARDED_PROGRAM] {
            let program: &mut Xdp = ebpf
                .program_mut(name)
                .context("a program is missing in the object")?
                .try_into()?;
            program
                .load()
                .with_context(|| format!("cannot load {name}"))?;
        }
        for name in [
            object::TC_PROGRAM,
            object::TC_FIRST_PROGRAM,
            object::TC_ANSWER_PROGRAM,
            object::TC_FORWARDED_PROGRAM,
        ] {
            let program: &mut SchedClassifier = ebpf
                .program_mut(name)
                .context("a program is missing in the object")?
                .try_into()?;
            program
                .load()
                .with_context(|| format!("cannot load {name}"))?;
        }
        for (name, map) in [
            (object::TC_ANSWER_PROGRAM, object::TC_ANSWER),
            (object::TC_FORWARDED_PROGRAM, object::TC_FORWARDED),
            (object::XDP_FORWARDED_PROGRAM, object::XDP_FORWARDED),
        ] {
            set_called(&mut ebpf, map, name)?;
        }

        let entries = Mapping::of(array(&ebpf, object::ENTRIES)?, CHUNKS as usize * CHUNK_SIZE)?;
        let answers = Mapping::of(array(&ebpf, object::ANSWER_ENTRIES)?, CHUNK_SIZE)?;
        let control = Mapping::of(array(&ebpf, object::CONTROL)?, size_of::<Control>())?;
        let scope = Mapping::of(array(&ebpf, object::SCOPE)?, size_of::<Scope>())?;
        let counters = Mapping::of(
            array(&ebpf, object::COUNTERS)?,
            cpus * size_of::<CpuCounters>(),
        )?;
        let mut program = Self {
            ebpf,
            entries,
            answers,
            control,
            scope,
            counters,
            interface: None,
            used: 0,
            used_by_answers: 0,
            cpus,
        };
        program.reset()?;
        Ok(program)
    }

    /// Restores the state after [`Self::load`], except for the counters.
    pub fn reset(&mut self) -> Result<()> {
        self.interface = None;
        self.answer_at_tc_by(object::TC_ANSWER_PROGRAM)?;
        self.names()?.clear()?;
        self.answer_names()?.clear()?;
        self.answers.bytes_mut()[..self.used_by_answers as usize * CELL_SIZE].fill(0);
        self.used_by_answers = 0;
        let end = offset_in_arena(Location(self.used));
        self.entries.bytes_mut()[..end].fill(0);
        self.used = 0;
        self.set_control(|control| {
            *control = Control::new_zeroed();
            control.hash_seed = 7;
            control.lease_deadline_ns = u64::MAX;
        });
        self.set_scope(|scope| {
            scope.zero();
            // Programs run on `lo`, whose address is zero.
            let lo = &mut scope.interfaces[Scope::first_slot(LOOPBACK_IFINDEX)];
            (lo.ifindex, lo.flags, lo.endpoints) = (LOOPBACK_IFINDEX, NEAR, u64::MAX);
        });
        Ok(())
    }

    /// Lets this program answer at tc.
    pub fn answer_at_tc_by(&mut self, name: &str) -> Result<()> {
        set_called(&mut self.ebpf, object::TC_ANSWER, name)
    }

    /// Lets packets of [`Self::run`] arrive on an interface of the calling thread's network namespace.
    pub fn receive_on(&mut self, ifindex: u32) {
        self.interface = Some(ifindex);
    }

    /// Marks the scratch space of every CPU as taken by another run, or as free.
    pub fn set_busy(&mut self, busy: bool) -> Result<()> {
        let mut scratch = Scratch([0; SCRATCH_WORDS]);
        scratch.0[3] = busy.into();
        let map = self
            .ebpf
            .map_mut("SCRATCH")
            .context("no SCRATCH in the object")?;
        let values = PerCpuValues::try_from(vec![scratch; self.cpus])?;
        Ok(PerCpuArray::<_, Scratch>::try_from(map)?.set(0, values, 0)?)
    }

    /// Notes that queries of a client have reached the server, which counts until a time.
    pub fn hear(&mut self, client: HeardClient, until_ns: u64) -> Result<()> {
        let map = self
            .ebpf
            .map_mut(object::HEARD_CLIENTS)
            .context("no HEARD_CLIENTS in the object")?;
        let mut heard: HashMap<_, [u8; size_of::<HeardClient>()], u64> = map.try_into()?;
        let key: [u8; size_of::<HeardClient>()] = zerocopy::transmute!(client);
        Ok(heard.insert(key, until_ns, 0)?)
    }

    /// Modifies the control element.
    pub fn set_control(&mut self, change: impl FnOnce(&mut Control)) {
        let bytes = &mut self.control.bytes_mut()[..size_of::<Control>()];
        let mut control = Control::read_from_bytes(bytes).expect("sliced to the size of Control");
        change(&mut control);
        bytes.copy_from_slice(control.as_bytes());
    }

    pub fn control(&mut self) -> Control {
        Control::read_from_bytes(&self.control.bytes_mut()[..size_of::<Control>()])
            .expect("sliced to the size of Control")
    }

    /// Modifies the served scope.
    pub fn set_scope(&mut self, change: impl FnOnce(&mut Scope)) {
        let bytes = &mut self.scope.bytes_mut()[..size_of::<Scope>()];
        change(
            Scope::mut_from_bytes(bytes)
                .expect("sliced to the size of Scope, and a page begins there"),
        );
    }

    /// Sets the addresses and ports for which queries are answered.
    pub fn set_endpoints(&mut self, endpoints: &[SocketAddr]) {
        assert!(endpoints.len() <= MAX_ENDPOINTS, "at most {MAX_ENDPOINTS}");
        self.set_scope(|scope| {
            scope.endpoint_slots = endpoints.len() as u32;
            for (slot, endpoint) in scope.endpoints.iter_mut().zip(endpoints) {
                *slot = Endpoint::new_zeroed();
                slot.port = endpoint.port().to_be_bytes();
                (slot.address, slot.family) = match endpoint.ip() {
                    IpAddr::V4(ip) => (ip.to_ipv6_mapped().octets(), 4),
                    IpAddr::V6(ip) => (ip.octets(), 6),
                };
            }
        });
    }

    /// Publishes a lower-case name in wire format.
    pub fn publish(&mut self, name: &[u8], published: &Published) -> Result<()> {
        let seed = self.control().hash_seed;
        self.publish_as(hash_name(seed, name), name, published)
    }

    /// Publishes a name under the hash of another name.
    pub fn publish_as(&mut self, hash: u64, name: &[u8], published: &Published) -> Result<()> {
        let header = EntryHeader {
            last_used_ns: 0,
            hash,
            name_len: name.len() as u16,
            v4_count: published.v4.len() as u16,
            v6_count: published.v6.len() as u16,
            rcode: published.rcode,
            rcode_other: published.rcode_other
                | if published.policy.is_some() {
                    HAS_POLICY
                } else {
                    0
                },
        };
        let cells = header.size().div_ceil(CELL_SIZE) as u32;
        if self.used % CHUNK_CELLS + cells > CHUNK_CELLS {
            self.used = self.used.next_multiple_of(CHUNK_CELLS);
        }
        let location = Location(self.used);
        let start = offset_in_arena(location);
        let entry = self
            .entries
            .bytes_mut()
            .get_mut(start..start + header.size())
            .context("the test's store is full")?;
        entry.fill(0);
        entry[..size_of::<EntryHeader>()].copy_from_slice(header.as_bytes());
        entry[size_of::<EntryHeader>()..][..name.len()].copy_from_slice(name);
        let mut at = header.policy_offset();
        if let Some(policy) = published.policy {
            entry[at..at + size_of_val(&policy)].copy_from_slice(policy.as_bytes());
            at += size_of_val(&policy);
        }
        for address in &published.v4 {
            entry[at..at + 4].copy_from_slice(&address.octets());
            at += 4;
        }
        at = at.next_multiple_of(8);
        for address in &published.v6 {
            entry[at..at + 16].copy_from_slice(&address.octets());
            at += 16;
        }
        self.used += cells;
        let old = self.find(hash)?;
        self.names()?.set(hash, location, old)
    }

    /// Returns the header of a published name's entry.
    pub fn entry(&mut self, name: &[u8]) -> Result<EntryHeader> {
        let seed = self.control().hash_seed;
        let location = self.find(hash_name(seed, name))?.context("not published")?;
        Ok(header_at(&mut self.entries, location))
    }

    /// Returns the location of the entry with this hash.
    fn find(&mut self, hash: u64) -> Result<Option<Location>> {
        let locations = self.names()?.get(hash)?;
        Ok(locations
            .into_iter()
            .find(|&location| header_at(&mut self.entries, location).hash == hash))
    }

    /// Publishes a forwarded answer: an entry as described in [`dns_common::forwarded`].
    pub fn publish_answer(&mut self, entry: &[u8]) -> Result<()> {
        let header = AnswerHeader::read_from_prefix(entry)
            .map_err(|_| anyhow!("shorter than a header"))?
            .0;
        let location = Location(self.used_by_answers);
        let start = offset_in_arena(location);
        self.used_by_answers += entry.len().div_ceil(CELL_SIZE) as u32;
        ensure!(
            self.used_by_answers <= CHUNK_CELLS,
            "the test's store is full"
        );
        self.answers.bytes_mut()[start..start + entry.len()].copy_from_slice(entry);
        let locations = self.answer_names()?.get(header.hash)?;
        let old = locations
            .into_iter()
            .find(|&location| header_at(&mut self.answers, location).hash == header.hash);
        self.answer_names()?.set(header.hash, location, old)
    }

    /// Returns the memory of the names and of the forwarded answers. Each entry begins with the time of its last
    /// reply.
    pub fn stores(&mut self) -> [&mut [u8]; 2] {
        [self.entries.bytes_mut(), self.answers.bytes_mut()]
    }

    fn answer_names(&mut self) -> Result<Names<&mut MapData>> {
        Names::of(
            self.ebpf
                .map_mut(object::ANSWER_NAMES)
                .context("no ANSWER_NAMES in the object")?,
        )
    }

    fn names(&mut self) -> Result<Names<&mut MapData>> {
        Names::of(
            self.ebpf
                .map_mut(object::NAMES)
                .context("no NAMES in the object")?,
        )
    }

    pub fn ebpf(&mut self) -> &mut Ebpf {
        &mut self.ebpf
    }

    /// Returns the counters, summed over all CPUs.
    pub fn counters(&mut self) -> CpuCounters {
        let mut sum = CpuCounters::new_zeroed();
        for cpu in 0..self.cpus {
            let start = cpu * size_of::<CpuCounters>();
            let one = CpuCounters::read_from_bytes(
                &self.counters.bytes_mut()[start..start + size_of::<CpuCounters>()],
            )
            .expect("sliced to the size of CpuCounters");
            for slot in 0..OUTCOME_SLOTS {
                sum.outcomes[slot] += one.outcomes[slot];
            }
            for (sums, replies) in sum.replies.iter_mut().zip(&one.replies) {
                for (sum, replies) in sums.iter_mut().zip(replies) {
                    *sum += replies;
                }
            }
            sum.query_bytes += one.query_bytes;
            sum.reply_bytes += one.reply_bytes;
            for slot in 0..INTERFACES {
                sum.interface_hits[slot] += one.interface_hits[slot];
            }
        }
        sum
    }

    /// Returns the outcome counters, summed over all CPUs: the part of [`Self::counters`] that is
    /// read before and after every packet.
    fn outcomes(&mut self) -> [u64; OUTCOME_SLOTS] {
        let mut sum = [0; OUTCOME_SLOTS];
        for cpu in 0..self.cpus {
            let start = cpu * size_of::<CpuCounters>() + offset_of!(CpuCounters, outcomes);
            let one = <[u64; OUTCOME_SLOTS]>::read_from_bytes(
                &self.counters.bytes_mut()[start..start + size_of_val(&sum)],
            )
            .expect("sliced to the size of the outcomes");
            for (sum, one) in sum.iter_mut().zip(one) {
                *sum += one;
            }
        }
        sum
    }

    /// Returns a program's file descriptor, for the bench that runs it by tail call.
    pub fn fd(&self, hook: Hook) -> Result<&ProgramFd> {
        let program = self
            .ebpf
            .program(hook.program())
            .context("no such program in the object")?;
        Ok(program.fd()?)
    }

    /// Runs a program once over `packet`.
    pub fn run(&self, hook: Hook, packet: &[u8]) -> Result<Run> {
        let mut out = vec![0; 16384];
        let context = self
            .interface
            .map(|ifindex| context(hook, ifindex, packet.len()));
        let options = TestRunOptions {
            data_in: Some(packet),
            data_out: Some(&mut out),
            ctx_in: context.as_deref(),
            ..Default::default()
        };
        let result = self.test_run(hook, options)?;
        out.truncate(result.data_size_out as usize);
        Ok(Run {
            verdict: result.return_value,
            packet: out,
            duration: result.duration,
        })
    }

    /// Runs a program with the given options.
    pub fn test_run(&self, hook: Hook, options: TestRunOptions<'_>) -> Result<aya::TestRunResult> {
        let program = self
            .ebpf
            .program(hook.program())
            .context("no such program in the object")?;
        Ok(if hook.is_xdp() {
            <&Xdp>::try_from(program)?.test_run(options)?
        } else {
            <&SchedClassifier>::try_from(program)?.test_run(options)?
        })
    }

    /// Like [`Self::run`]; also returns the outcome counted for the packet.
    pub fn run_counted(&mut self, hook: Hook, packet: &[u8]) -> Result<(Run, Outcome)> {
        let before = self.outcomes();
        let run = self.run(hook, packet)?;
        let after = self.outcomes();
        let mut counted = Outcome::ALL
            .iter()
            .filter(|&&outcome| after[outcome as usize] != before[outcome as usize]);
        match (counted.next(), counted.next()) {
            (Some(&outcome), None) => Ok((run, outcome)),
            (first, second) => bail!("one outcome should be counted, not {first:?} and {second:?}"),
        }
    }
}

/// Puts a program into the array from which it is tail-called.
fn set_called(ebpf: &mut Ebpf, map: &str, name: &str) -> Result<()> {
    let called = ebpf
        .program(name)
        .with_context(|| format!("no {name} in the object"))?
        .fd()?
        .try_clone()?;
    let callers = ebpf
        .map_mut(map)
        .with_context(|| format!("no {map} in the object"))?;
    ProgramArray::try_from(callers)?
        .set(0, &called, 0)
        .with_context(|| format!("cannot call {name}"))
}

/// Returns the kernel's context of a packet of `len` bytes that arrives on an interface.
fn context(hook: Hook, ifindex: u32, len: usize) -> Vec<u8> {
    let words = if hook.is_xdp() {
        // `struct xdp_md`: data, data_end, data_meta, interface, queue, outgoing interface.
        vec![0, len as u32, 0, ifindex, 0, 0]
    } else {
        // `struct __sk_buff` up to `ifindex`.
        [&[0; 10][..], &[ifindex]].concat()
    };
    words.into_iter().flat_map(u32::to_ne_bytes).collect()
}

fn array<'a>(ebpf: &'a Ebpf, name: &str) -> Result<&'a MapData> {
    match ebpf.map(name) {
        Some(Map::Array(map)) => Ok(map),
        _ => bail!("no array {name} in the object"),
    }
}
