//! Links and maps pinned under bpffs, which outlive the process.
//!
//! ```text
//! <bpffs>/<address>-<port>-<network namespace>/
//!     links/<ifindex>-<hook>      the attachments
//!     maps-<layout version>/      TC_ANSWER, NAMES, ENTRIES, CONTROL, SCOPE, COUNTERS and others of
//!                                 the serving process; with suffix `-new`: of its successor
//! ```
//!
//! Folders are named after the endpoint, so two servers on one machine never touch each other's
//! pins. A successor takes over links regardless of the layout of the maps behind them; it only
//! reads the maps, and only if they have its own layout.

use std::{
    fs, io,
    net::SocketAddr,
    os::{
        fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::{Path, PathBuf},
};

use dns_common::{LAYOUT_VERSION, object};
use dns_fastpath::map::ControlPage;
use nix::{
    errno::Errno,
    fcntl::{AT_FDCWD, AtFlags, OFlag, openat, renameat},
    mount::{MsFlags, mount},
    sys::{
        stat::{Mode, SFlag, fstat, mkdirat},
        statfs::{BPF_FS_MAGIC, fstatfs, statfs},
    },
    unistd::{Uid, UnlinkatFlags, fchownat, unlinkat},
};

use crate::{
    bpf::{self, LinkKind},
    object::KEPT_MAPS,
};

/// The folder of one server's pins.
#[derive(Clone, Debug)]
pub(crate) struct Pins {
    /// `<bpffs>/<address>-<port>-<network namespace>`.
    pub(crate) folder: PathBuf,
}

/// State of the folder of pins after a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FolderState {
    /// It did not exist.
    Absent,
    /// It was empty after its pins were removed.
    Removed,
    /// It holds entries that this version does not pin.
    Kept,
}

#[derive(Debug)]
pub(crate) struct PinnedLink {
    pub(crate) ifindex: u32,
    pub(crate) kind: LinkKind,
    pub(crate) fd: OwnedFd,
    pub(crate) path: PathBuf,
}

impl Pins {
    /// Returns the folder for a server at `endpoint`, created if necessary; mounts a bpffs if there is none.
    pub(crate) fn prepare(bpffs: &Path, endpoint: SocketAddr) -> io::Result<Self> {
        ensure_bpffs(bpffs)?;
        let pins = Self::at(bpffs, endpoint)?;
        for folder in [pins.links(), pins.maps()] {
            Folder::make(&folder)?;
        }
        Ok(pins)
    }

    /// Returns the folder for a server at `endpoint`, which may not exist.
    pub(crate) fn at(bpffs: &Path, endpoint: SocketAddr) -> io::Result<Self> {
        let namespace = fs::metadata("/proc/thread-self/ns/net")?.ino();
        // bpffs refuses names with dots (reserved since kernel 4.4).
        let address = endpoint.ip().to_string().replace('.', "_");
        // The administrator controls the path of xdp.bpffs; below it, no symbolic link is followed.
        let bpffs = fs::canonicalize(bpffs).unwrap_or_else(|_| bpffs.to_path_buf());
        Ok(Self {
            folder: bpffs.join(format!("{address}-{}-{namespace}", endpoint.port())),
        })
    }

    /// Returns the links pinned here by root, this process's user or `attacher`. Skips links that
    /// cannot be opened.
    pub(crate) fn pinned_links(&self, attacher: Option<Uid>) -> Vec<PinnedLink> {
        let links = match Folder::open(&self.links()) {
            Ok(links) => links,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
            Err(error) => {
                tracing::warn!(%error, "cannot list the predecessor's links: its programs are not taken over");
                return Vec::new();
            }
        };
        let names = links.names().inspect_err(
            |error| tracing::warn!(%error, "cannot list the predecessor's links: its programs are not taken over"),
        );
        let mut pinned = Vec::new();
        for name in names.unwrap_or_default() {
            // Another name is not one of ours, and must not be opened.
            let Some((ifindex, kind)) = parse_link_name(&name) else {
                continue;
            };
            match links.get(&name, attacher) {
                Ok(fd) => pinned.push(PinnedLink {
                    ifindex,
                    kind,
                    fd,
                    path: self.links().join(name),
                }),
                Err(error) => {
                    tracing::warn!(%error, "cannot open a pinned link of the predecessor: its program is not taken over");
                }
            }
        }
        pinned
    }

