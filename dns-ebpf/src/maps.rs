//! The maps, and counting. Names and layouts are those of `dns_common`.

use aya_ebpf::{
    bindings::BPF_F_MMAPABLE,
    cty::c_void,
    helpers::{bpf_get_smp_processor_id, generated::bpf_check_mtu},
    macros::map,
    maps::{Array, PerCpuArray, ProgramArray, RingBuf},
};
use dns_common::{
    control::Control,
    counters::{CpuCounters, INTERFACE_SLOTS, KIND_SLOTS, OUTCOME_SLOTS, Outcome, RCODE_SLOTS},
    entry::{CHUNK_SIZE, MAX_V4},
    index::Pair,
    name::MAX_NAME_WORDS,
};

/// Where each name's entry lies, see [`dns_common::index`]; the loader sets the size.
#[map]
pub static NAMES: Array<Pair> = Array::with_max_entries(2, BPF_F_MMAPABLE);

/// Chunks that hold the entries; the loader sets how many.
#[map]
pub static ENTRIES: Array<[u64; CHUNK_SIZE / 8]> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// Lease, seed, endpoints, tap.
#[map]
pub static CONTROL: Array<Control> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// One element per possible CPU; the loader sets how many.
#[map]
pub static COUNTERS: Array<CpuCounters> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// In its only place [`crate::dns_tc_answer`], put there by the loader.
#[map]
pub static TC_ANSWER: ProgramArray = ProgramArray::with_max_entries(1, 0);

/// Sampled queries.
#[map]
pub static TAP: RingBuf = RingBuf::with_byte_size(1 << 18, 0);

/// Room to work in, one per CPU. Both hooks run with bottom halves disabled,
/// so nothing else uses it meanwhile.
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
    /// Always zero, see [`crate::bytes::Zero`].
    pub zero: usize,
    /// See [`crate::frame::Frame::keep`].
    pub frame: [usize; 4],
    /// The question's name, lower-cased; see [`crate::parse::read_name`].
    pub words: [u64; MAX_NAME_WORDS],
    /// Addresses that are being shuffled.
    pub addresses: [u32; MAX_V4],
    /// Collisions that the log has not been told of, see [`crate::messages`].
    pub collisions: u64,
    /// When it was told last, of `CLOCK_MONOTONIC`.
    pub told_ns: u64,
}

/// What userspace tells.
#[inline(always)]
pub fn control() -> Option<&'static Control> {
    // SAFETY: userspace may write it meanwhile, which tears nothing that counts.
    CONTROL.get_ptr(0).map(|control| unsafe { &*control })
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
    /// Where it came in.
    pub ifindex: u32,
}

/// Counts a reply.
#[inline(always)]
pub fn count_reply(reply: &Answered) {
    let Answered { outcome, kind, rcode, query_len, reply_len, answers: _, ifindex } = *reply;
    let Some(counters) = counters() else { return };
    // SAFETY: this CPU's own element, alone while the program runs. The
    // indexes are cut to the slots that there are.
    unsafe {
        (*counters).outcomes[outcome as usize % OUTCOME_SLOTS] += 1;
        (*counters).replies[kind % KIND_SLOTS][rcode as usize % RCODE_SLOTS] += 1;
        (*counters).query_bytes += query_len as u64;
        (*counters).reply_bytes += reply_len as u64;
        (*counters).interface_hits[ifindex as usize % INTERFACE_SLOTS] += 1;
    }
}

/// The interface's MTU if it is smaller than `packet_len` bytes of IP packet.
#[inline(always)]
pub fn mtu_below(context: *mut c_void, packet_len: usize) -> Option<usize> {
    let mut mtu = packet_len as u32;
    // SAFETY: the context is the kernel's own; interface 0 is its own interface.
    let fits = unsafe { bpf_check_mtu(context, 0, &mut mtu, 0, 0) } == 0;
    (!fits).then_some(mtu as usize & 0xffff)
}
