//! Parses JSON answers of HTTP handlers. Does no I/O.
//!
//! Public resolvers use this format: `{"TC": bool, "Status": rcode, "Answer": [{"name",
//! "type", "TTL", "data"}]}`. Member names have any letter case, and every member is optional
//! (observed).

use std::net::{Ipv4Addr, Ipv6Addr};

use super::message;
use dns_core::{
    config::reader::Json,
    name::Name,
    wire::{Query, ReplyFlags, begin_reply, owner_of_answers},
};

/// Reason why a JSON document is not an answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum JsonAnswerError {
    #[error("no JSON: {0}")]
    Syntax(String),
    /// A member has the wrong JSON type.
    #[error("{0} has the wrong type")]
    Kind(&'static str),
    /// None of the answers has data that fits its type.
    #[error("none of the {0} answers can be parsed")]
    Unreadable(usize),
}

/// Builds a reply to `query` from a JSON document.
pub(crate) fn reply(query: &Query<'_>, document: &[u8]) -> Result<Vec<u8>, JsonAnswerError> {
    let json = Json::parse(document).map_err(|error| JsonAnswerError::Syntax(error.to_string()))?;
    let document = members(&json).ok_or(JsonAnswerError::Kind("the document"))?;
    let truncated = match find(document, "TC") {
        None => false,
        Some(Json::Bool(value)) => *value,
        Some(_) => return Err(JsonAnswerError::Kind("TC")),
    };
    // The header has four bits for it, and JSON no OPT that would extend them.
    let rcode = number(document, "Status", 15)? as u8;
    let items: &[Json] = match find(document, "Answer") {
        None => &[],
        Some(Json::List(items)) => items,
        Some(_) => return Err(JsonAnswerError::Kind("Answer")),
    };
    let mut answers = Vec::new();
    for item in items {
        answers.push(JsonRecord::parse(item)?);
    }

    let mut reply = begin_reply(query, rcode, ReplyFlags::LOCAL);
    let mut numbers = message::question_numbers(&reply);
    message::set_truncated(&mut reply, truncated);
    // The first owner is the question's name whatever the JSON says (observed); after an alias it
    // is the alias's target.
    let mut owner = owner_of_answers(query).to_vec();
    let mut written = 0;
    for answer in &answers {
        let Some(data) = rdata(answer.rtype, answer.data) else {
            tracing::debug!(
                rtype = answer.rtype,
                data = answer.data,
                "answer skipped: its data cannot be parsed"
            );
            continue;
        };
        let start = reply.len();
        if !message::push_answer(&mut reply, &owner, answer.rtype, answer.ttl, &data) {
            message::set_truncated(&mut reply, true);
            break;
        }
        if !message::keep_sound_answer(&mut reply, start, &mut numbers) {
            tracing::debug!(
                rtype = answer.rtype,
                data = answer.data,
                "answer skipped: its data does not match its type"
            );
            continue;
        }
        written += 1;
        if answer.rtype == CNAME {
            owner = data;
        }
    }
    if written == 0 && !answers.is_empty() && !truncated {
        return Err(JsonAnswerError::Unreadable(answers.len()));
    }
    Ok(reply)
}

/// One answer of the document.
struct JsonRecord<'a> {
    rtype: u16,
    ttl: u32,
    /// Data in presentation format.
    data: &'a str,
}

impl<'a> JsonRecord<'a> {
    fn parse(json: &'a Json) -> Result<Self, JsonAnswerError> {
        let answer = members(json).ok_or(JsonAnswerError::Kind("an answer"))?;
        let rtype = number(answer, "type", u16::MAX.into())? as u16;
        let ttl = number(answer, "TTL", u32::MAX.into())? as u32;
        let data = match find(answer, "data") {
            None => "",
            Some(Json::Text(text)) => text,
            Some(_) => return Err(JsonAnswerError::Kind("data")),
        };
        Ok(Self { rtype, ttl, data })
    }
}

/// Returns the members of an object, none for null, `None` for anything else.
fn members(json: &Json) -> Option<&[(String, Json)]> {
    match json {
        Json::Object(members) => Some(members),
        Json::Null => Some(&[]),
        _ => None,
    }
}

/// Finds the last member of this name that is not null.
fn find<'a>(members: &'a [(String, Json)], name: &str) -> Option<&'a Json> {
    // As Go decodes: the last one counts, and null changes nothing.
    for (member, value) in members.iter().rev() {
        if member.eq_ignore_ascii_case(name) && *value != Json::Null {
            return Some(value);
        }
    }
    None
}

