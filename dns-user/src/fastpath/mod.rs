//! The fast path as seen from userspace: loading, hooks, interfaces, publisher,
//! lease, marks, tap.

/// The BPF programs, built from `dns-ebpf` by the build script.
pub const OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/dns-ebpf"));
