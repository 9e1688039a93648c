//! Explains why a file cannot be read: the user, the file, and the command that permits it.

use std::{
    fs::{self, Metadata},
    io,
    os::unix::fs::MetadataExt as _,
    path::Path,
};

use nix::unistd::{getegid, geteuid};

/// Adds to EACCES the process's user, the file's owner and mode, if it could be examined, and a command.
pub(super) fn explain(error: io::Error, path: &Path, file: Option<&Metadata>) -> io::Error {
    if error.kind() != io::ErrorKind::PermissionDenied {
        return error;
    }
    let user = name_of("/etc/passwd", geteuid().as_raw());
    let path = path.display();
    let text = match file {
        Some(file) => {
            let owner = name_of("/etc/passwd", file.uid());
            let group = name_of("/etc/group", file.gid());
            let readers = name_of("/etc/group", getegid().as_raw());
            format!(
                "{error}: user {user} cannot read the file of {owner}:{group} with mode {:04o}; run `chgrp {readers} \
                 {path} && chmod g+r {path}`, and let its writer do so",
                file.mode() & 0o7777
            )
        }
        // stat(2) needs no permission on the file, so a folder above it refused.
        None => format!(
            "{error}: user {user} cannot enter a folder of the path; `namei --long {path}` shows which one"
        ),
    };
    io::Error::new(io::ErrorKind::PermissionDenied, text)
}

/// Returns the name of a user or group in its database, or the number. Other sources of names (NSS) may need the DNS
/// server that is asking.
fn name_of(database: &str, id: u32) -> String {
    let text = fs::read_to_string(database).unwrap_or_default();
    for line in text.lines() {
        let mut fields = line.split(':');
        // Name, password, number (passwd(5), group(5)).
        if let (Some(name), Some(number)) = (fields.next(), fields.nth(1))
            && number.parse() == Ok(id)
        {
            return name.to_owned();
        }
    }
    id.to_string()
}

#[cfg(test)]
mod tests {
    use std::{fs::Permissions, os::unix::fs::PermissionsExt as _};

    use crate::files::bounded;

    /// Reads as user and group 65534, which have no capabilities.
    fn read_as_nobody(path: &std::path::Path) -> String {
        let reading = || {
            const NOBODY: libc::c_long = 65534;
            // SAFETY: takes no pointers. The system call changes only this thread, unlike the C library's function.
            unsafe {
                assert_eq!(libc::syscall(libc::SYS_setgroups, 0, 0), 0);
                assert_eq!(
                    libc::syscall(libc::SYS_setresgid, NOBODY, NOBODY, NOBODY),
                    0
                );
                assert_eq!(
                    libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY),
                    0
                );
            }
            bounded::read(path).unwrap_err().to_string()
        };
        std::thread::scope(|scope| scope.spawn(reading).join().unwrap())
    }

    #[test]
    fn error_names_reader_owner_and_command() {
        if !test_support::requirements::root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("records.json");
        std::fs::write(&file, "{}").unwrap();
        std::fs::set_permissions(&file, Permissions::from_mode(0o640)).unwrap();
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o700)).unwrap();
        let said = read_as_nobody(&file);
        assert!(said.contains("user nobody cannot enter a folder"), "{said}");
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
        let said = read_as_nobody(&file);
        let path = file.display();
        let command = format!("`chgrp nogroup {path} && chmod g+r {path}`");
        assert!(
            said.contains("user nobody cannot read the file of root:root with mode 0640")
                && said.contains(&command),
            "{said}"
        );
    }
}
