//! `cargo xtask docs`: builds the documentation book and checks every link in the
//! repository's Markdown.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::process::{capture, cargo, root, run};

/// Version of mdBook to install below `.toolchain`.
const MDBOOK_VERSION: &str = "0.5.4";

/// Checks links and builds the book into `target/book`.
pub(crate) fn build() -> Result<()> {
    let root = root().canonicalize()?;
    let problems = problems(&root)?;
    if !problems.is_empty() {
        bail!("documentation has broken links:\n{}", problems.join("\n"));
    }
    run(Command::new(mdbook(&root)?).arg("build").arg(root.join("docs")))?;
    println!("written: {}", root.join("target/book/index.html").display());
    Ok(())
}

/// Path of mdBook, installing it if it is missing.
fn mdbook(root: &Path) -> Result<PathBuf> {
    let folder = root.join(".toolchain/mdbook");
    let program = folder.join("bin/mdbook");
    let installed = capture(Command::new(&program).arg("--version")).unwrap_or_default();
    if !installed.contains(MDBOOK_VERSION) {
        println!("installing mdBook {MDBOOK_VERSION}");
        let arguments = ["install", "--quiet", "--locked", "--force", "--no-default-features", "mdbook"];
        cargo(arguments.map(Into::into).into_iter().chain([
            "--version".into(),
            MDBOOK_VERSION.into(),
            "--root".into(),
            folder.into_os_string(),
        ]))?;
    }
    Ok(program)
}

/// Broken links, as `file: link: reason`, and pages that the book does not list.
fn problems(root: &Path) -> Result<Vec<String>> {
    let listed = capture(Command::new("git").args(["ls-files", "*.md"]).current_dir(root))?;
    let mut pages = HashMap::new();
    for file in listed.lines().filter(|file| !file.starts_with("tests/conformance/scenarios")) {
        let path = root.join(file);
        // A deleted file is listed until the deletion is committed.
        if path.exists() {
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            pages.insert(PathBuf::from(file), text);
        }
    }
    let mut problems = Vec::new();
    for (file, text) in &pages {
        for link in links(text) {
            if let Err(reason) = check(root, file, &link, &pages) {
                problems.push(format!("{}: {link}: {reason}", file.display()));
            }
        }
    }
    let summary = pages.get(Path::new("docs/SUMMARY.md")).context("docs/SUMMARY.md is missing")?;
    let in_book: BTreeSet<PathBuf> = links(summary).iter().map(|link| Path::new("docs").join(link)).collect();
    for file in pages.keys().filter(|file| file.starts_with("docs") && !file.ends_with("SUMMARY.md")) {
        if !in_book.contains(file) {
            problems.push(format!("{}: missing from docs/SUMMARY.md", file.display()));
        }
    }
    problems.sort();
    Ok(problems)
}

/// Checks one link of `file`: its target exists, and so does the heading it names.
fn check(root: &Path, file: &Path, link: &str, pages: &HashMap<PathBuf, String>) -> Result<(), String> {
    if link.contains("://") || link.starts_with("mailto:") {
        return Ok(());
    }
    let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target = if path.is_empty() { file.to_owned() } else { normal(&file.with_file_name(path)) };
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

/// Targets of inline links and images, outside code.
fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut fenced = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        if fenced || line.starts_with("        ") {
            continue;
        }
        // Text in backticks is code.
        let prose: String = line.split('`').step_by(2).collect();
        let mut rest = prose.as_str();
        while let Some((_, after)) = rest.split_once("](") {
            let Some((link, after)) = after.split_once(')') else { break };
            found.push(link.split(' ').next().unwrap_or_default().to_owned());
            rest = after;
        }
    }
    found
}

/// Anchors of the headings of a page, as GitHub and mdBook make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    headings
        .map(|line| {
            let title = line.trim_start_matches('#').trim().to_lowercase();
            title
                .chars()
                .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
                .map(|c| if c == ' ' { '-' } else { c })
                .collect()
        })
        .collect()
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
    fn repository_links_resolve() {
        assert_eq!(problems(&root().canonicalize().unwrap()).unwrap(), [] as [&str; 0]);
    }
}
