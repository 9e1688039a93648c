//! Becoming another user, with no more than the capabilities that are still needed.
//!
//! Done before the first thread is started: capabilities belong to threads, and a
//! later drop would leave those already running with more.

use std::path::Path;

use caps::{CapSet, Capability, CapsHashSet};
use nix::unistd::{self, Uid, User};

use dns_core::config::XdpConfig;

/// Why privileges could not be dropped.
#[derive(Debug, thiserror::Error)]
pub(super) enum PrivilegesError {
    /// The user database does not know it.
    #[error("xdp.user: there is no user {0:?}; allowed is a name of /etc/passwd")]
    NoSuchUser(String),
    /// Only root can become somebody else.
    #[error("xdp.user: only root can become {0:?}; start as root or leave xdp.user out")]
    NotRoot(String),
    /// A system call failed.
    #[error("xdp.user: {what}: {reason}")]
    Failed {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        reason: String,
    },
}

/// Becomes `config.user`, if there is one.
///
/// Kept: CAP_NET_BIND_SERVICE for port 53, and with a fast path CAP_BPF,
/// CAP_NET_ADMIN and CAP_PERFMON (Linux 5.8) for loading, attaching to interfaces
/// that come later, and map updates (kernels before 5.16 ask CAP_BPF for those too
/// while unprivileged BPF is disabled).
pub(super) fn drop_to_user(config: &XdpConfig, fast_path: bool) -> Result<(), PrivilegesError> {
    let Some(name) = &config.user else { return Ok(()) };
    let user =
        User::from_name(name).ok().flatten().ok_or_else(|| PrivilegesError::NoSuchUser(name.clone()))?;
    if user.uid == Uid::effective() {
        return Ok(());
    }
    if !Uid::effective().is_root() {
        return Err(PrivilegesError::NotRoot(name.clone()));
    }
    if fast_path {
        hand_over(&config.bpffs, &user);
    }
    become_user(&user, &needed(fast_path))
}

/// Becomes `user` if there is one, with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON and no others, for good.
pub(super) fn keep_for_attaching(user: Option<&User>) -> Result<(), PrivilegesError> {
    let mut needed = needed(true);
    needed.remove(&Capability::CAP_NET_BIND_SERVICE);
    match user.filter(|user| user.uid != Uid::effective()) {
        Some(user) if !Uid::effective().is_root() => Err(PrivilegesError::NotRoot(user.name.clone())),
        Some(user) => become_user(user, &needed),
        None => keep_only(&needed),
    }
}

/// Becomes another user with these capabilities.
fn become_user(user: &User, needed: &CapsHashSet) -> Result<(), PrivilegesError> {
    let failed =
        |what| move |reason: nix::Error| PrivilegesError::Failed { what, reason: reason.to_string() };
    // Only root may leave the bounding set.
    bound(needed)?;
    // Permitted capabilities survive the change of user, effective ones do not.
    nix::sys::prctl::set_keepcaps(true).map_err(failed("keeping capabilities"))?;
    let group_list =
        unistd::getgrouplist(&std::ffi::CString::new(user.name.as_str()).unwrap_or_default(), user.gid)
            .map_err(failed("reading its groups"))?;
    unistd::setgroups(&group_list).map_err(failed("setting its groups"))?;
    unistd::setresgid(user.gid, user.gid, user.gid).map_err(failed("setting its group"))?;
    unistd::setresuid(user.uid, user.uid, user.uid).map_err(failed("setting the user"))?;
    nix::sys::prctl::set_keepcaps(false).map_err(failed("keeping capabilities"))?;
    keep_only(needed)
}

/// Takes all other capabilities out of the bounding set: no program that is ever executed gets them.
/// Without CAP_SETPCAP, as under systemd, the set stays as it is.
fn bound(needed: &CapsHashSet) -> Result<(), PrivilegesError> {
    if !caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP).map_err(failed)? {
        return Ok(());
    }
    let bounding = caps::read(None, CapSet::Bounding).map_err(failed)?;
    bounding
        .difference(needed)
        .try_for_each(|&given_up| caps::drop(None, CapSet::Bounding, given_up))
        .map_err(failed)
}

fn failed(reason: caps::errors::CapsError) -> PrivilegesError {
    PrivilegesError::Failed { what: "giving up capabilities", reason: reason.to_string() }
}

/// The capabilities that work goes on with.
fn needed(fast_path: bool) -> CapsHashSet {
    let mut needed = CapsHashSet::from([Capability::CAP_NET_BIND_SERVICE]);
    if fast_path {
        needed.extend([Capability::CAP_BPF, Capability::CAP_NET_ADMIN, Capability::CAP_PERFMON]);
    }
    needed
}

/// Gives up all other capabilities of this thread.
fn keep_only(needed: &CapsHashSet) -> Result<(), PrivilegesError> {
    bound(needed)?;
    let permitted = caps::read(None, CapSet::Permitted).map_err(failed)?;
    let kept: CapsHashSet = permitted.intersection(needed).copied().collect();
    caps::set(None, CapSet::Effective, &kept).map_err(failed)?;
    caps::set(None, CapSet::Permitted, &kept).map_err(failed)?;
    // Ambient ones go with them.
    caps::set(None, CapSet::Inheritable, &CapsHashSet::new()).map_err(failed)
}

/// Makes the folder for pins while we still may (mounting a bpffs needs
/// CAP_SYS_ADMIN), and gives it and what a server before left there to the user.
fn hand_over(folder: &Path, user: &User) {
    // Without pins there is a fast path all the same; it says so itself.
    if let Err(problem) = dns_fastpath::prepare_pins(folder, Some((user.uid.as_raw(), user.gid.as_raw()))) {
        tracing::warn!("xdp.bpffs: cannot make {:?} its owner: {problem}", user.name);
    }
}
