//! `cargo xtask docs`: builds the documentation book and the API documentation of all crates, and checks
//! every link. The packages contain the book's pages.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use crate::{
    dist::{self, archive},
    process::{capture, cargo, install, root, run},
    toolchain,
};

/// Version of mdBook to install below `.toolchain`.
const MDBOOK_VERSION: &str = "0.5.4";

/// Checks links, and that the book's summary lists every page.
pub(crate) fn check() -> Result<()> {
    let problems = problems()?;
    ensure!(
        problems.is_empty(),
        "documentation has broken links:\n{}",
        problems.join("\n")
    );
    Ok(())
}

/// Checks links, and builds the book into `target/book` and the API documentation of all crates into `target/doc`.
pub(crate) fn build() -> Result<()> {
    check()?;
    run(Command::new(mdbook()?)
        .arg("build")
        .arg(root().join("docs")))?;
    let book = root().join("target/book/index.html");
    println!("written: {}", book.display());
    // The build script of the fast path compiles the programs.
    toolchain::ensure()?;
    let refused = r#"build.rustdocflags=["-D", "warnings"]"#;
    cargo([
        "doc",
        "--quiet",
        "--workspace",
        "--no-deps",
        "--document-private-items",
        "--config",
        refused,
    ])
}

/// Returns the path of mdBook, installing it if necessary.
fn mdbook() -> Result<PathBuf> {
    let folder = root().join(".toolchain/mdbook");
    let program = folder.join("bin/mdbook");
    let installed = capture(Command::new(&program).arg("--version")).unwrap_or_default();
    // Cargo's note on what it installed: without this feature the book has no search.
    let note = fs::read_to_string(folder.join(".crates2.json")).unwrap_or_default();
    if !installed.contains(MDBOOK_VERSION) || !note.contains("\"search\"") {
        run(install("mdbook", MDBOOK_VERSION)
            .args(["--force", "--no-default-features", "--features", "search"])
            .arg("--root")
            .arg(folder))?;
    }
    Ok(program)
}

/// Returns broken links as `file: link: reason`, and pages missing from the book's summary.
fn problems() -> Result<Vec<String>> {
    let listed = dist::git(&["ls-files", "*.md"])?;
    let mut pages = HashMap::new();
    for file in listed
        .lines()
        // Recorded files of bosh-dns, whose links are not ours.
        .filter(|file| !file.starts_with("tests/conformance/scenarios"))
    {
        let path = root().join(file);
        // A deleted file is listed until the deletion is committed.
        if path.exists() {
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            pages.insert(PathBuf::from(file), text);
        }
    }
    let mut problems = Vec::new();
    for (file, text) in &pages {
        for link in links(text) {
            if let Err(reason) = check_link(root(), file, &link, &pages) {
                problems.push(format!("{}: {link}: {reason}", file.display()));
            }
        }
    }
    let summary = pages
        .get(Path::new("docs/SUMMARY.md"))
        .context("docs/SUMMARY.md is missing")?;
    let mut in_book = BTreeSet::new();
    for link in links(summary) {
        in_book.insert(Path::new("docs").join(link));
    }
    for file in pages.keys() {
        let is_page = file.starts_with("docs") && !file.ends_with("SUMMARY.md");
        if is_page && !in_book.contains(file) {
            problems.push(format!("{}: missing from docs/SUMMARY.md", file.display()));
        }
    }
    problems.sort();
    Ok(problems)
}

/// A linked file that Debian installs as another copy.
const COMMON_LICENCE: (&str, &str) = ("](LICENSE)", "](/usr/share/common-licenses/Apache-2.0)");

/// Copies the README, the documentation and the files to which they link, with the repository's folders. Links to
/// sources, which are in the repository only, become plain text.
pub(crate) fn put_pages(folder: &Path) -> Result<()> {
    let listed = dist::git(&["ls-files", "docs"])?;
    let mut next: Vec<PathBuf> = vec!["README.md".into()];
    // Listed by git: a page that is not committed does not get into a package.
    for file in listed.lines() {
        if !file.ends_with("book.toml") {
            next.push(file.into());
        }
    }
    let mut copied = BTreeSet::new();
    while let Some(file) = next.pop() {
        let path = root().join(&file);
        if !path.is_file() || !copied.insert(file.clone()) {
            continue;
        }
        let mut bytes = fs::read(&path).with_context(|| path.display().to_string())?;
        if file.extension().is_some_and(|extension| extension == "md") {
            let mut text = String::from_utf8(bytes)?.replace(COMMON_LICENCE.0, COMMON_LICENCE.1);
            for link in links(&text) {
                // Links to other sites, to installed files, and within the page stay.
                if link.contains(':') || link.starts_with(['/', '#']) {
                    continue;
                }
                let target = file.with_file_name(link.split('#').next().unwrap_or_default());
                let target = normal(&target);
                if is_packaged(&target) {
                    next.push(target);
                } else {
                    text = without_link(&text, &link);
                }
            }
            bytes = text.into_bytes();
        }
        archive::put(&folder.join(&file), bytes, 0o644)?;
    }
    Ok(())
}

