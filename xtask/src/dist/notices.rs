//! Licence texts and notices of every crate linked into the binaries, as the licences require.

use std::{collections::BTreeMap, fmt::Write, fs, path::PathBuf};

use anyhow::{Context, Result};

use crate::process::{cargo_metadata, root};

/// File names, in upper case, that hold licence texts or notices.
const PREFIXES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE"];

/// Returns all notices as one text. Crates with the same text share it.
pub(super) fn text() -> Result<String> {
    let metadata = cargo_metadata(&root(), &[])?;
    let mut crates_by_text: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in metadata["packages"].as_array().context("cargo metadata lists no packages")? {
        if package["source"].is_null() {
            continue;
        }
        let field = |name: &str| package[name].as_str().unwrap_or("unknown");
        let title = format!("{} {} ({})", field("name"), field("version"), field("license"));
        let manifest = PathBuf::from(field("manifest_path"));
        let folder = manifest.parent().context("a manifest without a folder")?;
        let mut files: Vec<PathBuf> = fs::read_dir(folder)
            .with_context(|| folder.display().to_string())?
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.is_file())
            .collect();
        files.sort();
        for file in files {
            let name = file.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
            if PREFIXES.iter().any(|prefix| name.starts_with(prefix)) {
                let bytes = fs::read(&file).with_context(|| file.display().to_string())?;
                let text = String::from_utf8_lossy(&bytes).trim().to_owned();
                crates_by_text.entry(text).or_default().push(title.clone());
            }
        }
    }
    let mut all = "Licences and notices of the Rust crates linked into these programs.\n".to_owned();
    for (text, mut titles) in crates_by_text {
        titles.dedup();
        // Writing to a String cannot fail.
        let _ = write!(all, "\n{0}\n{1}\n{0}\n\n{text}\n", "=".repeat(80), titles.join("\n"));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notices_cover_linked_crates() {
        let text = text().unwrap();
        for name in ["tokio ", "aya ", "ring "] {
            assert!(text.lines().any(|line| line.starts_with(name)), "{name} has no notice");
        }
    }
}
