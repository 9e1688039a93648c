//! Loads and stores at plain addresses, in a form that the verifier accepts: an address is a
//! `usize` that has been compared with the packet's end; barriers against the compiler's assumptions.

use core::arch::asm;

/// Loads a value at any alignment; every architecture with a BPF JIT allows that.
///
/// # Safety
/// `address .. address + size_of::<T>()` lies in memory for which the verifier has seen a bounds
/// check; otherwise the program does not load.
#[inline(always)]
pub unsafe fn load<T: Copy>(address: usize) -> T {
    // `read_unaligned` would be split into single bytes on this target.
    // SAFETY: the caller's promise, checked by the verifier.
    unsafe { *(address as *const T) }
}

/// Stores a value at any alignment.
///
/// # Safety
/// As for [`load`].
#[inline(always)]
pub unsafe fn store<T: Copy>(address: usize, value: T) {
    // SAFETY: the caller's promise, checked by the verifier.
    unsafe { *(address as *mut T) = value }
}

/// A zero that the verifier does not know to be zero.
///
/// Where paths with different constants merge, the verifier would follow the rest of the program
/// once per constant. The number of instructions is then the product of all choices that it
/// remembers, and the kernel accepts a million (our target is 100,000). Therefore each choice is
/// made once, and its result is opaque.
#[derive(Clone, Copy)]
pub struct Zero(usize);

impl Zero {
    /// Reads the zero from a map.
    ///
    /// # Safety
    /// `cell` can be read, holds zero, and is in a map, whose content the verifier does not
    /// track.
    #[inline(always)]
    pub unsafe fn read(cell: *const usize) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { cell.read_volatile() })
    }

    /// Returns `value`; the verifier knows only that it is within `mask`.
    #[inline(always)]
    pub fn value_barrier(self, value: usize, mask: usize) -> usize {
        barrier(barrier(value) ^ self.0) & mask
    }
}

/// Returns whether `value & mask` is not zero. From the branch the verifier learns nothing about
/// `value` or about registers that it knows to be equal.
#[inline(always)]
pub fn has(value: usize, mask: usize) -> bool {
    barrier_and(value, mask) != 0
}

/// Returns `value & mask`, computed even if the compiler knows the mask to be redundant: the
/// verifier may have lost that knowledge.
#[inline(always)]
pub fn barrier_and(value: usize, mask: usize) -> usize {
    barrier(barrier(value) & mask)
}

/// Returns `value` while hiding its origin from the compiler.
///
/// Keeps the compiler from rewriting a bounds-checked address or counter into an equal expression
/// that the verifier cannot follow.
#[inline(always)]
pub fn barrier(mut value: usize) -> usize {
    // SAFETY: emits no instruction.
    unsafe { asm!("/* {0} */", inout(reg) value, options(nomem, nostack, preserves_flags)) }
    value
}

/// Part of a packet, from `start` to `end`.
#[derive(Clone, Copy)]
pub struct Span {
    /// Address of the first byte.
    pub start: usize,
    /// Address after the last byte.
    pub end: usize,
}
