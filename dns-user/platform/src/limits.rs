//! The limit on open files.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises the limit on open files as far as it goes without privileges and gives
/// what it is now: every client, and every instance that is checked, keeps a connection.
pub fn raise_file_limit() -> u64 {
    match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((soft, hard)) if soft < hard => match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
            Ok(()) => hard,
            Err(_) => soft,
        },
        Ok((soft, _)) => soft,
        // The least that POSIX systems are usually set to.
        Err(_) => 1024,
    }
}
