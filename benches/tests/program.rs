//! The bench of the programs, shortened to one round: every row has the outcome that it expects.

use anyhow::Result;
use whole_system_tests::requires;

#[path = "../benches/program.rs"]
#[expect(dead_code, reason = "the bench's own `main`")]
mod program;

#[test]
fn every_row_has_its_outcome() -> Result<()> {
    requires!(bpf);
    program::measure(1, &[])
}
