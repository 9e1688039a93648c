//! Values with a special syntax: durations, file patterns and recursors.
use std::{
    net::{IpAddr, Ipv6Addr},
    time::Duration,
};

//----------- Duration -----------------------------------------------------
//
// Durations in Go syntax: `1h2m3.5s`, `400ms`, `-1.5h`, `0`.

/// The reason why a text is not a valid duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DurationError {
    /// No number with a unit, or extra characters.
    #[error("is not a duration")]
    Malformed,
    /// A number without a unit.
    #[error("lacks a unit")]
    NoUnit,
    /// A unit other than ns, us, ms, s, m, h.
    #[error("has an unknown unit")]
    UnknownUnit,
    /// Negative durations are valid in Go, but not for any setting.
    #[error("is negative")]
    Negative,
    /// More than 2^63 ns, about 292 years.
    #[error("is too long")]
    TooLong,
}

/// Parses a duration like Go's `time.ParseDuration`, but rejects negative ones.
pub fn parse_duration(text: &str) -> Result<Duration, DurationError> {
    let (negative, mut rest) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    // The only duration of Go without a unit.
    if rest == "0" {
        return Ok(Duration::ZERO);
    }
    if rest.is_empty() {
        return Err(DurationError::Malformed);
    }
    let mut nanoseconds: u128 = 0;
    while !rest.is_empty() {
        let (part, tail) = one_part(rest)?;
        nanoseconds = nanoseconds
            .checked_add(part)
            .ok_or(DurationError::TooLong)?;
        rest = tail;
    }
    // Go counts nanoseconds in an `int64`.
    if nanoseconds > i64::MAX as u128 {
        return Err(DurationError::TooLong);
    }
    if negative && nanoseconds > 0 {
        return Err(DurationError::Negative);
    }
    // Below 2^63, as just checked.
    Ok(Duration::from_nanos(nanoseconds as u64))
}

/// Parses one number with its unit; returns nanoseconds and the remaining text.
fn one_part(text: &str) -> Result<(u128, &str), DurationError> {
    let whole_end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (whole, mut rest) = text.split_at(whole_end);
    let mut fraction = "";
    if let Some(after_dot) = rest.strip_prefix('.') {
        let end = after_dot
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(after_dot.len());
        (fraction, rest) = after_dot.split_at(end);
    }
    if whole.is_empty() && fraction.is_empty() {
        return Err(DurationError::Malformed);
    }
    // As in Go, everything up to the next digit or dot belongs to the unit, even a space.
    let unit_end = rest
        .find(|c: char| c == '.' || c.is_ascii_digit())
        .unwrap_or(rest.len());
    let (unit, rest) = rest.split_at(unit_end);
    let unit: u128 = match unit {
        "" => return Err(DurationError::NoUnit),
        "ns" => 1,
        // Both signs for micro: U+00B5 and the Greek letter U+03BC.
        "us" | "\u{b5}s" | "\u{3bc}s" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        _ => return Err(DurationError::UnknownUnit),
    };
    let whole: u128 = if whole.is_empty() {
        0
    } else {
        whole
            .parse::<u64>()
            .map_err(|_| DurationError::TooLong)?
            .into()
    };
    let mut nanoseconds = whole.checked_mul(unit).ok_or(DurationError::TooLong)?;
    // Digits past the 18th are below a nanosecond for every unit.
    let mut scale = unit;
    let mut value = 0;
    let mut divisor = 1;
    for digit in fraction.bytes().take(18) {
        value = value * 10 + u128::from(digit - b'0');
        divisor *= 10;
    }
    scale = scale.checked_mul(value).ok_or(DurationError::TooLong)? / divisor;
    nanoseconds = nanoseconds
        .checked_add(scale)
        .ok_or(DurationError::TooLong)?;
    Ok((nanoseconds, rest))
}

//----------- File pattern -------------------------------------------------
//
// File patterns in the syntax of Go's `filepath.Glob`: `*`, `?`, `[a-z]`, `[^a-z]`, `\` before a
// character. None of them matches a slash; names that start with a dot are not special.
//
// Pure: callers list directories themselves and call [`pattern_matches()`] for each name.

