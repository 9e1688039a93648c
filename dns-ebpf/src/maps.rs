//! The maps, and counting. Names and layouts are those of `dns_common`.

use core::arch::asm;

use aya_ebpf::{
    bindings::{BPF_F_MMAPABLE, BPF_FIB_LOOKUP_OUTPUT, bpf_fib_lookup as FibLookup},
    cty::c_void,
    helpers::{
        bpf_get_smp_processor_id,
        generated::{bpf_check_mtu, bpf_fib_lookup},
    },
    macros::map,
    maps::{Array, PerCpuArray, ProgramArray, RingBuf},
};
use dns_common::{
    control::Control,
    counters::{CpuCounters, KIND_SLOTS, OUTCOME_SLOTS, Outcome, RCODE_SLOTS},
    entry::{CHUNK_SIZE, MAX_V4},
    index::Pair,
    name::MAX_NAME_WORDS,
    scope::{INTERFACES, Scope},
};

use crate::bytes::opaque;

/// Where each name's entry lies, see [`dns_common::index`]; the loader sets the size.
#[map]
pub static NAMES: Array<Pair> = Array::with_max_entries(2, BPF_F_MMAPABLE);

/// Chunks that hold the entries; the loader sets how many.
#[map]
pub static ENTRIES: Array<[u64; CHUNK_SIZE / 8]> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// Lease, seed, tap: what the server says.
#[map]
pub static CONTROL: Array<Control> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// Endpoints, VLANs, interfaces: what the attaching process says.
#[map]
pub static SCOPE: Array<Scope> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// One element per possible CPU; the loader sets how many.
#[map]
pub static COUNTERS: Array<CpuCounters> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// In its only place [`crate::dns_tc_answer`], put there by the loader.
#[map]
pub static TC_ANSWER: ProgramArray = ProgramArray::with_max_entries(1, 0);

/// Sampled queries.
#[map]
pub static TAP: RingBuf = RingBuf::with_byte_size(1 << 18, 0);

/// Room to work in, one per CPU. Both hooks run with bottom halves disabled, so no other run
/// uses it meanwhile, but on kernels with PREEMPT_RT (6.18 and later), where one run may
/// interrupt another: see [`take`].
#[map]
pub static SCRATCH: PerCpuArray<Scratch> = PerCpuArray::with_max_entries(1, 0);

/// Element of [`SCRATCH`].
#[repr(C, align(8))]
pub struct Scratch {
    /// State of the random numbers; 0 before the first use.
    pub random: u64,
    /// Number of the tick that `now_ns` is of.
    pub tick: u64,
    /// `CLOCK_MONOTONIC_COARSE` in ns, see [`crate::clock`].
    pub now_ns: u64,
    /// 1: a run uses this room.
    pub busy: u64,
    /// Always zero, see [`crate::bytes::Zero`].
    pub zero: usize,
    /// See [`crate::frame::Frame::keep`].
    pub frame: [usize; 6],
    /// The question's name, lower-cased; see [`crate::parse::read_name`].
    pub words: [u64; MAX_NAME_WORDS],
    /// Addresses that are being shuffled.
    pub addresses: [u32; MAX_V4],
    /// Collisions that the log has not been told of, see [`crate::messages`].
    pub collisions: u64,
    /// When it was told last, of `CLOCK_MONOTONIC`.
    pub told_ns: u64,
    /// Question to the kernel about a route.
    pub route: FibLookup,
}

/// What userspace tells.
#[inline(always)]
pub fn control() -> Option<&'static Control> {
    // SAFETY: userspace may write it meanwhile, which tears nothing that counts.
    CONTROL.get_ptr(0).map(|control| unsafe { &*control })
}

/// Endpoints and interfaces.
#[inline(always)]
pub fn scope() -> Option<&'static Scope> {
    // SAFETY: the attaching process may write it meanwhile, in the order that `Scope` describes.
    SCOPE.get_ptr(0).map(|scope| unsafe { &*scope })
}

