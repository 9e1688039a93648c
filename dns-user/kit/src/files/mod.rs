//! Reads the files named in the configuration: matches patterns and passes file contents to the
//! pure parsers of `dns-core`.

pub mod bounded;
pub mod glob;

pub use bounded::FileStamp;

use std::{net::SocketAddr, path::Path};

use dns_core::config::{Config, ConfigError, ConfigErrors, Loaded, addresses::parse_addresses};

/// Reads and parses `config.json` at `path`.
pub fn load_config(path: &Path) -> Result<Loaded, ConfigErrors> {
    match check_config(path) {
        (errors, Some(loaded)) if errors.is_empty() => Ok(loaded),
        (errors, _) => Err(ConfigErrors(errors)),
    }
}

/// Reads `config.json` and returns every error, not just the first, with the configuration that
/// remains without the invalid members (see [`Config::check`]).
pub fn check_config(path: &Path) -> (Vec<ConfigError>, Option<Loaded>) {
    let file = path.display().to_string();
    match bounded::read(path) {
        Ok(bytes) => Config::check(&file, &bytes),
        Err(error) => (vec![ConfigError::of_file(file, format!("cannot be read: {error}"))], None),
    }
}

/// Reads all addresses files: lists of `{"address": IP, "port": number}`.
///
/// The result is in the order of the files, without duplicates.
pub fn read_addresses(pattern: &str) -> Result<Vec<SocketAddr>, ConfigErrors> {
    let paths = glob::glob(pattern).map_err(|error| ConfigError::of_file(pattern, error.to_string()))?;
    let mut files = Vec::new();
    for path in paths {
        let file = path.display().to_string();
        match bounded::read(&path) {
            Ok(bytes) => files.push((file, bytes)),
            Err(error) => return Err(ConfigError::of_file(file, format!("cannot be read: {error}")).into()),
        }
    }
    parse_addresses(files.iter().map(|(file, bytes)| (file.as_str(), bytes.as_slice()))).whole()
}
