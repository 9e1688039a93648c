//! The system calls that aya does not wrap, or wraps with a fallback that is
//! in the way here: links by interface index (aya falls back to netlink
//! attachments, which cannot be pinned), link updates, pins.
//!
//! Layouts are those of `union bpf_attr` in the kernel's `linux/bpf.h`; a
//! kernel takes a longer attribute than it knows as long as the rest is zero.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use super::map::Shape;

/// `BPF_OBJ_PIN`.
const OBJ_PIN: libc::c_long = 6;
/// `BPF_OBJ_GET`.
const OBJ_GET: libc::c_long = 7;
/// `BPF_PROG_GET_FD_BY_ID`.
const PROG_BY_ID: libc::c_long = 13;
/// `BPF_OBJ_GET_INFO_BY_FD`.
const OBJ_INFO: libc::c_long = 15;
/// `BPF_LINK_CREATE`, kernel 5.7; for XDP 5.9, for tcx 6.6.
const LINK_CREATE: libc::c_long = 28;
/// `BPF_LINK_UPDATE`, kernel 5.7.
const LINK_UPDATE: libc::c_long = 29;
/// `BPF_LINK_DETACH`, kernel 5.9.
const LINK_DETACH: libc::c_long = 34;

/// `BPF_LINK_TYPE_XDP`.
const LINK_TYPE_XDP: u32 = 6;
/// `BPF_LINK_TYPE_TCX`.
const LINK_TYPE_TCX: u32 = 11;

/// `union bpf_attr` as sixteen words: longer than any layout used here.
///
/// Every caller names the words by the offsets of `linux/bpf.h`.
#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
struct Attributes([u64; 16]);

impl Attributes {
    /// Sets the 32-bit field at `offset` bytes (a multiple of 4, below 128).
    fn u32(mut self, offset: usize, value: u32) -> Self {
        let (word, shift) = (offset / 8, if cfg!(target_endian = "big") { 32 } else { 0 });
        let shift = if offset.is_multiple_of(8) { shift } else { 32 - shift };
        self.0[word] |= u64::from(value) << shift;
        self
    }

    /// Sets the field at `offset` to a file descriptor.
    fn fd(self, offset: usize, fd: BorrowedFd<'_>) -> Self {
        self.u32(offset, u32::try_from(fd.as_raw_fd()).expect("an open descriptor is not negative"))
    }

    /// Sets the 64-bit field at `offset` bytes (a multiple of 8, below 128).
    fn u64(mut self, offset: usize, value: u64) -> Self {
        self.0[offset / 8] = value;
        self
    }

    /// Sets the 64-bit field at `offset` to an address.
    fn pointer<T>(self, offset: usize, pointer: *const T) -> Self {
        self.u64(offset, pointer as u64)
    }

    /// Calls `bpf(command)`; pointers inside must be valid for what the command does with them.
    fn call(&mut self, command: libc::c_long) -> io::Result<libc::c_long> {
        // SAFETY: the attribute block outlives the call and its size is passed
        // along; the callers in this file keep the memory behind its pointers alive.
        let result = unsafe { libc::syscall(libc::SYS_bpf, command, self.0.as_mut_ptr(), size_of::<Self>()) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
    }

    /// Like [`Self::call`], for commands that return a new file descriptor.
    fn call_for_fd(&mut self, command: libc::c_long) -> io::Result<OwnedFd> {
        let fd = self.call(command)?;
        let fd = i32::try_from(fd).map_err(io::Error::other)?;
        // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

/// How a link hooks a program to an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum LinkKind {
    /// XDP in the driver (`XDP_FLAGS_DRV_MODE`).
    XdpNative,
    /// XDP on the skb (`XDP_FLAGS_SKB_MODE`).
    XdpGeneric,
    /// tcx at ingress, last in the chain.
    Tcx,
}

/// Attaches `program` to an interface of the calling thread's network namespace.
///
/// EBUSY: another XDP program is there. EINVAL: a kernel without this kind of
/// link, or a driver that refuses.
pub(super) fn link_create(program: BorrowedFd<'_>, ifindex: u32, kind: LinkKind) -> io::Result<OwnedFd> {
    // BPF_XDP = 37, BPF_TCX_INGRESS = 46; XDP_FLAGS_SKB_MODE = 2, XDP_FLAGS_DRV_MODE = 4.
    let (attach_type, flags) = match kind {
        LinkKind::XdpNative => (37, 4),
        LinkKind::XdpGeneric => (37, 2),
        LinkKind::Tcx => (46, 0),
    };
    Attributes::default()
        .fd(0, program)
        .u32(4, ifindex)
        .u32(8, attach_type)
        .u32(12, flags)
        .call_for_fd(LINK_CREATE)
}

/// Puts `program` in the place of the link's present one, in one step: no packet meets none or both.
pub(super) fn link_update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    Attributes::default().fd(0, link).fd(4, program).call(LINK_UPDATE).map(drop)
}

/// Detaches the program, whoever else holds the link.
pub(super) fn link_detach(link: BorrowedFd<'_>) -> io::Result<()> {
    Attributes::default().fd(0, link).call(LINK_DETACH).map(drop)
}

/// What the kernel says of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LinkInfo {
    /// Id of the program that it attaches.
    pub(super) program_id: u32,
    /// Interface; 0 once that is gone or the link was detached.
    pub(super) ifindex: u32,
    /// Whether it is a tcx link; else an XDP one.
    pub(super) tcx: bool,
}

