//! Makes a process believe that the kernel is older than 6.6: attaching by links fails as it does
//! there, so that a server in mode `auto` or `tc` uses clsact.

use std::{io, os::unix::process::CommandExt as _, process::Command};

/// `BPF_LINK_CREATE` of `enum bpf_cmd`.
const LINK_CREATE: u32 = 28;

/// Refuses tcx links to the process that `command` starts: a seccomp filter returns the kernel's
/// error for an unknown attach type.
pub fn refuse_tcx(command: &mut Command) {
    let step = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let back = libc::BPF_RET | libc::BPF_K;
    let filter = [
        // Offsets in `struct seccomp_data`: 0 is the number of the call, 16 its first argument.
        step(load, 0, 0, 0),
        step(equal, 0, 3, libc::SYS_bpf as u32),
        step(load, 0, 0, 16),
        step(equal, 0, 1, LINK_CREATE),
        step(back, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EINVAL as u32),
        step(back, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    // SAFETY: between fork and exec only a plain system call is made, and no memory is allocated.
    unsafe {
        command.pre_exec(move || {
            let program = libc::sock_fprog {
                len: filter.len() as u16,
                filter: filter.as_ptr().cast_mut(),
            };
            // The kernel copies the program, which lives until then.
            let result = libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                &raw const program,
            );
            if result == 0 {
                Ok(())
            } else {
                Err(io::Error::last_os_error())
            }
        });
    }
}