/// An invalid pattern: an unclosed bracket, an empty range, or a trailing backslash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not a file pattern (an unclosed [ or a backslash at the end)")]
pub struct BadPattern;

/// Validates every component of a pattern.
pub fn check_pattern(pattern: &str) -> Result<(), BadPattern> {
    pattern
        .split('/')
        .try_for_each(|part| pattern_matches(part.as_bytes(), b"").map(drop))
}

/// Returns whether a component contains a special character.
pub fn is_pattern(part: &str) -> bool {
    part.contains(['*', '?', '[', '\\'])
}

/// Returns whether a name without slashes matches a pattern without slashes.
///
/// Only the latest star is backtracked, so the work is bounded by the product of the two lengths.
/// The whole pattern is parsed first, so an invalid one is always reported.
pub fn pattern_matches(pattern: &[u8], name: &[u8]) -> Result<bool, BadPattern> {
    let units = parse(pattern)?;
    let mut unit = 0;
    let mut at = 0;
    let mut star: Option<(usize, usize)> = None;
    while at < name.len() {
        match units.get(unit) {
            Some(Unit::Star) => {
                star = Some((unit, at));
                unit += 1;
                continue;
            }
            Some(Unit::One(set)) if set.holds(name[at]) => {
                unit += 1;
                at += 1;
                continue;
            }
            _ => {}
        }
        let Some((star_unit, star_at)) = star else {
            return Ok(false);
        };
        star = Some((star_unit, star_at + 1));
        unit = star_unit + 1;
        at = star_at + 1;
    }
    Ok(units[unit..].iter().all(|unit| matches!(unit, Unit::Star)))
}

/// An element of a pattern.
enum Unit {
    /// `*`: any number of characters.
    Star,
    /// A single character from a set.
    One(Set),
}

/// A set of bytes.
struct Set {
    /// Whether bytes outside the ranges match.
    negated: bool,
    ranges: Vec<(u8, u8)>,
}

impl Set {
    fn holds(&self, byte: u8) -> bool {
        self.ranges
            .iter()
            .any(|&(low, high)| (low..=high).contains(&byte))
            != self.negated
    }
}

/// Splits a pattern into its elements.
fn parse(pattern: &[u8]) -> Result<Vec<Unit>, BadPattern> {
    let mut units = Vec::new();
    let mut rest = pattern;
    while let Some((&first, tail)) = rest.split_first() {
        rest = tail;
        units.push(match first {
            b'*' => Unit::Star,
            b'?' => Unit::One(Set {
                negated: true,
                ranges: Vec::new(),
            }),
            b'[' => {
                let (set, tail) = parse_set(tail)?;
                rest = tail;
                Unit::One(set)
            }
            b'\\' => {
                let (&literal, tail) = tail.split_first().ok_or(BadPattern)?;
                rest = tail;
                Unit::One(Set {
                    negated: false,
                    ranges: vec![(literal, literal)],
                })
            }
            literal => Unit::One(Set {
                negated: false,
                ranges: vec![(literal, literal)],
            }),
        });
    }
    Ok(units)
}

/// Parses a set after its `[`; returns the text behind its `]` too.
fn parse_set(text: &[u8]) -> Result<(Set, &[u8]), BadPattern> {
    let (negated, mut rest) = match text.split_first() {
        Some((b'^', tail)) => (true, tail),
        _ => (false, text),
    };
    let mut ranges = Vec::new();
    loop {
        // Go ends a set only behind its first range, so `[]` and `[]a]` are invalid.
        if let (Some((b']', tail)), false) = (rest.split_first(), ranges.is_empty()) {
            return Ok((Set { negated, ranges }, tail));
        }
        let (low, tail) = set_character(rest)?;
        rest = tail;
        let mut high = low;
        if let Some((b'-', tail)) = rest.split_first() {
            (high, rest) = set_character(tail)?;
        }
        ranges.push((low, high));
    }
}

fn set_character(text: &[u8]) -> Result<(u8, &[u8]), BadPattern> {
    match text.split_first() {
        // As in Go, `-` and `]` inside a set need a backslash.
        None | Some((b'-' | b']', _)) => Err(BadPattern),
        Some((b'\\', tail)) => tail
            .split_first()
            .map(|(&byte, tail)| (byte, tail))
            .ok_or(BadPattern),
        Some((&byte, tail)) => Ok((byte, tail)),
    }
}

