//! Metric families of the fast path, read from its maps on each scrape.

use dns_common::counters::Outcome;
use prometheus::{Registry, proto::MetricFamily};

use dns_fastpath::{Counters, FastPath, FastPathHandle, FastPathStatus, Hook};
use dns_kit::metrics::{families, labels::rcode_label};

/// Registers the metric families of the fast path in use, without keeping the fast path alive.
pub(super) fn register(registry: &Registry, fast_path: FastPathHandle) -> prometheus::Result<()> {
    families::FAST_PATH_UP.scrape(registry, move || match fast_path.get() {
        Some(current) => all(&current, &fast_path.counters()),
        None if fast_path.is_empty() => Vec::new(),
        None => vec![families::FAST_PATH_UP.is(0.0)],
    })
}

fn all(fast_path: &FastPath, counters: &Counters) -> Vec<MetricFamily> {
    let FastPathStatus { interfaces, programs, names: table, answers, lease, pinned_at: _ } =
        fast_path.status();
    let interfaces = &interfaces.interfaces;
    // Other programs assign the slots otherwise.
    let by_slot = fast_path.counters();
    let (bytes_in, bytes_out) = counters.bytes();
    let attached = interfaces.iter().filter(|interface| interface.hook.is_some()).count();
    let ratio = |part: usize, whole: usize| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
    let up = attached > 0 && lease.remaining_ms > 0;
    vec![
        families::FAST_PATH_UP.is(f64::from(up)),
        families::FAST_PATH_PACKETS_TOTAL
            .of(counters.outcomes().map(|(outcome, count)| ([Outcome::label(outcome)], count))),
        families::FAST_PATH_REPLIES_TOTAL.of(counters
            .replies()
            .into_iter()
            .map(|(query_type, rcode, count)| ([query_type.into(), rcode_label(rcode)], count))),
        families::FAST_PATH_BYTES_TOTAL.of([(["in"], bytes_in), (["out"], bytes_out)]),
        families::FAST_PATH_INTERFACE_REPLIES_TOTAL.of(interfaces.iter().map(|interface| {
            ([interface.name.as_str()], interface.slot.map_or(0, |slot| by_slot.interface(slot)))
        })),
        families::FAST_PATH_INTERFACE_INFO.of(interfaces
            .iter()
            .map(|interface| ([interface.name.as_str(), interface.hook.map_or("none", Hook::label)], 1.0))),
        families::FAST_PATH_PROGRAM_INFO.of(programs.iter().map(|program| {
            let reason = [program.why.as_slice(), &program.verifier].concat().join("\n");
            ([program.name.to_string(), program.state.label().to_owned(), reason], 1.0)
        })),
        families::FAST_PATH_PROGRAM_LOAD_SECONDS.of(programs
            .iter()
            .filter_map(|program| program.load_ms.map(|took| ([program.name.as_ref()], took / 1000.0)))),
        families::FAST_PATH_PROGRAM_VERIFIED_INSTRUCTIONS.of(programs.iter().filter_map(|program| {
            program.instructions.map(|count| ([program.name.as_ref()], f64::from(count)))
        })),
        families::FAST_PATH_ENTRIES.of([
            (["learned"], table.learned as f64),
            (["negative"], table.negative as f64),
            (["published"], table.published as f64),
        ]),
        families::FAST_PATH_UNFITTING_NAMES.is(table.unfitting.total() as f64),
        families::FAST_PATH_MAP_FILL_RATIO.is(ratio(table.published + table.learned, table.max_names)),
        families::FAST_PATH_ARENA_FILL_RATIO
            .is(ratio(table.store.used + table.store.quarantined, table.store.total)),
        families::FAST_PATH_LEASE_SECONDS.is(lease.remaining_ms as f64 / 1000.0),
        families::FAST_PATH_EVICTIONS_TOTAL.is(table.evicted),
        families::FAST_PATH_WRITES_TOTAL.is(table.written),
        families::FAST_PATH_FORWARDED_ANSWERS.is(answers.entries as f64),
        families::FAST_PATH_FORWARDED_EVICTIONS_TOTAL.is(answers.evicted),
        families::FAST_PATH_FORWARDED_UNFITTING_TOTAL.is(answers.unfitting),
        families::FAST_PATH_FORWARDED_RENEWALS_TOTAL.is(answers.renewals),
        families::FAST_PATH_LOCAL_REPLIES.is(answers.replies.entries as f64),
        families::FAST_PATH_LOCAL_EVICTIONS_TOTAL.is(answers.replies.evicted),
        families::FAST_PATH_LOCAL_WITHDRAWN_TOTAL.is(answers.replies.withdrawn),
        families::FAST_PATH_LOCAL_UNFITTING_TOTAL.is(answers.replies.unfitting),
    ]
}
