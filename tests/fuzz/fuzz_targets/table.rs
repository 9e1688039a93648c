//! Snapshots, queries, health and evictions in any order: what the publisher's table would
//! have the interface answer is what a model says.
#![no_main]

use dns_fastpath::fuzzing;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| fuzzing::table(bytes));
