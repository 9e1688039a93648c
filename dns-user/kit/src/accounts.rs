//! Users and groups that the configuration names.

use std::ffi::CString;

use nix::{
    errno::Errno,
    unistd::{Gid, Group, User, getgrouplist},
};

/// A user or group that does not exist on this machine.
#[derive(Debug, thiserror::Error)]
#[error("{key}: {kind} {name:?} does not exist on this machine; create it, or remove the key")]
pub struct NoAccount {
    /// Key that names the account.
    key: &'static str,
    kind: &'static str,
    name: String,
}

/// Returns the user that a key of config.json names.
pub fn user(key: &'static str, name: &str) -> Result<User, NoAccount> {
    User::from_name(name)
        .ok()
        .flatten()
        .ok_or_else(|| NoAccount {
            key,
            kind: "user",
            name: name.to_owned(),
        })
}

/// Returns the group that a key of config.json names.
pub fn group(key: &'static str, name: &str) -> Result<Group, NoAccount> {
    Group::from_name(name)
        .ok()
        .flatten()
        .ok_or_else(|| NoAccount {
            key,
            kind: "group",
            name: name.to_owned(),
        })
}

/// Returns the groups of a user, the supplementary ones included.
pub fn groups_of(user: &User) -> nix::Result<Vec<Gid>> {
    let name = CString::new(user.name.as_str()).map_err(|_| Errno::EINVAL)?;
    getgrouplist(&name, user.gid)
}
