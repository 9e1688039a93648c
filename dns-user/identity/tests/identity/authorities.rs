//! CAs created by openssl, valid and defective.

use std::{fs, path::PathBuf};

use tempfile::TempDir;

use crate::tools::{openssl, openssl_at, text};

/// Extensions of a valid CA.
pub(crate) const SOUND: &str = "basicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign,cRLSign\nsubjectKeyIdentifier=hash\n";

/// A CA in a temporary folder.
pub(crate) struct TestAuthority {
    folder: TempDir,
}

/// Type of a CA's key, as an argument of openssl's `-newkey`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CaKey {
    Rsa,
    P256,
    P384,
}

impl TestAuthority {
    /// A valid P-256 CA with a lifetime of ten years.
    pub(crate) fn new(name: &str) -> Self {
        Self::with(name, SOUND, CaKey::P256, 3650)
    }

    /// Like [`Self::new`], a day old: valid for processes with slow clocks.
    pub(crate) fn aged(name: &str) -> Self {
        Self::at(-86_400, name, SOUND, CaKey::P256, 3650)
    }

    /// A self-signed CA.
    pub(crate) fn with(name: &str, extensions: &str, key: CaKey, days: i32) -> Self {
        Self::at(0, name, extensions, key, days)
    }

    fn at(ahead: i64, name: &str, extensions: &str, key: CaKey, days: i32) -> Self {
        let this = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        this.make_key(key);
        let config = this.config(name, extensions);
        let days = days.to_string();
        let mut arguments = vec![
            "req",
            "-x509",
            "-config",
            text(&config),
            "-extensions",
            "ca",
            "-days",
            &days,
        ];
        let (key, certificate) = (this.key_path(), this.certificate_path());
        arguments.extend(["-key", text(&key), "-out", text(&certificate)]);
        openssl_at(ahead, &arguments, b"").unwrap();
        this
    }

    /// An intermediate CA, signed by this one; its file holds the chain.
    pub(crate) fn intermediate(&self, name: &str, extensions: &str) -> Self {
        let below = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        below.make_key(CaKey::P256);
        let (config, key, certificate) = (
            below.config(name, extensions),
            below.key_path(),
            below.certificate_path(),
        );
        let request = openssl(
            &["req", "-new", "-config", text(&config), "-key", text(&key)],
            b"",
        )
        .unwrap();
        let (ca, ca_key) = (self.certificate_path(), self.key_path());
        let arguments = [
            "x509",
            "-req",
            "-CA",
            text(&ca),
            "-CAkey",
            text(&ca_key),
            "-set_serial",
            "7",
            "-days",
            "3650",
            "-extfile",
            text(&config),
            "-extensions",
            "ca",
            "-out",
            text(&certificate),
        ];
        openssl(&arguments, request.as_bytes()).unwrap();
        let chain = fs::read_to_string(&certificate).unwrap() + &self.certificate();
        fs::write(&certificate, chain).unwrap();
        below
    }

    fn make_key(&self, key: CaKey) {
        let path = self.key_path();
        let arguments: &[&str] = match key {
            CaKey::Rsa => &["genrsa", "-traditional", "-out", text(&path), "2048"],
            CaKey::P256 => &[
                "genpkey",
                "-algorithm",
                "EC",
                "-pkeyopt",
                "ec_paramgen_curve:P-256",
                "-out",
                text(&path),
            ],
            CaKey::P384 => &[
                "genpkey",
                "-algorithm",
                "EC",
                "-pkeyopt",
                "ec_paramgen_curve:P-384",
                "-out",
                text(&path),
            ],
        };
        openssl(arguments, b"").unwrap();
    }

    fn config(&self, name: &str, extensions: &str) -> PathBuf {
        let path = self.folder.path().join("openssl.cnf");
        let config = format!(
            "[req]\ndistinguished_name=dn\nprompt=no\nstring_mask=utf8only\n[dn]\nCN={name}\n[ca]\n{extensions}"
        );
        fs::write(&path, config).unwrap();
        path
    }

    pub(crate) fn certificate_path(&self) -> PathBuf {
        self.folder.path().join("ca.crt")
    }

    pub(crate) fn key_path(&self) -> PathBuf {
        self.folder.path().join("ca.key")
    }

    pub(crate) fn certificate(&self) -> String {
        fs::read_to_string(self.certificate_path()).unwrap()
    }

    pub(crate) fn key(&self) -> Vec<u8> {
        fs::read(self.key_path()).unwrap()
    }
}
