//! Certificates of both ends of a health check.

use std::fs;

use dns_core::config::TlsFiles;
use dns_health::HEALTH_NAME;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

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
        let (authority, other) = (Authority::new(), Authority::new());
        let folders = [TempDir::new().unwrap(), TempDir::new().unwrap()];
        let trusted = if matches!(client, Client::OtherCa) {
            &other
        } else {
            &authority
        };
        let write = |folder: &TempDir, validity, ca: &Authority| {
            let (certificate, key) = authority.issue(validity);
            let file = |name: &str, text: &str| {
                let path = folder.path().join(name);
                fs::write(&path, text).unwrap();
                path
            };
            TlsFiles {
                certificate: file("certificate.pem", &certificate),
                private_key: file("key.pem", &key),
                ca: file("ca.pem", &ca.pem),
            }
        };
        Self {
            server: write(&folders[0], Client::Good, &authority),
            client: write(&folders[1], client, trusted),
            _folders: folders,
        }
    }
}

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "ca");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            issuer: Issuer::new(params, key),
            pem,
        }
    }

    fn issue(&self, validity: Client) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, HEALTH_NAME);
        match validity {
            Client::Expired => params.not_after = rcgen::date_time_ymd(2020, 1, 1),
            Client::NotYetValid => params.not_before = rcgen::date_time_ymd(2100, 1, 1),
            Client::Good | Client::OtherCa => {}
        }
        (
            params.signed_by(&key, &self.issuer).unwrap().pem(),
            key.serialize_pem(),
        )
    }
}