/// Returns the member of this name, an integer from 0 to `max`; 0 if it is absent.
fn number(
    members: &[(String, Json)],
    name: &'static str,
    max: u64,
) -> Result<u64, JsonAnswerError> {
    match find(members, name) {
        None => Ok(0),
        Some(value) => value
            .number_within(0, max)
            .ok_or(JsonAnswerError::Kind(name)),
    }
}

const CNAME: u16 = 5;

/// Converts data from presentation format to wire format; `None` if it does not fit its type. Types
/// without a presentation format here use RFC 3597's: `\# length hex`.
fn rdata(rtype: u16, text: &str) -> Option<Vec<u8>> {
    if let Some(generic) = text.strip_prefix("\\#") {
        return generic_data(generic);
    }
    let mut words = text.split_ascii_whitespace();
    let mut data = Vec::new();
    match rtype {
        1 => data.extend_from_slice(&text.trim().parse::<Ipv4Addr>().ok()?.octets()),
        28 => data.extend_from_slice(&text.trim().parse::<Ipv6Addr>().ok()?.octets()),
        // NS, CNAME, PTR, DNAME
        2 | CNAME | 12 | 39 => push_name(&mut data, words.next()?)?,
        // MX: preference; SRV: priority, weight, port
        15 | 33 => {
            let numbers = if rtype == 15 { 1 } else { 3 };
            for _ in 0..numbers {
                data.extend_from_slice(&words.next()?.parse::<u16>().ok()?.to_be_bytes());
            }
            push_name(&mut data, words.next()?)?;
        }
        // SOA
        6 => {
            push_name(&mut data, words.next()?)?;
            push_name(&mut data, words.next()?)?;
            for _ in 0..5 {
                data.extend_from_slice(&words.next()?.parse::<u32>().ok()?.to_be_bytes());
            }
        }
        // TXT, SPF: quoted strings, or one text without quotes.
        16 | 99 => return strings(text),
        // CAA (RFC 8659): flags, tag, value
        257 => {
            data.push(words.next()?.parse().ok()?);
            let tag = words.next()?;
            push_string(&mut data, tag.as_bytes())?;
            // Behind the flags, which a tag of digits may repeat (RFC 8659, section 4.1.1).
            let (_flags, rest) = text.trim_start().split_once(char::is_whitespace)?;
            let mut value = rest.split_once(tag)?.1.trim();
            if let Some(rest) = value.strip_prefix('"')
                && let Some(quoted) = rest.strip_suffix('"')
            {
                value = quoted;
            }
            data.extend_from_slice(value.as_bytes());
            return Some(data);
        }
        _ => return None,
    }
    let has_more = words.next().is_some() && !matches!(rtype, 1 | 28);
    if has_more { None } else { Some(data) }
}

/// Appends a domain name in its letter case, uncompressed.
fn push_name(data: &mut Vec<u8>, text: &str) -> Option<()> {
    data.extend_from_slice(&Name::wire_as_written(text).ok()?);
    Some(())
}

/// Appends a character-string (RFC 1035, section 3.3).
fn push_string(data: &mut Vec<u8>, text: &[u8]) -> Option<()> {
    data.push(u8::try_from(text.len()).ok()?);
    data.extend_from_slice(text);
    Some(())
}

/// Converts a text to character-strings: quoted ones with their escapes, otherwise the unchanged
/// text, split if it is too long for one.
fn strings(text: &str) -> Option<Vec<u8>> {
    let mut data = Vec::new();
    let mut rest = text.trim();
    if !rest.starts_with('"') {
        if text.is_empty() {
            data.push(0);
        }
        for chunk in text.as_bytes().chunks(255) {
            push_string(&mut data, chunk)?;
        }
        return Some(data);
    }
    while !rest.is_empty() {
        let mut bytes = rest.strip_prefix('"')?.bytes().enumerate();
        let mut string = Vec::new();
        let end = loop {
            match bytes.next()? {
                (at, b'"') => break at,
                (_, b'\\') => match bytes.next()?.1 {
                    digit @ b'0'..=b'9' => {
                        let digits = [digit, bytes.next()?.1, bytes.next()?.1];
                        string.push(std::str::from_utf8(&digits).ok()?.parse().ok()?);
                    }
                    other => string.push(other),
                },
                (_, other) => string.push(other),
            }
        };
        for chunk in string.chunks(255) {
            push_string(&mut data, chunk)?;
        }
        if string.is_empty() {
            data.push(0);
        }
        // `end` counts neither the opening nor the closing quotation mark.
        rest = rest[end + 2..].trim_start();
    }
    Some(data)
}

