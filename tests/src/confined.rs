//! Runs a program as BPM does: as another user without capabilities, restricted to the system calls
//! of BPM's list (`bpm-release`, 2026). BPM refuses other calls with EPERM; here bpf(2) kills the
//! process, so that no attempt goes unnoticed.

use std::{io, os::unix::process::CommandExt as _, process::Command};

use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};

const USER: u32 = 65534;

/// Lists system calls by their names.
macro_rules! calls {
    ($($name:ident)*) => { &[$(libc::$name),*] };
}

/// BPM's list, as far as this architecture has the calls. BPM restricts the arguments of `clone`
/// and `personality`; this filter does not.
const ALLOWED: &[libc::c_long] = calls! {
    SYS_accept SYS_accept4 SYS_bind SYS_brk SYS_capget SYS_capset SYS_chdir SYS_chroot
    SYS_clock_getres SYS_clock_gettime SYS_clock_nanosleep SYS_clone SYS_clone3 SYS_close
    SYS_connect SYS_copy_file_range SYS_dup SYS_dup3 SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait
    SYS_eventfd2 SYS_execve SYS_execveat SYS_exit SYS_exit_group SYS_faccessat SYS_fadvise64
    SYS_fallocate SYS_fanotify_mark SYS_fchdir SYS_fchmod SYS_fchmodat SYS_fchown SYS_fchownat
    SYS_fcntl SYS_fdatasync SYS_fgetxattr SYS_flistxattr SYS_flock SYS_fremovexattr SYS_fsetxattr
    SYS_fstat SYS_fstatfs SYS_fsync SYS_ftruncate SYS_futex SYS_get_robust_list SYS_getcpu
    SYS_getcwd SYS_getdents64 SYS_getegid SYS_geteuid SYS_getgid SYS_getgroups SYS_getitimer
    SYS_getpeername SYS_getpgid SYS_getpid SYS_getppid SYS_getpriority SYS_getrandom SYS_getresgid
    SYS_getresuid SYS_getrlimit SYS_getrusage SYS_getsid SYS_getsockname SYS_getsockopt SYS_gettid
    SYS_gettimeofday SYS_getuid SYS_getxattr SYS_inotify_add_watch SYS_inotify_init1
    SYS_inotify_rm_watch SYS_io_cancel SYS_io_destroy SYS_io_getevents SYS_io_setup SYS_io_submit
    SYS_ioctl SYS_ioprio_get SYS_ioprio_set SYS_kill SYS_lgetxattr SYS_linkat SYS_listen
    SYS_listxattr SYS_llistxattr SYS_lremovexattr SYS_lseek SYS_lsetxattr SYS_madvise
    SYS_memfd_create SYS_mincore SYS_mkdirat SYS_mknodat SYS_mlock SYS_mlock2 SYS_mlockall SYS_mmap
    SYS_mprotect SYS_mq_getsetattr SYS_mq_notify SYS_mq_open SYS_mq_timedreceive SYS_mq_timedsend
    SYS_mq_unlink SYS_mremap SYS_msgctl SYS_msgget SYS_msgrcv SYS_msgsnd SYS_msync SYS_munlock
    SYS_munlockall SYS_munmap SYS_nanosleep SYS_newfstatat SYS_openat SYS_openat2 SYS_personality
    SYS_pipe2 SYS_ppoll SYS_prctl SYS_pread64 SYS_preadv SYS_prlimit64 SYS_pselect6 SYS_pwrite64
    SYS_pwritev SYS_read SYS_readahead SYS_readlinkat SYS_readv SYS_recvfrom SYS_recvmmsg
    SYS_recvmsg SYS_remap_file_pages SYS_removexattr SYS_renameat SYS_renameat2 SYS_restart_syscall
    SYS_rt_sigaction SYS_rt_sigpending SYS_rt_sigprocmask SYS_rt_sigqueueinfo SYS_rt_sigreturn
    SYS_rt_sigsuspend SYS_rt_sigtimedwait SYS_rt_tgsigqueueinfo SYS_sched_get_priority_max
    SYS_sched_get_priority_min SYS_sched_getaffinity SYS_sched_getattr SYS_sched_getparam
    SYS_sched_getscheduler SYS_sched_rr_get_interval SYS_sched_setaffinity SYS_sched_setattr
    SYS_sched_setparam SYS_sched_setscheduler SYS_sched_yield SYS_seccomp SYS_semctl SYS_semget
    SYS_semop SYS_semtimedop SYS_sendfile SYS_sendmmsg SYS_sendmsg SYS_sendto SYS_set_robust_list
    SYS_set_tid_address SYS_setfsgid SYS_setfsuid SYS_setgid SYS_setgroups SYS_setitimer SYS_setpgid
    SYS_setpriority SYS_setregid SYS_setresgid SYS_setresuid SYS_setreuid SYS_setrlimit SYS_setsid
    SYS_setsockopt SYS_setuid SYS_setxattr SYS_shmat SYS_shmctl SYS_shmdt SYS_shmget SYS_shutdown
    SYS_sigaltstack SYS_signalfd4 SYS_socket SYS_socketpair SYS_splice SYS_statfs SYS_statx
    SYS_symlinkat SYS_sync SYS_sync_file_range SYS_syncfs SYS_sysinfo SYS_syslog SYS_tee SYS_tgkill
    SYS_timer_create SYS_timer_delete SYS_timer_getoverrun SYS_timer_gettime SYS_timer_settime
    SYS_timerfd_create SYS_timerfd_gettime SYS_timerfd_settime SYS_times SYS_tkill SYS_truncate
    SYS_umask SYS_uname SYS_unlinkat SYS_utimensat SYS_vmsplice SYS_wait4 SYS_waitid SYS_write
    SYS_writev
};

