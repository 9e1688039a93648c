//! Converts the JSON document of an HTTP handler: the client gets a well-formed message or no
//! reply.

use dns_upstream::fuzzing::{http_answer, is_sound};

/// `ok.example. A`, with RD.
const QUERY: &[u8] = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x02ok\x07example\0\0\x01\0\x01";

pub(crate) fn run(document: &[u8]) {
    let Some(reply) = http_answer(QUERY, document) else {
        return;
    };
    assert!(is_sound(&reply), "{reply:02x?}");
    assert_eq!(reply[..2], QUERY[..2], "another id");
    assert_eq!(
        reply.get(12..QUERY.len()),
        QUERY.get(12..),
        "another question"
    );
}
