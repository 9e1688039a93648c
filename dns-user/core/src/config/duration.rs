//! Durations in Go syntax: `1h2m3.5s`, `400ms`, `-1.5h`, `0`.

use std::time::Duration;

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
    if rest == "0" {
        return Ok(Duration::ZERO);
    }
    if rest.is_empty() {
        return Err(DurationError::Malformed);
    }
    let mut nanoseconds: u128 = 0;
    while !rest.is_empty() {
        let (part, tail) = one_part(rest)?;
        nanoseconds = nanoseconds.checked_add(part).ok_or(DurationError::TooLong)?;
        rest = tail;
    }
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
    let whole_end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (whole, mut rest) = text.split_at(whole_end);
    let mut fraction = "";
    if let Some(after_dot) = rest.strip_prefix('.') {
        let end = after_dot.find(|c: char| !c.is_ascii_digit()).unwrap_or(after_dot.len());
        (fraction, rest) = after_dot.split_at(end);
    }
    if whole.is_empty() && fraction.is_empty() {
        return Err(DurationError::Malformed);
    }
    let unit_end = rest.find(|c: char| c == '.' || c.is_ascii_digit()).unwrap_or(rest.len());
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
    let whole: u128 =
        if whole.is_empty() { 0 } else { whole.parse::<u64>().map_err(|_| DurationError::TooLong)?.into() };
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
    nanoseconds = nanoseconds.checked_add(scale).ok_or(DurationError::TooLong)?;
    Ok((nanoseconds, rest))
}

#[cfg(test)]
mod tests {
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
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_nanos(nanoseconds)), "{text}");
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
            ("99999999999999999999s", DurationError::TooLong),
        ] {
            assert_eq!(parse_duration(text), Err(error), "{text:?}");
        }
    }
}
