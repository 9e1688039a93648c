//! Forwards and caches a recursor's reply. For any input, the client gets a well-formed message
//! with its own id and question, and the cache returns the same message; so does the model of the
//! programs for an answer that interfaces may give.

use dns_core::wire::{Parsed, parse};
use dns_fastpath::forwarded;
use dns_upstream::fuzzing::{CachedReplies, is_sound};
use test_support::forwarded::model;

thread_local! {
    /// Shared, because creating the cache is slower than handling a reply.
    static REPLIES: CachedReplies = CachedReplies::new();
}

pub(crate) fn run(bytes: &[u8]) {
    // The first byte is the length of the client's message.
    let Some((&length, rest)) = bytes.split_first() else {
        return;
    };
    let (query, reply) = rest.split_at(rest.len().min(usize::from(length)));
    let Some(given) = REPLIES.with(|replies| replies.give(query, reply.to_vec())) else {
        return;
    };
    assert!(
        is_sound(&given.at_once),
        "passed on broken: {:02x?}",
        given.at_once
    );
    assert_eq!(given.at_once[..2], query[..2], "another id");
    let Some(kept) = given.from_cache else { return };
    assert!(is_sound(&kept), "kept broken: {kept:02x?}");
    assert_eq!(kept[..2], query[..2], "another id from the cache");
    // Flags and TTLs may differ between the two replies.
    assert_eq!(
        kept.len(),
        given.at_once.len(),
        "{kept:02x?}\n{:02x?}",
        given.at_once
    );
    assert_eq!(kept[4..12], given.at_once[4..12], "other counts");

    let Some(entry) = given
        .copy
        .and_then(|answer| forwarded::encode(&answer, 7, 1))
    else {
        return;
    };
    let Parsed::Query(query) = parse(query) else {
        return;
    };
    let by_program = model(&entry, &query, 0);
    // Without RD, userspace answers.
    let is_given = query.recursion_desired() && kept.len() <= query.limit();
    assert_eq!(
        by_program,
        is_given.then_some(kept),
        "program and userspace differ"
    );
}
