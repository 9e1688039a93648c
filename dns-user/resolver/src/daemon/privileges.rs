//! Switches to another user, keeping only the capabilities that are still needed.
//!
//! This happens before the first thread starts: capabilities are per thread, and threads already
//! running would keep theirs.

use std::path::Path;

use caps::{CapSet, Capability, CapsHashSet};
use nix::unistd::{self, Uid, User};

use dns_core::config::XdpConfig;

/// Failure to drop privileges.
#[derive(Debug, thiserror::Error)]
pub(super) enum PrivilegesError {
    /// The user does not exist.
    #[error("xdp.user: there is no user {0:?}; allowed is a name of /etc/passwd")]
    NoSuchUser(String),
    /// Only root can switch users.
    #[error("xdp.user: only root can become {0:?}; start as root or leave xdp.user out")]
    NotRoot(String),
    /// A system call failed.
    #[error("xdp.user: {what}: {reason}")]
    Failed { what: &'static str, reason: String },
}

/// Switches to `config.user`, if set.
///
/// Keeps CAP_NET_BIND_SERVICE for port 53 and, with a fast path, CAP_BPF, CAP_NET_ADMIN and
/// CAP_PERFMON (Linux 5.8) for loading, for attaching to interfaces that appear later, and for map
/// updates (kernels before 5.16 require CAP_BPF for those too while unprivileged BPF is disabled).
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

/// Switches to `user`, if given, permanently keeping only CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON.
pub(super) fn keep_for_attaching(user: Option<&User>) -> Result<(), PrivilegesError> {
    let mut needed = needed(true);
    needed.remove(&Capability::CAP_NET_BIND_SERVICE);
    match user.filter(|user| user.uid != Uid::effective()) {
        Some(user) if !Uid::effective().is_root() => Err(PrivilegesError::NotRoot(user.name.clone())),
        Some(user) => become_user(user, &needed),
        None => keep_only(&needed),
    }
}

/// Switches to `user` with the given capabilities.
fn become_user(user: &User, needed: &CapsHashSet) -> Result<(), PrivilegesError> {
    let failed =
        |what| move |reason: nix::Error| PrivilegesError::Failed { what, reason: reason.to_string() };
    // Dropping from the bounding set requires root.
    bound(needed)?;
    // Permitted capabilities survive the switch, effective ones do not.
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

/// Removes all other capabilities from the bounding set, so that no executed program gains them.
/// Without CAP_SETPCAP, as under systemd, the set is left unchanged.
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

/// Returns the capabilities needed at runtime.
fn needed(fast_path: bool) -> CapsHashSet {
    let mut needed = CapsHashSet::from([Capability::CAP_NET_BIND_SERVICE]);
    if fast_path {
        needed.extend([Capability::CAP_BPF, Capability::CAP_NET_ADMIN, Capability::CAP_PERFMON]);
    }
    needed
}

/// Drops all other capabilities of this thread.
fn keep_only(needed: &CapsHashSet) -> Result<(), PrivilegesError> {
    bound(needed)?;
    let permitted = caps::read(None, CapSet::Permitted).map_err(failed)?;
    let kept: CapsHashSet = permitted.intersection(needed).copied().collect();
    caps::set(None, CapSet::Effective, &kept).map_err(failed)?;
    caps::set(None, CapSet::Permitted, &kept).map_err(failed)?;
    // Clearing inheritable capabilities clears ambient ones too.
    caps::set(None, CapSet::Inheritable, &CapsHashSet::new()).map_err(failed)
}

/// Creates the pin folder while mounting a bpffs (CAP_SYS_ADMIN) is still possible, and gives it and
/// its existing pins to the user.
fn hand_over(folder: &Path, user: &User) {
    // The fast path works without pins and logs that itself.
    if let Err(problem) = dns_fastpath::prepare_pins(folder, Some((user.uid.as_raw(), user.gid.as_raw()))) {
        tracing::warn!("xdp.bpffs: cannot change its owner to {:?}: {problem}", user.name);
    }
}
