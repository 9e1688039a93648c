//! BPF programs of benches and tests (`ebpf`), and the types that they share with userspace. None
//! is part of the server.

pub mod reset;

use aya::include_bytes_aligned;

/// Restores the packet before each run of the program under test, see [`mod@reset`].
pub const RESET: &[u8] = include_bytes_aligned!(concat!(env!("OUT_DIR"), "/reset"));

/// The server's programs without the jobs that a mere lookup could do without, see `IS_SKELETON` in `dns-ebpf`.
pub const SKELETON: &[u8] = include_bytes_aligned!(concat!(env!("OUT_DIR"), "/skeleton"));

/// Baseline programs that pass or answer packets without any lookup.
pub const YARDSTICKS: &[u8] = include_bytes_aligned!(concat!(env!("OUT_DIR"), "/yardsticks"));