    pub(crate) fn pin_link(
        &self,
        link: BorrowedFd<'_>,
        ifindex: u32,
        kind: LinkKind,
    ) -> io::Result<PathBuf> {
        // `detach` removes the folder even while the server runs.
        let links = Folder::make(&self.links())?;
        let name = format!("{ifindex}-{}", kind_name(kind));
        // A leftover of a removed interface with the same index.
        links.remove(&name)?;
        links.pin(&name, link)?;
        Ok(self.links().join(name))
    }

    pub(crate) fn unpin_links(&self, ifindex: u32) {
        for kind in [LinkKind::XdpNative, LinkKind::XdpGeneric, LinkKind::Tcx] {
            let path = self.links().join(format!("{ifindex}-{}", kind_name(kind)));
            if let Err(error) = remove_if_there(&path) {
                tracing::warn!(%error, "cannot unpin the link of a removed interface");
            }
        }
    }

    /// Pins maps beside the predecessor's, whose programs need theirs until they are replaced.
    fn pin_beside(&self, maps: &[(&str, OwnedFd)]) -> io::Result<()> {
        // See `pin_link`.
        let folder = Folder::make(&self.maps())?;
        for (name, map) in maps {
            let fresh = fresh(name);
            // Called in each round of a takeover: a kill between removal and pin would take the map from programs that
            // are attached already.
            if folder.holds(&fresh, map).unwrap_or(false) {
                continue;
            }
            // Left by a server that was killed while it took over.
            folder.remove(&fresh)?;
            folder.pin(&fresh, map.as_fd())?;
        }
        Ok(())
    }

    /// Replaces each of the predecessor's pins atomically.
    fn put_in_place(&self, maps: &[(&str, OwnedFd)]) -> io::Result<()> {
        let folder = Folder::open(&self.maps())?;
        maps.iter()
            .try_for_each(|(name, _)| folder.rename(&fresh(name), name))
    }

    /// Makes the predecessor's programs stop giving forwarded answers: their successor may have
    /// other recursors, and cannot flush them.
    pub(crate) fn end_forwarded_answers(&self) {
        // The second exists if the predecessor died while it took over.
        for name in [object::CONTROL, &fresh(object::CONTROL)] {
            match self.map(name).and_then(|map| ControlPage::map(map.as_fd())) {
                Ok(control) => control.set_answer_generation(0),
                // There is no predecessor, or its maps have another layout, which this version
                // cannot write.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    tracing::warn!(%error, name, "cannot open the predecessor's settings: its programs give forwarded answers until they are replaced");
                }
            }
        }
    }

    /// Returns the predecessor's `NAMES` and `ENTRIES`.
    pub(crate) fn earlier_maps(&self) -> Option<[OwnedFd; 2]> {
        Some([
            self.earlier_map(object::NAMES)?,
            self.earlier_map(object::ENTRIES)?,
        ])
    }

    fn earlier_map(&self, name: &str) -> Option<OwnedFd> {
        match self.map(name) {
            Ok(map) => Some(map),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                tracing::warn!(%error, name, "cannot open a pinned map of the predecessor: its names are not taken over");
                None
            }
        }
    }

    /// Removes the maps' pins and all folders left empty.
    pub(crate) fn remove(&self) -> io::Result<FolderState> {
        if open_if_there(&self.folder)?.is_none() {
            return Ok(FolderState::Absent);
        }
        if let Some(maps) = open_if_there(&self.maps())? {
            // Whatever else lies there was not put there by a server.
            for name in maps.names()?.into_iter().filter(|name| is_map_name(name)) {
                maps.remove(&name)?;
            }
        }
        // Folders in use (another layout, another server) stay.
        remove_folder(&self.maps())?;
        remove_folder(&self.links())?;
        let is_gone = remove_folder(&self.folder)?;
        if let Some(shared) = self.folder.parent() {
            // Its parent may be closed to the attacher's user.
            let _ = remove_folder(shared);
        }
        Ok(if is_gone {
            FolderState::Removed
        } else {
            FolderState::Kept
        })
    }

    fn links(&self) -> PathBuf {
        self.folder.join("links")
    }

    fn maps(&self) -> PathBuf {
        self.folder.join(format!("maps-{LAYOUT_VERSION}"))
    }

    fn map(&self, name: &str) -> io::Result<OwnedFd> {
        Folder::open(&self.maps())?.get(name, None)
    }
}

