//! Puts the answers of each reply in random order.
//!
//! Clients rely on the order for load balancing, and a mere rotation would send the load of a
//! failed instance to its neighbour, so each reply is a Fisher–Yates shuffle that stops after as
//! many steps as the reply has answers. If the list is too long for the reply, its answers are a
//! uniformly random subset.

use aya_ebpf::helpers::bpf_get_prandom_u32;
use dns_common::entry::{MAX_V4, MAX_V6};

use crate::{
    IS_SKELETON,
    bytes::{Span, Zero, barrier, load, store},
    checksum::Sum,
    frame::{A_LEN, AAAA_LEN, MAX_REPLY_LEN},
    hook::Hook,
    maps::Scratch,
    question::List,
};

/// Maximum number of A records in a reply, rounded up.
const MAX_A: usize = MAX_REPLY_LEN / A_LEN;
/// Maximum number of AAAA records in a reply, rounded up.
const MAX_AAAA: usize = MAX_REPLY_LEN / AAAA_LEN + 1;

/// Random numbers for shuffling: the upper half of a 64-bit linear congruential generator, seeded
/// by the kernel.
struct Random(u64);

impl Random {
    /// Continues this CPU's sequence.
    #[inline(always)]
    fn resume(scratch: *mut Scratch) -> Self {
        // SAFETY: this CPU's own element, not shared while the program runs.
        let mut state = unsafe { (*scratch).random };
        if state == 0 {
            // SAFETY: the helper has no precondition.
            state = unsafe { (bpf_get_prandom_u32() as u64) << 32 | bpf_get_prandom_u32() as u64 };
        }
        Self(state)
    }

    /// Returns a number below `bound`, which is below 2^16: the bias is below 2^-16.
    #[inline(always)]
    fn below(&mut self, bound: usize) -> usize {
        if IS_SKELETON {
            return 0;
        }
        // Multiplier and increment of Knuth's MMIX generator.
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (((self.0 >> 32) * bound as u64) >> 32) as usize
    }

    /// Saves the state for the next reply.
    #[inline(always)]
    fn save(self, scratch: *mut Scratch) {
        // SAFETY: as in `resume`.
        unsafe { (*scratch).random = self.0 };
    }
}

/// Start of an A record: a pointer to the question's name, A, IN, and the first half of the TTL.
const A_START: u64 = u64::from_ne_bytes([0xc0, 0x0c, 0, 1, 0, 1, 0, 0]);
/// The rest of an A record up to its address: the second half of the TTL, and the length.
const A_MIDDLE: u64 = u32::from_ne_bytes([0, 0, 0, 4]) as u64;
/// Like [`A_START`], for AAAA.
const AAAA_START: u64 = u64::from_ne_bytes([0xc0, 0x0c, 0, 28, 0, 1, 0, 0]);
/// Like [`A_MIDDLE`], for AAAA.
const AAAA_MIDDLE: u32 = u32::from_ne_bytes([0, 0, 0, 16]);

/// Writes the A records of a reply with this TTL, in network byte order, and returns their sum.
#[inline(always)]
pub fn write_v4<H: Hook>(
    hook: &H,
    scratch: *mut Scratch,
    zero: Zero,
    list: List,
    ttl: usize,
) -> Sum {
    let Span { start: at, end } = hook.span(list.written_at);
    // SAFETY: takes the address only, without an access.
    let drawn = unsafe { &raw mut (*scratch).addresses } as usize;
    let addresses = list.addresses;
    // The bench's load has such records only.
    let source = if IS_SKELETON { addresses } else { drawn };
    let mut index = 0;
    while index < H::MAX_V4 / 4 {
        if IS_SKELETON || index * 4 >= list.available {
            break;
        }
        let (from, to) = (addresses + index * 16, drawn + index * 16);
        // SAFETY: inside the scratch list, and inside the chunk, whose last bytes belong to no entry.
        unsafe {
            store::<u64>(to, load(from));
            store::<u64>(to + 8, load(from + 8));
        }
        index = barrier(index + 1);
    }

    // From the end of the loop the verifier knows the number of addresses. Hide the number, or the
    // verifier follows the next loop once per value.
    let available = zero.value_barrier(list.available, 0x7ff);

    let mut random = Random::resume(scratch);
    let (first, middle) = (A_START | (ttl as u64) << 48, A_MIDDLE | ttl as u64 >> 16);
    let mut sum = Sum::repeated(first, middle, list.given);
    let mut index = 0;
    while index < MAX_A && (!H::IS_FIRST || index < H::MAX_V4) {
        let record = at + index * A_LEN;
        if index >= list.given || record + A_LEN > end {
            break;
        }
        let other = barrier(index + random.below(available - index)) & (MAX_V4 - 1);
        // SAFETY: both are inside the scratch list; the record was just compared with the end.
        unsafe {
            let address: u32 = load(source + other * 4);
            if !IS_SKELETON {
                store::<u32>(drawn + other * 4, load(drawn + index * 4));
            }
            store(record, first);
            store(record + 8, middle | (address as u64) << 32);
            sum.add_half(address);
        }
        index = barrier(index + 1);
    }
    random.save(scratch);
    sum
}

/// Like [`write_v4`], for AAAA records.
#[inline(always)]
pub fn write_v6<H: Hook>(
    hook: &H,
    scratch: *mut Scratch,
    zero: Zero,
    list: List,
    ttl: usize,
) -> Sum {
    let Span { start: at, end } = hook.span(list.written_at);
    // SAFETY: takes the address only, without an access.
    let drawn = unsafe { &raw mut (*scratch).addresses } as usize;
    let addresses = list.addresses;
    let mut index = 0;
    while index < H::MAX_V6 {
        if index >= list.available {
            break;
        }
        let (from, to) = (addresses + index * 16, drawn + index * 16);
        // SAFETY: inside the entry and inside the scratch list.
        unsafe {
            store::<u64>(to, load(from));
            store::<u64>(to + 8, load(from + 8));
        }
        index = barrier(index + 1);
    }

    // From the end of the loop the verifier knows the number of addresses. Hide the number, or the
    // verifier follows the next loop once per value.
    let available = zero.value_barrier(list.available, 0x7ff);

    let mut random = Random::resume(scratch);
    let (first, middle) = (
        AAAA_START | (ttl as u64) << 48,
        AAAA_MIDDLE | (ttl as u32) >> 16,
    );
    let mut sum = Sum::repeated(first, middle as u64, list.given);
    let mut index = 0;
    while index < MAX_AAAA && (!H::IS_FIRST || index < H::MAX_V6) {
        let record = at + index * AAAA_LEN;
        if index >= list.given || record + AAAA_LEN > end {
            break;
        }
        let other = barrier(index + random.below(available - index)) & (MAX_V6 - 1);
        let (drawn_place, next) = (drawn + other * 16, drawn + index * 16);
        // SAFETY: both are inside the scratch list; the record was just compared with the end.
        unsafe {
            let address: [u64; 2] = [load(drawn_place), load(drawn_place + 8)];
            store::<u64>(drawn_place, load(next));
            store::<u64>(drawn_place + 8, load(next + 8));
            store(record, first);
            store(record + 8, middle);
            store(record + 12, address[0]);
            store(record + 20, address[1]);
            sum.add(address[0]);
            sum.add(address[1]);
        }
        index = barrier(index + 1);
    }
    random.save(scratch);
    sum
}
