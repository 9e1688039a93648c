//! Certificates of tests: a CA and what it issues.

use std::{fs, path::Path};

use anyhow::Result;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType,
};

/// A certificate authority of client and server certificates.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// The CA certificate, PEM.
    pub certificate: String,
    /// Its private key, PEM.
    pub key: String,
}

/// A certificate and its private key, PEM.
#[derive(Clone)]
pub struct Identity {
    pub certificate: String,
    pub key: String,
}

impl Authority {
    pub fn new(name: &str) -> Result<Self> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        Ok(Self {
            certificate: params.self_signed(&key)?.pem(),
            key: key.serialize_pem(),
            issuer: Issuer::new(params, key),
        })
    }

    /// Issues a certificate for client and server use, with a common name only, as directors do.
    pub fn issue(&self, common_name: &str) -> Result<Identity> {
        self.issue_with(common_name, |params| {
            params.extended_key_usages = vec![
                ExtendedKeyUsagePurpose::ServerAuth,
                ExtendedKeyUsagePurpose::ClientAuth,
            ];
        })
    }

    /// Issues a certificate without restrictions except those of `change`.
    pub fn issue_with(
        &self,
        common_name: &str,
        change: impl FnOnce(&mut CertificateParams),
    ) -> Result<Identity> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, common_name);
        change(&mut params);
        Ok(Identity {
            certificate: params.signed_by(&key, &self.issuer)?.pem(),
            key: key.serialize_pem(),
        })
    }

    /// Writes `ca.crt` and `ca.key`.
    pub fn write(&self, folder: &Path) -> Result<()> {
        fs::write(folder.join("ca.crt"), &self.certificate)?;
        Ok(fs::write(folder.join("ca.key"), &self.key)?)
    }
}

impl Identity {
    /// Writes `NAME.crt` and `NAME.key`.
    pub fn write(&self, folder: &Path, name: &str) -> Result<()> {
        fs::write(folder.join(format!("{name}.crt")), &self.certificate)?;
        Ok(fs::write(folder.join(format!("{name}.key")), &self.key)?)
    }
}

/// Writes a CA and its certificates for 127.0.0.1 with a director's kind of subject: of a nats-server (`nats`), the
/// director (`director`) and an agent (`a0`).
pub fn write_director_files(folder: &Path) -> Result<()> {
    let authority = Authority::new("ca")?;
    authority.write(folder)?;
    for (file, name) in [
        ("nats", "default.nats.bosh-internal"),
        ("director", "default.director.bosh-internal"),
        ("a0", "a0.agent.bosh-internal"),
    ] {
        let identity = authority.issue_with(name, |params| {
            // In the order of directors.
            params.distinguished_name = DistinguishedName::new();
            for (kind, text) in [
                (DnType::CountryName, "USA"),
                (DnType::OrganizationName, "Cloud Foundry"),
                (DnType::CommonName, name),
            ] {
                params.distinguished_name.push(kind, text);
            }
            params.subject_alt_names = vec![SanType::IpAddress([127, 0, 0, 1].into())];
        })?;
        identity.write(folder, file)?;
    }
    Ok(())
}
