//! The maps and the counters, whose names and layouts `dns_common` defines, and the context of one program run.

use core::{arch::asm, mem::offset_of};

use aya_ebpf::{
    bindings::{
        BPF_F_MMAPABLE, BPF_F_NO_PREALLOC, BPF_FIB_LOOKUP_OUTPUT, bpf_fib_lookup as FibLookup,
    },
    cty::c_void,
    helpers::{
        bpf_get_smp_processor_id,
        generated::{
            bpf_check_mtu, bpf_fib_lookup, bpf_jiffies64, bpf_ktime_get_coarse_ns,
            bpf_sk_lookup_udp, bpf_sk_release,
        },
    },
    macros::map,
    maps::{Array, HashMap, PerCpuArray, ProgramArray, RingBuf},
};
use dns_common::{
    control::Control,
    counters::{CpuCounters, KIND_SLOTS, OUTCOME_SLOTS, Outcome, RCODE_SLOTS},
    entry::{CHUNK_SIZE, MAX_V4},
    index::Pair,
    name::MAX_NAME_WORDS,
    scope::{Endpoint, HeardClient, INTERFACES, MAX_ENDPOINTS, MAX_HEARD_CLIENTS, Scope},
};

use crate::{
    IS_SKELETON,
    bytes::{Zero, barrier, barrier_and, has, load, store},
};

/// Index from names to entries, see [`dns_common::index`]; the loader sets its size.
#[map]
pub static NAMES: Array<Pair> = Array::with_max_entries(2, BPF_F_MMAPABLE);

/// Chunks that hold the entries; the loader sets their number.
#[map]
pub static ENTRIES: Array<[u64; CHUNK_SIZE / 8]> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// Index from queries to forwarded answers; the loader sets its size.
#[map]
pub static ANSWER_NAMES: Array<Pair> = Array::with_max_entries(2, BPF_F_MMAPABLE);

/// Chunks that hold the forwarded answers, see [`dns_common::forwarded`]; the loader sets their
/// number.
#[map]
pub static ANSWER_ENTRIES: Array<[u64; CHUNK_SIZE / 8]> =
    Array::with_max_entries(1, BPF_F_MMAPABLE);

/// Lease, seed, tap and other settings, written by the server.
#[map]
pub static CONTROL: Array<Control> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// Endpoints, VLANs and interfaces, written by the attaching process.
#[map]
pub static SCOPE: Array<Scope> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// Clients whose queries have reached the server, written by the attaching process. Allocated as it fills,
/// because most hosts need none.
#[map]
pub static HEARD_CLIENTS: HashMap<HeardClient, u64> =
    HashMap::with_max_entries(MAX_HEARD_CLIENTS, BPF_F_NO_PREALLOC);

/// Counters, one element per possible CPU; the loader sets their number.
#[map]
pub static COUNTERS: Array<CpuCounters> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// Holds [`crate::dns_tc_first`], later [`crate::dns_tc_answer`], in its only slot, set by the loader.
#[map]
pub static TC_ANSWER: ProgramArray = ProgramArray::with_max_entries(1, 0);

/// Holds [`crate::dns_tc_forwarded`] in its only slot, set by the loader if forwarded answers are
/// kept.
#[map]
pub static TC_FORWARDED: ProgramArray = ProgramArray::with_max_entries(1, 0);

/// Like [`TC_FORWARDED`], for [`crate::dns_xdp_forwarded`].
#[map]
pub static XDP_FORWARDED: ProgramArray = ProgramArray::with_max_entries(1, 0);

#[map]
pub static TAP: RingBuf = RingBuf::with_byte_size(1 << 18, 0);

/// Scratch space, one element per CPU. Both hooks run with bottom halves disabled, so no other run
/// uses it at the same time, except on kernels with PREEMPT_RT (6.18 and later), where one run may
/// interrupt another: see [`acquire_scratch`].
#[map]
pub static SCRATCH: PerCpuArray<Scratch> = PerCpuArray::with_max_entries(1, 0);

/// 1 if one run may interrupt another on the same CPU, as on kernels with PREEMPT_RT. The loader sets
/// it before the programs are verified, so the verifier removes the code that does not apply.
#[unsafe(no_mangle)]
static PREEMPTIBLE: u8 = 1;

/// Size of the IPv6 member of `bpf_sock_tuple`, in whole words.
const SOCKET_TUPLE_SIZE: usize = 40;

#[repr(C, align(8))]
pub struct Scratch {
    /// State of the random number generator; 0 before the first use.
    pub random: u64,
    /// Number of the tick at which `now_ns` was read.
    pub tick: u64,
    /// `CLOCK_MONOTONIC_COARSE` in ns, see [`coarse_now`].
    pub now_ns: u64,
    /// 1 while a run uses this space.
    pub busy: u64,
    /// Always zero, see [`crate::bytes::Zero`].
    pub zero: usize,
    /// See [`crate::frame::Frame::save_to_scratch`].
    pub frame: usize,
    /// See [`crate::question::Question::save_to_scratch`].
    pub question: [u64; 7],
    /// The question's name, lower-cased; see [`crate::parse::read_name`].
    pub words: [u64; MAX_NAME_WORDS],
    pub addresses: [u32; MAX_V4],
    /// Route query for the kernel.
    pub route: FibLookup,
    /// Socket query for the kernel: a `bpf_sock_tuple`.
    pub tuple: [u8; SOCKET_TUPLE_SIZE],
    /// The client to look up among [`HEARD_CLIENTS`].
    pub client: HeardClient,
}

