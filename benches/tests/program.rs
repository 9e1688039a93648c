//! One round of the bench of the programs: each row checks the outcomes that the programs count.

use anyhow::Result;
use whole_system_tests::requires;

#[path = "../benches/program.rs"]
#[expect(dead_code, reason = "the bench's own `main`")]
mod bench;

#[test]
fn rows_yield_expected_outcomes() -> Result<()> {
    requires!(bpf);
    bench::measure(1, &[])
}