//----------- Recursor -----------------------------------------------------
//
// Recursor addresses in configurations and handler files.

/// A text that is not the address of a recursor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a recursor; expected an IP address, IP:port, [IPv6]:port or host:port, with DNS over TLS \
     after tls:// and with the name in the server's certificate after #"
)]
pub struct NoRecursor(pub String);

/// Adds port 53 if there is none: `10.0.0.2`, `::1`, `10.0.0.2:5353`, `[::1]:5353`, `name:53`.
///
/// A host without a port must be an IP address, and brackets require a port (observed: `[::1]`
/// alone is rejected). With `tls://`, the default is port 853, and a name may follow:
/// `tls://9.9.9.9#dns.quad9.net`.
pub fn with_port(text: &str) -> Result<String, NoRecursor> {
    completed(text).ok_or_else(|| NoRecursor(text.to_owned()))
}

fn completed(text: &str) -> Option<String> {
    if let Some(tls) = text.strip_prefix("tls://") {
        let (server, name) = match tls.split_once('#') {
            Some((server, name)) => (server, Some(name)),
            None => (tls, None),
        };
        // DNS over TLS has a port of its own (RFC 7858, section 3.1).
        let server = match server.parse::<IpAddr>() {
            Ok(IpAddr::V4(address)) => format!("{address}:853"),
            _ if is_ipv6(server) => format!("[{server}]:853"),
            _ => completed(server)?,
        };
        return match name {
            None => Some(format!("tls://{server}")),
            Some(name) if is_host_name(name) => Some(format!("tls://{server}#{name}")),
            Some(_) => None,
        };
    }
    match text.parse::<IpAddr>() {
        Ok(IpAddr::V4(address)) => return Some(format!("{address}:53")),
        _ if is_ipv6(text) => return Some(format!("[{text}]:53")),
        _ => {}
    }
    let (host, port) = text.rsplit_once(':')?;
    let bracketed = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    let host_is_sound = match bracketed {
        Some(host) => is_ipv6(host),
        // Without brackets the last group of an IPv6 address could as well be a port.
        None => !host.is_empty() && !host.contains([':', '[', ']', '/', ' ']),
    };
    let port_is_sound = port.parse::<u16>().is_ok_and(|port| port != 0);
    (host_is_sound && port_is_sound).then(|| text.to_owned())
}

/// Returns whether the text is a host name or an address, as certificates contain them.
fn is_host_name(text: &str) -> bool {
    text.parse::<IpAddr>().is_ok()
        || text.len() <= 253
            && text.split('.').all(|label: &str| {
                (1..=63).contains(&label.len())
                    && label
                        .bytes()
                        .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
            })
}

/// Returns whether the text is an IPv6 address, optionally with a zone (`fe80::2%eth0`, RFC 6874).
/// Only link-local addresses may have one.
fn is_ipv6(text: &str) -> bool {
    let (address, zone) = text
        .split_once('%')
        .map_or((text, None), |(address, zone)| (address, Some(zone)));
    address.parse::<Ipv6Addr>().is_ok_and(|address| {
        zone.is_none_or(|zone| {
            address.is_unicast_link_local()
                && !zone.is_empty()
                && !zone.contains([':', '[', ']', '/', ' ', '%'])
        })
    })
}

#[cfg(test)]
mod duration_tests {
    use super::*;

    #[test]
    fn go_forms_are_read() {
        for (text, nanoseconds) in [
            ("0", 0),
            ("-0s", 0),
            ("5s", 5_000_000_000),
            ("+5s", 5_000_000_000),
            ("1h2m3.5s", 3_723_500_000_000),
            (".5s", 500_000_000),
            ("1.s", 1_000_000_000),
            ("100ms", 100_000_000),
            ("3us", 3_000),
            ("3\u{b5}s4ns", 3_004),
            ("0.1234567890123456789s", 123_456_789),
            ("0.0000000009s", 0),
            ("1.5h", 5_400_000_000_000),
            ("2\u{3bc}s", 2_000),
            ("9223372036854775807ns", i64::MAX as u64),
        ] {
            assert_eq!(
                parse_duration(text),
                Ok(Duration::from_nanos(nanoseconds)),
                "{text}"
            );
        }
    }

