//! The settings of `config.json`: changed by a reload, or only by a restart; and remarks.

use std::{net::SocketAddr, path::Path};

use dns_consul::config::Config as ConsulConfig;
use dns_core::config::{Config, ConfigError, ConfigErrors, Loaded, ParsedFiles};
use dns_kit::privileges;

/// Declares the table. Every field of [`Config`] must be in exactly one of the two lists; otherwise
/// the code does not compile.
macro_rules! settings {
    (restart { $($fixed:ident: $name:literal,)* } reload { $($free:ident,)* }) => {
        /// Merges a newly read configuration with the one in use: settings that need a restart keep
        /// their values. Returns the merged configuration and the names of settings that differ but
        /// keep their values.
        pub(super) fn merge(in_use: &Config, read: Config) -> (Config, Vec<&'static str>) {
            let Config { $($fixed,)* $($free,)* } = read;
            let mut kept = Vec::new();
            $(if $fixed != in_use.$fixed {
                kept.push($name);
            })*
            (Config { $($fixed: in_use.$fixed.clone(),)* $($free,)* }, kept)
        }
    };
}

settings! {
    restart {
        listen: "address, port",
        timeout: "timeout",
        request_timeout: "request_timeout",
        control: "control",
        api: "api",
        jobs_dir: "jobs_dir",
        health: "health",
        metrics: "metrics",
        cookies: "cookies",
        dnstap: "dnstap",
        max_reply: "max_reply",
        identity: "identity",
        compat: "compat",
        xdp: "xdp",
    }
    reload {
        recursion,
        records_file,
        alias_files_glob,
        handlers_files_glob,
        addresses_files_glob,
        upcheck_domains,
        internal_upcheck,
        logging,
        cache,
        configure_systemd_resolved,
    }
}

pub(super) fn notes(config: &Config, listen: &[SocketAddr]) -> Vec<String> {
    // A VM with BOSH jobs always configures the API.
    let no_jobs = config.api.is_some() && config.jobs_dir.is_none();
    let no_jobs =
        no_jobs.then(|| "jobs_dir is not configured: /local-groups lists no jobs".to_owned());
    config
        .long_replies(listen)
        .into_iter()
        .chain(privileges::remaining_root())
        .chain(no_jobs)
        .collect()
}

//----------- Reading -----------------------------------------------------------

/// The settings with warnings about them, and the object `"consul"`.
pub(super) type WholeConfig = (Loaded, Option<ConsulConfig>);

pub(super) fn load_config(path: &Path) -> Result<WholeConfig, ConfigErrors> {
    match check_config(path) {
        (errors, Some(config)) if errors.is_empty() => Ok(config),
        (errors, _) => Err(ConfigErrors(errors)),
    }
}

/// Reads config.json and returns every error with what remains without the invalid members; `None`
/// if nothing usable remains.
pub(super) fn check_config(path: &Path) -> (Vec<ConfigError>, Option<WholeConfig>) {
    // The object "consul" is read apart: the crates below this one do not know its keys.
    let (mut errors, loaded) = dns_kit::files::check_config(path);
    let Some(mut loaded) = loaded else {
        return (errors, None);
    };
    let ParsedFiles {
        valid,
        errors: of_consul,
    } = crate::consul::load_config(path);
    errors.extend(of_consul);
    let (consul, warnings) = valid.unzip();
    loaded.warnings.extend(warnings.into_iter().flatten());
    (errors, Some((loaded, consul)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses a configuration with one additional key.
    fn config(key: &str) -> Config {
        let text = format!(r#"{{"port": 53, "address": "127.0.0.1"{key}}}"#);
        Config::parse("config.json", text.as_bytes())
            .unwrap()
            .config
    }

    #[test]
    fn restart_only_settings_are_reported_every_time() {
        let before = config("");
        for (key, name) in [
            (r#", "identity": "off""#, "identity"),
            (r#", "control": {"socket": "/run/x.sock"}"#, "control"),
            (r#", "request_timeout": "1s""#, "request_timeout"),
            (r#", "xdp": {"enabled": false}"#, "xdp"),
        ] {
            let (merged, kept) = merge(&before, config(key));
            assert_eq!(kept, [name]);
            assert_eq!(merged, before, "{key}");
            let (_, kept) = merge(&merged, config(key));
            assert_eq!(kept, [name], "{key}: the second reload");
        }
    }

    #[test]
    fn other_settings_change_at_once() {
        let read = config(
            r#", "log_level": "DEBUG", "recursors": ["10.0.0.1:53"], "cache": {"enabled": true}"#,
        );
        assert_eq!(merge(&config(""), read.clone()), (read, Vec::new()));
    }
}
