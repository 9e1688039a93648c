//! Parses a client's message and truncates a recursor's message to the client's limit.

use dns_core::resolve::{Checks, Existence, Resolution};
use dns_core::wire::{self, Parsed, Shuffle, Transport};

pub(crate) fn run(bytes: &[u8]) {
    // The first byte is the length of the client's message.
    let Some((&length, rest)) = bytes.split_first() else {
        return;
    };
    let (message, foreign) = rest.split_at(rest.len().min(usize::from(length)));
    let resolution = Resolution {
        existence: Existence::Found,
        v4: (0..40).map(|number| [10, 0, 0, number].into()).collect(),
        v6: vec![[0xfd00, 0, 0, 0, 0, 0, 0, 1].into()],
        checks: Checks::default(),
    };
    let mut reply = Vec::new();
    for transport in [Transport::Udp, Transport::Tcp] {
        let Parsed::Query(query) = wire::parse_by(transport, message) else {
            return;
        };
        let limit = query.limit();
        wire::local_reply(
            &query,
            resolution.answer(),
            &mut Shuffle::with_seed(1),
            &mut reply,
        );
        assert!(
            reply.len() <= limit && reply[..2] == message[..2],
            "{} bytes of {limit}",
            reply.len()
        );
        reply.clear();
        let fitted = wire::truncate_to_client(&query, foreign.to_vec());
        assert!(fitted.len() <= limit, "{} bytes of {limit}", fitted.len());
    }
}