    #[test]
    fn reasons_complete_a_sentence() {
        let reasons = [
            (DurationError::Malformed, "is not a duration"),
            (DurationError::NoUnit, "lacks a unit"),
            (DurationError::UnknownUnit, "has an unknown unit"),
            (DurationError::Negative, "is negative"),
            (DurationError::TooLong, "is too long"),
        ];
        for (reason, text) in reasons {
            assert_eq!(reason.to_string(), text);
        }
    }

    #[test]
    fn other_forms_are_refused() {
        for (text, error) in [
            ("", DurationError::Malformed),
            ("-", DurationError::Malformed),
            ("s", DurationError::Malformed),
            (".s", DurationError::Malformed),
            ("2", DurationError::NoUnit),
            ("1s2", DurationError::NoUnit),
            ("2 s", DurationError::UnknownUnit),
            ("1d", DurationError::UnknownUnit),
            ("abc", DurationError::Malformed),
            ("-1s", DurationError::Negative),
            ("3000000h", DurationError::TooLong),
            ("9223372036854775808ns", DurationError::TooLong),
            ("-9223372036854775808ns", DurationError::TooLong),
            ("-1ns", DurationError::Negative),
            ("..5s", DurationError::Malformed),
            ("18446744073709551616ns", DurationError::TooLong),
            ("99999999999999999999s", DurationError::TooLong),
        ] {
            assert_eq!(parse_duration(text), Err(error), "{text:?}");
        }
    }
}

#[cfg(test)]
mod file_pattern_tests {
    use super::*;

    #[test]
    fn special_characters_make_patterns() {
        for (part, is_special) in [
            ("", false),
            ("plain.json", false),
            ("a]b^c-d", false),
            ("*", true),
            ("a?", true),
            ("[a]", true),
            ("a\\b", true),
        ] {
            assert_eq!(is_pattern(part), is_special, "{part}");
        }
        for (pattern, is_sound) in [
            ("", true),
            ("/a/*/b?/[c-d].json", true),
            ("/[/a", false),
            ("/a/[b", false),
            ("/a\\", false),
            // No set reaches over a slash.
            ("[a/b]", false),
        ] {
            assert_eq!(check_pattern(pattern).is_ok(), is_sound, "{pattern}");
        }
        assert_eq!(
            BadPattern.to_string(),
            "is not a file pattern (an unclosed [ or a backslash at the end)"
        );
    }

    #[test]
    fn names_match_as_in_go() {
        for (pattern, name, expected) in [
            ("*.json", "a.json", true),
            ("*.json", ".json", true),
            ("*.json", "a.jsonx", false),
            ("*a*b", "xxaxxabb", true),
            ("?", "", false),
            ("?.c", "a.c", true),
            ("[a-c]x", "bx", true),
            ("[^a-c]x", "bx", false),
            ("\\*", "*", true),
            ("\\*", "a", false),
            ("\\[", "[", true),
            ("[a\\-c]", "-", true),
            ("[a\\-c]", "b", false),
            ("[^ab]", "c", true),
            ("[^ab]", "a", false),
            ("[^^]", "^", false),
            ("[ac-e]", "d", true),
            ("[ac-e]", "b", false),
            ("[a-c][x]", "cx", true),
            ("a*", "a", true),
            ("a*", "b", false),
            ("a*b*c", "aXbYc", true),
            ("a*b*c", "aXbY", false),
            ("*b", "abab", true),
            ("", "a", false),
            ("", "", true),
            ("**", "anything", true),
        ] {
            assert_eq!(
                pattern_matches(pattern.as_bytes(), name.as_bytes()),
                Ok(expected),
                "{pattern} {name}"
            );
        }
        for pattern in ["[", "[]", "[a", "[a-]", "x\\", "[-a]"] {
            assert_eq!(
                pattern_matches(pattern.as_bytes(), b"zzz"),
                Err(BadPattern),
                "{pattern}"
            );
        }
    }
}

