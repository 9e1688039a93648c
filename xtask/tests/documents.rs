//! Paths and types named in the documentation exist.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read its input has failed"
)]

use std::{collections::BTreeSet, fs, path::Path};

use crate::sources::{root, rust_files};

/// Folders of the repository that hold no sources.
const NO_SOURCES: [&str; 4] = ["target", ".git", ".toolchain", "node_modules"];

/// Endings of names that are files of the repository if a folder is named before them.
const FILES: [&str; 3] = [".rs", ".md", ".toml"];

/// Pages that name types of this project.
const PAGES_WITH_TYPES: [&str; 3] = ["architecture.md", "development.md", "glossary.md"];

/// Words in the form of types that are none of ours.
const NO_TYPES: [&str; 0] = [];

/// Collects the paths of all files below a folder, relative to the repository.
fn collect(folder: &Path, root: &Path, files: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        if path.is_dir() && !NO_SOURCES.contains(&name.as_str()) {
            collect(&path, root, files);
        }
        let relative = path.strip_prefix(root).unwrap();
        files.insert(relative.to_string_lossy().into_owned());
    }
}

/// Returns the documentation: every page that the repository holds.
fn pages(files: &BTreeSet<String>) -> Vec<(String, String)> {
    let mut pages = Vec::new();
    for file in files.iter().filter(|file| file.ends_with(".md")) {
        // A statement that was true at a release stays as it is.
        if file != "CHANGELOG.md" {
            pages.push((file.clone(), fs::read_to_string(root().join(file)).unwrap()));
        }
    }
    pages
}

/// Returns the code spans of a page: every second part between backticks, line by line, and the words of
/// indented blocks.
fn spans(page: &str) -> Vec<&str> {
    let mut spans = Vec::new();
    for line in page.lines() {
        if line.starts_with("    ") {
            spans.extend(line.split([' ', ',', '(', ')', '│', ';', ':']));
        } else {
            spans.extend(line.split('`').skip(1).step_by(2));
        }
    }
    spans
}

/// Returns whether a span names a file of the repository.
fn is_path(span: &str) -> bool {
    let is_plain = span
        .chars()
        .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "/._-".contains(c));
    is_plain
        && span.contains('/')
        && !span.starts_with(['/', '.', '-'])
        && FILES.iter().any(|ending| span.ends_with(ending))
}

#[test]
fn paths_in_documents_exist() {
    let mut files = BTreeSet::new();
    collect(root(), root(), &mut files);
    let mut missing = Vec::new();
    for (page, text) in pages(&files) {
        let folder = Path::new(&page).parent().unwrap();
        for span in spans(&text).into_iter().filter(|span| is_path(span)) {
            let beside = folder.join(span).to_string_lossy().into_owned();
            // Pages leave out the folder of sources, and often the crate.
            let ending = format!("/{span}");
            let ends_with_span = |file: &String| {
                file.ends_with(&ending) || file.replace("/src/", "/").ends_with(&ending)
            };
            let exists =
                files.contains(span) || files.contains(&beside) || files.iter().any(ends_with_span);
            if !exists {
                missing.push(format!("{page}: {span}"));
            }
        }
    }
    assert_eq!(missing, Vec::<String>::new());
}

/// Returns whether a word has the form of a type's name: two or more capitals, each followed by a small
/// letter.
fn is_type(word: &str) -> bool {
    let mut humps = 0;
    let mut letters = word.chars().peekable();
    while let Some(letter) = letters.next() {
        if !letter.is_ascii_alphanumeric() {
            return false;
        }
        let next_is_small = letters.peek().is_some_and(char::is_ascii_lowercase);
        humps += usize::from(letter.is_ascii_uppercase() && next_is_small);
    }
    humps >= 2 && word.starts_with(|c: char| c.is_ascii_uppercase())
}

#[test]
fn types_in_documents_are_declared() {
    let mut declared = BTreeSet::new();
    for folder in [
        "dns-user",
        "dns-common",
        "dns-ebpf/src",
        "tests",
        "xtask/src",
        "benches",
    ] {
        for file in rust_files(&root().join(folder)) {
            let text = fs::read_to_string(file).unwrap();
            let words = text.split(|c: char| !c.is_ascii_alphanumeric());
            declared.extend(words.filter(|word| is_type(word)).map(str::to_owned));
        }
    }
    let mut unknown = Vec::new();
    for page in PAGES_WITH_TYPES {
        let text = fs::read_to_string(root().join("docs").join(page)).unwrap();
        for span in spans(&text) {
            for word in span.split(|c: char| !c.is_ascii_alphanumeric()) {
                if is_type(word) && !declared.contains(word) && !NO_TYPES.contains(&word) {
                    unknown.push(format!("{page}: {word}"));
                }
            }
        }
    }
    assert_eq!(unknown, Vec::<String>::new());
}
