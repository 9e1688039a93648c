//! A folder of pins, opened once. Operations in it never follow a symbolic link that the folder's
//! owner may have placed there.

use std::{
    fs, io,
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat, openat2, renameat},
    sys::stat::{Mode, SFlag, fstat, mkdirat},
    unistd::{Uid, UnlinkatFlags, unlinkat},
};

use crate::bpf;

/// An open folder below `xdp.bpffs`.
#[derive(Debug)]
pub(super) struct Folder {
    opened: OwnedFd,
    path: PathBuf,
}

impl Folder {
    /// Opens a folder (`openat2`, kernel 5.6); fails if any part of its path is a symbolic link.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let how = OpenHow::new()
            .flags(OFlag::O_DIRECTORY | OFlag::O_RDONLY | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_MAGICLINKS);
        let opened = match openat2(AT_FDCWD, path, how) {
            // Blocked by systemd's RestrictSUIDSGID=, because a seccomp filter cannot see its
            // flags.
            Err(Errno::ENOSYS | Errno::EPERM) => open_step_by_step(path),
            other => other,
        };
        let opened = opened.map_err(|error| match error {
            Errno::ELOOP | Errno::ENOTDIR => {
                in_file(path, io::Error::other("contains a symbolic link; remove it"))
            }
            error => in_file(path, error.into()),
        })?;
        Ok(Self { opened, path: path.to_path_buf() })
    }

    /// Opens a folder, creating it and missing parents.
    pub(super) fn make(path: &Path) -> io::Result<Self> {
        match Self::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => return other,
        }
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(in_file(path, io::ErrorKind::InvalidInput.into()));
        };
        let above = Self::make(above)?;
        match mkdirat(&above.opened, name, Mode::from_bits_truncate(0o755)) {
            Ok(()) | Err(Errno::EEXIST) => Self::open(path),
            Err(error) => Err(in_file(path, error.into())),
        }
    }

    /// Returns the names of the entries that are valid UTF-8.
    pub(super) fn names(&self) -> io::Result<Vec<String>> {
        let entries = fs::read_dir(self.place(""))?;
        Ok(entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect())
    }

    pub(super) fn pin(&self, name: &str, object: BorrowedFd<'_>) -> io::Result<()> {
        bpf::pin(object, &self.place(name)).map_err(|error| in_file(&self.path.join(name), error))
    }

    /// Opens an object pinned by root, by this process's user or by `attacher`.
    pub(super) fn get(&self, name: &str, attacher: Option<Uid>) -> io::Result<OwnedFd> {
        let path = self.path.join(name);
        let handle = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let pin = openat(&self.opened, name, handle, Mode::empty())?;
        let found = fstat(&pin)?;
        let owner = Uid::from_raw(found.st_uid);
        let is_file = SFlag::from_bits_truncate(found.st_mode) & SFlag::S_IFMT == SFlag::S_IFREG;
        let is_trusted = owner.is_root() || owner == Uid::effective() || Some(owner) == attacher;
        if !is_file || !is_trusted {
            return Err(in_file(
                &path,
                io::Error::other(format!("is not a pin of this program (owner {owner})")),
            ));
        }
        bpf::open_pin(&by_descriptor(pin.as_fd(), "")).map_err(|error| in_file(&path, error))
    }

    /// Unpins an object, if it is pinned.
    pub(super) fn remove(&self, name: &str) -> io::Result<()> {
        match unlinkat(&self.opened, name, UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => Ok(()),
            Err(error) => Err(in_file(&self.path.join(name), error.into())),
        }
    }

    /// Removes an empty folder; returns whether it is gone.
    pub(super) fn remove_folder(&self, name: &str) -> bool {
        matches!(unlinkat(&self.opened, name, UnlinkatFlags::RemoveDir), Ok(()) | Err(Errno::ENOENT))
    }

    /// Replaces the pin `to` by the pin `from`, atomically.
    pub(super) fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        renameat(&self.opened, from, &self.opened, to)
            .map_err(|error| in_file(&self.path.join(from), error.into()))
    }

    /// Returns a path of an entry in the opened folder, which stays valid if the folder is moved.
    fn place(&self, name: &str) -> PathBuf {
        by_descriptor(self.opened.as_fd(), name)
    }
}

/// Opens a folder one path component at a time, following no symbolic link.
fn open_step_by_step(path: &Path) -> nix::Result<OwnedFd> {
    let step = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let mut parts = path.components();
    let first = parts.next().ok_or(Errno::ENOENT)?;
    let mut opened = openat(AT_FDCWD, first.as_os_str(), step, Mode::empty())?;
    for part in parts {
        opened = openat(&opened, part.as_os_str(), step, Mode::empty())?;
    }
    // The handle cannot be read; open the folder again for reading.
    openat(&opened, ".", OFlag::O_DIRECTORY | OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())
}

/// Returns a path of an opened folder, or of `name` in it.
fn by_descriptor(opened: BorrowedFd<'_>, name: &str) -> PathBuf {
    let path = Path::new("/proc/self/fd").join(opened.as_raw_fd().to_string());
    if name.is_empty() { path } else { path.join(name) }
}

/// Adds the file's path to an error.
pub(super) fn in_file(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn symbolic_links_are_not_followed() {
        let base = tempfile::tempdir().unwrap();
        let real = base.path().canonicalize().unwrap();
        fs::create_dir(real.join("elsewhere")).unwrap();
        fs::write(real.join("elsewhere/NAMES"), "").unwrap();
        symlink(real.join("elsewhere"), real.join("links")).unwrap();
        open_step_by_step(&real.join("elsewhere")).unwrap();
        for path in ["links", "links/deeper"] {
            assert!(open_step_by_step(&real.join(path)).is_err(), "{path}");
            assert!(Folder::open(&real.join(path)).is_err(), "{path}");
            assert!(Folder::make(&real.join(path)).is_err(), "{path}");
        }
        let folder = Folder::make(&real.join("a/b")).unwrap();
        symlink(real.join("elsewhere/NAMES"), real.join("a/b/NAMES")).unwrap();
        let error = folder.get("NAMES", None).unwrap_err();
        assert!(error.to_string().contains("not a pin of this program"), "{error}");
        // Removes the link, not its target.
        folder.remove("NAMES").unwrap();
        folder.remove("NAMES").unwrap();
        assert!(real.join("elsewhere/NAMES").exists());
        assert_eq!(folder.names().unwrap(), Vec::<String>::new());
    }
}
