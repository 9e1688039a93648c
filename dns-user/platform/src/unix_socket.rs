//! Unix sockets in folders that others may write to.
//!
//! Nothing is changed by its path: the folder is opened once, and the socket has its mode and group
//! from its first moment. Clients can connect once it is owned, and listened on.

use std::{
    ffi::OsStr,
    fs::File,
    io,
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::net::{SocketAddr, UnixListener},
    },
    path::Path,
};

use nix::{
    errno::Errno,
    fcntl::{AT_FDCWD, AtFlags, OFlag, openat, renameat},
    sys::{
        socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind as bind_to, listen, socket},
        stat::{FileStat, Mode, SFlag, fchmod, fstat, fstatat, mkdirat},
    },
    unistd::{Gid, Uid, UnlinkatFlags, fchownat, setfsgid, unlinkat},
};

/// Who may connect.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// Owner of the socket; `None`: this process's user.
    pub user: Option<Uid>,
    /// Group of the socket, whose members may connect; `None`: the owner alone.
    pub group: Option<Gid>,
}

/// Listens at `path`, in place of a socket that is there. Its folder is made if it is missing, for this
/// process alone to write to; one that users other than root, this one and those of `trusted` may write
/// to is refused.
///
/// To be called before the process has a second thread.
pub fn bind(path: &Path, access: Access, trusted: &[Uid]) -> io::Result<UnixListener> {
    let Access { user, group } = access;
    let (folder, name) = match (path.parent(), path.file_name()) {
        (Some(folder), Some(name)) => {
            (if folder.as_os_str().is_empty() { Path::new(".") } else { folder }, name)
        }
        _ => return Err(io::Error::new(io::ErrorKind::InvalidInput, "is no path of a socket")),
    };
    make_folders(folder)?;
    let folder = open_folder(folder, trusted)?;
    match fstatat(&folder, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(found) if kind(&found) != SFlag::S_IFSOCK => {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "is something else than a socket; remove it, or name another path",
            ));
        }
        Ok(_) | Err(Errno::ENOENT) => {}
        Err(error) => return Err(error.into()),
    }
    let mut part = name.to_owned();
    part.push(format!(".{}", std::process::id()));
    match unlinkat(&folder, &*part, UnlinkatFlags::NoRemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => {}
        Err(error) => return Err(error.into()),
    }
    let put = || -> io::Result<OwnedFd> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let listener = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        // Binding takes the mode of the socket for the file's (unix(7) does not say so; since Linux 2.6).
        fchmod(&listener, Mode::from_bits_truncate(if group.is_some() { 0o660 } else { 0o600 }))?;
        bind_in(&folder, &part, &listener, group)?;
        let bound =
            openat(&folder, &*part, OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty())?;
        let found = fstat(&bound)?;
        if kind(&found) != SFlag::S_IFSOCK || found.st_nlink != 1 {
            return Err(io::Error::other("was replaced by something else at once"));
        }
        // The group of the file system's id is root's privilege; membership allows a change as well.
        if let Some(group) = group.filter(|group| group.as_raw() != found.st_gid) {
            fchownat(&bound, "", None, Some(group), AtFlags::AT_EMPTY_PATH)?;
        }
        if let Some(user) = user.filter(|user| user.as_raw() != found.st_uid) {
            fchownat(&bound, "", Some(user), None, AtFlags::AT_EMPTY_PATH)?;
        }
        listen(&listener, Backlog::MAXCONN)?;
        renameat(&folder, &*part, &folder, name)?;
        Ok(listener)
    };
    let listener = put().inspect_err(|_| {
        // Nothing of ours stays; the first problem is the one that matters.
        let _ = unlinkat(&folder, &*part, UnlinkatFlags::NoRemoveDir);
    })?;
    Ok(UnixListener::from(listener))
}

