//! Links of the pages: files that they lead to are there, and so are headings.

#![expect(clippy::unwrap_used, reason = "a test that cannot read the project has failed")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

#[test]
fn pages_lead_where_they_say() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap();
    let pages = pages(&root);
    assert!(pages.len() > 10, "{pages:?}");
    let mut dead = Vec::new();
    for page in &pages {
        let text = prose(&fs::read_to_string(page).unwrap());
        for link in links(&text) {
            if let Err(problem) = follow(page, &link) {
                dead.push(format!("{}: {link}: {problem}", page.strip_prefix(&root).unwrap().display()));
            }
        }
    }
    assert!(dead.is_empty(), "{}", dead.join("\n"));
}

/// All Markdown files of the project.
fn pages(root: &Path) -> Vec<PathBuf> {
    let listed = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "*.md"])
        .current_dir(root)
        .output()
        .unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    listed.lines().map(|page| root.join(page)).filter(|page| page.exists()).collect()
}

/// A page without its code, fenced, indented or in a line: nothing in there is a link.
fn prose(text: &str) -> String {
    let mut kept = String::new();
    let mut fenced = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced && !line.starts_with("    ") {
            kept.extend(line.split('`').step_by(2));
            kept.push('\n');
        }
    }
    kept
}

/// Where the links of a page lead.
fn links(text: &str) -> Vec<String> {
    let after = text.split("](").skip(1);
    after.filter_map(|rest| rest.split_once(')').map(|(link, _)| link.trim().to_owned())).collect()
}

/// Looks whether a link leads somewhere; other sites are not asked.
fn follow(page: &Path, link: &str) -> Result<(), String> {
    if link.contains("://") || link.starts_with("mailto:") {
        return Ok(());
    }
    let (path, heading) = link.split_once('#').map_or((link, None), |(path, heading)| (path, Some(heading)));
    let target = match path {
        "" => page.to_owned(),
        path => page.parent().unwrap().join(path),
    };
    if !target.exists() {
        return Err("no such file".to_owned());
    }
    let Some(heading) = heading else { return Ok(()) };
    let text = fs::read_to_string(&target).map_err(|error| error.to_string())?;
    let there = text
        .lines()
        .filter_map(|line| line.strip_prefix('#'))
        .any(|title| anchor(title.trim_start_matches('#')) == heading);
    if there { Ok(()) } else { Err("no such heading".to_owned()) }
}

/// The name of a heading in links, as GitHub makes it.
fn anchor(title: &str) -> String {
    let lower = title.trim().to_lowercase();
    let kept = lower.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn dead_links_are_found() {
    let folder = std::env::temp_dir().join(format!("links-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let page = folder.join("page.md");
    fs::write(&page, "# One & two\n[a](#one--two) [b](#three) [c](gone.md) `[d](code.md)` [e](https://x)\n")
        .unwrap();
    let text = prose(&fs::read_to_string(&page).unwrap());
    let found: Vec<bool> = links(&text).iter().map(|link| follow(&page, link).is_ok()).collect();
    fs::remove_dir_all(&folder).unwrap();
    assert_eq!(found, [true, false, false, true]);
}
