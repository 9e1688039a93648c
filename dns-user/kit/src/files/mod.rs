//! Reads the files named in the configuration: matches patterns and passes file contents to the
//! pure parsers of `dns-core`. Replaces files atomically and watches folders.

pub mod atomic;
pub mod bounded;
mod denied;
pub mod glob;
mod reading;
pub mod watch;

pub use bounded::FileStamp;
pub use reading::{Reading, ReadingThread};

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

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(errors: &[ConfigError]) -> Vec<String> {
        errors.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn configuration_loads_or_lists_errors() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        std::fs::write(&path, r#"{"address": "127.0.0.1", "port": 53}"#).unwrap();
        assert!(load_config(&path).is_ok());
        std::fs::write(&path, r#"{"address": 1, "port": "x"}"#).unwrap();
        let (errors, loaded) = check_config(&path);
        assert!(loaded.is_some());
        let all = texts(&errors);
        assert_eq!(all.len(), 2, "{all:?}");
        for text in &all {
            assert!(text.contains(&path.display().to_string()), "{text}");
        }
        assert_eq!(texts(&load_config(&path).unwrap_err().0), all);

        let missing = folder.path().join("missing.json");
        let (errors, loaded) = check_config(&missing);
        assert!(loaded.is_none());
        let expected = format!(
            "{}: cannot be read: No such file or directory (os error 2)",
            missing.display()
        );
        assert_eq!(texts(&errors), [expected]);
        assert_eq!(texts(&load_config(&missing).unwrap_err().0), texts(&errors));
    }
}
