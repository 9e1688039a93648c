//! The observed process: found by its socket, measured by /proc.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
    time::Duration,
};

use dns_core::config::wildcard_receives;
use dns_kit::metrics;

/// Maximum number of processes, and of descriptors of each, that are looked at.
const MAX_PROCESSES: usize = 32_768;
const MAX_DESCRIPTORS: usize = 65_536;

/// A process that has one of the observed sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Number of the process.
    pub number: i32,
    /// Name of its program.
    pub name: String,
}

impl Process {
    /// Finds the process that receives datagrams at one of these addresses; `None` if it is not visible, as in another
    /// network namespace or without the right to see its descriptors.
    pub fn of(addresses: &[SocketAddr]) -> Option<Self> {
        Self::with_socket(&["udp", "udp6"], |local| {
            addresses.iter().any(|address| {
                local.port() == address.port()
                    && (local.ip() == address.ip() || wildcard_receives(local, address.ip(), &[]))
            })
        })
    }

    /// Finds a process with a socket in one of these tables of /proc/net whose local address `fits`; `None` if it is
    /// not visible.
    pub fn with_socket(tables: &[&str], fits: impl Fn(SocketAddr) -> bool) -> Option<Self> {
        let mut inodes = Vec::new();
        for table in tables {
            let text = fs::read_to_string(format!("/proc/net/{table}")).unwrap_or_default();
            inodes.extend(sockets(&text, &fits));
        }
        // Looking at every process would find none.
        if inodes.is_empty() {
            return None;
        }
        let numbers = fs::read_dir("/proc").ok()?.flatten().take(MAX_PROCESSES);
        for entry in numbers {
            let Some(number) = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok())
            else {
                continue;
            };
            if has_socket(&entry.path(), &inodes) {
                // It may have ended since; its number is of use without a name, too.
                let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
                return Some(Self {
                    number,
                    name: name.trim_end().to_owned(),
                });
            }
        }
        None
    }

    /// Returns the CPU time that it has used; `None` if it has ended.
    pub fn cpu(&self) -> Option<Duration> {
        metrics::cpu_time(self.number)
    }
}

/// Returns the inodes of the sockets in a table whose local address fits.
fn sockets(table: &str, fits: &impl Fn(SocketAddr) -> bool) -> Vec<String> {
    let mut inodes = Vec::new();
    for line in table.lines().skip(1) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // The fields `local_address` and `inode` of proc_pid_net(5).
        let &[_, local, _, _, _, _, _, _, _, inode, ..] = &fields[..] else {
            continue;
        };
        if let Some(local) = endpoint(local)
            && fits(local)
        {
            inodes.push(format!("socket:[{inode}]"));
        }
    }
    inodes
}

/// Reads an endpoint such as `0100007F:0035`: words of the address in the machine's order.
fn endpoint(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let mut octets = Vec::new();
    for at in (0..address.len()).step_by(8) {
        let word = u32::from_str_radix(address.get(at..at + 8)?, 16).ok()?;
        // The kernel prints each word of the address as a number of this machine (proc_pid_net(5)).
        octets.extend(word.to_ne_bytes());
    }
    let ip = match octets.len() {
        4 => IpAddr::from(Ipv4Addr::from(<[u8; 4]>::try_from(octets).ok()?)),
        16 => IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(octets).ok()?)),
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

fn has_socket(process: &Path, inodes: &[String]) -> bool {
    // Another user's process shows its descriptors only to those with the right to trace it (proc_pid_fd(5)).
    let Ok(descriptors) = fs::read_dir(process.join("fd")) else {
        return false;
    };
    for descriptor in descriptors.flatten().take(MAX_DESCRIPTORS) {
        if let Ok(target) = fs::read_link(descriptor.path())
            && let Some(target) = target.to_str()
            && inodes.iter().any(|inode| inode == target)
        {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn the_owner_of_a_socket_is_found_and_measured() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let process = Process::of(&[socket.local_addr().unwrap()]).unwrap();
        assert_eq!(process.number, std::process::id() as i32);
        assert!(process.cpu().is_some());
        drop(socket);
    }

    #[test]
    fn endpoints_are_hexadecimal() {
        assert_eq!(endpoint("0100007F:0035"), "127.0.0.1:53".parse().ok());
        assert_eq!(endpoint("zz:0035"), None);
    }
}
