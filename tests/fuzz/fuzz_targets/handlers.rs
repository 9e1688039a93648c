//! Parses a handlers file.
#![no_main]

use dns_upstream::Handlers;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    for error in Handlers::parse([("handlers.json", bytes)]).errors {
        assert!(!error.to_string().is_empty());
    }
});
