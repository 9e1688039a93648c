//! Parses a handlers file.

use dns_upstream::Handlers;

pub(crate) fn run(bytes: &[u8]) {
    for error in Handlers::parse([("handlers.json", bytes)]).errors {
        assert!(!error.to_string().is_empty());
    }
}
