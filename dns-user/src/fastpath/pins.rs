//! What outlives the process: links and maps under bpffs.
//!
//! ```text
//! <bpffs>/<address>-<port>-<network namespace>/
//!     links/<ifindex>-<hook>      the attachments
//!     maps-<layout version>/      TC_ANSWER, NAMES, ARENA, CONTROL, COUNTERS of the process that serves;
//!                                 `-new` behind the name: of one that is about to
//! ```
//!
//! Named after what they serve, so that two servers on one machine never touch
//! each other's. Links are taken over whatever the layout of the maps behind
//! them; maps are only ever read, and only those of our own layout.

use std::{
    fs, io,
    net::SocketAddr,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use dns_common::{LAYOUT_VERSION, object};
use nix::{
    mount::{MsFlags, mount},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};

use super::{
    entry::read_name,
    maps::{map_arena, map_index},
    sys::{self, LinkKind},
};
use crate::name::Name;

/// The folder of one server.
#[derive(Clone, Debug)]
pub(super) struct Pins {
    /// `<bpffs>/<address>-<port>-<network namespace>`.
    folder: PathBuf,
}

/// A link that a predecessor left.
#[derive(Debug)]
pub(super) struct PinnedLink {
    /// Interface.
    pub(super) ifindex: u32,
    /// Hook.
    pub(super) kind: LinkKind,
    /// The link.
    pub(super) fd: OwnedFd,
    /// Where it is pinned.
    pub(super) path: PathBuf,
}

impl Pins {
    /// The folder for a server at `endpoint`, made if need be; mounts a bpffs
    /// where there is none.
    pub(super) fn prepare(bpffs: &Path, endpoint: SocketAddr) -> io::Result<Self> {
        ensure_bpffs(bpffs)?;
        let pins = Self::at(bpffs, endpoint)?;
        for folder in [pins.links(), pins.maps()] {
            fs::create_dir_all(&folder).map_err(|error| in_file(&folder, error))?;
        }
        Ok(pins)
    }

    /// The folder for a server at `endpoint`, as it may or may not be there.
    pub(super) fn at(bpffs: &Path, endpoint: SocketAddr) -> io::Result<Self> {
        let namespace = fs::metadata("/proc/thread-self/ns/net")?.ino();
        // bpffs refuses names with dots (kernel 4.4 on: reserved).
        let address = endpoint.ip().to_string().replace('.', "_");
        Ok(Self { folder: bpffs.join(format!("{address}-{}-{namespace}", endpoint.port())) })
    }

    /// The folder itself.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Links that are pinned here. Those that cannot be opened are left out.
    pub(super) fn pinned_links(&self) -> Vec<PinnedLink> {
        let Ok(entries) = fs::read_dir(self.links()) else { return Vec::new() };
        entries
            .flatten()
            .filter_map(|entry| {
                let name = entry.file_name();
                let (ifindex, kind) = parse_link_name(name.to_str()?)?;
                let path = entry.path();
                let fd = sys::open_pin(&path)
                    .inspect_err(
                        |error| tracing::warn!(%error, path = %path.display(), "cannot open a pinned link"),
                    )
                    .ok()?;
                Some(PinnedLink { ifindex, kind, fd, path })
            })
            .collect()
    }

    /// Pins a link; returns where.
    pub(super) fn pin_link(&self, link: BorrowedFd<'_>, ifindex: u32, kind: LinkKind) -> io::Result<PathBuf> {
        let links = self.links();
        // `detach` takes the folder away, under a living server, too.
        fs::create_dir_all(&links).map_err(|error| in_file(&links, error))?;
        let path = links.join(format!("{ifindex}-{}", kind_name(kind)));
        // A leftover of an interface that is gone and had this number.
        remove_if_there(&path)?;
        sys::pin(link, &path).map_err(|error| in_file(&path, error))?;
        Ok(path)
    }

    /// Pins maps beside those of a predecessor, whose programs need theirs until they
    /// are replaced.
    fn pin_beside(&self, maps: &[(&str, OwnedFd)]) -> io::Result<()> {
        let folder = self.maps();
        // See `pin_link`.
        fs::create_dir_all(&folder).map_err(|error| in_file(&folder, error))?;
        for (name, map) in maps {
            let fresh = self.fresh_map(name);
            remove_if_there(&fresh)?;
            sys::pin(map.as_fd(), &fresh).map_err(|error| in_file(&fresh, error))?;
        }
        Ok(())
    }

    /// Puts them in the predecessor's place, each in one step.
    fn put_in_place(&self, maps: &[(&str, OwnedFd)]) -> io::Result<()> {
        for (name, _) in maps {
            let path = self.map(name);
            fs::rename(self.fresh_map(name), &path).map_err(|error| in_file(&path, error))?;
        }
        Ok(())
    }

    /// Names that the predecessor answered, at most `limit`; empty where there is none.
    pub(super) fn earlier_names(&self, limit: usize) -> Vec<Name> {
        let read = || -> io::Result<Vec<Name>> {
            let names = sys::open_pin(&self.map(object::NAMES))?;
            let arena = sys::open_pin(&self.map(object::ARENA))?;
            let memory = Arc::new(map_arena(arena.as_fd())?);
            let index = map_index(names.as_fd(), memory.clone())?;
            Ok(index.locations().take(limit).filter_map(|location| read_name(&memory, location)).collect())
        };
        match read() {
            Ok(names) => names,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => {
                tracing::warn!(%error, "the learned names of the server before cannot be read");
                Vec::new()
            }
        }
    }

    /// Removes the maps' pins and all folders that are empty then.
    pub(super) fn remove(&self) -> io::Result<()> {
        let maps = self.maps();
        match fs::read_dir(&maps) {
            Ok(pinned) => {
                for map in pinned {
                    remove_if_there(&map.map_err(|error| in_file(&maps, error))?.path())?;
                }
            }
            // Nothing is pinned.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(in_file(&maps, error)),
        }
        let shared = self.folder.parent().map(Path::to_path_buf);
        // Folders in use by others (another layout, another server) stay.
        for folder in
            [Some(self.maps()), Some(self.links()), Some(self.folder.clone()), shared].into_iter().flatten()
        {
            let _ = fs::remove_dir(folder);
        }
        Ok(())
    }

    /// Where links are pinned.
    fn links(&self) -> PathBuf {
        self.folder.join("links")
    }

    /// Where maps are pinned.
    fn maps(&self) -> PathBuf {
        self.folder.join(format!("maps-{LAYOUT_VERSION}"))
    }

    /// Where the map of this name is pinned.
    fn map(&self, name: &str) -> PathBuf {
        self.maps().join(name)
    }

    /// Where the map of this name is pinned before it takes its place.
    fn fresh_map(&self, name: &str) -> PathBuf {
        self.maps().join(format!("{name}-new"))
    }
}

/// The maps of this process, which its programs need as long as they are attached:
/// pinned, they outlive it.
pub(super) struct KeptMaps {
    /// Where to pin; `None`: nowhere.
    pub(super) pins: Option<Pins>,
    /// By name.
    pub(super) maps: [(&'static str, OwnedFd); 5],
}

impl KeptMaps {
    /// To be called before the programs are attached: should the process be killed while
    /// they are, those that are there go on answering.
    pub(super) fn prepare(&self) {
        self.with_pins(|pins| pins.pin_beside(&self.maps));
    }

    /// To be called when no program of a predecessor is attached any more.
    pub(super) fn take_over(&self) {
        self.with_pins(|pins| pins.put_in_place(&self.maps));
    }

    /// Whether they are (still) the ones that are pinned, and not a predecessor's or a
    /// successor's.
    pub(super) fn are_pinned(&self) -> bool {
        let Some(pins) = &self.pins else { return false };
        let own = |name: &str, map: &OwnedFd| -> io::Result<bool> {
            Ok(sys::map_id(sys::open_pin(&pins.map(name))?.as_fd())? == sys::map_id(map.as_fd())?)
        };
        self.maps.iter().all(|(name, map)| own(name, map).unwrap_or(false))
    }

    /// Pins them again if somebody took all pins away (`detach`, under a living server).
    pub(super) fn pin_if_gone(&self) {
        self.with_pins(|pins| {
            if pins.map(object::NAMES).exists() {
                return Ok(());
            }
            pins.pin_beside(&self.maps)?;
            pins.put_in_place(&self.maps)
        });
    }

    /// Does something that may fail, which costs what is kept and nothing else.
    fn with_pins(&self, work: impl FnOnce(&Pins) -> io::Result<()>) {
        if let Some(Err(error)) = self.pins.as_ref().map(work) {
            tracing::warn!(%error, "cannot pin the maps: what is kept at the stop answers nothing at tc, and a successor will not know the learned names");
        }
    }
}

/// Unpins; what is not there is unpinned already.
pub(super) fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(in_file(path, error)),
        _ => Ok(()),
    }
}

/// Sees to it that `path` is a folder on a bpffs.
pub(super) fn ensure_bpffs(path: &Path) -> io::Result<()> {
    /// Where bpffs is mounted by convention; a folder that only the kernel can make.
    const CUSTOMARY: &str = "/sys/fs/bpf";
    let existing = path.ancestors().find(|ancestor| ancestor.is_dir()).unwrap_or(Path::new("/"));
    if statfs(existing)?.filesystem_type() != BPF_FS_MAGIC {
        let place = if path.starts_with(CUSTOMARY) { Path::new(CUSTOMARY) } else { path };
        if place == path {
            fs::create_dir_all(path).map_err(|error| in_file(path, error))?;
        }
        mount(Some("bpf"), place, Some("bpf"), MsFlags::empty(), Some("mode=0755"))
            .map_err(|error| in_file(place, io::Error::other(format!("cannot mount a bpffs: {error}"))))?;
    }
    fs::create_dir_all(path).map_err(|error| in_file(path, error))
}

/// Gives a folder on bpffs and everything below it to a user, who then may
/// open, pin and unpin there.
pub(super) fn hand_over(path: &Path, uid: u32, gid: u32) -> io::Result<()> {
    std::os::unix::fs::lchown(path, Some(uid), Some(gid)).map_err(|error| in_file(path, error))?;
    if path.is_dir() {
        for entry in fs::read_dir(path).map_err(|error| in_file(path, error))?.flatten() {
            hand_over(&entry.path(), uid, gid)?;
        }
    }
    Ok(())
}

/// Names the file in an error.
fn in_file(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Name of a hook in a pin's name.
fn kind_name(kind: LinkKind) -> &'static str {
    match kind {
        LinkKind::XdpNative => "native",
        LinkKind::XdpGeneric => "generic",
        LinkKind::Tcx => "tcx",
    }
}

/// Reads the name of a link's pin.
fn parse_link_name(name: &str) -> Option<(u32, LinkKind)> {
    let (ifindex, kind) = name.split_once('-')?;
    let kind = [LinkKind::XdpNative, LinkKind::XdpGeneric, LinkKind::Tcx]
        .into_iter()
        .find(|&known| kind_name(known) == kind)?;
    Some((ifindex.parse().ok()?, kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_links_are_read_back() {
        assert_eq!(parse_link_name("12-tcx"), Some((12, LinkKind::Tcx)));
        assert_eq!(parse_link_name("1-native"), Some((1, LinkKind::XdpNative)));
        assert_eq!(parse_link_name("x-native"), None);
        assert_eq!(parse_link_name("1-other"), None);
    }

    #[test]
    fn folders_have_no_dots_and_differ_by_what_is_served() {
        let at = |text: &str| {
            Pins::at(Path::new("/b"), text.parse().unwrap()).unwrap().folder().to_str().unwrap().to_owned()
        };
        assert!(at("169.254.0.2:53").starts_with("/b/169_254_0_2-53-"));
        assert!(!at("127.0.0.1:53").contains('.'));
        assert_ne!(at("127.0.0.1:53"), at("127.0.0.1:54"));
        assert!(at("[fd00::1]:53").starts_with("/b/fd00::1-53-"));
    }
}