#[inline(always)]
pub fn control() -> Option<&'static Control> {
    // SAFETY: userspace may write it concurrently; torn reads of fields are harmless.
    CONTROL.get_ptr(0).map(|control| unsafe { &*control })
}

#[inline(always)]
pub fn scope() -> Option<&'static Scope> {
    // SAFETY: the attaching process may write it concurrently, in the order described by `Scope`.
    SCOPE.get_ptr(0).map(|scope| unsafe { &*scope })
}

/// Acquires this CPU's scratch space for one run, until [`release_scratch`]; false if this run has interrupted
/// another.
///
/// Where runs cannot interrupt each other, the exchange is left out: it waits for all earlier stores,
/// which costs 3 % of the time at tc (measured).
#[inline(always)]
pub fn acquire_scratch(scratch: *mut Scratch) -> bool {
    if !is_preemptible() {
        return true;
    }
    let mut busy = 1_u64;
    // An atomic exchange (kernel 5.12), which `core` does not offer for this target. SAFETY: an
    // aligned word of a map's memory, written only here and in `release_scratch`.
    unsafe {
        asm!(
            "{0} = xchg_64({1} + 0, {0})",
            inout(reg) busy,
            in(reg) &raw mut (*scratch).busy,
            options(nostack)
        );
    }
    busy == 0
}

/// Releases this CPU's scratch space.
#[inline(always)]
pub fn release_scratch(scratch: *mut Scratch) {
    if is_preemptible() {
        // SAFETY: as in `acquire_scratch`.
        unsafe { (&raw mut (*scratch).busy).write_volatile(0) };
    }
}

#[inline(always)]
fn is_preemptible() -> bool {
    // SAFETY: a static. Volatile, because the compiler would insert its initial value.
    unsafe { (&raw const PREEMPTIBLE).read_volatile() != 0 }
}

#[inline(always)]
pub fn scratch() -> Option<*mut Scratch> {
    SCRATCH.get_ptr_mut(0)
}

#[inline(always)]
fn counters() -> Option<*mut CpuCounters> {
    // SAFETY: the helper has no precondition.
    COUNTERS.get_ptr_mut(unsafe { bpf_get_smp_processor_id() })
}

/// Returns the reason for passing the packet to the network stack, as an error.
///
/// If all failures shared one exit, the compiler would store the reason before each check. The asm
/// statement keeps the exits separate, so that the reason is stored only after a check has failed
/// (measured: saves 2 of 100 instructions of a reply).
#[inline(always)]
pub fn pass_to_stack<T>(reason: Outcome) -> Result<T, Outcome> {
    // SAFETY: emits no instruction.
    unsafe { asm!("/* goes up */", options(nomem, nostack, preserves_flags)) }
    Err(reason)
}

/// Counts a packet passed to the network stack; `outcome` is a
/// [`dns_common::counters::Outcome`] as a number.
#[inline(always)]
pub fn count(outcome: usize) {
    if let Some(counters) = counters() {
        // SAFETY: this CPU's own element, not shared while the program runs.
        unsafe { (*counters).outcomes[outcome % OUTCOME_SLOTS] += 1 };
    }
}

/// The properties of a reply that are counted.
pub struct Answered {
    /// The kind of hit: a [`dns_common::counters::Outcome`] as a number.
    pub outcome: usize,
    /// Queried type: a [`QueryKind`] as a number.
    pub kind: usize,
    /// RCODE of the reply.
    pub rcode: u8,
    /// Length of the query's DNS message in bytes.
    pub query_len: usize,
    /// Length of the reply's DNS message in bytes.
    pub reply_len: usize,
    /// Answers in the reply.
    pub answers: u16,
    /// Slot of the receiving interface.
    pub slot: usize,
}

#[inline(always)]
pub fn count_reply(reply: &Answered) {
    if IS_SKELETON {
        return;
    }
    let Answered {
        outcome,
        kind,
        rcode,
        query_len,
        reply_len,
        answers: _,
        slot,
    } = *reply;
    let Some(counters) = counters() else { return };
    // SAFETY: this CPU's own element, not shared while the program runs. The indexes are masked to
    // existing slots.
    unsafe {
        (*counters).outcomes[outcome % OUTCOME_SLOTS] += 1;
        (*counters).replies[kind % KIND_SLOTS][rcode as usize % RCODE_SLOTS] += 1;
        (*counters).query_bytes += query_len as u64;
        (*counters).reply_bytes += reply_len as u64;
        (*counters).interface_hits[slot % INTERFACES] += 1;
    }
}

