//! Facts and names of a foundation for the demo.

use test_lab::foundation::Foundation;

/// Returns one line about the size of a foundation.
pub(super) fn summary(foundation: &Foundation) -> String {
    format!(
        "foundation: {} instances, {} aliases, {} names to publish",
        foundation.snapshot.instances().len(),
        foundation.snapshot.alias_count(),
        foundation.names().count(),
    )
}

/// Returns a few names worth looking up, with their types.
pub(super) fn examples(foundation: &Foundation) -> Vec<(String, &'static str)> {
    let names: Vec<String> = foundation.names().map(|name| name.to_string()).collect();
    let first = |wanted: &dyn Fn(&str) -> bool| names.iter().find(|name| wanted(name)).cloned();
    let group = first(&|name| name.starts_with("q-s0.q-g"));
    let alias = first(&|name| !name.ends_with(".bosh.") && !name.starts_with("q-"));
    let instance = names.iter().rev().find(|name| !name.starts_with("q-")).cloned();
    // A filter that is not published in advance: learned at the first query.
    let learned = group.as_ref().map(|name| name.replacen("q-s0", "q-i0s0", 1));
    let missing = group.as_ref().map(|name| name.replacen("q-s0", "q-i9999", 1));
    [(alias, "A"), (group.clone(), "A"), (group, "AAAA"), (instance, "A"), (learned, "A"), (missing, "A")]
        .into_iter()
        .filter_map(|(name, record_type)| Some((name?, record_type)))
        .collect()
}

/// Returns lines for dnsperf: A and AAAA of every published name except single instances.
pub(super) fn query_lines(foundation: &Foundation) -> String {
    let names = foundation.names().map(|name| name.to_string());
    let shared = names.filter(|name| name.starts_with("q-s0.") || !name.ends_with(".bosh."));
    shared.flat_map(|name| [format!("{name} A\n"), format!("{name} AAAA\n")]).collect()
}
