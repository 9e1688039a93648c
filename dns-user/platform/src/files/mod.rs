//! Reads the files named in the configuration: matches patterns and passes file contents to the
//! pure parsers of `dns-core`.

pub mod bounded;
pub mod glob;

pub use bounded::FileStamp;

use std::{net::SocketAddr, path::Path};

use dns_core::config::{Config, ConfigError, Loaded, addresses::parse_addresses};

/// Reads and parses `config.json` at `path`.
pub fn load_config(path: &Path) -> Result<Loaded, ConfigError> {
    let file = path.display().to_string();
    match bounded::read(path) {
        Ok(bytes) => Config::parse(&file, &bytes),
        Err(error) => Err(ConfigError::of_file(file, format!("cannot be read: {error}"))),
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
pub fn read_addresses(pattern: &str) -> Result<Vec<SocketAddr>, ConfigError> {
    let files = glob::glob(pattern).map_err(|error| ConfigError::of_file(pattern, error.to_string()))?;
    let mut addresses = Vec::new();
    for path in files {
        let file = path.display().to_string();
        let bytes = bounded::read(&path)
            .map_err(|error| ConfigError::of_file(&*file, format!("cannot be read: {error}")))?;
        for address in parse_addresses(&file, &bytes)? {
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
    }
    Ok(addresses)
}
