//! Suspends one thread of a running process while the others continue, to simulate a hang.

use std::{fs, io, marker::PhantomData};

use anyhow::{Context, Result};

/// A suspended thread; dropping the value on the same thread resumes it.
#[derive(Debug)]
pub struct HeldThread {
    id: libc::pid_t,
    /// Only the thread that stopped it may resume it (ptrace(2)).
    not_send: PhantomData<*const ()>,
}

impl HeldThread {
    /// Suspends the thread with this name.
    pub fn of(process: u32, name: &str) -> Result<Self> {
        let threads = fs::read_dir(format!("/proc/{process}/task"))?;
        let mut ids = threads.flatten().filter_map(|thread| {
            let comm = fs::read_to_string(thread.path().join("comm")).ok()?;
            (comm.trim() == name).then(|| thread.file_name().to_string_lossy().parse().ok())?
        });
        let id = ids
            .next()
            .with_context(|| format!("process {process} has no thread {name}"))?;
        ptrace(libc::PTRACE_SEIZE, id).context("PTRACE_SEIZE")?;
        let held = Self {
            id,
            not_send: PhantomData,
        };
        ptrace(libc::PTRACE_INTERRUPT, id).context("PTRACE_INTERRUPT")?;
        let mut status = 0;
        // SAFETY: a plain system call; the status outlives it.
        if unsafe { libc::waitpid(id, &raw mut status, libc::__WALL) } != id {
            return Err(io::Error::last_os_error()).context("waiting for the thread to stop");
        }
        Ok(held)
    }
}

impl Drop for HeldThread {
    fn drop(&mut self) {
        if let Err(error) = ptrace(libc::PTRACE_DETACH, self.id) {
            eprintln!("cannot let a thread go on: {error}");
        }
    }
}

fn ptrace(request: libc::c_uint, id: libc::pid_t) -> io::Result<()> {
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: none of the requests used here takes an address or data.
    match unsafe { libc::ptrace(request, id, none, none) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
