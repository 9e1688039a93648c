//! Switches to another user, keeping only the capabilities that are still needed.
//!
//! This must happen before the first thread starts: capabilities are per thread, and running
//! threads would keep theirs.

use anyhow::{anyhow, bail};
use caps::{CapSet, Capability, CapsHashSet};
use nix::unistd::{self, Uid, User};

use crate::accounts;

/// Capabilities of the server: CAP_NET_BIND_SERVICE, because listen addresses may be added at any
/// time.
const SERVING: [Capability; 1] = [Capability::CAP_NET_BIND_SERVICE];

/// Capabilities of the attacher (Linux 5.8).
const ATTACHING: [Capability; 3] = [
    Capability::CAP_BPF,
    Capability::CAP_NET_ADMIN,
    Capability::CAP_PERFMON,
];

/// Drops all capabilities but CAP_NET_RAW, unless it runs as root, which may write a report into any user's folder.
pub fn keep_for_watching() -> anyhow::Result<()> {
    if Uid::effective().is_root() {
        return Ok(());
    }
    keep_only(&[Capability::CAP_NET_RAW].into())
}

/// Drops all privileges that the server does not need: switches to `user`, if given, keeping only
/// [`SERVING`]; otherwise drops the capabilities of the attacher, unless running as root.
pub fn keep_for_serving(user: Option<&str>) -> anyhow::Result<()> {
    let Some(name) = user else {
        if Uid::effective().is_root() {
            return Ok(());
        }
        let held = caps::read(None, CapSet::Permitted).map_err(failed)?;
        return keep_only(&held.difference(&ATTACHING.into()).copied().collect());
    };
    let user = accounts::user("xdp.user", name)?;
    if user.uid == Uid::effective() {
        Ok(())
    } else {
        become_user(&user, &SERVING.into())
    }
}

/// Returns a remark if this process is still root.
pub fn remaining_root() -> Option<String> {
    if !Uid::effective().is_root() {
        return None;
    }
    let remark = "the server runs as root: if it were compromised, root's files could be read and written; set \
                  xdp.user to another user";
    Some(remark.to_owned())
}

/// Drops all privileges that the attacher does not need: switches to `user`, if given, and
/// permanently keeps only [`ATTACHING`].
pub fn keep_for_attaching(user: Option<&User>) -> anyhow::Result<()> {
    match user.filter(|user| user.uid != Uid::effective()) {
        Some(user) => become_user(user, &ATTACHING.into()),
        None => keep_only(&ATTACHING.into()),
    }
}

fn become_user(user: &User, needed: &CapsHashSet) -> anyhow::Result<()> {
    if !Uid::effective().is_root() {
        bail!(
            "xdp.user: only root can switch to {:?}; start as root or remove xdp.user",
            user.name
        );
    }
    // Dropping from the bounding set requires root.
    shrink_bounding_set(needed)?;
    // Permitted capabilities survive the switch, effective ones do not.
    nix::sys::prctl::set_keepcaps(true).map_err(step("keeping capabilities"))?;
    let name = std::ffi::CString::new(user.name.as_str()).unwrap_or_default();
    let group_list = unistd::getgrouplist(&name, user.gid).map_err(step("reading its groups"))?;
    // The groups first: the user may not set them.
    unistd::setgroups(&group_list).map_err(step("setting its groups"))?;
    unistd::setresgid(user.gid, user.gid, user.gid).map_err(step("setting its group"))?;
    unistd::setresuid(user.uid, user.uid, user.uid).map_err(step("setting the user"))?;
    nix::sys::prctl::set_keepcaps(false).map_err(step("keeping capabilities"))?;
    keep_only(needed)
}

/// Returns the error of a step of the switch.
fn step(what: &str) -> impl FnOnce(nix::Error) -> anyhow::Error {
    move |reason| anyhow!("xdp.user: {what}: {reason}")
}

/// Removes all other capabilities from the bounding set, so that no executed program gains them.
/// Without CAP_SETPCAP, as under systemd, the set is left unchanged.
fn shrink_bounding_set(needed: &CapsHashSet) -> anyhow::Result<()> {
    if !caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP).map_err(failed)? {
        return Ok(());
    }
    let bounding = caps::read(None, CapSet::Bounding).map_err(failed)?;
    bounding
        .difference(needed)
        .try_for_each(|&given_up| caps::drop(None, CapSet::Bounding, given_up))
        .map_err(failed)
}

fn failed(reason: caps::errors::CapsError) -> anyhow::Error {
    anyhow!("xdp.user: giving up capabilities: {reason}")
}

/// Drops all other capabilities of this thread.
fn keep_only(needed: &CapsHashSet) -> anyhow::Result<()> {
    shrink_bounding_set(needed)?;
    let permitted = caps::read(None, CapSet::Permitted).map_err(failed)?;
    let kept: CapsHashSet = permitted.intersection(needed).copied().collect();
    caps::set(None, CapSet::Effective, &kept).map_err(failed)?;
    caps::set(None, CapSet::Permitted, &kept).map_err(failed)?;
    // Clearing inheritable capabilities also clears ambient ones.
    caps::set(None, CapSet::Inheritable, &CapsHashSet::new()).map_err(failed)
}