/// Reads `struct bpf_link_info`; an error for links of other kinds.
pub(super) fn link_info(link: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    let info: [u32; 16] = object_info(link)?;
    let [link_type, _id, program_id, _padding, ifindex, ..] = info;
    match link_type {
        LINK_TYPE_XDP | LINK_TYPE_TCX => {
            Ok(LinkInfo { program_id, ifindex, tcx: link_type == LINK_TYPE_TCX })
        }
        other => Err(io::Error::other(format!("a BPF link of type {other}, neither XDP nor tcx"))),
    }
}

/// What the kernel says of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ProgramInfo {
    /// Its id.
    pub(super) id: u32,
    /// Its name, at most 15 bytes.
    pub(super) name: String,
    /// User who loaded it.
    pub(super) uid: u32,
}

/// Reads `struct bpf_prog_info`.
pub(super) fn program_info(program: BorrowedFd<'_>) -> io::Result<ProgramInfo> {
    let info: [u32; 60] = object_info(program)?;
    let name: Vec<u8> =
        info[16..20].iter().flat_map(|word| word.to_ne_bytes()).take_while(|&byte| byte != 0).collect();
    Ok(ProgramInfo { id: info[1], name: String::from_utf8_lossy(&name).into_owned(), uid: info[12] })
}

/// Reads the id of a map from `struct bpf_map_info`.
pub(super) fn map_id(map: BorrowedFd<'_>) -> io::Result<u32> {
    let info: [u32; 32] = object_info(map)?;
    Ok(info[1])
}

/// Value size and number of elements of a map, from `struct bpf_map_info`.
pub(super) fn map_shape(map: BorrowedFd<'_>) -> io::Result<Shape> {
    let info: [u32; 32] = object_info(map)?;
    Ok(Shape { value_size: info[3], elements: info[4] })
}

/// A program by its id; needs CAP_SYS_ADMIN.
pub(super) fn program_by_id(id: u32) -> io::Result<OwnedFd> {
    Attributes::default().u32(0, id).call_for_fd(PROG_BY_ID)
}

/// The first words of the kernel's information about a BPF object.
fn object_info<const WORDS: usize>(object: BorrowedFd<'_>) -> io::Result<[u32; WORDS]> {
    /// Alignment of the kernel's information structures.
    #[repr(C, align(8))]
    struct Info<const WORDS: usize>([u32; WORDS]);
    let mut info = Info([0; WORDS]);
    let length = u32::try_from(size_of::<Info<WORDS>>()).expect("a few hundred bytes");
    Attributes::default().fd(0, object).u32(4, length).pointer(8, &raw mut info).call(OBJ_INFO)?;
    Ok(info.0)
}

/// Pins a map, program or link at `path` on a bpffs.
pub(super) fn pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    Attributes::default().pointer(0, path.as_ptr()).fd(8, object).call(OBJ_PIN).map(drop)
}

/// Opens what is pinned at `path`.
pub(super) fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    Attributes::default().pointer(0, path.as_ptr()).call_for_fd(OBJ_GET)
}

/// Waits until every program run that began before this call has ended: an RCU
/// grace period, by `membarrier(MEMBARRIER_CMD_GLOBAL)` (kernel 4.3), which is
/// refused where `nohz_full` is in use.
pub(super) fn rcu_grace_period() -> io::Result<()> {
    /// `MEMBARRIER_CMD_GLOBAL`.
    const GLOBAL: libc::c_long = 1;
    // SAFETY: membarrier takes no pointers.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, GLOBAL, 0, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attribute_fields_lie_where_the_kernel_reads_them() {
        let attributes = Attributes::default().u32(0, 1).u32(4, 2).u64(8, 3).u32(36, 4);
        let bytes: Vec<u8> = attributes.0.iter().flat_map(|word| word.to_ne_bytes()).collect();
        assert_eq!(&bytes[0..4], &1_u32.to_ne_bytes());
        assert_eq!(&bytes[4..8], &2_u32.to_ne_bytes());
        assert_eq!(&bytes[8..16], &3_u64.to_ne_bytes());
        assert_eq!(&bytes[36..40], &4_u32.to_ne_bytes());
    }
}
