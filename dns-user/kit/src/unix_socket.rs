//! Unix sockets for local clients: created safely in folders that other users may write to, and control
//! sockets, whose peers the kernel identifies (`SO_PEERCRED`, unix(7)).
//!
//! Attributes are never changed by path: the folder and the new socket are opened once, and only the
//! owner has access until the group is set. Clients can connect once the socket listens.

use std::{
    ffi::OsStr,
    fs::{self, DirBuilder, File, Permissions},
    io,
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::{
            fs::{DirBuilderExt as _, PermissionsExt as _},
            net::{SocketAddr, UnixListener},
        },
    },
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{AtFlags, OFlag, openat},
    sys::{
        socket::{
            AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind as bind_to, listen, socket,
        },
        stat::{FileStat, Mode, SFlag, fchmod, fstat, fstatat},
    },
    unistd::{Gid, Uid, User, fchownat, setfsgid},
};
use tokio::net::UnixStream;

use crate::{accounts::groups_of, files::atomic, logs::LineLimit};

/// Ownership of a socket, which determines the permitted clients.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// Owner of the socket; `None` for the process's user.
    pub user: Option<Uid>,
    /// Group whose members may connect; `None` for the owner only.
    pub group: Option<Gid>,
}

/// Listens at `path`, replacing an existing socket. A missing folder is created, writable only by this
/// process's user. A folder that users other than root, this one and `trusted` can write to is rejected.
pub fn bind(path: &Path, access: Access, trusted: &[Uid]) -> io::Result<UnixListener> {
    let (folder, name) = atomic::parts(path)
        .map_err(|error| io::Error::new(error.kind(), "is not a valid socket path"))?;
    DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(folder)?;
    let folder = open_folder(folder, trusted)?;
    match fstatat(&folder, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(found) if kind(&found) != SFlag::S_IFSOCK => {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "is not a socket; remove it, or choose another path",
            ));
        }
        Ok(_) | Err(Errno::ENOENT) => {}
        Err(error) => return Err(error.into()),
    }
    // A kill between two steps of `put` leaves a socket behind.
    atomic::sweep(&place(&folder).join(name));
    Ok(UnixListener::from(put(&folder, name, access)?))
}

/// Listens at a hidden name in a folder, with the rights of `access`, and renames it to `name`.
fn put(folder: &OwnedFd, name: &OsStr, access: Access) -> io::Result<OwnedFd> {
    let Access { user, group } = access;
    let flags = SockFlag::SOCK_CLOEXEC;
    let listener = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    // bind(2) derives the file's mode from the socket's (undocumented in unix(7); since Linux 2.6).
    fchmod(&listener, Mode::S_IRUSR | Mode::S_IWUSR)?;
    // Removed on every error below.
    let hidden = tempfile::Builder::new()
        .prefix(&atomic::prefix(name))
        .rand_bytes(atomic::RANDOM_LETTERS)
        .make_in(place(folder), |path| bind_at(path, &listener, group))?;
    let bound = openat(
        folder,
        hidden.path(),
        OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC,
        Mode::empty(),
    )?;
    let found = fstat(&bound)?;
    if kind(&found) != SFlag::S_IFSOCK || found.st_nlink != 1 {
        return Err(io::Error::other("was replaced by another file immediately"));
    }
    // Setting the group by the file system id needs root; group membership suffices for
    // changing it afterwards.
    if let Some(group) = group.filter(|group| group.as_raw() != found.st_gid) {
        fchownat(&bound, "", None, Some(group), AtFlags::AT_EMPTY_PATH)?;
    }
    if group.is_some() {
        // bind(2) applies the umask, which threads share: it is not changed for this. Only the new owner
        // could change the mode later.
        fs::set_permissions(place(&bound), Permissions::from_mode(0o660))?;
    }
    if let Some(user) = user.filter(|user| user.as_raw() != found.st_uid) {
        fchownat(&bound, "", Some(user), None, AtFlags::AT_EMPTY_PATH)?;
    }
    listen(&listener, Backlog::MAXCONN)?;
    hidden.persist(place(folder).join(name))?;
    Ok(listener)
}

