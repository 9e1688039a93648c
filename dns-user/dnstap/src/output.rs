//! Whether the output can be opened, and what an operator can do if not.

use std::{
    fs::File, io, net::TcpStream, os::unix::net::UnixStream, path::Path, thread, time::Duration,
};

use dns_core::config::DnstapOutput;
use dns_kit::accounts::groups_of;
use nix::unistd::{AccessFlags, User, access};

/// Time limit of connecting to a TCP address.
const MAX_CONNECT_TIME: Duration = Duration::from_secs(2);

/// Returns why a server of this user could not write to the output, with the remedy; `None` if it could. Creates no
/// file. Without a user, or unless root asks, the caller's permissions count.
pub fn problem(output: &DnstapOutput, user: Option<&User>) -> Option<String> {
    let user = user.filter(|_| nix::unistd::geteuid().is_root());
    // A thread of its own, whose identity ends with it: there is no way back from another user's.
    let tried = thread::scope(|scope| {
        let trying = scope.spawn(|| try_as(user, output));
        trying.join().unwrap_or(Ok(()))
    });
    Some(explain(output, &tried.err()?))
}

/// Tries to open the output as a user; the calling thread keeps that identity.
fn try_as(user: Option<&User>, output: &DnstapOutput) -> io::Result<()> {
    if let Some(user) = user {
        change_thread_to(user)?;
    }
    try_to_open(output)
}

/// Gives the calling thread, and no other one, the permissions of a user.
fn change_thread_to(user: &User) -> io::Result<()> {
    // Sockets of readers are mostly open to a group, so the user's supplementary groups count.
    let groups = groups_of(user)?;
    let uid = user.uid.as_raw();
    let gid = user.gid.as_raw();
    // SAFETY: `groups` has `groups.len()` elements of gid_t, which `Gid` is transparent over. The C library's functions
    // would change the whole process; the system calls change the thread.
    let failed = unsafe {
        libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) != 0
            || libc::syscall(libc::SYS_setresgid, gid, gid, gid) != 0
            || libc::syscall(libc::SYS_setresuid, uid, uid, uid) != 0
    };
    if failed {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn try_to_open(output: &DnstapOutput) -> io::Result<()> {
    match output {
        DnstapOutput::Socket(path) => UnixStream::connect(path).map(drop),
        DnstapOutput::Tcp(address) => {
            TcpStream::connect_timeout(address, MAX_CONNECT_TIME).map(drop)
        }
        DnstapOutput::File(path) => {
            // The former file is renamed, and a new one created.
            let folder = path.parent().unwrap_or(Path::new("/"));
            access(folder, AccessFlags::W_OK | AccessFlags::X_OK)?;
            if path.exists() {
                File::options().append(true).open(path)?;
            }
            Ok(())
        }
    }
}

/// Describes why the output cannot be opened or written, with the remedy.
pub(crate) fn explain(output: &DnstapOutput, error: &io::Error) -> String {
    let is_denied = matches!(
        error.kind(),
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem
    );
    let remedy = match output {
        DnstapOutput::Socket(_) if is_denied => {
            "the server's user may not write to the socket: start the reader with `umask 007` in a folder with the \
             server's group and the setgid bit, such as the package's /run/bosh-dns-xdp-dnstap"
        }
        DnstapOutput::File(_) if is_denied => {
            "the server may not write to the folder: the package's unit writes below /var/log/bosh-dns-xdp"
        }
        DnstapOutput::Socket(_) | DnstapOutput::Tcp(_) => "does the reader run?",
        DnstapOutput::File(_) => "does the folder exist, with free space?",
    };
    format!("{output}: {error}; {remedy}")
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, Permissions},
        os::unix::{fs::PermissionsExt as _, net::UnixListener},
    };

    use super::*;

    #[test]
    fn permissions_of_the_servers_user_count() {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
        let path = |name: &str| folder.path().join(name);
        let nobody = User::from_name("nobody").unwrap().unwrap();
        let socket = DnstapOutput::Socket(path("dnstap.sock"));
        assert!(
            problem(&socket, Some(&nobody))
                .unwrap()
                .contains("does the reader run?")
        );
        let _reader = UnixListener::bind(path("dnstap.sock")).unwrap();
        assert_eq!(problem(&socket, None), None);
        let file = DnstapOutput::File(path("queries.tap"));
        assert_eq!(problem(&file, None), None);
        assert!(!path("queries.tap").exists());
        if !test_support::requirements::root() {
            return;
        }
        // As `fstrm_capture` of root creates it.
        fs::set_permissions(path("dnstap.sock"), Permissions::from_mode(0o755)).unwrap();
        assert!(
            problem(&socket, Some(&nobody))
                .unwrap()
                .contains("umask 007")
        );
        fs::set_permissions(path("dnstap.sock"), Permissions::from_mode(0o777)).unwrap();
        assert_eq!(problem(&socket, Some(&nobody)), None);
        assert!(
            problem(&file, Some(&nobody))
                .unwrap()
                .contains("/var/log/bosh-dns-xdp")
        );
        // Only the thread changed.
        assert!(nix::unistd::geteuid().is_root());
    }
}
