//! Settings of the process and its threads: the limit on open files, the allocator's memory, priorities. The signals that
//! end it.

use std::future;

use nix::unistd::{SysconfVar, sysconf};
use tokio::signal::unix::{SignalKind, signal};

/// The limit on open files.
pub mod limits {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};

    /// Raises the soft limit on open files to the hard limit and returns the result. Every client and
    /// every checked instance occupies a descriptor.
    pub fn raise_file_limit() -> u64 {
        match getrlimit(Resource::RLIMIT_NOFILE) {
            Ok((soft, hard)) if soft < hard => match setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
            {
                Ok(()) => hard,
                Err(_) => soft,
            },
            Ok((soft, _)) => soft,
            // The usual minimum on POSIX systems.
            Err(_) => 1024,
        }
    }
}

/// Returns the size of a page of memory in bytes.
pub(crate) fn page_size() -> usize {
    let size = sysconf(SysconfVar::PAGE_SIZE).ok().flatten();
    size.map_or(4096, |size| size as usize)
}

/// Memory that the process would keep although it no longer needs it.
pub mod memory {
    use std::{
        ffi::{c_int, c_void},
        fs,
    };

    /// Growth of the process after which free memory is returned to the system.
    const MAX_SURPLUS: u64 = 4 << 20;

    /// Returns what a burst of work leaves free in the allocator. glibc keeps free memory that lies between pieces in
    /// use: 24 of 30 MiB after 86,700 queries for names whose servers hang.
    #[derive(Debug, Default)]
    pub struct Surplus {
        /// Memory of the process when it held the least, in bytes.
        pub(super) least: u64,
        /// Whether memory was returned at the last call.
        pub(super) is_returned: bool,
    }

    impl Surplus {
        /// Must be called now and then, at a moment in which little happens.
        pub fn give_back(&mut self) {
            let before = anonymous();
            let has_grown = before > self.least + MAX_SURPLUS;
            // Idle connections end some seconds after the burst.
            if has_grown || self.is_returned {
                give_back();
                // The rest is in use.
                self.least = anonymous();
            } else {
                self.least = self.least.min(before);
            }
            self.is_returned = has_grown;
        }
    }

    /// Returns the memory of this process that belongs to no file, in bytes; 0 without /proc.
    pub(super) fn anonymous() -> u64 {
        let text = fs::read_to_string("/proc/self/statm").unwrap_or_default();
        let mut fields = text
            .split(' ')
            .skip(1)
            .map_while(|pages| pages.parse().ok());
        let resident: u64 = fields.next().unwrap_or(0);
        let shared = fields.next().unwrap_or(resident);
        resident.saturating_sub(shared) * super::page_size() as u64
    }

    /// Makes the allocator return each large buffer to the system when it is freed. glibc otherwise
    /// raises the threshold after the first one, and every thread then keeps the memory of a dataset:
    /// 14 MiB at 10,000 agents in bosh-dns-sync, 2.8 MB of records in the server's thread that reads them.
    pub fn return_large_buffers() {
        // SAFETY: takes two plain numbers; no memory is shared.
        #[cfg(target_env = "gnu")]
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, 128 * 1024)
        };
    }

    /// Returns the allocator's free memory to the system, after work that briefly needed much. Takes 0.5 ms.
    pub fn give_back() {
        // SAFETY: takes a plain number and may be called at any time from any thread.
        #[cfg(target_env = "gnu")]
        unsafe {
            libc::malloc_trim(0)
        };
    }

    /// Unmaps the program's code and constants, most of which only the start needs: 4 of 7 MiB. The kernel maps what
    /// runs again from its page cache, 64 KiB at a time.
    pub fn forget_start() {
        // SAFETY: the callback keeps neither of its pointers.
        unsafe { libc::dl_iterate_phdr(Some(unmap_program), std::ptr::null_mut()) };
    }

    /// Unmaps the segments of the program, which is the first object, that were never written to.
    unsafe extern "C" fn unmap_program(
        object: *mut libc::dl_phdr_info,
        _: usize,
        _: *mut c_void,
    ) -> c_int {
        // SAFETY: the C library passes a valid object with this many headers.
        let (base, segments) = unsafe {
            let object = &*object;
            (
                object.dlpi_addr,
                std::slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum.into()),
            )
        };
        let page = super::page_size();
        for segment in segments {
            if segment.p_type != libc::PT_LOAD || segment.p_flags & libc::PF_W != 0 {
                continue;
            }
            let address = (base + segment.p_vaddr) as usize;
            let start = address.next_multiple_of(page);
            let end = (address + segment.p_memsz as usize) / page * page;
            if start < end {
                // SAFETY: these pages are a private mapping of the program's file that nothing can write to, so the next
                // access finds the same bytes.
                unsafe {
                    libc::madvise(
                        std::ptr::with_exposed_provenance_mut(start),
                        end - start,
                        libc::MADV_DONTNEED,
                    )
                };
            }
        }
        1
    }
}

/// Lower priority for threads with background work.
pub mod priority {
    /// Increment of the nice value.
    const NICENESS: i32 = 5;