/// Returns whether packages contain a file: pages, and examples of deployments.
fn is_packaged(file: &Path) -> bool {
    let is_page = file.extension().is_some_and(|extension| extension == "md");
    let is_at_top = file.parent() == Some(Path::new(""));
    file.starts_with("docs") || file.starts_with("deploy") || is_page && is_at_top
}

/// Replaces links to `target` by their texts.
fn without_link(text: &str, target: &str) -> String {
    let mut text = text.to_owned();
    let end = format!("]({target})");
    while let Some(at) = text.find(&end) {
        text.replace_range(at..at + end.len(), "");
        if let Some(begin) = text[..at].rfind('[') {
            text.remove(begin);
        }
    }
    text
}

/// Checks a link in `file`: its target and the heading in it must exist.
fn check_link(
    root: &Path,
    file: &Path,
    link: &str,
    pages: &HashMap<PathBuf, String>,
) -> Result<(), String> {
    // A check must not need the network, nor fail because another site is down.
    if link.contains("://") || link.starts_with("mailto:") {
        return Ok(());
    }
    let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target = if path.is_empty() {
        file.to_owned()
    } else {
        normal(&file.with_file_name(path))
    };
    if !root.join(&target).exists() {
        return Err("no such file".to_owned());
    }
    match pages.get(&target) {
        Some(text) if !anchor.is_empty() && !anchors(text).contains(anchor) => {
            Err("no such heading".to_owned())
        }
        _ => Ok(()),
    }
}

fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            std::path::Component::ParentDir => {
                normal.pop();
            }
            std::path::Component::CurDir => {}
            part => normal.push(part),
        }
    }
    normal
}

/// Returns the targets of inline links and images, except in code.
fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut fenced = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        // Eight spaces: four may continue an item of a list.
        if fenced || line.starts_with("        ") {
            continue;
        }
        // Text in backticks is code.
        let prose: String = line.split('`').step_by(2).collect();
        let mut rest = prose.as_str();
        while let Some((_, after)) = rest.split_once("](") {
            let Some((link, after)) = after.split_once(')') else {
                break;
            };
            found.push(link.split(' ').next().unwrap_or_default().to_owned());
            rest = after;
        }
    }
    found
}

/// Returns the anchors of a page's headings, as generated by GitHub and mdBook.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for line in text.lines() {
        if line.starts_with('#') {
            let title = line.trim_start_matches('#').trim().to_lowercase();
            let mut anchor = title.replace(' ', "-");
            anchor.retain(|letter| letter.is_alphanumeric() || matches!(letter, '-' | '_'));
            anchors.insert(anchor);
        }
    }
    anchors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_outside_code_are_found() {
        let text = "See [a](b.md#c) and ![p](p.svg \"title\").\n`[no](code)`\n```\n[no](fence)\n```\n[x](y)";
        assert_eq!(links(text), ["b.md#c", "p.svg", "y"]);
    }

    #[test]
    fn anchors_follow_headings() {
        let found = anchors("# One, two\n## Programs and the verifier\n");
        assert!(found.contains("one-two") && found.contains("programs-and-the-verifier"));
    }

    #[test]
    fn packaged_links_resolve() {
        let folder = tempfile::tempdir().unwrap();
        put_pages(folder.path()).unwrap();
        let listed = capture(
            Command::new("find")
                .args([".", "-name", "*.md"])
                .current_dir(&folder),
        )
        .unwrap();
        assert!(
            listed
                .lines()
                .any(|page| page == "./docs/reference/configuration.md"),
            "{listed}"
        );
        let pages: HashMap<PathBuf, String> = listed
            .lines()
            .map(|page| {
                (
                    normal(Path::new(page)),
                    fs::read_to_string(folder.path().join(page)).unwrap(),
                )
            })
            .collect();
        for (file, text) in &pages {
            assert!(
                !text.contains("{{#"),
                "{}: an include that only mdBook understands",
                file.display()
            );
            for link in links(text)
                .into_iter()
                .filter(|link| !link.starts_with('/'))
            {
                let checked = check_link(folder.path(), file, &link, &pages);
                assert_eq!(checked, Ok(()), "{}: {link}", file.display());
            }
        }
    }

    #[test]
    fn book_opens_at_its_introduction() {
        let summary = fs::read_to_string(root().join("docs/SUMMARY.md")).unwrap();
        assert_eq!(links(&summary)[0], "introduction.md");
    }

    #[test]
    fn readme_links_every_chapter() {
        let read = |file| fs::read_to_string(root().join(file)).unwrap();
        let summary = read("docs/SUMMARY.md");
        let readme = read("README.md");
        assert!(readme.lines().count() <= 150, "the README is an overview");
        let linked: BTreeSet<String> = links(&readme).into_iter().collect();
        // Pages of a chapter are indented.
        for chapter in links(
            &summary
                .lines()
                .filter(|line| line.starts_with('-'))
                .collect::<Vec<_>>()
                .join("\n"),
        ) {
            let of_chapter =
                |link: &String| link.split('#').next() == Some(&format!("docs/{chapter}"));
            assert!(
                linked.iter().any(of_chapter),
                "the README does not link to docs/{chapter}"
            );
        }
    }

    #[test]
    fn repository_links_resolve() {
        assert_eq!(problems().unwrap(), [] as [&str; 0]);
    }
}
