//! The size of each crate in tokens: identifiers, literals, operators and brackets of code that is neither test nor
//! comment. Tokens measure what is said; lines measure how tightly it is written. A crate that grows past its budget
//! needs a smaller solution, or a reviewer's consent to a larger number.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read its input has failed"
)]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::sources;

/// The most tokens of each crate. Numbers fall when code is removed, never because it is written more tightly.
const BUDGETS: [(&str, usize); 25] = [
    ("benches", 41_600),
    ("benches/demo", 3_600),
    ("benches/programs", 400),
    ("benches/programs/ebpf", 2_800),
    ("dns-common", 4_900),
    ("dns-ebpf", 25_400),
    ("dns-user/attacher", 85_900),
    ("dns-user/cli", 42_100),
    ("dns-user/command-line", 1_300),
    ("dns-user/consul", 45_600),
    ("dns-user/consul-source", 21_600),
    ("dns-user/core", 69_600),
    ("dns-user/dnstap", 6_800),
    ("dns-user/fastpath", 47_200),
    ("dns-user/health", 19_600),
    ("dns-user/identity", 54_800),
    ("dns-user/kit", 43_600),
    ("dns-user/load", 34_800),
    ("dns-user/load/ebpf", 3_400),
    ("dns-user/publish", 126_900),
    ("dns-user/resolver", 97_100),
    ("dns-user/shadow", 26_100),
    ("dns-user/sync", 49_100),
    ("dns-user/upstream", 55_900),
    ("xtask", 32_100),
];

/// Maximum lines of a file, as rustfmt's defaults lay them out; blank lines and tests are not counted.
const MAX_FILE_LINES: usize = 860;

/// Folders whose files are tests, support of tests, or not sources.
const SKIPPED: [&str; 6] = ["target", ".toolchain", "tests", "fuzz", "support", ".git"];

/// Folders at the top whose files are results, not sources. Modules of the same names are sources.
const RESULTS: [&str; 2] = ["dist", "report"];

#[test]
fn crates_stay_within_budget() {
    let root = sources::root();
    let mut sizes: BTreeMap<String, usize> = BTreeMap::new();
    for file in files(root) {
        let count = tokens(&fs::read_to_string(&file).unwrap());
        *sizes.entry(crate_of(root, &file)).or_default() += count;
    }

    let budgets = BTreeMap::from(BUDGETS);
    let mut problems = Vec::new();
    for (name, size) in &sizes {
        match budgets.get(name.as_str()) {
            None => problems.push(format!("{name}: {size} tokens, and no budget")),
            Some(budget) if size > budget => {
                problems.push(format!("{name}: {size} tokens, budget {budget}"));
            }
            Some(_) => {}
        }
    }
    for name in budgets.keys() {
        if !sizes.contains_key(*name) {
            problems.push(format!("{name}: gone"));
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn files_stay_short() {
    let root = sources::root();
    let mut problems = Vec::new();
    for file in files(root) {
        let size = lines(&fs::read_to_string(&file).unwrap());
        if size > MAX_FILE_LINES {
            problems.push(format!(
                "{}: {size} lines, more than {MAX_FILE_LINES}",
                file.display()
            ));
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Returns the Rust files of the product.
fn files(root: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(root).unwrap() {
        let top = entry.unwrap().path();
        let name = top.file_name().unwrap().to_str().unwrap().to_owned();
        let is_skipped = SKIPPED.contains(&name.as_str()) || RESULTS.contains(&name.as_str());
        if !is_skipped && top.is_dir() {
            files.extend(sources::rust_files(&top));
        }
    }
    files.retain(|file| is_counted(root, file));
    files
}

fn is_counted(root: &Path, file: &Path) -> bool {
    let below = file.strip_prefix(root).unwrap();
    let name = file.file_name().unwrap().to_str().unwrap();
    for folder in below.parent().unwrap() {
        if SKIPPED.contains(&folder.to_str().unwrap()) {
            return false;
        }
    }
    // A linked folder belongs to another crate.
    let is_linked = file.canonicalize().unwrap() != *file;
    !is_linked && name != "tests.rs" && !name.ends_with("_tests.rs")
}

/// Returns the folder of a file's crate.
fn crate_of(root: &Path, file: &Path) -> String {
    let mut ancestors = file.ancestors().skip(1);
    let folder = ancestors
        .find(|folder| folder.join("Cargo.toml").exists())
        .unwrap();
    folder.strip_prefix(root).unwrap().display().to_string()
}

/// Counts the tokens of a file without its tests and documentation.
fn tokens(text: &str) -> usize {
    count(text.parse().unwrap())
}

/// Counts tokens; a pair of brackets is two.
fn count(stream: TokenStream) -> usize {
    let mut sum = 0;
    let mut trees = stream.into_iter().peekable();
    while let Some(tree) = trees.next() {
        if is_punct(&tree, '#') {
            trees.next_if(|next| is_punct(next, '!'));
            let Some(TokenTree::Group(attribute)) = trees.next() else {
                // A `#` of a macro's pattern or body.
                sum += 1;
                continue;
            };
            let text = attribute.stream().to_string();
            if text.starts_with("doc") {
                continue;
            }
            if is_test(&text) {
                skip_item(&mut trees);
                continue;
            }
            sum += 3 + count(attribute.stream());
            continue;
        }
        // rustfmt adds a comma to a list that it breaks into lines.
        if is_punct(&tree, ',') && trees.peek().is_none() {
            continue;
        }
        sum += match tree {
            TokenTree::Group(group) if group.delimiter() == Delimiter::None => {
                count(group.stream())
            }
            TokenTree::Group(group) => 2 + count(group.stream()),
            _ => 1,
        };
    }
    sum
}

/// Returns whether the item under this attribute is compiled for tests only.
fn is_test(attribute: &str) -> bool {
    let text = attribute.replace(' ', "");
    text.starts_with("cfg(test)") || text.starts_with("cfg(all(test")
}

/// Passes over an item: up to its `;` or the end of its body.
fn skip_item(trees: &mut impl Iterator<Item = TokenTree>) {
    for tree in trees {
        match tree {
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => return,
            tree if is_punct(&tree, ';') => return,
            _ => {}
        }
    }
}

fn is_punct(tree: &TokenTree, wanted: char) -> bool {
    matches!(tree, TokenTree::Punct(punct) if punct.as_char() == wanted)
}

/// Counts the lines of a file without blank lines and its tests. Test modules stand last, as everywhere in this
/// workspace.
fn lines(text: &str) -> usize {
    let code = text
        .split_once("\n#[cfg(test)]\nmod tests {")
        .map_or(text, |(code, _)| code);
    code.lines().filter(|line| !line.trim().is_empty()).count()
}

#[test]
fn tests_and_comments_do_not_count() {
    // fn a ( ) { b ( ) ; }
    assert_eq!(
        tokens("//! A.\n\n/// B.\nfn a() {\n    // C.\n    b();\n}\n"),
        10
    );
    assert_eq!(tokens("#[cfg(test)]\nmod tests;\nfn a() {}\n"), 6);
    assert_eq!(
        tokens("fn a() {}\n#[cfg(test)]\nmod tests { fn c() {} }\n"),
        6
    );
    // # [ cfg ( not ( test ) ) ]
    assert_eq!(tokens("#[cfg(not(test))]\nfn a() {}\n"), 10 + 6);
}

#[test]
fn layout_does_not_count() {
    let wide = "fn a() { b(c, d) }";
    let narrow = "fn a() {\n    b(\n        c,\n        d,\n    )\n}";
    assert_eq!(tokens(wide), tokens(narrow));
}
