//! Health checks: of real TLS servers on loopback, by a whole server, and while certificates are renewed.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot set up its world has failed"
)]

mod checks;
mod renewals;
mod whole;

use std::{net::IpAddr, time::Duration};

use dns_core::{
    config::TlsFiles,
    resolve::{Checks, Existence, Resolution},
};
use dns_health::HEALTH_NAME;
use tempfile::TempDir;
use whole_system_tests::{health::write_files, pki::Authority};

/// Generous time limit for a busy machine.
const LIMIT: Duration = Duration::from_secs(600);

/// Certificates of one CA for both ends.
struct Pki {
    authority: Authority,
    /// Folders of server and client.
    folders: [TempDir; 2],
    files: [TlsFiles; 2],
}

impl Pki {
    /// Creates a CA with certificates for both ends.
    fn new() -> Self {
        let authority = Authority::new("ca").unwrap();
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let files = folders.each_ref().map(|folder| {
            let identity = authority.issue(HEALTH_NAME).unwrap();
            write_files(folder.path(), &identity, &authority.certificate).unwrap()
        });
        Self {
            authority,
            folders,
            files,
        }
    }
}

/// Returns the resolution of a name as far as the tracker reads it.
fn needs(instances: impl IntoIterator<Item = IpAddr>, synchronous: bool) -> Resolution {
    Resolution {
        existence: Existence::Found,
        v4: Vec::new(),
        v6: Vec::new(),
        checks: Checks {
            instances: instances.into_iter().collect(),
            tracked: true,
            synchronous,
        },
    }
}
