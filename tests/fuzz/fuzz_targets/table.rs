//! Applies snapshots, queries, health changes and evictions in any order and compares the answers
//! in the publisher's table with a model.
#![no_main]

use dns_fastpath::fuzzing;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| fuzzing::table(bytes));