/// Takes this CPU's scratch room for one run, until [`leave`]; false: this run has interrupted
/// another one.
#[inline(always)]
pub fn take(scratch: *mut Scratch) -> bool {
    let mut busy = 1_u64;
    // An atomic exchange (kernel 5.12), which `core` does not offer for this target.
    // SAFETY: an aligned word of a map's memory, which is written here and in `leave` alone.
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

/// Leaves this CPU's scratch room to the next run.
#[inline(always)]
pub fn leave(scratch: *mut Scratch) {
    // SAFETY: as in `take`.
    unsafe { (&raw mut (*scratch).busy).write_volatile(0) };
}

/// This CPU's scratch room.
#[inline(always)]
pub fn scratch() -> Option<*mut Scratch> {
    SCRATCH.get_ptr_mut(0)
}

/// This CPU's counters.
#[inline(always)]
fn counters() -> Option<*mut CpuCounters> {
    // SAFETY: the helper has no precondition.
    COUNTERS.get_ptr_mut(unsafe { bpf_get_smp_processor_id() })
}

/// Counts a packet that goes up; `outcome`: an [`Outcome`] as a number.
#[inline(always)]
pub fn count(outcome: usize) {
    if let Some(counters) = counters() {
        // SAFETY: this CPU's own element, alone while the program runs.
        unsafe { (*counters).outcomes[outcome % OUTCOME_SLOTS] += 1 };
    }
}

/// Replies of the interface in a slot on this CPU.
#[inline(always)]
pub fn replies(slot: usize) -> u64 {
    // SAFETY: this CPU's own element, and a slot that there is.
    counters().map_or(0, |counters| unsafe { (*counters).interface_hits[opaque(slot) & (INTERFACES - 1)] })
}

/// What is counted about a reply.
pub struct Answered {
    /// Complete or cut.
    pub outcome: Outcome,
    /// Type asked for: a [`QueryKind`] as a number.
    pub kind: usize,
    /// RCODE of the reply.
    pub rcode: u8,
    /// Bytes of DNS message in the query.
    pub query_len: usize,
    /// Bytes of DNS message in the reply.
    pub reply_len: usize,
    /// Answers in the reply.
    pub answers: u16,
    /// Slot of the interface by which it came in.
    pub slot: usize,
}

/// Counts a reply.
#[inline(always)]
pub fn count_reply(reply: &Answered) {
    let Answered { outcome, kind, rcode, query_len, reply_len, answers: _, slot } = *reply;
    let Some(counters) = counters() else { return };
    // SAFETY: this CPU's own element, alone while the program runs. The
    // indexes are cut to the slots that there are.
    unsafe {
        (*counters).outcomes[outcome as usize % OUTCOME_SLOTS] += 1;
        (*counters).replies[kind % KIND_SLOTS][rcode as usize % RCODE_SLOTS] += 1;
        (*counters).query_bytes += query_len as u64;
        (*counters).reply_bytes += reply_len as u64;
        (*counters).interface_hits[slot % INTERFACES] += 1;
    }
}

/// Whether an IP packet of `packet_len` bytes fits the interface's MTU.
#[inline(always)]
pub fn fits_device(context: *mut c_void, packet_len: usize) -> bool {
    let mut mtu = packet_len as u32;
    // SAFETY: the context is the kernel's own; interface 0 is its own interface.
    unsafe { bpf_check_mtu(context, 0, &mut mtu, 0, 0) == 0 }
}

/// Asks the kernel whether its route by the interface takes what `route` describes, path MTU
/// included (`bpf_fib_lookup`, kernel 4.18). Where the interface does not forward, the kernel
/// does not say: false.
#[inline(always)]
pub fn fits_route(context: *mut c_void, route: *mut FibLookup) -> bool {
    const SUCCESS: i64 = 0;
    const NO_NEIGHBOUR: i64 = 7;
    // SAFETY: the context is the kernel's own, `route` lies in a map.
    let found =
        unsafe { bpf_fib_lookup(context, route, size_of::<FibLookup>() as i32, BPF_FIB_LOOKUP_OUTPUT) };
    found as i64 == SUCCESS || found as i64 == NO_NEIGHBOUR
}
