//! bpf(2): maps, programs, links by interface index, and pins.
//!
//! The kernel accepts a longer `union bpf_attr` than it knows if the rest is zero, and fills as
//! much of an information structure as it knows.

use std::{
    ffi::{CStr, CString},
    io, mem,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use aya_obj::generated::{
    XDP_FLAGS_DRV_MODE, XDP_FLAGS_SKB_MODE, bpf_attach_type, bpf_attr, bpf_cmd, bpf_insn,
    bpf_link_info, bpf_link_type, bpf_map_info, bpf_prog_info, bpf_prog_type,
};
use dns_fastpath::map::Shape;

/// Calls bpf(2) with the attributes filled in by `set`; pointers among them must be valid for the command.
fn call_for_number(command: bpf_cmd, set: impl FnOnce(&mut bpf_attr)) -> io::Result<libc::c_long> {
    // SAFETY: the union consists of integers, which may be zero.
    let mut attributes: bpf_attr = unsafe { mem::zeroed() };
    set(&mut attributes);
    // SAFETY: the attributes outlive the call and their size is passed along; the callers in
    // this file keep the memory behind their pointers alive.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command as libc::c_long,
            &raw mut attributes,
            size_of::<bpf_attr>(),
        )
    };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Like [`call_for_number`], for commands that return nothing.
fn call(command: bpf_cmd, set: impl FnOnce(&mut bpf_attr)) -> io::Result<()> {
    call_for_number(command, set)?;
    Ok(())
}

/// Like [`call_for_number`], for commands that return a new file descriptor.
fn call_for_fd(command: bpf_cmd, set: impl FnOnce(&mut bpf_attr)) -> io::Result<OwnedFd> {
    let fd = i32::try_from(call_for_number(command, set)?).map_err(io::Error::other)?;
    // SAFETY: the kernel has just created this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Converts a descriptor for `bpf_attr`.
fn number(fd: BorrowedFd<'_>) -> u32 {
    u32::try_from(fd.as_raw_fd()).expect("an open descriptor is not negative")
}

/// Returns the name of a map or program as the kernel keeps it: its first bytes.
fn short_name(name: &str) -> [libc::c_char; 16] {
    let mut short = [0; 16];
    for (to, byte) in short[..15].iter_mut().zip(name.bytes()) {
        // `c_char` has a sign on x86-64 and none on arm64.
        *to = libc::c_char::from_ne_bytes([byte]);
    }
    short
}

/// Creates a map as an object file defines it (`BPF_MAP_CREATE`).
pub(crate) fn create_map(name: &str, definition: &aya_obj::Map) -> io::Result<OwnedFd> {
    call_for_fd(bpf_cmd::BPF_MAP_CREATE, |attributes| {
        attributes.__bindgen_anon_1.map_type = definition.map_type();
        attributes.__bindgen_anon_1.key_size = definition.key_size();
        attributes.__bindgen_anon_1.value_size = definition.value_size();
        attributes.__bindgen_anon_1.max_entries = definition.max_entries();
        attributes.__bindgen_anon_1.map_flags = definition.map_flags();
        attributes.__bindgen_anon_1.map_name = short_name(name);
    })
}

/// Makes a map constant (`BPF_MAP_FREEZE`, kernel 5.2).
pub(crate) fn freeze(map: BorrowedFd<'_>) -> io::Result<()> {
    call(bpf_cmd::BPF_MAP_FREEZE, |attributes| {
        attributes.__bindgen_anon_2.map_fd = number(map);
    })
}

/// The kind of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProgramType {
    Xdp,
    Tc,
}

/// Lets the kernel verify a program (`BPF_PROG_LOAD`). The log gets statistics and the verifier's complaint, because
/// one of every instruction takes megabytes.
pub(crate) fn load_program(
    name: &str,
    kind: ProgramType,
    code: &[bpf_insn],
    license: &CStr,
    log: &mut [u8],
) -> io::Result<OwnedFd> {
    // `BPF_LOG_STATS` (include/linux/bpf_verifier.h)
    const STATISTICS: u32 = 4;
    let (kind, attach_type) = match kind {
        ProgramType::Xdp => (
            bpf_prog_type::BPF_PROG_TYPE_XDP,
            bpf_attach_type::BPF_XDP as u32,
        ),
        ProgramType::Tc => (bpf_prog_type::BPF_PROG_TYPE_SCHED_CLS, 0),
    };
    call_for_fd(bpf_cmd::BPF_PROG_LOAD, |attributes| {
        attributes.__bindgen_anon_3.prog_type = kind as u32;
        attributes.__bindgen_anon_3.expected_attach_type = attach_type;
        attributes.__bindgen_anon_3.insns = code.as_ptr() as u64;
        attributes.__bindgen_anon_3.insn_cnt = u32::try_from(code.len()).unwrap_or(u32::MAX);
        attributes.__bindgen_anon_3.license = license.as_ptr() as u64;
        attributes.__bindgen_anon_3.log_level = STATISTICS;
        attributes.__bindgen_anon_3.log_size = u32::try_from(log.len()).unwrap_or(u32::MAX);
        attributes.__bindgen_anon_3.log_buf = log.as_mut_ptr() as u64;
        attributes.__bindgen_anon_3.prog_name = short_name(name);
    })
}

