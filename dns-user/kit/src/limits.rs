//! The limit on open files.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises the soft limit on open files to the hard limit and returns the result. Every client and
/// every checked instance occupies a descriptor.
pub fn raise_file_limit() -> u64 {
    match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((soft, hard)) if soft < hard => match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
            Ok(()) => hard,
            Err(_) => soft,
        },
        Ok((soft, _)) => soft,
        // The usual minimum on POSIX systems.
        Err(_) => 1024,
    }
}
