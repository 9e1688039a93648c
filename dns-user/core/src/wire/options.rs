//! EDNS options (RFC 6891, section 6.1.2) and Extended DNS Errors (RFC 8914).

use std::borrow::Cow;

use super::{Layout, OPT_LEN, Query, u16_at};

/// Option NSID, the name of the server (RFC 5001).
pub const OPTION_NSID: u16 = 3;
/// Option Client Subnet (RFC 7871, section 6).
pub const OPTION_CLIENT_SUBNET: u16 = 8;
/// Option Cookie (RFC 7873, section 4).
pub const OPTION_COOKIE: u16 = 10;
/// Option Padding (RFC 7830).
pub const OPTION_PADDING: u16 = 12;
/// Option Extended DNS Error (RFC 8914, section 2).
pub const OPTION_EXTENDED_ERROR: u16 = 15;

/// Maximum number of extended errors that are passed on from one reply.
const MAX_ERRORS: usize = 4;
/// Maximum length in bytes of their texts.
const MAX_TEXT: usize = 255;

/// One option of an OPT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EdnsOption<'a> {
    /// OPTION-CODE (RFC 6891, section 6.1.2).
    pub code: u16,
    /// OPTION-DATA, without code and length.
    pub data: &'a [u8],
    /// The option with its code and length.
    pub whole: &'a [u8],
}

/// Iterates over the options in the data of an OPT, up to the first that is cut off.
#[derive(Clone, Copy, Debug)]
pub struct EdnsOptions<'a>(pub(super) &'a [u8]);

impl<'a> Iterator for EdnsOptions<'a> {
    type Item = EdnsOption<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        let code = u16_at(self.0, 0)?;
        let end = 4 + usize::from(u16_at(self.0, 2)?);
        // Only replies of other servers can be cut off here: `read_opt` has checked those of
        // queries.
        let (whole, rest) = self.0.split_at_checked(end)?;
        self.0 = rest;
        Some(EdnsOption {
            code,
            data: &whole[4..],
            whole,
        })
    }
}

/// INFO-CODE of an Extended DNS Error that this server creates (RFC 8914, section 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum InfoCode {
    /// None of the others.
    Other = 0,
    /// An expired answer, because no new one could be fetched.
    StaleAnswer = 3,
    /// An error that was cached.
    CachedError = 13,
    /// The server cannot answer yet.
    NotReady = 14,
    /// The server's administrator denies the name.
    Blocked = 15,
    /// An expired denial, because no new answer could be fetched.
    StaleNxdomain = 19,
    /// The server does not answer for this name.
    NotAuthoritative = 20,
    /// The server does not support the question.
    NotSupported = 21,
    /// No recursor answered.
    NoReachableAuthority = 22,
    /// An exchange with another server failed.
    NetworkError = 23,
}

/// An Extended DNS Error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtendedError {
    /// INFO-CODE (RFC 8914, section 2).
    pub code: u16,
    /// EXTRA-TEXT, in UTF-8 unless another server wrote something else.
    pub text: Cow<'static, [u8]>,
}

impl ExtendedError {
    /// Creates an error with a text.
    pub const fn new(code: InfoCode, text: &'static str) -> Self {
        Self {
            code: code as u16,
            text: Cow::Borrowed(text.as_bytes()),
        }
    }

    /// Creates an error with a text that depends on the circumstances.
    pub fn with_text(code: InfoCode, text: String) -> Self {
        Self {
            code: code as u16,
            text: Cow::Owned(text.into_bytes()),
        }
    }

    /// Reads the errors in the data of an OPT, the first few.
    pub fn read_all(opt_data: &[u8]) -> Vec<Self> {
        let mut errors = Vec::new();
        for option in EdnsOptions(opt_data) {
            // Any number may come (RFC 8914, section 2), and each is copied for every client.
            if errors.len() == MAX_ERRORS {
                break;
            }
            if option.code == OPTION_EXTENDED_ERROR
                && let Some((code, text)) = option.data.split_first_chunk()
            {
                errors.push(Self {
                    code: u16::from_be_bytes(*code),
                    text: text[..text.len().min(MAX_TEXT)].to_vec().into(),
                });
            }
        }
        errors
    }

