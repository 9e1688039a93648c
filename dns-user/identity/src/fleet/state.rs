//! Files of the issuer: CAs, the fleet's trust, its members and bootstrap tokens.
//!
//! ```text
//! authorities/FINGERPRINT/ca.crt, ca.key
//! trust.json, members.json, issuer.json, confirmed-removals.json
//! tokens/SHA-256-OF-THE-TOKEN.json
//! ```

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use aws_lc_rs::rand::{SecureRandom, SystemRandom};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use dns_kit::files::atomic::{self, Attributes};
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use zeroize::Zeroizing;

use super::{protocol::Members, trust::Trust};
use crate::{
    authority::{Authority, Fingerprint},
    ca_files::{CaError, CaFiles},
    certificate::seconds,
    folder::lock,
};

/// The issuer's state folder.
#[derive(Clone, Debug)]
pub struct StateFolder {
    path: PathBuf,
}

/// Error of a file in the state folder.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// A CA has a defect.
    #[error(transparent)]
    Authority(#[from] CaError),
    /// Reading or writing failed.
    #[error("{}: {cause}; check the issuer's folder of state", path.display())]
    File {
        /// Path of the file that failed.
        path: PathBuf,
        /// The system's error.
        cause: io::Error,
    },
    /// The folder is not an issuer's.
    #[error("{}: not the state folder of an issuer: it has no trust.json; correct the path", .0.display())]
    NoIssuer(PathBuf),
    /// Another issuer runs with the folder.
    #[error("{}: another issuer uses this folder; stop it, or choose another folder", .0.display())]
    InUse(PathBuf),
    /// The file is not JSON of the expected form.
    #[error("{}: {cause}; restore the file from a backup", path.display())]
    Json {
        /// Path of the malformed file.
        path: PathBuf,
        /// Position and cause of the syntax error.
        cause: serde_json::Error,
    },
    /// Replacing a file failed.
    #[error(transparent)]
    Replace(#[from] atomic::ReplaceError),
}

/// Reason for which a bootstrap token is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// The token was never created, or was used before.
    #[error("the bootstrap token is unknown or already used; create a new one")]
    Unknown,
    /// The token was created for another instance.
    #[error("the bootstrap token belongs to another instance; create one for this instance")]
    OtherInstance,
    /// The token's lifetime has ended.
    #[error("the bootstrap token expired; create a new one")]
    Expired,
}

/// Stored data of a token; the file name is the token's hash.
#[derive(Debug, Serialize, Deserialize)]
struct StoredToken {
    instance: String,
    expires: u64,
}

/// Settings of the issuer that other commands need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IssuerFacts {
    /// The fleet's records.json, an absolute path.
    pub records: PathBuf,
}

