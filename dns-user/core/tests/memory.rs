//! Memory that a snapshot keeps and that a reload needs, counted by the allocator: exact, whatever else the
//! machine does.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicIsize, Ordering},
};

use dns_core::catalog::{AliasFiles, IndexedRecords, RECORD_KEYS, Records, Snapshot};

/// Counts the bytes in use, and the most since the last [`Counting::begin`].
struct Counting;

static USED: AtomicIsize = AtomicIsize::new(0);
static MOST: AtomicIsize = AtomicIsize::new(0);

// SAFETY: all memory comes from the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let used = USED.fetch_add(layout.size().cast_signed(), Ordering::Relaxed);
        MOST.fetch_max(used + layout.size().cast_signed(), Ordering::Relaxed);
        // SAFETY: the caller's duty.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        USED.fetch_sub(layout.size().cast_signed(), Ordering::Relaxed);
        // SAFETY: the caller's duty.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

impl Counting {
    /// Returns the bytes in use, from which [`Self::most_since`] counts.
    fn begin() -> isize {
        let used = USED.load(Ordering::Relaxed);
        MOST.store(used, Ordering::Relaxed);
        used
    }

    /// Returns the largest number of bytes that were in use beyond `begun`.
    fn most_since(begun: isize) -> isize {
        MOST.load(Ordering::Relaxed) - begun
    }
}

const INSTANCES: usize = 10_000;

/// Returns a file as a director writes it, of which one instance was recreated `version` times.
fn file(version: usize) -> Vec<u8> {
    let place = |number: usize| format!("web-{}.default.cf-{}.bosh", number / 8, number / 400);
    let id = |number: usize| format!("{number:08x}-0000-4000-8000-00000000cafe");
    let address = |number: usize| {
        let version = if number == INSTANCES / 2 { version } else { 0 };
        format!("10.{version}.{}.{}", number >> 8, number & 255)
    };
    let pair = |number| {
        format!(
            r#"["{}","{}.{}"]"#,
            address(number),
            id(number),
            place(number)
        )
    };
    let row = |number: usize| {
        let place = place(number);
        let parts: Vec<&str> = place.split('.').collect();
        let (group, zone, index) = (number / 8 + 1, number % 3 + 1, number % 8);
        format!(
            r#"["{}","{number}","{}",["{group}","{}"],"z{zone}","{zone}","{}","1","{}","{}","bosh","agent-{}",{index}]"#,
            id(number),
            parts[0],
            group / 2 + INSTANCES,
            parts[1],
            parts[2],
            address(number),
            id(number),
        )
    };
    let list =
        |item: &dyn Fn(usize) -> String| (0..INSTANCES).map(item).collect::<Vec<_>>().join(",");
    let keys = RECORD_KEYS.map(|key| format!("\"{key}\"")).join(",");
    let (pairs, rows) = (list(&pair), list(&row));
    format!(
        r#"{{"records":[{pairs}],"version":{version},"record_keys":[{keys}],"record_infos":[{rows}],"aliases":{{}}}}"#
    )
    .into_bytes()
}

/// One test, because the count is the process's.
#[test]
fn snapshot_and_reload_take_little_memory() {
    let begun = Counting::begin();
    let empty = IndexedRecords::from(Records::default());
    let files = AliasFiles::default();
    let first = file(0);
    let before = Counting::begin();
    let (records, warnings) = empty.next(&first).unwrap();
    assert!(warnings.is_empty(), "{warnings:?}");
    let mut snapshot = Snapshot::build(records, &files).0;
    let complete = Counting::most_since(before);
    let kept = USED.load(Ordering::Relaxed) - before;
    drop(first);
    let each = kept / INSTANCES.cast_signed();
    println!("{each} bytes for each instance; {complete} to read all");
    // Two texts of 36 and 42 bytes, 24 of the outline, 32 of the pair, columns and indexes.
    assert!(each <= 400, "{each} bytes for each instance");

    let mut most = 0;
    for version in 1..=20 {
        let next = file(version);
        let before = Counting::begin();
        let (records, _) = snapshot.records().next(&next).unwrap();
        let newer = Snapshot::build(records, &files).0;
        most = most.max(Counting::most_since(before));
        assert_eq!(
            newer
                .instance(INSTANCES as u32 / 2)
                .unwrap()
                .ip
                .unwrap()
                .to_string(),
            {
                format!(
                    "10.{version}.{}.{}",
                    (INSTANCES / 2) >> 8,
                    (INSTANCES / 2) & 255
                )
            }
        );
        snapshot = newer;
    }
    println!("{most} to read one");
    // Lists of addresses, pairs and the outline; the rest is shared.
    assert!(
        most <= complete / 4,
        "{most} bytes for one row, {complete} for all"
    );
    let after = USED.load(Ordering::Relaxed) - begun;
    assert!(
        after <= kept + kept / 50,
        "{after} bytes after 20 reloads, {kept} before"
    );
}
