//! Tests with arbitrary changes to the bytes of replies: forwarded and cached messages stay
//! well-formed.

use proptest::prelude::*;

use super::*;
use crate::{
    cache::Cache,
    json_answer,
    message::{MessageIndex, ValidatedReply},
};
use dns_core::{
    config::CacheConfig,
    wire::{ReplyFlags, begin_reply},
};

const NAME: &[u8] = b"\x02ok\x07example\0";

/// Returns a reply with an alias, an address, an SOA and an OPT, names compressed.
fn reply_to(query: &[u8]) -> Vec<u8> {
    let mut reply = begin_reply(&parsed(query), message::NOERROR, ReplyFlags::RECURSION);
    assert!(message::push_answer(
        &mut reply,
        &message::QUESTION_NAME,
        5,
        300,
        b"\x01a\xc0\x0f"
    ));
    assert!(message::push_answer(
        &mut reply,
        b"\x01a\xc0\x0f",
        1,
        300,
        &[192, 0, 2, 1]
    ));
    reply[9] = 1;
    reply.extend_from_slice(b"\xc0\x0f\0\x06\0\x01\0\0\x03\x84\0\x18\xc0\x0f\xc0\x0f");
    reply.extend_from_slice(&[0; 20]);
    message::append_opt(&mut reply, 1232);
    reply
}

/// Returns a cache with ordinary limits.
fn cache() -> Cache {
    let config = CacheConfig {
        enabled: true,
        max_entries: 10,
        max_bytes: 1 << 20,
        serve_stale: None,
    };
    Cache::new(&config, Form::default(), Compat::default())
}

proptest! {
    #[test]
    fn forwarded_and_cached_replies_are_sound(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in 0usize..200,
        with_edns: bool,
    ) {
        let mut query = query(NAME, 1);
        if with_edns {
            message::append_opt(&mut query, 1232);
        }
        let ask = parsed(&query);
        let mut bytes = reply_to(&query);
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        bytes.truncate(bytes.len().saturating_sub(cut / 100 * (cut % 100)));
        let Ok(readable) = ValidatedReply::new(bytes) else { return Ok(()) };
        let mut forwarded = readable.finish(&ask, Form::default());
        prop_assert!(MessageIndex::of(&forwarded.reply).is_some(), "passed on: {:02x?}", forwarded.reply);
        let cache = cache();
        let key = cache.key(&ask).expect("an ordinary question");
        let reply = (&mut forwarded.reply, &mut forwarded.index);
        cache.admit(&key, &ask, reply, None, cache.generation());
        prop_assert_eq!(MessageIndex::of(&forwarded.reply), Some(forwarded.index.clone()));
        let mut hit = Vec::new();
        if cache.write_fresh(&key, &ask, &mut hit) {
            let index = MessageIndex::of(&hit);
            prop_assert!(index.is_some(), "from the cache: {hit:02x?}");
            prop_assert_eq!(index.and_then(|index| index.opt).is_some(), with_edns);
        }
        message::remove_opt(&mut forwarded.reply, &mut forwarded.index);
        prop_assert_eq!(MessageIndex::of(&forwarded.reply), Some(forwarded.index));
    }

    #[test]
    fn http_answers_become_sound_replies(
        answers in proptest::collection::vec(
            (0u16..300, any::<u32>(), prop_oneof!["\\PC{0,20}", "\\\\# [0-9]{1,2} [0-9a-f]{0,12}", "[a-z0-9.]{0,12}"]),
            0..4,
        ),
        status in 0u8..20,
    ) {
        let answers: Vec<_> = answers
            .into_iter()
            .map(|(rtype, ttl, data)| serde_json::json!({"type": rtype, "TTL": ttl, "data": data}))
            .collect();
        let document = serde_json::json!({"Status": status, "Answer": answers}).to_string();
        let query = query(NAME, 1);
        if let Ok(reply) = json_answer::reply(&parsed(&query), document.as_bytes()) {
            prop_assert!(MessageIndex::of(&reply).is_some(), "{document}: {reply:02x?}");
        }
    }
}