impl StateFolder {
    /// Opens the folder of an issuer; creates it with access for its owner only. The lock ends with
    /// the returned file.
    pub fn create(path: PathBuf) -> Result<(Self, Flock<File>), StateError> {
        let this = Self { path };
        for folder in [this.path.clone(), this.path.join("authorities"), this.path.join("tokens")] {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&folder)
                .map_err(|cause| StateError::File { path: folder, cause })?;
        }
        let locked = lock(&this.path).map_err(|cause| StateError::File { path: this.path.clone(), cause })?;
        let locked = locked.ok_or_else(|| StateError::InUse(this.path.clone()))?;
        Ok((this, locked))
    }

    /// Opens the folder of an existing issuer.
    pub fn open(path: PathBuf) -> Result<Self, StateError> {
        match path.join("trust.json").exists() {
            true => Ok(Self { path }),
            false => Err(StateError::NoIssuer(path)),
        }
    }

    /// Returns the settings of the last issuer; `None` before the first start of this version.
    pub fn facts(&self) -> Result<Option<IssuerFacts>, StateError> {
        self.read("issuer.json")
    }

    /// Replaces the settings if they differ.
    pub fn set_facts(&self, facts: &IssuerFacts) -> Result<(), StateError> {
        // A damaged file is replaced as well.
        if self.facts().ok().flatten().as_ref() == Some(facts) {
            return Ok(());
        }
        self.write("issuer.json", facts)
    }

    /// Confirms that up to `number` members may be removed at once.
    pub fn confirm_removals(&self, number: usize) -> Result<(), StateError> {
        self.write("confirmed-removals.json", &number)
    }

    /// Consumes a confirmation.
    pub fn take_confirmation(&self) -> Option<usize> {
        let number = self.read("confirmed-removals.json").ok().flatten()?;
        fs::remove_file(self.path.join("confirmed-removals.json")).ok()?;
        Some(number)
    }

    /// Removes the keys of CAs that are neither trusted nor the origin of the last rotation.
    pub fn forget_keys(&self, trust: &Trust) -> Result<(), StateError> {
        let folder = self.path.join("authorities");
        let failed = |cause| StateError::File { path: folder.clone(), cause };
        let needed = || trust.trusted.iter().chain(&trust.origin).chain([&trust.issuing]);
        for entry in fs::read_dir(&folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let key = entry.path().join("ca.key");
            if key.exists() && !needed().any(|ca| entry.file_name() == ca.as_str()) {
                // Without its key, an imported CA is incomplete; importing it again restores it.
                for file in [entry.path().join("ca.crt"), key] {
                    fs::remove_file(&file).map_err(|cause| StateError::File { path: file, cause })?;
                }
            }
        }
        Ok(())
    }

    /// Verifies a CA and copies it into the folder.
    pub fn import(&self, files: &CaFiles, now: SystemTime) -> Result<Fingerprint, StateError> {
        let authority = files.load(now)?;
        let fingerprint = authority.fingerprint().clone();
        let folder = self.path.join("authorities").join(fingerprint.as_str());
        if folder.join("ca.crt").exists() {
            return Ok(fingerprint);
        }
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |cause| StateError::File { path, cause }
        };
        DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(failed(&folder))?;
        // The certificate is written last: its presence marks the CA as complete.
        for (from, name) in [(&files.key, "ca.key"), (&files.certificate, "ca.crt")] {
            let contents = Zeroizing::new(fs::read(from).map_err(failed(from))?);
            atomic::replace(&folder.join(name), &contents, Attributes::PRIVATE)?;
        }
        Ok(fingerprint)
    }

    fn files(&self, fingerprint: &Fingerprint) -> CaFiles {
        let folder = self.path.join("authorities").join(fingerprint.as_str());
        CaFiles { certificate: folder.join("ca.crt"), key: folder.join("ca.key") }
    }

    /// Loads an imported CA.
    pub fn authority(&self, fingerprint: &Fingerprint, now: SystemTime) -> Result<Authority, StateError> {
        Ok(self.files(fingerprint).load(now)?)
    }

    /// Returns the certificates of an imported CA, PEM; works even after it expired.
    pub fn chain(&self, fingerprint: &Fingerprint) -> Result<String, StateError> {
        let path = self.files(fingerprint).certificate;
        fs::read_to_string(&path).map_err(|cause| StateError::File { path, cause })
    }

    /// Returns the fleet's trust; `None` before the first CA.
    pub fn trust(&self) -> Result<Option<Trust>, StateError> {
        self.read("trust.json")
    }

    /// Replaces the fleet's trust; a running issuer picks it up within a second.
    pub fn set_trust(&self, trust: &Trust) -> Result<(), StateError> {
        self.write("trust.json", trust)
    }

    /// Returns the members as last written by the issuer.
    pub fn members(&self) -> Result<Members, StateError> {
        Ok(self.read("members.json")?.unwrap_or_default())
    }

    /// Replaces the stored list of members.
    pub fn set_members(&self, members: &Members) -> Result<(), StateError> {
        self.write("members.json", members)
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, StateError> {
        let path = self.path.join(name);
        match fs::read(&path) {
            Ok(text) => {
                serde_json::from_slice(&text).map(Some).map_err(|cause| StateError::Json { path, cause })
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(cause) => Err(StateError::File { path, cause }),
        }
    }

    fn write<T: Serialize>(&self, name: &str, value: &T) -> Result<(), StateError> {
        let path = self.path.join(name);
        let text = match serde_json::to_vec_pretty(value) {
            Ok(text) => text,
            Err(cause) => return Err(StateError::Json { path, cause }),
        };
        atomic::replace(&path, &text, Attributes::PRIVATE)?;
        Ok(())
    }

    /// Locks rotations, beside a running issuer; `None` if another command holds the lock.
    pub fn lock_rotation(&self) -> Result<Option<Flock<File>>, StateError> {
        let path = self.path.join("rotation.lock");
        let open = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = open.map_err(|cause| StateError::File { path, cause })?;
        Ok(Flock::lock(file, FlockArg::LockExclusiveNonblock).ok())
    }

    /// Creates a token with which one instance can request its first pair.
    pub fn create_token(
        &self,
        instance: &str,
        now: SystemTime,
        lifetime: Duration,
    ) -> Result<Zeroizing<String>, StateError> {
        let mut bytes = Zeroizing::new([0; 32]);
        let path = self.path.join("tokens");
        SystemRandom::new().fill(&mut *bytes).map_err(|_| StateError::File {
            path: path.clone(),
            cause: io::Error::other("no random numbers"),
        })?;
        let token = Zeroizing::new(URL_SAFE_NO_PAD.encode(bytes.as_slice()));
        let stored = StoredToken { instance: instance.to_owned(), expires: seconds(now + lifetime) };
        let path = self.token(&token);
        let write = || {
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
            file.write_all(&serde_json::to_vec(&stored)?)?;
            file.sync_all()
        };
        write().map_err(|cause| StateError::File { path: path.clone(), cause })?;
        Ok(token)
    }

    fn token(&self, token: &str) -> PathBuf {
        let hash = Fingerprint::of(token.as_bytes());
        self.path.join("tokens").join(format!("{hash}.json"))
    }

    /// Consumes a token. Of several attempts with the same token, even concurrent ones, one
    /// succeeds.
    pub fn use_token(&self, token: &str, instance: &str, now: SystemTime) -> Result<(), TokenError> {
        let path = self.token(token);
        let text = fs::read(&path).map_err(|_| TokenError::Unknown)?;
        let stored: StoredToken = serde_json::from_slice(&text).map_err(|_| TokenError::Unknown)?;
        if stored.instance != instance {
            return Err(TokenError::OtherInstance);
        }
        // A file can be removed only once.
        fs::remove_file(&path).map_err(|_| TokenError::Unknown)?;
        if stored.expires <= seconds(now) { Err(TokenError::Expired) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn token_works_once() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateFolder::create(folder.path().join("state")).unwrap().0;
        let (now, hour) = (SystemTime::now(), Duration::from_secs(3600));
        let token = state.create_token("i1", now, hour).unwrap();
        assert_eq!(state.use_token(&token, "i2", now), Err(TokenError::OtherInstance));
        let used = thread::scope(|scope| {
            let racers: Vec<_> =
                (0..8).map(|_| scope.spawn(|| state.use_token(&token, "i1", now).is_ok())).collect();
            racers.into_iter().map(|racer| racer.join().unwrap()).filter(|won| *won).count()
        });
        assert_eq!(used, 1);
        assert_eq!(state.use_token(&token, "i1", now), Err(TokenError::Unknown));
        let late = state.create_token("i1", now, hour).unwrap();
        assert_eq!(state.use_token(&late, "i1", now + hour), Err(TokenError::Expired));
        assert_eq!(state.use_token("../trust", "i1", now), Err(TokenError::Unknown));
    }
}
