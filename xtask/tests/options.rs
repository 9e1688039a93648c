//! Every option of a command line is used: by a test, a deploy file or a guide. An unused one is either untested and
//! undocumented, or not needed.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read its input has failed"
)]

use std::{collections::BTreeSet, fs, path::Path};

use crate::sources::{self, files, root};

#[test]
fn options_are_used() {
    let references = root().join("docs/reference");
    let mut texts = Vec::new();
    for folder in ["deploy", "docs"] {
        for path in files(&root().join(folder)) {
            // The references are generated from the options themselves.
            if !path.starts_with(&references) {
                texts.push(String::from_utf8_lossy(&fs::read(path).unwrap()).into_owned());
            }
        }
    }
    for folder in ["tests", "dns-user"] {
        for path in sources::rust_files(&root().join(folder)) {
            let text = fs::read_to_string(&path).unwrap();
            let is_test =
                folder == "tests" || path.components().any(|part| part.as_os_str() == "tests");
            match text.split_once("#[cfg(test)]") {
                Some((_, tests)) if !is_test => texts.push(tests.to_owned()),
                None if !is_test => {}
                _ => texts.push(text),
            }
        }
    }

    let options = options(&references);
    assert!(options.len() > 150, "{} options", options.len());
    let mut unused = Vec::new();
    for (page, option) in &options {
        if !texts.iter().any(|text| contains(text, option)) {
            unused.push(format!("{page}: {option}"));
        }
    }
    assert!(
        unused.is_empty(),
        "in no test, deploy file or guide; use them or remove them:\n{}",
        unused.join("\n")
    );
}

/// Returns the options of all references with the names of their pages.
fn options(references: &Path) -> BTreeSet<(String, String)> {
    let mut found = BTreeSet::new();
    for path in files(references) {
        let page = path.file_name().unwrap().to_str().unwrap().to_owned();
        if !page.ends_with("commands.md") {
            continue;
        }
        for line in fs::read_to_string(&path).unwrap().lines() {
            if let Some(rest) = line.strip_prefix("| `--") {
                let name = rest.split(|c: char| !is_part(c)).next().unwrap();
                found.insert((page.clone(), format!("--{name}")));
            }
        }
    }
    found
}

/// Returns whether a text has the option, and not only a longer one.
fn contains(text: &str, option: &str) -> bool {
    text.split(option)
        .skip(1)
        .any(|after| !after.starts_with(is_part))
}

fn is_part(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-'
}

#[test]
fn longer_options_do_not_count() {
    assert!(contains("run --edns 1232", "--edns"));
    assert!(contains("[\"--edns\"]", "--edns"));
    assert!(!contains("run --edns-size 1232", "--edns"));
    assert!(!contains("", "--edns"));
}