/// Returns the temporary name of a map's pin.
fn fresh(name: &str) -> String {
    format!("{name}-new")
}

/// The maps of this process, needed by its programs as long as they are attached. Pinned, they
/// outlive the process.
pub(crate) struct KeptMaps {
    /// The folder of pins; `None` without pinning.
    pub(crate) pins: Option<Pins>,
    pub(crate) maps: [(&'static str, OwnedFd); KEPT_MAPS],
}

impl KeptMaps {
    /// Pins the maps. Must be called before the programs are attached: if the process is killed in
    /// between, the programs attached so far keep answering.
    pub(crate) fn prepare(&self) {
        self.with_pins(|pins| pins.pin_beside(&self.maps));
    }

    /// Replaces the predecessor's pins. Must be called after the last of its programs was detached.
    pub(crate) fn take_over(&self) {
        self.with_pins(|pins| pins.put_in_place(&self.maps));
    }

    /// Returns whether the pinned maps are ours, and not a predecessor's or a successor's.
    pub(crate) fn are_pinned(&self) -> bool {
        let Some(pins) = &self.pins else { return false };
        let Ok(folder) = Folder::open(&pins.maps()) else {
            return false;
        };
        self.maps
            .iter()
            .all(|(name, map)| folder.holds(name, map).unwrap_or(false))
    }

    /// Pins the maps again if `detach` removed pins while the server runs.
    pub(crate) fn pin_if_gone(&self) {
        self.with_pins(|pins| {
            // Each of them: `detach` may have been killed in between.
            let is_complete = open_if_there(&pins.maps())?.is_some_and(|folder| {
                self.maps
                    .iter()
                    .all(|(name, _)| folder.get(name, None).is_ok())
            });
            if is_complete {
                return Ok(());
            }
            pins.pin_beside(&self.maps)?;
            pins.put_in_place(&self.maps)
        });
    }

    /// Runs an operation on the pins. A failure is only logged, because nothing but persistence is lost.
    fn with_pins(&self, work: impl FnOnce(&Pins) -> io::Result<()>) {
        if let Some(Err(error)) = self.pins.as_ref().map(work) {
            tracing::warn!(%error, "cannot pin the maps: programs that stay attached at the stop (xdp.on_stop: keep) answer nothing at tc, and the next server will not know the learned names");
        }
    }
}

pub(crate) fn remove_if_there(path: &Path) -> io::Result<()> {
    let (folder, name) = split(path)?;
    match open_if_there(folder)? {
        Some(folder) => folder.remove(name),
        None => Ok(()),
    }
}

/// Removes an empty folder; returns whether it is gone.
fn remove_folder(path: &Path) -> io::Result<bool> {
    let (above, name) = split(path)?;
    Ok(open_if_there(above)?.is_none_or(|above| above.remove_folder(name)))
}

/// Splits a path into its folder and its last name.
fn split(path: &Path) -> io::Result<(&Path, &str)> {
    let folder = path.parent();
    let name = path.file_name().and_then(|name| name.to_str());
    folder
        .zip(name)
        .ok_or_else(|| in_file(path, io::ErrorKind::InvalidInput.into()))
}

/// Opens a folder; `None` if it does not exist.
fn open_if_there(path: &Path) -> io::Result<Option<Folder>> {
    match Folder::open(path) {
        Ok(folder) => Ok(Some(folder)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

pub(crate) fn ensure_bpffs(path: &Path) -> io::Result<()> {
    /// The conventional mount point of bpffs; only the kernel can create this folder.
    const CUSTOMARY: &str = "/sys/fs/bpf";
    let existing = path
        .ancestors()
        .find(|ancestor| ancestor.is_dir())
        .unwrap_or(Path::new("/"));
    // The folder may not exist yet: its nearest ancestor tells on which file system it would be.
    if statfs(existing)?.filesystem_type() != BPF_FS_MAGIC {
        let place = if path.starts_with(CUSTOMARY) {
            Path::new(CUSTOMARY)
        } else {
            path
        };
        // Below /sys/fs/bpf the folder follows the mount, which would hide it.
        if place == path {
            fs::create_dir_all(path).map_err(|error| in_file(path, error))?;
        }
        mount(
            Some("bpf"),
            place,
            Some("bpf"),
            MsFlags::empty(),
            // Without a mode everybody may create entries: bpffs begins with 1777.
            Some("mode=0755"),
        )
        .map_err(|error| {
            in_file(
                place,
                io::Error::other(format!("cannot mount a bpffs: {error}")),
            )
        })?;
    }
    fs::create_dir_all(path).map_err(|error| in_file(path, error))
}

/// Makes a user the owner of the folder of pins, so that it may open, pin and unpin there. Ownership changes
/// only for the folder and for entries with names that servers pin, and never through a symbolic
/// link: this runs as root, and a previous owner of the folder could have put anything there.
pub(crate) fn hand_over(path: &Path, uid: u32, gid: u32) -> io::Result<()> {
    let folder = openat(AT_FDCWD, path, ITSELF, Mode::empty())
        .map_err(|error| in_file(path, error.into()))?;
    // Asked of the opened folder: by now its path may lead to another one.
    if fstatfs(&folder)?.filesystem_type() != BPF_FS_MAGIC {
        return Err(in_file(path, io::Error::other("it is not on a bpffs")));
    }
    hand_over_opened(folder, Level::Shared, uid, gid).map_err(|error| in_file(path, error))
}

/// Position in the tree of pins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    /// The folder shared by all servers.
    Shared,
    Server,
    Links,
    Maps,
    Pin,
}

impl Level {
    /// Returns the type of the entry with this name; `None` if servers pin nothing by that name.
    fn below(self, name: &str) -> Option<Self> {
        let below = match self {
            Self::Shared if is_server_name(name) => Self::Server,
            Self::Server if name == "links" => Self::Links,
            Self::Server if name.strip_prefix("maps-").is_some_and(is_number) => Self::Maps,
            Self::Links if parse_link_name(name).is_some() => Self::Pin,
            Self::Maps if is_map_name(name) => Self::Pin,
            Self::Shared | Self::Server | Self::Links | Self::Maps | Self::Pin => return None,
        };
        Some(below)
    }
}

/// Returns whether a folder's name consists of an address, a port and the number of a namespace.
fn is_server_name(name: &str) -> bool {
    let Some((endpoint, namespace)) = name.rsplit_once('-') else {
        return false;
    };
    let Some((_address, port)) = endpoint.rsplit_once('-') else {
        return false;
    };
    is_number(port) && is_number(namespace)
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_map_name(name: &str) -> bool {
    let name = name.strip_suffix("-new").unwrap_or(name);
    !name.is_empty()
        && name
            .bytes()
            .all(|byte| byte.is_ascii_uppercase() || byte == b'_')
}

/// Changes the owner of an opened object, and of the expected entries below it.
fn hand_over_opened(opened: OwnedFd, level: Level, uid: u32, gid: u32) -> io::Result<()> {
    let kind = SFlag::from_bits_truncate(fstat(&opened)?.st_mode) & SFlag::S_IFMT;
    let is_expected = kind
        == if level == Level::Pin {
            SFlag::S_IFREG
        } else {
            SFlag::S_IFDIR
        };
    if !is_expected {
        tracing::warn!(
            ?level,
            "foreign object under xdp.bpffs: owner left unchanged"
        );
        return Ok(());
    }
    // By the handle alone: a name could mean another object since the check.
    fchownat(
        &opened,
        "",
        Some(uid.into()),
        Some(gid.into()),
        AtFlags::AT_EMPTY_PATH,
    )?;
    if level == Level::Pin {
        return Ok(());
    }
    // Lists the opened folder itself, even if its path now leads elsewhere.
    for entry in fs::read_dir(format!("/proc/self/fd/{}", opened.as_raw_fd()))? {
        let name = entry?.file_name();
        // Names that servers never pin may be links or foreign objects, which keep their owners.
        let Some(below) = name.to_str().and_then(|name| level.below(name)) else {
            continue;
        };
        match openat(&opened, name.as_os_str(), ITSELF, Mode::empty()) {
            Ok(found) => hand_over_opened(found, below, uid, gid)?,
            // The entry has been removed in the meantime.
            Err(Errno::ENOENT) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Flags of `openat` for a handle to the object itself, even if it is a symbolic link.
const ITSELF: OFlag = OFlag::O_PATH
    .union(OFlag::O_NOFOLLOW)
    .union(OFlag::O_CLOEXEC);

fn kind_name(kind: LinkKind) -> &'static str {
    match kind {
        LinkKind::XdpNative => "native",
        LinkKind::XdpGeneric => "generic",
        LinkKind::Tcx => "tcx",
    }
}

fn parse_link_name(name: &str) -> Option<(u32, LinkKind)> {
    let (ifindex, kind) = name.split_once('-')?;
    let kind = [LinkKind::XdpNative, LinkKind::XdpGeneric, LinkKind::Tcx]
        .into_iter()
        .find(|&known| kind_name(known) == kind)?;
    Some((ifindex.parse().ok()?, kind))
}

/// An open folder below `xdp.bpffs`.
#[derive(Debug)]
pub(super) struct Folder {
    opened: OwnedFd,
    path: PathBuf,
}

impl Folder {
    /// Opens a folder; fails if any part of its path is a symbolic link.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let opened = open_step_by_step(path).map_err(|error| match error {
            Errno::ELOOP | Errno::ENOTDIR => in_file(
                path,
                io::Error::other("contains a symbolic link; remove it"),
            ),
            error => in_file(path, error.into()),
        })?;
        Ok(Self {
            opened,
            path: path.to_path_buf(),
        })
    }

    /// Opens a folder, creating it and missing parents.
    pub(super) fn make(path: &Path) -> io::Result<Self> {
        match Self::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => return other,
        }
        let (above, name) = split(path)?;
        let above = Self::make(above)?;
        match mkdirat(&above.opened, name, Mode::from_bits_truncate(0o755)) {
            // Another server may have created it just now; whether it is a folder, opening it
            // shows.
            Ok(()) | Err(Errno::EEXIST) => Self::open(path),
            Err(error) => Err(in_file(path, error.into())),
        }
    }

    pub(super) fn names(&self) -> io::Result<Vec<String>> {
        let entries = fs::read_dir(self.place(""))?;
        Ok(entries
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect())
    }

    pub(super) fn pin(&self, name: &str, object: BorrowedFd<'_>) -> io::Result<()> {
        bpf::pin(object, &self.place(name)).map_err(|error| in_file(&self.path.join(name), error))
    }

    /// Opens an object pinned by root, by this process's user or by `attacher`.
    pub(super) fn get(&self, name: &str, attacher: Option<Uid>) -> io::Result<OwnedFd> {
        let path = self.path.join(name);
        let pin = openat(&self.opened, name, ITSELF, Mode::empty())?;
        let found = fstat(&pin)?;
        let owner = Uid::from_raw(found.st_uid);
        let is_file = SFlag::from_bits_truncate(found.st_mode) & SFlag::S_IFMT == SFlag::S_IFREG;
        let is_trusted = owner.is_root() || owner == Uid::effective() || Some(owner) == attacher;
        // Whoever could plant a link or map here would decide what this server attaches or reads.
        if !is_file || !is_trusted {
            return Err(in_file(
                &path,
                io::Error::other(format!("is not a pin of this program (owner {owner})")),
            ));
        }
        // By the handle that was checked, because the name may lead elsewhere by now.
        bpf::open_pin(&by_descriptor(pin.as_fd(), "")).map_err(|error| in_file(&path, error))
    }

    /// Returns whether the pin of this name is this map's.
    fn holds(&self, name: &str, map: &OwnedFd) -> io::Result<bool> {
        let pinned = self.get(name, None)?;
        Ok(bpf::map_id(pinned.as_fd())? == bpf::map_id(map.as_fd())?)
    }

    pub(super) fn remove(&self, name: &str) -> io::Result<()> {
        match unlinkat(&self.opened, name, UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => Ok(()),
            Err(error) => Err(in_file(&self.path.join(name), error.into())),
        }
    }

    /// Removes an empty folder; returns whether it is gone.
    pub(super) fn remove_folder(&self, name: &str) -> bool {
        matches!(
            unlinkat(&self.opened, name, UnlinkatFlags::RemoveDir),
            Ok(()) | Err(Errno::ENOENT)
        )
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
    // Not by openat2(2), which could do it at once: systemd's RestrictSUIDSGID= blocks it, because a seccomp filter
    // cannot see its flags.
    let step = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let mut parts = path.components();
    let first = parts.next().ok_or(Errno::ENOENT)?;
    let mut opened = openat(AT_FDCWD, first.as_os_str(), step, Mode::empty())?;
    for part in parts {
        opened = openat(&opened, part.as_os_str(), step, Mode::empty())?;
    }
    // The handle cannot be read; open the folder again for reading.
    openat(
        &opened,
        ".",
        OFlag::O_DIRECTORY | OFlag::O_RDONLY | OFlag::O_CLOEXEC,
        Mode::empty(),
    )
}

/// Returns a path of an opened folder, or of `name` in it.
fn by_descriptor(opened: BorrowedFd<'_>, name: &str) -> PathBuf {
    let path = Path::new("/proc/self/fd").join(opened.as_raw_fd().to_string());
    if name.is_empty() {
        path
    } else {
        path.join(name)
    }
}

pub(super) fn in_file(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use dns_core::config::Config;

    use super::*;
    use crate::object::Object;

    #[test]
    fn names_of_links_are_read_back() {
        assert_eq!(parse_link_name("12-tcx"), Some((12, LinkKind::Tcx)));
        assert_eq!(parse_link_name("1-native"), Some((1, LinkKind::XdpNative)));
        assert_eq!(parse_link_name("x-native"), None);
        assert_eq!(parse_link_name("1-other"), None);
    }

    #[test]
    fn foreign_pins_are_unexpected() {
        for (level, name, below) in [
            (
                Level::Shared,
                "169_254_0_2-53-4026531840",
                Some(Level::Server),
            ),
            (Level::Shared, "fd00::1-53-1", Some(Level::Server)),
            (Level::Shared, "ip", None),
            (Level::Shared, "other-tool", None),
            (Level::Server, "links", Some(Level::Links)),
            (Level::Server, "maps-7", Some(Level::Maps)),
            (Level::Server, "maps-", None),
            (Level::Links, "3-tcx", Some(Level::Pin)),
            (Level::Links, "shadow", None),
            (Level::Maps, "NAMES", Some(Level::Pin)),
            (Level::Maps, "NAMES-new", Some(Level::Pin)),
            (Level::Maps, "passwd", None),
            (Level::Pin, "x", None),
        ] {
            assert_eq!(level.below(name), below, "{level:?} {name}");
        }
    }

    #[test]
    fn removal_reports_left_entries() {
        let base = tempfile::tempdir().unwrap();
        let shared = base.path().canonicalize().unwrap().join("shared");
        let pins = Pins::at(&shared, "127.0.0.1:53".parse().unwrap()).unwrap();
        assert_eq!(pins.remove().unwrap(), FolderState::Absent);
        let prepare = || {
            fs::create_dir_all(pins.links()).unwrap();
            fs::create_dir_all(pins.maps()).unwrap();
            fs::write(pins.maps().join("NAMES"), "").unwrap();
        };
        prepare();
        assert_eq!(pins.remove().unwrap(), FolderState::Removed);
        assert!(!shared.exists(), "empty as well");
        prepare();
        fs::write(pins.links().join("other"), "").unwrap();
        assert_eq!(pins.remove().unwrap(), FolderState::Kept);
        assert!(pins.links().join("other").exists() && !pins.maps().exists());
        // A link in place of the folder leads nowhere.
        let elsewhere = base.path().join("elsewhere");
        fs::rename(&pins.folder, &elsewhere).unwrap();
        fs::remove_file(elsewhere.join("links/other")).unwrap();
        symlink(&elsewhere, &pins.folder).unwrap();
        pins.remove().unwrap_err();
        assert!(elsewhere.join("links").exists());
    }

    #[test]
    fn kills_leave_no_map_without_pin() {
        if !test_support::requirements::root() {
            return;
        }
        let bpffs = PathBuf::from(format!("/sys/fs/bpf/kills-{}", std::process::id()));
        let pins = Pins::prepare(&bpffs, "127.0.0.1:53".parse().unwrap()).unwrap();
        let text = br#"{"address": "127.0.0.1", "port": 53}"#;
        let config = Config::check("config.json", text).1.unwrap().config;
        let (_image, object) = Object::load(&config.fast_path()).unwrap();
        let kept = KeptMaps {
            pins: Some(pins.clone()),
            maps: object.kept_maps,
        };
        kept.prepare();
        // Each pin has an inode of its own.
        let fresh_array = pins.maps().join(fresh(object::TC_ANSWER));
        let pinned = fs::metadata(&fresh_array).unwrap().ino();
        kept.prepare();
        assert_eq!(fs::metadata(&fresh_array).unwrap().ino(), pinned);

        kept.take_over();
        assert!(kept.are_pinned());
        fs::remove_file(pins.maps().join(object::TC_ANSWER)).unwrap();
        assert!(!kept.are_pinned());
        kept.pin_if_gone();
        assert!(kept.are_pinned());
        assert_eq!(pins.remove().unwrap(), FolderState::Removed);
    }

    #[test]
    fn folder_names_identify_endpoints() {
        let at = |text: &str| {
            Pins::at(Path::new("/b"), text.parse().unwrap())
                .unwrap()
                .folder
                .to_str()
                .unwrap()
                .to_owned()
        };
        assert!(at("169.254.0.2:53").starts_with("/b/169_254_0_2-53-"));
        assert!(!at("127.0.0.1:53").contains('.'));
        assert_ne!(at("127.0.0.1:53"), at("127.0.0.1:54"));
        assert!(at("[fd00::1]:53").starts_with("/b/fd00::1-53-"));
    }

    #[test]
    fn symbolic_links_are_not_followed() {
        let base = tempfile::tempdir().unwrap();
        let real = base.path().canonicalize().unwrap();
        fs::create_dir(real.join("elsewhere")).unwrap();
        fs::write(real.join("elsewhere/NAMES"), "").unwrap();
        symlink(real.join("elsewhere"), real.join("links")).unwrap();
        Folder::open(&real.join("elsewhere")).unwrap();
        for path in ["links", "links/deeper"] {
            assert!(Folder::open(&real.join(path)).is_err(), "{path}");
            assert!(Folder::make(&real.join(path)).is_err(), "{path}");
        }
        let folder = Folder::make(&real.join("a/b")).unwrap();
        symlink(real.join("elsewhere/NAMES"), real.join("a/b/NAMES")).unwrap();
        let error = folder.get("NAMES", None).unwrap_err();
        assert!(
            error.to_string().contains("not a pin of this program"),
            "{error}"
        );
        // Removes the link, not its target.
        folder.remove("NAMES").unwrap();
        folder.remove("NAMES").unwrap();
        assert!(real.join("elsewhere/NAMES").exists());
        assert_eq!(folder.names().unwrap(), Vec::<String>::new());
    }
}
