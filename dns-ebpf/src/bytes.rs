//! Loads and stores at plain addresses, as the verifier wants them: an address
//! is a `usize` that was compared with the packet's end before.

use core::arch::asm;

/// Loads a value at any alignment, which all machines that JIT BPF allow.
///
/// # Safety
/// `address .. address + size_of::<T>()` lies in memory that the verifier has
/// seen a bounds check for; otherwise the program does not load.
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

/// A zero that the verifier does not know to be one.
///
/// Where paths with different constants meet, the verifier would follow the rest of
/// the program once for each of them: its instructions are the product of all choices
/// that it remembers, and the kernel takes a million (100,000 are the aim here). So
/// each choice is made once, and what came of it is laundered.
#[derive(Clone, Copy)]
pub struct Zero(usize);

impl Zero {
    /// The zero that lies in a map.
    ///
    /// # Safety
    /// `cell` can be read, holds zero, and is in a map's memory: of that the verifier
    /// keeps no account.
    #[inline(always)]
    pub unsafe fn read(cell: *const usize) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { cell.read_volatile() })
    }

    /// The same value, but the verifier knows nothing of it except that it is within
    /// `mask`.
    #[inline(always)]
    pub fn launder(self, value: usize, mask: usize) -> usize {
        opaque(opaque(value) ^ self.0) & mask
    }
}

/// Whether `value & mask` is not zero; the branch teaches the verifier nothing about
/// `value` (and about registers that it knows to be equal).
#[inline(always)]
pub fn has(value: usize, mask: usize) -> bool {
    masked(value, mask) != 0
}

/// `value & mask`, done even where the compiler knows that it changes nothing:
/// the verifier may have lost what the compiler knows.
#[inline(always)]
pub fn masked(value: usize, mask: usize) -> usize {
    opaque(opaque(value) & mask)
}

/// The same value, but the compiler can no longer see where it came from.
///
/// Keeps the compiler from rewriting a bounds-checked address or counter into
/// an equal expression that the verifier cannot follow.
#[inline(always)]
pub fn opaque(mut value: usize) -> usize {
    // SAFETY: no instruction at all.
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