/// Binds at a path; the socket file is created with `group`.
fn bind_at(path: &Path, listener: &OwnedFd, group: Option<Gid>) -> io::Result<()> {
    // Also checks the length.
    SocketAddr::from_pathname(path)?;
    let address = UnixAddr::new(path)?;
    let before = group.map(setfsgid);
    let bound = bind_to(listener.as_raw_fd(), &address);
    before.map(setfsgid);
    Ok(bound?)
}

/// Returns the path of an open file or folder, whatever its name means now.
fn place(opened: &OwnedFd) -> PathBuf {
    Path::new("/proc/self/fd").join(opened.as_raw_fd().to_string())
}

/// Opens a folder, unless untrusted users can write to it.
fn open_folder(folder: &Path, trusted: &[Uid]) -> io::Result<OwnedFd> {
    let opened = File::open(folder)?;
    let found = fstat(opened.as_fd())?;
    if kind(&found) != SFlag::S_IFDIR {
        return Err(io::Error::new(
            io::ErrorKind::NotADirectory,
            "its parent is not a folder",
        ));
    }
    let owner = Uid::from_raw(found.st_uid);
    let is_ours = owner.is_root() || trusted.contains(&owner);
    let is_open = found.st_mode & 0o022 != 0 && found.st_mode & 0o1000 == 0;
    // Without root, a mistake harms only the user itself.
    if Uid::effective().is_root() && (!is_ours || is_open) {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!(
                "{} is writable by users other than root (owner {owner}, mode {:o}); use a folder that only \
                 root can write to",
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

//----------- ControlSocket --------------------------------------------------

/// A bound control socket, for root, the process's user, and the users that its [`Access`] admits.
#[derive(Debug)]
pub struct ControlSocket {
    listener: UnixListener,
    access: Access,
}

impl ControlSocket {
    /// Binds a control socket as [`bind`] does.
    pub fn bind(path: &Path, access: Access, trusted: &[Uid]) -> io::Result<Self> {
        let listener = bind(path, access, trusted)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, access })
    }

    /// Starts listening. Must be called inside a tokio runtime.
    pub fn listen(self) -> io::Result<ControlListener> {
        let Self { listener, access } = self;
        Ok(ControlListener {
            listener: tokio::net::UnixListener::from_std(listener)?,
            access,
        })
    }
}

/// Yields the connections of permitted users.
#[derive(Debug)]
pub struct ControlListener {
    listener: tokio::net::UnixListener,
    access: Access,
}

impl ControlListener {
    /// Accepts the next connection of a permitted user.
    pub async fn accept(&self) -> io::Result<(UnixStream, Uid)> {
        loop {
            let (stream, _) = self.listener.accept().await?;
            let refused = match stream.peer_cred() {
                Ok(peer) => {
                    let user = Uid::from_raw(peer.uid());
                    let group = Gid::from_raw(peer.gid());
                    if self.access.admits(user, group) {
                        return Ok((stream, user));
                    }
                    format!("user {user} is neither the socket's user nor in its group")
                }
                Err(error) => format!("cannot read its user id (SO_PEERCRED): {error}"),
            };
            static LIMIT: LineLimit = LineLimit::new();
            if let Some(suppressed) = LIMIT.admit_any() {
                tracing::warn!(suppressed, "control socket client refused: {refused}");
            }
        }
    }
}

impl Access {
    /// Returns whether a peer is permitted. The socket's mode should enforce the same, but some file
    /// systems ignore it, and the folder's owner can bypass it.
    fn admits(self, user: Uid, group: Gid) -> bool {
        if user.is_root() || user == Uid::effective() || Some(user) == self.user {
            return true;
        }
        let Some(wanted) = self.group else {
            return false;
        };
        // SO_PEERCRED reports only the primary group; the others are in the user database.
        wanted == group || is_in_group(user, wanted)
    }
}

/// Returns whether a user is in a group; `false` if the user is unknown.
fn is_in_group(user: Uid, group: Gid) -> bool {
    let Ok(Some(user)) = User::from_uid(user) else {
        return false;
    };
    groups_of(&user).is_ok_and(|groups| groups.contains(&group))
}

#[cfg(test)]
mod tests {
    use std::os::unix::{
        fs::{MetadataExt as _, symlink},
        net::UnixStream,
    };

    use super::*;

    const ALONE: Access = Access {
        user: None,
        group: None,
    };

    #[test]
    fn stale_socket_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/deep/x.sock");
        drop(bind(&path, ALONE, &[]).unwrap());
        // What a kill leaves behind before the socket has its name.
        let hidden = path.with_file_name(".x.sock.part-abcdef");
        drop(UnixListener::bind(&hidden).unwrap());
        let _second = bind(&path, ALONE, &[]).unwrap();
        UnixStream::connect(&path).unwrap();
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o7777,
            0o600
        );
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        assert_eq!(
            fs::metadata(path.parent().unwrap())
                .unwrap()
                .permissions()
                .mode()
                & 0o022,
            0
        );
    }

    #[test]
    fn umask_widens_no_mode() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/deep/x.sock");
        let before = nix::sys::stat::umask(Mode::empty());
        let bound = bind(&path, ALONE, &[]);
        nix::sys::stat::umask(before);
        bound.unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode(&path), 0o600);
        assert_eq!(mode(path.parent().unwrap()), 0o755);
        assert_eq!(mode(&folder.path().join("run")), 0o755);
    }

    #[test]
    fn other_files_are_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.sock");
        fs::write(&path, "precious").unwrap();
        let error = bind(&path, ALONE, &[]).unwrap_err();
        assert!(error.to_string().contains("is not a socket"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn root_rejects_untrusted_folders() {
        if !test_support::requirements::root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let precious = folder.path().join("precious");
        fs::write(&precious, "root's").unwrap();
        let theirs = folder.path().join("theirs");
        fs::create_dir(&theirs).unwrap();
        std::os::unix::fs::chown(&theirs, Some(65534), Some(65534)).unwrap();
        // It looks like a socket without its name yet.
        symlink(&precious, theirs.join(".x.sock.part-abcdef")).unwrap();
        let access = Access {
            user: None,
            group: Some(Gid::from_raw(65534)),
        };
        let error = bind(&theirs.join("x.sock"), access, &[]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
        // Even with a trusted owner, the other file stays unchanged.
        bind(&theirs.join("x.sock"), access, &[Uid::from_raw(65534)]).unwrap();
        let found = fs::metadata(&precious).unwrap();
        assert_eq!(
            (found.uid(), found.gid(), found.mode() & 0o7777),
            (0, 0, 0o644)
        );
        let socket = fs::metadata(theirs.join("x.sock")).unwrap();
        assert_eq!(
            (socket.uid(), socket.gid(), socket.mode() & 0o7777),
            (0, 65534, 0o660)
        );
    }

    #[test]
    fn root_owner_and_group_are_admitted() {
        let user = Uid::from_raw(4_000_001);
        let group = Gid::from_raw(4_000_002);
        let stranger = Uid::from_raw(4_000_003);
        let elsewhere = Gid::from_raw(4_000_004);
        let access = Access {
            user: Some(user),
            group: Some(group),
        };
        assert!(access.admits(Uid::from_raw(0), elsewhere));
        assert!(access.admits(Uid::effective(), elsewhere));
        assert!(access.admits(user, elsewhere));
        assert!(access.admits(stranger, group));
        assert!(!access.admits(stranger, elsewhere));
        assert!(
            !Access {
                user: Some(user),
                group: None
            }
            .admits(stranger, group)
        );
    }

    #[test]
    fn users_and_groups_are_admitted() {
        let (user, other) = (Uid::from_raw(60_001), Uid::from_raw(60_002));
        let (group, none) = (Gid::from_raw(60_003), Gid::from_raw(60_004));
        for (access_user, access_group, asking, of_group, expected) in [
            (None, None, Uid::from_raw(0), none, true),
            (None, None, Uid::effective(), none, true),
            (None, None, other, none, false),
            (Some(user), None, user, none, true),
            (Some(user), None, other, none, false),
            (None, Some(group), other, group, true),
            (None, Some(group), other, none, false),
            (Some(user), Some(group), other, none, false),
        ] {
            let access = Access {
                user: access_user,
                group: access_group,
            };
            assert_eq!(
                access.admits(asking, of_group),
                expected,
                "{access:?} {asking}"
            );
        }
    }

    #[test]
    fn folders_that_others_write_to_need_the_sticky_bit() {
        if !test_support::requirements::root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        for (mode, expected) in [
            (0o755, true),
            (0o775, false),
            (0o757, false),
            (0o777, false),
            (0o1777, true),
        ] {
            let permissions = std::os::unix::fs::PermissionsExt::from_mode(mode);
            fs::set_permissions(folder.path(), permissions).unwrap();
            assert_eq!(
                open_folder(folder.path(), &[]).is_ok(),
                expected,
                "{mode:o}"
            );
        }
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let error = open_folder(&file, &[]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotADirectory);
    }

    #[test]
    fn socket_belongs_to_requested_user() {
        if !test_support::requirements::root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.sock");
        for (user, group, mode) in [
            (None, None, 0o600),
            (Some(60_001), None, 0o600),
            (Some(60_001), Some(60_002), 0o660),
        ] {
            let access = Access {
                user: user.map(Uid::from_raw),
                group: group.map(Gid::from_raw),
            };
            bind(&path, access, &[]).unwrap();
            let found = fs::metadata(&path).unwrap();
            let owner = (user.unwrap_or(0), group.unwrap_or(found.gid()));
            assert_eq!((found.uid(), found.gid()), owner);
            assert_eq!(found.mode() & 0o7777, mode);
        }
        for bad in ["", "/", "x/.."] {
            let error = bind(Path::new(bad), ALONE, &[]).unwrap_err();
            assert_eq!(error.to_string(), "is not a valid socket path", "{bad}");
        }
    }

    /// Users other than root cannot create a file with another group, but can give it one of theirs.
    #[test]
    fn member_passes_socket_to_group() {
        if !test_support::requirements::root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::chown(folder.path(), Some(60_001), Some(60_001)).unwrap();
        let path = folder.path().join("x.sock");
        let binding = || {
            let groups: [libc::gid_t; 1] = [60_003];
            // SAFETY: the list has one element. The system calls change only this thread, unlike the C library's
            // functions.
            unsafe {
                assert_eq!(libc::syscall(libc::SYS_setgroups, 1, groups.as_ptr()), 0);
                assert_eq!(
                    libc::syscall(libc::SYS_setresgid, 60_001, 60_001, 60_001),
                    0
                );
                assert_eq!(
                    libc::syscall(libc::SYS_setresuid, 60_001, 60_001, 60_001),
                    0
                );
            }
            let access = Access {
                user: None,
                group: Some(Gid::from_raw(60_003)),
            };
            bind(&path, access, &[]).map(drop)
        };
        std::thread::scope(|scope| scope.spawn(binding).join().unwrap()).unwrap();
        let found = fs::metadata(&path).unwrap();
        assert_eq!(
            (found.uid(), found.gid(), found.mode() & 0o7777),
            (60_001, 60_003, 0o660)
        );
    }

    #[test]
    fn database_gives_user_groups() {
        let root = Gid::from_raw(0);
        assert!(is_in_group(Uid::from_raw(0), root));
        assert!(!is_in_group(Uid::from_raw(4_000_001), root));
    }

    /// The mode of the socket is ignored by some file systems.
    #[tokio::test]
    async fn every_mode_refuses_strangers() {
        use std::io::Read as _;

        if !test_support::requirements::root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
        let path = folder.path().join("x.sock");
        let socket = ControlSocket::bind(&path, ALONE, &[]).unwrap();
        let listener = socket.listen().unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
        let connecting = || {
            // SAFETY: takes plain numbers, and changes only this thread.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, 60_001, 60_001, 60_001) };
            assert_eq!(changed, 0);
            UnixStream::connect(&path).unwrap()
        };
        let mut stranger = std::thread::scope(|scope| scope.spawn(connecting).join().unwrap());
        let _own = UnixStream::connect(&path).unwrap();
        let (_stream, user) = listener.accept().await.unwrap();
        assert_eq!(user, Uid::effective());
        assert_eq!(stranger.read(&mut [0]).unwrap(), 0);
    }
}
