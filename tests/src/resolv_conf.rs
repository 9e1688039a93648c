//! The C library's resolver configuration, for programs run by `ip netns exec`.

use std::{fs, net::IpAddr, path::PathBuf};

use anyhow::Result;

use crate::namespace::Namespace;

/// Replacement of `/etc/resolv.conf` in a namespace, removed on drop.
#[derive(Debug)]
pub struct ResolvConf(PathBuf);

impl ResolvConf {
    /// Configures one server for programs run by `ip netns exec`.
    pub fn new(namespace: &Namespace, server: IpAddr) -> Result<Self> {
        let folder = PathBuf::from("/etc/netns").join(namespace.name());
        fs::create_dir_all(&folder)?;
        let file = Self(folder);
        fs::write(
            file.0.join("resolv.conf"),
            format!("nameserver {server}\noptions timeout:2 attempts:3\n"),
        )?;
        Ok(file)
    }
}

impl Drop for ResolvConf {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("{}: {error}", self.0.display());
        }
    }
}
