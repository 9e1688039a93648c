//! Certificates of both ends of a health check.

use dns_core::config::TlsFiles;
use dns_health::HEALTH_NAME;
use tempfile::TempDir;
use whole_system_tests::{health::write_files, pki::Authority};

/// Server and client certificates, in separate folders.
pub(crate) struct Pki {
    pub(crate) server: TlsFiles,
    pub(crate) client: TlsFiles,
    _folders: [TempDir; 2],
}

/// Validity of a client's set of files.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Client {
    Good,
    Expired,
    NotYetValid,
    /// Trusts a CA that issued no certificate.
    OtherCa,
}

impl Pki {
    pub(crate) fn new(client: Client) -> Self {
        let [authority, other] = ["ca", "ca"].map(|name| Authority::new(name).unwrap());
        let folders = [TempDir::new().unwrap(), TempDir::new().unwrap()];
        let trusted = if matches!(client, Client::OtherCa) {
            &other
        } else {
            &authority
        };
        let write = |folder: &TempDir, validity, ca: &Authority| {
            let identity = authority.issue_with(HEALTH_NAME, |params| match validity {
                Client::Expired => params.not_after = rcgen::date_time_ymd(2020, 1, 1),
                Client::NotYetValid => params.not_before = rcgen::date_time_ymd(2100, 1, 1),
                Client::Good | Client::OtherCa => {}
            });
            write_files(folder.path(), &identity.unwrap(), &ca.certificate).unwrap()
        };
        Self {
            server: write(&folders[0], Client::Good, &authority),
            client: write(&folders[1], client, trusted),
            _folders: folders,
        }
    }
}
