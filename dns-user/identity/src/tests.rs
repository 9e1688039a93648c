//! Authorities and a rotator for unit tests, on a simulated clock.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    authority::CaFiles,
    keys::{KeyPool, KeyType, Priority},
    profile::{Container, Guid},
    rotator::{Next, Rotator, RotatorSettings},
};

pub(crate) const HOUR: Duration = Duration::from_secs(3600);

/// 2033-05-18 03:33:20 UTC.
pub(crate) const START: u64 = 2_000_000_000;

pub(crate) fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

/// A CA with its chain and key in PEM.
pub(crate) struct TestCa {
    pub(crate) chain: String,
    pub(crate) key: String,
    pub(crate) params: CertificateParams,
}

impl TestCa {
    /// Creates a self-signed CA that is valid from 1975 to 4095.
    pub(crate) fn new(name: &str) -> Self {
        Self::with(name, |_| {})
    }

    /// Creates a self-signed CA with a change.
    pub(crate) fn with(name: &str, change: impl FnOnce(&mut CertificateParams)) -> Self {
        let (key, params) = Self::prepare(name, change);
        let chain = unix_lines(&params.self_signed(&key).unwrap().pem());
        Self {
            chain,
            key: key.serialize_pem(),
            params,
        }
    }

    /// Creates a CA below this one; its chain has both.
    pub(crate) fn below(&self, name: &str, change: impl FnOnce(&mut CertificateParams)) -> Self {
        let (key, params) = Self::prepare(name, change);
        let issuing = KeyPair::from_pem(&self.key).unwrap();
        let issuer = Issuer::from_params(&self.params, issuing);
        let own = unix_lines(&params.signed_by(&key, &issuer).unwrap().pem());
        Self {
            chain: own + &self.chain,
            key: key.serialize_pem(),
            params,
        }
    }

    fn prepare(
        name: &str,
        change: impl FnOnce(&mut CertificateParams),
    ) -> (KeyPair, CertificateParams) {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        change(&mut params);
        (KeyPair::generate().unwrap(), params)
    }

    /// Writes `ca.crt` and `ca.key`.
    pub(crate) fn write(&self, folder: &Path) -> CaFiles {
        let files = CaFiles {
            certificate: folder.join("ca.crt"),
            key: folder.join("ca.key"),
        };
        replace(&files.key, &self.key);
        replace(&files.certificate, &self.chain);
        files
    }
}

/// Replaces a file by a rename, so that even two changes within the resolution of time stamps are noticed.
pub(crate) fn replace(path: &Path, text: &str) {
    let next = path.with_extension("next");
    fs::write(&next, text).unwrap();
    fs::rename(next, path).unwrap();
}

fn unix_lines(text: &str) -> String {
    text.replace("\r\n", "\n")
}

/// Parses a description.
pub(crate) fn container(value: Value) -> Container {
    serde_json::from_value(value).unwrap()
}

pub(crate) fn guid(name: &str) -> Guid {
    Guid::try_from(name.to_owned()).unwrap()
}

/// A rotator in a new folder.
pub(crate) struct World {
    pub(crate) folder: TempDir,
    pub(crate) ca: TestCa,
    pub(crate) files: CaFiles,
    pub(crate) rotator: Rotator,
    /// Seconds since 1970.
    pub(crate) now: u64,
}

/// Returns the settings of [`World`]'s rotator.
pub(crate) fn settings(folder: &Path) -> RotatorSettings {
    RotatorSettings {
        folder: folder.join("identities"),
        validity: 24 * HOUR,
        backdate: Duration::from_secs(300),
        envoy: false,
        also_trust: Vec::new(),
        keep_old_ca: Duration::ZERO,
    }
}

pub(crate) fn pool(size: usize) -> KeyPool {
    let pool = KeyPool::start(KeyType::P256, size, Priority::Normal).unwrap();
    wait_for_keys(&pool);
    pool
}

fn wait_for_keys(pool: &KeyPool) {
    while !pool.wait(pool.size(), Duration::from_secs(60)) {}
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with(|_| {})
    }

    pub(crate) fn with(change: impl FnOnce(&mut RotatorSettings)) -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let ca = TestCa::new("first");
        let files = ca.write(folder.path());
        let mut settings = settings(folder.path());
        change(&mut settings);
        let rotator = Rotator::open(settings, files.clone(), pool(2), at(START)).unwrap();
        Self {
            folder,
            ca,
            files,
            rotator,
            now: START,
        }
    }

    pub(crate) fn create(&mut self, description: Value) {
        let done = self.rotator.create(container(description), at(self.now));
        done.unwrap();
    }

    /// Creates identities without more than an id.
    pub(crate) fn create_all(&mut self, guids: &[&str]) {
        for guid in guids {
            self.create(json!({ "guid": guid }));
        }
    }

    pub(crate) fn path(&self, guid: &str) -> PathBuf {
        self.folder.path().join("identities").join(guid)
    }

    pub(crate) fn read(&self, guid: &str, file: &str) -> String {
        fs::read_to_string(self.path(guid).join(file)).unwrap()
    }

    /// Does what is due at a time; keys are generated in real time, for which the clock waits.
    pub(crate) fn step(&mut self, now: u64) -> Next {
        self.now = now;
        loop {
            wait_for_keys(&self.rotator.pool);
            let next = self.rotator.step(at(now));
            if !matches!(next, Next::Key) && next != Next::At(at(now)) {
                return next;
            }
        }
    }
}
