//! `--twice`: repeats the build in a fresh clone and compares the artifacts.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};

use super::{CHANGED, Release, architecture::Architecture, name};
use crate::process::{root, run};

/// Builds everything again and compares. The clone is kept if a file differs.
pub(super) fn build_and_compare(release: &Release, architectures: &[Architecture]) -> Result<()> {
    ensure!(
        !release.commit.ends_with(CHANGED),
        "commit first: a clone contains only committed changes"
    );
    let staging = release.staging("again")?;
    let clone = staging.join("a-clone");
    run(Command::new("git")
        // Nothing but the commit gets into the second build.
        .args(["clone", "--quiet"])
        .arg(root())
        .arg(&clone))?;
    run(Command::new("git")
        .args(["checkout", "--quiet", "--detach", &release.commit])
        .current_dir(&clone))?;
    // Downloaded tools are not part of the comparison.
    symlink(root().join(".toolchain"), clone.join(".toolchain"))?;
    let out = clone.join("dist");
    println!("\nbuilding again from scratch in {}", clone.display());
    run(Command::new("cargo")
        .args(["xtask", "dist", "--out"])
        .arg(&out)
        .args(
            architectures
                .contains(&Architecture::Arm64)
                .then_some("--arm64"),
        )
        .env("SOURCE_DATE_EPOCH", release.epoch.to_string())
        // With it, cargo would find the first build's results and build nothing.
        .env_remove("CARGO_TARGET_DIR")
        .current_dir(&clone))?;
    let different = differences(&release.out, &out)?;
    if !different.is_empty() {
        bail!("different from {}: {}", out.display(), different.join(", "));
    }
    println!("\nthe second build is identical, byte for byte");
    fs::remove_dir_all(&staging).with_context(|| staging.display().to_string())
}

/// Returns the names of the files that differ or exist in only one folder.
fn differences(one: &Path, other: &Path) -> Result<Vec<String>> {
    let mut different = Vec::new();
    for file in file_names(one)?.union(&file_names(other)?) {
        let bytes = [one, other].map(|folder| fs::read(folder.join(file)).ok());
        if bytes[0].is_none() || bytes[0] != bytes[1] {
            different.push(name(file).into_owned());
        }
    }
    Ok(different)
}

fn file_names(folder: &Path) -> Result<BTreeSet<PathBuf>> {
    let entries = fs::read_dir(folder)?;
    entries.map(|entry| Ok(entry?.file_name().into())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differing_files_are_named() {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [one, other] = folders.each_ref().map(tempfile::TempDir::path);
        for (file, bytes) in [("same", ["a", "a"]), ("another", ["a", "b"])] {
            fs::write(one.join(file), bytes[0]).unwrap();
            fs::write(other.join(file), bytes[1]).unwrap();
        }
        fs::write(one.join("here"), "").unwrap();
        fs::write(other.join("there"), "").unwrap();
        assert_eq!(
            differences(one, other).unwrap(),
            ["another", "here", "there"]
        );
    }
}
