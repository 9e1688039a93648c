//! Reads config.json: the server's settings and the object `"consul"`.

use std::path::Path;

use dns_consul::config::Config as ConsulConfig;
use dns_core::config::{ConfigError, ConfigErrors, Loaded, ParsedFiles};

/// The settings with warnings about them, and the object `"consul"`.
pub(super) type WholeConfig = (Loaded, Option<ConsulConfig>);

pub(super) fn load(path: &Path) -> Result<WholeConfig, ConfigErrors> {
    match check(path) {
        (errors, Some(config)) if errors.is_empty() => Ok(config),
        (errors, _) => Err(ConfigErrors(errors)),
    }
}

/// Reads config.json and returns every error with what remains without the invalid members; `None`
/// if nothing usable remains.
pub(super) fn check(path: &Path) -> (Vec<ConfigError>, Option<WholeConfig>) {
    let (mut errors, loaded) = dns_kit::files::check_config(path);
    let Some(mut loaded) = loaded else { return (errors, None) };
    let ParsedFiles { valid, errors: of_consul } = crate::consul::load_config(path);
    errors.extend(of_consul);
    let (consul, warnings) = valid.unzip();
    loaded.warnings.extend(warnings.into_iter().flatten());
    (errors, Some((loaded, consul)))
}
