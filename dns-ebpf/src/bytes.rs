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

/// The same value, but the verifier no longer knows it: it went through memory
/// that the verifier keeps no account of. What is learned about `mask` stays.
///
/// Where paths with different constants meet, the verifier would follow the
/// rest of the program once for each of them.
///
/// # Safety
/// `cell` can be read and written, and is not on the stack.
#[inline(always)]
pub unsafe fn forget(cell: *mut usize, value: usize, mask: usize) -> usize {
    // SAFETY: the caller's promise.
    unsafe {
        cell.write_volatile(value);
        opaque(cell.read_volatile()) & mask
    }
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
