//! Reads the files named in the configuration: matches patterns and passes file contents to the
//! pure parsers of `dns-core`. Replaces files atomically and watches folders.

pub mod atomic;
pub mod bounded;
mod denied;
pub mod glob;
pub mod watch;

pub use bounded::FileStamp;

use std::path::Path;

use dns_core::config::{Config, ConfigError, ConfigErrors, Loaded};

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
        Err(error) => (
            vec![ConfigError::of_file(
                file,
                format!("cannot be read: {error}"),
            )],
            None,
        ),
    }
}