    /// Adds the error to a complete reply, without its text if that does not fit. Does nothing for a
    /// client without EDNS, or with `compat.echo_opt`, because bosh-dns has no such errors.
    pub fn push(&self, query: &Query<'_>, reply: &mut Vec<u8>) {
        if query.edns.is_none() || query.echo_client_opt {
            return;
        }
        let limit = query.limit();
        let code = self.code.to_be_bytes();
        // Records are worth more than an explanation, so the error takes only room that is left.
        // The code alone is of use, too.
        let _ = push_option(reply, limit, OPTION_EXTENDED_ERROR, &[&code, &self.text])
            || push_option(reply, limit, OPTION_EXTENDED_ERROR, &[&code]);
    }
}

/// Adds an option with this data to the OPT at the end of a reply; `false` if there is none, or if the
/// reply would be longer than `limit`.
pub fn push_option(reply: &mut Vec<u8>, limit: usize, code: u16, data: &[&[u8]]) -> bool {
    let Some((start, end)) = Layout::read(reply).and_then(|layout| layout.opt) else {
        return false;
    };
    let length: usize = data.iter().map(|part| part.len()).sum();
    let added = 4 + length;
    let opt_length = end - start - OPT_LEN + added;
    let Ok(opt_length) = u16::try_from(opt_length) else {
        return false;
    };
    let Ok(length) = u16::try_from(length) else {
        return false;
    };
    // Our OPT is the last record, and owned by the root.
    if end != reply.len() || reply[start] != 0 || reply.len() + added > limit {
        return false;
    }
    reply[start + OPT_LEN - 2..start + OPT_LEN].copy_from_slice(&opt_length.to_be_bytes());
    reply.extend_from_slice(&code.to_be_bytes());
    reply.extend_from_slice(&length.to_be_bytes());
    data.iter().for_each(|part| reply.extend_from_slice(part));
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Parsed, Transport, error_reply, parse, parse_by};
    use hickory_proto::op::ResponseCode;

    /// A query for `a. A` with an OPT of this size and a cookie.
    fn query(size: u16) -> Vec<u8> {
        let mut message = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\x01\x01a\0\0\x01\0\x01\0\0\x29".to_vec();
        message.extend_from_slice(&size.to_be_bytes());
        message.extend_from_slice(b"\0\0\0\0\0\x0c\0\x0a\0\x08abcdefgh");
        message
    }

    fn parsed(message: &[u8]) -> Query<'_> {
        let Parsed::Query(query) = parse(message) else {
            panic!("a query")
        };
        query
    }

    #[test]
    fn options_are_listed() {
        let message = query(1232);
        let query = parsed(&message);
        let options: Vec<(u16, &[u8])> = query
            .options()
            .map(|option| (option.code, option.data))
            .collect();
        assert_eq!(options, [(10, &b"abcdefgh"[..])]);
        assert_eq!(
            EdnsOptions(b"\0\x03\0\0\0\x0a\0\x05ab").count(),
            1,
            "the second is cut off"
        );
    }

    #[test]
    fn errors_are_added_and_read() {
        let message = query(1232);
        let query = parsed(&message);
        let errors = [
            ExtendedError::new(InfoCode::CachedError, ""),
            ExtendedError::new(InfoCode::NetworkError, "no reply"),
        ];
        let mut reply = error_reply(&query, ResponseCode::ServFail);
        let bare = reply.len();
        errors
            .iter()
            .for_each(|error| error.push(&query, &mut reply));
        assert_eq!(
            reply[bare - 2..],
            *b"\0\x14\0\x0f\0\x02\0\x0d\0\x0f\0\x0a\0\x17no reply"
        );
        assert_eq!(ExtendedError::read_all(&reply[bare..]), errors);
        // Behind the client's limit, the text is left out first.
        let long = ExtendedError::with_text(InfoCode::Other, "x".repeat(600));
        let small = self::query(512);
        let mut reply = error_reply(&parsed(&small), ResponseCode::ServFail);
        long.push(&parsed(&small), &mut reply);
        assert_eq!(ExtendedError::read_all(&reply[bare..])[0].text.len(), 0);
        assert_eq!(reply.len(), bare + 6);
        let mut reply = error_reply(&parsed(&small), ResponseCode::ServFail);
        let Parsed::Query(small) = parse_by(Transport::Tcp, &small) else {
            panic!("a query")
        };
        long.push(&small, &mut reply);
        assert_eq!(
            ExtendedError::read_all(&reply[bare..])[0].text.len(),
            MAX_TEXT
        );
    }

    #[test]
    fn replies_without_opt_stay_unchanged() {
        let plain = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x01a\0\0\x01\0\x01".to_vec();
        let mut reply = error_reply(&parsed(&plain), ResponseCode::ServFail);
        let before = reply.clone();
        ExtendedError::new(InfoCode::Other, "x").push(&parsed(&plain), &mut reply);
        assert!(!push_option(&mut reply, 512, OPTION_NSID, &[b"x"]));
        assert_eq!(reply, before);
        assert!(!push_option(&mut Vec::new(), 512, OPTION_NSID, &[b"x"]));
    }

    #[test]
    fn first_errors_are_read() {
        let error = |code: u8, text: &[u8]| {
            let length = 2 + text.len() as u8;
            [&[0, 15, 0, length, 0, code], text].concat()
        };
        let data = [
            error(1, b"a"),
            // Too short for a code.
            b"\0\x0f\0\x01x".to_vec(),
            // Another option.
            b"\0\x0a\0\x02ab".to_vec(),
            error(2, b""),
            error(3, b"c"),
            error(4, b"d"),
            error(5, b"e"),
        ];
        let found = ExtendedError::read_all(&data.concat());
        let expected = [(1, "a"), (2, ""), (3, "c"), (4, "d")].map(|(code, text)| ExtendedError {
            code,
            text: Cow::Borrowed(text.as_bytes()),
        });
        assert_eq!(found, expected);
        let mut long = b"\0\x0f\x01\x02\0\x07".to_vec();
        long.resize(6 + 256, b'x');
        assert_eq!(ExtendedError::read_all(&long)[0].text.len(), 255);
    }

    #[test]
    fn options_need_own_final_opt() {
        let message = query(1232);
        let reply = error_reply(&parsed(&message), ResponseCode::Refused);
        let at = reply.len() - OPT_LEN;
        let mut owned = reply.clone();
        owned.splice(at..=at, *b"\x01a\0");
        let mut followed = reply.clone();
        followed.push(0);
        for (what, reply) in [("an owner", owned), ("bytes behind it", followed)] {
            let mut longer = reply.clone();
            assert!(!push_option(&mut longer, 1232, 10, &[b"ab"]), "{what}");
            assert_eq!(longer, reply);
        }
        // Lengths have 16 bits, those of the OPT as well.
        let large = vec![0; 65_532];
        for (data, expected) in [(&large[..65_531], true), (&large[..], false)] {
            let mut longer = reply.clone();
            assert_eq!(push_option(&mut longer, usize::MAX, 10, &[data]), expected);
            if expected {
                assert!(!push_option(&mut longer, usize::MAX, 10, &[]));
            }
        }
        let mut two = reply.clone();
        assert!(push_option(&mut two, 1232, 10, &[b"ab", b"c"]));
        assert!(push_option(&mut two, 1232, 3, &[]));
        let expected = [&reply[..at + 9], b"\0\x0b\0\x0a\0\x03abc\0\x03\0\0"].concat();
        assert_eq!(two, expected);
    }

    #[test]
    fn older_opt_omits_errors() {
        let message = query(1232);
        let from = crate::wire::RequestInfo {
            client: None,
            transport: Transport::Udp,
        };
        for echo_client_opt in [false, true] {
            let settings = crate::wire::ReplySettings {
                echo_client_opt,
                ..crate::wire::ReplySettings::default()
            };
            let Parsed::Query(query) = crate::wire::parse_from(&message, from, &settings) else {
                panic!("a query")
            };
            let mut reply = error_reply(&query, ResponseCode::ServFail);
            let bare = reply.len();
            ExtendedError::new(InfoCode::Blocked, "x").push(&query, &mut reply);
            let added = if echo_client_opt { 0 } else { 7 };
            assert_eq!(reply.len(), bare + added);
        }
    }

    #[test]
    fn options_fill_the_limit() {
        let message = query(1232);
        let query = parsed(&message);
        let reply = error_reply(&query, ResponseCode::ServFail);
        let whole = reply.len() + 4 + 3;
        for (limit, expected) in [(whole, true), (whole - 1, false)] {
            let mut longer = reply.clone();
            assert_eq!(
                push_option(&mut longer, limit, 10, &[b"ab", b"c"]),
                expected
            );
            assert_eq!(longer.len() == whole, expected);
        }
    }
}
