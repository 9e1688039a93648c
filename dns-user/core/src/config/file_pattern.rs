//! File patterns in the syntax of Go's `filepath.Glob`: `*`, `?`, `[a-z]`, `[^a-z]`, `\` before a
//! character. None of them matches a slash; names that start with a dot are not special.
//!
//! Pure: callers list directories themselves and call [`matches()`] for each name.

/// An invalid pattern: an unclosed bracket, an empty range, or a trailing backslash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not a file pattern (an unclosed [ or a backslash at the end)")]
pub struct BadPattern;

/// Validates every component of a pattern.
pub fn check(pattern: &str) -> Result<(), BadPattern> {
    pattern.split('/').try_for_each(|part| matches(part.as_bytes(), b"").map(drop))
}

/// Returns whether a component contains a special character.
pub fn is_pattern(part: &str) -> bool {
    part.contains(['*', '?', '[', '\\'])
}

/// Returns whether a name without slashes matches a pattern without slashes.
///
/// Only the latest star is backtracked, so the work is bounded by the product of the two lengths.
/// The whole pattern is parsed first, so an invalid one is always reported.
pub fn matches(pattern: &[u8], name: &[u8]) -> Result<bool, BadPattern> {
    let units = parse(pattern)?;
    let (mut unit, mut at) = (0, 0);
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
        let Some((star_unit, star_at)) = star else { return Ok(false) };
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
        self.ranges.iter().any(|&(low, high)| (low..=high).contains(&byte)) != self.negated
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
            b'?' => Unit::One(Set { negated: true, ranges: Vec::new() }),
            b'[' => {
                let (set, tail) = parse_set(tail)?;
                rest = tail;
                Unit::One(set)
            }
            b'\\' => {
                let (&literal, tail) = tail.split_first().ok_or(BadPattern)?;
                rest = tail;
                Unit::One(Set { negated: false, ranges: vec![(literal, literal)] })
            }
            literal => Unit::One(Set { negated: false, ranges: vec![(literal, literal)] }),
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

/// Parses one character inside brackets, with an optional backslash.
fn set_character(text: &[u8]) -> Result<(u8, &[u8]), BadPattern> {
    match text.split_first() {
        None | Some((b'-' | b']', _)) => Err(BadPattern),
        Some((b'\\', tail)) => tail.split_first().map(|(&byte, tail)| (byte, tail)).ok_or(BadPattern),
        Some((&byte, tail)) => Ok((byte, tail)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            ("", "", true),
            ("**", "anything", true),
        ] {
            assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), Ok(expected), "{pattern} {name}");
        }
        for pattern in ["[", "[]", "[a", "[a-]", "x\\", "[-a]"] {
            assert_eq!(matches(pattern.as_bytes(), b"zzz"), Err(BadPattern), "{pattern}");
        }
    }
}
