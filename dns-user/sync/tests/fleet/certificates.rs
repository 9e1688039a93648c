//! Certificates with a director's subjects, which identify the parties.

use std::{fs, path::Path};

use anyhow::Result;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, KeyPair,
    SanType,
};

pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    /// Creates a CA; its certificate is written to `folder/ca.crt`.
    pub(crate) fn new(folder: &Path) -> Result<Self> {
        let mut params = CertificateParams::new(Vec::<String>::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name = subject("test ca");
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        fs::write(folder.join("ca.crt"), issuer.pem())?;
        Ok(Self { issuer })
    }

    /// Issues a certificate for 127.0.0.1 and this common name to `folder/<file>.crt` and `.key`.
    pub(crate) fn issue(&self, folder: &Path, file: &str, common_name: &str) -> Result<()> {
        self.issue_for(folder, file, common_name, Vec::new())
    }

    /// Like [`Self::issue`], with the common name also as a DNS name.
    pub(crate) fn issue_named(&self, folder: &Path, file: &str, common_name: &str) -> Result<()> {
        self.issue_for(
            folder,
            file,
            common_name,
            vec![SanType::DnsName(common_name.try_into()?)],
        )
    }

    /// Issues a certificate with alternative names besides 127.0.0.1.
    fn issue_for(
        &self,
        folder: &Path,
        file: &str,
        common_name: &str,
        more: Vec<SanType>,
    ) -> Result<()> {
        let mut params = CertificateParams::new(Vec::<String>::new())?;
        params.distinguished_name = subject(common_name);
        params.subject_alt_names = vec![SanType::IpAddress([127, 0, 0, 1].into())];
        params.subject_alt_names.extend(more);
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        fs::write(folder.join(format!("{file}.crt")), certificate.pem())?;
        Ok(fs::write(
            folder.join(format!("{file}.key")),
            key.serialize_pem(),
        )?)
    }
}

/// `C=USA, O=Cloud Foundry, CN=...`.
fn subject(common_name: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CountryName, "USA");
    name.push(DnType::OrganizationName, "Cloud Foundry");
    name.push(DnType::CommonName, common_name);
    name
}