/// Sets an element of a map (`BPF_MAP_UPDATE_ELEM`).
pub(crate) fn set_element(map: BorrowedFd<'_>, key: &[u8], value: &[u8]) -> io::Result<()> {
    call(bpf_cmd::BPF_MAP_UPDATE_ELEM, |attributes| {
        attributes.__bindgen_anon_2.map_fd = number(map);
        attributes.__bindgen_anon_2.key = key.as_ptr() as u64;
        attributes.__bindgen_anon_2.__bindgen_anon_1.value = value.as_ptr() as u64;
    })
}

/// Puts a program into the first slot of an array for tail calls, in place of an earlier one.
pub(crate) fn set_called(array: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    set_element(array, &0_u32.to_ne_bytes(), &number(program).to_ne_bytes())
}

/// Removes an element of a hash map (`BPF_MAP_DELETE_ELEM`), if there is one.
pub(crate) fn remove_element(map: BorrowedFd<'_>, key: &[u8]) -> io::Result<()> {
    let removed = call(bpf_cmd::BPF_MAP_DELETE_ELEM, |attributes| {
        attributes.__bindgen_anon_2.map_fd = number(map);
        attributes.__bindgen_anon_2.key = key.as_ptr() as u64;
    });
    match removed {
        // It is gone already.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        other => other,
    }
}

/// The way a link attaches a program to an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum LinkKind {
    /// XDP in the driver.
    XdpNative,
    /// XDP on the skb: only links that earlier versions left are of this kind.
    XdpGeneric,
    /// tcx at ingress, last in the chain.
    Tcx,
}

/// Attaches `program` to an interface of the calling thread's network namespace
/// (`BPF_LINK_CREATE`: kernel 5.7; for XDP 5.9, for tcx 6.6).
///
/// Fails with EBUSY if another XDP program is attached, and with EINVAL if the kernel does not know
/// this kind of link or the driver refuses it.
pub(crate) fn link_create(
    program: BorrowedFd<'_>,
    ifindex: u32,
    kind: LinkKind,
) -> io::Result<OwnedFd> {
    let (attach_type, flags) = match kind {
        LinkKind::XdpNative => (bpf_attach_type::BPF_XDP, XDP_FLAGS_DRV_MODE),
        LinkKind::XdpGeneric => (bpf_attach_type::BPF_XDP, XDP_FLAGS_SKB_MODE),
        // Without an order (BPF_F_BEFORE), tcx appends: programs of others keep their place before
        // ours.
        LinkKind::Tcx => (bpf_attach_type::BPF_TCX_INGRESS, 0),
    };
    call_for_fd(bpf_cmd::BPF_LINK_CREATE, |attributes| {
        attributes.link_create.__bindgen_anon_1.prog_fd = number(program);
        attributes.link_create.__bindgen_anon_2.target_ifindex = ifindex;
        attributes.link_create.attach_type = attach_type as u32;
        attributes.link_create.flags = flags;
    })
}

/// Replaces the link's program atomically: every packet meets exactly one of the two
/// (`BPF_LINK_UPDATE`, kernel 5.7).
pub(crate) fn link_update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    call(bpf_cmd::BPF_LINK_UPDATE, |attributes| {
        attributes.link_update.link_fd = number(link);
        attributes.link_update.__bindgen_anon_1.new_prog_fd = number(program);
    })
}

