//! Counts allocations. A test program that counts has [`Counting`] as its allocator.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

/// Counts the allocations of some threads, or of all.
#[derive(Debug)]
pub struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static IS_EACH_COUNTED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static IS_COUNTED: Cell<bool> = const { Cell::new(false) };
}

impl Counting {
    /// Counts the allocations of this thread from now on.
    pub fn count_thread() {
        IS_COUNTED.set(true);
    }

    /// Counts the allocations of all threads from now on, or only of the threads of [`Self::count_thread`].
    pub fn count_all(is_each_counted: bool) {
        IS_EACH_COUNTED.store(is_each_counted, Ordering::Relaxed);
    }

    /// Returns the number of allocations that were counted since the last call.
    pub fn take() -> u64 {
        ALLOCATIONS.swap(0, Ordering::Relaxed)
    }
}

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if IS_COUNTED.get() || IS_EACH_COUNTED.load(Ordering::Relaxed) {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}