/// Returns whether the client in the scratch space has been heard lately.
#[inline(always)]
pub fn is_heard(scratch: *mut Scratch, now: u64) -> bool {
    // SAFETY: this CPU's own element.
    let client = unsafe { &(*scratch).client };
    // SAFETY: the value is a number that only the attaching process writes, as a whole.
    HEARD_CLIENTS
        .get_ptr(client)
        .is_some_and(|until| now < unsafe { until.read_volatile() })
}

/// Returns whether an IP packet of `packet_len` bytes fits the interface's MTU.
#[inline(always)]
pub fn fits_device(context: *mut c_void, packet_len: usize) -> bool {
    let mut mtu = packet_len as u32;
    // SAFETY: the context is the kernel's own; interface 0 means the packet's interface.
    unsafe { bpf_check_mtu(context, 0, &mut mtu, 0, 0) == 0 }
}

/// Returns whether the kernel's route through the interface accepts the packet described by
/// `route`, including the path MTU (`bpf_fib_lookup`, kernel 4.18). False if the interface does not
/// forward, because the kernel then returns no route.
#[inline(always)]
pub fn fits_route(context: *mut c_void, route: *mut FibLookup) -> bool {
    const SUCCESS: i64 = 0;
    const NO_NEIGHBOUR: i64 = 7;
    // SAFETY: the context is the kernel's own, `route` is in a map.
    let found = unsafe {
        bpf_fib_lookup(
            context,
            route,
            size_of::<FibLookup>() as i32,
            BPF_FIB_LOOKUP_OUTPUT,
        )
    };
    found as i64 == SUCCESS || found as i64 == NO_NEIGHBOUR
}

/// Returns whether a socket listens at the endpoint in a slot, in the network namespace of the
/// receiving interface.
#[inline(always)]
pub fn is_listening(
    context: *mut c_void,
    scratch: *mut Scratch,
    scope: &Scope,
    endpoint: usize,
    v6: usize,
) -> bool {
    /// `BPF_F_CURRENT_NETNS`: look up sockets in the packet's namespace.
    const CURRENT: u64 = u64::MAX;
    // Sizes of the members of `bpf_sock_tuple`: sender and receiver, then their ports.
    const V4: u32 = 2 * 4 + 2 * 2;
    const V6: u32 = 2 * 16 + 2 * 2;
    let endpoint =
        barrier(&raw const scope.endpoints[barrier(endpoint) & (MAX_ENDPOINTS - 1)] as usize);
    // SAFETY: this CPU's own element.
    let tuple = barrier(unsafe { &raw mut (*scratch).tuple } as usize);
    // The size tells the kernel the family. Computed without a branch, which would double the
    // paths.
    let size = V4 + barrier(barrier_and(v6, 1)) as u32 * (V6 - V4);
    // SAFETY: an endpoint in a map's memory, and this CPU's own element. The sender's address and
    // port stay zero, because an unconnected socket is found for any sender.
    unsafe {
        let port = load::<u16>(endpoint + offset_of!(Endpoint, port));
        if has(v6, 1) {
            store(tuple, 0_u64);
            store(tuple + 8, 0_u64);
            store(tuple + 16, load::<u64>(endpoint));
            store(tuple + 24, load::<u64>(endpoint + 8));
            store(tuple + 32, 0_u16);
            store(tuple + 34, port);
        } else {
            store(tuple, 0_u32);
            store(tuple + 4, load::<u32>(endpoint + 12));
            store(tuple + 8, 0_u16);
            store(tuple + 10, port);
        }
        let socket = bpf_sk_lookup_udp(context, tuple as *mut _, size, CURRENT, 0);
        if socket.is_null() {
            return false;
        }
        bpf_sk_release(socket.cast());
    }
    true
}

/// The maps and values that every step uses.
pub struct Context {
    /// Settings written by the server.
    pub control: &'static Control,
    /// Served endpoints and interfaces, from the map `SCOPE`.
    pub scope: &'static Scope,
    /// This CPU's scratch space.
    pub scratch: *mut Scratch,
    /// Opaque zero for the verifier, see [`Zero`].
    pub zero: Zero,
}

impl Context {
    /// Looks up the maps. Never returns `None`, but the verifier requires the check.
    #[inline(always)]
    pub fn get() -> Option<Self> {
        let (control, scope, scratch) = (control()?, scope()?, scratch()?);
        // SAFETY: this CPU's own element; the field is never written.
        let zero = unsafe { Zero::read(&raw const (*scratch).zero) };
        Some(Self {
            control,
            scope,
            scratch,
            zero,
        })
    }
}

/// Returns `CLOCK_MONOTONIC_COARSE` in ns, at most one tick behind.
///
/// The coarse clock changes once per tick, so the helper is called once per tick. The tick's number
/// is a plain load, because the verifier inlines that helper (Linux 5.6).
#[inline(always)]
pub fn coarse_now(scratch: *mut Scratch) -> u64 {
    // SAFETY: the helpers have no precondition; this CPU's own element, not shared while the
    // program runs.
    unsafe {
        let tick = bpf_jiffies64();
        if (*scratch).tick != tick {
            (*scratch).tick = tick;
            (*scratch).now_ns = bpf_ktime_get_coarse_ns();
        }
        (*scratch).now_ns
    }
}