/// Detaches the program, even if other processes hold the link (`BPF_LINK_DETACH`, kernel 5.9).
pub(crate) fn link_detach(link: BorrowedFd<'_>) -> io::Result<()> {
    call(bpf_cmd::BPF_LINK_DETACH, |attributes| {
        attributes.link_detach.link_fd = number(link)
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinkInfo {
    pub(crate) program_id: u32,
    /// Interface index; 0 once the interface is gone or the link was detached.
    pub(crate) ifindex: u32,
}

/// Reads `struct bpf_link_info`; an error for links of other kinds.
pub(crate) fn link_info(link: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    const XDP: u32 = bpf_link_type::BPF_LINK_TYPE_XDP as u32;
    const TCX: u32 = bpf_link_type::BPF_LINK_TYPE_TCX as u32;
    let info: bpf_link_info = object_info(link)?;
    // SAFETY: both members consist of integers, for which any bytes are valid.
    let (of_xdp, of_tcx) = unsafe { (info.__bindgen_anon_1.xdp, info.__bindgen_anon_1.tcx) };
    match info.type_ {
        XDP => Ok(LinkInfo {
            program_id: info.prog_id,
            ifindex: of_xdp.ifindex,
        }),
        TCX => Ok(LinkInfo {
            program_id: info.prog_id,
            ifindex: of_tcx.ifindex,
        }),
        // A pin with one of our names may hold a link of another kind, which has no interface.
        other => Err(io::Error::other(format!(
            "a BPF link of type {other}, neither XDP nor tcx"
        ))),
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProgramInfo {
    pub(crate) id: u32,
    /// The program's name, at most 15 bytes.
    pub(crate) name: String,
    pub(crate) uid: u32,
    /// Instructions that the verifier has processed; 0 before kernel 5.16.
    pub(crate) verified: u32,
}

pub(crate) fn program_info(program: BorrowedFd<'_>) -> io::Result<ProgramInfo> {
    let bpf_prog_info {
        id,
        name,
        created_by_uid,
        verified_insns,
        ..
    } = object_info(program)?;
    let name = CStr::from_bytes_until_nul(&name.map(|byte| byte as u8))
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default();
    Ok(ProgramInfo {
        id,
        name,
        uid: created_by_uid,
        verified: verified_insns,
    })
}

/// Reads the id of a map from `struct bpf_map_info`.
pub(crate) fn map_id(map: BorrowedFd<'_>) -> io::Result<u32> {
    object_info(map).map(|info: bpf_map_info| info.id)
}

/// Returns the value size and the number of elements of a map, from `struct bpf_map_info`.
pub(crate) fn map_shape(map: BorrowedFd<'_>) -> io::Result<Shape> {
    let bpf_map_info {
        value_size,
        max_entries,
        ..
    } = object_info(map)?;
    Ok(Shape {
        value_size,
        elements: max_entries,
    })
}

/// Opens a program by its id; needs CAP_SYS_ADMIN.
pub(crate) fn program_by_id(id: u32) -> io::Result<OwnedFd> {
    call_for_fd(bpf_cmd::BPF_PROG_GET_FD_BY_ID, |attributes| {
        attributes.__bindgen_anon_6.__bindgen_anon_1.prog_id = id;
    })
}

/// A kernel structure filled by `BPF_OBJ_GET_INFO_BY_FD`.
///
/// # Safety
/// The type consists of integers only.
unsafe trait Info {}
// SAFETY: integers, and unions and arrays of them.
unsafe impl Info for bpf_link_info {}
// SAFETY: as above.
unsafe impl Info for bpf_map_info {}
// SAFETY: as above.
unsafe impl Info for bpf_prog_info {}

/// Returns the kernel's information about a link, map or program; unknown fields are zero.
fn object_info<T: Info>(object: BorrowedFd<'_>) -> io::Result<T> {
    // SAFETY: integers may be zero.
    let mut info: T = unsafe { mem::zeroed() };
    call(bpf_cmd::BPF_OBJ_GET_INFO_BY_FD, |attributes| {
        attributes.info.bpf_fd = number(object);
        attributes.info.info_len = u32::try_from(size_of::<T>()).expect("a few hundred bytes");
        attributes.info.info = &raw mut info as u64;
    })?;
    Ok(info)
}

/// Pins a map, program or link at `path` on a bpffs.
pub(crate) fn pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    call(bpf_cmd::BPF_OBJ_PIN, |attributes| {
        attributes.__bindgen_anon_4.pathname = path.as_ptr() as u64;
        attributes.__bindgen_anon_4.bpf_fd = number(object);
    })
}

pub(crate) fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    call_for_fd(bpf_cmd::BPF_OBJ_GET, |attributes| {
        attributes.__bindgen_anon_4.pathname = path.as_ptr() as u64
    })
}

/// Waits for an RCU grace period, after which every program run that began before this call has ended. Uses
/// `membarrier(MEMBARRIER_CMD_GLOBAL)` (kernel 4.3), which fails if `nohz_full` is in use.
pub(crate) fn rcu_grace_period() -> io::Result<()> {
    const GLOBAL: libc::c_long = 1;
    // SAFETY: membarrier takes no pointers.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, GLOBAL, 0, 0) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