/// Calls of the list that only x86-64 has.
#[cfg(target_arch = "x86_64")]
const ALLOWED_OLDER: &[libc::c_long] = calls! {
    SYS_access SYS_alarm SYS_arch_prctl SYS_chmod SYS_chown SYS_creat SYS_dup2 SYS_epoll_create
    SYS_epoll_ctl_old SYS_epoll_wait SYS_epoll_wait_old SYS_eventfd SYS_fork SYS_futimesat
    SYS_get_thread_area SYS_getdents SYS_getpgrp SYS_inotify_init SYS_lchown SYS_link SYS_lstat
    SYS_mkdir SYS_mknod SYS_modify_ldt SYS_open SYS_pause SYS_pipe SYS_poll SYS_readlink SYS_rename
    SYS_rmdir SYS_select SYS_set_thread_area SYS_signalfd SYS_stat SYS_symlink SYS_time SYS_unlink
    SYS_utime SYS_utimes SYS_vfork
};
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_OLDER: &[libc::c_long] = &[];

/// Confines the process that `command` starts.
pub fn confine(command: &mut Command) {
    let filter = filter();
    // SAFETY: between fork and exec only plain system calls are made, and no memory is allocated.
    unsafe {
        command.pre_exec(move || enter(&filter));
    }
}

/// Changes to the user, without capabilities or a way to gain any, and installs the filter.
fn enter(filter: &[libc::sock_filter]) -> io::Result<()> {
    setgroups(&[])?;
    let (group, user) = (Gid::from_raw(USER), Uid::from_raw(USER));
    setresgid(group, group, group)?;
    // Changing from root to another user drops all capabilities (capabilities(7)).
    setresuid(user, user, user)?;
    nix::sys::prctl::set_no_new_privs()?;
    let program = libc::sock_fprog {
        len: u16::try_from(filter.len()).map_err(|_| io::ErrorKind::InvalidInput)?,
        filter: filter.as_ptr().cast_mut(),
    };
    // SAFETY: the kernel copies the program, which lives until then.
    let result = unsafe {
        libc::prctl(
            libc::PR_SET_SECCOMP,
            libc::SECCOMP_MODE_FILTER,
            &raw const program,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Builds the seccomp filter (seccomp(2)): checks the architecture, then the number of the call.
fn filter() -> Vec<libc::sock_filter> {
    const ARCHITECTURE: u32 = 0xc000_003e;
    /// Loads a word of `struct seccomp_data`.
    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    let step = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let mut steps = vec![
        // Offsets in `struct seccomp_data`: 0 is the number of the call, 4 the architecture.
        step(LOAD, 0, 0, 4),
        step(EQUAL, 1, 0, ARCHITECTURE),
        step(RETURN, 0, 0, libc::SECCOMP_RET_KILL_PROCESS),
        step(LOAD, 0, 0, 0),
    ];
    let mut rule = |call: libc::c_long, action: u32| {
        steps.push(step(EQUAL, 0, 1, call as u32));
        steps.push(step(RETURN, 0, 0, action));
    };
    rule(libc::SYS_bpf, libc::SECCOMP_RET_KILL_PROCESS);
    for &call in ALLOWED.iter().chain(ALLOWED_OLDER) {
        rule(call, libc::SECCOMP_RET_ALLOW);
    }
    steps.push(step(
        RETURN,
        0,
        0,
        libc::SECCOMP_RET_ERRNO | libc::EPERM as u32,
    ));
    steps
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    #[test]
    fn bpf_call_kills_process() {
        if !crate::requirements::namespaces() {
            return;
        }
        let run = |program: &str| {
            let mut command = Command::new("python3");
            confine(command.args(["-c", program]));
            command.status().unwrap()
        };
        assert!(run("import os; os.getpid()").success());
        let calls = |number: libc::c_long| {
            format!(
                "import ctypes, sys; sys.exit(ctypes.CDLL(None).syscall({number}, 1, 0, 0) != -1)"
            )
        };
        assert_eq!(run(&calls(libc::SYS_bpf)).signal(), Some(libc::SIGSYS));
        assert!(run(&calls(libc::SYS_membarrier)).success(), "refused");
    }
}
