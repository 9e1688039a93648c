//! File patterns: Go's `filepath.Glob` on the real file system.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use dns_core::config::values::{BadPattern, check_pattern, is_pattern, pattern_matches};

use super::atomic;
use crate::logs::LineLimit;

/// Returns the matching files in Go's order: by folder, then by name.
///
/// Missing or forbidden folders count as empty. For a folder that cannot be read for another reason there is the rest of
/// the pattern, as a path that cannot be read either: without descriptors, files would otherwise count as removed. An
/// empty pattern matches nothing.
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
    let mut unread = Vec::new();
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
            if !is_pattern(part) {
                next.push(folder.join(part));
                continue;
            }
            let Some(names) = names(readable) else {
                let mut path = folder.join(part);
                path.extend(parts.clone());
                unread.push(path);
                continue;
            };
            for name in names {
                if pattern_matches(part.as_bytes(), name.as_bytes())? {
                    next.push(folder.join(name));
                }
            }
        }
        if last {
            // As Go's `Glob`, which also returns links that lead nowhere.
            next.retain(|path| fs::symlink_metadata(path).is_ok());
        }
        current = next;
    }
    current.extend(unread);
    Ok((current, searched))
}

/// Returns whether an error says nothing about the file.
fn may_pass(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::EIO | libc::ESTALE)
    )
}

/// Returns the folder itself or its nearest existing ancestor.
fn nearest_existing(folder: &Path) -> PathBuf {
    // The last ancestor of a relative path is empty, which is no folder.
    let existing = folder.ancestors().find(|path| path.is_dir());
    existing.unwrap_or(Path::new(".")).to_owned()
}

/// Returns the names in a folder, sorted bytewise; `None` if they may be listed later.
fn names(folder: &Path) -> Option<Vec<OsString>> {
    match list(folder) {
        Ok(names) => Some(names),
        Err(error) if may_pass(&error) => {
            static LIMIT: LineLimit = LineLimit::new();
            if let Some(suppressed) = LIMIT.admit_per_minute() {
                tracing::warn!(
                    folder = %folder.display(),
                    suppressed,
                    "cannot list the files of a folder: {error}"
                );
            }
            None
        }
        // As in Go.
        Err(_) => Some(Vec::new()),
    }
}

fn list(folder: &Path) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        // `*` matches hidden names in Go. It does not mean an unfinished file of one of our writers.
        if !atomic::is_unfinished(&name) {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use test_support::own_process;

    use super::*;

    #[test]
    fn unread_folder_is_not_empty() {
        // The limit on open files belongs to the whole process.
        if !own_process::is_here() {
            let mut test = own_process::command(module_path!(), "unread_folder_is_not_empty");
            return own_process::run(&mut test);
        }
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("a")).unwrap();
        fs::write(root.path().join("a/x.json"), "").unwrap();
        let pattern = format!("{}/*/x.json", root.path().display());
        let unread = own_process::without_descriptors(|| glob(&pattern));
        assert_eq!(unread, Ok(vec![PathBuf::from(&pattern)]));
        assert_eq!(glob(&pattern), Ok(vec![root.path().join("a/x.json")]));
    }

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
