//! Files of a CA, reloaded when they change.

use std::{
    fmt, io,
    path::{Path, PathBuf},
    time::SystemTime,
};

use dns_kit::files::{FileStamp, bounded};
use zeroize::Zeroizing;

use crate::authority::{Authority, Fault};

/// PEM files of a CA.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
pub struct CaFiles {
    /// PEM file of the CA certificate, followed by its chain
    #[arg(long = "ca", value_name = "FILE")]
    pub certificate: PathBuf,
    /// PEM file of the CA's private key: PKCS#1, SEC1 or PKCS#8
    #[arg(long = "ca-key", value_name = "FILE")]
    pub key: PathBuf,
}

/// A CA that cannot be used.
#[derive(Debug)]
pub struct CaError(Vec<(PathBuf, String)>);

impl CaError {
    /// Returns the error of one file.
    pub(crate) fn of(path: &Path, problem: String) -> Self {
        Self(vec![(path.to_owned(), problem)])
    }
}

impl fmt::Display for CaError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (path, problem)) in self.0.iter().enumerate() {
            let separator = if number > 0 { "\n" } else { "" };
            write!(out, "{separator}{}: {problem}", path.display())?;
        }
        Ok(())
    }
}

impl std::error::Error for CaError {}

/// Stamps of certificate and key; `None` for a missing file.
pub type Stamps = [Option<FileStamp>; 2];

impl CaFiles {
    /// Loads and checks the CA; the error lists every fault with its file.
    pub fn load(&self, now: SystemTime) -> Result<Authority, CaError> {
        let read = |path: &Path| {
            let failed = |error: io::Error| CaError::of(path, format!("{error}; choose a readable PEM file"));
            bounded::read(path).map(Zeroizing::new).map_err(failed)
        };
        let (certificate, key) = (read(&self.certificate)?, read(&self.key)?);
        let with_path = |fault: Fault| {
            let path = match fault {
                Fault::Key(_) | Fault::KeyMismatch(_) => &self.key,
                _ => &self.certificate,
            };
            (path.clone(), fault.to_string())
        };
        Authority::parse(&certificate, &key, now)
            .map_err(|faults| CaError(faults.into_iter().map(with_path).collect()))
    }

    /// Returns the stamps of both files.
    pub fn stamps(&self) -> Stamps {
        [&self.certificate, &self.key].map(FileStamp::of)
    }
}
