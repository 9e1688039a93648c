//! Reproducible folders, archives and checksums.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use super::{Release, name};
use crate::process::{capture, run};

/// Writes a file, creating its folders; `mode` as for chmod.
pub(crate) fn put(path: &Path, contents: impl AsRef<[u8]>, mode: u32) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    fs::write(path, contents).with_context(|| path.display().to_string())?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(mode))?)
}

/// Copies a file, creating its folders.
pub(super) fn copy(from: &Path, to: &Path, mode: u32) -> Result<()> {
    put(
        to,
        fs::read(from).with_context(|| from.display().to_string())?,
        mode,
    )
}

/// Packs all of `folder` into the tar `to`, sorted, with the release's date and owned by root.
pub(super) fn tar(release: &Release, folder: &Path, to: &Path) -> Result<()> {
    // Modes set by the umask would make the archives differ.
    run(Command::new("find")
        .arg(folder)
        .args(["-type", "d", "-exec", "chmod", "755", "{}", "+"]))?;
    run(Command::new("tar")
        .args([
            "--create",
            "--sort=name",
            // POSIX's format stores access times and the process number of tar.
            "--format=gnu",
            "--owner=0",
            "--group=0",
            "--numeric-owner",
        ])
        .arg(format!("--mtime=@{}", release.epoch))
        .arg("--file")
        .arg(to)
        .arg("--directory")
        .arg(folder)
        .arg("."))
}

/// Packs like [`tar`] and compresses with gzip, without name and time.
pub(super) fn tgz(release: &Release, folder: &Path, to: &Path) -> Result<()> {
    let plain = to.with_extension("tar");
    tar(release, folder, &plain)?;
    // Tests unpack each archive once; a release is downloaded by many.
    let effort = if release.is_trial { "--fast" } else { "--best" };
    gzip(&plain, effort)?;
    fs::rename(plain.with_extension("tar.gz"), to).with_context(|| to.display().to_string())
}

/// Compresses a file, whose name then ends with `.gz`.
pub(super) fn gzip(file: &Path, effort: &str) -> Result<()> {
    run(Command::new("gzip")
        // gzip stores the file's name and time otherwise.
        .args(["--no-name", effort, "--force"])
        .arg(file))
}

/// Returns the SHA-256 of a file in hexadecimal.
pub(super) fn sha256(file: &Path) -> Result<String> {
    let said = capture(Command::new("sha256sum").arg("--").arg(file))?;
    Ok(said
        .split_whitespace()
        .next()
        .context("sha256sum printed nothing")?
        .to_owned())
}

/// Writes SHA256SUMS for all files in a folder, in the format of `sha256sum --check`.
pub(super) fn sums(folder: &Path) -> Result<()> {
    let mut sums = String::new();
    for file in files(folder)? {
        sums += &format!("{}  {}\n", sha256(&file)?, name(&file));
    }
    put(&folder.join("SHA256SUMS"), sums, 0o644)
}

/// Returns the paths in a folder in order: readdir(3) has none, and what is made of them must be the same each time.
pub(super) fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        files.push(entry?.path());
    }
    files.sort();
    Ok(files)
}