#[cfg(test)]
mod recursor_tests {
    use super::*;

    #[test]
    fn missing_ports_become_53() {
        for (text, expected) in [
            ("127.0.0.1", "127.0.0.1:53"),
            ("127.0.0.1:5353", "127.0.0.1:5353"),
            ("::1", "[::1]:53"),
            ("[::1]:53", "[::1]:53"),
            ("localhost:53", "localhost:53"),
            ("fe80::2%eth0", "[fe80::2%eth0]:53"),
            ("[fe80::2%eth0]:53", "[fe80::2%eth0]:53"),
            ("tls://9.9.9.9", "tls://9.9.9.9:853"),
            (
                "tls://9.9.9.9:8853#dns.quad9.net",
                "tls://9.9.9.9:8853#dns.quad9.net",
            ),
            (
                "tls://2620:fe::fe#dns.quad9.net",
                "tls://[2620:fe::fe]:853#dns.quad9.net",
            ),
            (
                "tls://dns.example:853#10.0.0.2",
                "tls://dns.example:853#10.0.0.2",
            ),
        ] {
            assert_eq!(with_port(text).as_deref(), Ok(expected));
        }
        for text in [
            "",
            "1.2.3",
            "localhost",
            "not-an-ip",
            "[::1]",
            "[x]:53",
            ":53",
            "a:b:53",
            "a:0",
            "a:x",
            "[fe80::2%]:53",
            "[2001:db8::2%eth0]:53",
            "fe80::2%e/0",
            "tls://",
            "tls://9.9.9.9#",
            "tls://9.9.9.9#a b",
            "tls://dns.example",
            "https://9.9.9.9",
        ] {
            assert!(with_port(text).is_err(), "{text}");
        }
    }

    #[test]
    fn names_of_certificates_have_limits() {
        let label = "a".repeat(63);
        // 253 characters, and one more.
        let longest = [&label[..], &label, &label, &label[..61]].join(".");
        let too_long = [&label[..], &label, &label, &label[..62]].join(".");
        assert_eq!((longest.len(), too_long.len()), (253, 254));
        for (name, is_sound) in [
            ("a", true),
            ("a-b_c.D0", true),
            ("10.0.0.2", true),
            ("2620:fe::fe", true),
            (&label, true),
            (&longest, true),
            (&too_long, false),
            (&"a".repeat(64), false),
            ("a..b", false),
            ("a.", false),
            ("a b", false),
            ("a:b", false),
            ("", false),
        ] {
            let text = format!("tls://9.9.9.9#{name}");
            let expected = if is_sound {
                Ok(format!("tls://9.9.9.9:853#{name}"))
            } else {
                Err(NoRecursor(text.clone()))
            };
            assert_eq!(with_port(&text), expected, "{name}");
        }
        assert_eq!(
            NoRecursor("x".to_owned()).to_string(),
            "\"x\" is not a recursor; expected an IP address, IP:port, [IPv6]:port or host:port, with DNS over TLS \
             after tls:// and with the name in the server's certificate after #"
        );
    }

    #[test]
    fn zones_belong_to_link_local_addresses() {
        for (text, expected) in [
            ("fe80::1%eth0", Some("[fe80::1%eth0]:53")),
            ("fe80::1%", None),
            ("fe80::1%a%b", None),
            ("fe80::1%a:b", None),
            ("fe80::1%a]", None),
            ("fe80::1%a b", None),
            ("fe80::1%a/b", None),
            ("fd00::1%eth0", None),
            ("[fe80::1%eth0]:5353", Some("[fe80::1%eth0]:5353")),
            ("[fd00::1]:5353", Some("[fd00::1]:5353")),
            ("[10.0.0.1]:53", None),
            ("a:65535", Some("a:65535")),
            ("a:65536", None),
            ("a/b:53", None),
            ("a b:53", None),
            ("tls://[fe80::1%eth0]:853", Some("tls://[fe80::1%eth0]:853")),
            ("tls://fe80::1%eth0", Some("tls://[fe80::1%eth0]:853")),
        ] {
            assert_eq!(with_port(text).ok().as_deref(), expected, "{text}");
        }
    }
}
