//! Parses a configuration file.

use dns_core::config::Config;

pub(crate) fn run(bytes: &[u8]) {
    if let Err(error) = Config::parse("config.json", bytes) {
        assert!(!error.to_string().is_empty());
    }
    let _ = dns_core::config::parse::parse_addresses([("addresses.json", bytes)]);
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = dns_core::config::values::parse_duration(text);
    }
}
