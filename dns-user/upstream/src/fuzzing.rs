//! Entry points for the fuzz targets (`tests/fuzz`): from the bytes of a recursor or an HTTP server
//! to the client's reply, without a network.

use std::time::Duration;

use super::{
    cache::{Cache, Lookup},
    json_answer,
    message::{self, Form, MessageIndex, ValidatedReply},
};
use dns_core::{
    config::{CacheConfig, Compat},
    wire::{ForwardedAnswer, Parsed, Query, append_opt, parse},
};

/// A cache, for replies through it.
#[derive(Debug)]
pub struct CachedReplies(Cache);

/// The replies to a client for one reply of a recursor.
#[derive(Debug)]
pub struct Given {
    /// The reply built directly from the recursor's bytes.
    pub at_once: Vec<u8>,
    /// The reply of the next query, from the cache; `None` if the answer was not cached.
    pub from_cache: Option<Vec<u8>>,
    /// The answer for use without the cache; `None` if it was not cached or depends on the client.
    pub copy: Option<ForwardedAnswer>,
}

impl CachedReplies {
    /// Creates an empty cache with the limits of the default configuration.
    pub fn new() -> Self {
        let config = CacheConfig {
            enabled: true,
            max_entries: 64,
            max_bytes: 1 << 20,
            serve_stale: Some(Duration::from_secs(60)),
        };
        Self(Cache::new(&config, Form::default(), Compat::default()))
    }

    /// Returns the replies to a client that sent `query` by UDP when a recursor answers `reply`;
    /// `None` if the reply is dropped.
    pub fn give(&self, query: &[u8], reply: Vec<u8>) -> Option<Given> {
        let Self(cache) = self;
        let _removed = cache.flush(|_| true);
        let query = parsed(query)?;
        let forwarded = ValidatedReply::new(reply)
            .ok()?
            .finish(&query, Form::default());
        let mut reply = forwarded.reply;
        let mut index = forwarded.index;
        let key = cache.key(&query);
        if let Some(key) = &key {
            cache.admit(
                key,
                &query,
                (&mut reply, &mut index),
                None,
                cache.generation(),
            );
        }
        message::set_own_flags(&mut reply, &query);
        append_opt(&query, &mut reply);
        let from_cache = key.and_then(|key| match cache.get(&key, &query) {
            Lookup::Fresh(reply) => Some(reply),
            Lookup::Stale(_) | Lookup::Miss => None,
        });
        Some(Given {
            at_once: reply,
            from_cache,
            copy: cache.copy(&query),
        })
    }

    /// Returns the cache's reply to a client that sends `query` when the last answer has this age.
    pub fn reply_at(&self, query: &[u8], age: Duration) -> Option<Vec<u8>> {
        self.0.reply_at(&parsed(query)?, age)
    }
}

impl Default for CachedReplies {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns the reply to `query` when an HTTP server answers `document`; `None` if the document is
/// not a usable answer.
pub fn http_answer(query: &[u8], document: &[u8]) -> Option<Vec<u8>> {
    json_answer::reply(&parsed(query)?, document).ok()
}

fn parsed(message: &[u8]) -> Option<Query<'_>> {
    match parse(message) {
        Parsed::Query(query) => Some(query),
        Parsed::Reply(_) | Parsed::Drop => None,
    }
}

/// Returns whether a message is well-formed: its counts match, its names end, and its data has the
/// format of its types.
pub fn is_sound(message: &[u8]) -> bool {
    MessageIndex::of(message).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_reply_is_forwarded_and_cached() {
        let query = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x02ok\x07example\0\0\x01\0\x01";
        let mut reply = query.to_vec();
        reply[2..4].copy_from_slice(&[0x81, 0x80]);
        reply[7] = 1;
        reply.extend(b"\xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x04\x0a\0\0\x01");
        let replies = CachedReplies::new();
        let given = replies.give(query, reply.clone()).unwrap();
        assert_eq!(
            (&given.at_once, given.from_cache.as_ref()),
            (&reply, Some(&reply))
        );
        assert!(is_sound(&reply) && !is_sound(&reply[..reply.len() - 1]));
        assert!(
            replies
                .give(query, reply[..reply.len() - 1].to_vec())
                .is_none()
        );
        let document =
            br#"{"Status": 0, "Answer": [{"name": "x", "type": 1, "TTL": 60, "data": "10.0.0.1"}]}"#;
        assert!(is_sound(&http_answer(query, document).unwrap()));
        assert!(http_answer(query, b"[]").is_none());
    }

    #[test]
    fn cached_reply_counts_down() {
        let query = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x02ok\x07example\0\0\x01\0\x01";
        let mut reply = query.to_vec();
        reply[2..4].copy_from_slice(&[0x81, 0x80]);
        reply[7] = 1;
        reply.extend(b"\xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x04\x0a\0\0\x01");
        let replies = CachedReplies::default();
        let second = Duration::from_secs(1);
        assert_eq!(replies.reply_at(query, second), None);
        let given = replies.give(query, reply.clone()).unwrap();
        assert_eq!(
            given.copy.map(|copy| (copy.ttl, copy.lifetime)),
            Some((60, 60))
        );
        reply[37] = 59;
        assert_eq!(replies.reply_at(query, second), Some(reply));
        assert_eq!(replies.reply_at(query, 60 * second), None);
        assert_eq!(replies.reply_at(b"no query", second), None);
        // Neither replies nor queries of another kind are queries.
        assert!(replies.give(&query[..12], Vec::new()).is_none());
    }
}
