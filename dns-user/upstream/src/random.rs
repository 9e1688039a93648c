//! Unpredictable random numbers for message ids, source ports and letter case.

use std::cell::RefCell;

/// Bytes requested from the kernel per call.
const POOL: usize = 512;

/// Unused random bytes of this thread.
struct Pool {
    bytes: [u8; POOL],
    /// Number of consumed bytes.
    used: usize,
}

thread_local! {
    /// The pool of this thread: one system call yields many numbers.
    static RANDOM: RefCell<Pool> = const { RefCell::new(Pool { bytes: [0; POOL], used: POOL }) };
}

/// Returns four random bytes from the kernel (`getrandom`) as a number.
pub(crate) fn u32() -> u32 {
    RANDOM.with_borrow_mut(|pool| {
        if pool.used + 4 > POOL {
            fill(&mut pool.bytes);
            pool.used = 0;
        }
        let mut number = [0; 4];
        number.copy_from_slice(&pool.bytes[pool.used..pool.used + 4]);
        pool.used += 4;
        u32::from_ne_bytes(number)
    })
}

/// Fills `bytes` from the kernel. If the system call is unavailable, uses an ordinary generator,
/// whose numbers are random but predictable.
fn fill(bytes: &mut [u8; POOL]) {
    let mut done = 0;
    while done < POOL {
        let rest = &mut bytes[done..];
        // SAFETY: the pointer and length are those of a slice that we may write to.
        let got = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        match usize::try_from(got) {
            Ok(got) => done += got,
            Err(_) if std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => {
                fastrand::Rng::new().fill(rest);
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn numbers_differ() {
        let numbers: std::collections::HashSet<u32> = (0..1000).map(|_| super::u32()).collect();
        assert!(numbers.len() > 990);
    }
}