    /// Lowers the priority of the calling thread, so that answering queries comes first. `work` is its
    /// name in the log.
    pub fn lower(work: &str) {
        // SAFETY: takes plain numbers; process 0 is the calling thread (Linux, not POSIX).
        let result = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICENESS) };
        if result != 0 {
            let problem = std::io::Error::last_os_error();
            tracing::debug!("cannot lower the priority of {work}: {problem}");
        }
    }
}

/// Waits for SIGTERM or SIGINT, which are handled from this call on. Must be called inside a tokio runtime.
pub fn until_ended() -> impl Future<Output = ()> {
    // Not at the first poll: until then a signal would end the process in the middle of its work.
    let terminate = signal(SignalKind::terminate());
    let interrupt = signal(SignalKind::interrupt());
    async {
        // Without handlers, the default action of the signals ends the process.
        let (Ok(mut terminate), Ok(mut interrupt)) = (terminate, interrupt) else {
            return future::pending().await;
        };
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, thread};

    use nix::sys::{
        resource::{Resource, getrlimit, setrlimit},
        signal::{Signal, raise},
    };

    use super::{
        limits,
        memory::{Surplus, anonymous, forget_start, return_large_buffers},
        priority, until_ended,
    };
    use crate::logs::logged;

    #[tokio::test]
    async fn signals_before_the_wait_count() {
        let ended = until_ended();
        // Would end this process if it were handled only from the first poll on.
        raise(Signal::SIGTERM).unwrap();
        ended.await;
    }

    #[test]
    fn forgotten_code_still_runs() {
        let resident = || {
            let maps = fs::read_to_string("/proc/self/smaps").unwrap();
            let program = std::env::current_exe().unwrap();
            let mut is_code = false;
            let mut kib = 0_u64;
            for line in maps.lines() {
                if line.contains('-') && line.contains(" r-xp ") {
                    is_code = line.ends_with(program.to_str().unwrap());
                } else if let Some(size) = line.strip_prefix("Rss:")
                    && std::mem::take(&mut is_code)
                {
                    kib += size.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
                }
            }
            kib
        };
        let before = resident();
        forget_start();
        // Reading the file again takes some of it.
        assert!(resident() < before, "{before} KiB");
    }

    #[test]
    fn memory_of_a_burst_is_given_back() {
        const MIB: u64 = 1 << 20;
        let mut surplus = Surplus::default();
        surplus.give_back();
        let before = anonymous();
        let mut pieces = Vec::new();
        for number in 0_u32..64 << 10 {
            pieces.push((number, vec![1_u8; 1024]));
        }
        assert!(anonymous() > before + 64 * MIB);
        // Those that stay keep every end of the heap in use.
        pieces.retain(|(number, _)| number % 256 == 0);
        surplus.give_back();
        let kept = anonymous().saturating_sub(before);
        assert!(kept < 8 * MIB, "{kept} bytes");
        drop(pieces);
    }

    #[test]
    fn file_limit_reaches_hard_limit() {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, hard - 1, hard).unwrap();
        for _ in 0..2 {
            assert_eq!(limits::raise_file_limit(), hard);
            assert_eq!(getrlimit(Resource::RLIMIT_NOFILE).unwrap(), (hard, hard));
        }
    }

    #[test]
    fn background_work_has_a_lower_priority() {
        // Others than root cannot raise it to 5.
        if !test_support::requirements::root() {
            return;
        }
        let niceness = thread::spawn(|| {
            let log = logged(|| priority::lower("the test"));
            // SAFETY: takes plain numbers.
            let niceness = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
            (niceness, log)
        });
        assert_eq!(niceness.join().unwrap(), (5, String::new()));
    }

    #[test]
    fn only_growth_returns_memory() {
        const MIB: u64 = 1 << 20;
        // Enough to subtract from.
        let used = vec![1_u8; 16 << 20];
        for (grown_by, is_returned) in [(2 * MIB, false), (12 * MIB, true)] {
            let least = anonymous() - grown_by;
            let mut surplus = Surplus {
                least,
                is_returned: false,
            };
            surplus.give_back();
            assert_eq!(surplus.is_returned, is_returned, "{grown_by}");
            // The memory in use is the new minimum.
            assert_eq!(surplus.least > least + MIB, is_returned);
        }
        // The end of a burst is followed by another look.
        let mut surplus = Surplus {
            least: anonymous() - 2 * MIB,
            is_returned: true,
        };
        let least = surplus.least;
        surplus.give_back();
        assert!(!surplus.is_returned && surplus.least > least + MIB);
        let mut surplus = Surplus {
            least: u64::MAX / 2,
            is_returned: false,
        };
        surplus.give_back();
        assert!(surplus.least < anonymous() + 64 * MIB, "shrinks");
        drop(used);
    }

    #[test]
    fn freed_large_buffers_are_returned() {
        return_large_buffers();
        let before = anonymous();
        // glibc would keep buffers of up to the size of the first one.
        for mib in [24, 16] {
            let buffer = vec![1_u8; mib << 20];
            assert!(anonymous() > before + (8 << 20));
            drop(buffer);
        }
        let kept = anonymous().saturating_sub(before);
        assert!(kept < 8 << 20, "{kept} bytes");
    }
}
