//! File patterns: Go's `filepath.Glob` on the real file system.

use std::{
    ffi::OsString,
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use dns_core::config::values::{BadPattern, check_pattern, is_pattern, pattern_matches};

use super::atomic;

/// Returns the matching files in Go's order: by folder, then by name.
///
/// Missing or unreadable folders count as empty. An empty pattern matches nothing.
pub fn glob(pattern: &str) -> Result<Vec<PathBuf>, BadPattern> {
    walk(pattern).map(|(found, _)| found)
}

/// Returns the folders in which changes can affect the result of [`glob`]: the searched ones, and
/// the nearest existing ancestor of each missing folder.
pub fn folders(pattern: &str) -> Result<Vec<PathBuf>, BadPattern> {
    walk(pattern).map(|(_, searched)| searched)
}

/// Evaluates the pattern component by component; returns the matching files and the folders that were read.
fn walk(pattern: &str) -> Result<(Vec<PathBuf>, Vec<PathBuf>), BadPattern> {
    let mut searched = Vec::new();
    if pattern.is_empty() {
        return Ok((Vec::new(), searched));
    }
    check_pattern(pattern)?;
    let absolute = pattern.starts_with('/');
    let mut current = vec![if absolute {
        PathBuf::from("/")
    } else {
        PathBuf::new()
    }];
    let mut parts = pattern
        .split('/')
        .filter(|part| !part.is_empty())
        .peekable();
    while let Some(part) = parts.next() {
        let last = parts.peek().is_none();
        let mut next = Vec::new();
        for folder in &current {
            let readable = if folder.as_os_str().is_empty() {
                Path::new(".")
            } else {
                folder
            };
            if last || is_pattern(part) {
                searched.push(nearest_existing(readable));
            }
            if is_pattern(part) {
                for name in names(readable) {
                    if pattern_matches(part.as_bytes(), name.as_bytes())? {
                        next.push(folder.join(name));
                    }
                }
            } else {
                next.push(folder.join(part));
            }
        }
        if last {
            // As Go's `Glob`, which also returns links that lead nowhere.
            next.retain(|path| fs::symlink_metadata(path).is_ok());
        }
        current = next;
    }
    Ok((current, searched))
}

/// Returns the folder itself or its nearest existing ancestor.
fn nearest_existing(folder: &Path) -> PathBuf {
    // The last ancestor of a relative path is empty, which is no folder.
    let existing = folder.ancestors().find(|path| path.is_dir());
    existing.unwrap_or(Path::new(".")).to_owned()
}

/// Returns the names in a folder, sorted bytewise; empty if unreadable.
fn names(folder: &Path) -> Vec<OsString> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut names = Vec::new();
    for entry in entries.flatten() {
        let name = entry.file_name();
        // `*` matches hidden names in Go. It does not mean an unfinished file of one of our writers.
        if !atomic::is_unfinished(&name) {
            names.push(name);
        }
    }
    names.sort_unstable();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_sorted_by_folder() {
        let root = tempfile::tempdir().unwrap();
        for path in [
            "b/2.json",
            "b/1.json",
            "a/9.json",
            "a/.hidden.json",
            "a/x.txt",
            "a/.9.json.part-a1B2c3",
        ] {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let pattern = format!("{}/*/*.json", root.path().display());
        let found: Vec<String> = glob(&pattern)
            .unwrap()
            .iter()
            .map(|path| {
                path.strip_prefix(root.path())
                    .unwrap()
                    .display()
                    .to_string()
            })
            .collect();
        assert_eq!(
            found,
            ["a/.hidden.json", "a/9.json", "b/1.json", "b/2.json"]
        );
        let all = glob(&format!("{}/a/*", root.path().display())).unwrap();
        assert_eq!(all.len(), 3, "without the unfinished file: {all:?}");
        let searched = folders(&pattern).unwrap();
        assert_eq!(
            searched,
            [
                root.path().to_owned(),
                root.path().join("a"),
                root.path().join("b")
            ]
        );
        let missing = format!("{}/none/below/*.json", root.path().display());
        assert_eq!(glob(&missing), Ok(vec![]));
        assert_eq!(folders(&missing), Ok(vec![root.path().to_owned()]));
        assert_eq!(glob(""), Ok(vec![]));
    }

    #[test]
    fn relative_folders_are_watched_from_here() {
        assert_eq!(
            folders("no-such-folder/*.json"),
            Ok(vec![PathBuf::from(".")])
        );
        assert_eq!(folders("*.json"), Ok(vec![PathBuf::from(".")]));
        assert_eq!(folders("/no-such-folder/x"), Ok(vec![PathBuf::from("/")]));
        assert_eq!(folders("src/none/*"), Ok(vec![PathBuf::from("src")]));
        assert!(folders("[").is_err() && glob("a[").is_err());
    }
}