/// Binds in an open folder: the socket's file has `group` from its first moment.
fn bind_in(folder: &OwnedFd, name: &OsStr, listener: &OwnedFd, group: Option<Gid>) -> io::Result<()> {
    let mut path = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string());
    path.push(name);
    // Checks the length, too.
    SocketAddr::from_pathname(&path)?;
    let address = UnixAddr::new(&path)?;
    let before = group.map(setfsgid);
    let umask = nix::sys::stat::umask(Mode::empty());
    let bound = bind_to(listener.as_raw_fd(), &address);
    nix::sys::stat::umask(umask);
    before.map(setfsgid);
    Ok(bound?)
}

/// Makes a folder and those above it that are missing, whatever the umask allows.
fn make_folders(folder: &Path) -> io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    if let Some(above) = folder.parent().filter(|above| !above.as_os_str().is_empty()) {
        make_folders(above)?;
    }
    match mkdirat(AT_FDCWD, folder, Mode::from_bits_truncate(0o755)) {
        Ok(()) | Err(Errno::EEXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Opens a folder, unless strangers may write to it.
fn open_folder(folder: &Path, trusted: &[Uid]) -> io::Result<OwnedFd> {
    let opened = File::open(folder)?;
    let found = fstat(opened.as_fd())?;
    if kind(&found) != SFlag::S_IFDIR {
        return Err(io::Error::new(io::ErrorKind::NotADirectory, "its folder is none"));
    }
    let owner = Uid::from_raw(found.st_uid);
    let is_ours = owner.is_root() || owner == Uid::effective() || trusted.contains(&owner);
    let is_open = found.st_mode & 0o022 != 0 && found.st_mode & 0o1000 == 0;
    // What an unprivileged process does by mistake costs nobody else anything.
    if Uid::effective().is_root() && (!is_ours || is_open) {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!(
                "{} may be written to by other users than root (owner {owner}, mode {:o}); use a folder that only \
                 root may write to",
                folder.display(),
                found.st_mode & 0o7777
            ),
        ));
    }
    Ok(opened.into())
}

fn kind(found: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(found.st_mode) & SFlag::S_IFMT
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::{
            fs::{MetadataExt as _, PermissionsExt as _, symlink},
            net::UnixStream,
        },
    };

    use super::*;

    const ALONE: Access = Access { user: None, group: None };

    #[test]
    fn a_socket_replaces_one_left_behind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/deep/x.sock");
        drop(bind(&path, ALONE, &[]).unwrap());
        let _second = bind(&path, ALONE, &[]).unwrap();
        UnixStream::connect(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().permissions().mode() & 0o022, 0);
    }

    #[test]
    fn other_files_are_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.sock");
        fs::write(&path, "precious").unwrap();
        let error = bind(&path, ALONE, &[]).unwrap_err();
        assert!(error.to_string().contains("something else than a socket"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn root_uses_no_folder_of_strangers() {
        if !Uid::effective().is_root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let precious = folder.path().join("precious");
        fs::write(&precious, "root's").unwrap();
        let theirs = folder.path().join("theirs");
        fs::create_dir(&theirs).unwrap();
        std::os::unix::fs::chown(&theirs, Some(65534), Some(65534)).unwrap();
        // Where the socket is made first, whatever this process's number is.
        symlink(&precious, theirs.join(format!("x.sock.{}", std::process::id()))).unwrap();
        let access = Access { user: None, group: Some(Gid::from_raw(65534)) };
        let error = bind(&theirs.join("x.sock"), access, &[]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
        // Trusted, its owner still gains nothing.
        bind(&theirs.join("x.sock"), access, &[Uid::from_raw(65534)]).unwrap();
        let found = fs::metadata(&precious).unwrap();
        assert_eq!((found.uid(), found.gid(), found.mode() & 0o7777), (0, 0, 0o644));
        let socket = fs::metadata(theirs.join("x.sock")).unwrap();
        assert_eq!((socket.uid(), socket.gid(), socket.mode() & 0o7777), (0, 65534, 0o660));
    }
}
