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
    let group_list = accounts::groups_of(user).map_err(step("reading its groups"))?;
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

#[cfg(test)]
mod tests {
    use test_support::requirements;

    use super::*;
    use test_support::own_process;

    const NOBODY: u32 = 65_534;

    /// Returns the permitted and the effective capabilities of this thread.
    fn held() -> [CapsHashSet; 2] {
        [CapSet::Permitted, CapSet::Effective].map(|set| caps::read(None, set).unwrap())
    }

    /// Returns the capabilities of a set that are among these: a container may have only some of them.
    fn common(set: CapSet, others: &[Capability]) -> CapsHashSet {
        let mut held = caps::read(None, set).unwrap();
        held.retain(|capability| others.contains(capability));
        held
    }

    /// Returns whether this is the process in which the test with this name goes on; otherwise runs it there.
    fn is_in_own_process(name: &str) -> bool {
        if own_process::is_here() {
            return true;
        }
        let nobody = User::from_uid(Uid::from_raw(NOBODY)).unwrap();
        let nobody = nobody.map(drop).ok_or("no user has its number");
        if requirements::root() && requirements::met("the rights of nobody", nobody) {
            own_process::run(&mut own_process::command(module_path!(), name));
        }
        false
    }

    fn nobody() -> User {
        User::from_uid(Uid::from_raw(NOBODY)).unwrap().unwrap()
    }

    #[test]
    fn server_keeps_port_right_only() {
        if !is_in_own_process("server_keeps_port_right_only") {
            return;
        }
        let before = held();
        let serving = common(CapSet::Permitted, &SERVING);
        let bounding = common(CapSet::Bounding, &SERVING);
        keep_for_serving(None).unwrap();
        assert_eq!(held(), before, "root may write a report anywhere");
        let remark = remaining_root().unwrap();
        assert!(
            remark.starts_with("the server runs as root: ")
                && remark.ends_with("set xdp.user to another user"),
            "{remark}"
        );
        let problem = keep_for_serving(Some("no-such-user")).unwrap_err();
        assert_eq!(
            problem.to_string(),
            "xdp.user: user \"no-such-user\" does not exist on this machine; create it, or remove the key"
        );

        keep_for_serving(Some(&nobody().name)).unwrap();
        assert_eq!(held(), [serving.clone(), serving.clone()]);
        assert_eq!(caps::read(None, CapSet::Bounding).unwrap(), bounding);
        assert_eq!(
            caps::read(None, CapSet::Inheritable).unwrap(),
            CapsHashSet::new()
        );
        let ids = unistd::getresuid().unwrap();
        assert_eq!([ids.real, ids.effective, ids.saved], [nobody().uid; 3]);
        let ids = unistd::getresgid().unwrap();
        assert_eq!([ids.real, ids.effective, ids.saved], [nobody().gid; 3]);
        assert_eq!(unistd::getgroups().unwrap(), [nobody().gid]);
        assert_eq!(remaining_root(), None);

        // A process that has switched already needs no privilege to stay.
        keep_for_serving(Some(&nobody().name)).unwrap();
        assert_eq!(held(), [serving.clone(), serving]);
        let problem = keep_for_serving(Some("root")).unwrap_err();
        assert_eq!(
            problem.to_string(),
            "xdp.user: only root can switch to \"root\"; start as root or remove xdp.user"
        );
    }

    #[test]
    fn attacher_keeps_needed_capabilities() {
        if !is_in_own_process("attacher_keeps_needed_capabilities") {
            return;
        }
        let [permitted, _] = held();
        let kept = common(CapSet::Permitted, &ATTACHING);
        let bounding = common(CapSet::Bounding, &ATTACHING);
        let root = User::from_uid(Uid::from_raw(0)).unwrap().unwrap();
        keep_for_watching().unwrap();
        assert_eq!(held()[0], permitted, "root keeps all");
        keep_for_attaching(Some(&nobody())).unwrap();
        assert_eq!(held(), [kept.clone(), kept]);
        assert_eq!(Uid::effective(), nobody().uid);
        assert_eq!(caps::read(None, CapSet::Bounding).unwrap(), bounding);
        let problem = keep_for_attaching(Some(&root)).unwrap_err();
        assert!(problem.to_string().contains("\"root\""), "{problem}");
        // A server that was started with the attacher's capabilities.
        keep_for_serving(None).unwrap();
        assert_eq!(held(), [CapsHashSet::new(), CapsHashSet::new()]);
    }

    #[test]
    fn watcher_drops_initial_capabilities() {
        if !is_in_own_process("watcher_drops_initial_capabilities") {
            return;
        }
        keep_for_attaching(Some(&nobody())).unwrap();
        keep_for_watching().unwrap();
        assert_eq!(held(), [CapsHashSet::new(), CapsHashSet::new()]);
    }

    #[test]
    fn attacher_of_root_stays_root() {
        if !is_in_own_process("attacher_of_root_stays_root") {
            return;
        }
        let kept = common(CapSet::Permitted, &ATTACHING);
        keep_for_attaching(None).unwrap();
        assert_eq!(held(), [kept.clone(), kept]);
        assert!(Uid::effective().is_root());
    }
}
