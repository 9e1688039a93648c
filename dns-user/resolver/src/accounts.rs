//! Users and groups named in the configuration.

use nix::unistd::{Group, User};

/// A user or group that does not exist on this machine.
#[derive(Debug, thiserror::Error)]
#[error("{key}: {kind} {name:?} does not exist on this machine; create it, or remove the key")]
pub(crate) struct NoAccount {
    /// Key that names the account.
    key: &'static str,
    kind: &'static str,
    name: String,
}

/// Returns the user named by `key`.
pub(crate) fn user(key: &'static str, name: &str) -> Result<User, NoAccount> {
    let missing = || NoAccount { key, kind: "user", name: name.to_owned() };
    User::from_name(name).ok().flatten().ok_or_else(missing)
}

/// Returns the group named by `key`.
pub(crate) fn group(key: &'static str, name: &str) -> Result<Group, NoAccount> {
    let missing = || NoAccount { key, kind: "group", name: name.to_owned() };
    Group::from_name(name).ok().flatten().ok_or_else(missing)
}