/// Parses the length and hexadecimal digits after `\#` (RFC 3597, section 5).
fn generic_data(text: &str) -> Option<Vec<u8>> {
    let mut words = text.split_ascii_whitespace();
    // RDLENGTH has 16 bits (RFC 1035, section 3.2.1). Twice a longer length could overflow, and
    // memory for it would be reserved below.
    let length = usize::from(words.next()?.parse::<u16>().ok()?);
    let digits: String = words.collect();
    if digits.len() != 2 * length {
        return None;
    }
    let mut data = Vec::with_capacity(length);
    for pair in digits.as_bytes().chunks_exact(2) {
        let high = char::from(pair[0]).to_digit(16)?;
        let low = char::from(pair[1]).to_digit(16)?;
        data.push((high << 4 | low) as u8);
    }
    Some(data)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use dns_core::wire::{Parsed, parse};

    /// A query for `x.example. A`.
    const QUERY: &[u8] = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x01x\x07example\0\0\x01\0\x01";

    /// Returns the reply to [`QUERY`].
    fn reply_to(document: &str) -> Result<Vec<u8>, JsonAnswerError> {
        let Parsed::Query(query) = parse(QUERY) else {
            panic!("a query")
        };
        reply(&query, document.as_bytes())
    }

    #[test]
    fn answers_become_records() {
        for (rtype, text, expected) in [
            (1, "192.0.2.1", &b"\xc0\0\x02\x01"[..]),
            (
                28,
                "2001:db8::1",
                b"\x20\x01\x0d\xb8\0\0\0\0\0\0\0\0\0\0\0\x01",
            ),
            (5, "Target.example.", b"\x06Target\x07example\0"),
            (5, "target", b"\x06target\0"),
            (15, "10 mail.example.", b"\0\x0a\x04mail\x07example\0"),
            (33, "1 2 8080 s.", b"\0\x01\0\x02\x1f\x90\x01s\0"),
            (
                6,
                "a. b. 1 2 3 4 5",
                b"\x01a\0\x01b\0\0\0\0\x01\0\0\0\x02\0\0\0\x03\0\0\0\x04\0\0\0\x05",
            ),
            (16, "\"text\"", b"\x04text"),
            (16, "\"a\\\"\\065\" \"\"", b"\x03a\"A\0"),
            (16, "\"a\"\"b\"", b"\x01a\x01b"),
            (16, "v=spf1 -all", b"\x0bv=spf1 -all"),
            (16, "", b"\0"),
            (257, "0 issue \"ca.example\"", b"\0\x05issueca.example"),
            (65_280, "\\# 3 01 02ff", b"\x01\x02\xff"),
        ] {
            assert_eq!(
                rdata(rtype, text).as_deref(),
                Some(expected),
                "type {rtype}: {text}"
            );
        }
        let long = "x".repeat(300);
        assert_eq!(rdata(16, &long).unwrap().len(), 302);
        for (rtype, text) in [
            (1, "nonsense"),
            (1, "2001:db8::1"),
            (28, "192.0.2.1"),
            (5, ""),
            (5, "a..b"),
            (15, "mail."),
            (15, "65536 mail."),
            (33, "1 2 s."),
            (16, "\"open"),
            (16, "\"a\" b"),
            (0, "192.0.2.1"),
            (65_280, "\\# 2 01"),
            (65_280, "\\# 9223372036854775808"),
            (65_280, "\\# 1 0g"),
        ] {
            assert_eq!(rdata(rtype, text), None, "type {rtype}: {text}");
        }
    }

    #[test]
    fn owners_follow_aliases() {
        let reply = reply_to(
            r#"{"Answer": [{"name": "ignored.", "type": 5, "TTL": 42, "data": "t."},
                           {"name": "ignored.", "type": 1, "TTL": 7, "data": "192.0.2.1"}]}"#,
        )
        .unwrap();
        assert_eq!(reply[2..8], [0x85, 0x80, 0, 1, 0, 2]);
        assert!(reply.ends_with(
            b"\xc0\x0c\0\x05\0\x01\0\0\0\x2a\0\x03\x01t\0\x01t\0\0\x01\0\x01\0\0\0\x07\0\x04\xc0\0\x02\x01"
        ));
    }

    #[test]
    fn status_and_tc_are_copied() {
        assert_eq!(reply_to(r#"{"status": 3}"#).unwrap()[3], 0x83);
        let reply =
            reply_to(r#"{"tc": true, "answer": [{"Type": 1, "ttl": 9, "DATA": "192.0.2.1"}]}"#)
                .unwrap();
        assert_eq!((reply[2], reply[7]), (0x87, 1));
        for empty in ["{}", "null", r#"{"Answer": null}"#, r#"{"Answer": []}"#] {
            assert_eq!(reply_to(empty).unwrap()[2..8], [0x85, 0x80, 0, 1, 0, 0]);
        }
    }

    #[test]
    fn wrong_json_types_are_rejected() {
        for document in [
            "",
            "{nope",
            "[]",
            r#"{"TC": 1}"#,
            r#"{"Status": "NXDOMAIN"}"#,
            r#"{"Answer": {}}"#,
            r#"{"Answer": [1]}"#,
            r#"{"Answer": [{"type": "A", "data": "192.0.2.1"}]}"#,
            r#"{"Answer": [{"type": 65536, "data": "192.0.2.1"}]}"#,
            r#"{"Answer": [{"type": 1, "TTL": -1, "data": "192.0.2.1"}]}"#,
            r#"{"Answer": [{"type": 1, "TTL": 1.5, "data": "192.0.2.1"}]}"#,
            r#"{"Answer": [{"type": 1, "data": 1}]}"#,
            r#"{"Answer": [{"type": 1, "data": "nonsense"}]}"#,
        ] {
            assert!(reply_to(document).is_err(), "{document}");
        }
    }

    #[test]
    fn generic_data_must_fit_type() {
        for (rtype, data) in [
            (1, "\\# 3 c00002"),
            (28, "\\# 1 00"),
            (41, "\\# 0"),
            (5, "\\# 2 c0ff"),
            (250, "\\# 0"),
        ] {
            let lie = format!(
                r#"{{"type": {rtype}, "data": "{}"}}"#,
                data.replace('\\', "\\\\")
            );
            assert_eq!(
                reply_to(&format!(r#"{{"Answer": [{lie}]}}"#)),
                Err(JsonAnswerError::Unreadable(1))
            );
            let truth = r#"{"type": 1, "TTL": 7, "data": "192.0.2.1"}"#;
            let both = reply_to(&format!(r#"{{"Answer": [{lie}, {truth}]}}"#)).unwrap();
            assert_eq!(
                message::MessageIndex::of(&both).map(|index| index.records),
                Some([1, 0, 0]),
                "{lie}"
            );
        }
    }

    #[test]
    fn oversized_answer_is_truncated() {
        let one = r#"{"type": 16, "data": "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"}"#;
        let document = format!(r#"{{"Answer": [{}]}}"#, vec![one; 2000].join(","));
        let reply = reply_to(&document).unwrap();
        assert_eq!(reply[2] & 0x02, 0x02);
        assert!(message::MessageIndex::of(&reply).is_some());
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(rtype: u16, text in "\\PC{0,80}", common in 0usize..10) {
            let _ = rdata(rtype, &text);
            let _ = rdata([1, 2, 5, 6, 15, 16, 28, 33, 99, 257][common], &text);
            let _ = rdata(16, &format!("\"{text}\""));
            let _ = reply_to(&text);
        }
    }

    #[test]
    fn presentation_formats_have_edges() {
        let long = "x".repeat(255);
        let tag = "t".repeat(255);
        for (rtype, text, expected) in [
            (1, " 192.0.2.1 ", Some(b"\xc0\0\x02\x01".to_vec())),
            (1, "192.0.2.1 more", None),
            (2, "a.", Some(b"\x01a\0".to_vec())),
            (12, "a", Some(b"\x01a\0".to_vec())),
            (39, ".", Some(b"\0".to_vec())),
            (5, "a. b.", None),
            (15, "65535 a.", Some(b"\xff\xff\x01a\0".to_vec())),
            (15, "10 a. b.", None),
            (15, "10", None),
            (33, "1 2 3 a. 4", None),
            (6, "a. b. 1 2 3 4", None),
            (6, "a. b. 1 2 3 4 5 6", None),
            (6, "a. b. 1 2 3 4 4294967296", None),
            (16, " x", Some(b"\x02 x".to_vec())),
            (99, "\"a b\"  \"c\" ", Some(b"\x03a b\x01c".to_vec())),
            (16, "\"\\255\\000\\a\"", Some(b"\x03\xff\0a".to_vec())),
            (16, "\"\\256\"", None),
            (16, "\"\\25\"", None),
            (16, "\"a\" \"", None),
            (16, &long, Some([b"\xff", long.as_bytes()].concat())),
            (
                16,
                &format!("{long}y"),
                Some([b"\xff", long.as_bytes(), b"\x01y"].concat()),
            ),
            (
                16,
                &format!("\"{long}yz\""),
                Some([b"\xff", long.as_bytes(), b"\x02yz"].concat()),
            ),
            (
                257,
                "0 issue ca.example",
                Some(b"\0\x05issueca.example".to_vec()),
            ),
            (257, "128 issue \"\"", Some(b"\x80\x05issue".to_vec())),
            (257, "0 issue \"a b", Some(b"\0\x05issue\"a b".to_vec())),
            (257, "0 issue", Some(b"\0\x05issue".to_vec())),
            (257, "128 12 x", Some(b"\x80\x0212x".to_vec())),
            (257, " 0  0 0 ", Some(b"\0\x0100".to_vec())),
            (257, "0", None),
            (257, "256 issue x", None),
            (
                257,
                &format!("0 {tag}"),
                Some([b"\0\xff", tag.as_bytes()].concat()),
            ),
            (257, &format!("0 {tag}t"), None),
            (257, "\\# 0", Some(Vec::new())),
            (1, "\\# 2 0aB0", Some(b"\x0a\xb0".to_vec())),
            (1, "\\# 1 f0", Some(b"\xf0".to_vec())),
            (1, "\\# 1 a", None),
            (1, "\\# 1 abc", None),
            (1, "\\#", None),
            (1, "\\# 65536", None),
            (3, "a.", None),
        ] {
            assert_eq!(rdata(rtype, text), expected, "type {rtype}: {text}");
        }
    }

    #[test]
    fn last_nonnull_member_counts() {
        for (document, expected) in [
            (r#"{"Status": 3, "status": null}"#, Ok(3)),
            (r#"{"Status": 3, "STATUS": 5}"#, Ok(5)),
            (r#"{"Status": 15}"#, Ok(15)),
            (r#"{"Status": 16}"#, Err("Status has the wrong type")),
            (r#"{"Status": -1}"#, Err("Status has the wrong type")),
            (r#"{"TC": "true"}"#, Err("TC has the wrong type")),
            (r#"{"TC": null}"#, Ok(0)),
            ("7", Err("the document has the wrong type")),
            (r#"{"Answer": 7}"#, Err("Answer has the wrong type")),
            (r#"{"Answer": [7]}"#, Err("an answer has the wrong type")),
            (
                r#"{"Answer": [{"type": 65536}]}"#,
                Err("type has the wrong type"),
            ),
            (
                r#"{"Answer": [{"TTL": 4294967296}]}"#,
                Err("TTL has the wrong type"),
            ),
            (
                r#"{"Answer": [{"data": []}]}"#,
                Err("data has the wrong type"),
            ),
            (
                r#"{"Answer": [{"type": 65535, "TTL": 4294967295}, null]}"#,
                Err("none of the 2 answers can be parsed"),
            ),
        ] {
            let found = reply_to(document).map(|reply| reply[3] & 15);
            let expected = expected.map_err(str::to_owned);
            assert_eq!(
                found.map_err(|error| error.to_string()),
                expected,
                "{document}"
            );
        }
        let syntax = reply_to("{").unwrap_err().to_string();
        assert!(syntax.starts_with("no JSON: "), "{syntax}");
    }

    #[test]
    fn unreadable_answers_are_left_out() {
        let good = r#"{"type": 1, "TTL": 7, "data": "192.0.2.1"}"#;
        let bad = r#"{"type": 1, "data": "nonsense"}"#;
        for (tc, answers, expected) in [
            ("false", vec![good, bad], Some((0x85, 1))),
            ("false", vec![bad, good, good], Some((0x85, 2))),
            ("false", vec![bad], None),
            // The client asks again by TCP anyway.
            ("true", vec![bad], Some((0x87, 0))),
            ("true", vec![], Some((0x87, 0))),
        ] {
            let document = format!(r#"{{"TC": {tc}, "Answer": [{}]}}"#, answers.join(","));
            let found = reply_to(&document).ok().map(|reply| (reply[2], reply[7]));
            assert_eq!(found, expected, "{document}");
        }
    }

    #[test]
    fn root_is_its_own_owner() {
        let query = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\0\0\x01\0\x01";
        let Parsed::Query(query) = parse(query) else {
            panic!("a query")
        };
        let document = br#"{"Answer": [{"type": 1, "TTL": 7, "data": "192.0.2.1"}]}"#;
        let reply = reply(&query, document).unwrap();
        assert_eq!(
            reply[17..],
            *b"\0\0\x01\0\x01\0\0\0\x07\0\x04\xc0\0\x02\x01"
        );
    }
}
