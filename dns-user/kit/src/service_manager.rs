//! Reports the server's state to systemd (`sd_notify(3)`) if its unit has `Type=notify`; with `WatchdogSec` it restarts
//! a server whose loop hangs. Keeps files that a privileged command opened for the service (`FileDescriptorStoreMax`).

use std::{
    fs::File,
    os::fd::{AsFd as _, FromRawFd as _},
};

pub use sd_notify::NotifyState;
use tracing::debug;

/// Notifies the service manager, if there is one, that the server is in this phase.
pub fn notify(state: NotifyState<'_>, phase: &str) {
    if let Err(error) = sd_notify::notify(false, &[state]) {
        debug!("cannot tell systemd (sd_notify) that the server is {phase}: {error}");
    }
}

/// Gives open files to the service manager, which hands them to the service's main process by name.
pub fn keep_files<const N: usize>(names: [&str; N], files: [Option<File>; N]) {
    for (name, file) in names.into_iter().zip(files) {
        // Those of an earlier start would otherwise fill the store.
        let mut result = sd_notify::notify(
            false,
            &[NotifyState::FdStoreRemove, NotifyState::FdName(name)],
        );
        if let Some(file) = &file {
            let state = [NotifyState::FdStore, NotifyState::FdName(name)];
            result =
                result.and_then(|()| sd_notify::notify_with_fds(false, &state, &[file.as_fd()]));
        }
        if let Err(error) = result {
            eprintln!("bosh-dns-xdp: cannot hand {name} to systemd (sd_notify): {error}");
        }
    }
}

/// Returns the files that the service manager kept under these names. Must be called once.
pub fn handed_files<const N: usize>(names: [&str; N]) -> [Option<File>; N] {
    let handed: Vec<_> = sd_notify::listen_fds_with_names(false)
        .into_iter()
        .flatten()
        .collect();
    names.map(|wanted| {
        let (number, _) = handed.iter().find(|(_, name)| name == wanted)?;
        // SAFETY: the service manager opened this descriptor for this process, and nothing else uses it.
        Some(unsafe { File::from_raw_fd(*number) })
    })
}
