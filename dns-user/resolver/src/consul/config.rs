//! Reads Consul's part of `config.json`.

use std::path::Path;

use dns_consul::config::Config;
use dns_core::config::{ConfigError, ParsedFiles};
use dns_platform::files::bounded;

/// Reads the object `"consul"` of `config.json` with warnings about it; `None` if there is no such
/// object.
pub(crate) fn load_config(path: &Path) -> ParsedFiles<Option<(Config, Vec<String>)>> {
    let file = path.display().to_string();
    match bounded::read(path) {
        Ok(bytes) => Config::of_document(&file, &bytes),
        Err(error) => {
            let error = ConfigError::of_file(file, format!("cannot be read: {error}"));
            ParsedFiles { valid: None, errors: vec![error] }
        }
    }
}
