//! Files of the issuer: CAs, the fleet's trust, its members and bootstrap tokens.
//!
//! ```text
//! authorities/FINGERPRINT/ca.crt, ca.key
//! trust.json, members.json
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
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use zeroize::Zeroizing;

use super::{message::Members, trust::Trust};
use crate::{
    authority::{Authority, Fingerprint},
    ca_files::{CaError, CaFiles},
    certificate::seconds,
    folder::replace_file,
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
    #[error("{0}")]
    Authority(#[from] CaError),
    /// Reading or writing failed.
    #[error("{}: {source}; check the issuer's folder of state", path.display())]
    File {
        /// Path of the file that failed.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file is not JSON of the expected form.
    #[error("{}: {source}; restore the file from a backup", path.display())]
    Json {
        /// Path of the malformed file.
        path: PathBuf,
        /// Position and cause of the syntax error.
        source: serde_json::Error,
    },
    /// Replacing a file failed.
    #[error("{0}")]
    Replace(#[from] crate::folder::FolderError),
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

impl StateFolder {
    /// Opens the folder; creates it with access for its owner only.
    pub fn open(path: PathBuf) -> Result<Self, StateError> {
        let this = Self { path };
        for folder in [this.path.clone(), this.path.join("authorities"), this.path.join("tokens")] {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&folder)
                .map_err(|source| StateError::File { path: folder, source })?;
        }
        Ok(this)
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
            move |source| StateError::File { path, source }
        };
        DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(failed(&folder))?;
        // The certificate is written last: its presence marks the CA as complete.
        for (from, name) in [(&files.key, "ca.key"), (&files.certificate, "ca.crt")] {
            let contents = Zeroizing::new(fs::read(from).map_err(failed(from))?);
            replace_file(&folder.join(name), &contents)?;
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
        fs::read_to_string(&path).map_err(|source| StateError::File { path, source })
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
                serde_json::from_slice(&text).map(Some).map_err(|source| StateError::Json { path, source })
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(StateError::File { path, source }),
        }
    }

    fn write<T: Serialize>(&self, name: &str, value: &T) -> Result<(), StateError> {
        let path = self.path.join(name);
        let text = match serde_json::to_vec_pretty(value) {
            Ok(text) => text,
            Err(source) => return Err(StateError::Json { path, source }),
        };
        Ok(replace_file(&path, &text)?)
    }

    /// Locks rotations; `None` if another command holds the lock.
    pub fn lock(&self) -> Result<Option<Flock<File>>, StateError> {
        let path = self.path.join("rotation.lock");
        let open = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = open.map_err(|source| StateError::File { path, source })?;
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
            source: io::Error::other("no random numbers"),
        })?;
        let token = Zeroizing::new(URL_SAFE_NO_PAD.encode(bytes.as_slice()));
        let stored = StoredToken { instance: instance.to_owned(), expires: seconds(now + lifetime) };
        let path = self.token(&token);
        let write = || {
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
            file.write_all(&serde_json::to_vec(&stored)?)?;
            file.sync_all()
        };
        write().map_err(|source| StateError::File { path: path.clone(), source })?;
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
        let state = StateFolder::open(folder.path().join("state")).unwrap();
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
