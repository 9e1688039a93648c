//! System call filters (seccomp(2)) that limit a compromised process.

use std::{collections::BTreeMap, io};

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

/// Task of a process, which determines its permitted system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Answers queries and forwards them.
    Serve,
    /// Loads and attaches the programs for a server.
    Attach,
}

/// Restricts this thread and its future children to the system calls needed for `work`; all others
/// fail with EPERM. No list contains execve(2), ptrace(2), mount(2), setns(2), unshare(2) or calls
/// that change the user. Sets `no_new_privs`.
///
/// Must be called before the process starts a second thread.
pub fn enter(work: Work) -> io::Result<()> {
    let attaching: &[libc::c_long] = match work {
        Work::Serve => &[],
        Work::Attach => ATTACHING,
    };
    let calls = COMMON.iter().chain(OLDER).chain(attaching);
    let rules: BTreeMap<i64, _> = calls.map(|&call| (call, Vec::new())).collect();
    let refused = SeccompAction::Errno(libc::EPERM as u32);
    let architecture = TargetArch::try_from(std::env::consts::ARCH).map_err(io::Error::other)?;
    let filter = SeccompFilter::new(rules, refused, SeccompAction::Allow, architecture);
    let program: BpfProgram = filter
        .and_then(|filter| filter.try_into())
        .map_err(|error| io::Error::other(error.to_string()))?;
    seccompiler::apply_filter(&program).map_err(|error| io::Error::other(error.to_string()))
}

/// Returns a list of system calls from their names in `libc`.
macro_rules! calls {
    ($($call:ident)*) => { &[$(libc::$call),*] };
}

/// System calls for loading and attaching programs, and for grace periods.
const ATTACHING: &[libc::c_long] = calls! { SYS_bpf SYS_membarrier };

/// System calls for threads, memory, time, signals, files and sockets.
const COMMON: &[libc::c_long] = calls! {
    // Threads and memory.
    SYS_brk SYS_clone SYS_clone3 SYS_exit SYS_exit_group SYS_futex SYS_get_robust_list SYS_getcpu SYS_getpid
    SYS_getppid SYS_getpriority SYS_gettid SYS_madvise SYS_mlock SYS_mmap SYS_mprotect SYS_mremap SYS_msync
    SYS_munlock SYS_munmap SYS_prctl SYS_prlimit64 SYS_rseq SYS_sched_getaffinity SYS_sched_getparam
    SYS_sched_getscheduler SYS_sched_setaffinity SYS_sched_setattr SYS_sched_setscheduler SYS_sched_yield
    SYS_set_robust_list SYS_setpriority SYS_sigaltstack SYS_sysinfo SYS_uname
    // Time and signals.
    SYS_clock_getres SYS_clock_gettime SYS_clock_nanosleep SYS_getitimer SYS_gettimeofday SYS_kill
    SYS_nanosleep SYS_restart_syscall SYS_rt_sigaction SYS_rt_sigpending SYS_rt_sigprocmask SYS_rt_sigreturn
    SYS_rt_sigtimedwait SYS_signalfd4 SYS_tgkill SYS_timerfd_create SYS_timerfd_gettime SYS_timerfd_settime
    // Process identity.
    SYS_capget SYS_getegid SYS_geteuid SYS_getgid SYS_getgroups SYS_getrandom SYS_getresgid SYS_getresuid
    SYS_getrusage SYS_getuid SYS_umask
    // Files.
    SYS_chdir SYS_close SYS_close_range SYS_copy_file_range SYS_dup SYS_dup3 SYS_faccessat SYS_faccessat2
    SYS_fadvise64 SYS_fallocate SYS_fchmod SYS_fchmodat SYS_fcntl SYS_fdatasync SYS_flock SYS_fstat
    SYS_fstatfs SYS_fsync SYS_ftruncate SYS_getcwd SYS_getdents64 SYS_ioctl SYS_lseek SYS_memfd_create
    SYS_mkdirat SYS_newfstatat SYS_openat SYS_openat2 SYS_pipe2 SYS_pread64 SYS_preadv SYS_pwrite64
    SYS_pwritev SYS_read SYS_readlinkat SYS_readv SYS_renameat SYS_renameat2 SYS_sendfile SYS_statfs
    SYS_statx SYS_unlinkat SYS_write SYS_writev
    // Polling and sockets.
    SYS_accept4 SYS_bind SYS_connect SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait SYS_epoll_pwait2
    SYS_eventfd2 SYS_getpeername SYS_getsockname SYS_getsockopt SYS_inotify_add_watch SYS_inotify_init1
    SYS_inotify_rm_watch SYS_listen SYS_ppoll SYS_pselect6 SYS_recvfrom SYS_recvmmsg SYS_recvmsg
    SYS_sendmmsg SYS_sendmsg SYS_sendto SYS_setsockopt SYS_shutdown SYS_socket SYS_socketpair
};

/// Older variants, which only this architecture has.
#[cfg(target_arch = "x86_64")]
const OLDER: &[libc::c_long] = calls! {
    SYS_accept SYS_access SYS_arch_prctl SYS_chmod SYS_dup2 SYS_epoll_create SYS_epoll_wait SYS_eventfd
    SYS_getdents SYS_getrlimit SYS_inotify_init SYS_lstat SYS_mkdir SYS_open SYS_pipe SYS_poll SYS_readlink
    SYS_rename SYS_rmdir SYS_select SYS_setrlimit SYS_stat SYS_time SYS_unlink
};
#[cfg(not(target_arch = "x86_64"))]
const OLDER: &[libc::c_long] = &[];

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the error of a system call made on a separate thread, because filters are permanent.
    fn errno_inside(work: Work, call: libc::c_long) -> i32 {
        let inside = move || {
            enter(work).unwrap();
            // SAFETY: with these arguments none of the tested calls has an effect.
            let result = unsafe { libc::syscall(call, -1, 0, 0, 0, 0, 0) };
            if result < 0 {
                io::Error::last_os_error().raw_os_error().unwrap_or(0)
            } else {
                0
            }
        };
        std::thread::spawn(inside).join().unwrap()
    }

    const ESCAPES: [libc::c_long; 9] = [
        libc::SYS_execve,
        libc::SYS_execveat,
        libc::SYS_ptrace,
        libc::SYS_mount,
        libc::SYS_setns,
        libc::SYS_unshare,
        libc::SYS_setuid,
        libc::SYS_process_vm_writev,
        libc::SYS_perf_event_open,
    ];

    #[test]
    fn server_cannot_gain_privileges() {
        for call in ESCAPES.iter().chain(ATTACHING) {
            assert_eq!(errno_inside(Work::Serve, *call), libc::EPERM, "{call}");
        }
    }

    #[test]
    fn attacher_keeps_only_bpf() {
        assert_ne!(errno_inside(Work::Attach, libc::SYS_bpf), libc::EPERM);
        for call in ESCAPES {
            assert_eq!(errno_inside(Work::Attach, call), libc::EPERM, "{call}");
        }
    }
}
