//! Applies snapshots, queries, health changes and evictions in any order and compares the answers
//! in the publisher's table with a model.

use dns_fastpath::fuzzing;

pub(crate) fn run(bytes: &[u8]) {
    fuzzing::table(bytes);
}
