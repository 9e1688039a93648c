//! Reads the files named in the configuration: matches patterns and passes file contents to the
//! pure parsers of `dns-core`. Replaces files atomically and watches folders.

pub mod atomic;
pub mod bounded;
pub mod glob;
pub mod watch;

pub use bounded::FileStamp;

use std::{net::SocketAddr, path::Path};

use dns_core::config::{Config, ConfigError, ConfigErrors, Loaded, ParsedFiles, parse::parse_addresses};

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

/// Reads all addresses files: lists of `{"address": IP, "port": number}`. Invalid files are left out, as by
/// the server; the result holds their errors. Fails only for an invalid pattern.
///
/// The addresses are in the order of the files, without duplicates.
pub fn read_addresses(pattern: &str) -> Result<ParsedFiles<Vec<SocketAddr>>, ConfigError> {
    let paths = glob::glob(pattern).map_err(|error| ConfigError::of_file(pattern, error.to_string()))?;
    let (mut files, mut unreadable) = (Vec::new(), Vec::new());
    for path in paths {
        let file = path.display().to_string();
        match bounded::read(&path) {
            Ok(bytes) => files.push((file, bytes)),
            Err(error) => unreadable.push(ConfigError::of_file(file, format!("cannot be read: {error}"))),
        }
    }
    let mut parsed = parse_addresses(files.iter().map(|(file, bytes)| (file.as_str(), bytes.as_slice())));
    parsed.errors.extend(unreadable);
    Ok(parsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_addresses_file_spares_others() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("a.json", r#"[{"address": "127.0.0.2", "port": 53}]"#);
        write("b.json", "{");
        std::fs::create_dir(folder.path().join("c.json")).unwrap();
        let pattern = format!("{}/*.json", folder.path().display());
        let ParsedFiles { valid, errors } = read_addresses(&pattern).unwrap();
        assert_eq!(valid, [SocketAddr::from(([127, 0, 0, 2], 53))]);
        assert_eq!(errors.len(), 2, "{errors:?}");
    }
}
