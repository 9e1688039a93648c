//! `cargo bench -p dns-publish [-- ROUNDS]`: 10,000 names published to BIND and Knot, compared with nsupdate
//! on the same servers. Every round starts new servers, and the two alternate in being first.

#![expect(
    clippy::unwrap_used,
    reason = "a measurement that cannot set up its server has failed"
)]

use std::time::Duration;

#[expect(dead_code, reason = "the tests use more of it")]
#[path = "../tests/servers/name_server.rs"]
mod name_server;
#[path = "../tests/servers/process.rs"]
mod process;
#[expect(dead_code, reason = "its tests are not part of this program")]
#[path = "../tests/servers/scale.rs"]
mod scale;

use name_server::Program;
use scale::Figures;

fn main() {
    // Cargo adds --bench.
    let rounds = std::env::args()
        .skip(1)
        .find_map(|argument| argument.parse().ok())
        .unwrap_or(5);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    println!("medians of {rounds} rounds");
    for program in Program::ALL {
        let all: Vec<Figures> = (0..rounds)
            .map(|round| runtime.block_on(scale::measure(program, round % 2 == 1)))
            .collect();
        let ratio = median(
            all.iter()
                .map(|one| one.first.div_duration_f64(one.nsupdate))
                .collect(),
        );
        let whole = median(
            all.iter()
                .map(|one| one.command.div_duration_f64(one.nsupdate))
                .collect(),
        );
        println!(
            "{program:?}: first publication {:.2?}, nsupdate {:.2?}, ratio {ratio:.2}; whole command {:.2?}, ratio {whole:.2}; nothing to do {:.2?}, \
             one change {:.2?}, a thousand {:.2?} (nsupdate {:.2?})",
            median_of(&all, |one| one.first),
            median_of(&all, |one| one.nsupdate),
            median_of(&all, |one| one.command),
            median_of(&all, |one| one.nothing),
            median_of(&all, |one| one.one),
            median_of(&all, |one| one.tenth),
            median_of(&all, |one| one.nsupdate_tenth),
        );
        let each = all
            .iter()
            .map(|one| format!("{:.2}", one.first.div_duration_f64(one.nsupdate)));
        println!(
            "  ratios of the rounds: {}",
            each.collect::<Vec<_>>().join(", ")
        );
        let each = all
            .iter()
            .map(|one| format!("{:.2}", one.command.div_duration_f64(one.nsupdate)));
        println!(
            "  of the whole command: {}",
            each.collect::<Vec<_>>().join(", ")
        );
        let each = all
            .iter()
            .map(|one| format!("{:.2}", one.tenth.div_duration_f64(one.nsupdate_tenth)));
        println!("  of a thousand: {}", each.collect::<Vec<_>>().join(", "));
    }
}

fn median_of(all: &[Figures], figure: fn(&Figures) -> Duration) -> Duration {
    median(all.iter().map(figure).collect())
}

/// Returns the median; of an even number of values the upper one.
fn median<T: Copy + PartialOrd>(mut values: Vec<T>) -> T {
    values.sort_by(|one, other| one.partial_cmp(other).unwrap());
    values[values.len() / 2]
}
