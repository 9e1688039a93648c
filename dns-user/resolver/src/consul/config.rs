//! Reads Consul's part of `config.json`.

use std::path::Path;

use dns_consul::config::Config;
use dns_core::config::{ConfigError, ParsedFiles};
use dns_kit::files::bounded;

/// A configuration with the warnings about it; `None` if the file has no object `"consul"`.
type Loaded = ParsedFiles<Option<(Config, Vec<String>)>>;

/// Reads the object `"consul"` of `config.json` with warnings about it; `None` if there is no such
/// object.
pub(crate) fn load_config(path: &Path) -> Loaded {
    let file = path.display().to_string();
    match bounded::read(path) {
        Ok(bytes) => without_live(&file, Config::of_document(&file, &bytes)),
        Err(error) => {
            let error = ConfigError::of_file(file, format!("cannot be read: {error}"));
            ParsedFiles { valid: None, errors: vec![error] }
        }
    }
}

/// Rejects a live Consul in a build without the feature `live-consul`.
fn without_live(file: &str, mut loaded: Loaded) -> Loaded {
    let live = loaded.valid.as_ref().is_some_and(|(config, _)| config.http.is_some());
    if live && !cfg!(feature = "live-consul") {
        loaded.errors.push(ConfigError {
            file: file.to_owned(),
            key: Some("consul.sources.http".to_owned()),
            problem: "this build does not query a live Consul; remove the section, or use a build with the feature \
                      live-consul"
                .to_owned(),
        });
        loaded.valid = None;
    }
    loaded
}
