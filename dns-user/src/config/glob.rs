//! File patterns with the meaning of Go's `filepath.Glob`: `*`, `?`, `[a-z]`,
//! `[^a-z]`, `\` before a character; none of them matches a slash; names that
//! begin with a dot are names like any other.

use std::{
    ffi::OsString,
    fs,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
};

/// A pattern that cannot be read: an open bracket, an empty range, a lone backslash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not a file pattern (an unclosed [ or a backslash at the end)")]
pub struct BadPattern;

/// The files that match, in the order of the reference: by folder, then by name.
///
/// Folders that are missing or cannot be read count as empty. An empty pattern
/// matches nothing.
pub fn glob(pattern: &str) -> Result<Vec<PathBuf>, BadPattern> {
    Ok(walk(pattern)?.found)
}

/// The folders whose changes can change what [`glob`] finds: those searched, and
/// for folders that do not exist yet the nearest that does.
pub fn folders(pattern: &str) -> Result<Vec<PathBuf>, BadPattern> {
    Ok(walk(pattern)?.searched)
}

/// What a pattern leads to.
struct Walk {
    /// The files that match.
    found: Vec<PathBuf>,
    /// The folders that were read on the way.
    searched: Vec<PathBuf>,
}

/// Follows the pattern part by part through the file system.
fn walk(pattern: &str) -> Result<Walk, BadPattern> {
    let mut result = Walk { found: Vec::new(), searched: Vec::new() };
    if pattern.is_empty() {
        return Ok(result);
    }
    for part in pattern.split('/') {
        matches(part.as_bytes(), b"")?;
    }
    let absolute = pattern.starts_with('/');
    let mut current = vec![if absolute { PathBuf::from("/") } else { PathBuf::new() }];
    let mut parts = pattern.split('/').filter(|part| !part.is_empty()).peekable();
    while let Some(part) = parts.next() {
        let last = parts.peek().is_none();
        let mut next = Vec::new();
        for folder in &current {
            let readable = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
            if last || is_pattern(part) {
                result.searched.push(nearest_existing(readable));
            }
            if is_pattern(part) {
                for name in names(readable) {
                    if matches(part.as_bytes(), name.as_bytes())? {
                        next.push(folder.join(name));
                    }
                }
            } else {
                next.push(folder.join(part));
            }
        }
        if last {
            next.retain(|path| fs::symlink_metadata(path).is_ok());
        }
        current = next;
    }
    result.found = current;
    Ok(result)
}

/// The folder itself, or the nearest one above it that exists.
fn nearest_existing(folder: &Path) -> PathBuf {
    let existing = folder.ancestors().find(|path| path.is_dir());
    match existing {
        Some(path) if !path.as_os_str().is_empty() => path.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Whether a part has any character with a meaning.
fn is_pattern(part: &str) -> bool {
    part.contains(['*', '?', '[', '\\'])
}

/// The names in a folder, sorted by their bytes; none if it cannot be read.
fn names(folder: &Path) -> Vec<OsString> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<Vec<u8>> =
        entries.filter_map(|entry| Some(entry.ok()?.file_name().into_vec())).collect();
    names.sort_unstable();
    names.into_iter().map(OsString::from_vec).collect()
}

/// Whether a name without slashes matches a pattern without slashes.
///
/// Backtracks to the latest star alone, so the work is bounded by the product of
/// the two lengths. The whole pattern is read, so that a bad one is always found.
fn matches(pattern: &[u8], name: &[u8]) -> Result<bool, BadPattern> {
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

/// One element of a pattern.
enum Unit {
    /// Any number of characters.
    Star,
    /// One character out of a set.
    One(Set),
}

/// A set of bytes.
struct Set {
    /// Whether the ranges are those that do not match.
    negated: bool,
    /// Inclusive ranges.
    ranges: Vec<(u8, u8)>,
}

impl Set {
    /// Whether the byte is in the set.
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

/// Reads a set after its `[`; also what follows its `]`.
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

/// One character inside brackets, a backslash taken away.
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

    #[test]
    fn files_come_by_folder_and_name() {
        let root = tempfile::tempdir().unwrap();
        for path in ["b/2.json", "b/1.json", "a/9.json", "a/.hidden.json", "a/x.txt"] {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let pattern = format!("{}/*/*.json", root.path().display());
        let found: Vec<String> = glob(&pattern)
            .unwrap()
            .iter()
            .map(|path| path.strip_prefix(root.path()).unwrap().display().to_string())
            .collect();
        assert_eq!(found, ["a/.hidden.json", "a/9.json", "b/1.json", "b/2.json"]);
        let searched = folders(&pattern).unwrap();
        assert_eq!(searched, [root.path().to_owned(), root.path().join("a"), root.path().join("b")]);
        let missing = format!("{}/none/below/*.json", root.path().display());
        assert_eq!(glob(&missing), Ok(vec![]));
        assert_eq!(folders(&missing), Ok(vec![root.path().to_owned()]));
        assert_eq!(glob(""), Ok(vec![]));
    }
}
