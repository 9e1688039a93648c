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

#[cfg(test)]
mod tests {
    use std::{env, fs, io::Read as _, os::unix::net::UnixDatagram, process::Command};

    use super::*;
    use test_support::own_process;

    const NAME: &str = "systemd_is_told_and_keeps_files";

    /// Returns what the service manager would receive from the process of the test.
    fn received(socket: &UnixDatagram) -> Vec<String> {
        socket.set_nonblocking(true).unwrap();
        let mut messages = Vec::new();
        let mut message = [0; 512];
        while let Ok(length) = socket.recv(&mut message) {
            let text = String::from_utf8_lossy(&message[..length]);
            messages.push(text.trim_end().to_owned());
        }
        messages
    }

    fn use_service_manager() {
        notify(NotifyState::Stopping, "stopping");
        let file = File::open("/dev/null").unwrap();
        keep_files(["kept", "gone"], [Some(file), None]);
        let [second, first, other] = handed_files(["second", "first", "other"]);
        for (file, expected) in [(first, "one"), (second, "two")] {
            let mut text = String::new();
            file.unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, expected);
        }
        assert!(other.is_none());
    }

    #[test]
    fn systemd_is_told_and_keeps_files() {
        if own_process::is_here() {
            return use_service_manager();
        }
        let folder = tempfile::tempdir().unwrap();
        let socket = UnixDatagram::bind(folder.path().join("notify")).unwrap();
        fs::write(folder.path().join("first"), "one").unwrap();
        fs::write(folder.path().join("second"), "two").unwrap();
        // Descriptors are handed to one process, which has the number of the shell that it replaces.
        let script = r#"export LISTEN_PID=$$; exec 3<first 4<second; exec "$0" "$@""#;
        let mut shell = Command::new("sh");
        shell
            .args(["-c", script])
            .arg(env::current_exe().unwrap())
            .args(own_process::arguments(module_path!(), NAME))
            .env("NOTIFY_SOCKET", folder.path().join("notify"))
            .env("LISTEN_FDS", "2")
            .env("LISTEN_FDNAMES", "first:second")
            .current_dir(folder.path());
        own_process::run(own_process::mark(&mut shell));
        assert_eq!(
            received(&socket),
            [
                "STOPPING=1",
                "FDSTOREREMOVE=1\nFDNAME=kept",
                "FDSTORE=1\nFDNAME=kept",
                "FDSTOREREMOVE=1\nFDNAME=gone",
            ]
        );
    }
}
